"""Adapters that peft itself writes: what is read equals peft's merge, and everything else is refused by its key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from vla_rl.core.errors import CheckpointError
from vla_rl.plugins.models.openvla.adapter_config import READ, WITHOUT_EFFECT
from vla_rl.plugins.models.openvla.lora import read_adapter


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


def written(folder: Path, **config: Any) -> torch.Tensor:
    """Write a trained adapter with peft, and return the weight that peft merges it to."""
    given = {"r": 4, "lora_alpha": 4, "target_modules": ["a"]} | config
    model = get_peft_model(Network(), LoraConfig(**given))
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=random))
    model.peft_config["default"].base_model_name_or_path = "base"
    model.save_pretrained(folder, save_embedding_layers=False)
    return model.merge_and_unload().a.weight.detach()


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"init_lora_weights": False},
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": "orthogonal"},
        {"init_lora_weights": "mica"},
        {"use_rslora": True},
        {"lora_dropout": 0.3, "r": 8, "lora_alpha": 3},
        {"target_modules": "all-linear", "exclude_modules": ["b"], "inference_mode": True},
    ],
    ids=str,
)
def test_a_plain_adapter_is_merged_as_by_peft(tmp_path: Path, config: dict[str, Any]) -> None:
    wanted, base = written(tmp_path, **config), Network().a.weight.detach()
    adapter = read_adapter(tmp_path)
    assert adapter is not None and adapter.base_fingerprint == "base"
    torch.testing.assert_close(adapter.merge_tensor("a.weight", base), wanted, rtol=0, atol=1e-6)
    assert (wanted - base).abs().max() > 0.01


@pytest.mark.parametrize("start", ["pissa", "pissa_niter_4", "olora"])
def test_an_adapter_that_changed_its_base_is_refused(tmp_path: Path, start: str) -> None:
    """peft subtracts the first update from the base, and does not store that base: the merge would be 0.2 off, of
    weights up to 0.18."""
    written(tmp_path, init_lora_weights=start)
    with pytest.raises(CheckpointError, match=f"init_lora_weights is '{start}', so peft changes the base's"):
        read_adapter(tmp_path)


@pytest.mark.parametrize(
    ("key", "config"),
    [
        ("use_dora", {"use_dora": True}),
        ("lora_bias", {"lora_bias": True}),
        ("bias", {"bias": "all"}),
        ("rank_pattern", {"rank_pattern": {"a": 2}}),
        ("alpha_pattern", {"alpha_pattern": {"a": 2}}),
        ("modules_to_save", {"modules_to_save": ["b"]}),
        ("kasa_config", {"kasa_config": {}}),
        ("velora_config", {"velora_config": {}}),
        ("use_qalora", {"use_qalora": True}),
        ("target_parameters", {"target_modules": [], "target_parameters": ["a.weight"]}),
        ("ensure_weight_tying", {"ensure_weight_tying": True}),
    ],
)
def test_another_kind_is_refused_by_its_key(tmp_path: Path, key: str, config: dict[str, Any]) -> None:
    written(tmp_path, **config)
    with pytest.raises(CheckpointError, match=f"this is LORA with {key}; merge it"):
        read_adapter(tmp_path)


def test_a_key_of_another_version_may_only_be_off(tmp_path: Path) -> None:
    written(tmp_path)
    file = tmp_path / "adapter_config.json"
    raw = json.loads(file.read_text())
    assert not [key for key, value in raw.items() if key not in READ | WITHOUT_EFFECT and value]
    for off in (None, False, [], {}):
        file.write_text(json.dumps(raw | {"use_future_lora": off}))
        assert read_adapter(tmp_path) is not None
    for key in ("use_future_lora", "fan_in_fan_out", "layer_replication", "alora_invocation_tokens", "use_bdlora"):
        file.write_text(json.dumps(raw | {key: [1]}))
        with pytest.raises(CheckpointError, match=f"LORA with {key}"):
            read_adapter(tmp_path)
