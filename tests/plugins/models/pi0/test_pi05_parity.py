"""Our network against numbers made with openpi's PyTorch pi0.5 (transformers 4.53.2, fp32)."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from pi0_cases import REFERENCE_SIZES
from rounding import assert_same_up_to
from safetensors.torch import load_file
from torch import Tensor

from reference_files import reference
from vla_rl.plugins.models.pi0.adaptive import Pi05Module, empty_adaptive
from vla_rl.plugins.models.pi0.architecture import PiSizes, network_config
from vla_rl.plugins.models.pi0.builder import find_state_bins, prompt_text, state_text
from vla_rl.plugins.models.pi0.network import PiPrefix
from vla_rl.plugins.models.pi0.statistics import HEAD, TIED, open_names, public_name
from vla_rl.toolkit.models.checkpoints.files import find_weights
from vla_rl.toolkit.models.checkpoints.lerobot import FeatureScale
from vla_rl.toolkit.models.flow.checkpoint import FlowShape
from vla_rl.toolkit.models.flow.policy import FlowSchedule
from vla_rl.toolkit.models.heads import PrefixValueHead
from vla_rl.toolkit.models.networks import fill_network
from vla_rl.toolkit.models.scaling import FeatureScaler

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def module() -> Pi05Module:
    network = empty_adaptive(network_config(REFERENCE_SIZES, FlowShape(horizon=10, action_dim=8, state_dim=8)))
    weights = find_weights(reference("pi05", "model.safetensors").parent, open_names)
    fill_network(network, weights, CPU, torch.float32, public_name=public_name)
    return Pi05Module(network, PrefixValueHead(64, (16,), None, False, 0)).eval()


@pytest.fixture(scope="module")
def data() -> dict[str, Tensor]:
    return load_file(reference("pi05", "io.safetensors"))


def inputs(data: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images with the third camera masked, tokens with padding: as openpi takes them."""
    pixels = torch.stack([data[f"image_{i}"] for i in range(3)], dim=1)
    shown = torch.stack([data[f"image_mask_{i}"] for i in range(3)], dim=1)
    assert not shown.all() and not data["token_mask"].all()
    return pixels, data["tokens"], data["token_mask"], shown


@pytest.fixture(scope="module")
def prefix(module: Pi05Module, data: dict[str, Tensor]) -> PiPrefix:
    with torch.no_grad():
        return module.build_prefix(module.run_backbone(*inputs(data)), data["state"])


@torch.no_grad()
def test_embeddings(module: Pi05Module, data: dict[str, Tensor]) -> None:
    pixels, *rest = inputs(data)
    assert_same_up_to(16, module.lay_out(module.embed_images(pixels), *rest).embeds, data["prefix_embs"])
    embed = module.pi0.embed_action_time
    assert_same_up_to(8, embed.action_in_proj(data["x_t"]), data["suffix_embs"])
    assert_same_up_to(8, embed(data["time"]), data["adarms_cond"])


