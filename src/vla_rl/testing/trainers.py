"""`check_trainer`: does a trainer keep to the contract of `Trainer`, and do its updates lead to better actions?"""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from attrs import evolve
from torch import nn

from vla_rl.core.capabilities import TrainsInParts
from vla_rl.core.declarations import TrainerPlugin, TrainingData
from vla_rl.core.trainers import TrajectoryData, TrajectoryPart, UpdateMetrics
from vla_rl.core.types import Array
from vla_rl.testing.common.comparison import copy_weights, differing_weights, same_data
from vla_rl.testing.common.findings import Findings, Unfit
from vla_rl.testing.common.generators import expect_untouched, run_from
from vla_rl.testing.common.interpreter import start_interpreter
from vla_rl.testing.trainer_case import SAMPLES, Rank, TrainerBuilder, TrainerCase
from vla_rl.testing.trainer_inputs import check_drawn_batches, check_hashes, check_trainer_inputs, learning_source
from vla_rl.testing.trainer_samples import LearningSource, bandit_data, bandit_observation, made_up_data
from vla_rl.toolkit.algorithms.result_checks import find_reserved
from vla_rl.toolkit.trainers.master_weights import is_narrow
from vla_rl.toolkit.trainers.result_checks import OF_TRAINERS
from vla_rl.toolkit.trainers.trainer_state import POLICY, find_unreadable, load_owned_state, owned_state, save_and_load

SAVED = "give `state` numbers, texts, tensors, and lists and dictionaries of these: torch.from_numpy(array), int(count)"


def check_trainer(plugin: TrainerPlugin, config: Any = None) -> None:
    """Let a trainer make some updates of a small policy; raises CheckFailed with all findings.

    An update trains something and leaves its data alone; its result does not depend on global random generators;
    gradients depend neither on the size of micro-batches nor on the number of ranks; checkpoints hold all that an
    update depends on; no optimiser trains targets, which follow and lag behind. Other rewards, labels, ends or
    takeovers lead to other weights, and other hashes of strings to the same; batches are drawn anew. After some updates
    rewarded or demonstrated actions are likelier, and each network has moved.

    Args:
        plugin: trainer of trajectories, transitions, demonstrations or recordings; it is built with `config`.
        config: settings of the plugin; None: its defaults. With these a trainer of transitions makes an update once it
            has 8 of them, and each network is trained within 5 updates; one of recordings, within 6 optimiser steps.
    Raises ValueError for a trainer of windows.
    """
    if plugin.trains_on is TrainingData.WINDOWS:
        raise ValueError("a trainer of windows is checked with its world model: check_world_model")
    f = Findings(f"check_trainer of {plugin.summary!r}")
    start_interpreter()  # needed last, after some seconds of imports
    with tempfile.TemporaryDirectory() as root:
        _check_all(f, TrainerBuilder(plugin, config, root))
    f.close()


def _check_all(f: Findings, builder: TrainerBuilder) -> None:
    with f.section("parts"):
        _check_networks(f, builder.make_case())
    updates = False
    with f.section("update"):
        _check_update(f, builder)
        updates = True
    if not updates:
        return
    checks: dict[str, Callable[[Findings, TrainerBuilder], None]] = {
        "gradients": _check_gradients,
        "optimiser steps": check_optimizer_steps,
        "resume": _check_resume,
        "heartbeats": check_heartbeats,
        "critic warm-up": check_critic_warmup,
        "streaming update": check_parts,
        "learning": _check_learning,
    }
    for name, check in checks.items():
        with f.section(name):
            check(f, builder)
    if any(section.findings for section in f.sections):
        return  # the rest takes seconds
    with f.section("batches"):
        check_drawn_batches(f, builder, learning_source(builder))
    with f.section("other processes"):
        check_hashes(f, builder)


def _check_learning(f: Findings, builder: TrainerBuilder) -> None:
    learns_from = learning_source(builder)
    check_trainer_inputs(f, builder, learns_from)
    check_bandit(f, builder, learns_from)


