"""The policy: sampling and scoring, schedules, critic, cloning, what is trained."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from model_cases import changed, noise, read_only_and_tensors, reloading
from pi0_cases import CHUNK, ENV, expert, flow_error, observation, policy

from vla_rl.core.types import Chunk
from vla_rl.plugins.models.pi0 import plugin
from vla_rl.plugins.models.pi0.builder import Pi0Policy, PiPrompts
from vla_rl.plugins.models.pi0.config import Pi0Config
from vla_rl.testing import check_model, synthetic
from vla_rl.toolkit.models.flow.config import FlowCPS, FlowNoise, FlowNoiseKind, FlowSDE, ValueHeadConfig

FLOW_NOISE = FlowNoise()
FLOW_CPS = FlowCPS(level=0.7)
EVERY_STEP = FlowSDE(steps="all", level=0.3)


@pytest.mark.parametrize(("gripper", "closed"), [("libero", 1.0), ("widowx", -1.0)])
def test_a_gripper_that_was_trained_as_zero_and_one(gripper: str, closed: float) -> None:
    """0 for closed and 1 for open in the data; cloning scales the other way."""
    model = policy(gripper=gripper)
    width = ENV.action_dim
    trained = torch.tensor([[0.0] * (width - 1) + [0.1], [0.0] * (width - 1) + [0.9]])
    actions = model._actions.restore_units(trained)
    assert actions[:, -1].tolist() == [closed, -closed]
    assert model._actions.normalise_feature(actions, width)[:, -1].tolist() == [0.0, 1.0]
    acted = model.sample_chunk(observation(4), noise(4), False).actions
    assert set(acted[..., -1].unique().tolist()) <= {-1.0, 1.0}


@pytest.mark.parametrize(
    ("values", "config"),
    [
        ("none", {}),
        ("chunk", {"noise": FLOW_NOISE, "denoise_steps": 3}),
        ("none", {"noise": FLOW_CPS}),
        ("action", {"noise": EVERY_STEP, "value_head": ValueHeadConfig(hidden=(16,))}),
        ("chunk", {"train_expert_only": False, "greedy_start": "fixed_noise", "denoise_steps": 1}),
        ("action", {"use_state": False, "cameras": ("camera1",), "value_head": ValueHeadConfig(detach=True)}),
    ],
)
def test_contract(values: Any, config: dict[str, Any]) -> None:
    given = Pi0Config(preset="tiny", **config)

    check_model(plugin, given, env=ENV, chunk=CHUNK, values=values, temperature=1.6, atol=2e-5, reload=reloading(given))


def test_contract_without_a_state() -> None:
    env, given = synthetic.env_info(cameras=1, state_dim=0), Pi0Config(preset="tiny")
    check_model(plugin, given, env=env, chunk=2, reload=lambda folder: Pi0Config(checkpoint=str(folder)))


def test_bfloat16(tmp_path: Path) -> None:
    model, obs = policy(dtype="bfloat16", context={"values": "chunk"}), observation(4)
    chunk = model.sample_chunk(obs, noise(4), False)
    scores = model.chunk_log_probs(obs, chunk)
    assert torch.equal(scores.log_probs, chunk.log_probs)
    assert {t.dtype for t in (chunk.actions, chunk.log_probs, chunk.values, *chunk.extras.values())} == {
        torch.float32, torch.int64,
    }  # fmt: skip
    (scores.log_probs.sum() + scores.values.sum() + model.imitation_loss(obs, chunk.actions)).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.module.parameters() if p.requires_grad)
    kinds = {name: p.dtype for name, p in model.module.named_parameters()}
    towers = {name for name, dtype in kinds.items() if dtype == torch.bfloat16}
    assert all(name.startswith("pi0.model.") for name in towers)
    assert "pi0.model.dit.layers.0.mlp.up_proj.weight" in towers
    assert "pi0.model.dit.norm.weight" not in towers
    model.save(tmp_path)
    again = policy(checkpoint=str(tmp_path), dtype="bfloat16")
    assert torch.equal(again.sample_chunk(obs, noise(4), False).actions, chunk.actions)
    full = policy().sample_chunk(obs, noise(4), True).extras["chain"]
    torch.testing.assert_close(model.sample_chunk(obs, noise(4), True).extras["chain"], full, rtol=0, atol=0.03)


@pytest.mark.parametrize("method", [FlowSDE(), EVERY_STEP, FLOW_NOISE, FLOW_CPS])
def test_scores_repeat_the_sampled_log_probs_exactly(method: FlowNoiseKind) -> None:
    model, obs = policy(noise=method, context={"temperature": 1.6, "values": "chunk"}), observation(5)
    chunk = model.sample_chunk(obs, noise(5), False)
    scores = model.chunk_log_probs(obs, chunk)
    assert torch.equal(scores.log_probs, chunk.log_probs)
    assert torch.equal(scores.values, chunk.values)
    assert chunk.extras["chain"].shape == (5, 5, CHUNK, 3)
    assert chunk.log_probs.shape == (5, CHUNK, 1)
    stored = attrs.evolve(chunk, extras={name: t.numpy() for name, t in chunk.extras.items()})
    assert torch.equal(model.chunk_log_probs(obs, stored).log_probs, chunk.log_probs)


@pytest.mark.parametrize("method", [FlowSDE(), FLOW_NOISE])
def test_other_batch_sizes_score_within_tolerance(method: FlowNoiseKind) -> None:
    model, obs = policy(noise=method), observation(6)
    chunk = model.sample_chunk(obs, noise(6), False)
    for row in range(6):
        at = np.array([row])
        replay = {name: t[at] for name, t in chunk.extras.items()}
        one = Chunk(actions=chunk.actions[at], log_probs=chunk.log_probs[at], extras=replay)
        scores = model.chunk_log_probs(obs.take(at), one)
        torch.testing.assert_close(scores.log_probs, chunk.log_probs[at], rtol=0, atol=2e-5)


def steps_of(model: Pi0Policy, obs: Any, chain: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Velocity and expert output at each denoising step of a chain."""
    prefix, state = model._encode_observation(obs)
    times = [1 - i / (chain.shape[1] - 1) for i in range(chain.shape[1] - 1)]
    hidden = [
        model.module.run_expert(prefix, state, chain[:, i], torch.full((len(chain),), t)) for i, t in enumerate(times)
    ]
    return [(model.module.project_velocity(h), h) for h in hidden]


