"""Our network against numbers made with lerobot's SmolVLA (fp32)."""

from __future__ import annotations

import json

import pytest
import torch
from rounding import assert_same_up_to
from safetensors.torch import load_file
from torch import Tensor

from reference_files import reference
from vla_rl.plugins.models.smolvla.folder import SmolVLASizes, mlp_width
from vla_rl.plugins.models.smolvla.network import SmolVLAModule, SmolVLAPrefix, empty_network
from vla_rl.toolkit.json_files import Record
from vla_rl.toolkit.models.checkpoints.files import find_weights
from vla_rl.toolkit.models.flow.checkpoint import FlowShape
from vla_rl.toolkit.models.flow.policy import FlowSchedule
from vla_rl.toolkit.models.heads import PrefixValueHead
from vla_rl.toolkit.models.networks import fill_network

CPU = torch.device("cpu")
SIZES = SmolVLASizes(
    text_width=64, text_mlp=128, expert_width=48, expert_mlp=256, depth=4, heads=4, kv_heads=2, head_dim=16, vocab=512,
    vision_width=48, vision_mlp=96, vision_depth=2, vision_heads=4, image_size=32, patch_size=8, shuffle=2,
)  # fmt: skip
"""Sizes of the network behind the reference data."""


@pytest.fixture(scope="module")
def module() -> SmolVLAModule:
    network = empty_network(SIZES, FlowShape(horizon=10, action_dim=8, state_dim=8))
    folder = reference("smolvla", "model.safetensors").parent
    fill_network(
        network, find_weights(folder, lambda names: {n: n.removeprefix("model.") for n in names}), CPU, torch.float32
    )
    return SmolVLAModule(network, (10, 8), PrefixValueHead(64, (16,), None, False, 0)).eval()


@pytest.fixture(scope="module")
def data() -> dict[str, Tensor]:
    return load_file(reference("smolvla", "io.safetensors"))


class Rows:
    """The network row by row, each with the cameras that it has: lerobot masks the others instead."""

    def __init__(self, module: SmolVLAModule, data: dict[str, Tensor]) -> None:
        self.module, self.data = module, data
        self.prefixes = [self._see(row) for row in range(2)]

    def _see(self, row: int) -> SmolVLAPrefix:
        pixels = torch.stack([self.data[f"image_{i}"][row] for i in range(2) if self.data[f"image_mask_{i}"][row]])
        seen = self.module.run_backbone(pixels[None], self.data["tokens"][[row]], self.data["token_mask"][[row]])
        return self.module.build_prefix(seen, self.data["state"][[row]])

    def hidden(self, x: Tensor, time: Tensor) -> Tensor:
        parts = [(prefix, self.data["state"][[i]], x[[i]], time[[i]]) for i, prefix in enumerate(self.prefixes)]
        return torch.cat([self.module.run_expert(*part) for part in parts])


@pytest.fixture(scope="module")
def rows(module: SmolVLAModule, data: dict[str, Tensor]) -> Rows:
    assert not data["token_mask"].all()
    with torch.no_grad():
        return Rows(module, data)


@torch.no_grad()
def test_embeddings(module: SmolVLAModule, data: dict[str, Tensor]) -> None:
    pixels = torch.stack([data["image_0"], data["image_1"]], dim=1)
    assert_same_up_to(16, module.embed_images(data["image_0"]), data["image_embs_0"])
    found = torch.cat(
        [module.embed_prefix(pixels, data["tokens"]), module.network.state_proj(data["state"])[:, None]], 1
    )
    assert_same_up_to(16, found, data["prefix_embs"])


@torch.no_grad()
def test_prefix(module: SmolVLAModule, data: dict[str, Tensor], rows: Rows) -> None:
    """Compare the prefix's output where it is not padding, and the mean that a critic reads."""
    valid, wanted = data["prefix_pad"], data["prefix_out"]
    pixels = torch.stack([data["image_0"], data["image_1"]], dim=1)
    if data["image_mask_0"].all() and data["image_mask_1"].all():
        seen = module.run_backbone(pixels, data["tokens"], data["token_mask"])
        assert_same_up_to(16, seen.hidden[valid[:, :-1]], wanted[:, :-1][valid[:, :-1]])
    mean = (wanted * valid[..., None]).sum(1) / valid.sum(1, keepdim=True)
    assert_same_up_to(16, torch.cat([prefix.summary for prefix in rows.prefixes]), mean)


@torch.no_grad()
def test_velocity_and_loss(module: SmolVLAModule, data: dict[str, Tensor], rows: Rows) -> None:
    hidden = rows.hidden(data["x_t"], data["time"])
    assert_same_up_to(32, hidden, data["suffix_out"])
    assert_same_up_to(32, module.project_velocity(hidden), data["velocity"])
    losses = []
    for i, prefix in enumerate(rows.prefixes):
        args = (data[name][[i]] for name in ("state", "actions", "noise", "time"))
        losses.append(module.flow_matching(prefix, *args))
    assert_same_up_to(32, torch.cat(losses), data["loss_elementwise"])


@torch.no_grad()
@pytest.mark.parametrize("steps", [1, 4, 10])
def test_samples(module: SmolVLAModule, data: dict[str, Tensor], rows: Rows, steps: int) -> None:
    schedule, x = FlowSchedule(steps, 0.5, CPU, exact=True), data["noise"]
    for index in torch.arange(steps)[:, None].expand(-1, 2):
        x = schedule.step_mean(x, module.project_velocity(rows.hidden(x, schedule.time[index])), index, None)
    assert_same_up_to(32, x, data[f"sampled_{steps}"])


def test_public_key_layout() -> None:
    wanted = json.loads(reference("smolvla", "keys_smolvla_full.json").read_text())
    assert len(wanted) == 500
    with torch.device("meta"):
        network = empty_network(SmolVLASizes(), FlowShape(horizon=50))
    assert {name: list(tensor.shape) for name, tensor in network.state_dict().items()} == wanted
    assert sum(p.numel() for p in network.parameters()) == 450_046_176
    assert SmolVLASizes.of_config(Record(source="config.json", data={})) == SmolVLASizes()
    assert (mlp_width(720), mlp_width(48)) == (2048, 256)
