"""What is asked of every algorithm's results: whose a metric's name is (all metrics of a step share one table, so a
name has one writer), and that declared extras are there."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from typing import TYPE_CHECKING

from attrs import frozen

from vla_rl.core.errors import PluginError
from vla_rl.core.fields import ADVANTAGES, ROLLOUT, fits
from vla_rl.core.manager import hookimpl

if TYPE_CHECKING:
    from torch import Tensor

    from vla_rl.core.types import Advantages, Loss, Rollout

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


def guard(algorithm: str, extras: Mapping[str, str]) -> tuple[str, ResultGuard]:
    """Return the checks of an algorithm plugin's results, as `manager.wrap` takes wrappers.

    Args:
        algorithm: name of the plugin, for errors.
        extras: as `Algorithm.extras` declares them.
    """
    return f"{algorithm}: results", ResultGuard(algorithm, extras)


@frozen
class ResultGuard:
    """Wraps an algorithm: PluginError for a metric name of the runtime, which would be added to or overwritten, and for
    extras that are not as declared."""

    algorithm: str
    extras: Mapping[str, str]

    @hookimpl(wraps="algorithm")
    def advantages(self, rollout: Rollout) -> Generator[None, Advantages, Advantages]:
        result = yield
        self._check("advantages", result.metrics)
        self._check_extras(rollout, result.extras)
        return result

    @hookimpl(wraps="algorithm")
    def loss(self) -> Generator[None, Loss, Loss]:
        result = yield
        self._check("loss", (*result.metrics, *result.maxima, *result.statistics))
        return result

    def _check(self, method: str, names: Iterable[str]) -> None:
        for name in reserved(names):
            raise PluginError(
                f"algorithm {self.algorithm!r} reports a metric {name!r} in `{method}`; {SAID}: "
                f"leave it out, or choose another name"
            )

    def _check_extras(self, rollout: Rollout, extras: Mapping[str, Tensor]) -> None:
        if extras.keys() != self.extras.keys():
            raise PluginError(
                f"algorithm {self.algorithm!r} declares extras {sorted(self.extras)} and its `advantages` returned "
                f"{sorted(extras)}; both have to name the same (Algorithm.extras, Advantages.extras)"
            )
        taken = {field.name for field in (*ROLLOUT, *ADVANTAGES)}
        steps, columns, chunk = rollout.valid.shape
        for name, dims in self.extras.items():
            if name in taken:
                raise PluginError(
                    f"algorithm {self.algorithm!r} declares an extra {name!r}, and samples have a field of that name "
                    "already; choose another name"
                )
            shape = list(extras[name].shape)
            if not fits(shape, dims, {"T": steps, "N": columns, "C": chunk, "M": rollout.log_probs.shape[-1]}):
                raise PluginError(
                    f"algorithm {self.algorithm!r} declares the extra {name!r} as [{', '.join(dims.split())}] and "
                    f"returned {shape}; the rollout has T {steps}, N {columns}, C {chunk}"
                )
