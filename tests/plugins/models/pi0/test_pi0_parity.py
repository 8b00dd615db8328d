"""Our network against numbers made with openpi's PyTorch pi0 (transformers 4.53.2, fp32), and RLinf's formulas."""

from __future__ import annotations

import json
import math

import pytest
import torch
from pi0_cases import REFERENCE_SIZES
from rounding import assert_same_up_to
from safetensors.torch import load_file
from torch import Tensor

from reference_files import reference
from vla_rl.plugins.models.pi0.architecture import FlowShape, PiSizes, network_config
from vla_rl.plugins.models.pi0.network import Pi0Module, PiPrefix, empty_network
from vla_rl.plugins.models.pi0.statistics import HEAD, TIED, open_names, public_name
from vla_rl.toolkit.json_files import Record
from vla_rl.toolkit.models.checkpoints.files import find_weights
from vla_rl.toolkit.models.flow.policy import FlowSchedule, gaussian_entropy, log_density
from vla_rl.toolkit.models.networks import fill_network

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def module() -> Pi0Module:
    network = empty_network(network_config(REFERENCE_SIZES, FlowShape(horizon=10, action_dim=8, state_dim=8)))
    weights = find_weights(reference("pi0", "model.safetensors").parent, open_names)
    fill_network(network, weights, CPU, torch.float32, public_name=public_name)
    return Pi0Module(network).eval()


@pytest.fixture(scope="module")
def data() -> dict[str, Tensor]:
    return load_file(reference("pi0", "io.safetensors"))


class Rows:
    """The network row by row, each with the cameras that it has: openpi masks the others instead."""

    def __init__(self, module: Pi0Module, data: dict[str, Tensor]) -> None:
        self.module, self.data = module, data
        self.prefixes = [self._see(row) for row in range(2)]

    def _see(self, row: int) -> PiPrefix:
        pixels = torch.stack([self.data[f"image_{i}"][row] for i in range(3) if self.data[f"image_mask_{i}"][row]])
        seen = self.module.run_backbone(pixels[None], self.data["tokens"][[row]], self.data["token_mask"][[row]])
        return self.module.build_prefix(seen, self.data["state"][[row]])

    def velocity(self, x: Tensor, time: Tensor) -> Tensor:
        parts = [(prefix, self.data["state"][[i]], x[[i]], time[[i]]) for i, prefix in enumerate(self.prefixes)]
        return torch.cat([self.module.project_velocity(self.module.run_expert(*part)) for part in parts])


@pytest.fixture(scope="module")
def rows(module: Pi0Module, data: dict[str, Tensor]) -> Rows:
    assert not all(data[f"image_mask_{i}"].all() for i in range(3))
    assert not data["token_mask"].all()
    with torch.no_grad():
        return Rows(module, data)


@torch.no_grad()
def test_embeddings(module: Pi0Module, data: dict[str, Tensor]) -> None:
    pixels = torch.stack([data[f"image_{i}"] for i in range(3)], dim=1)
    mask = torch.ones_like(data["tokens"], dtype=torch.bool)
    layout = module.lay_out(module.embed_images(pixels), data["tokens"], mask, None)
    assert_same_up_to(16, layout.embeds, data["prefix_embs"])
    suffix = module.pi0.embed_action_time(data["state"], data["noise"], data["time"])
    assert_same_up_to(8, suffix, data["suffix_embs"])


@torch.no_grad()
def test_flow_matching_loss(data: dict[str, Tensor], rows: Rows) -> None:
    losses = []
    for i, prefix in enumerate(rows.prefixes):
        args = (data[name][[i]] for name in ("state", "actions", "noise", "time"))
        losses.append(rows.module.flow_matching(prefix, *args))
    assert_same_up_to(16, torch.cat(losses), data["loss_elementwise"])


@torch.no_grad()
@pytest.mark.parametrize("steps", [1, 4, 10])
def test_samples(data: dict[str, Tensor], rows: Rows, steps: int) -> None:
    """The times are openpi's, added up in float32."""
    schedule, x = FlowSchedule(steps, 0.5, CPU), data["noise"]
    for index in torch.arange(steps)[:, None].expand(-1, 2):
        x = schedule.step_mean(x, rows.velocity(x, schedule.time[index]), index, None)
    assert_same_up_to(32, x, data[f"sampled_{steps}"])


@torch.no_grad()
def test_time_is_embedded_in_double_precision(module: Pi0Module) -> None:
    time, dim = torch.tensor([0.001, 0.37, 1.0]), 32
    wanted = [
        [
            f(2 * math.pi * float(t) / (4e-3 * 1000 ** (i / (dim / 2 - 1))))
            for f in (math.sin, math.cos)
            for i in range(16)
        ]
        for t in time
    ]
    got = module.pi0.embed_action_time.sinusoid_embeds(time)
    torch.testing.assert_close(got, torch.tensor(wanted), rtol=0, atol=1e-6)