def _check_networks(f: Findings, case: TrainerCase) -> None:
    modules = case.trainer.modules()
    optimizers = case.trainer.optimizers()
    targets = [p for module in case.trainer.targets().values() for p in module.parameters()]
    stepped = [p for part in optimizers.values() for group in part.param_groups for p in group["params"]]
    owned = {id(p) for module in modules.values() for p in module.parameters()}
    policy = modules.get(POLICY)
    holds, expected = policy is None or policy is case.trained.model.module, f"{POLICY!r} for the policy's own module"
    remedy = "return {'policy': training.trained.model.module, ...}, and other networks by other names"
    f.expect(holds, "modules", expected, type(policy).__name__, remedy)
    others, expected = {*map(id, stepped)} - owned, "parameters of `modules`, whose weights checkpoints hold"
    remedy = "return the network they are in from `modules`"
    f.expect(not others, "optimizers", expected, f"{len(others)} other parameters", remedy)
    common, expected = {*map(id, stepped)} & {*map(id, targets)}, "networks that no optimiser trains"
    remedy = "copy the trained network (copy.deepcopy) for its target"
    f.expect(not common, "targets", expected, f"{len(common)} of their parameters in an optimiser", remedy)
    narrow = sorted({str(p.dtype) for p in (*stepped, *targets) if is_narrow(p.dtype)})
    expected = "float32 weights in optimisers and targets, where small steps add up"
    remedy = "call .float() on your networks and on their targets"
    f.expect(not narrow, "optimizers", expected, ", ".join(narrow), remedy)


def _check_update(f: Findings, builder: TrainerBuilder) -> None:
    one = builder.make_case()
    before = one.copy_weights()
    data = made_up_data(one, 1)
    original = copy.deepcopy(data)
    ran = run_from(11, lambda: one.trainer.update(data))
    metrics, where = ran.result, "update"
    remedy = "return UpdateMetrics(sums={'loss/total': ...})"
    if not f.expect(isinstance(metrics, UpdateMetrics), where, "UpdateMetrics", type(metrics).__name__, remedy):
        raise Unfit
    numbers = {**metrics.sums, **metrics.maxima}
    others = {name: type(value).__name__ for name, value in numbers.items() if not isinstance(value, float | int)}
    texts = ", ".join(f"{name} of {kind}" for name, kind in others.items())
    if not f.expect(not others, where, "metrics that are numbers", texts, "call float on tensors"):
        raise Unfit
    taken = sorted(set(find_reserved(numbers)) - OF_TRAINERS)
    f.expect(not taken, where, "metrics of names that are free", taken, "the runtime writes these names itself")
    wrong = [name for name, value in numbers.items() if not math.isfinite(value)]
    f.expect(not wrong, where, "finite metrics", ", ".join(wrong), "look for a division by a count of 0")
    named = not one.is_cloning or "loss/imitation" in metrics.sums
    expected = "the metric 'loss/imitation', the sum of the losses of this rank's samples"
    f.expect(named, where, expected, sorted(metrics.sums), "return it in `sums`")
    after = one.copy_weights()
    moves = bool(differing_weights(before, after))
    f.expect(moves, where, "other weights than before", "the same in all modules", "make an optimiser step")
    same = same_data(data, original)
    f.expect(same, where, "data that stay as they are", "changed data", "copy what you change")
    other = builder.make_case()
    again = run_from(12, lambda: other.trainer.update(made_up_data(other, 1)))
    expect_untouched(f, where, ran.changed_generators)
    differ = differing_weights(after, other.copy_weights())
    expected = "the same weights and metrics for the same data, whatever the global generators did before"
    got = f"others in {differ[:3] or 'the metrics'}"
    remedy = "key random numbers by the seed and the number of the update (vla_rl.generator)"
    f.expect(not differ and again.result.sums == metrics.sums, where, expected, got, remedy)


