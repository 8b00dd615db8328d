"""What rows play, what they ask of policies, and what comes of it."""

from __future__ import annotations

from attrs import frozen

from vla_rl.core.errors import UserError
from vla_rl.core.reset_states import TaskWeights
from vla_rl.core.types import Array, Episode, Observation, ResetState


class EnvError(UserError):
    """A simulator broke its contract, or was given what it cannot take."""


@frozen(kw_only=True, eq=False)
class EpisodeRequest:
    """An episode to be played, or to be gone on with: the first one of a ticket, or a further one."""

    state: ResetState
    number: int
    """Of the ticket; in an evaluation that of the state."""
    episode: int = 0
    """Its place among the episodes of its ticket or stream; in an evaluation the repeat."""
    row: int | None = None
    """With auto_reset the row of the run whose stream goes on with this ticket; its randomness is that of the row."""
    follows: int | None = None
    """The stream's ticket before; None: there is none in this process."""
    actions: Array | None = None
    """float32 [T, C, A]: chunks of the episode that were executed before. None: as the ticket before leaves them."""
    paid: float = 0.0
    """What they paid."""
    record: bool = False
    """Keep the frames of this episode."""
    recorded: bool = False
    """Keep it as data, as one of the run's hooks asks for it."""
    weights: TaskWeights = None
    """Of the tasks that the ticket's further episodes are drawn from."""
    version: int = -1
    """Of the policy's weights that act in it; below 0: at each chunk the newest."""
    least: int = 0
    """The version that has to be there before it starts."""
    world: int | None = None
    """Of an imagined one: the version of the world model, which is the number of its updates."""

    @property
    def key(self) -> int:
        """Of its random numbers, together with `episode`."""
        return self.number if self.row is None else self.row


@frozen(kw_only=True, eq=False)
class EnvTrajectory:
    """What came of a ticket of T chunk steps."""

    number: int
    light: dict[str, Array]
    """rewards, terminated, truncated, valid [T, C]."""
    episodes: tuple[Episode, ...]
    """Those that ended."""
    frames: dict[str, Array] | None
    """Camera -> uint8 [F, H, W, 3] of the last one that was recorded: the first observation, one after each chunk."""
    after: EpisodeRequest | None = None
    """Where its stream stands; None: it is of none."""
    world: int | None = None
    """Of an imagined one: the version of the world model that made it."""


@frozen(kw_only=True, eq=False)
class StepRequest:
    """What a policy is asked to do for one lane (act on `obs`, value `final`), and what the last chunk step brought."""

    asking: Array
    """int64 [6, R], of the rows that want a chunk, as one array for the way: `positions`, `numbers`, `keys`,
    `episodes`, `chunks`, `versions`."""
    obs: Observation | None
    """Of these R rows."""
    ended: Array
    """int64 [2, F], of those whose last chunk needs a bootstrap value: `final_numbers`, `final_versions`."""
    final: Observation | None
    """Of these F rows: final observation where truncated, next observation at the end of a ticket."""
    finished: tuple[EnvTrajectory, ...]
    """Tickets that ended with the last chunk step."""
    again: tuple[tuple[int, int], ...]
    """(ticket, chunk steps of it that stand) where a row broke: the others are played again."""
    steps: int
    """Chunk steps that the tickets of these rows have so far."""
    ending: int
    """Rows that surely end their tickets with the next chunk."""
    waiting: int
    """Tickets that wait in the lane."""
    seconds: float
    """That the simulator took for it."""
    env_steps: int
    """Actions that it executed."""
    replayed: int = 0
    """Further ones, to bring streams back to where they stood."""
    restarted: int = 0
    """Streams that could not be brought back, and began anew."""
    faults: tuple[str, ...] = ()
    """What broke and was repaired."""

    @property
    def positions(self) -> Array:
        """int64 [R]: lane rows that want a chunk; empty when the lane has nothing to play."""
        return _row(self.asking, 0)

    @property
    def numbers(self) -> Array:
        """int64 [R]: their tickets."""
        return _row(self.asking, 1)

    @property
    def keys(self) -> Array:
        """int64 [R]: with `episodes` and `chunks`, [R] too, key of the noise."""
        return _row(self.asking, 2)

    @property
    def episodes(self) -> Array:
        return _row(self.asking, 3)

    @property
    def chunks(self) -> Array:
        return _row(self.asking, 4)

    @property
    def versions(self) -> Array:
        """int64 [R]: of the weights that act; below 0: the newest."""
        return _row(self.asking, 5)

    @property
    def final_numbers(self) -> Array:
        """int64 [F]: tickets whose last chunk needs a bootstrap value."""
        return _row(self.ended, 0)

    @property
    def final_versions(self) -> Array:
        """int64 [F]: of the weights that value it; below 0: the newest."""
        return _row(self.ended, 1)

    @property
    def done(self) -> bool:
        """The lane has nothing to play."""
        return not len(self.positions)


def _row(of: Array, index: int) -> Array:
    row: Array = of[index]
    return row


RecordingKey = tuple[int, int]
"""Number of a ticket, or of an evaluation's state, and the episode."""


@frozen(kw_only=True)
class PolicyMode:
    """How a policy acts in a phase, and whether it keeps records for learning."""

    purpose: str
    greedy: bool
    keep: bool


def too_many_faults(count: int, limit: int, env: str, last: str) -> EnvError:
    return EnvError(f"env {env!r} broke {count} times (runtime.max_faults: {limit}); the last time:\n{last}")
