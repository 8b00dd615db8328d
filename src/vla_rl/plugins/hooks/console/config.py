"""Settings of `console`."""

from __future__ import annotations

from typing import Literal

from attrs import field, frozen, validators


@frozen(kw_only=True)
class ConsoleConfig:
    """Spec keys of the hook `console`."""

    mode: Literal["auto", "live", "plain"] = "auto"
    """Display. `live`: a panel that is redrawn; `plain`: one line per step; `auto`: live on a terminal, else plain."""
    every_s: float = field(default=30.0, validator=[validators.gt(0), validators.le(86_400.0)])
    """Seconds, above 0 and at most 86,400, between progress lines of a long rollout, evaluation or other phase in plain
    mode."""
    metrics: tuple[str, ...] = ()
    """Further metrics to show, such as an algorithm's own: names, or patterns such as `mine/*`."""
