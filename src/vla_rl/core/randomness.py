"""Keyed randomness: every random number is a pure function of (run seed, purpose, number, episode, chunk).

A counter-based generator (Philox-4x64, Salmon et al. 2011) is keyed with the run seed and the purpose; number (mostly
of a ticket), episode and chunk are its counter. So there is no generator state to save, and neither placement,
batching nor a restart changes what is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from zlib import crc32

import numpy as np

Array = np.ndarray[Any, Any]


def generator(seed: int, purpose: str, number: int = 0, episode: int = 0, chunk: int = 0) -> np.random.Generator:
    """The generator of this key. Equal keys give equal numbers, in any process and on any machine."""
    key = np.array([seed & (2**64 - 1), crc32(purpose.encode())], dtype=np.uint64)
    counter = np.array([0, number, episode, chunk], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def derived_seed(seed: int, purpose: str, number: int = 0, episode: int = 0) -> int:
    """A 63-bit seed for code that wants one number, for instance a simulator's episode."""
    return int(generator(seed, purpose, number, episode).integers(2**63 - 1))


class Noise:
    """Random numbers for B samples; sample b draws from its own key. Successive calls go on in each stream.

    One generator takes the state of each sample in turn, which takes half the time of one made for each.
    """

    def __init__(self, seed: int, purpose: str, numbers: Sequence[int], episodes: Sequence[int], chunks: Sequence[int]):
        self._generator = generator(seed, purpose)
        first = self._generator.bit_generator.state
        self._states = [
            {**first, "state": {**first["state"], "counter": (0, int(n), int(e), int(c))}}
            for n, e, c in zip(numbers, episodes, chunks, strict=True)
        ]

    def __len__(self) -> int:
        return len(self._states)

    def uniforms(self, *shape: int) -> Array:
        """float32 [B, *shape] in [0, 1)."""
        return self._draw(self._generator.random, shape)

    def normals(self, *shape: int) -> Array:
        """float32 [B, *shape], standard normal."""
        return self._draw(self._generator.standard_normal, shape)

    def _draw(self, method: Callable[..., Any], shape: tuple[int, ...]) -> Array:
        drawn, stream = np.empty((len(self), *shape), np.float32), self._generator.bit_generator
        for sample, state in enumerate(self._states):
            stream.state = state
            drawn[sample] = method(shape, np.float32)
            self._states[sample] = stream.state
        return drawn
