"""Settings of `gymnasium`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from attrs import field, frozen, validators

from vla_rl.toolkit.envs.settings import LARGEST, SMALLEST, Processes

STATES = 1_000_000
"""Number of state ids per split: ids of "eval" states are 0 to 999,999, ids of "train" states follow."""
LEROBOT = "lerobot/"
"""Beginning of the ids of lerobot's environments."""


def _check_size(instance: Any, attribute: Any, size: int | tuple[int, int]) -> None:
    for side in size if isinstance(size, tuple) else (size,):
        if not SMALLEST <= side <= LARGEST:
            raise ValueError(f"{side} pixels; give {SMALLEST} to {LARGEST} (224 for most checkpoints)")


@frozen(kw_only=True)
class CameraSettings:
    """Source and size of the image that the policy sees."""

    source: str = "render"
    """Source of the image. `render`: the environment's own `render()`, or `render.0`, `render.wrist` for an entry of
    what that returns; `observation`: the observation itself; otherwise the path of an entry of a dict observation,
    such as `pixels.front`."""
    size: int | tuple[int, int] = field(default=224, validator=_check_size)
    """Size in pixels to which images are resized, 8 to 1024: the side of a square, or [height, width]."""
    turn: Literal[0, 90, 180, 270] = 0
    """Counter-clockwise rotation in degrees that turns images upright."""

    @property
    def image_shape(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return self.size if isinstance(self.size, tuple) else (self.size, self.size)


def no_duplicates(instance: Any, attribute: Any, paths: str | Sequence[str] | None) -> None:
    """Refuse a list in which a path stands twice, and an empty list of state entries."""
    if isinstance(paths, str) or paths is None:
        return
    duplicates = sorted({path for path in paths if list(paths).count(path) > 1})
    if duplicates:
        raise ValueError(f"{', '.join(duplicates)} given more than once")
    if attribute.name == "state" and not paths:
        raise ValueError("is an empty list; name entries of the observation, or give null for no state")


@frozen(kw_only=True)
class Wrapper:
    """A gymnasium wrapper around the environment."""

    name: str
    """Name of a class in gymnasium.wrappers, or `module:Class`."""
    kwargs: dict[str, Any] = field(factory=dict)
    """Keyword arguments of the wrapper."""


@frozen(kw_only=True)
class InterventionSettings:
    """Entries of the info of every step that tell who acted."""

    flag: str = "is_intervention"
    """Path of the entry that is true where a person or an expert acted instead of the policy."""
    action: str = "teleop_action"
    """Path of the entry with the action that was executed, in the environment's units."""
    source: Literal["person", "expert"] = "person"
    """Who takes over: a person, or a scripted expert."""


def check_rate(instance: Any, attribute: Any, control_hz: float | None) -> None:
    if control_hz is not None and not 0 < control_hz <= 1000:
        raise ValueError(f"{control_hz} actions a second; give a number above 0 and at most 1000")


def check_text(instance: Any, attribute: Any, text: str) -> None:
    if not text.strip():
        raise ValueError("is empty; say in words what the policy shall do, or name what is meant")


def no_limit(instance: Any, attribute: Any, kwargs: dict[str, Any]) -> None:
    if "max_episode_steps" in kwargs:
        raise ValueError("max_episode_steps is the setting max_steps; leave it out here")


def check_bounds(instance: Any, attribute: Any, high: tuple[float, ...] | None) -> None:
    low = instance.action_low
    if (low is None) != (high is None):
        raise ValueError("give both action_low and action_high, or neither")
    if low is not None and high is not None:
        if len(low) != len(high) or not low:
            raise ValueError(f"{len(low)} lower and {len(high)} upper bounds; give one of each for each number")
        if not all(a < b for a, b in zip(low, high, strict=True)):
            raise ValueError(f"action_low {list(low)} is not below action_high {list(high)} everywhere")


@frozen(kw_only=True)
class GymnasiumConfig:
    """Spec keys of the simulator `gymnasium`."""

    id: str = field(validator=check_text)
    """Id of the environment, as `gymnasium.make` takes it: Pendulum-v1, Meta-World/MT1, ...; `lerobot/NAME`: an
    environment that lerobot knows by this name; `lerobot/EnvHub`: that of a folder (`kwargs: {path: FOLDER}`)."""
    kwargs: dict[str, Any] = field(factory=dict, validator=no_limit)
    """Further keyword arguments of `gymnasium.make`; `max_episode_steps` is the key `max_steps` instead."""
    imports: tuple[str, ...] = ()
    """Modules whose import registers environments, such as metaworld."""
    instruction: str = field(validator=check_text)
    """Instruction that the policy gets."""
    cameras: dict[str, CameraSettings] = field(factory=dict)
    """Cameras: name -> the image that the policy sees under this name. Models read them in this order. Left out: the
    environment's `render()` as `main`; of ids `lerobot/...` images and state as lerobot reads them."""
    fast_render: bool = False
    """Draw MuJoCo scenes without shadows, reflections or multisampling: 3 to 13 times as fast on a CPU, with other
    pixels."""
    state: str | tuple[str, ...] | None = field(default=None, validator=no_duplicates)
    """Proprioceptive state that the policy sees: `observation`, the path of an entry of a dict observation
    (`agent_pos`, `robot.joints`), or a list of paths whose numbers are joined in this order; null: none."""
    actions: tuple[str, ...] = field(default=(), validator=no_duplicates)
    """Paths of the entries of a dict action space, in the order of the policy's numbers. For such spaces only."""
    success: str = field(validator=check_text)
    """Criterion of success: the path of an entry of the environment's info, in every step or in that of the end alone,
    or `terminated` for an environment that terminates only when solved."""
    interventions: InterventionSettings | None = None
    """Info entries that say when a person takes over from the policy, of environments or wrappers with a takeover
    device; `{}` for those of gym-hil; null: takeovers are not possible."""
    wrappers: tuple[Wrapper, ...] = ()
    """Gymnasium wrappers, innermost first."""
    max_steps: int | None = field(
        default=None, validator=validators.optional(validators.and_(validators.ge(1), validators.le(10_000_000)))
    )
    """Step limit of an episode, 1 to 10,000,000 actions; null: the registered one."""
    action_low: tuple[float, ...] | None = None
    """Lower and (`action_high`) upper bounds of actions, one number per dimension, in the environment's units; null:
    its own. Give both or neither."""
    action_high: tuple[float, ...] | None = field(default=None, validator=check_bounds)
    train_states: int = field(default=200, validator=[validators.ge(1), validators.le(STATES)])
    """Number of initial states (seeds) in the train split, 1 to 1,000,000."""
    eval_states: int = field(default=50, validator=[validators.ge(1), validators.le(STATES)])
    """Number of initial states (seeds) in the eval split, 1 to 1,000,000; training never uses them."""
    control_hz: float | None = field(default=None, validator=check_rate)
    """Actions a second in real time, above 0 and at most 1000, for robots and people; late ones are counted. null: as
    fast as the environment goes."""
    deterministic: bool = True
    """Whether the same actions from the same seed give the same episode (`EnvInfo.deterministic`)."""
    processes: Processes = field(factory=Processes)
    """Processes of the env instances."""