def _check_gradients(f: Findings, builder: TrainerBuilder) -> None:
    """Check that the sum of gradients does not depend on the division into micro-batches and ranks."""
    everything = np.arange(SAMPLES)
    expected = _first_gradients(builder, SAMPLES, everything)
    text = "gradients that are added up over the ranks before each optimiser step"
    if not f.expect(bool(expected), "update", text, "no reduction", "call TrainedModel.optimizer_step"):
        return
    same = gradients_close(expected, _first_gradients(builder, 3, everything))
    text = "the same gradients however the samples are split into micro-batches"
    remedy = "divide each micro-batch's sum by the count of the whole optimiser step, not by its own"
    f.expect(same, "update", text, "others", remedy)
    if builder.make_case().kind is TrainingData.TRANSITIONS:
        return  # each rank draws from separate transitions
    ranks = [_first_gradients(builder, SAMPLES, samples) for samples in (everything[:2], everything[2:])]
    same = all(ranks) and gradients_close(expected, [one + other for one, other in zip(*ranks, strict=True)])
    text = "gradients of two ranks that add up to those of one rank with all samples"
    f.expect(same, "update", text, "others", "divide by the count of all ranks, which the data tell")


def _first_gradients(builder: TrainerBuilder, micro_batch: int, samples: Array) -> list[torch.Tensor]:
    """Return a rank's gradients of the first optimiser step on these of all samples."""
    rank = Rank()
    case = builder.make_case(micro_batch, strategy=rank)
    if case.kind is TrainingData.TRANSITIONS:
        rank.world = 1
    case.trainer.update(made_up_data(case, 1, None if case.kind is TrainingData.TRANSITIONS else samples))
    return rank.reductions[0] if rank.reductions else []


def _check_resume(f: Findings, builder: TrainerBuilder) -> None:
    through = builder.make_case()
    for number in (1, 2):
        through.trainer.update(made_up_data(through, number))
    state = owned_state(through.trainer)
    unread, expected = find_unreadable(state), "what a checkpoint can hold (torch.load with weights_only)"
    got = "" if unread is None else f"a {unread[1]} at {unread[0]}"
    if not f.expect(unread is None, "state", expected, got, SAVED):
        raise Unfit
    saved = save_and_load(state)
    policy = copy.deepcopy(through.trained.model.module.state_dict())
    optimizer = copy.deepcopy(through.trained.optimizer.state_dict())
    resumed = builder.make_case(files=through.folder)
    resumed.trained.model.module.load_state_dict(policy)
    resumed.trained.optimizer.load_state_dict(optimizer)
    load_owned_state(resumed.trainer, saved, "the state of this trainer")
    results = [case.trainer.update(made_up_data(case, 3)) for case in (through, resumed)]
    differ = differing_weights(through.copy_weights(), resumed.copy_weights())
    got = f"other weights in {differ[:3]}" if differ else "other metrics"
    expected = "the same third update after a checkpoint as without one"
    remedy = "return networks from `modules` or `targets`, optimisers from `optimizers`, and counters from `state`"
    f.expect(not differ and results[0].sums == results[1].sums, "resume", expected, got, remedy)


UPDATES = 5
"""Updates of a bandit; those of transitions are three."""
LEAST = 1e-5
"""Least difference of what two bandits teach, as a share of half an action's range: 1e-3 in a few updates of SAC."""
TOLERANCE = 1e-5
"""Tolerance on gradients, relative to the largest: sums in another order."""


# --------------------------------------------------------------------------------------------------------- bandits


def check_bandit(f: Findings, builder: TrainerBuilder, learns_from: LearningSource) -> None:
    """Train on two bandits that reward opposite actions. All else is equal in them, random numbers too."""
    updates = 3 if builder.kind is TrainingData.TRANSITIONS else UPDATES
    one, other = (_trained_case(f, builder, learns_from, good, updates) for good in (1, -1))
    states = np.tile([1, -1], 8)
    obs = bandit_observation(one.trained.info, states, 0)
    preference = float(((one.mean_leaning(obs) - other.mean_leaning(obs)) * torch.from_numpy(states)).mean())
    got = "no change" if abs(preference) <= LEAST else f"one that leaves it (by {-preference:.2g} of half a range)"
    expected = f"a policy that comes nearer to what is rewarded, labelled or demonstrated, within {updates} updates"
    remedy = "mind the sign of the loss, and that observations, actions and rewards of one sample stay together"
    f.expect(preference > LEAST, "update", expected, got, remedy)