@torch.no_grad()
def test_a_pass_leaves_the_prefix_as_it_was(data: dict[str, Tensor], rows: Rows) -> None:
    assert torch.equal(rows.velocity(data["noise"], data["time"]), rows.velocity(data["noise"], data["time"]))


@pytest.mark.parametrize("level", [0.3, 0.5])
def test_flow_sde_is_rlinfs(level: float) -> None:
    """Means and deviations as RLinf writes them: from the clean and the noise end of the velocity."""
    K, rng = 4, torch.Generator().manual_seed(0)
    x, v = torch.randn(K, 5, 3, generator=rng), torch.randn(K, 5, 3, generator=rng)
    schedule, index = FlowSchedule(K, level, CPU), torch.arange(K)
    got = schedule.step_mean(x, v, index, torch.ones(K, dtype=torch.bool))
    grid = [1.0, 0.75, 0.5, 0.25, 0.0]
    for i, (t, d) in enumerate((t, 0.25) for t in grid[:-1]):
        s = level * math.sqrt(t / (1 - (grid[1] if t == 1 else t)))
        clean, noisy = x[i] - v[i] * t, x[i] + v[i] * (1 - t)
        mean = clean * (1 - (t - d)) + noisy * (t - d - s**2 * d / (2 * t))
        torch.testing.assert_close(got[i], mean, rtol=0, atol=1e-6)
        assert schedule.std[i] == pytest.approx(math.sqrt(d) * s, rel=1e-6)
        euler = clean * (1 - (t - d)) + noisy * (t - d)
        torch.testing.assert_close(schedule.step_mean(x, v, index, None)[i], euler, rtol=0, atol=1e-6)
    if level == 0.5:
        torch.testing.assert_close(schedule.std, torch.tensor([0.5, 0.4330, 0.25, 0.1443]), rtol=0, atol=1e-4)


@pytest.mark.parametrize("level", [0.5, 1.0])
def test_flow_cps_exchanges_noise_for_as_much_new_noise(level: float) -> None:
    """Means and deviations as RLinf writes them; what is noise after a step is as much as at that time in training."""
    K, rng = 4, torch.Generator().manual_seed(0)
    x, v = torch.randn(K, 5, 3, generator=rng), torch.randn(K, 5, 3, generator=rng)
    schedule, index = FlowSchedule(K, level, CPU, method="flow_cps"), torch.arange(K)
    got, size = schedule.step_mean(x, v, index, torch.ones(K, dtype=torch.bool)), math.cos(math.pi * level / 2)
    for i, t in enumerate((1.0, 0.75, 0.5, 0.25)):
        clean, noisy, left = x[i] - v[i] * t, x[i] + v[i] * (1 - t), t - 0.25
        torch.testing.assert_close(got[i], clean * (1 - left) + noisy * left * size, rtol=0, atol=1e-6)
        assert math.hypot(left * size, schedule.std[i]) == pytest.approx(left, abs=1e-7)
    assert schedule.std[-1] == 0
    assert schedule.noisy_steps == 3


def test_rows_that_are_not_noisy_follow_the_ode() -> None:
    schedule, index = FlowSchedule(4, 0.5, CPU), torch.tensor([1, 1])
    x, v = torch.randn(2, 3, 2), torch.randn(2, 3, 2)
    mean = schedule.step_mean(x, v, index, torch.tensor([True, False]))
    assert torch.equal(mean[1], schedule.step_mean(x, v, index, None)[1])
    assert not torch.allclose(mean[0], schedule.step_mean(x, v, index, None)[0])


def test_density_and_entropy() -> None:
    x, mean, std = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.0, 2.0, 0.0]), torch.tensor([2.0, 0.5, 0.0])
    normal = torch.distributions.Normal(mean[:2], std[:2])
    torch.testing.assert_close(log_density(x, mean, std)[:2], normal.log_prob(x[:2]))
    torch.testing.assert_close(gaussian_entropy(std)[:2], normal.entropy())
    assert log_density(x, mean, std)[2] == gaussian_entropy(std)[2] == 0


def test_public_key_layout() -> None:
    """The full-size network has openpi's names and shapes; the tied pair is one tensor, as in files."""
    wanted = json.loads(reference("pi0", "keys_pi0_full.json").read_text())
    assert wanted.pop(TIED) == wanted[HEAD]
    with torch.device("meta"):
        network = empty_network(network_config(PiSizes(), FlowShape(horizon=50)))
    assert {public_name(name): list(tensor.shape) for name, tensor in network.state_dict().items()} == wanted
    assert PiSizes.from_variants(Record(source="config.json", data={})) == PiSizes()
