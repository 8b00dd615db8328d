"""Behaviour cloning on all learners: before RL (`bc_warmup:`), and `vla-rl sft`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from vla_rl.core.errors import UserError
from vla_rl.core.randomness import generator
from vla_rl.core.spec.sections import ExpertSpec
from vla_rl.core.spec.spec import Spec
from vla_rl.core.types import Array
from vla_rl.runtime.comm.handles import Fleet, by_reference
from vla_rl.runtime.comm.interfaces import EnvInterface, LearnerInterface
from vla_rl.runtime.messages.learning import ImitationStep

PIECE = 10
"""Optimiser steps of one call. A run can be stopped between two calls."""


class BehaviourCloning:
    """Behaviour cloning of demonstrations that the learners hold; deterministic in seed and step."""

    def __init__(
        self, fleet: Fleet, seed: int, purpose: str, batch: int, samples: Sequence[Array], about: dict[str, float]
    ):
        """Describe the demonstrations.

        Args:
            seed, purpose: key of the order of samples.
            batch: samples of an optimiser step, over all ranks.
            samples: int64 [n] for each rank: indices of its samples.
            about: metrics of the demonstrations.
        """
        self._fleet, self._seed, self._purpose, self._samples, self.about = fleet, seed, purpose, samples, about
        self._batch = max(1, batch // len(samples))
        self.epoch = max(-(-len(own) // self._batch) for own in samples)
        """Optimiser steps of one pass over the demonstrations."""

    def size(self, step: int) -> int:
        """Return the samples of an optimiser step (from 1), over all ranks. The last step of an epoch has what is
        left.
        """
        start = (step - 1) % self.epoch * self._batch
        return sum(min(max(len(own) - start, 0), self._batch) for own in self._samples)

    def train(self, first: int, last: int, rate: Callable[[int], float], progress: Callable[[int], None]) -> float:
        """Make optimiser steps `first` to `last` (from 1, inclusive). Return the mean loss of a sample.

        Args:
            rate: optimiser step -> its learning rate.
            progress: called with the next optimiser step.
        """
        total = 0.0
        for start in range(first, last + 1, PIECE):
            progress(start)
            steps = [self.shares(k, rate(k)) for k in range(start, min(start + PIECE, last + 1))]
            pending = [
                learner.call(LearnerInterface.behaviour_cloning_update, [shares[rank] for shares in steps])
                for rank, learner in enumerate(self._fleet.learners)
            ]
            total += sum(self._fleet.get_all(pending))
        return total / sum(map(self.size, range(first, last + 1)))

    def shares(self, step: int, lr: float) -> list[ImitationStep]:
        """Return the shares of all ranks in an optimiser step (from 1)."""
        epoch, position = divmod(step - 1, self.epoch)
        chosen = []
        for rank, own in enumerate(self._samples):
            order = generator(self._seed, self._purpose, rank, epoch).permutation(len(own))
            chosen.append(own[order[position * self._batch : (position + 1) * self._batch]])
        most = max(map(len, chosen))
        return [ImitationStep(indices=own, total=self.size(step), most=most, lr=lr) for own in chosen]


def of_expert(fleet: Fleet, spec: Spec, expert: ExpertSpec, purpose: str, batch: int) -> BehaviourCloning:
    """Let the simulators' scripted expert act on all lanes. Its samples stay with the learner of the same worker, if
    there is one.

    Raises UserError when no episode succeeded.
    """
    per_lane = -(-expert.episodes // len(fleet.lanes))
    playing = {
        lane.index: fleet.sim_of[lane.index].call_for_two(EnvInterface.demonstrate, lane.index, per_lane, expert.noise)
        for lane in fleet.lanes
    }
    stats = {lane: fleet.get(found) for lane, (_, found) in playing.items()}
    samples, good, tried = (sum(s[i] for s in stats.values()) for i in range(3))
    if not samples:
        raise UserError(f"the expert of env {spec.env.type!r} solved none of {tried} episodes; nothing to clone")
    of_rank: list[list[int]] = [[] for _ in fleet.learners]
    for i, lane in enumerate(fleet.lanes):
        own = [r for r, learner in enumerate(fleet.learners) if learner.worker == fleet.sim_of[lane.index].worker]
        of_rank[own[0] if own else i % len(of_rank)].append(lane.index)
    fleet.get_all(
        [
            learner.call(LearnerInterface.set_demonstrations, *(by_reference(playing[lane][0]) for lane in lanes))
            for learner, lanes in zip(fleet.learners, of_rank, strict=True)
        ]
    )
    sizes = [sum(stats[lane][0] for lane in lanes) for lanes in of_rank]
    about = {"imitation/samples": float(samples), "imitation/expert_success": good / tried}
    return BehaviourCloning(fleet, spec.seed, purpose, batch, [np.arange(size) for size in sizes], about)


def of_data(fleet: Fleet, spec: Spec, count: int, purpose: str, batch: int) -> BehaviourCloning:
    """Use `count` samples of recorded demonstrations, which every learner has opened; each rank takes its share."""
    world = len(fleet.learners)
    samples = [np.arange(rank, count, world) for rank in range(world)]
    return BehaviourCloning(fleet, spec.seed, purpose, batch, samples, {"imitation/samples": float(count)})


def warm_up(fleet: Fleet, spec: Spec, progress: Callable[[str, int, int], None]) -> dict[str, float]:
    """Clone the simulator's scripted expert on all learners, as `bc_warmup:` says. Return metrics."""
    warm = spec.bc_warmup
    assert warm is not None
    progress("demonstrations", 0, warm.episodes)
    imitation = of_expert(fleet, spec, warm, "warm-up", warm.batch)
    epoch, loss = imitation.epoch, 0.0
    for e in range(warm.epochs):
        loss = imitation.train(
            e * epoch + 1,
            (e + 1) * epoch,
            lambda step: warm.lr,
            lambda step: progress("bc_warmup", (step - 1) // epoch, warm.epochs),
        )
    return {
        "bc_warmup/samples": imitation.about["imitation/samples"],
        "bc_warmup/expert_success": imitation.about["imitation/expert_success"],
        "bc_warmup/loss": loss,
    }
