"""Settings of `notebook`."""

from __future__ import annotations

from attrs import field, frozen, validators


@frozen(kw_only=True)
class NotebookConfig:
    """Spec keys of the hook `notebook`."""

    metrics: tuple[str, ...] = field(default=("env/success_rate", "loss/policy"), converter=tuple)
    """Metrics, one panel each; evaluations are drawn in the panel of env/success_rate."""
    every_s: float = field(default=2.0, validator=[validators.ge(0), validators.le(86_400.0)])
    """Least seconds between two redraws, 0 to 86,400."""
