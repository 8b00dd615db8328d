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

ROUNDS = 10
MULTIPLIERS = np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157)
WEYL = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B)
"""Added to the two halves of the key after each round."""
WORDS = 4
"""64-bit words of a block."""
HALF = np.uint64(32)
LOW = np.uint64(2**32 - 1)


def philox_words(key: Array, counters: Array, first: int, count: int) -> Array:
    """Return words `first` to `first + count` of each stream, uint64 [B, count], by Philox-4x64-10 for many streams at
    once: those of `numpy.random.Philox`, which needs microseconds to enter each.

    Args:
        key: uint64 [2].
        counters: counter of each stream before its first block, uint64 [B, 4]; the first number of each is 0.
    """
    first_block, end_block = first // WORDS, -(-(first + count) // WORDS)
    blocks = np.arange(first_block + 1, end_block + 1, dtype=np.uint64)  # a generator counts before it computes
    shape = len(counters), len(blocks)
    a = np.broadcast_to(blocks, shape)
    b, c, d = (np.broadcast_to(counters[:, column, None], shape) for column in (1, 2, 3))
    low_key, high_key = key
    # Keys are added modulo 2**64; NumPy warns of scalars that wrap.
    with np.errstate(over="ignore"):
        for _ in range(ROUNDS):
            a_high, a_low = _multiply_words(MULTIPLIERS[0], a)
            c_high, c_low = _multiply_words(MULTIPLIERS[1], c)
            a, b, c, d = c_high ^ b ^ low_key, c_low, a_high ^ d ^ high_key, a_low
            low_key, high_key = low_key + WEYL[0], high_key + WEYL[1]
    words = np.stack([a, b, c, d], axis=-1).reshape(shape[0], WORDS * shape[1])
    start = first - WORDS * first_block
    return words[:, start : start + count]


def _multiply_words(a: np.uint64, b: Array) -> tuple[Array, Array]:
    """Return the upper and lower 64 bits of a * b, modulo 2^64 each."""
    a_high, a_low = a >> HALF, a & LOW
    b_high, b_low = b >> HALF, b & LOW
    middle = a_high * b_low + (a_low * b_low >> HALF)
    other = a_low * b_high + (middle & LOW)
    return a_high * b_high + (middle >> HALF) + (other >> HALF), a * b


SEEDS = 2**63 - 1
"""Derived seeds are below this number."""
REJECTED_SEEDS = 2**64 % SEEDS
"""A word whose product with SEEDS has a lower half below this is drawn again (Lemire 2019)."""
MANY_SAMPLES = 96
"""Number of samples from which computing all streams at once is faster than one generator after the other."""
MANY_KEYS = 16
"""The same for seeds, each of which needs a separate generator."""


