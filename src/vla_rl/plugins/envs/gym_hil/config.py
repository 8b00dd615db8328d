"""Settings of `gym_hil`."""

from __future__ import annotations

from typing import Any, Literal

from attrs import field, frozen, validators

from vla_rl.core.contexts import CheckContext
from vla_rl.core.errors import UserError
from vla_rl.plugins.envs.gymnasium.config import STATES, check_rate, no_duplicates
from vla_rl.toolkit.envs.settings import LARGEST, SMALLEST, Processes


@frozen(kw_only=True)
class ScriptSettings:
    """A script that lifts the cube."""

    type: Literal["scripted"] = "scripted"
    after: int = field(default=10, validator=validators.ge(0))
    """Actions of the policy without progress towards a lifted cube, after which the script takes over."""
    steps: int | None = field(default=None, validator=validators.optional(validators.ge(1)))
    """Actions after which the script gives the robot back; null: it keeps it to the end of the episode."""
    in_evaluation: bool = True
    """Whether takeovers are possible in evaluations. Results then also have the success without interventions."""


@frozen(kw_only=True)
class DeviceSettings:
    """A person at the machine, by gym-hil's own controllers."""

    type: Literal["gamepad", "keyboard"]
    in_evaluation: bool = True
    """Whether takeovers are possible in evaluations."""


@frozen(kw_only=True)
class ControllerSettings:
    """An object with the methods of gym-hil's controllers."""

    type: Literal["custom"] = "custom"
    controller: str = field(validator=validators.matches_re(r"[\w.]+:[\w.]+"))
    """Class of the object, `module:Class`."""
    kwargs: dict[str, Any] = field(factory=dict)
    """Keyword arguments of the class, which also gets the environment as its first argument."""
    in_evaluation: bool = True
    """Whether takeovers are possible in evaluations."""


PersonSettings = ScriptSettings | DeviceSettings | ControllerSettings


@frozen(kw_only=True)
class GymHilConfig:
    """Spec keys of the simulator `gym_hil`."""

    person: PersonSettings | None = None
    """Who may take over from the policy; null: no one."""
    cameras: tuple[Literal["front", "wrist"], ...] = field(
        default=("front", "wrist"), validator=[validators.min_len(1), no_duplicates]
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


def check_device_sharing(config: GymHilConfig, context: CheckContext) -> None:
    """Raise UserError for a device that several envs would share."""
    if isinstance(config.person, DeviceSettings) and context.num_envs > 1:
        raise UserError(
            f"person.type: {config.person.type} with {context.num_envs} envs, and a person holds one "
            "robot at a time; give env.num_envs: 1"
        )
