"""Batches of trainers that use the whole rollout say who chose the executed actions."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from vla_rl.core.trainers import ModelInputs, OptimizerStep
from vla_rl.core.types import ActionSource, Observation, Requirements
from vla_rl.toolkit.trainers.micro_batches import MicroBatches


def batches_of(**fields):
    obs = Observation(images={}, instructions=("go",) * 3, state=np.zeros((3, 2), np.float32))
    inputs = ModelInputs(obs=obs, actions=np.zeros((3, 2, 1), np.float32), extras={})
    common = {
        "versions": np.zeros(3, np.int64),
        "weights": np.ones((3, 2), np.float32),
        "value_weights": None,
        "log_probs": np.zeros((3, 2, 1), np.float32),
        "values": None,
        "valid": np.ones((3, 2), bool),
        "advantages": np.zeros((3, 2), np.float32),
        "returns": None,
    }
    trained = SimpleNamespace(device="cpu", dummy=inputs)
    builder = MicroBatches(trained, SimpleNamespace(needs=Requirements()))  # type: ignore[arg-type]
    parts = (np.array([0, 2]), np.array([1]))
    step = OptimizerStep(micro_batches=parts, passes=2, divisor=1.0, value_divisor=1.0)
    return list(builder.iterate_batches(inputs, common | fields, parts, step, 0))


def test_batches_hold_sources_and_executed_actions() -> None:
    source = np.array([[0, 0], [0, 1], [1, 1]], np.int8)
    executed = np.arange(6, dtype=np.float32).reshape(3, 2, 1)
    first, second = batches_of(source=source, executed_actions=executed)
    assert first.chunk.source.tolist() == [[0, 0], [ActionSource.PERSON] * 2] and "source" not in first.extras
    assert second.chunk.source.tolist() == [[0, 1]]
    assert torch.equal(second.executed_actions, torch.tensor([[[2.0], [3.0]]]))


def test_batches_without_takeovers_have_neither() -> None:
    first, _ = batches_of(source=None, executed_actions=None)
    assert first.chunk.source is None and first.executed_actions is None and not first.extras
