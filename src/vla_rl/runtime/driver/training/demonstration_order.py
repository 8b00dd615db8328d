"""Order in which one rank's demonstrations are trained on: a function of the seed and the optimiser step alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from attrs import frozen

from vla_rl.core.randomness import generator
from vla_rl.core.spec.sections import WEIGHT_PARTS
from vla_rl.core.types import Array


class SampleOrder(ABC):
    """Order of one rank's samples."""

    steps_per_epoch: int
    """Optimiser steps of one pass over the demonstrations; with several data sets, over the first."""

    @abstractmethod
    def sample_count(self, step: int) -> int:
        """Return the number of samples of an optimiser step (from 1)."""

    @abstractmethod
    def batch_indices(self, step: int) -> Array:
        """Return the indices, int64 [size], of an optimiser step's samples."""


@frozen(eq=False)
class Epochs(SampleOrder):
    """All samples once an epoch, in another order each time. The last step of an epoch has what is left."""

    _seed: int
    _purpose: str
    _rank: int
    _samples: Array
    """int64 [n], the rank's indices."""
    _batch: int
    """Samples of an optimiser step."""
    steps_per_epoch: int
    """Optimiser steps of the rank with the most samples."""

    def sample_count(self, step: int) -> int:
        start = (step - 1) % self.steps_per_epoch * self._batch
        return min(max(len(self._samples) - start, 0), self._batch)

    def batch_indices(self, step: int) -> Array:
        epoch, position = divmod(step - 1, self.steps_per_epoch)
        order = generator(self._seed, self._purpose, self._rank, epoch).permutation(len(self._samples))
        return self._samples[order[position * self._batch : (position + 1) * self._batch]]


class Mixture(SampleOrder):
    """Samples of several data sets by their weights. Each data set has separate epochs; every step is full.

    At any moment the number of samples of a data set differs by a few from its share.
    """

    def __init__(
        self, seed: int, purpose: str, rank: int, samples: Sequence[Array], weights: Sequence[float], batch: int
    ) -> None:
        """Describe the order.

        Args:
            samples: int64 [n] for each data set: the rank's indices.
            weights: share of each data set; their sum is 1.
            batch: samples of an optimiser step.
        """
        self._seed = seed
        self._purpose = purpose
        self._rank = rank
        self._samples = samples
        self._batch = batch
        self._parts = np.rint(np.array(weights) * WEIGHT_PARTS).astype(np.int64)
        """Samples of each data set in a round of `WEIGHT_PARTS` samples."""
        self.steps_per_epoch = max(1, round(len(samples[0]) / (batch * weights[0])))

    def sample_count(self, step: int) -> int:
        return self._batch

    def batch_indices(self, step: int) -> Array:
        first, last = (step - 1) * self._batch, step * self._batch
        sets, numbers = [], []
        for number in range(first // WEIGHT_PARTS, (last - 1) // WEIGHT_PARTS + 1):
            start = number * WEIGHT_PARTS
            chosen = slice(max(first - start, 0), min(last - start, WEIGHT_PARTS))
            set_of, number_of = self._draw_round(number)
            sets.append(set_of[chosen])
            numbers.append(number_of[chosen])
        set_of, number_of = np.concatenate(sets), np.concatenate(numbers)
        indices = np.empty(self._batch, np.int64)
        for data_set, samples in enumerate(self._samples):
            rows = np.flatnonzero(set_of == data_set)
            epochs, positions = np.divmod(number_of[rows], len(samples))
            for epoch in np.unique(epochs):
                now = epochs == epoch
                key = f"{self._purpose}/data set {data_set}"
                order = generator(self._seed, key, self._rank, int(epoch)).permutation(len(samples))
                indices[rows[now]] = samples[order[positions[now]]]
        return indices

    def _draw_round(self, number: int) -> tuple[Array, Array]:
        """Return the data set of each sample of a round, and the sample's number within its data set, int64
        [WEIGHT_PARTS] each. Samples of a data set are about evenly spaced."""
        set_of = np.repeat(np.arange(len(self._parts)), self._parts)
        within = np.concatenate([np.arange(count) for count in self._parts])
        jitter = generator(self._seed, f"{self._purpose}/mixture", self._rank, number).random(WEIGHT_PARTS)
        order = np.argsort((within + jitter) / self._parts[set_of])
        return set_of[order], (number * self._parts[set_of] + within)[order]