def _trained_case(
    f: Findings, builder: TrainerBuilder, learns_from: LearningSource, good: int, updates: int
) -> TrainerCase:
    """Return a trainer after some updates. Record findings on networks that do not move, and on targets."""
    case = builder.make_case(SAMPLES)
    modules, targets = dict(case.trainer.modules()), dict(case.trainer.targets())
    first = {name: copy_weights(module) for name, module in modules.items()}
    follows = {name: _Following(name, target, modules) for name, target in targets.items()}
    data = None
    for number in range(1, updates + 1):
        data = bandit_data(case, number, good, learns_from, data.demonstrations if case.is_cloning and data else None)
        case.trainer.update(data)
        for following in follows.values():
            following.compare_networks()
    for name, module in modules.items():
        moves = bool(differing_weights(first[name], module.state_dict()))
        expected = f"other weights of {name!r} after {updates} updates"
        remedy = "train what `modules` returns; for this check give settings that make it begin at once"
        f.expect(moves, "modules", expected, "the same", remedy)
    for following in follows.values():
        following.check_following(f, updates)
    return case


class _Following:
    """A target network, and the trained one that has its shapes."""

    def __init__(self, name: str, target: nn.Module, modules: dict[str, nn.Module]) -> None:
        self._name = name
        self._target = target
        self._first = copy_weights(target)
        self._trained = _same_shapes(target, [*([modules[name]] if name in modules else []), *modules.values()])
        self._lags = self._trained is None

    def compare_networks(self) -> None:
        """Compare the two after an update."""
        if self._trained is not None:
            self._lags |= bool(differing_weights(self._target.state_dict(), self._trained.state_dict()))

    def check_following(self, f: Findings, updates: int) -> None:
        now = self._target.state_dict()
        remedy = "let it follow after each update (vla_rl.toolkit.trainers.critics.update_target)"
        moves = bool(differing_weights(self._first, now))
        expected = f"other weights of {self._name!r} after {updates} updates"
        if not f.expect(moves, "targets", expected, "the same", remedy) or self._trained is None:
            return
        expected = f"{self._name!r} to move less than the network that it follows"
        f.expect(self._lags, "targets", expected, "equal weights after each update", remedy)
        goal = self._trained.state_dict()
        along = sum(
            float(((now[name] - tensor) * (goal[name] - tensor)).sum())
            for name, tensor in self._first.items()
            if tensor.is_floating_point()
        )
        expected = f"{self._name!r} to move towards the network that it follows"
        f.expect(along > 0, "targets", expected, "a move away from it", remedy)


def _same_shapes(target: nn.Module, modules: list[nn.Module]) -> nn.Module | None:
    """Return the first of these networks whose weights have the names and shapes of the target's."""
    shapes = {name: tensor.shape for name, tensor in target.state_dict().items()}
    return next((m for m in modules if {name: t.shape for name, t in m.state_dict().items()} == shapes), None)


# ------------------------------------------------------------------------------------------------------ heartbeats


def check_heartbeats(f: Findings, builder: TrainerBuilder) -> None:
    """Count heartbeats: more passes have more of them."""
    counts = []
    for micro_batch in (SAMPLES, 2):
        case = builder.make_case(micro_batch)
        for number in (1, 2):
            case.trainer.update(made_up_data(case, number, steps=2))
        counts.append(len(case.heartbeats))
    got = f"{counts[0]} with micro-batches of {SAMPLES}, {counts[1]} with micro-batches of 2"
    remedy = "call `TrainerContext.heartbeat` before each pass: a learner without one is reported as hung"
    f.expect(0 < counts[0] < counts[1], "update", "a heartbeat before each pass", got, remedy)


# --------------------------------------------------------------------------------------------------- optimiser steps


