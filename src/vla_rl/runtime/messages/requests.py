"""Requests and answers of driver, simulators and policies in a rollout: episodes to run, chunk steps, trajectories."""

from __future__ import annotations

from attrs import define, evolve, field, frozen

from vla_rl.core.errors import StopAndSave, UserError, format_count
from vla_rl.core.reset_states import TaskWeights
from vla_rl.core.types import Array, Episode, Observation, ResetState
from vla_rl.toolkit.data.recording import Recording


class EnvError(UserError):
    """A simulator broke its contract, or was given something that it cannot accept."""


@frozen(kw_only=True, eq=False)
class EpisodeRequest:
    """An episode to start or to continue: the first one of a ticket, or a later one."""

    state: ResetState
    number: int
    """Number of the ticket; in an evaluation the number of the reset state."""
    episode: int = 0
    """Index of the episode within its ticket or stream; in an evaluation the index of the repeat."""
    env_id: int | None = None
    """Index in the run of the env whose stream this continues, which keys random numbers; None without auto_reset."""
    follows: int | None = None
    """Number of the stream's previous ticket; None if this process has none."""
    actions: Array | None = None
    """The episode's chunks before, float32 [T, C, A]. None: take them from the end of the previous ticket."""
    return_so_far: float = 0.0
    """Sum of the rewards of `actions`."""
    record: bool = False
    """Keep the frames of this episode."""
    recorded: bool = False
    """Record this episode as data, because one of the run's hooks asks for it."""
    weights: TaskWeights = None
    """Weights of the tasks from which later episodes of the ticket are drawn."""
    version: int = -1
    """Version of the policy's weights that act in the episode; below 0: the newest version at each chunk."""
    least: int = 0
    """Version of the policy's weights that must be loaded before the episode starts."""
    world: int | None = None
    """Version of the world model (the number of its updates), for an imagined episode."""
    expert_share: float = 0.0
    """Probability that the simulator's expert acts in a chunk instead of the policy."""

    def continued_from(self, cursor: EpisodeRequest) -> EpisodeRequest:
        """Return the ticket as it continues its stream from this position."""
        return evolve(
            self, state=cursor.state, episode=cursor.episode, actions=cursor.actions, return_so_far=cursor.return_so_far
        )

    @property
    def random_key(self) -> int:
        """Key of the episode's random numbers, together with `episode`."""
        return self.number if self.env_id is None else self.env_id


@frozen(kw_only=True, eq=False)
class EnvTrajectory:
    """The simulator's half of a finished ticket of T chunk steps."""

    number: int
    record: dict[str, Array]
    """Fields of the trajectory record that the simulator makes: rewards, terminated, truncated, valid [T, C]."""
    episodes: tuple[Episode, ...]
    """Episodes that ended within the ticket."""
    frames: dict[str, Array] | None
    """Frames of the last recorded episode, camera -> uint8 [F, H, W, 3]: the first, then one after each chunk."""
    recording: Recording | None = None
    """Recording of the ticket's episode, if a hook asks for it; the policy's worker takes it into its store."""
    after: EpisodeRequest | None = None
    """Where the ticket's stream continues; None where it belongs to no stream."""
    world: int | None = None
    """Version of the world model that made an imagined trajectory."""


@frozen(kw_only=True, eq=False)
class StepRequest:
    """Request of one lane to its policy (act on `obs`, value `final`), with the results of the last chunk step."""

    asking: Array
    """Six numbers for each env that needs a chunk, int64 [6, R]: `positions`, `ticket_numbers`, key of the policy's
    noise (with the next two), episode, `chunk_numbers`, `weight_versions`. One array is faster to send than six."""
    obs: Observation | None
    """Observations of these R envs."""
    ended: Array
    """`final_numbers` and `final_versions` of the envs whose last chunk needs a bootstrap value, int64 [2, F]."""
    final: Observation | None
    """Observations of these F envs: the final one where truncated, the next one at the end of a ticket."""
    finished: tuple[EnvTrajectory, ...]
    """Tickets that ended with the last chunk step."""
    again: tuple[tuple[int, int], ...]
    """(ticket, its chunk steps that remain valid) for each env that broke: later chunk steps are rolled out again."""
    steps: int
    """Chunk steps that the tickets of these envs have so far."""
    ending: int
    """Number of envs whose tickets certainly end with the next chunk."""
    waiting: int
    """Number of tickets that wait in the lane."""
    seconds: float
    """Seconds that the simulator took."""
    env_steps: int
    """Number of actions that the simulator executed."""
    replayed: int = 0
    """Number of further actions, executed to bring streams back to where they were."""
    restarted: int = 0
    """Number of streams that could not be brought back and started a new episode."""
    faults: tuple[str, ...] = ()
    """Descriptions of faults that were repaired."""

    @property
    def positions(self) -> Array:
        """int64 [R]: indices within the lane of the envs that need a chunk; empty when nothing is rolled out."""
        return _take_row(self.asking, 0)

    @property
    def ticket_numbers(self) -> Array:
        """int64 [R]: tickets of these envs."""
        return _take_row(self.asking, 1)

    @property
    def chunk_numbers(self) -> Array:
        return _take_row(self.asking, 4)

    @property
    def weight_versions(self) -> Array:
        """int64 [R]: versions of the weights that act; below 0: the newest."""
        return _take_row(self.asking, 5)

    @property
    def final_numbers(self) -> Array:
        """int64 [F]: tickets whose last chunk needs a bootstrap value."""
        return _take_row(self.ended, 0)

    @property
    def final_versions(self) -> Array:
        """int64 [F]: versions of the weights that compute the bootstrap value; below 0: the newest."""
        return _take_row(self.ended, 1)

    @property
    def done(self) -> bool:
        """True where the lane has nothing to roll out."""
        return not len(self.positions)


def _take_row(of: Array, index: int) -> Array:
    row: Array = of[index]
    return row


@define
class StreamCursors:
    """Cursor of each stream: the position after its last finished ticket that this process has seen."""

    last: dict[int, tuple[int, EpisodeRequest]] = field(factory=dict)
    """Env (index in the run) -> its last finished ticket, and the request from which its stream continues."""

    def note_ticket(self, ticket: EnvTrajectory) -> None:
        if ticket.after is not None:
            assert ticket.after.env_id is not None
            self.last[ticket.after.env_id] = ticket.number, ticket.after

    def with_position(self, start: EpisodeRequest) -> EpisodeRequest:
        """Return the ticket with the position from which it continues, if known; else the ticket itself."""
        if start.env_id is None or start.actions is not None:
            return start
        number, after = self.last.get(start.env_id, (None, start))
        return start.continued_from(after) if number == start.follows else start


RecordingKey = tuple[int, int]
"""Key of a recorded episode: the number of its ticket (in an evaluation of its reset state), and the episode."""


@frozen(kw_only=True)
class PolicyMode:
    """Settings of a policy for one purpose: greedy or sampled, and whether it keeps records for learning."""

    purpose: str
    greedy: bool
    keep: bool


def too_many_faults(count: int, limit: int, env: str, last: str) -> StopAndSave:
    """Return the error for more than `runtime.max_faults` faults; `last`: text of the last one."""
    return StopAndSave(
        f"env {env!r} broke {format_count(count, 'time')} (runtime.max_faults: {limit}); the last time:\n{last}"
    )