def generator(seed: int, purpose: str, number: int = 0, episode: int = 0, chunk: int = 0) -> np.random.Generator:
    """Return the generator of this key. Equal keys give equal numbers, in any process and on any machine."""
    key = np.array([seed & (2**64 - 1), crc32(purpose.encode())], dtype=np.uint64)
    counter = np.array([0, number, episode, chunk], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def derived_seed(seed: int, purpose: str, number: int = 0, episode: int = 0) -> int:
    """Return a 63-bit seed for code that takes a single number, for instance a simulator's episode."""
    return int(generator(seed, purpose, number, episode).integers(SEEDS))


def derived_seeds(seed: int, purpose: str, numbers: Sequence[int], episodes: Sequence[int]) -> Array:
    """Return the `derived_seed` of each of B keys, int64 [B]."""
    if len(numbers) < MANY_KEYS:
        pairs = zip(numbers, episodes, strict=True)
        return np.array([derived_seed(seed, purpose, number, episode) for number, episode in pairs], np.int64)
    words = philox_words(_philox_key(seed, purpose), _stream_counters(numbers, episodes, [0] * len(numbers)), 0, 1)[
        :, 0
    ]
    # `Generator.integers` takes the upper 64 bits of word * SEEDS = (word << 63) - word, and draws again where the
    # lower ones are below REJECTED_SEEDS. The upper bits are word >> 1, less 1 where the subtraction borrows.
    halves = words >> np.uint64(1)
    seeds = np.where((words << np.uint64(63)) < words, halves - np.uint64(1), halves)
    lower = words * np.uint64(SEEDS)
    for sample in np.flatnonzero(lower < np.uint64(REJECTED_SEEDS)).tolist():
        seeds[sample] = derived_seed(seed, purpose, numbers[sample], episodes[sample])
    return seeds.astype(np.int64)


class Noise:
    """Random numbers for B samples. Each sample draws from its own keyed stream, which calls continue. Uniform numbers
    of many samples are computed at once. Otherwise one generator per thread takes each sample's state in turn, and
    draws up to 1,000 numbers of earlier calls again, which is faster than reading its state."""

    def __init__(self, seed: int, purpose: str, numbers: Sequence[int], episodes: Sequence[int], chunks: Sequence[int]):
        self._key = _philox_key(seed, purpose)
        self._counters = _stream_counters(numbers, episodes, chunks)
        self._states: list[dict[str, Any]] | None = None
        """State of each sample's generator before `_calls`; None until a generator draws."""
        self._calls: list[tuple[Callable[..., Any], tuple[int, ...]]] = []

    def __len__(self) -> int:
        return len(self._counters)

    def uniforms(self, *shape: int) -> Array:
        """Return float32 [B, *shape], uniform in [0, 1)."""
        if len(self) < MANY_SAMPLES or self._states is not None:
            return self._draw_numbers(_uniform, shape)
        first = sum(math.prod(size) for _, size in self._calls)
        self._calls.append((_uniform, shape))
        return _philox_uniforms(self._key, self._counters, first, math.prod(shape)).reshape(len(self), *shape)

    def normals(self, *shape: int) -> Array:
        """Return float32 [B, *shape], standard normal."""
        return self._draw_numbers(_normal, shape)

    def _draw_numbers(self, method: Callable[..., Any], shape: tuple[int, ...]) -> Array:
        if self._states is None:
            key = tuple(self._key.tolist())
            states = ({"counter": tuple(counter), "key": key} for counter in self._counters.tolist())
            self._states = [{**_INITIAL_STATE, "state": state} for state in states]
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


def _philox_uniforms(key: Array, counters: Array, first: int, count: int) -> Array:
    """Return numbers `first` to `first + count` of each counter's stream of float32 uniforms, [B, count]."""
    # Two float32 numbers come of one word, so an odd `first` is the second half of one.
    first_word, end_word = first // 2, -(-(first + count) // 2)
    words = philox_words(key, counters, first_word, end_word - first_word)
    # A generator takes the lower half of a 64-bit word first, and the upper 24 bits of a half.
    halves = np.stack([words & np.uint64(2**32 - 1), words >> np.uint64(32)], axis=-1).reshape(
        len(counters), 2 * words.shape[1]
    )
    start = first - 2 * first_word
    mantissas: Array = halves[:, start : start + count] >> np.uint64(8)
    return mantissas.astype(np.float32) * np.float32(2**-24)


def _philox_key(seed: int, purpose: str) -> Array:
    return np.array([seed & (2**64 - 1), crc32(purpose.encode())], np.uint64)


def _stream_counters(numbers: Sequence[int], episodes: Sequence[int], chunks: Sequence[int]) -> Array:
    """Return the counters of B streams before their first block, uint64 [B, 4]."""
    counters = np.zeros((len(numbers), 4), np.uint64)
    for column, values in enumerate((numbers, episodes, chunks), 1):
        counters[:, column] = np.asarray(values).astype(np.uint64)
    return counters


_uniform, _normal = np.random.Generator.random, np.random.Generator.standard_normal
_OF_THREAD, _INITIAL_STATE = threading.local(), generator(0, "").bit_generator.state
