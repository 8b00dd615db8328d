"""Our network against numbers made with lerobot's port of GR00T N1.7 (fp32)."""

from __future__ import annotations

import json

import pytest
import torch
from rounding import assert_same_up_to
from safetensors.torch import load_file
from torch import Tensor

from reference_files import reference
from vla_rl.plugins.models.gr00t.folder import QwenSizes
from vla_rl.plugins.models.gr00t.head import find_time_bucket
from vla_rl.plugins.models.gr00t.network import TIED, GrootPrefix, QwenModule, empty_network, open_names, public_name
from vla_rl.toolkit.models.checkpoints.files import find_weights
from vla_rl.toolkit.models.flow.checkpoint import FlowShape
from vla_rl.toolkit.models.flow.network import BackboneFeatures
from vla_rl.toolkit.models.flow.policy import FlowSchedule
from vla_rl.toolkit.models.heads import PrefixValueHead
from vla_rl.toolkit.models.networks import fill_network

CPU = torch.device("cpu")
HORIZON, ACTION, PATCH, IMAGE = 6, 8, 8, 500
SIZES = QwenSizes(
    text_width=64, text_mlp=128, text_depth=3, heads=4, kv_heads=2, head_dim=16, vocab=512,
    vision_width=48, vision_mlp=96, vision_depth=3, vision_heads=4, image_size=32, patch_size=PATCH,
    mixer_depth=2, mixer_heads=4, dit_depth=6, dit_heads=4, dit_head_dim=12, hidden=32, output=32,
    positions=32, embodiments=5, vision_positions=16, deepstack=(0, 1), rope=(4, 2, 2),
)  # fmt: skip
"""Sizes of the network behind the reference data."""


def file(name: str) -> dict[str, Tensor]:
    return load_file(reference("gr00t", "n1_7", name))


@pytest.fixture(scope="module")
def data() -> dict[str, Tensor]:
    return file("io.safetensors")


@pytest.fixture(scope="module")
def modules(data: dict[str, Tensor]) -> list[QwenModule]:
    """One for each row of the data, whose robots are different ones."""
    network = empty_network(SIZES, FlowShape(horizon=HORIZON, action_dim=ACTION, state_dim=12))
    folder = reference("gr00t", "n1_7", "model.safetensors").parent
    fill_network(network, find_weights(folder, open_names), CPU, torch.float32, public_name=public_name)
    rows = data["embodiment_id"].tolist()
    assert len(set(rows)) == len(rows) == 2
    is_image = data["input_ids"] == IMAGE
    assert torch.equal(is_image, data["image_mask"]) and torch.equal(is_image[0], is_image[1])
    starts = is_image[0].nonzero().flatten().tolist()[:: SIZES.patches]
    head = PrefixValueHead(64 + 48, (16,), None, False, 0)
    return [QwenModule(network, (HORIZON, ACTION), row, starts, head).eval() for row in rows]


def frames_of(patches: Tensor) -> Tensor:
    """Qwen's flattened patches, four neighbours behind each other -> images of two frames [N, 3, 2, S, S]."""
    side = SIZES.side
    x = patches.reshape(-1, side, side, 2, 2, 3, 2, PATCH, PATCH)
    return x.permute(0, 5, 6, 1, 3, 7, 2, 4, 8).reshape(-1, 3, 2, 32, 32)


class Rows:
    """The network row by row, each as its robot."""

    def __init__(self, modules: list[QwenModule], data: dict[str, Tensor]) -> None:
        self.modules, self.data = modules, data
        first = modules[0]
        frames = frames_of(data["pixel_values"])
        self.seen = first.network.backbone.read(frames, data["input_ids"], first._starts, first._images)
        mask = data["attention_mask"].bool()
        told = enumerate(modules)
        self.prefixes: list[GrootPrefix] = [
            m.build_prefix(BackboneFeatures(mask[[i]], hidden=self.seen[[i]]), data["state"][i]) for i, m in told
        ]

    def hidden(self, x: Tensor, time: Tensor) -> Tensor:
        parts = enumerate(zip(self.modules, self.prefixes, strict=True))
        return torch.cat([m.run_expert(p, self.data["state"][i], x[[i]], time[[i]]) for i, (m, p) in parts])

    def velocity(self, hidden: Tensor) -> Tensor:
        return torch.cat([module.project_velocity(hidden[[i]]) for i, module in enumerate(self.modules)])


@pytest.fixture(scope="module")
def rows(modules: list[QwenModule], data: dict[str, Tensor]) -> Rows:
    with torch.no_grad():
        return Rows(modules, data)


def test_backbone(data: dict[str, Tensor], rows: Rows) -> None:
    """Before the final norm, with what the vision tower adds to the first layers."""
    assert_same_up_to(16, rows.seen, data["backbone_features"])


@torch.no_grad()
def test_what_the_transformer_is_shown(modules: list[QwenModule], data: dict[str, Tensor], rows: Rows) -> None:
    seen = data["attention_mask"].bool()[:, None, None]
    mixed = modules[0].network.action_head.refine_tokens(data["backbone_features"], seen)
    assert_same_up_to(16, mixed, data["vl_embs"])
    assert_same_up_to(16, torch.cat([prefix.state for prefix in rows.prefixes]), data["state_features"])
    wanted = torch.cat([data["vl_embs"].mean(1), data["state_features"][:, 0]], dim=1)
    assert_same_up_to(16, torch.cat([prefix.summary for prefix in rows.prefixes]), wanted)


@torch.no_grad()
def test_velocity(data: dict[str, Tensor], rows: Rows) -> None:
    time = 1 - data["t"]
    assert torch.equal(find_time_bucket(time).long(), data["t_discretized"])
    hidden = rows.hidden(data["x_t"], time)
    assert_same_up_to(32, hidden, data["model_output"][:, -HORIZON:])
    assert_same_up_to(32, rows.velocity(hidden), -data["velocity"])


@torch.no_grad()
@pytest.mark.parametrize("steps", [1, 4, 16])
def test_samples(data: dict[str, Tensor], rows: Rows, steps: int) -> None:
    schedule, x = FlowSchedule(steps, 0.5, CPU, exact=True), data["noise"]
    for index in torch.arange(steps)[:, None].expand(-1, 2):
        x = schedule.step_mean(x, rows.velocity(rows.hidden(x, schedule.time[index])), index, None)
    assert_same_up_to(32, x, data[f"sampled_{steps}"])


def test_public_key_layout() -> None:
    """Both ways: all names, and no other; the files have the tied pair once or twice."""
    wanted = json.loads(reference("gr00t", "n1_7", "keys_gr00t_n1_7_full.json").read_text())
    assert len(wanted) == 1031
    with torch.device("meta"):
        network = empty_network(QwenSizes(), FlowShape(horizon=40, action_dim=132, state_dim=132))
    own = {public_name(name): list(tensor.shape) for name, tensor in network.state_dict().items()}
    assert own == {name: shape for name, shape in wanted.items() if name not in TIED}
    assert sum(p.numel() for p in network.parameters()) == 3_144_016_000
    (unembeddings, embeddings), *_ = (pair for pair in TIED.items() if pair[0] in wanted)
    for left_out in (unembeddings, embeddings, None):
        assert sorted(open_names([name for name in wanted if name != left_out]).values()) == sorted(own)
