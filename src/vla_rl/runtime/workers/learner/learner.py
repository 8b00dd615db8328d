"""The learner role: one rank of the learners, which train one model together."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from attrs import evolve
from torch import nn

from vla_rl.core.capabilities import TrainsInParts, require_capability
from vla_rl.core.hookspecs import Demonstrations, VLAModel
from vla_rl.core.spec.sections import TrainSpec
from vla_rl.core.trainers import (
    D,
    DemonstrationsData,
    ImitationStep,
    ModelInputs,
    OptimizerStep,
    SampleFields,
    Trainer,
    TrajectoryData,
    TrajectoryPart,
    TransitionsData,
    UpdateMetrics,
)
from vla_rl.core.types import Array, EnvInfo, Observation
from vla_rl.runtime.comm.interfaces import LearnerInterface
from vla_rl.runtime.comm.process_group import address_of, enter_group, open_listener
from vla_rl.runtime.comm.weight_transfer.connect import BUCKET_BYTES, open_sender
from vla_rl.runtime.comm.weight_transfer.ends import WeightSender
from vla_rl.runtime.messages.learning import SampleBatch, SampleRefs, SampleScores, ScoreRequest
from vla_rl.runtime.messages.weights import WeightLayout, WeightTransfer
from vla_rl.runtime.run_folder.env_info import write_env_info
from vla_rl.runtime.workers.learner.sample_buffer import SampleBuffer, transitions_of
from vla_rl.runtime.workers.learner.scoring import Scoring
from vla_rl.runtime.workers.learner.trainers import Trainers
from vla_rl.toolkit.data.samples import InMemoryDataset
from vla_rl.toolkit.models.checkpoints.files import check_same_weights, read_pickled
from vla_rl.toolkit.models.instructions import save_suffix
from vla_rl.toolkit.trainers.dummy_samples import dummy_sample
from vla_rl.toolkit.trainers.parallel import ParallelStrategy, SingleRank
from vla_rl.toolkit.trainers.trained_model import TrainedModel
from vla_rl.toolkit.trainers.trainer_state import load_owned_state, owned_state

IMPLEMENTATION = ("fused", "foreach", "capturable")
"""Options of an optimiser that depend on the device and not on the run."""


def save_state(
    trained: TrainedModel, trainers: Mapping[str, Trainer[Any]], version: int, rank: int, file: Path
) -> None:
    """Write the learners' checkpoint file, on the first rank; all ranks together where they hold shards: exact weights
    (masters, for weights that act in a narrower type), optimiser state and version, as full tensors for any number of
    learners, and what trainers own in addition to the policy."""
    if rank != 0 and not trained.strategy.lockstep:
        return
    strategy = trained.strategy
    weights = {name: strategy.full_tensor(tensor) for name, tensor in trained.parameters.items()}
    optimizer = trained.optimizer.state_dict()
    optimizer["state"] = _convert_state(lambda value, _: strategy.full_tensor(value), optimizer["state"])
    if rank == 0:
        owned = {name: state for name, trainer in trainers.items() if (state := owned_state(trainer))}
        state = {
            "weights": weights,
            "acting_types": {name: trained.acting_types[name] for name in weights},
            "optimizer": optimizer,
            "version": version,
            "trainers": owned,
        }
        suffix = trained.model.instruction_suffix
        torch.save(state | ({"instruction_suffix": suffix} if suffix else {}), file)


def load_state(trained: TrainedModel, trainers: Mapping[str, Trainer[Any]], file: Path) -> int:
    """Restore what `save_state` wrote; all ranks together. Return the version of the weights. Raises UserError for the
    weights of another model, or the state of another trainer."""
    state = read_pickled(file, ("weights", "optimizer", "version"))
    check_same_weights(state["weights"], trained.parameters, file)
    strategy = trained.strategy
    with torch.no_grad():
        for name, parameter in trained.parameters.items():
            parameter.copy_(strategy.local_shard(state["weights"][name], parameter))
    trained.master_weights.round_weights()
    parameters = [p for group in trained.optimizer.param_groups for p in group["params"]]
    optimizer = state["optimizer"]
    optimizer["state"] = _convert_state(
        lambda value, index: strategy.local_shard(value, parameters[index]), optimizer["state"]
    )
    # How this machine steps (fused, foreach) is its own, whatever machine saved the state.
    for saved, group in zip(optimizer["param_groups"], trained.optimizer.param_groups, strict=False):
        saved.update({name: group[name] for name in IMPLEMENTATION})
    trained.optimizer.load_state_dict(optimizer)
    for group in trained.optimizer.param_groups:
        group["weight_decay"] = trained.train.weight_decay
    for name, trainer in trainers.items():
        load_owned_state(trainer, state.get("trainers", {}).get(name, {}), str(file))
    return int(state["version"])


def _convert_state(
    convert: Callable[[Any, int], Any], state: Mapping[int, Mapping[str, Any]]
) -> dict[int, dict[str, Any]]:
    """Return an optimiser's state with `convert` applied to every value and the index of its parameter."""
    return {
        index: {name: convert(value, index) for name, value in of_parameter.items()}
        for index, of_parameter in state.items()
    }


