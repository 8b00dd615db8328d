"""The policy: sampling and scoring, padding, critic, adapters, what is trained."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from model_cases import changed, noise, read_only_and_tensors, reloading
from openvla_cases import CHUNK, ENV, expert, observation, policy

from vla_rl.core.types import Chunk, EnvInfo
from vla_rl.plugins.models.openvla import openvla_oft
from vla_rl.plugins.models.openvla.config import MLPHeadConfig, OpenVLAOFTConfig
from vla_rl.plugins.models.openvla.prompts import DecodingPrompts
from vla_rl.testing import check_model
from vla_rl.toolkit.models.adapters import LoRAConfig


@pytest.mark.parametrize(
    ("values", "config"),
    [
        ("none", {}),
        ("chunk", {"lora": LoRAConfig(rank=4, dropout=0.3)}),
        ("action", {"freeze_vision": True, "value_head": MLPHeadConfig(hidden=(16,))}),
        ("chunk", {"lora": LoRAConfig(rank=4), "freeze_vision": True, "recompute": "full"}),
        ("none", {"append_stop_token": False, "use_proprio": False, "cameras": ("camera1",), "center_crop": True}),
    ],
)
def test_contract(values: Any, config: dict[str, Any]) -> None:
    given = OpenVLAOFTConfig(preset="fast", **config)

    check_model(
        openvla_oft, given, env=ENV, chunk=CHUNK, values=values, temperature=1.6, atol=2e-5, reload=reloading(given)
    )


def test_scores_repeat_the_sampled_log_probs_exactly() -> None:
    model, obs = policy(context={"temperature": 1.6, "values": "chunk"}), observation(5)
    chunk = model.sample_chunk(obs, noise(5), False)
    scores = model.chunk_log_probs(obs, chunk)
    assert torch.equal(scores.log_probs, chunk.log_probs)
    assert torch.equal(scores.values, chunk.values)
    assert chunk.extras["tokens"].shape == (5, CHUNK, 3)
    assert torch.equal(model.decode_actions(chunk.extras["tokens"]), chunk.actions)


def test_other_batch_sizes_score_within_tolerance() -> None:
    model, obs = policy(), observation(6)
    chunk = model.sample_chunk(obs, noise(6), False)
    for row in range(6):
        at = np.array([row])
        one = Chunk(
            actions=chunk.actions[at], log_probs=chunk.log_probs[at], extras={"tokens": chunk.extras["tokens"][at]}
        )
        scores = model.chunk_log_probs(obs.take(at), one)
        torch.testing.assert_close(scores.log_probs, chunk.log_probs[at], rtol=0, atol=1e-5)


def test_padding_changes_nothing() -> None:
    """A row scores the same whether or not a longer instruction makes it a padded one."""
    model, obs = policy(), observation(4).take(np.array([0, 2]))
    tokenizer, pad = model.prompts.tokenizer, model.config.pad_token_id
    common: dict[str, Any] = {"placeholders": CHUNK * 3, "append_stop_token": True, "pad_id": pad}
    model.prompts = DecodingPrompts(tokenizer, device=torch.device("cpu"), **common)
    assert model.prompts.take_prompts(obs.instructions).mask is None
    chunk = model.sample_chunk(obs, noise(2), False)
    model.prompts.take_prompts(["pick up the red block " * 5])
    padded = model.prompts.take_prompts(obs.instructions)
    assert padded.mask is not None and not padded.mask.all()
    torch.testing.assert_close(model.chunk_log_probs(obs, chunk).log_probs, chunk.log_probs, rtol=0, atol=1e-5)


def logits_of(model: Any, obs: Any) -> torch.Tensor:
    """Logits [B, C, M, bins] of the actions of a chunk."""
    return model._in_chunks(model._run_network(obs, CHUNK * model.tokens_per_action)[0])


def test_each_read_position_predicts_its_own_action() -> None:
    """The sequence is BOS, 2 x 16 patches, state, prompt, placeholders, stop: reads start at the last prompt token."""
    model, obs = policy(), observation(2)
    prompt = model.prompts.take_prompts(obs.instructions)
    seen: dict[str, Any] = {}
    llama = model.module.vla.language_model.model
    llama.layers[0].register_forward_pre_hook(lambda _, args: seen.update(embeds=args[0]))
    llama.norm.register_forward_hook(lambda _, _args, out: seen.update(out=out))
    logits = logits_of(model, obs)
    embeds = seen["embeds"]
    for row, text in enumerate(obs.instructions):
        length = len(model.prompts.encode_instruction(text))
        first = 2 * 16 + 1 + length - 1
        assert prompt.start[row] == length - 1
        placeholders = slice(first + 1, first + 1 + CHUNK * 3)
        assert not embeds[row, placeholders].any()
        assert embeds[row, first].any() and embeds[row, placeholders.stop].any()
        bins = model.module.vla.action_logits(seen["out"][row, first : first + CHUNK * 3])
        torch.testing.assert_close(logits[row].flatten(0, 1), bins, rtol=0, atol=1e-5)


def test_all_inputs_matter() -> None:
    model, obs = policy(), observation(2)
    base = logits_of(model, obs)
    for other in changed(obs):
        assert (logits_of(model, other) - base).abs().max() > 1e-3


def test_read_only_and_device_arrays_are_taken() -> None:
    model, (obs, tensors) = policy(), read_only_and_tensors(observation(2))
    a, b = (model.sample_chunk(o, noise(2), False) for o in (obs, tensors))
    assert torch.equal(a.log_probs, b.log_probs)


def test_greedy_takes_the_most_likely_token() -> None:
    model, obs = policy(), observation(3)
    tokens = model.sample_chunk(obs, noise(3), True).extras["tokens"]
    assert torch.equal(tokens, logits_of(model, obs).argmax(-1) + model.codec.first)


def test_temperature_flattens() -> None:
    obs = observation(3)
    entropy = []
    for temperature in (0.5, 1.0, 2.0):
        model = policy(context={"temperature": temperature})
        entropy.append(model.chunk_log_probs(obs, model.sample_chunk(obs, noise(3), False)).entropy.mean())
    assert entropy[0] < entropy[1] < entropy[2] < np.log(256)


def test_weights_are_a_function_of_the_seed_and_leave_the_global_generator_alone() -> None:
    torch.manual_seed(3)
    state = torch.random.get_rng_state()
    lora = LoRAConfig(rank=2)
    models = [policy(context={"seed": seed, "values": "chunk"}, lora=lora) for seed in (5, 5, 6)]
    assert torch.equal(torch.random.get_rng_state(), state)
    same, again, other = (dict(m.module.named_parameters()) for m in models)
    assert all(torch.equal(same[name], again[name]) for name in same)
    assert not torch.equal(same["value_head.layers.0.weight"], other["value_head.layers.0.weight"])
    down = next(name for name in same if name.endswith("lora_A.default.weight"))
    assert not torch.equal(same[down], other[down])


def test_what_is_trained() -> None:
    names = {name for name, _ in policy(context={"values": "chunk"}).weights()}
    assert "vla.language_model.lm_head.weight" in names
    assert "value_head.layers.0.weight" in names
    unused = [name for name in names if "attn_pool" in name or "izer.norm" in name or "izer.blocks.1." in name]
    assert not unused

    frozen = {name for name, _ in policy(freeze_vision=True).weights()}
    assert not [name for name in frozen if "vision_backbone" in name]

    adapters = {name for name, _ in policy(context={"values": "chunk"}, lora=LoRAConfig(rank=2)).weights()}
    parts = ("lora_", "value_head.", "proprio_projector.")
    assert all(any(part in name for part in parts) for name in adapters)
    assert any("featurizer.blocks.0.attn.qkv.lora_A" in name for name in adapters)
    assert not [name for name in adapters if "izer.blocks.1." in name or "attn_pool" in name or "lm_head" in name]


def test_critic_starts_near_zero_and_can_be_detached() -> None:
    obs = observation(4)
    for detach in (False, True):
        model = policy(context={"values": "action"}, value_head=MLPHeadConfig(detach=detach))
        values = model.values(obs)
        assert values.shape == (4, CHUNK)
        assert values.abs().max() < 0.1
        chunk = model.sample_chunk(obs, noise(4), False)
        assert torch.equal(chunk.values, values)
        model.chunk_log_probs(obs, chunk).values.sum().backward()
        trunk = model.module.vla.projector.fc1.weight.grad
        assert (trunk is None) == detach
        assert model.module.value_head.layers[0].weight.grad.abs().sum() > 0


def test_imitation_learns_to_repeat_the_expert() -> None:
    """The loss falls from log(256) = 5.5 to 0.18 to 0.28 in six runs on other weights and kernels; at most 1 of 48
    actions stays wrong."""
    model, obs, actions = policy(), observation(4), expert(4)
    before = model.imitation_loss(obs, actions).item()
    assert before == pytest.approx(np.log(256), abs=0.5)
    optimiser = torch.optim.Adam([p for p in model.module.parameters() if p.requires_grad], 3e-3)
    for _ in range(60):
        optimiser.zero_grad()
        model.imitation_loss(obs, actions).backward()
        optimiser.step()
    assert model.imitation_loss(obs, actions).item() < 0.6
    acted = model.sample_chunk(obs, noise(4), True).actions
    assert (np.abs(acted.numpy() - actions) <= 1 / 255 + 1e-6).mean() > 0.8


def test_dropout_acts_in_imitation_only() -> None:
    model, obs = policy(lora=LoRAConfig(rank=4, dropout=0.5)), observation(2)
    for name, p in model.module.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.1, generator=torch.Generator().manual_seed(0))
    assert model.imitation_loss(obs, expert(2)) != model.imitation_loss(obs, expert(2))
    chunk = model.sample_chunk(obs, noise(2), False)
    assert torch.equal(model.chunk_log_probs(obs, chunk).log_probs, chunk.log_probs)


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize(
    "config", [{}, {"lora": LoRAConfig(rank=4)}, {"lora": LoRAConfig(rank=4), "dtype": "bfloat16", "autocast": True}]
)
def test_recomputation_gives_the_same_gradient(config: dict[str, Any], recompute: str) -> None:
    obs = observation(2)
    gradients: list[dict[str, torch.Tensor]] = []
    for mode in ("off", recompute):
        model = policy(recompute=mode, context={"values": "chunk"}, **config)
        for name, parameter in model.module.named_parameters():
            if "lora_B" in name:  # it starts at 0, where other adapters' gradients are 0 too
                torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(0))
        chunk = model.sample_chunk(obs, noise(2), False)
        scores = model.chunk_log_probs(obs, chunk)
        assert scores.values is not None and scores.entropy is not None
        (scores.log_probs.sum() + scores.values.sum() + scores.entropy.mean()).backward()
        model.imitation_loss(obs, expert(2)).backward()
        gradients.append({n: p.grad for n, p in model.module.named_parameters() if p.grad is not None})
    plain, recomputed = gradients
    assert plain.keys() == recomputed.keys() and all(gradient.any() for gradient in plain.values())
    assert all(torch.equal(gradient, recomputed[name]) for name, gradient in plain.items())


def test_bfloat16_weights_score_in_float32() -> None:
    model, obs = policy(dtype="bfloat16", context={"values": "chunk"}, lora=LoRAConfig(rank=2)), observation(2)
    assert model.module.vla.base_model.model.projector.fc3.base_layer.weight.dtype == torch.bfloat16
    frequencies = model.module.vla.base_model.model.language_model.model.rotary_emb.inv_freq
    assert frequencies.dtype == torch.float32
    chunk = model.sample_chunk(obs, noise(2), False)
    assert chunk.log_probs.dtype == chunk.values.dtype == torch.float32
    assert torch.equal(model.chunk_log_probs(obs, chunk).log_probs, chunk.log_probs)


def test_cameras_are_scaled_to_the_model() -> None:
    env = EnvInfo(
        cameras={"front": (48, 80), "wrist": (64, 64)},
        state_dim=0,
        action_low=(-1.0,),
        action_high=(1.0,),
        tasks=ENV.tasks,
    )
    model = policy(env=env)
    obs = observation(2, env)
    assert obs.images["front"].shape == (2, 48, 80, 3)
    assert model.sample_chunk(obs, noise(2), False).actions.shape == (2, CHUNK, 1)
