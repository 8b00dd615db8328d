"""Hook `notebook`: live curves below the cell of a Jupyter notebook that runs the training."""

from __future__ import annotations

from typing import Any

from attrs import field, frozen, validators

from vla_rl.core.types import Context, Plugin


@frozen(kw_only=True)
class NotebookConfig:
    """Spec keys of the hook `notebook`."""

    metrics: tuple[str, ...] = field(default=("env/success_rate", "loss/policy"), converter=tuple)
    """Metrics, one panel each; evaluations are drawn in the panel of env/success_rate."""
    every_s: float = field(default=2.0, validator=[validators.ge(0), validators.le(86_400.0)])
    """Least seconds between two redraws, 0 to 86,400."""


def _build(config: NotebookConfig, context: Context) -> Any:
    from vla_rl.plugins.hooks.notebook.live import LiveCurves

    return LiveCurves(config)


plugin = Plugin(
    config=NotebookConfig,
    build=_build,
    summary="curves that grow in a Jupyter notebook; nothing elsewhere",
    extra="notebook",
)
