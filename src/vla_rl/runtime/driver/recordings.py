"""The driver's side of recording: which tickets are recorded, and their episodes, fetched one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from attrs import define, evolve

from vla_rl.core.spec.spec import Spec
from vla_rl.core.types import Rollout
from vla_rl.runtime.comm.interfaces import EnvInterface
from vla_rl.runtime.messages.requests import RecordingKey
from vla_rl.toolkit.data.recording import Recording, settings_in

if TYPE_CHECKING:
    from vla_rl.runtime.comm.handles import Fleet


@define(eq=False)
class FetchedRecordings:
    """Of a rollout or an evaluation, in the order of their tickets. When the iteration ends, all that was recorded for
    it is forgotten: steps consume tickets in the order of their numbers, so nobody asks for earlier ones again."""

    fleet: Fleet
    what: str
    """ "rollout" or "evaluation"."""
    step: int
    keys: Sequence[RecordingKey]

    def __iter__(self) -> Iterator[Recording]:
        sims = self.fleet.sims
        known = self.fleet.get_all([sim.call(EnvInterface.recorded, self.what) for sim in sims])
        places = {key: sim for sim, keys in zip(sims, known, strict=True) for key in keys}
        try:
            for key in self.keys:
                if key in places:
                    found = self.fleet.get(places[key].call(EnvInterface.recording, self.what, key))
                    number, episode = key
                    yield evolve(
                        found,
                        identity=f"{self.what} {self.step}, ticket {number}, episode {episode}, {found.identity}",
                    )
        finally:
            last = max((number for number, _ in self.keys), default=-1) if self.what == "rollout" else None
            self.fleet.get_all([sim.call(EnvInterface.forget_recordings, self.what, last) for sim in sims])


def of_rollout(fleet: Fleet, spec: Spec, rollout: Rollout, tickets: Sequence[int]) -> Rollout:
    """The rollout, with the recordings of these tickets where some were asked for."""
    settings = settings_in(spec.hooks)
    if settings is None or not settings.records("rollout", rollout.step):
        return rollout
    keys = [(number, 0) for number in tickets]
    return rollout.evolve(recordings=FetchedRecordings(fleet, "rollout", rollout.step, keys))


class RecordingSchedule:
    """Which tickets of rollouts are recorded: the first of a step, or where some are left out later, all."""

    def __init__(self, spec: Spec) -> None:
        self.settings = settings_in(spec.hooks)
        self._marked: dict[int, int] = {}

    def next(self, step: int) -> bool:
        """Of a ticket that is for this step: whether it is recorded."""
        settings = self.settings
        if settings is None or not settings.records("rollout", step):
            return False
        if settings.only != "all" or settings.max_episodes is None:
            return True
        self._marked = {known: count for known, count in self._marked.items() if known >= step}
        count = self._marked[step] = self._marked.get(step, 0) + 1
        return count <= settings.max_episodes
