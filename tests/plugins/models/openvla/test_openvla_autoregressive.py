"""Plain OpenVLA: decoding with a cache, scoring in one pass, and the original code's tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_cases import noise, reloading
from openvla_cases import ENV, network, observation, tiny_config
from rounding import assert_same_up_to
from safetensors.torch import load_file
from torch import Tensor

from reference_files import reference
from vla_rl.core.contexts import ModelContext
from vla_rl.core.types import Chunk
from vla_rl.plugins.models.openvla import openvla
from vla_rl.plugins.models.openvla.autoregressive import ARModule, ARPolicy
from vla_rl.plugins.models.openvla.codec import ActionCodec, ActionScale
from vla_rl.plugins.models.openvla.config import MLPHeadConfig, OpenVLAARConfig
from vla_rl.testing import check_model
from vla_rl.toolkit.models.adapters import LoRAConfig
from vla_rl.toolkit.models.checkpoints.fitting import MismatchError
from vla_rl.toolkit.models.recompute import RECOMPUTE

CPU = torch.device("cpu")


def policy(context: dict[str, Any] | None = None, **config: Any) -> ARPolicy:
    if "checkpoint" not in config:
        config.setdefault("preset", "fast")
    return openvla.build(OpenVLAARConfig(**config), ModelContext(**{"env": ENV, "chunk": 1, **(context or {})}))


# ------------------------------------------------------------------------------------- against the original code


@pytest.fixture(scope="module")
def data() -> dict[str, Tensor]:
    return load_file(reference("openvla", "openvla_io.safetensors"))


@pytest.fixture(scope="module")
def original() -> ARModule:
    return ARModule(network(), None, None)


def greedy(module: ARModule, seen: list[Tensor] | None = None) -> Callable[[Tensor, int], tuple[Tensor, Tensor]]:
    """Return a `pick` that takes the most probable token; `seen` collects log-probs of all choices [B, V]."""

    def pick(hidden: Tensor, i: int) -> tuple[Tensor, Tensor]:
        scores = module.compute_logits(hidden).log_softmax(-1)
        if seen is not None:
            seen.append(scores)
        log_prob, index = scores.max(-1)
        return index + module.first_token, log_prob

    return pick


@pytest.mark.parametrize("full_vocabulary", [False, True])
@torch.no_grad()
def test_greedy_tokens_and_actions_are_the_originals(
    original: ARModule, data: dict[str, Tensor], full_vocabulary: bool
) -> None:
    original.full_vocabulary = full_vocabulary
    prompt = data["input_ids"][:, :17]
    tokens, _, _ = original.decode_tokens(prompt, None, 7, greedy(original), pixels=data["pixel_values"])
    wanted = torch.stack([data["gen_tokens_0"], data["gen_tokens_1"]])
    assert torch.equal(tokens, wanted)
    stats = ActionScale.from_entry(tiny_config().norm_stats["libero_tiny_no_noops"]["action"])
    codec = ActionCodec(stats, vocab_end=32000, bins=256, device=CPU, epsilon=0.0)
    actions = torch.stack([data["actions_0"], data["actions_1"]])
    assert torch.equal(codec.decode_tokens(tokens), actions.float())


@torch.no_grad()
def test_log_probs_are_the_originals(original: ARModule, data: dict[str, Tensor]) -> None:
    """Over the whole vocabulary, and over the action tokens from the original's logits."""
    prompt, tokens = data["input_ids"][:, :17], data["input_ids"][:, 17:24]
    original.full_vocabulary = True
    scores = original(prompt, None, tokens, pixels=data["pixel_values"])[0].log_softmax(-1)
    got = scores.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    assert_same_up_to(16, got, data["logp_action_fullvocab"])
    original.full_vocabulary = False
    scores = original(prompt, None, tokens, pixels=data["pixel_values"])[0].log_softmax(-1)
    wanted = data["logits_action_region"][:, :7, :256].log_softmax(-1)
    assert_same_up_to(16, scores, wanted)


