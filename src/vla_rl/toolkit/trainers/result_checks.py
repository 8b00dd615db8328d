"""Checks of every trainer's results: metrics that share the runtime's table, and a state that a checkpoint can hold."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from numbers import Real
from typing import Any

from attrs import evolve, field, frozen

from vla_rl.core.errors import PluginError
from vla_rl.core.manager import hookimpl
from vla_rl.core.trainers import UpdateMetrics
from vla_rl.core.types import Statistic
from vla_rl.toolkit.algorithms.result_checks import RESERVED_NAMES, find_reserved
from vla_rl.toolkit.trainers.trainer_state import find_unreadable

OF_TRAINERS = frozenset({"loss/total", "loss/imitation", "policy/grad_norm", "policy/recompute_kl"})
"""Names that are reserved from algorithms because trainers report them."""


def guard_trainer(plugin: str, own_table: bool = False) -> tuple[str, TrainerGuard]:
    """Return the checks of a trainer's results, in the form that `manager.wrap` takes wrappers.

    Args:
        plugin: kind and name of the plugin, for errors.
        own_table: the metrics get a separate prefix, so that all names are free.
    """
    return f"{plugin}: results", TrainerGuard(plugin, own_table)


@frozen
class TrainerGuard:
    """A wrapper around a trainer. Raises PluginError for metrics that are not numbers or have a name of the runtime,
    and for a state that no checkpoint could be read with; warns once of each metric that is not finite."""

    plugin: str
    own_table: bool
    _warned: set[str] = field(factory=set, init=False)

    @hookimpl(wraps="trainer")
    def update(self) -> Generator[None, UpdateMetrics, UpdateMetrics]:
        metrics = yield
        if not isinstance(metrics, UpdateMetrics):
            raise self._plugin_error(
                f"returns a {type(metrics).__name__} from `update`; return UpdateMetrics(sums={{...}})"
            )
        for part in ("sums", "maxima", "statistics"):
            self._check_metrics(part, getattr(metrics, part), Statistic if part == "statistics" else Real)
        values = {**metrics.sums, **metrics.maxima}
        new = [name for name, value in values.items() if not math.isfinite(value) and name not in self._warned]
        self._warned.update(new)
        texts = [f"{self.plugin} reports {values[name]:g} as the metric {name!r}" for name in new]
        return evolve(metrics, warnings=(*metrics.warnings, *texts)) if texts else metrics

    @hookimpl(wraps="trainer")
    def state(self) -> Generator[None, Mapping[str, Any], Mapping[str, Any]]:
        state = yield
        unread = find_unreadable(dict(state))
        if unread is not None:
            raise self._plugin_error(
                f"returns a {unread[1]} as state(){unread[0]}, and no checkpoint could be read with it; return a "
                f"tensor (torch.from_numpy), or numbers, texts, lists and dicts of Python"
            )
        return state

    def _check_metrics(self, part: str, metrics: Any, kind: type) -> None:
        if not isinstance(metrics, Mapping):
            raise self._plugin_error(
                f"returns a {type(metrics).__name__} as UpdateMetrics.{part}; return name -> value"
            )
        for name, value in metrics.items():
            if not isinstance(name, str) or not isinstance(value, kind):
                kind_name = "number (float)" if kind is Real else kind.__name__
                text = f"reports a {type(value).__name__} as the metric {name!r} in UpdateMetrics.{part}"
                raise self._plugin_error(f"{text}; each of these is a {kind_name}")
        for name in [] if self.own_table else find_reserved(metrics.keys() - OF_TRAINERS):
            raise self._plugin_error(
                f"reports a metric {name!r}; {RESERVED_NAMES}: leave it out, or choose another name"
            )

    def _plugin_error(self, text: str) -> PluginError:
        return PluginError(f"{self.plugin} {text}")
