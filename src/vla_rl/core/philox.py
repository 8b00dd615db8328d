"""Philox-4x64-10 (Salmon et al. 2011) for many streams at once, equal to `numpy.random.Philox` bit for bit. NumPy has
one object for each stream and needs microseconds to enter it."""

from __future__ import annotations

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
    """Return words `first` to `first + count` of each stream, uint64 [B, count].

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
