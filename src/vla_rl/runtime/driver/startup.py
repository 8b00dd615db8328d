"""Start of a run's workers: simulators, models, connections, and the group of learners."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from attrs import evolve, frozen

from vla_rl.core.catalogue import load
from vla_rl.core.errors import UserError
from vla_rl.core.plan import Plan
from vla_rl.core.run.runtime import Scaling
from vla_rl.core.spec.sections import ImitationSpec
from vla_rl.core.spec.spec import Spec, trains_on_transitions
from vla_rl.core.spec.yaml import dotted_path
from vla_rl.core.types import EnvInfo, ResetState
from vla_rl.runtime.comm.handles import Fleet
from vla_rl.runtime.comm.interfaces import EnvInterface, HostInterface, LearnerInterface, PolicyInterface
from vla_rl.runtime.driver.training.part import StepPart
from vla_rl.runtime.gpu_memory.checks import check_before_building
from vla_rl.runtime.messages.weights import WeightTransfer
from vla_rl.runtime.placement.weight_strategy import TransferNotPossible, WorkerLocation, choose_strategy

logger = logging.getLogger(__name__)


@frozen(kw_only=True)
class StartedRun:
    """What the driver learns from the workers as they start."""

    info: EnvInfo
    train_states: Sequence[ResetState]
    eval_states: Sequence[ResetState]
    recorded_samples: Sequence[int]
    """Samples of each data set that the learners opened; empty: none."""
    scaling: Scaling
    """Normalisation statistics of the model; None: its own."""


def start_workers(
    fleet: Fleet,
    spec: Spec,
    plan: Plan,
    *,
    imitation: bool,
    scaling: Scaling,
    parts: Sequence[StepPart],
    folder: Path | None,
    gpu_memory: int | None,
) -> StartedRun:
    """Start all roles of the workers, which the backend has created.

    Args:
        imitation: the learners open the data that the spec names.
        scaling: statistics that the model normalises by, if known; else those of that data, if the spec wants them.
        parts: parts of the training step, which may add roles to workers with simulators.
        folder: run folder; None: there is none.
        gpu_memory: bytes of a GPU; None: unknown. Raises UserError where models would not fit.
    """
    lanes = {lane.index: lane.num_envs for lane in fleet.lanes}
    starting = []
    for number, sim in enumerate(fleet.sims):
        added = [roles for part in parts if (roles := part.added_roles(number, lanes)) is not None]
        starting.append(fleet.worker_of(sim).call(HostInterface.start_sim, added))
    info = fleet.get_all(starting)[0]
    recorded_samples: list[int] = []
    reads_data = imitation or trains_on_transitions(spec)
    if reads_data and fleet.learners and spec.imitation is not None and spec.imitation.data is not None:
        recorded_samples = _open_data(fleet, spec.imitation, info)
        reader = fleet.worker_of(fleet.learners[0])
        recorded = fleet.get(reader.call(HostInterface.data_properties))
        info = evolve(  # models compare the names of their checkpoints with these
            info,
            action_names=info.action_names or recorded.action_names,
            state_names=info.state_names or recorded.state_names,
        )
        if imitation and spec.imitation.statistics == "data" and scaling is None:
            choose_references = load("model", spec.model.type, spec.plugins).relative_actions
            references = () if choose_references is None else choose_references(spec.model.config, info)
            scaling = fleet.get(reader.call(HostInterface.data_statistics, references))
    check_before_building(spec, plan, [worker.assignment for worker in fleet.workers], info, gpu_memory)
    hosts = [worker for worker in fleet.workers if {"policy", "learner"} & set(worker.assignment.slot.roles)]
    fleet.get_all([worker.call(HostInterface.start_model, info, scaling, imitation, folder) for worker in hosts])
    fleet.connect_policies([sim.worker_index for sim in fleet.sims])
    if len(fleet.learners) > 1:
        _join_learners(fleet)
    if fleet.learners and fleet.remote_policies:
        _connect_weights(fleet, spec)
    first_sim = fleet.sim_of[0]
    return StartedRun(
        info=info,
        eval_states=fleet.get(first_sim.call(EnvInterface.eval_states)),
        train_states=fleet.get(first_sim.call(EnvInterface.train_states)),
        recorded_samples=recorded_samples,
        scaling=scaling,
    )


def _open_data(fleet: Fleet, section: ImitationSpec, info: EnvInfo) -> list[int]:
    """Let all learners open the demonstrations. Return the number of samples of each data set that all of them have."""
    workers = [fleet.worker_of(learner) for learner in fleet.learners]
    counts = fleet.get_all([worker.call(HostInterface.open_data, info) for worker in workers])
    data_sets = [dotted_path(path) for path, _ in section.data_sets()]
    for part, of_set in zip(data_sets, zip(*counts, strict=True), strict=True):
        if len(data_sets) > 1 and len(set(of_set)) > 1:
            raise UserError(
                f"the learners read {' and '.join(map(str, sorted(set(of_set))))} samples of the same data set "
                f"({part}); give every node the same files"
            )
    return [min(of_set) for of_set in zip(*counts, strict=True)]


def _connect_weights(fleet: Fleet, spec: Spec) -> None:
    """Open the ends of the weight transfer from the first learner to other workers. Raises TransferNotPossible."""
    learner = fleet.learners[0]
    policies = fleet.remote_policies
    hosts = [fleet.worker_of(learner), *map(fleet.worker_of, policies)]
    locations = fleet.get_all([host.call(HostInterface.worker_location) for host in hosts])
    try:
        strategy = choose_strategy(spec.placement.weight_transfer, locations[0], locations[1:])
    except TransferNotPossible as exc:
        raise TransferNotPossible(f"placement.weight_transfer: {exc}") from exc
    fleet.through_store = strategy == "host" and not _on_one_machine(locations)
    transfer = WeightTransfer(
        strategy=strategy,
        through_store=fleet.through_store,
        layout=fleet.get(learner.call(LearnerInterface.weight_layout)),
        address="" if fleet.through_store else fleet.get(hosts[0].call(HostInterface.open_rendezvous)),
        learner=learner.worker_index,
        policies=tuple(policy.worker_index for policy in policies),
        deadline_s=spec.runtime.deadline_s,
    )
    logger.info("weights reach policies by strategy %s", strategy)
    connecting = [policy.call(PolicyInterface.connect_learner, transfer) for policy in policies]
    fleet.get_all([learner.call(LearnerInterface.connect_policies, transfer), *connecting])


def _on_one_machine(locations: Sequence[WorkerLocation]) -> bool:
    """Return whether these workers can share memory."""
    return locations[0].machine is not None and len({location.machine for location in locations}) == 1


def _join_learners(fleet: Fleet) -> None:
    """Let the learners form their process group."""
    address = fleet.get(fleet.worker_of(fleet.learners[0]).call(HostInterface.open_rendezvous))
    calls = [learner.call(LearnerInterface.join_group, address, learner.assignment.rank) for learner in fleet.learners]
    fleet.get_all(calls)
