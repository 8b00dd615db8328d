"""Replay buffer, the driver's half: which groups a training step uses again, how long they are kept, and their
trajectory records. Their samples are with the learners (`sample_buffer.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import define, field, frozen

from vla_rl.core.randomness import generator
from vla_rl.core.run.selection import take_columns
from vla_rl.core.spec.sections import ReplaySpec
from vla_rl.core.types import Array, Rollout
from vla_rl.runtime.driver.collecting.assembler import RolloutBatch


@define
class _Group:
    """A group in the buffer."""

    uses: int
    """Number of times that it was used so far."""
    oldest_version: int
    """Version of the weights that chose its oldest chunk."""


@define
class ReplayIndex:
    """Groups that were trained on and may be used again.

    Without a capacity a step trains on all of them, and each is in the buffer for `uses - 1` trained steps after its
    own: it is used exactly `uses` times. With one a step draws `uses - 1` times as many groups as are new, without
    replacement, by random numbers of (seed, step).
    """

    section: ReplaySpec
    capacity: int
    """Maximum number of groups in the buffer."""
    seed: int
    groups: dict[int, _Group] = field(factory=dict, init=False)
    """Groups in the order in which they were added."""

    def drop_expired(self, version: int) -> list[int]:
        """Drop the groups whose policy lag exceeds `max_lag` with these weights, and return them."""
        limit = self.section.max_lag
        if limit is None:
            return []
        return self._drop_groups(
            [number for number, group in self.groups.items() if version - group.oldest_version > limit]
        )

    def choose_groups(self, step: int, new: int) -> list[int]:
        """Return the groups that `step` uses again besides `new` new ones, in the order of the buffer."""
        groups = list(self.groups)
        if self.section.capacity is None:
            return groups
        # One of the `uses` times that a group is trained on is when it is new.
        drawn = generator(self.seed, "replay", step).permutation(len(groups))[: (self.section.uses - 1) * new]
        return [groups[i] for i in sorted(drawn.tolist())]

    def record_use(self, repeated: Sequence[int], new: Mapping[int, int]) -> list[int]:
        """Record that a step has trained on groups `repeated` and new ones, by their oldest chunks' versions. Return
        the groups that leave, including new ones where nothing is used twice."""
        for number in repeated:
            self.groups[number].uses += 1
        self.groups |= {number: _Group(1, oldest_version) for number, oldest_version in new.items()}
        if self.section.capacity is None:
            return self._drop_groups(
                [number for number, group in self.groups.items() if group.uses >= self.section.uses]
            )
        return self._drop_groups(list(self.groups)[: max(0, len(self.groups) - self.capacity)])

    def _drop_groups(self, numbers: list[int]) -> list[int]:
        for number in numbers:
            del self.groups[number]
        return numbers


@frozen(kw_only=True)
class ReplayChanges:
    """Changes of the buffer at the end of a step."""

    kept_tickets: Sequence[int] = ()
    """Tickets of the step that stay in the buffer."""
    dropped: Sequence[RolloutBatch] = ()
    """Groups of earlier steps that leave it."""


class ReplayBuffer:
    """Trajectory records of the groups that may be used again: a training step trains on some, besides its new ones."""

    def __init__(self, index: ReplayIndex) -> None:
        self.index = index
        self.batches: dict[int, RolloutBatch] = {}
        """Group -> its columns."""
        self._new: dict[int, int] = {}
        """New groups of the running step -> version of the weights that chose the oldest chunk."""
        self._repeated: list[int] = []
        """Groups that the step uses again."""
        self._expired: list[int] = []

    def draw_groups(self, version: int, new: RolloutBatch) -> list[RolloutBatch]:
        """Return earlier groups that this step trains on again, and store `new`. `version`: of the learners."""
        self._expired = self.index.drop_expired(version)
        self._repeated = self.index.choose_groups(new.rollout.step, len(new.rollout.groups.unique()))
        repeated = [self.batches[group] for group in self._repeated]
        self._store_groups(new, version)
        return repeated

    def end_step(self, trained: bool) -> ReplayChanges:
        """End the step. `trained`: False where it had nothing to train on."""
        leaving = [*self._expired, *(self.index.record_use(self._repeated, self._new) if trained else ())]
        dropped = [self.batches.pop(group) for group in leaving if group in self.batches]
        kept_tickets = [
            ticket for group in self._new if group in self.batches for ticket in self.batches[group].numbers
        ]
        self._new = {}
        self._repeated = []
        self._expired = []
        return ReplayChanges(kept_tickets=kept_tickets, dropped=dropped)

    def batch_metrics(self, rollout: Rollout, repeated: Array, version: int) -> dict[str, float]:
        """Return the metrics of what a step trains on; `repeated`: bool [N], columns that are used again."""
        samples = rollout.samples.numpy()
        lags = (version - rollout.versions.numpy())[:, repeated][samples[:, repeated]]
        metrics = {"replay/share": len(lags) / float(samples.sum())}
        if len(lags):
            metrics["replay/lag_mean"] = float(lags.mean())
            metrics["replay/lag_max"] = float(lags.max())
        return metrics

    def _store_groups(self, new: RolloutBatch, version: int) -> None:
        """Store the trajectory records of a step's new groups."""
        rollout = new.rollout
        oldest_versions = rollout.versions.masked_fill(~rollout.samples, version).amin(0)
        for group in rollout.groups.unique().tolist():
            columns = (rollout.groups == group).nonzero().flatten().numpy()
            self._new[group] = int(oldest_versions[columns].min())
            self.batches[group] = new.cut_columns(take_columns(rollout, columns).evolve(episodes=()), columns)
