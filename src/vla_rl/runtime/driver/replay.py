"""Index of the replay buffer: which groups a training step uses again, and how long they are kept. Pure; the samples
are on the learners (`sample_buffer.py`) and the records in the driver (`sample_router.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import define, field

from vla_rl.core.randomness import generator
from vla_rl.core.spec.sections import ReplaySpec


@define
class _Held:
    """A group in the buffer."""

    uses: int
    """Number of times that it was used so far."""
    oldest: int
    """Version of the weights that chose its oldest chunk."""


@define
class ReplayIndex:
    """Groups that were trained on and may be used again.

    `oldest` trains on all of them: each group is in the buffer for `uses - 1` trained steps after its own. So each is
    used exactly `uses` times, and the buffer holds at most `(uses - 1) * per_step` groups, whatever filters leave of
    single steps.
    `uniform` draws `uses - 1` times as many groups as are new, without replacement, with randomness keyed by (seed,
    step).
    """

    section: ReplaySpec
    capacity: int
    """Maximum number of groups in the buffer."""
    seed: int
    held: dict[int, _Held] = field(factory=dict, init=False)
    """Groups in the order in which they were added."""

    def expire(self, version: int) -> list[int]:
        """Drop the groups whose policy lag exceeds `max_lag` with these weights, and return them."""
        limit = self.section.max_lag
        return self._forget([g for g, held in self.held.items() if limit is not None and version - held.oldest > limit])

    def choose(self, step: int, new: int) -> list[int]:
        """Return the groups that `step` uses again besides `new` new ones, in the order of the buffer."""
        groups = list(self.held)
        if self.section.sampling == "oldest":
            return groups
        drawn = generator(self.seed, "replay", step).permutation(len(groups))[: (self.section.uses - 1) * new]
        return [groups[i] for i in sorted(drawn.tolist())]

    def trained(self, again: Sequence[int], new: Mapping[int, int]) -> list[int]:
        """Take note that a step has trained on the groups `again`, as chosen, and on new groups, each with the version
        of its oldest chunk.

        Return the groups that leave, including new ones where nothing is used twice.
        """
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