@torch.no_grad()
def test_a_padded_row_says_what_it_says_alone(original: ARModule, data: dict[str, Tensor]) -> None:
    original.full_vocabulary = False
    ids = data["input_ids"][:, :17]
    short = torch.cat([ids[:, :1], ids[:, 6:]], dim=1)
    padded = torch.cat([ids[:1, :1], torch.full((1, 5), 32000), ids[:1, 6:]], dim=1)
    both, mask = torch.cat([padded, ids[1:]]), torch.ones(2, 17, dtype=torch.bool)
    mask[0, 1:6] = False
    seen: list[Tensor] = []
    together, log_probs, _ = original.decode_tokens(both, mask, 7, greedy(original, seen), pixels=data["pixel_values"])
    batched = torch.stack(seen, dim=1)
    assert torch.equal(log_probs, batched.amax(-1))
    for row, alone_ids in enumerate((short[:1], ids[1:])):
        seen.clear()
        pixels = data["pixel_values"][row : row + 1]
        alone, _, _ = original.decode_tokens(alone_ids, None, 7, greedy(original, seen), pixels=pixels)
        assert torch.equal(alone[0], together[row])
        assert_same_up_to(16, batched[row], torch.stack(seen, dim=1)[0])
    scored = original(both, mask, together, pixels=data["pixel_values"])[0].log_softmax(-1)
    assert_same_up_to(16, scored, batched)


# ----------------------------------------------------------------------------------------------------- the policy


@pytest.mark.parametrize(
    ("values", "chunk", "config"),
    [
        ("none", 1, {}),
        ("chunk", 1, {"lora": LoRAConfig(rank=4, dropout=0.3), "log_prob_over": "full_vocabulary"}),
        ("action", 2, {"freeze_vision": True, "value_head": MLPHeadConfig(hidden=(16,))}),
        ("chunk", 1, {"lora": LoRAConfig(rank=4), "recompute": "selective", "cameras": ("camera1", "camera0")}),
    ],
)
def test_contract(values: Any, chunk: int, config: dict[str, Any]) -> None:
    given = OpenVLAARConfig(preset="fast", **config)

    check_model(
        openvla, given, env=ENV, chunk=chunk, values=values, temperature=1.6, atol=2e-5, reload=reloading(given)
    )


@pytest.mark.parametrize("support", ["action_tokens", "full_vocabulary"])
@pytest.mark.parametrize("chunk", [1, 3])
def test_scores_are_the_sampled_log_probs(support: str, chunk: int) -> None:
    context = {"temperature": 1.3, "values": "chunk", "chunk": chunk}
    model, obs = policy(context, log_prob_over=support), observation(5)
    assert model.prompts.take_prompts(obs.instructions).mask is not None, "prompts of unequal length"
    sampled = model.sample_chunk(obs, noise(5), False)
    scores = model.chunk_log_probs(obs, sampled)
    torch.testing.assert_close(scores.log_probs, sampled.log_probs, rtol=0, atol=1e-5)
    torch.testing.assert_close(scores.values, sampled.values, rtol=0, atol=1e-5)
    torch.testing.assert_close(model.values(obs), sampled.values, rtol=0, atol=1e-5)
    assert sampled.extras["tokens"].shape == (5, chunk, 3)


def test_rows_score_alike_in_any_batch() -> None:
    model, obs = policy(), observation(6)
    sampled = model.sample_chunk(obs, noise(6), False)
    for row in range(6):
        at = np.array([row])
        one = Chunk(
            actions=sampled.actions[at],
            log_probs=sampled.log_probs[at],
            extras={"tokens": sampled.extras["tokens"][at]},
        )
        scores = model.chunk_log_probs(obs.take(at), one)
        torch.testing.assert_close(scores.log_probs, sampled.log_probs[at], rtol=0, atol=1e-5)


