"""Whose a metric's name is. All metrics of a step share one table, so a name has one writer."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import TYPE_CHECKING

from attrs import frozen

from vla_rl.core.errors import PluginError
from vla_rl.core.manager import hookimpl

if TYPE_CHECKING:
    from vla_rl.core.types import Advantages, Loss

DEMANDED = "loss/policy"
"""Every algorithm reports this one in `Loss.metrics`: what the policy's part adds to the total."""
RESERVED = frozenset({"step", "loss/total", "loss/imitation", "policy/grad_norm"})
"""The runtime writes these itself ..."""
RESERVED_GROUPS = frozenset(
    {
        "env",
        "eval",
        "eval_task",
        "faults",
        "groups",
        "imagination",
        "imitation",
        "offload",
        "replay",
        "rollout",
        "sampling",
        "throughput",
        "time",
        "update",
        "warmup",
        "world_model",
    }
)
"""... and all names that begin with one of these and a slash."""
SAID = "the runtime writes {names}, and every name in {groups} itself".format(
    names=", ".join(sorted(RESERVED)), groups=", ".join(f"{group}/" for group in sorted(RESERVED_GROUPS))
)


def reserved(names: Iterable[str]) -> list[str]:
    """Those that belong to the runtime."""
    return [name for name in names if name in RESERVED or ("/" in name and name.split("/")[0] in RESERVED_GROUPS)]


def guard(algorithm: str) -> tuple[str, MetricGuard]:
    """Of the algorithm plugin of that name, as `manager.wrap` takes wrappers."""
    return f"{algorithm}: names of metrics", MetricGuard(algorithm)


@frozen
class MetricGuard:
    """Wraps an algorithm: PluginError for a name of the runtime, which would be added to or overwritten."""

    algorithm: str

    @hookimpl(wraps="algorithm")
    def advantages(self) -> Generator[None, Advantages, Advantages]:
        made = yield
        self._check("advantages", made.metrics)
        return made

    @hookimpl(wraps="algorithm")
    def loss(self) -> Generator[None, Loss, Loss]:
        made = yield
        self._check("loss", (*made.metrics, *made.maxima, *made.statistics))
        return made

    def _check(self, method: str, names: Iterable[str]) -> None:
        for name in reserved(names):
            raise PluginError(
                f"algorithm {self.algorithm!r} reports a metric {name!r} in `{method}`; {SAID}: "
                f"leave it out, or choose another name"
            )
