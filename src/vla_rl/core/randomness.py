"""Keyed randomness: every random number is a pure function of (run seed, purpose, number, episode, chunk).

A counter-based generator (Philox-4x64, Salmon et al. 2011) is keyed with the run seed and the purpose. Its counter is
the number (mostly a ticket's), the episode and the chunk. So there is no generator state to save, and neither
placement, batching nor a restart changes the random numbers.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any
from zlib import crc32

import numpy as np

from vla_rl.core.types import Array


def generator(seed: int, purpose: str, number: int = 0, episode: int = 0, chunk: int = 0) -> np.random.Generator:
    """Return the generator of this key. Equal keys give equal numbers, in any process and on any machine."""
    key = np.array([seed & (2**64 - 1), crc32(purpose.encode())], dtype=np.uint64)
    counter = np.array([0, number, episode, chunk], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def derived_seed(seed: int, purpose: str, number: int = 0, episode: int = 0) -> int:
    """Return a 63-bit seed for code that takes a single number, for instance a simulator's episode."""
    return int(generator(seed, purpose, number, episode).integers(2**63 - 1))


class Noise:
    """Random numbers for B samples. Sample b draws from its own keyed stream, and successive calls continue each
    stream.

    One generator per thread takes the state of each sample in turn. Up to 1,000 numbers of earlier calls are drawn
    again, which is faster than reading the generator's state.
    """

    def __init__(self, seed: int, purpose: str, numbers: Sequence[int], episodes: Sequence[int], chunks: Sequence[int]):
        key, keys = (seed & (2**64 - 1), crc32(purpose.encode())), zip(numbers, episodes, chunks, strict=True)
        counters = [(0, int(number), int(episode), int(chunk)) for number, episode, chunk in keys]
        self._states = [{**_INITIAL_STATE, "state": {"counter": counter, "key": key}} for counter in counters]
        self._calls: list[tuple[Callable[..., Any], tuple[int, ...]]] = []

    def __len__(self) -> int:
        return len(self._states)

    def uniforms(self, *shape: int) -> Array:
        """Return float32 [B, *shape], uniform in [0, 1)."""
        return self._draw(np.random.Generator.random, shape)

    def normals(self, *shape: int) -> Array:
        """Return float32 [B, *shape], standard normal."""
        return self._draw(np.random.Generator.standard_normal, shape)

    def _draw(self, method: Callable[..., Any], shape: tuple[int, ...]) -> Array:
        self._calls.append((method, shape))
        drawn, cache = np.empty((len(self), *shape), np.float32), vars(_OF_THREAD)
        rng = cache.get("generator") or cache.setdefault("generator", generator(0, ""))
        many = sum(math.prod(size) for _, size in self._calls) > 1000
        for sample, state in enumerate(self._states):
            rng.bit_generator.state = state
            drawn[sample] = [call(rng, size, np.float32) for call, size in self._calls][-1]
            self._states[sample] = rng.bit_generator.state if many else state
        self._calls = [] if many else self._calls
        return drawn


_OF_THREAD, _INITIAL_STATE = threading.local(), generator(0, "").bit_generator.state
