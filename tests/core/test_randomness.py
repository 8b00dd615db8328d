from __future__ import annotations

import numpy as np
import pytest

from vla_rl.core.randomness import MANY_SAMPLES, Noise, derived_seed, derived_seeds, generator


def test_numbers_are_a_function_of_the_key():
    keys = [(s, p, r, e, c) for s in (0, 1) for p in ("a", "b") for r in (0, 1) for e in (0, 2**40) for c in (0, 1)]
    draws = {key: tuple(generator(*key).random(4)) for key in keys}
    assert len(set(draws.values())) == len(keys)
    assert all(tuple(generator(*key).random(4)) == draws[key] for key in keys)


def test_a_row_draws_the_same_in_any_batch():
    whole = Noise(3, "action", [0, 1, 2], [5, 5, 5], [0, 1, 2])
    part = Noise(3, "action", [2, 0], [5, 5], [2, 0])
    first, second = whole.uniforms(2, 7), whole.normals(3)
    assert first.dtype == np.float32 and first.shape == (3, 2, 7)
    assert (part.uniforms(2, 7) == first[[2, 0]]).all()
    assert (part.normals(3) == second[[2, 0]]).all()
    assert ((first >= 0) & (first < 1)).all()


def test_an_empty_batch_draws_nothing():
    assert Noise(0, "action", [], [], []).uniforms(2).shape == (0, 2)


@pytest.mark.parametrize("many", [5, 1001])
def test_calls_continue_each_stream_whoever_draws_between(many: int):
    """Draws equal those of one generator for each sample. An odd count of 32-bit numbers leaves half a word behind."""
    keys = [3, 4], [0, 1], [7, 7]
    own, other = Noise(1, "action", *keys), Noise(2, "evaluation", *keys)
    drawn = []
    for _ in range(3):
        drawn += [own.uniforms(3), own.normals(2, many)]
        other.normals(1)
    for sample, key in enumerate(zip(*keys, strict=True)):
        alone = generator(1, "action", *key)
        for uniforms, normals in zip(drawn[::2], drawn[1::2], strict=True):
            assert np.array_equal(uniforms[sample], alone.random(3, np.float32))
            assert np.array_equal(normals[sample], alone.standard_normal((2, many), np.float32))


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 7), (8, 5)])
def test_many_samples_draw_what_each_draws_alone(shape: tuple[int, ...]):
    """All streams are computed at once. Odd counts leave half a word behind, and further calls continue there."""
    count = MANY_SAMPLES + 5
    numbers = [17 * sample + 2**40 for sample in range(count)]
    episodes = [sample % 3 for sample in range(count)]
    chunks = [2 * sample for sample in range(count)]
    noise = Noise(-1, "action", np.array(numbers), episodes, chunks)
    drawn = [noise.uniforms(*shape), noise.uniforms(3), noise.normals(2), noise.uniforms(*shape)]
    for sample, key in enumerate(zip(numbers, episodes, chunks, strict=True)):
        alone = generator(-1, "action", *key)
        for values, size, method in zip(drawn, (shape, (3,), (2,), shape), "uunu", strict=True):
            expected = alone.random(size, np.float32) if method == "u" else alone.standard_normal(size, np.float32)
            assert np.array_equal(values[sample], expected)


def test_seeds_of_many_keys_are_those_of_each():
    numbers = [*range(200), 2**40, 2**63 - 1]
    episodes = [number % 7 for number in numbers]
    seeds = derived_seeds(11, "episode", numbers, episodes)
    assert seeds.dtype == np.int64
    assert seeds.tolist() == [derived_seed(11, "episode", *key) for key in zip(numbers, episodes, strict=True)]
    assert derived_seeds(11, "episode", [], []).tolist() == []
