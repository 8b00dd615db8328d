"""`libero`: the LIBERO benchmark on MuJoCo. Light part; see docs/simulators/libero.md."""

from __future__ import annotations

from typing import Any, Literal

from attrs import field, frozen, validators

from vla_rl.core.types import Context, Plugin
from vla_rl.plugins.envs.libero.checks import check, known_cameras, one_choice_of_tasks, preflight, state_count
from vla_rl.toolkit.envs.settings import SharedProcesses


@frozen(kw_only=True)
class LiberoConfig:
    suite: str | None = None
    """libero_spatial, libero_object, libero_goal, libero_10, libero_90, or another that the installed package has."""
    tasks: tuple[int | str, ...] | None = None
    """Tasks of `suite`, by their official number or by name; null: all."""
    suites: dict[str, tuple[int | str, ...] | None] | None = field(default=None, validator=one_choice_of_tasks)
    """Instead of `suite` and `tasks`: several suites, each with its tasks (null: all)."""
    cameras: dict[str, int] = field(factory=lambda: {"agentview": 224, "wrist": 224}, validator=known_cameras)
    """Camera -> height and width in pixels, in the order in which a model sees them."""
    step_limits: Literal["openvla-oft", "simplevla"] = "openvla-oft"
    """Whose step limits: 220, 280, 300, 520 and 400 by suite, or 512 for all. `rollout.max_steps` overrides them."""
    settle_steps: int = field(default=10, validator=[validators.ge(0), validators.le(100)])
    """Steps without motion after a reset, in which objects drop and come to rest; not counted as steps."""
    train_states: int | Literal["official"] = field(default=200, validator=state_count)
    """Initial states per task in the train split, 1 to 500, drawn from the task's own placement regions; or "official":
    the 50 evaluation states, as some published recipes train, which results.json then says."""
    fast_render: bool = False
    """No reflections, simplified meshes: faster, with slightly other pixels, so not for reported results."""
    fast_physics: bool = False
    """Solve once a physics step instead of three times: faster; states differ from the official ones, typically by
    2e-6, by millimetres where contacts amplify it."""
    memory_mib: int = field(default=2000, validator=validators.ge(0))
    """Up to so much memory of a process simulators of tasks stay built that none of its rows plays now."""
    disk_mib: int = field(default=8000, validator=validators.ge(0))
    """Of compiled models and pictures kept in the user's cache folder (`~/.cache/vla-rl/libero`); all 130 tasks take
    about 4,700."""
    processes: SharedProcesses = field(factory=SharedProcesses)
    """Processes of the rows; those of one process share a simulator a task."""


def build(config: LiberoConfig, context: Context) -> Any:
    from vla_rl.plugins.envs.libero.rows import make_env

    return make_env(config, context)


plugin = Plugin(
    config=LiberoConfig,
    build=build,
    summary="LIBERO: manipulation with a Franka arm, 130 tasks in five suites, MuJoCo",
    extra="libero",
    row_memory=400_000_000,
    preflight=preflight,
    check=check,
    action_dim=lambda config: 7,
)
