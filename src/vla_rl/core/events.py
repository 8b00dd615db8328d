"""What listeners hear: the run, evaluations and their frames; and who listens."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from attrs import frozen

from vla_rl.core.types import ArrayOrTensor, Episode


@frozen(kw_only=True)
class Rate:
    """A success rate with its 95 % Wilson interval."""

    rate: float
    n: int
    low: float
    high: float


@frozen(kw_only=True, eq=False)
class EpisodeFrames:
    """The frames of one evaluation episode: the first observation and one after each chunk."""

    task: str
    instruction: str
    success: bool
    images: Mapping[str, ArrayOrTensor]
    """Camera -> uint8 [frames, H, W, 3]."""


@frozen(kw_only=True, eq=False)
class Evaluation:
    """Every (task, evaluation state) once per repeat."""

    step: int
    success: Rate
    tasks: Mapping[str, Rate]
    repeats: tuple[float, ...]
    """Success rate of each repeat."""
    episodes: tuple[Episode, ...]
    seconds: float
    frames: tuple[EpisodeFrames, ...] = ()
    recordings: Iterable[Any] = ()
    """As `Rollout.recordings`."""


@frozen(kw_only=True)
class Run:
    """What a `RunEvents` plugin may know about the run it listens to."""

    name: str
    doing: str = "training"
    """"training" by reinforcement learning, or "imitation"."""
    folder: Any
    """pathlib.Path of the run folder."""
    spec: Mapping[str, Any]
    """The resolved spec as plain data."""
    first_step: int
    """0, or the step a resumed run starts from."""
    steps: int
    """Step at which the run ends."""
    devices: str = ""
    """What each role works on, such as "sim cpu x2, policy cuda:0, learner cuda:0-3 (NVIDIA H200)"."""


class ReadOnly(dict[str, Any]):
    """A dict that listeners share, so that none of them changes what the others hear."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise TypeError("what listeners hear is read-only, since all hear the same; make a copy, as dict(metrics)")

    __setitem__ = __delitem__ = __ior__ = _refuse
    update = pop = popitem = setdefault = clear = _refuse

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def wilson(successes: int, n: int, z: float = 1.959963984540054) -> Rate:
    """Success rate with the 95 % interval of Wilson (1927); n = 0 gives the whole unit interval."""
    if n == 0:
        return Rate(rate=0.0, n=0, low=0.0, high=1.0)
    p = successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return Rate(
        rate=p, n=n, low=0.0 if successes == 0 else centre - half, high=1.0 if successes == n else centre + half
    )
