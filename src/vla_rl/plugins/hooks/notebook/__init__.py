"""Hook `notebook`: live curves below the cell of a Jupyter notebook that runs the training."""

from __future__ import annotations

from vla_rl.core.declarations import HookPlugin

plugin = HookPlugin(
    config="vla_rl.plugins.hooks.notebook.config:NotebookConfig",
    build="vla_rl.plugins.hooks.notebook.live:LiveCurves",
    summary="curves that grow in a Jupyter notebook; nothing elsewhere",
    extra="notebook",
)
