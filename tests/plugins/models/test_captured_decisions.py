"""Decisions as CUDA graphs take them: from tensors to tensors, without host reads, padded to a few batch sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compiled_cases import LONG, MODELS, SPECIAL, context, observation
from model_cases import noise

from eager_recorder import EagerRecorder, no_host_reads
from vla_rl.plugins.models.pi0 import pi05
from vla_rl.plugins.models.pi0.config import Pi05Config
from vla_rl.toolkit.models.acting.cuda_graphs import CapturedFunction


@pytest.mark.parametrize("greedy", [False, True], ids=["sampled", "greedy"])
@pytest.mark.parametrize("name", [*MODELS, "gr00t N1.7"])
def test_deciding_reads_nothing_on_the_host(name: str, greedy: bool) -> None:
    model = (MODELS | SPECIAL)[name]()
    decide, calls = model.decide, []

    def watched(inputs: Any) -> Any:
        calls.append(all(len(tensor) == 3 for tensor in inputs.values()))
        with no_host_reads():
            return decide(inputs)

    model.decide = watched
    model.sample_chunk(observation(3), noise(3), greedy)

    assert calls == [True]


@pytest.mark.parametrize("greedy", [False, True], ids=["sampled", "greedy"])
@pytest.mark.parametrize("name", MODELS)
def test_captured_decisions_are_those_of_the_model(name: str, greedy: bool) -> None:
    model = MODELS[name]()
    expected = {rows: model.sample_chunk(observation(rows), noise(rows), greedy) for rows in (3, 4, 5)}
    captured = CapturedFunction(model.decide, EagerRecorder())
    model.decide = captured
    for rows, chunk in expected.items():
        decided = model.sample_chunk(observation(rows), noise(rows), greedy)
        torch.testing.assert_close(decided.actions, chunk.actions, rtol=0, atol=1e-5)
        torch.testing.assert_close(decided.log_probs, chunk.log_probs, rtol=0, atol=1e-5)
        torch.testing.assert_close(decided.values, chunk.values, rtol=0, atol=1e-5)
        assert decided.extras.keys() == chunk.extras.keys()

    assert captured.capture_count == 2, "batches of 3 and 4 share one graph"


def test_a_captured_policy_scores_what_it_sampled() -> None:
    model = MODELS["pi0"]()
    model.decide = CapturedFunction(model.decide, EagerRecorder())
    obs = observation(3)
    chunk = model.sample_chunk(obs, noise(3), False)

    torch.testing.assert_close(model.chunk_log_probs(obs, chunk).log_probs.detach(), chunk.log_probs, rtol=0, atol=1e-5)


def test_a_state_in_the_prompt_is_captured_for_each_width() -> None:
    model = pi05.build(Pi05Config(preset="tiny"), context())
    captured = CapturedFunction(model.decide, EagerRecorder())
    expected = [
        model.sample_chunk(observation(2, instruction), noise(2), False) for instruction in (None, LONG, None, LONG)
    ]
    model.decide = captured
    for instruction, chunk in zip((None, LONG, None, LONG), expected, strict=True):
        decided = model.sample_chunk(observation(2, instruction), noise(2), False)
        torch.testing.assert_close(decided.log_probs, chunk.log_probs, rtol=0, atol=1e-5)

    assert captured.capture_count == 2, "a graph for each width of the prompt"
