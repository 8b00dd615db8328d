"""Parts of `check_trainer`: what updates lead to (better actions, targets that follow), and how they are made."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from attrs import evolve
from torch import nn

from vla_rl.core.capabilities import TrainsInParts
from vla_rl.core.declarations import TrainingData
from vla_rl.core.trainers import TrajectoryData, TrajectoryPart
from vla_rl.core.types import Array
from vla_rl.testing.common.comparison import copy_weights, differing_weights
from vla_rl.testing.common.findings import Findings
from vla_rl.testing.trainer_case import SAMPLES, Rank, TrainerBuilder, TrainerCase
from vla_rl.testing.trainer_samples import LearningSource, bandit_data, bandit_observation, made_up_data

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
