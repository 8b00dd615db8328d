"""Checks of every algorithm's results: each metric name has one writer, declared extras are present."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from typing import TYPE_CHECKING

from attrs import frozen

from vla_rl.core.errors import PluginError
from vla_rl.core.fields import ADVANTAGES, ROLLOUT, shape_matches
from vla_rl.core.manager import hookimpl

if TYPE_CHECKING:
    from torch import Tensor

    from vla_rl.core.types import Advantages, Loss, Rollout

DEMANDED = "loss/policy"
"""Metric that every algorithm must report in `Loss.metrics`: the policy's contribution to the total."""
RESERVED = frozenset({"step", "loss/total", "loss/imitation", "policy/grad_norm", "policy/recompute_kl"})
"""Metric names that the runtime writes itself ..."""
RESERVED_GROUPS = frozenset(
    {
        "compile",
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
        "bc_warmup",
        "world_model",
    }
)
"""... and the first parts of further reserved names, before a slash."""
RESERVED_NAMES = "the runtime writes {names}, and every name in {groups} itself".format(
    names=", ".join(sorted(RESERVED)), groups=", ".join(f"{group}/" for group in sorted(RESERVED_GROUPS))
)


def find_reserved(names: Iterable[str]) -> list[str]:
    """Return the names that are reserved for the runtime."""
    return [name for name in names if name in RESERVED or ("/" in name and name.split("/")[0] in RESERVED_GROUPS)]


@frozen
class ResultGuard:
    """A wrapper around an algorithm. Raises PluginError for a metric name of the runtime, which would be added to or
    overwritten, and for extras that are not as declared."""

    algorithm: str
    """Name of the plugin, for errors."""
    extras: Mapping[str, str]
    """Numbers that `Algorithm.extras` declares."""

    @hookimpl(wraps="algorithm")
    def advantages(self, rollout: Rollout) -> Generator[None, Advantages, Advantages]:
        result = yield
        self._check_names("advantages", result.metrics)
        self._check_extras(rollout, result.extras)
        return result

    @hookimpl(wraps="algorithm")
    def loss(self) -> Generator[None, Loss, Loss]:
        result = yield
        self._check_names("loss", (*result.metrics, *result.maxima, *result.statistics))
        return result

    def _check_names(self, method: str, names: Iterable[str]) -> None:
        for name in find_reserved(names):
            raise PluginError(
                f"algorithm {self.algorithm!r} reports a metric {name!r} in `{method}`; {RESERVED_NAMES}: "
                f"leave it out, or choose another name"
            )

    def _check_extras(self, rollout: Rollout, extras: Mapping[str, Tensor]) -> None:
        if extras.keys() != self.extras.keys():
            raise PluginError(
                f"algorithm {self.algorithm!r} declares extras {sorted(self.extras)} and its `advantages` returned "
                f"{sorted(extras)}; both have to name the same (Algorithm.extras, Advantages.extras)"
            )
        reserved_names = {field.name for field in (*ROLLOUT, *ADVANTAGES)} | rollout.extras.keys()
        steps, columns, chunk = rollout.valid.shape
        for name, dims in self.extras.items():
            if name in reserved_names:
                raise PluginError(
                    f"algorithm {self.algorithm!r} declares an extra {name!r}, and samples have a field of that name "
                    "already; choose another name"
                )
            shape = list(extras[name].shape)
            if not shape_matches(shape, dims, {"T": steps, "N": columns, "C": chunk, "M": rollout.log_probs.shape[-1]}):
                raise PluginError(
                    f"algorithm {self.algorithm!r} declares the extra {name!r} as [{', '.join(dims.split())}] and "
                    f"returned {shape}; the rollout has T {steps}, N {columns}, C {chunk}"
                )