@torch.no_grad()
def test_one_step_is_stochastic_and_the_others_follow_the_ode() -> None:
    model, obs = policy(), observation(48)
    chunk = model.sample_chunk(obs, noise(48), False)
    chain, step = chunk.extras["chain"], chunk.extras["step"]
    assert set(step.tolist()) == {0, 1, 2, 3}
    for i, (velocity, _) in enumerate(steps_of(model, obs, chain)):
        euler = chain[:, i] - 0.25 * velocity
        apart = (chain[:, i + 1] - euler).abs().amax((1, 2))
        assert (apart[step != i] < 1e-5).all()
        assert (apart[step == i] > 0.05).all()
        t, std = 1 - i / 4, (0.5, math.sqrt(3) / 4, 0.25, math.sqrt(1 / 48))[i]  # a = 0.5, K = 4
        mean = euler - std**2 / (2 * t) * (chain[:, i] + (1 - t) * velocity)
        wanted = torch.distributions.Normal(mean, std).log_prob(chain[:, i + 1]).sum(-1, keepdim=True)
        torch.testing.assert_close(chunk.log_probs[step == i], wanted[step == i], rtol=0, atol=1e-4)


@torch.no_grad()
def test_the_last_step_of_flow_cps_is_never_stochastic() -> None:
    """Every chunk has a density: the stochastic step is one of the others."""
    model, obs = policy(noise=FLOW_CPS), observation(48)
    chunk = model.sample_chunk(obs, noise(48), False)
    chain, step = chunk.extras["chain"], chunk.extras["step"]
    assert set(step.tolist()) == {0, 1, 2}
    for i, (velocity, _) in enumerate(steps_of(model, obs, chain)):
        t, left, angle = 1 - i / 4, 0.75 - i / 4, math.pi * 0.7 / 2
        clean, noisy = chain[:, i] - t * velocity, chain[:, i] + (1 - t) * velocity
        euler = clean * (1 - left) + noisy * left
        assert ((chain[:, i + 1] - euler).abs().amax((1, 2))[step != i] < 1e-5).all()
        if left:
            mean = clean * (1 - left) + noisy * left * math.cos(angle)
            normal = torch.distributions.Normal(mean, left * math.sin(angle))
            wanted = normal.log_prob(chain[:, i + 1]).sum(-1, keepdim=True)
            torch.testing.assert_close(chunk.log_probs[step == i], wanted[step == i], rtol=0, atol=1e-4)
    with pytest.raises(ValueError, match="set denoise_steps to 2 or more"):
        Pi0Config(preset="tiny", noise=FLOW_CPS, denoise_steps=1)


