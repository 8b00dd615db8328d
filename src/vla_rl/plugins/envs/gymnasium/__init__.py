"""`gymnasium`: any registered gymnasium environment with continuous actions. Settings only, light to import; see
docs/simulators/gymnasium.md."""

from __future__ import annotations

from typing import Any

from attrs import field, frozen, validators

from vla_rl.core.types import Context, Plugin
from vla_rl.plugins.envs.gymnasium.hil_settings import plugin as gym_hil
from vla_rl.plugins.envs.gymnasium.settings import (
    STATES,
    CameraSettings,
    InterventionSettings,
    Wrapper,
    bounds,
    check,
    named_cameras,
    no_duplicates,
    no_limit,
    preflight,
    rate,
    words,
)
from vla_rl.toolkit.envs.settings import Processes


@frozen(kw_only=True)
class GymnasiumConfig:
    """Spec keys of the simulator `gymnasium`."""

    id: str = field(validator=words)
    """Id of the environment, as `gymnasium.make` takes it: Pendulum-v1, Meta-World/MT1, ..."""
    kwargs: dict[str, Any] = field(factory=dict, validator=no_limit)
    """Further keyword arguments of `gymnasium.make`; `max_episode_steps` is the key `max_steps` instead."""
    imports: tuple[str, ...] = ()
    """Modules whose import registers environments, such as metaworld."""
    instruction: str = field(validator=words)
    """Instruction that the policy gets."""
    cameras: dict[str, CameraSettings] = field(factory=lambda: {"main": CameraSettings()}, validator=named_cameras)
    """Cameras: name -> the image that the policy sees under this name. Models read them in this order."""
    state: str | tuple[str, ...] | None = field(default=None, validator=no_duplicates)
    """Proprioceptive state that the policy sees: `observation`, the path of an entry of a dict observation
    (`agent_pos`, `robot.joints`), or a list of paths whose numbers are joined in this order; null: none."""
    actions: tuple[str, ...] = field(default=(), validator=no_duplicates)
    """Paths of the entries of a dict action space, in the order of the policy's numbers. For such spaces only."""
    success: str = field(validator=words)
    """Criterion of success: the path of an entry of the environment's info, in every step or in that of the end alone,
    or `terminated` for an environment that terminates only when solved."""
    interventions: InterventionSettings | None = None
    """Info entries that tell when somebody takes over from the policy, of environments or wrappers with a takeover
    device; `{}` for those of gym-hil; null: nobody can take over."""
    wrappers: tuple[Wrapper, ...] = ()
    """Gymnasium wrappers, innermost first."""
    max_steps: int | None = field(
        default=None, validator=validators.optional(validators.and_(validators.ge(1), validators.le(10_000_000)))
    )
    """Step limit of an episode, 1 to 10,000,000 actions; null: the registered one."""
    action_low: tuple[float, ...] | None = None
    """Lower and (`action_high`) upper bounds of actions, one number per dimension, in the environment's units; null:
    its own. Give both or neither."""
    action_high: tuple[float, ...] | None = field(default=None, validator=bounds)
    train_states: int = field(default=200, validator=[validators.ge(1), validators.le(STATES)])
    """Number of initial states (seeds) in the train split, 1 to 1,000,000."""
    eval_states: int = field(default=50, validator=[validators.ge(1), validators.le(STATES)])
    """Number of initial states (seeds) in the eval split, 1 to 1,000,000; training never uses them."""
    control_hz: float | None = field(default=None, validator=rate)
    """Actions a second in real time, above 0 and at most 1000, for robots and people; late ones are counted. null: as
    fast as the environment goes."""
    deterministic: bool = True
    """Whether the same actions from the same seed give the same episode (`EnvInfo.deterministic`)."""
    processes: Processes = field(factory=Processes)
    """Processes of the env instances."""


__all__ = ["GymnasiumConfig", "gym_hil", "plugin"]


def build(config: GymnasiumConfig, context: Context) -> Any:
    from vla_rl.plugins.envs.gymnasium.single_env import make_envs

    return make_envs(config, context)


plugin = Plugin(
    config=GymnasiumConfig,
    build=build,
    summary="Any gymnasium environment with continuous actions and a picture, from a spec alone",
    preflight=preflight,
    check=check,
    action_dim=lambda config: None if config.action_low is None else len(config.action_low),
)
