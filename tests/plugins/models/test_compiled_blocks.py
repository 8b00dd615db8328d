"""Models with compiled blocks: the same log-probs, values and gradients, no graph break, few recompilations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from compiled_cases import LONG, MODELS, SPECIAL, observation
from model_cases import noise

from vla_rl.core.types import Observation
from vla_rl.toolkit.models.acting.compilation import MAX_RECOMPILATIONS, CompiledBlocks

ATOL = 1e-5
"""`check_model`'s tolerance of log-probs and values."""


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def gradients(model: Any, obs: Observation, chunk: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    scores = model.chunk_log_probs(obs, chunk)
    model.module.zero_grad(set_to_none=True)
    (scores.log_probs.mean() + scores.values.mean()).backward()
    return scores, {name: p.grad for name, p in model.module.named_parameters() if p.grad is not None}


def compile_policy(model: Any, backend: str) -> CompiledBlocks:
    return CompiledBlocks(model.module, model.blocks, regions=model.regions, policy=model, backend=backend)


def check_equal(model: Any, backend: str, atol: float) -> CompiledBlocks:
    """Compile the blocks, and compare what they compute with eager mode."""
    obs = observation(3)
    chunk = model.sample_chunk(obs, noise(3), False)
    expected, expected_gradients = gradients(model, obs, chunk)
    compiled = compile_policy(model, backend)

    sampled = model.sample_chunk(obs, noise(3), False)
    scores, found = gradients(model, obs, chunk)

    assert compiled.failure is None, "a graph break, or an error"
    assert compiled.graphs > 0
    close = {"rtol": 1e-4, "atol": atol}
    torch.testing.assert_close(sampled.log_probs, chunk.log_probs, **close)
    torch.testing.assert_close(sampled.actions, chunk.actions, **close)
    torch.testing.assert_close(scores.log_probs, sampled.log_probs, **close)
    torch.testing.assert_close(scores.log_probs, expected.log_probs, **close)
    torch.testing.assert_close(scores.values, expected.values, **close)
    torch.testing.assert_close(model.values(obs), expected.values.detach(), **close)
    assert found.keys() == expected_gradients.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected_gradients[name], **close)
    return compiled


OTHERS = [pytest.param(name, marks=pytest.mark.exhaustive) for name in MODELS if name != "openvla_oft"]
"""The other models, for tests that take half a minute each."""


@pytest.mark.parametrize("name", MODELS)
def test_compiled_blocks_compute_the_same(name: str) -> None:
    check_equal(MODELS[name](), "aot_eager", ATOL)


@pytest.mark.parametrize("name", SPECIAL)
def test_other_layers_and_settings(name: str) -> None:
    check_equal(SPECIAL[name](), "aot_eager", ATOL)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["openvla_oft", *OTHERS])
def test_inductor_computes_the_same(name: str) -> None:
    check_equal(MODELS[name](), "inductor", ATOL)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["openvla_oft", *OTHERS])
def test_recompilations_are_bounded_over_batch_sizes_and_prompt_lengths(name: str) -> None:
    model = MODELS[name]()
    compiled = compile_policy(model, "aot_eager")
    counts = []
    for instruction in (None, LONG):
        for rows in (4, 3, 1, 2, 5):
            obs = observation(rows, instruction)
            model.chunk_log_probs(obs, model.sample_chunk(obs, noise(rows), False))
        counts.append(compiled.graphs)

    assert compiled.failure is None
    assert not compiled.notes, "no kind of blocks is compiled too often"
    assert compiled.recompilations <= MAX_RECOMPILATIONS * len(compiled.kinds)
    assert counts[1] <= 2 * counts[0], "a longer prompt costs no more than the batch sizes did"