@torch.no_grad()
def test_flow_noise_adds_up_every_step() -> None:
    model, obs = policy(noise=FlowNoise(std_range=(0.05, 0.5))), observation(3)
    model.module.noise_head.layers[-1].bias.copy_(torch.tensor([-2.0, 0.0, 2.0]))
    chunk = model.sample_chunk(obs, noise(3), False)
    chain = chunk.extras["chain"]
    log_probs, entropy, seen = torch.zeros(3, CHUNK, 1), torch.zeros(3, CHUNK, 1), []
    for i, (velocity, hidden) in enumerate(steps_of(model, obs, chain)):
        std = model.module.noise_head(hidden)
        seen.append(std)
        normal = torch.distributions.Normal(chain[:, i] - 0.25 * velocity, std)
        log_probs += normal.log_prob(chain[:, i + 1]).sum(-1, keepdim=True)
        entropy += normal.entropy().sum(-1, keepdim=True)
    scores = model.chunk_log_probs(obs, chunk)
    torch.testing.assert_close(scores.log_probs, log_probs, rtol=0, atol=1e-4)
    torch.testing.assert_close(scores.entropy, entropy, rtol=0, atol=1e-5)
    wanted = [math.exp(math.log(0.05) + math.log(10) * (math.tanh(x) + 1) / 2) for x in (-2.0, 0.0, 2.0)]
    torch.testing.assert_close(torch.stack(seen).mean((0, 1, 2)), torch.tensor(wanted), rtol=0.05, atol=0)