class DataParallel(ParallelStrategy):
    """Data parallelism: the full model on every rank."""

    def __init__(self, world: int) -> None:
        self.world = world

    def reduce(self, parameters: Sequence[nn.Parameter]) -> None:
        """All-reduce in one flat buffer; a rank without samples adds zeros."""
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat = torch.cat([g.reshape(-1) for g in grads])
        torch.distributed.all_reduce(flat)
        start = 0
        for parameter, grad in zip(parameters, grads, strict=True):
            grad.copy_(flat[start : start + grad.numel()].view_as(grad))
            parameter.grad = grad
            start += grad.numel()


def strategy_for(train: TrainSpec, device: str, world: int) -> ParallelStrategy:
    """Return the strategy of `world` learners, not yet prepared; a single learner never shards its model."""
    if world == 1:
        return SingleRank()
    if train.sharding == "full":
        from vla_rl.runtime.workers.learner.parallel.fsdp import FullyShardedParallel  # loads for a second

        return FullyShardedParallel(device, world)
    return DataParallel(world)


class Learner(LearnerInterface):
    """One rank of the learners (role "learner"): its samples and its share of the updates."""

    def __init__(
        self,
        model: VLAModel,
        make_trainers: Callable[[TrainedModel], Trainers],
        train: TrainSpec,
        *,
        name: str,
        device: str,
        world: int,
        info: EnvInfo,
        acting: bool,
        heartbeat: Callable[[], None],
        demonstrations: Demonstrations | None = None,
        keeps_transitions: bool = False,
        replays: bool = False,
    ):
        """Create the optimiser and the trainers of a model.

        Args:
            make_trainers: builds the trainers of the rank.
            world: number of learners; if more than 1, each has to `join`.
            info: description of the env that the model was built for.
            acting: a policy acts with this model between calls.
            keeps_transitions: the trainer of what is collected learns from transitions, which it keeps.
            replays: groups are trained on more than once.
            heartbeat: called before each pass.
        """
        self.model = model
        self.rank = 0
        self.keeps_transitions = keeps_transitions
        self.replays = replays
        self.buffer = SampleBuffer()
        self.world = world
        self.trained = TrainedModel(model, train, name=name, device=device, info=info, acting=acting, world=world)
        self.trainers = make_trainers(self.trained)
        self._demonstrations = demonstrations
        self._recording = demonstrations
        """Demonstrations of the spec's data, which `set_demonstrations` does not replace."""
        self._scoring = Scoring(self.trained, self.buffer, heartbeat)
        self._listener: socket.socket | None = None
        """Listening socket of rank 0 for the other ranks, or for policies."""
        self._sender: WeightSender | None = None
        """End of the transfer to policies in other workers, on rank 0."""
        self._updated = False
        """A trainer made an update, or the run continues from a checkpoint."""
        self._look_at_states()

    def listen_for_ranks(self, host: str) -> str:
        """Open the listening socket of rank 0 at this address of the machine. Return the address for `join`."""
        self._listener = open_listener(host)
        return address_of(self._listener)

    def join_group(self, address: str, rank: int) -> None:
        if self.world == 1:
            return
        device = self.trained.device
        backend = "nccl" if device.startswith("cuda") else "gloo"
        enter_group(backend, address, rank, self.world, self._listener)
        self.rank = rank
        self.trained.join_ranks(strategy_for(self.trained.train, device, self.world))
        if self.trainers.collected is not None:
            self.trainers.collected.restart()
        self.trainers.demonstrations.restart()

    # --------------------------------------------------------------------------------------------------- samples

    def receive(self, policy: int, part: SampleBatch, copied: bool) -> None:
        self.buffer.add(policy, [deepcopy(part) if copied else part])

    def release_samples(self, sample_ids: Mapping[int, Array]) -> int:
        self.buffer.release_samples(sample_ids)
        return self.buffer.bytes

    def sample_bytes(self) -> int:
        if self.trained.strategy.lockstep:
            return self.trained.dummy_inputs.nbytes
        obs, chunk = dummy_sample(self.model, self.trained.info)
        return ModelInputs(obs=obs, actions=chunk.actions, extras=chunk.extras).nbytes

    # -------------------------------------------------------------------------------------------------- learning

    def score_samples(self, request: ScoreRequest) -> SampleScores:
        return self._scoring.answer_request(request)

    def update(
        self, step: int, refs: SampleRefs, fields: SampleFields, steps: Sequence[OptimizerStep]
    ) -> UpdateMetrics:
        version = step - 1  # the weights before this step
        data: TrajectoryData | TransitionsData
        if self.keeps_transitions:
            data = TransitionsData(
                step=step,
                version=version,
                transitions=transitions_of(self.buffer, refs, fields),
                demonstrations=self._recording,
            )
        else:
            rows = self.buffer.find_inputs(*refs)
            # Replayed groups are trained on more than once, so their samples stay in their batches.
            inputs = rows if self.replays else rows.take_all() if len(rows) else None
            data = TrajectoryData(step=step, version=version, inputs=inputs, fields=fields, steps=steps)
        return self._updated_by(self._rollout_trainer, data)

    def forward_backward(
        self,
        version: int,
        refs: SampleRefs,
        fields: SampleFields,
        micro_batches: Sequence[Array],
        passes: int,
        first: bool,
    ) -> None:
        trainer = require_capability(self._rollout_trainer, TrainsInParts, "asynchrony.streaming_update")
        rows = self.buffer.find_inputs(*refs)
        trainer.accumulate(
            TrajectoryPart(
                version=version,
                inputs=rows.take_all() if len(rows) else None,
                fields=fields,
                micro_batches=micro_batches,
                passes=passes,
                first=first,
            )
        )

    def _updated_by(self, trainer: Trainer[D], data: D) -> UpdateMetrics:
        """Let a trainer make an update. Return its metrics."""
        metrics = trainer.update(data)
        if not self._updated:
            self._look_at_states()
            self._updated = True
        return evolve(metrics, statistics={**metrics.statistics, **self.trained.weights_changed()})

    def _look_at_states(self) -> None:
        """Raises PluginError for a trainer whose state no checkpoint can hold, hours before there is one."""
        for trainer in self.trainers.named_trainers.values():
            trainer.state()

    @property
    def _rollout_trainer(self) -> Trainer[Any]:
        trainer = self.trainers.collected
        assert trainer is not None, "`vla-rl sft` collects nothing"
        return trainer

    def set_demonstrations(self, *demonstrations: tuple[Observation, Array] | None) -> None:
        samples = [samples for samples in demonstrations if samples is not None]
        self._demonstrations = InMemoryDataset(samples) if samples else None

    def behaviour_cloning_update(self, steps: Sequence[ImitationStep]) -> UpdateMetrics:
        data = DemonstrationsData(demonstrations=self._demonstrations, steps=steps)
        return self._updated_by(self.trainers.demonstrations, data)

    def forget_demonstrations(self) -> None:
        self._demonstrations = None
        # RL begins with moments of its own.
        self.trained.optimizer.state.clear()

    # -------------------------------------------------------------------------------------- weights and state

    def weight_layout(self) -> WeightLayout:
        kind = torch.device(self.trained.device).type
        return WeightLayout.of_weights(self.trained.published_weights(), BUCKET_BYTES[kind])

    def connect_policies(self, transfer: WeightTransfer) -> None:
        self._sender = open_sender(transfer, torch.device(self.trained.device), self._listener)
        self._listener = None

    def send_weights(self, check: bool) -> tuple[Array | None, dict[str, int]]:
        with self.trained.released():
            pairs = self.trained.gathered_weights()
            if self._sender is not None:
                return self._sender.send_version(pairs, check)
            for _ in pairs:
                """Only take part in gathering."""
            return None, {}

    def save(self, model_folder: Path | None, state_file: Path | None, version: int) -> None:
        with self.trained.full_weights():
            if self.rank == 0 and model_folder is not None:
                self.model.save(model_folder)
                save_suffix(self.model, model_folder)
                write_env_info(model_folder.parent, self.trained.info)
        if state_file is not None:
            save_state(self.trained, self.trainers.named_trainers, version, self.rank, state_file)

    def load(self, state_file: Path) -> int:
        with self.trained.released():
            version = load_state(self.trained, self.trainers.named_trainers, state_file)
        self._updated = True
        return version
