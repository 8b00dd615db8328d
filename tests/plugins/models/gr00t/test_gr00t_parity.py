"""Our network against numbers made with lerobot's port of GR00T N1.5 (fp32)."""

from __future__ import annotations

import json

import pytest
import torch
from rounding import assert_same_up_to
from safetensors.torch import load_file
from torch import Tensor

from reference_files import reference
from vla_rl.plugins.models.gr00t.folder import GrootSizes
from vla_rl.plugins.models.gr00t.head import find_time_bucket
from vla_rl.plugins.models.gr00t.network import TIED, EagleModule, GrootPrefix, empty_network, open_names, public_name
from vla_rl.toolkit.models.checkpoints.files import find_weights
from vla_rl.toolkit.models.flow.checkpoint import FlowShape
from vla_rl.toolkit.models.flow.network import BackboneFeatures
from vla_rl.toolkit.models.flow.policy import FlowSchedule, log_density
from vla_rl.toolkit.models.heads import PrefixValueHead
from vla_rl.toolkit.models.networks import fill_network

CPU = torch.device("cpu")
HORIZON, ACTION = 6, 8
UNEMBEDDINGS, EMBEDDINGS = next(iter(TIED.items()))
SIZES = GrootSizes(
    text_width=64, text_mlp=128, text_depth=3, heads=4, kv_heads=2, head_dim=16, vocab=512,
    vision_width=48, vision_mlp=96, vision_depth=2, vision_heads=4, image_size=28, patch_size=14,
    mixer_depth=2, mixer_heads=4, dit_depth=4, dit_heads=4, dit_head_dim=12, hidden=32, output=32,
    future_tokens=4, positions=32, embodiments=5,
)  # fmt: skip
"""Sizes of the network behind the reference data."""


@pytest.fixture(scope="module")
def modules() -> list[EagleModule]:
    """One for each row of the data, whose robots are different ones."""
    network = empty_network(SIZES, FlowShape(horizon=HORIZON, action_dim=ACTION, state_dim=12))
    folder = reference("gr00t", "model.safetensors").parent
    fill_network(network, find_weights(folder, open_names), CPU, torch.float32, public_name=public_name)
    rows = load_file(reference("gr00t", "io.safetensors"))["embodiment_id"].tolist()
    assert len(set(rows)) == len(rows) == 2
    head = PrefixValueHead(64 + 48, (16,), None, False, 0)
    return [EagleModule(network, (HORIZON, ACTION), row, 500, head).eval() for row in rows]


@pytest.fixture(scope="module")
def data() -> dict[str, Tensor]:
    return load_file(reference("gr00t", "io.safetensors"))


class Rows:
    """The network row by row, each as its robot."""

    def __init__(self, modules: list[EagleModule], data: dict[str, Tensor]) -> None:
        self.modules, self.data = modules, data
        pixels = data["pixel_values"].unflatten(0, (2, -1))
        self.seen = modules[0].run_towers(pixels, data["input_ids"])
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
def rows(modules: list[EagleModule], data: dict[str, Tensor]) -> Rows:
    with torch.no_grad():
        return Rows(modules, data)


@torch.no_grad()
def test_backbone(modules: list[EagleModule], data: dict[str, Tensor], rows: Rows) -> None:
    assert_same_up_to(16, modules[0].embed_images(data["pixel_values"]), data["vit_embeds"])
    assert_same_up_to(16, rows.seen, data["backbone_features"])


@torch.no_grad()
def test_what_the_transformer_is_shown(modules: list[EagleModule], data: dict[str, Tensor], rows: Rows) -> None:
    """And the critic's input: the mean over images and prompt next to the state's features."""
    mixed = modules[0].network.action_head.refine_tokens(
        data["backbone_features"], data["attention_mask"].bool()[:, None, None]
    )
    assert_same_up_to(16, mixed, data["vl_embs"])
    assert_same_up_to(16, torch.cat([prefix.state for prefix in rows.prefixes]), data["state_features"])
    wanted = torch.cat([data["vl_embs"].mean(1), data["state_features"][:, 0]], dim=1)
    assert_same_up_to(16, torch.cat([prefix.summary for prefix in rows.prefixes]), wanted)


