"""Metric `update/weights_changed`: how much of what is trained reaches the policy that acts."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import torch

from vla_rl.core.run.weight_changes import WEIGHTS_CHANGED
from vla_rl.core.types import Statistic
from vla_rl.toolkit.algorithms.statistics import Mean
from vla_rl.toolkit.trainers.parallel import ParallelStrategy

SAMPLED = 2**20
"""Weights of a rank that are compared at most."""
# Prime factors of the usual widths of layers.
WIDTH_FACTORS = 2 * 3 * 5 * 7 * 11 * 13


class ChangedWeights:
    """Share of the trained weights that differ after a training step from before it, in the type that the policy acts
    with.

    Weights are compared as they act, since a step that rounding hides changes no rollout, however large it is in the
    optimiser. Of a rank with more than 2^20 trained weights every n-th is compared, so that comparing takes no more
    than 12 MiB.
    """

    def __init__(self, types: Mapping[str, torch.dtype]) -> None:
        """Create the metric. `types`: name of a trained weight -> its type where the policy acts."""
        self._types = types
        self._before: dict[str, torch.Tensor] = {}
        """Sampled weights before the first optimiser step of the training step; {}: there was none."""
        self._stride = 1

    def keep_weights(
        self, parameters: Mapping[str, torch.Tensor], names: Collection[str], strategy: ParallelStrategy
    ) -> None:
        """Keep the weights of these names that the next optimiser step may change, unless an earlier one of the same
        training step did.
        """
        if self._before:
            return
        own = {name: strategy.own_part(parameters[name]) for name in names}
        self._stride = coprime_stride(sum(part.numel() for part in own.values()))
        self._before = self._sample_weights(own)

    def compare_weights(
        self, parameters: Mapping[str, torch.Tensor], strategy: ParallelStrategy
    ) -> dict[str, Statistic]:
        """Return the metric of the training step that ends, in host memory; {} where no optimiser stepped."""
        if not self._before:
            return {}
        before = self._before
        self._before = {}
        after = self._sample_weights({name: strategy.own_part(parameters[name]) for name in before})
        changed = torch.stack([(after[name] != before[name]).sum() for name in before]).sum()
        compared = sum(tensor.numel() for tensor in before.values())
        return {WEIGHTS_CHANGED: Mean(torch.tensor([float(changed), float(compared)], dtype=torch.float64))}

    def _sample_weights(self, own: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return every n-th weight of each tensor in its acting type, as a copy."""
        return {
            name: part.detach().flatten()[index % self._stride :: self._stride].to(self._types[name], copy=True)
            for index, (name, part) in enumerate(own.items())
        }


def coprime_stride(count: int) -> int:
    """Return the stride that samples at most `SAMPLED` of this many weights. It has no factor in common with
    the usual widths of layers, so that the sample is of all columns of a matrix.
    """
    stride = max(1, -(-count // SAMPLED))
    while math.gcd(stride, WIDTH_FACTORS) > 1:
        stride += 1
    return stride
