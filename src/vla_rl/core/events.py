"""Data that listeners (`RunEvents`) receive: the run, and evaluations with their frames."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attrs import field, frozen

from vla_rl.core.types import ArrayOrTensor, Episode


@frozen(kw_only=True)
class Rate:
    """A success rate with its 95 % Wilson interval."""

    rate: float
    n: int
    low: float
    high: float


@frozen(kw_only=True)
class Interventions:
    """How much a person or an expert acted instead of the policy in some episodes."""

    rate: float
    """Share of the environment steps whose action another source chose."""
    episodes: float
    """Share of the episodes with at least one such step."""
    unaided: Rate
    """Rate of the episodes that succeeded without any."""


@frozen(kw_only=True, eq=False)
class EpisodeFrames:
    """Camera frames of one evaluation episode: the first observation and one after each chunk."""

    task: str
    instruction: str
    success: bool
    images: Mapping[str, ArrayOrTensor]
    """Images by camera, uint8 [frames, H, W, 3]."""


@frozen(kw_only=True)
class MissingEpisode:
    """An episode of an evaluation without a result, because its reset state breaks envs."""

    task: str
    state: int
    """Id of the reset state."""
    episode: int
    """Index of the repeat."""


@frozen(kw_only=True, eq=False)
class Evaluation:
    """Result of one evaluation: each evaluation state of each task once per repeat."""

    step: int
    success: Rate
    tasks: Mapping[str, Rate]
    repeats: tuple[float, ...]
    """Success rate of each repeat."""
    episodes: tuple[Episode, ...]
    seconds: float
    frames: tuple[EpisodeFrames, ...] = ()
    recordings: Iterable[Any] = ()
    """Recorded episodes, as in `Rollout.recordings`."""
    missing: tuple[MissingEpisode, ...] = ()
    """Episodes without a result, which no rate counts: neither as a success nor as a failure."""
    categories: Mapping[str, Rate] = field(factory=dict)
    """Success of the categories that tasks belong to (`TaskInfo.categories`), sorted by name; empty: there are none."""

    @property
    def interventions(self) -> Interventions | None:
        """How much others acted instead of the policy; None: no one can take over."""
        return interventions_of(self.episodes)

    @property
    def immediate_successes(self) -> tuple[Episode, ...]:
        """Episodes that succeeded with their first action, as they do from a state that is solved already."""
        return tuple(episode for episode in self.episodes if episode.success_once and episode.steps == 1)


@frozen(kw_only=True)
class Run:
    """Facts about a run that its listeners may use."""

    name: str
    mode: str = "training"
    """Kind of run: "training" by reinforcement learning, or "imitation"."""
    folder: Any
    """Run folder, a pathlib.Path; in an evaluation that of the checkpoint, and Path() for the model of a spec."""
    spec: Mapping[str, Any]
    """The resolved spec as plain data."""
    first_step: int
    """Step that the run starts from: 0, or the checkpoint's step in a resumed run."""
    steps: int
    """Step at which the run ends."""
    devices: str = ""
    """Device of each role, such as "sim cpu x2, policy cuda:0, learner cuda:0-3 (NVIDIA H200)"."""
    _stop_reasons: list[str] = field(factory=list, init=False, repr=False)

    def stop(self, reason: str) -> None:
        """Let the run end after its current step as after its last one: evaluated and saved. A resumed run goes on."""
        self._stop_reasons.append(reason)

    @property
    def stop_reason(self) -> str | None:
        """The first reason that a listener gave to `stop`; None: the run goes to its last step."""
        return next(iter(self._stop_reasons), None)


class ReadOnly(dict[str, Any]):
    """A read-only dict. Listeners share it, so none of them can change what the others receive."""

    def _refuse_change(self, *_: Any, **__: Any) -> Any:
        raise TypeError("what listeners hear is read-only, since all hear the same; make a copy, as dict(metrics)")

    __setitem__ = __delitem__ = __ior__ = _refuse_change
    update = pop = popitem = setdefault = clear = _refuse_change

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def wilson_interval(successes: int, n: int, z: float = 1.959963984540054) -> Rate:
    """Return the success rate with its 95 % interval by Wilson (1927); n = 0 gives the interval [0, 1]."""
    if n == 0:
        return Rate(rate=0.0, n=0, low=0.0, high=1.0)
    p = successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    # At 0 and n successes the bounds are 0 and 1, which rounding misses.
    return Rate(
        rate=p, n=n, low=0.0 if successes == 0 else centre - half, high=1.0 if successes == n else centre + half
    )


def interventions_of(episodes: Sequence[Episode]) -> Interventions | None:
    """Return how much others acted in these episodes; None where no one can take over, and without episodes."""
    counts = [episode.interventions for episode in episodes if episode.interventions is not None]
    if not counts:
        return None
    return Interventions(
        rate=sum(counts) / max(sum(episode.steps for episode in episodes), 1),
        episodes=sum(count > 0 for count in counts) / len(counts),
        unaided=wilson_interval(sum(episode.unaided_success for episode in episodes), len(episodes)),
    )


def late_actions_of(episodes: Sequence[Episode]) -> float | None:
    """Return the share of late actions in these episodes; None where they are not in real time, and without any."""
    counts = [episode.late_actions for episode in episodes if episode.late_actions is not None]
    return sum(counts) / max(sum(episode.steps for episode in episodes), 1) if counts else None


def robot_metrics(prefix: str, episodes: Sequence[Episode]) -> dict[str, float]:
    """Return metrics of runs on a robot: "PREFIX/intervention_rate", "PREFIX/episodes_with_interventions" and
    "PREFIX/unaided_success" where an operator can take over, "PREFIX/late_actions" in real time."""
    metrics: dict[str, float] = {}
    if (interventions := interventions_of(episodes)) is not None:
        metrics[f"{prefix}/intervention_rate"] = interventions.rate
        metrics[f"{prefix}/episodes_with_interventions"] = interventions.episodes
        metrics[f"{prefix}/unaided_success"] = interventions.unaided.rate
    if (late := late_actions_of(episodes)) is not None:
        metrics[f"{prefix}/late_actions"] = late
    return metrics
