"""Which groups a training step trains on again, and how long they are kept. Pure: what is kept of them lies with
learners (`buffer.py`) and driver (`supply.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import define, field

from vla_rl.core.randomness import generator
from vla_rl.core.spec.sections import ReplaySpec


@define
class _Held:
    uses: int
    """So far."""
    oldest: int
    """Version that chose its oldest chunk."""


@define
class ReplayIndex:
    """Groups that were trained on and may be again.

    `oldest` trains on all of them: each is in the buffer for `uses - 1` trained steps after its own. So each is used
    exactly `uses` times, and the buffer holds at most `(uses - 1) * per_step`, whatever filters leave of single steps.
    `uniform` draws `uses - 1` times as many as are new, without replacement, by randomness that (seed, step) key.
    """

    section: ReplaySpec
    capacity: int
    """Groups that it holds, at most."""
    seed: int
    held: dict[int, _Held] = field(factory=dict, init=False)
    """In the order of their numbers."""

    def expire(self, version: int) -> list[int]:
        """Forget the groups that are older than `max_age` with these weights. -> they."""
        limit = self.section.max_age
        return self._forget([g for g, held in self.held.items() if limit is not None and version - held.oldest > limit])

    def choose(self, step: int, new: int) -> list[int]:
        """The groups that `step` trains on again beside so many new ones, ascending."""
        groups = list(self.held)
        if self.section.sampling == "oldest":
            return groups
        drawn = generator(self.seed, "replay", step).permutation(len(groups))[: (self.section.uses - 1) * new]
        return [groups[i] for i in sorted(drawn.tolist())]

    def trained(self, again: Sequence[int], new: Mapping[int, int]) -> list[int]:
        """A step has trained on these: `again` as chosen, and new groups, each with the version of its oldest chunk.
        -> groups that leave, new ones included where nothing is used twice."""
        for group in again:
            self.held[group].uses += 1
        self.held |= {group: _Held(1, oldest) for group, oldest in new.items()}
        if self.section.sampling == "oldest":
            return self._forget([group for group, held in self.held.items() if held.uses >= self.section.uses])
        return self._forget(list(self.held)[: max(0, len(self.held) - self.capacity)])

    def _forget(self, groups: list[int]) -> list[int]:
        for group in groups:
            del self.held[group]
        return groups
