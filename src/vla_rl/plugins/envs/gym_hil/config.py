"""Settings of `gym_hil`."""

from __future__ import annotations

from typing import Any, Literal

from attrs import field, frozen, validators

from vla_rl.plugins.envs.gymnasium.config import STATES, check_rate
from vla_rl.toolkit.envs.settings import LARGEST, SMALLEST, Processes

SCRIPTED = "scripted"
DEVICES = ("gamepad", "keyboard")
AFTER = 10


def _check_controller(instance: Any, attribute: Any, name: str) -> None:
    if name not in (SCRIPTED, *DEVICES) and ":" not in name:
        raise ValueError(f"{name!r} is none of {SCRIPTED}, {', '.join(DEVICES)} and module:Class")


def _with_effect(instance: Any, attribute: Any, kwargs: dict[str, Any]) -> None:
    """Refuse keys that the chosen controller does not read."""
    scripted = instance.controller == SCRIPTED
    if kwargs and ":" not in instance.controller:
        raise ValueError(f"has no effect with controller: {instance.controller}; it is for module:Class")
    if not scripted and (instance.after != AFTER or instance.steps is not None):
        raise ValueError(f"after and steps have no effect with controller: {instance.controller}; leave them out")


def _no_duplicates(instance: Any, attribute: Any, cameras: tuple[str, ...]) -> None:
    if len(set(cameras)) < len(cameras):
        raise ValueError(f"{', '.join(cameras)}: a camera stands there twice")


@frozen(kw_only=True)
class PersonSettings:
    """Who may take over, and when."""

    controller: str = field(default=SCRIPTED, validator=_check_controller)
    """`scripted`: a script that lifts the cube; `keyboard` or `gamepad`: a person at the machine, by gym-hil's own
    controllers; or `module:Class`, an object with their methods."""
    after: int = field(default=AFTER, validator=validators.ge(0))
    """Scripted: actions of the policy without progress towards a lifted cube, after which the script takes over."""
    steps: int | None = field(default=None, validator=validators.optional(validators.ge(1)))
    """Scripted: actions after which the script gives the robot back; null: it keeps it to the end of the episode."""
    in_evaluation: bool = True
    """Whether takeovers are possible in evaluations. Results then also have the success without interventions."""
    kwargs: dict[str, Any] = field(factory=dict, validator=_with_effect)
    """Keyword arguments of `module:Class`, which also gets the environment as its first argument."""


@frozen(kw_only=True)
class GymHilConfig:
    """Spec keys of the simulator `gym_hil`."""

    person: PersonSettings | None = None
    """Who may take over from the policy; null: no one."""
    cameras: tuple[Literal["front", "wrist"], ...] = field(
        default=("front", "wrist"), validator=[validators.min_len(1), _no_duplicates]
    )
    """Cameras that the policy sees, in this order. Each is rendered once a chunk."""
    image_size: int = field(default=128, validator=[validators.ge(SMALLEST), validators.le(LARGEST)])
    """Side of the images in pixels, 8 to 1024."""
    fast_render: bool = False
    """Draw simplified meshes, without shadows, reflections or multisampling: 30 times as fast on a CPU, with other
    pixels."""
    instruction: str = "lift the cube"
    """Instruction that the policy gets."""
    reward: Literal["sparse", "dense"] = "sparse"
    """`sparse`: 1 when the cube is 10 cm up; `dense`: nearness and height at every step."""
    random_block: bool = True
    """Whether the cube's place differs between reset states."""
    control_hz: float | None = field(default=None, validator=check_rate)
    """Actions a second in real time, above 0 and at most 1000; a person at a device needs 10, the simulated rate. Late
    actions are counted. null: as fast as the simulator goes."""
    max_steps: int = field(default=100, validator=[validators.ge(1), validators.le(10_000)])
    """Step limit of an episode, at 10 actions a second of simulated time."""
    train_states: int = field(default=200, validator=[validators.ge(1), validators.le(STATES)])
    """Number of initial states (seeds) in the train split, 1 to 1,000,000."""
    eval_states: int = field(default=50, validator=[validators.ge(1), validators.le(STATES)])
    """Number of initial states (seeds) in the eval split, 1 to 1,000,000; training never uses them."""
    processes: Processes = field(factory=Processes)
    """Processes of the env instances."""
