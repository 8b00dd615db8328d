"""The driver's half of recording: which tickets are recorded, and the recorded episodes, fetched one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from attrs import define, evolve

from vla_rl.core.spec.spec import Spec
from vla_rl.core.types import Rollout
from vla_rl.runtime.comm.interfaces import RolloutInterface
from vla_rl.runtime.driver.collecting.assembler import RolloutBatch
from vla_rl.runtime.messages.requests import RecordingKey
from vla_rl.toolkit.data.recording import Recording, settings_in

if TYPE_CHECKING:
    from vla_rl.runtime.comm.handles import Fleet


@define(eq=False)
class FetchedRecordings:
    """Recorded episodes of a rollout or an evaluation, in the order of their tickets. When the iteration ends, all that
    was recorded up to its last ticket is forgotten. Steps consume tickets in the order of their numbers, so earlier
    ones are not asked for again."""

    fleet: Fleet
    what: str
    """ "rollout" or "evaluation"."""
    step: int
    keys: Sequence[tuple[int, RecordingKey]]
    """Worker of each episode's policy, and the key of its recording there."""

    def __iter__(self) -> Iterator[Recording]:
        fleet = self.fleet
        purpose = "action" if self.what == "rollout" else "evaluation"
        try:
            for worker, key in self.keys:
                recording = fleet.get(fleet.rollouts[worker].call(RolloutInterface.get_recording, purpose, key))
                if recording is not None:
                    number, episode = key
                    identity = f"{self.what} {self.step}, ticket {number}, episode {episode}, {recording.identity}"
                    yield evolve(recording, identity=identity)
        finally:
            last = max((number for _, (number, _) in self.keys), default=-1) if self.what == "rollout" else None
            rollouts = fleet.rollouts.values()
            fleet.get_all([rollout.call(RolloutInterface.forget_recordings, purpose, last) for rollout in rollouts])


def with_recordings(batch: RolloutBatch, fleet: Fleet, spec: Spec) -> Rollout:
    """Return the rollout of a batch, with the recordings of its tickets if the step is recorded."""
    rollout = batch.rollout
    settings = settings_in(spec.hooks)
    if settings is None or not settings.is_recorded("rollout", rollout.step):
        return rollout
    keys = [
        (worker, (number, 0)) for worker, number in zip(batch.workers.tolist(), batch.numbers.tolist(), strict=True)
    ]
    return rollout.evolve(recordings=FetchedRecordings(fleet, "rollout", rollout.step, keys))


class RecordingSchedule:
    """Schedule of the tickets of rollouts that are recorded: the first of a step, or all where some may be left out."""

    def __init__(self, spec: Spec) -> None:
        self.settings = settings_in(spec.hooks)
        self._counts: dict[int, int] = {}
        """Step -> its tickets so far."""

    def is_next_recorded(self, step: int) -> bool:
        """Return whether a ticket for this step is recorded."""
        settings = self.settings
        if settings is None or not settings.is_recorded("rollout", step):
            return False
        if settings.only != "all" or settings.max_episodes is None:
            return True
        self._counts = {counted_step: count for counted_step, count in self._counts.items() if counted_step >= step}
        count = self._counts[step] = self._counts.get(step, 0) + 1
        return count <= settings.max_episodes
