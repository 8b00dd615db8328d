"""Adapters: where they are, what they start as, what is saved, and the policy without them as the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_cases import noise, reloading
from pi0_cases import CHUNK, ENV, expert, flow_error, observation, policy
from rounding import assert_same_up_to
from safetensors.torch import load_file
from torch import nn

from vla_rl.core.capabilities import HasReference
from vla_rl.core.types import Chunk
from vla_rl.plugins.models.pi0 import plugin
from vla_rl.plugins.models.pi0.architecture import FlowShape, PiSizes, network_config
from vla_rl.plugins.models.pi0.builder import Pi0Policy
from vla_rl.plugins.models.pi0.config import Pi0Config
from vla_rl.plugins.models.pi0.network import empty_network
from vla_rl.plugins.models.pi0.statistics import LEROBOT, public_name
from vla_rl.testing import check_model
from vla_rl.toolkit.models.adapters import LoRAConfig, insert_adapters
from vla_rl.toolkit.models.flow.config import FlowNoise, FlowNoiseKind, FlowSDE
from vla_rl.toolkit.models.flow.network import freeze_unused

LORA = LoRAConfig(rank=4)
FLOW_NOISE = FlowNoise()


def trained(model: Pi0Policy, steps: int, lr: float = 3e-3) -> Pi0Policy:
    """After some steps of cloning."""
    optimizer = torch.optim.Adam([p for p in model.module.parameters() if p.requires_grad], lr)
    for step in range(steps):
        optimizer.zero_grad()
        model.imitation_loss(observation(4), expert(4, step)).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize(
    ("values", "config"),
    [
        ("chunk", {"lora": LoRAConfig(rank=4, dropout=0.3), "noise": FLOW_NOISE, "denoise_steps": 2}),
        ("action", {"lora": LoRAConfig(rank=2, alpha=8.0), "train_expert_only": False, "denoise_steps": 1}),
        ("none", {"lora": LORA, "use_state": False, "denoise_steps": 1}),
    ],
)
def test_contract(values: Any, config: dict[str, Any]) -> None:
    given = Pi0Config(preset="tiny", **config)

    check_model(plugin, given, env=ENV, chunk=CHUNK, values=values, temperature=1.6, atol=2e-5, reload=reloading(given))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("expert_only", [True, False])
def test_adapters_are_on_the_linear_layers_that_would_be_trained(expert_only: bool, dtype: str) -> None:
    """Only the heads are trained with them; all of it is float32, published, and gets a gradient."""
    common: dict[str, Any] = {"train_expert_only": expert_only, "noise": FLOW_NOISE, "dtype": dtype}
    context = {"values": "chunk"}
    plain, model = policy(context=context, **common).module, policy(context=context, lora=LORA, **common)
    layers = {n for n, part in plain.pi0.named_modules() if isinstance(part, nn.Linear) and part.weight.requires_grad}
    assert {"action_out_proj", "embed_action_time.state_proj", "model.dit.layers.2.mlp.down_proj"} <= layers
    vision = {name for name in layers if name.startswith("model.vlm.")}
    assert bool(vision) != expert_only
    published = dict(model.weights())
    assert not [name for name, p in model.module.named_parameters() if p.requires_grad != (name in published)]
    adapters = {name for name in published if ".lora_" in name}
    assert adapters == {f"pi0.{name}.lora_{half}.default.weight" for name in layers for half in "AB"}
    heads = {n for n in published if n.startswith(("value_head.", "noise_head."))}
    assert heads and published.keys() == adapters | heads
    assert {tensor.dtype for tensor in published.values()} == {torch.float32}

    obs = observation(2)
    chunk = model.sample_chunk(obs, noise(2), False)
    scores = model.chunk_log_probs(obs, chunk)
    # other kernels where a weight has a gradient, and a log-probability magnifies what they round
    assert_same_up_to(18, scores.log_probs, chunk.log_probs)
    (scores.log_probs.sum() + scores.values.sum() + model.imitation_loss(obs, expert(2))).backward()
    idle = [name for name, p in model.module.named_parameters() if p.requires_grad and p.grad is None]
    assert not idle
    frozen = [name for name, p in model.module.named_parameters() if not p.requires_grad and p.grad is not None]
    assert not frozen


@pytest.mark.parametrize(("expert_only", "layers", "count"), [(True, 131, 14_126_080), (False, 415, 68_810_752)])
def test_adapters_of_the_full_size(expert_only: bool, layers: int, count: int) -> None:
    with torch.device("meta"):
        network = empty_network(network_config(PiSizes(), FlowShape(horizon=50)))
        freeze_unused(network.model.vlm.language_model)
        if expert_only:
            network.model.vlm.requires_grad_(False)
        insert_adapters(network, LoRAConfig(rank=32), 0)
    trained = [p for p in network.parameters() if p.requires_grad]
    assert (len(trained), sum(p.numel() for p in trained)) == (2 * layers, count)


def test_a_layer_whose_input_is_zero_has_none() -> None:
    assert not [name for name, _ in policy(lora=LORA, use_state=False).weights() if "state_proj" in name]


def test_they_start_as_a_function_of_the_seed_and_change_nothing() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    one, same, other = (policy(lora=LORA, context={"seed": seed}) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    for (name, a), (_, b), (_, c) in zip(one.weights(), same.weights(), other.weights(), strict=True):
        assert torch.equal(a, b), name
        assert not a.any() if "lora_B" in name else not torch.equal(a, c), name
    obs, plain = observation(3), policy()
    plain.module.requires_grad_(False)  # as layers under adapters are: a weight that is trained has another kernel
    assert torch.equal(one.sample_chunk(obs, noise(3), False).actions, plain.sample_chunk(obs, noise(3), False).actions)


def test_the_update_is_scaled_by_alpha_over_rank() -> None:
    def scale(**keys: Any) -> float:
        part: Any = policy(lora=LoRAConfig(**keys)).module.pi0.action_out_proj
        return float(part.scaling["default"])

    assert scale(rank=4) == 1.0
    assert scale(rank=32) == 0.5
    assert scale(rank=4, alpha=10.0) == 2.5


@pytest.mark.parametrize("expert_only", [True, False])
def test_saved_merged_in_lerobots_layout(expert_only: bool, tmp_path: Path) -> None:
    """Key by key: base plus scaled product for layers with an adapter, else the base to the bit; nothing else is in the
    folder that is not without adapters."""
    plain = policy(train_expert_only=expert_only)
    plain.save(tmp_path / "plain")
    model = trained(policy(lora=LoRAConfig(rank=4, alpha=8.0), train_expert_only=expert_only), 2)
    model.save(tmp_path / "lora")
    assert {p.name for p in (tmp_path / "plain").iterdir()} == {p.name for p in (tmp_path / "lora").iterdir()}
    base, merged = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "lora"))
    assert base.keys() == merged.keys()
    halves = {name.removeprefix("pi0."): tensor for name, tensor in model.weights()}
    adapted = set()
    for down in [name for name in halves if ".lora_A." in name]:
        layer = down.partition(".lora_A.")[0]
        name = LEROBOT + public_name(f"{layer}.weight")
        update = 2.0 * halves[f"{layer}.lora_B.default.weight"] @ halves[down]
        assert update.any()
        torch.testing.assert_close(merged[name], base[name] + update, rtol=0, atol=1e-6)
        adapted.add(name)
    assert all(torch.equal(merged[name], base[name]) for name in base.keys() - adapted)

    obs = observation(3)
    wanted = model.sample_chunk(obs, noise(3), False)
    again = policy(checkpoint=str(tmp_path / "lora"))
    got = again.sample_chunk(obs, noise(3), False)
    torch.testing.assert_close(got.actions, wanted.actions, rtol=0, atol=1e-5)
    torch.testing.assert_close(got.log_probs, wanted.log_probs, rtol=0, atol=1e-4)
    assert not [name for name, _ in again.module.named_parameters() if "lora" in name]
    again.save(tmp_path / "again")
    state = load_file(tmp_path / "again" / "model.safetensors")
    assert state.keys() == merged.keys() and all(torch.equal(state[name], merged[name]) for name in state)


def test_saving_leaves_the_policy_as_it_was(tmp_path: Path) -> None:
    model, obs = trained(policy(lora=LORA), 1), observation(2)
    before, weights = model.sample_chunk(obs, noise(2), False), {name: p.clone() for name, p in model.weights()}
    model.save(tmp_path)
    assert torch.equal(model.sample_chunk(obs, noise(2), False).log_probs, before.log_probs)
    assert all(torch.equal(weights[name], p) for name, p in model.weights())


@pytest.mark.parametrize("method", [FlowSDE(), FLOW_NOISE])
def test_reference_is_the_policy_before_training(method: FlowNoiseKind) -> None:
    """The noise head, which is trained whole, is as it began too; the critic is not computed."""
    context = {"temperature": 1.3, "values": "chunk"}
    model, obs = policy(lora=LORA, noise=method, context=context), observation(3)
    start = model.sample_chunk(obs, noise(3), False)
    optimizer = torch.optim.Adam([p for p in model.module.parameters() if p.requires_grad], 3e-3)
    for _ in range(3):
        optimizer.zero_grad()
        model.chunk_log_probs(obs, start).log_probs.sum().backward()
        optimizer.step()
    now = model.chunk_log_probs(obs, start)
    assert (now.log_probs - start.log_probs).abs().max() > 0.01
    passes: list[int] = []
    hook = model.module.pi0.model.dit.layers[-1].register_forward_hook(lambda *_: passes.append(1))
    reference = model.reference_log_probs(obs, start)
    hook.remove()
    assert len(passes) == (1 if method.type == "flow_sde" else 4)
    assert torch.equal(reference, start.log_probs)
    assert not reference.requires_grad
    again = model.chunk_log_probs(obs, start)
    assert torch.equal(again.log_probs, now.log_probs)
    assert torch.equal(again.values, now.values)
    (again.log_probs.sum() + again.values.sum()).backward()
    assert all(p.grad is not None for p in model.module.parameters() if p.requires_grad)


def test_reference_needs_adapters() -> None:
    assert isinstance(policy(lora=LoRAConfig(rank=4)), HasReference) and not isinstance(policy(), HasReference)


def test_dropout_is_for_cloning_alone_and_keyed() -> None:
    wet, dry = (policy(lora=LoRAConfig(rank=4, dropout=rate)) for rate in (0.5, 0.0))
    with torch.no_grad():
        for model in (wet, dry):
            for name, p in model.module.named_parameters():
                if "lora_B" in name:
                    p.fill_(0.05)
    obs, actions = observation(4), expert(4)
    chunk: Chunk = dry.sample_chunk(obs, noise(4), False)
    before = torch.get_rng_state()
    losses = [model.imitation_loss(obs, actions) for model in (wet, wet, dry)]
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(losses[0], losses[1])
    assert not torch.equal(losses[0], losses[2])
    assert torch.equal(wet.sample_chunk(obs, noise(4), False).log_probs, chunk.log_probs)
    assert torch.equal(wet.chunk_log_probs(obs, chunk).log_probs, chunk.log_probs)


def test_cloning_with_adapters_learns_from_new_noise_at_every_step() -> None:
    """Six seeds leave 0.60 to 0.75 of the error after 40 steps."""
    model, obs, actions = policy(lora=LoRAConfig(rank=8, alpha=16.0)), observation(8), expert(8)
    frozen = {name: p.clone() for name, p in model.module.named_parameters() if not p.requires_grad}
    optimizer = torch.optim.AdamW([p for p in model.module.parameters() if p.requires_grad], lr=1e-2)
    start = flow_error(model, obs, actions)
    for _ in range(40):
        optimizer.zero_grad()
        model.imitation_loss(obs, actions).backward()
        optimizer.step()
    once = model.imitation_loss(obs, actions)
    assert torch.equal(model.imitation_loss(obs, actions), once)
    with torch.no_grad():
        model.module.pi0.action_out_proj.lora_B["default"].weight.add_(1e-7)
    assert (model.imitation_loss(obs, actions) - once).abs() > 1e-4, "the least change of the weights: other noise"
    assert flow_error(model, obs, actions) < 0.9 * start
    assert all(torch.equal(frozen[name], p) for name, p in model.module.named_parameters() if name in frozen)
