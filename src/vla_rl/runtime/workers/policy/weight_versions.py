"""Versions of a policy's weights: which one is loaded, and older ones that tickets may still ask for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from vla_rl.core.errors import CheckpointError
from vla_rl.core.hookspecs import PolicyEngine
from vla_rl.core.types import Array
from vla_rl.toolkit.models.checkpoints.files import check_same_weights, read_file, read_pickled

T = TypeVar("T")
Weights = list[tuple[str, torch.Tensor]]


class WeightVersions:
    """The weights of an engine by version. Older versions are kept in host memory."""

    def __init__(self, engine: PolicyEngine, lag: int) -> None:
        """Begin with version 0. `lag`: earlier versions that tickets may ask for; 0 without a model in this process."""
        self.engine = engine
        self.lag = lag
        self.version = 0
        """Version that is loaded."""
        self._past: deque[tuple[int, Weights]] = deque(maxlen=lag + 1)
        """The last versions, the newest included; empty without `lag`."""

    def advance_to(self, version: int) -> None:
        """Note that the engine has the weights of this version now."""
        self.version = version
        if self.lag:
            self._keep_weights()

    def with_each(self, wanted: Array, act: Callable[[Array], T]) -> list[tuple[Array, int, T]]:
        """Act for the rows [R] of a batch with the versions that they want (below 0: the newest), and leave the newest
        loaded. Return (rows, version, result of `act`) for each version."""
        if self.lag and not self._past:
            self._keep_weights()
        newest = self.version
        if (wanted < 0).all():
            rows = np.arange(len(wanted))
            return [(rows, newest, act(rows))]
        wanted = np.where(wanted < 0, newest, wanted)
        past = dict(self._past)
        results = []
        try:
            # The newest first, which is loaded.
            for version in np.unique(wanted)[::-1].tolist():
                if version != self.version:
                    self._load_version(version, past[version])
                rows = np.flatnonzero(wanted == version)
                results.append((rows, version, act(rows)))
        finally:
            if self.version != newest:
                self._load_version(newest, past[newest])
        return results

    def save(self, file: Path) -> None:
        torch.save(list(self._past), file)

    def load(self, file: Path) -> None:
        """Read what `save` wrote; do nothing if the file does not exist."""
        if file.exists():
            self._past.extend(read_file(file, lambda path: torch.load(path, weights_only=True)))

    def _keep_weights(self) -> None:
        if self._past and self._past[-1][0] == self.version:
            self._past.pop()  # the version was published again: after behaviour cloning, or from a checkpoint
        assert self.engine.model is not None
        weights = [(name, weight.detach().to("cpu", copy=True)) for name, weight in self.engine.model.weights()]
        self._past.append((self.version, weights))

    def _load_version(self, version: int, weights: Weights) -> None:
        self.engine.load(weights)
        self.version = version


def load_trained(engine: PolicyEngine, file: Path) -> None:
    """Load the weights of a learner's file, which is in a checkpoint's trainer folder, into an engine, rounded to the
    types in which they act, with the model's `instruction_suffix`. Raises CheckpointError where they belong to another
    model, and for a suffix where the engine has no model in this process to take it."""
    saved = read_pickled(file, ("weights", "acting_types"), mmap=True)
    weights = saved["weights"]
    types = saved["acting_types"]
    suffix = saved.get("instruction_suffix", "")
    if engine.model is not None:
        check_same_weights(weights, dict(engine.model.weights()), file)
        engine.model.instruction_suffix = suffix
    elif suffix:
        raise CheckpointError(
            f"{file} is of a policy that acts with {suffix.strip()!r} after each instruction, which this engine does "
            f"not add; use rollout.engine.type: torch"
        )
    try:
        engine.load((name, weight.to(types[name])) for name, weight in weights.items())
    except (KeyError, RuntimeError, AttributeError) as exc:
        raise CheckpointError(f"{file} holds the weights of another model: {exc}") from exc
