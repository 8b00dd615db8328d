"""Our network against numbers made with the original code (openvla, timm 0.9.10, transformers 4.40.1)."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from openvla_cases import network, tiny_config
from rounding import assert_same_up_to
from safetensors.torch import load_file
from torch import Tensor

from reference_files import reference
from vla_rl.plugins.models.openvla.architecture import preset_config
from vla_rl.plugins.models.openvla.base import OpenVLAImageProcessor, center_crop
from vla_rl.plugins.models.openvla.codec import ActionCodec, ActionScale, ActionScaler
from vla_rl.plugins.models.openvla.modeling import OpenVLAForActionPrediction, hollow_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model() -> OpenVLAForActionPrediction:
    return network()


@pytest.fixture(scope="module")
def data() -> dict[str, Tensor]:
    return load_file(reference("openvla", "openvla_io.safetensors"))


@torch.no_grad()
def test_vision_features_and_projection(model: OpenVLAForActionPrediction, data: dict[str, Tensor]) -> None:
    pixels = data["pixel_values"]
    backbone = model.vision_backbone
    assert_same_up_to(16, backbone.featurizer(pixels[:, :3]), data["dino_feats"])
    assert_same_up_to(16, backbone.fused_featurizer(pixels[:, 3:]), data["siglip_feats"])
    assert_same_up_to(16, backbone(pixels), data["patch_feats"])
    assert_same_up_to(16, model.projector(backbone(pixels)), data["projected"])


@torch.no_grad()
def test_hidden_states_and_action_logits(model: OpenVLAForActionPrediction, data: dict[str, Tensor]) -> None:
    hidden = model(data["pixel_values"], data["input_ids"], causal=True)
    assert_same_up_to(32, hidden, data["last_hidden"])
    wanted = data["logits_action_region"][..., :256]  # ids 31744 ... 31999
    assert_same_up_to(32, model.action_logits(hidden[:, -9:]), wanted)


@torch.no_grad()
def test_right_padded_batch_with_attention_to_everything(
    model: OpenVLAForActionPrediction, data: dict[str, Tensor]
) -> None:
    """Causal and bidirectional attention agree with padding masked; bidirectional equals each row alone."""
    ids, mask = data["rp_input_ids"], data["rp_attention_mask"].bool()
    hidden = model(data["pixel_values"], ids, attention_mask=mask, causal=True)
    real = torch.cat([mask[:, :1], mask.new_ones(2, 16), mask[:, 1:]], dim=1)[:, -12:]
    logits = model.action_logits(hidden[:, -12:])
    assert_same_up_to(32, logits[real], data["rp_last256"][real])

    both = model(data["pixel_values"], ids, attention_mask=mask)
    assert (both - hidden).abs().max() > 0.1
    for row, length in enumerate(mask.sum(1).tolist()):
        alone = model(data["pixel_values"][row : row + 1], ids[row : row + 1, :length])
        assert_same_up_to(32, both[row : row + 1, : length + 16], alone)


@pytest.mark.parametrize("strategy", ["resize-naive", "letterbox", "resize-crop"])
@pytest.mark.parametrize("name", ["same", "square", "wide"])
def test_image_processor(strategy: str, name: str) -> None:
    images = load_file(reference("openvla", "image_processing.safetensors"))
    process = OpenVLAImageProcessor(tiny_config(image_resize_strategy=strategy), CPU, torch.float32, center_crop=False)
    got = process([images[f"img_{name}"][None].numpy()])[0]
    wanted = images[f"pv_{strategy}_{name}"]
    assert torch.equal(got, wanted)


def test_center_crop_of_evaluation() -> None:
    with np.load(reference("openvla", "tf_image_ops.npz")) as data:
        pairs = [(data[key], data[key.replace("in_", "crop_")]) for key in data if key.startswith("in_")]
    assert len(pairs) == 3
    for image, wanted in pairs:
        pixels = torch.from_numpy(image)[None].permute(0, 3, 1, 2).float()
        got = center_crop(pixels, 224)[0].permute(1, 2, 0).numpy()
        gap = np.abs(got - wanted.astype(np.float32))
        assert gap.max() <= 1
        assert (gap > 0).mean() < 0.001


def test_action_codec() -> None:
    cases = {c["id"]: c for c in json.loads(reference("algorithms", "action_codec.json").read_text())["cases"]}
    bounds = cases["unnormalize_bounds_q99"]

    def array(entry: Any) -> Tensor:
        return torch.tensor(entry["data"], dtype=torch.float64).view(entry["shape"])

    restored = ActionScaler(ActionScale.from_entry(bounds["stats"]), CPU).restore_values(array(bounds["normalized"]))
    torch.testing.assert_close(restored, array(bounds["actions"]), rtol=0, atol=1e-7)


def test_greedy_tokens_decode_to_the_original_actions(data: dict[str, Tensor]) -> None:
    stats = tiny_config().norm_stats["libero_tiny_no_noops"]["action"]
    codec = ActionCodec(ActionScale.from_entry(stats), vocab_end=32000, bins=256, device=CPU)
    for row in (0, 1):
        got = codec.decode_tokens(data[f"gen_tokens_{row}"])
        torch.testing.assert_close(got, data[f"actions_{row}"].float(), rtol=0, atol=1e-6)


def test_public_key_layout() -> None:
    wanted = json.loads(reference("openvla", "keys_openvla7b_full.json").read_text())
    got = {name: list(tensor.shape) for name, tensor in hollow_model(preset_config("full")).state_dict().items()}
    assert got == {name: list(entry["shape"] if isinstance(entry, dict) else entry) for name, entry in wanted.items()}