@torch.no_grad()
@pytest.mark.parametrize("pads", [False, True])
def test_what_the_critic_reads(module: Pi05Module, data: dict[str, Tensor], pads: bool) -> None:
    """The mean over images and prompt; with `pads`, over the whole prompt, as RLinf takes it."""
    out, mask = data["prefix_out"], data["prefix_pad"].clone()
    module.pads = pads
    try:
        found = module.run_backbone(*inputs(data)).hidden
    finally:
        module.pads = False
    if pads:
        mask[:, -20:] = True
    wanted = (out * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    assert found is not None
    assert_same_up_to(16, found, wanted)


@torch.no_grad()
def test_velocity_and_loss(module: Pi05Module, data: dict[str, Tensor], prefix: PiPrefix) -> None:
    hidden = module.run_expert(prefix, data["state"], data["x_t"], data["time"])
    assert_same_up_to(16, hidden, data["suffix_out"])
    assert_same_up_to(16, module.project_velocity(hidden), data["velocity"])
    args = (data[name] for name in ("state", "actions", "noise", "time"))
    assert_same_up_to(16, module.flow_matching(prefix, *args), data["loss_elementwise"])


@torch.no_grad()
@pytest.mark.parametrize("prepared", [True, False], ids=["norms once for all passes", "norms in each pass"])
@pytest.mark.parametrize("steps", [1, 3, 4, 10])
def test_samples(module: Pi05Module, data: dict[str, Tensor], prefix: PiPrefix, steps: int, prepared: bool) -> None:
    schedule, x = FlowSchedule(steps, 0.5, CPU), data["noise"]
    prefixes = module.prepare_steps(prefix, schedule.time) if prepared else [prefix] * steps
    for index, timed in zip(torch.arange(steps)[:, None].expand(-1, 2), prefixes, strict=True):
        velocity = module.project_velocity(module.run_expert(timed, data["state"], x, schedule.time[index]))
        x = schedule.step_mean(x, velocity, index, None)
    assert_same_up_to(32, x, data[f"sampled_{steps}"])


@torch.no_grad()
def test_a_camera_that_is_left_out_is_a_masked_one(
    module: Pi05Module, data: dict[str, Tensor], prefix: PiPrefix
) -> None:
    pixels, ids, mask, shown = inputs(data)
    for row in range(2):
        seen = module.run_backbone(pixels[[row]][:, shown[row]], ids[[row]], mask[[row]])
        alone = module.build_prefix(seen, data["state"][[row]])
        args = (data["state"][[row]], data["x_t"][[row]], data["time"][[row]])
        assert_same_up_to(16, module.project_velocity(module.run_expert(alone, *args)), data["velocity"][[row]])
        assert alone.summary is not None and prefix.summary is not None
        assert_same_up_to(16, alone.summary, prefix.summary[[row]])


def test_prompts() -> None:
    cases = json.loads(reference("pi05", "prompts_norm.json").read_text())["prompts"]
    assert len(cases) == 4
    for case in cases:
        text = "".join(part for part, _ in case["encoded"])
        if case["state"] is None:
            assert prompt_text(case["instruction"]) == text
        else:
            bins = find_state_bins(np.array(case["state"], np.float32)).tolist()
            assert state_text(case["instruction"], bins) == text


def test_bins_are_numpys() -> None:
    numbers = torch.cat([torch.linspace(-1.2, 1.2, 999), torch.arange(-130, 131) / 128])
    wanted = np.digitize(numbers.numpy(), np.linspace(-1, 1, 257)[:-1]) - 1
    assert find_state_bins(numbers.numpy()).tolist() == wanted.tolist()
    assert find_state_bins(np.array([-1.1, -1.0, 0.0, 1.0, 9.0], np.float32)).tolist() == [-1, 0, 128, 255, 255]


def test_quantiles_are_openpis() -> None:
    """Also of a dimension that never moves, with 1e-6 for its width."""
    case = json.loads(reference("pi05", "prompts_norm.json").read_text())["quantile"]
    values = tuple(map(tuple, (case["q01"], case["q99"])))
    scaler = FeatureScaler(
        FeatureScale(mode="QUANTILES", values=values, dim=8, eps=0.0, margin=1e-6), CPU, torch.float64
    )
    x, normalised = (torch.tensor(case[name], dtype=torch.float64) for name in ("x", "normalized"))
    torch.testing.assert_close(scaler.normalise_feature(x, 8), normalised, rtol=1e-12, atol=1e-12)
    y, physical = (torch.tensor(case[name], dtype=torch.float64) for name in ("y", "unnormalized"))
    torch.testing.assert_close(scaler.restore_units(y), physical[..., :8], rtol=1e-12, atol=1e-12)


def test_public_key_layout() -> None:
    """The full-size network has openpi's names and shapes; the tied pair is one tensor, as in files."""
    wanted = json.loads(reference("pi05", "keys_pi05_full.json").read_text())
    assert len(wanted) == 813
    assert wanted.pop(TIED) == wanted[HEAD]
    with torch.device("meta"):
        network = empty_adaptive(network_config(PiSizes(), FlowShape(horizon=50)))
    assert {public_name(name): list(tensor.shape) for name, tensor in network.state_dict().items()} == wanted
    assert sum(p.numel() for p in network.parameters()) == 3_616_757_520