def test_temperature_is_the_density_to_a_power() -> None:
    obs = observation(4)
    scores = []
    for temperature in (1.0, 2.0):
        model = policy(context={"temperature": temperature}, noise=EVERY_STEP)
        scores.append(model.chunk_log_probs(obs, model.sample_chunk(obs, noise(4), False)))
    gap = scores[1].entropy - scores[0].entropy
    torch.testing.assert_close(gap, torch.full_like(gap, 4 * 3 * 0.5 * math.log(2.0)), rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("start", ["zeros", "fixed_noise"])
def test_greedy_follows_the_ode(start: str) -> None:
    model, obs = policy(greedy_start=start), observation(3)
    chunk = model.sample_chunk(obs, noise(3), True)
    chain = chunk.extras["chain"]
    assert bool((chain[:, 0] == 0).all()) == (start == "zeros")
    assert torch.equal(chain[0, 0], chain[2, 0])
    for i, (velocity, _) in enumerate(steps_of(model, obs, chain)):
        torch.testing.assert_close(chain[:, i + 1], chain[:, i] - 0.25 * velocity, rtol=0, atol=1e-5)
    torch.testing.assert_close(chunk.actions, chain[:, -1].clamp(-1, 1), rtol=0, atol=1e-6)
    assert not chunk.log_probs.any()
    assert not model.chunk_log_probs(obs, chunk).log_probs.any()


def test_actions_stay_within_the_simulators_bounds() -> None:
    narrow = attrs.evolve(ENV, action_low=(-0.01, -2.0, 0.0), action_high=(0.01, 2.0, 0.5))
    model = policy(env=narrow)
    actions = model.sample_chunk(observation(16), noise(16), False).actions
    low, high = torch.tensor(narrow.action_low), torch.tensor(narrow.action_high)
    assert (actions >= low).all()
    assert (actions <= high).all()
    assert ((actions == low) | (actions == high)).any()


def test_the_vision_language_model_runs_once_and_the_expert_as_often_as_needed() -> None:
    calls: dict[str, list[bool]] = {"vlm": [], "expert": []}
    for method, passes in ((FlowSDE(), 1), (EVERY_STEP, 4)):
        model, obs = policy(noise=method, context={"values": "chunk"}), observation(2)
        pi0 = model.module.pi0.model
        for name, part in (("vlm", pi0.vlm.language_model), ("expert", pi0.dit)):
            calls[name] = []
            part.layers[-1].register_forward_hook(lambda _m, _i, out, name=name: calls[name].append(out.requires_grad))
        chunk = model.sample_chunk(obs, noise(2), False)
        assert calls == {"vlm": [False], "expert": [False] * 5}  # K = 4 and the critic's
        model.chunk_log_probs(obs, chunk)  # the critic shares the first pass
        assert calls == {"vlm": [False] * 2, "expert": [False] * 5 + [True] * passes}


def test_a_pass_shared_with_the_critic_computes_what_two_passes_do() -> None:
    model, obs = policy(context={"values": "action"}), observation(3)
    module, trained = model.module, [p for p in model.module.parameters() if p.requires_grad]
    rng = torch.Generator().manual_seed(0)
    x, time = torch.randn(3, *module.shape, generator=rng), torch.rand(3, generator=rng)
    inputs = *model._encode_observation(obs), x, time
    shared = module.run_expert_and_critic(*inputs)
    apart = module.run_expert(*inputs), module.estimate_values(*inputs[:2])
    gradients = []
    for hidden, values in (shared, apart):
        loss = hidden.square().mean() + values.square().mean()
        gradients.append(torch.autograd.grad(loss, trained, allow_unused=True, retain_graph=True))
    torch.testing.assert_close(shared, apart)
    for ours, theirs in zip(*gradients, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("expert_only", [True, False])
def test_what_is_trained(expert_only: bool) -> None:
    model = policy(train_expert_only=expert_only, noise=FLOW_NOISE, context={"values": "chunk"})
    trained = {name for name, p in model.module.named_parameters() if p.requires_grad}
    assert {name for name, _ in model.weights()} == trained
    assert "pi0.model.dit.embed_tokens.weight" not in trained
    vlm = {name for name in trained if name.startswith("pi0.model.vlm.")}
    assert bool(vlm) != expert_only
    heads = {"value_head.layers.0.weight", "noise_head.layers.0.weight", "pi0.embed_action_time.state_proj.weight"}
    assert heads <= trained
    if not expert_only:
        assert "pi0.model.vlm.language_model.layers.2.self_attn.k_proj.weight" in vlm
        assert "pi0.model.vlm.language_model.layers.2.mlp.up_proj.weight" not in vlm


def test_critic_reads_the_observation_alone() -> None:
    model, obs = policy(context={"values": "action"}), observation(4)
    one, two = (model.sample_chunk(obs, noise(4, seed), False) for seed in (0, 1))
    assert torch.equal(one.values, two.values)
    assert torch.equal(model.values(obs), one.values)
    assert one.values.shape == (4, CHUNK)
    moved = attrs.evolve(obs, state=obs.state + 1)
    assert not torch.allclose(model.values(moved), one.values)
    assert policy().critic is None


def test_all_inputs_matter() -> None:
    model, obs = policy(), observation(2)
    base = model.sample_chunk(obs, noise(2), True).extras["chain"][:, -1]
    others = changed(obs)
    for other in others:
        assert (model.sample_chunk(other, noise(2), True).extras["chain"][:, -1] - base).abs().max() > 1e-5
    blind = policy(use_state=False)
    assert torch.equal(*(blind.sample_chunk(o, noise(2), True).actions for o in (obs, others[2])))


def test_padding_changes_nothing() -> None:
    model, obs = policy(), observation(4)
    chunk = model.sample_chunk(obs, noise(4), False)
    common: dict[str, Any] = {"vocab": 512, "max_length": 48, "device": torch.device("cpu")}
    width = model.prompts.token_rows(obs.instructions)[0].shape[1]
    model.prompts = PiPrompts(model.prompts.tokenizer, full_width=True, **common)
    assert model.prompts.token_rows(obs.instructions)[0].shape[1] == 48 > width
    torch.testing.assert_close(model.chunk_log_probs(obs, chunk).log_probs, chunk.log_probs, rtol=0, atol=2e-5)


def test_read_only_and_device_arrays_are_taken() -> None:
    model, (obs, tensors) = policy(), read_only_and_tensors(observation(2))
    assert torch.equal(*(model.sample_chunk(o, noise(2), False).actions for o in (obs, tensors)))


def test_cloning_is_keyed_and_learns() -> None:
    """Five seeds leave 0.26 to 0.41 of the error, and actions that are 0.12 to 0.23 away."""
    model, obs, actions = policy(context={"seed": 3}), observation(8), expert(8)
    first = model.imitation_loss(obs, actions)
    assert torch.equal(first, model.imitation_loss(obs, torch.from_numpy(actions)))
    assert torch.equal(first, policy(context={"seed": 3}).imitation_loss(obs, actions))
    assert not torch.equal(first, model.imitation_loss(obs, actions[::-1].copy()))
    optimizer = torch.optim.AdamW([p for p in model.module.parameters() if p.requires_grad], lr=3e-3)
    losses, start = [], flow_error(model, obs, actions)
    for _ in range(120):
        optimizer.zero_grad()
        loss = model.imitation_loss(obs, actions)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert len(set(losses)) == len(losses), "new times and noise at every step"
    assert flow_error(model, obs, actions) < 0.6 * start
    gap = np.abs(model.sample_chunk(obs, noise(8), True).actions.numpy() - actions).mean()
    assert gap < 0.35, "of 0.5 by chance"


@pytest.mark.parametrize("method", [FlowSDE(), EVERY_STEP, FLOW_NOISE])
def test_the_policy_gradient_leads_to_reward(method: FlowNoiseKind) -> None:
    """A bandit: the nearer to one action, the better. Plain REINFORCE on the scores finds it."""
    model, obs = policy(noise=method, denoise_steps=2), observation(32)
    target = torch.tensor([0.6, -0.6, 0.3])
    optimizer = torch.optim.Adam([p for p in model.module.parameters() if p.requires_grad], lr=1e-3)
    rewards = []
    for step in range(60):
        chunk = model.sample_chunk(obs, noise(32, step), False)
        reward = -(chunk.actions - target).abs().mean(-1, keepdim=True)
        advantage = (reward - reward.mean()) / reward.std()
        loss = -(model.chunk_log_probs(obs, chunk).log_probs * advantage).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.module.parameters(), 1.0)
        optimizer.step()
        rewards.append(reward.mean().item())
    assert np.mean(rewards[-10:]) > np.mean(rewards[:10]) + 0.1


def test_the_global_generators_are_left_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    model = policy(context={"values": "chunk"}, noise=FLOW_NOISE)
    chunk = model.sample_chunk(observation(2), noise(2), False)
    model.imitation_loss(observation(2), chunk.actions)
    assert torch.equal(torch.get_rng_state(), before)
    other = policy(context={"values": "chunk", "seed": 1}, noise=FLOW_NOISE)
    same = policy(context={"values": "chunk"}, noise=FLOW_NOISE)
    for (name, a), (_, b), (_, c) in zip(model.weights(), same.weights(), other.weights(), strict=True):
        assert torch.equal(a, b), name
        assert not torch.equal(a, c) or not a.any(), name
