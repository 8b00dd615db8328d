"""Statistics of a data set's features, one episode at a time: count, mean, std, min, max and quantiles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from attrs import frozen

from vla_rl.core.types import Array

QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}
STATISTICS = ("min", "max", "mean", "std", *QUANTILES)


@frozen(eq=False)
class FeatureStatistics:
    """Statistics of `count` rows. Merging is exact except for quantiles: those are averages over the parts' rows."""

    count: int
    numbers: Mapping[str, Array]
    """Each of `STATISTICS`; std is the standard deviation with divisor n."""

    @staticmethod
    def from_rows(rows: Array, shape: tuple[int, ...]) -> FeatureStatistics:
        """Compute the statistics of float64 [n, D]; each gets this shape, with D numbers (a scalar: [1])."""
        numbers = {"min": rows.min(0), "max": rows.max(0), "mean": rows.mean(0), "std": rows.std(0)}
        numbers |= {name: np.quantile(rows, q, axis=0) for name, q in QUANTILES.items()}
        return FeatureStatistics(len(rows), {name: n.reshape(shape or (1,)) for name, n in numbers.items()})

    @staticmethod
    def of_images(images: Array) -> FeatureStatistics:
        """Compute the statistics of images uint8 [n, H, W, 3] per channel: [3, 1, 1], from 0 to 1; the count is n."""
        counts = np.stack([np.bincount(images[..., channel].reshape(-1), minlength=256) for channel in range(3)])
        values, share = np.arange(256) / 255, counts / counts.sum(1, keepdims=True)
        mean = share @ values
        below = share.cumsum(1)
        numbers = {
            "min": np.array([values[row > 0].min() for row in counts]),
            "max": np.array([values[row > 0].max() for row in counts]),
            "mean": mean,
            "std": np.sqrt(np.maximum(share @ values**2 - mean**2, 0)),
            **{name: values[(below >= q - 1e-12).argmax(1)] for name, q in QUANTILES.items()},
        }
        return FeatureStatistics(len(images), {name: n.reshape(3, 1, 1) for name, n in numbers.items()})

    def __add__(self, other: FeatureStatistics) -> FeatureStatistics:
        one, two, count = self.numbers, other.numbers, self.count + other.count
        share, other_share = self.count / count, other.count / count
        numbers = {name: share * one[name] + other_share * two[name] for name in STATISTICS}
        square = share * (one["std"] ** 2 + one["mean"] ** 2) + other_share * (two["std"] ** 2 + two["mean"] ** 2)
        numbers["std"] = np.sqrt(np.maximum(square - numbers["mean"] ** 2, 0))
        numbers["min"], numbers["max"] = np.minimum(one["min"], two["min"]), np.maximum(one["max"], two["max"])
        return FeatureStatistics(count, numbers)

    def to_dict(self) -> dict[str, Any]:
        """Return lerobot's file format: lists under min, max, mean, std, count and the quantiles' names."""
        return {name: array.tolist() for name, array in self.numbers.items()} | {"count": [self.count]}

    @staticmethod
    def from_dict(numbers: Mapping[str, Any]) -> FeatureStatistics:
        """Read the result of `to_dict`."""
        arrays = {name: np.array(numbers[name], np.float64) for name in STATISTICS}
        return FeatureStatistics(int(numbers["count"][0]), arrays)
