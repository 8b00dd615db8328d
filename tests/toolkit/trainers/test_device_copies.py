"""Copies of micro-batches to the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vla_rl.core.trainers import ModelInputs
from vla_rl.core.types import Observation
from vla_rl.toolkit.trainers.micro_batches import DeviceCopies

IMAGE = np.arange(12, dtype=np.uint8).reshape(1, 2, 2, 3)
INPUTS = ModelInputs(
    obs=Observation(images={"camera": IMAGE}, instructions=("push",), state=np.ones((1, 2), np.float32)),
    actions=np.zeros((1, 2, 3), np.float32),
    extras={"tokens": np.full((1, 2), 7)},
)
FIELDS = {"weights": np.full(1, 0.5, np.float32), "valid": np.ones((1, 2), bool), "returns": None}


def test_on_a_cpu_model_inputs_stay_where_they_are() -> None:
    copies = DeviceCopies("cpu")
    samples = copies.copy_samples(INPUTS, FIELDS)
    copies.wait_for(samples)
    assert not copies.can_overlap
    assert samples.inputs is INPUTS
    weights = samples.tensors["weights"]
    assert weights is not None and weights.tolist() == [0.5] and samples.tensors["returns"] is None
    weights.zero_()
    assert FIELDS["weights"] == np.full(1, 0.5)  # a copy


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_they_are_copied_in_a_separate_stream() -> None:
    copies = DeviceCopies("cuda")
    samples = copies.copy_samples(INPUTS, FIELDS)
    copies.wait_for(samples)
    assert copies.can_overlap and samples.copied is not None
    images = samples.inputs.obs.images["camera"]
    tokens = samples.inputs.extras["tokens"]
    assert isinstance(images, torch.Tensor) and isinstance(tokens, torch.Tensor)
    assert images.is_cuda and np.array_equal(images.cpu().numpy(), IMAGE)
    assert tokens.tolist() == [[7, 7]]
    assert samples.inputs.obs.state is INPUTS.obs.state
