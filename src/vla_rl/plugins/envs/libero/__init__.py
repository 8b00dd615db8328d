"""`libero`: the LIBERO benchmark on MuJoCo. Light part; see README.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen, validators

from vla_rl.core.types import Context, Plugin
from vla_rl.plugins.envs.libero.cameras import CAMERAS


def _known_cameras(instance: Any, attribute: Any, cameras: Mapping[str, int]) -> None:
    for name, size in cameras.items():
        if name not in CAMERAS:
            raise ValueError(f"no libero camera {name!r}; cameras: {', '.join(CAMERAS)}")
        if not 8 <= size <= 1024:
            raise ValueError(f"camera {name!r} has {size} pixels; give 8 to 1024 (224 for most checkpoints)")


@frozen(kw_only=True)
class LiberoConfig:
    suite: str
    """libero_spatial, libero_object, libero_goal, libero_10, libero_90, or another that the installed package has."""
    tasks: tuple[int, ...] | None = None
    """Numbers of the tasks to offer, in the official order; null: all of the suite."""
    cameras: dict[str, int] = field(factory=lambda: {"agentview": 224, "wrist": 224}, validator=_known_cameras)
    """Camera -> height and width in pixels, in the order in which a model sees them."""
    max_steps: int | None = field(default=None, validator=validators.optional(validators.ge(1)))
    """Step limit of every task; null: the suite's, as OpenVLA-OFT evaluates (220, 280, 300, 520, 400)."""
    settle_steps: int = field(default=10, validator=[validators.ge(0), validators.le(100)])
    """Steps without motion after a reset, in which objects drop and come to rest; not counted as steps."""
    train_states: int = field(default=200, validator=[validators.ge(1), validators.le(500)])
    """Initial states per task in the train split, drawn from the task's own placement regions."""
    fast_render: bool = False
    """Leave out reflections: about twice as fast and slightly other pixels, so not for reported results."""
    subprocess: bool | None = None
    """A process for each row; null: when there are several rows."""


def build(config: LiberoConfig, context: Context) -> Any:
    from vla_rl.plugins.envs.libero.env import LiberoEnv

    return LiberoEnv(config, context)


plugin = Plugin(
    config=LiberoConfig,
    build=build,
    summary="LIBERO: manipulation with a Franka arm, 130 tasks in five suites, MuJoCo",
    extra="libero",
    row_memory=2_000_000_000,
)
