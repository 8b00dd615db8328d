"""Mergeable statistics, exact under any split over micro-batches, ranks and optimiser steps: each is a vector of sums
that is added up, and read once at the end. NaN in entries outside the mask does no harm. `MetricAccumulator` adds up
what the losses of micro-batches return."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from attrs import define, field
from torch import Tensor

from vla_rl.core.trainers import UpdateMetrics
from vla_rl.core.types import Statistic
from vla_rl.toolkit.algorithms.checks import check_shapes
from vla_rl.toolkit.algorithms.functional import LOG_RATIO_LIMIT

BINS = 1025
FINEST = 1e-3
"""Boundary of the histogram's resolution: bins of log r are evenly spaced below this |log r|, and wider further out."""
_REACH = math.asinh(LOG_RATIO_LIMIT / FINEST)


class Mean(Statistic):
    """A mean. `sums` holds the total and the number of entries."""

    @classmethod
    def of(cls, entries: Tensor, mask: Tensor) -> Mean:
        """Return the mean of the entries in the mask (bool, same shape)."""
        return cls(torch.stack([_mask_entries(entries, mask).sum(), mask.double().sum()]))

    def read(self, name: str) -> dict[str, float]:
        total, count = self.sums.tolist()
        return {name: total / count} if count else {}


class EffectiveSize(Statistic):
    """Kong's effective sample size (sum u)^2 / sum u^2, as a share of the number: 1 if all entries weigh the same, 1/n
    if one carries the whole gradient. `sums` holds u, u^2 and the number."""

    @classmethod
    def of(cls, weights: Tensor, mask: Tensor) -> EffectiveSize:
        """Return the statistic of importance weights u >= 0 in the mask (bool, same shape)."""
        inside = _mask_entries(weights, mask)
        return cls(torch.stack([inside.sum(), inside.square().sum(), mask.double().sum()]))

    def read(self, name: str) -> dict[str, float]:
        total, squares, count = self.sums.tolist()
        return {name: total * total / (squares * count)} if squares else {}


class RatioQuantiles(Statistic):
    """Quantiles of ratios r. `sums` counts the ratios in each of 1025 bins of log r, so that the quantiles of any split
    equal those of the whole, to half a bin: 0.002 % at r = 1, 0.7 % at r = 2, 20 % at the clamp."""

    @classmethod
    def of(cls, log_ratios: Tensor, mask: Tensor) -> RatioQuantiles:
        """Return the statistic of log r in [-20, 20] in the mask (bool, same shape)."""
        check_shapes(log_ratios=log_ratios, mask=mask)
        place = torch.where(mask, log_ratios, torch.zeros_like(log_ratios)).float()
        bins = (((place / FINEST).asinh() / _REACH + 1) / 2 * BINS).long().clamp(0, BINS - 1).flatten()
        counts = torch.zeros(BINS, dtype=torch.float64, device=bins.device)
        return cls(counts.scatter_add_(0, bins, mask.flatten().double()))

    def ratio_quantile(self, share: float) -> float:
        """Return the ratio (middle of its bin) below which this share of the entries falls."""
        at = int(torch.searchsorted(self.sums.cumsum(0), share * self.sums.sum()))
        return math.exp(FINEST * math.sinh(((at + 0.5) / BINS * 2 - 1) * _REACH))

    def far_quantile(self, share: float) -> float:
        """Return the |log r| (middle of its bin) below which this share of the entries falls."""
        # Bins are symmetric around r = 1: of the counts and their mirror image, half lie below it.
        symmetric = type(self)(self.sums + self.sums.flip(0))
        return math.log(symmetric.ratio_quantile((1 + share) / 2))

    def read(self, name: str) -> dict[str, float]:
        if not bool(self.sums.any()):
            return {}
        return {
            f"{name}_p50": self.ratio_quantile(0.5),
            f"{name}_p95": self.ratio_quantile(0.95),
            f"{name}_abs_log_p95": self.far_quantile(0.95),
        }


def _mask_entries(entries: Tensor, mask: Tensor) -> Tensor:
    check_shapes(entries=entries, mask=mask)
    return torch.where(mask, entries, torch.zeros_like(entries)).double()


def read_all(parts: Sequence[Mapping[str, Statistic]]) -> dict[str, float]:
    """Merge the statistics of several ranks, each with some or all of the names, and return their metrics."""
    names = dict.fromkeys(name for part in parts for name in part)
    metrics: dict[str, float] = {}
    for name in names:
        first, *others = [part[name] for part in parts if name in part]
        metrics |= sum(others, start=first).read(name)
    return metrics


@define(eq=False)
class MetricAccumulator:
    """Metrics of losses: sums, maxima and statistics over micro-batches."""

    sums: dict[str, Tensor] = field(factory=dict)
    maxima: dict[str, Tensor] = field(factory=dict)
    statistics: dict[str, Statistic] = field(factory=dict)

    def add_sums(self, metrics: Mapping[str, Tensor], divisor: float = 1.0) -> None:
        for name, value in metrics.items():
            self.sums[name] = self.sums.get(name, torch.zeros((), device=value.device)) + value / divisor

    def add(self, maxima: Mapping[str, Tensor], statistics: Mapping[str, Statistic]) -> None:
        for name, value in maxima.items():
            self.maxima[name] = torch.maximum(self.maxima[name], value) if name in self.maxima else value
        for name, statistic in statistics.items():
            earlier = self.statistics.get(name)
            self.statistics[name] = statistic if earlier is None else earlier + statistic

    def read_metrics(self, seconds: float) -> UpdateMetrics:
        """Return the metrics as numbers, of an update that took these seconds: in float64, by one copy."""
        tensors = [*self.sums.values(), *self.maxima.values(), *(one.sums for one in self.statistics.values())]
        flat = [tensor.detach().reshape(-1).to(tensors[0].device, torch.float64) for tensor in tensors]
        numbers = iter(torch.cat(flat).cpu().split(list(map(len, flat))) if flat else ())
        return UpdateMetrics(
            sums={name: float(next(numbers)) for name in self.sums},
            maxima={name: float(next(numbers)) for name in self.maxima},
            statistics={name: type(one)(next(numbers)) for name, one in self.statistics.items()},
            seconds=seconds,
        )