@torch.no_grad()
def test_velocity_and_loss(modules: list[EagleModule], data: dict[str, Tensor], rows: Rows) -> None:
    time = 1 - data["t"]
    assert torch.equal(find_time_bucket(time).long(), data["t_discretized"])
    for i, module in enumerate(modules):
        encoded = module.network.action_head.action_encoder(data["x_t"][[i]], find_time_bucket(time[[i]]), module.row)
        assert_same_up_to(16, encoded, data["action_features"][[i]])
    hidden = rows.hidden(data["x_t"], time)
    assert_same_up_to(32, hidden, data["model_output"][:, -HORIZON:])
    assert_same_up_to(32, rows.velocity(hidden), -data["velocity"])
    losses = []
    for i, (module, prefix) in enumerate(zip(modules, rows.prefixes, strict=True)):
        args = (data["actions"][[i]], data["noise"][[i]], time[[i]])
        losses.append(module.flow_matching(prefix, data["state"][i], *args))
    losses = torch.cat(losses)
    assert_same_up_to(32, losses * data["loss_mask"], data["loss_elementwise"] * data["loss_mask"])
    assert_same_up_to(16, (losses * data["loss_mask"]).sum() / data["loss_mask"].sum(), data["loss"])


@torch.no_grad()
@pytest.mark.parametrize("steps", [1, 4, 16])
def test_samples(data: dict[str, Tensor], rows: Rows, steps: int) -> None:
    schedule, x = FlowSchedule(steps, 0.5, CPU, exact=True), data["noise"]
    for index in torch.arange(steps)[:, None].expand(-1, 2):
        x = schedule.step_mean(x, rows.velocity(rows.hidden(x, schedule.time[index])), index, None)
    assert_same_up_to(32, x, data[f"sampled_{steps}"])


def test_the_original_counts_times_the_other_way() -> None:
    """The original's time steps are int(i / K * 1000). RLinf's formula in the original's time equals the toolkit's in
    ours."""
    for steps in range(1, 33):
        told = find_time_bucket(FlowSchedule(steps, 0.5, CPU, exact=True).time)
        assert told.tolist() == [int(i / steps * 1000) for i in range(steps)]
    steps, level, rng = 4, 0.7, torch.Generator().manual_seed(0)
    x, v, after = (torch.randn(2, 3, 5, generator=rng, dtype=torch.float64) for _ in range(3))
    schedule, d = FlowSchedule(steps, level, CPU, exact=True), 1 / steps
    for i in range(steps):
        t = i * d
        s = level * ((1 - t) / (t or d)) ** 0.5
        noise, action = x - v * t, x + v * (1 - t)
        mean = noise * (1 - (t + d) - s**2 * d / (2 * (1 - t))) + action * (t + d)
        index = torch.full((2,), i)
        ours = schedule.step_mean(x, -v, index, torch.ones(2, dtype=torch.bool))
        torch.testing.assert_close(ours, mean, rtol=0, atol=2e-6)
        density = torch.distributions.Normal(mean, s * d**0.5).log_prob(after)
        torch.testing.assert_close(
            log_density(after, ours, schedule.std[index][:, None, None]), density, rtol=1e-5, atol=1e-4
        )


def test_public_key_layout() -> None:
    """Both ways: all names, and no other; the files have the tied pair once or twice."""
    wanted = json.loads(reference("gr00t", "keys_gr00t_n1_5_full.json").read_text())
    assert len(wanted) == 899
    with torch.device("meta"):
        network = empty_network(GrootSizes(), FlowShape(horizon=16, state_dim=64))
    own = {public_name(name): list(tensor.shape) for name, tensor in network.state_dict().items()}
    assert own == {name: shape for name, shape in wanted.items() if name != UNEMBEDDINGS}
    assert sum(p.numel() for p in network.parameters()) == 2_413_522_880
    assert wanted[EMBEDDINGS] == wanted[UNEMBEDDINGS]
    for left_out in (UNEMBEDDINGS, EMBEDDINGS, None):
        there = [name for name in wanted if name != left_out]
        assert sorted(open_names(there).values()) == sorted(own)
