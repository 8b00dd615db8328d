"""How networks get their weights."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from vla_rl.toolkit.models.checkpoints.files import find_weights
from vla_rl.toolkit.models.networks import allocate_network, fill_network

CPU = torch.device("cpu")


def tied_network():
    with torch.device("meta"):
        network = nn.ModuleDict({"tokens": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
    network["head"].weight = network["tokens"].weight
    return network


def test_weights_that_filling_would_untie_are_refused(tmp_path):
    table = torch.randn(5, 3)
    save_file({"tokens.weight": table, "head.weight": table.clone()}, tmp_path / "model.safetensors")
    message = "tokens.weight and head.weight are one parameter"
    with pytest.raises(ValueError, match=message):
        fill_network(tied_network(), find_weights(tmp_path), CPU, torch.float32)
    with pytest.raises(ValueError, match=message):
        allocate_network(tied_network(), CPU, torch.float32, "test")
