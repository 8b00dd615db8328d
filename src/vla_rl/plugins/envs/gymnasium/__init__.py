"""`gymnasium`: any registered environment with continuous actions. Light part; see docs/simulators/gymnasium.md."""

from __future__ import annotations

from typing import Any

from attrs import field, frozen, validators

from vla_rl.core.types import Context, Plugin
from vla_rl.plugins.envs.gymnasium.settings import (
    STATES,
    CameraSettings,
    Wrapper,
    bounds,
    check,
    no_limit,
    preflight,
    words,
)
from vla_rl.toolkit.envs.settings import Processes


@frozen(kw_only=True)
class GymnasiumConfig:
    id: str = field(validator=words)
    """As `gymnasium.make` takes it: Pendulum-v1, Meta-World/MT1, ..."""
    kwargs: dict[str, Any] = field(factory=dict, validator=no_limit)
    """Further arguments of `gymnasium.make`."""
    imports: tuple[str, ...] = ()
    """Modules whose import registers ids, such as metaworld."""
    instruction: str = field(validator=words)
    """What the policy is told."""
    camera: CameraSettings = field(factory=CameraSettings)
    """The picture that it sees."""
    state: str | None = None
    """The numbers that it sees: observation, or a key of a dict observation; null: none."""
    success: str = field(validator=words)
    """What counts as success: an entry of the environment's info, or terminated (it ends only where it is solved)."""
    wrappers: tuple[Wrapper, ...] = ()
    """From the inside out."""
    max_steps: int | None = field(
        default=None, validator=validators.optional(validators.and_(validators.ge(1), validators.le(10_000_000)))
    )
    """Step limit; null: the registered one."""
    action_low: tuple[float, ...] | None = None
    """Bounds to act within, in the environment's units; null: its own."""
    action_high: tuple[float, ...] | None = field(default=None, validator=bounds)
    train_states: int = field(default=200, validator=[validators.ge(1), validators.le(STATES)])
    """Seeds of the train split."""
    eval_states: int = field(default=50, validator=[validators.ge(1), validators.le(STATES)])
    """Seeds of the eval split, none of which training sees."""
    deterministic: bool = True
    """Whether the same actions from the same seed give the same episode (`EnvInfo.deterministic`)."""
    processes: Processes = field(factory=Processes)
    """Processes of the rows."""


def build(config: GymnasiumConfig, context: Context) -> Any:
    from vla_rl.plugins.envs.gymnasium.rows import make_env

    return make_env(config, context)


plugin = Plugin(
    config=GymnasiumConfig,
    build=build,
    summary="Any gymnasium environment with continuous actions and a picture, from a spec alone",
    preflight=preflight,
    check=check,
    action_dim=lambda config: None if config.action_low is None else len(config.action_low),
)