def test_a_token_depends_on_those_before_it_only() -> None:
    model, obs = policy({"chunk": 2}), observation(3)
    tokens = model.sample_chunk(obs, noise(3), False).extras["tokens"]
    base, _ = model._compute_logits(obs, tokens)
    changed = tokens.clone()
    changed[:, 0, 2] = torch.where(changed[:, 0, 2] == 600, 700, 600)
    other, _ = model._compute_logits(obs, changed)
    gap = (other - base).abs().amax(-1).flatten(1)
    assert gap[:, :3].max() == 0
    assert gap[:, 3:].min() > 1e-4


def test_text_tokens_mean_the_nearest_action_and_are_scored_among_all_tokens() -> None:
    narrow, wide = policy(), policy(log_prob_over="full_vocabulary")
    obs = observation(4)
    sampled = wide.sample_chunk(obs, noise(4), False)
    tokens = sampled.extras["tokens"]
    assert (tokens < 512).any()
    assert torch.equal(wide.decode_actions(torch.full((1, 1, 3), 5)), wide.decode_actions(torch.full((1, 1, 3), 512)))
    assert (
        wide.chunk_log_probs(obs, sampled).entropy.mean()
        > narrow.chunk_log_probs(obs, narrow.sample_chunk(obs, noise(4), False)).entropy.mean()
    )


def test_recomputation_does_not_lose_the_cache() -> None:
    obs = observation(3)
    off, *others = (policy(recompute=mode).sample_chunk(obs, noise(3), False) for mode in RECOMPUTE)
    for chunk in others:
        assert torch.equal(off.log_probs, chunk.log_probs)
        assert torch.equal(off.actions, chunk.actions)


def test_imitation_learns_to_repeat_the_expert() -> None:
    model, obs = policy({"chunk": 2}), observation(4)
    actions = np.random.default_rng(0).uniform(-1, 1, (4, 2, 3)).astype(np.float32)
    assert model.imitation_loss(obs, actions).item() == pytest.approx(np.log(256), abs=0.5)
    optimiser = torch.optim.Adam([p for p in model.module.parameters() if p.requires_grad], 3e-3)
    for _ in range(60):
        optimiser.zero_grad()
        model.imitation_loss(obs, actions).backward()
        optimiser.step()
    acted = model.sample_chunk(obs, noise(4), True).actions
    assert np.abs(acted.numpy() - actions).max() <= 1 / 255 + 1e-6


# ------------------------------------------------------------------------------------------------ what is refused


def test_public_checkpoint_answers_with_one_action(tmp_path: Path) -> None:
    import json

    policy().save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["policy_setup"] = {}
    (tmp_path / "config.json").write_text(json.dumps(config))
    policy(checkpoint=str(tmp_path))
    with pytest.raises(MismatchError, match=r"chunks of 1 action \(OpenVLA answers with one.*set rollout.chunk to 1"):
        policy({"chunk": 4}, checkpoint=str(tmp_path))
    with pytest.raises(MismatchError, match="trained on one image, model.cameras names 2"):
        policy(checkpoint=str(tmp_path), cameras=("camera0", "camera1"))


def test_checkpoint_of_the_other_decoding() -> None:
    with pytest.raises(MismatchError, match=r"parallel decoding.*set model.type to openvla_oft"):
        policy(checkpoint="builtin:tabletop")


def test_first_camera_unless_told(tmp_path: Path) -> None:
    assert policy()._cameras == ("camera0",)
    policy(cameras=("camera1",)).save(tmp_path)
    assert policy(checkpoint=str(tmp_path))._cameras == ("camera1",)


def test_action_dim_is_known_without_building(tmp_path: Path) -> None:
    policy().save(tmp_path)
    assert openvla.action_dim is not None
    assert openvla.action_dim(OpenVLAARConfig(checkpoint=str(tmp_path))) == 3
    assert openvla.action_dim(OpenVLAARConfig(preset="tiny")) is None