def check_optimizer_steps(f: Findings, builder: TrainerBuilder) -> None:
    """Check that an optimiser step has the gradients of its samples alone."""
    given = builder.kind in (TrainingData.TRAJECTORIES, TrainingData.DEMONSTRATIONS)
    if not given or len(builder.make_case().trainer.modules()) > 1:
        return  # networks that learn at separate rates change the second step
    gradients = []
    for alone in (True, False):
        rank = Rank()
        case = builder.make_case(strategy=rank, train={"lr": 1e-12})
        data = made_up_data(case, 1, steps=2)
        if case.is_cloning:
            data = evolve(data, steps=[evolve(step, lr=0.0) for step in data.steps])
        case.trainer.update(evolve(data, steps=data.steps[1:]) if alone else data)
        gradients.append(rank.reductions[-1])
    holds = bool(gradients[0]) and gradients_close(*gradients)
    expected = "an optimiser step with the gradients of its samples alone"
    f.expect(holds, "update", expected, "others too", "set gradients to zero before each optimiser step")


def gradients_close(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """Return whether gradients are equal but for the order of sums."""
    scale = max((float(tensor.abs().max()) for tensor in one), default=0.0)
    atol = TOLERANCE * max(scale, 1e-30)
    return len(one) == len(other) and all(
        torch.allclose(a, b, rtol=0, atol=atol) for a, b in zip(one, other, strict=True)
    )


# --------------------------------------------------------------------------------------------------- trajectories


def check_critic_warmup(f: Findings, builder: TrainerBuilder) -> None:
    """Check that the first training steps train the critic alone, if train.critic_warmup_steps says so."""
    if builder.kind is not TrainingData.TRAJECTORIES:
        return
    case = builder.make_case(train={"critic_warmup_steps": 1})
    first = copy_weights(case.trained.model.module)
    case.trainer.update(made_up_data(case, 1))
    changed = [name for name, p in case.trained.parameters.items() if not torch.equal(first[name], p)]
    others = [name for name in changed if name not in case.trained.critic_names]
    remedy = "call TrainedModel.optimizer_step with critic_only, up to train.critic_warmup_steps"
    f.expect(not others, "update", "a policy that stays as it is while the critic warms up", others, remedy)


def check_parts(f: Findings, builder: TrainerBuilder) -> None:
    """Check that samples that come in parts give the gradients of the whole, also after a step that was given up."""
    if builder.kind is not TrainingData.TRAJECTORIES:
        return
    gradients = []
    for parts, given_up in ((0, False), (2, False), (2, True)):
        rank = Rank()
        case = builder.make_case(strategy=rank)
        trainer = case.trainer
        if not isinstance(trainer, TrainsInParts):
            return
        data = made_up_data(case, 1)
        if given_up:
            trainer.accumulate(next(_split_parts(made_up_data(case, 2), 2)))
            case.trainer.restart()
        if parts:
            for part in _split_parts(data, parts):
                trainer.accumulate(part)
            step = evolve(data.steps[0], micro_batches=(), passes=0, accumulated=True)
            data = evolve(data, inputs=None, fields={}, steps=[step])
        case.trainer.update(data)
        gradients.append(rank.reductions[0])
    same = gradients_close(gradients[0], gradients[1])
    expected = "the gradients of all samples where they come in parts"
    f.expect(same, "accumulate", expected, "others", "add up the gradients of all parts")
    same = gradients_close(gradients[0], gradients[2])
    remedy = "forget samples and gradients"
    f.expect(same, "restart", "nothing of the samples before it", "their gradients", remedy)


def _split_parts(data: TrajectoryData, count: int) -> Iterator[TrajectoryPart]:
    """Yield the samples of a training step in parts."""
    assert data.inputs is not None
    for index, rows in enumerate(np.array_split(np.arange(len(data.inputs)), count)):
        fields: dict[str, Array | None] = {name: None if a is None else a[rows] for name, a in data.fields.items()}
        yield TrajectoryPart(
            version=data.version,
            inputs=data.inputs.take(rows),
            fields=fields,
            micro_batches=(np.arange(len(rows)),),
            passes=1,
            first=index == 0,
        )
