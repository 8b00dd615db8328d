"""What listeners hear: the run, evaluations and their frames; and who listens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attrs import frozen

from vla_rl.core.hookspecs import RunEvents
from vla_rl.core.plugins import build, hook_modules
from vla_rl.core.seats import broadcast
from vla_rl.core.types import Context, Episode

if TYPE_CHECKING:
    from vla_rl.core.spec import Spec
    from vla_rl.core.types import Array


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
    images: Mapping[str, Array]
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


def listeners(spec: Spec) -> RunEvents:
    """All run-event plugins of the spec, and the modules of `plugins:`."""
    built = [(h.type, build("hook", h.type, h.config, Context(seed=spec.seed), spec.plugins)) for h in spec.hooks]
    return broadcast([*built, *hook_modules(spec.plugins)])
