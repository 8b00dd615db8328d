"""Keyed randomness: every random number is a pure function of (run seed, purpose, number, episode, chunk).

A counter-based generator (Philox-4x64, Salmon et al. 2011) is keyed with the run seed and the purpose; number (mostly
of a ticket), episode and chunk are its counter. So there is no generator state to save, and neither placement,
batching nor a restart changes what is drawn.
"""

from __future__ import annotations

import threading
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

    One generator of the thread takes the state of each sample in turn: to make one for each takes ten times as long.
    Where a stream stands is kept from the second call on, which makes the first one's draws again: most models call
    once, and to ask for a state takes as long as to draw.
    """

    def __init__(self, seed: int, purpose: str, numbers: Sequence[int], episodes: Sequence[int], chunks: Sequence[int]):
        key = (seed & (2**64 - 1), crc32(purpose.encode()))
        self._states: list[dict[str, Any]] = [
            {**_FRESH, "state": {"counter": (0, int(n), int(e), int(c)), "key": key}}
            for n, e, c in zip(numbers, episodes, chunks, strict=True)
        ]
        self._called = False
        self._first: tuple[Draw, tuple[int, ...]] | None = None
        """The first call, until there is a second one."""

    def __len__(self) -> int:
        return len(self._states)

    def uniforms(self, *shape: int) -> Array:
        """float32 [B, *shape] in [0, 1)."""
        return self._draw(np.random.Generator.random, shape)

    def normals(self, *shape: int) -> Array:
        """float32 [B, *shape], standard normal."""
        return self._draw(np.random.Generator.standard_normal, shape)

    def _draw(self, method: Draw, shape: tuple[int, ...]) -> Array:
        if not hasattr(_OF_THREAD, "generator"):
            _OF_THREAD.generator = generator(0, "")
        own, drawn = _OF_THREAD.generator, np.empty((len(self), *shape), np.float32)
        stream, first, again = own.bit_generator, self._first, self._called
        for sample, state in enumerate(self._states):
            stream.state = state
            if first is not None:
                first[0](own, first[1], np.float32)
            drawn[sample] = method(own, shape, np.float32)
            if again:
                self._states[sample] = stream.state
        self._first, self._called = None if again else (method, shape), True
        return drawn


Draw = Callable[[np.random.Generator, tuple[int, ...], Any], Any]
_FRESH = generator(0, "").bit_generator.state
"""Of a generator that has drawn nothing."""
_OF_THREAD = threading.local()
