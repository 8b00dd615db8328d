"""SmolVLA as a policy: the contract, what it reads, lerobot's layout, what is refused. What flow models share is tested
with pi0."""

from __future__ import annotations

import json
import re
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
import torch
from flow_cases import check_inputs, check_narrow, contracts
from model_cases import noise, reloading
from pi0_cases import CHUNK, ENV, expert, observation
from safetensors.torch import load_file, save_file

from vla_rl.core.contexts import CheckContext, ModelContext
from vla_rl.core.errors import CheckpointError
from vla_rl.plugins.models.smolvla import plugin
from vla_rl.plugins.models.smolvla.builder import SmolVLAPolicy, build_policy, prompt_text
from vla_rl.plugins.models.smolvla.config import SmolVLAConfig
from vla_rl.plugins.models.smolvla.folder import action_dim, check_checkpoint
from vla_rl.testing import check_model, synthetic
from vla_rl.toolkit.models.checkpoints.fitting import MismatchError
from vla_rl.toolkit.models.images import CornerImages


def policy(env: Any = ENV, context: dict[str, Any] | None = None, **config: Any) -> SmolVLAPolicy:
    if "checkpoint" not in config:
        config.setdefault("preset", "tiny")
    return build_policy(SmolVLAConfig(**config), ModelContext(**{"env": env, "chunk": CHUNK, **(context or {})}))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    policy().save(folder)
    return folder


def copy(folder: Path, target: Path, **config: Any) -> Path:
    copytree(folder, target)
    raw = json.loads((target / "config.json").read_text()) | config
    (target / "config.json").write_text(json.dumps(raw))
    return target


@contracts
def test_contract(values: Any, config: dict[str, Any]) -> None:
    given = SmolVLAConfig(preset="tiny", **config)

    check_model(plugin, given, env=ENV, chunk=CHUNK, values=values, temperature=1.3, atol=2e-5, reload=reloading(given))


def test_bfloat16() -> None:
    model = policy(dtype="bfloat16", context={"values": "chunk"})
    check_narrow(model, policy(), observation(4))
    kinds = {name: p.dtype for name, p in model.module.smolvla.named_parameters()}
    assert kinds["vlm_with_expert.lm_expert.layers.0.mlp.up_proj.weight"] == torch.bfloat16
    assert kinds["vlm_with_expert.lm_expert.norm.weight"] == kinds["state_proj.weight"] == torch.float32


def test_the_state_is_trained_with_a_frozen_language_model() -> None:
    """It is in the prefix; images and instruction, which do not see it, run once and without gradient."""
    model, obs = policy(), observation(3)
    text = model.module.smolvla.vlm_with_expert.vlm.model.text_model
    passes: list[bool] = []
    text.layers[0].mlp.register_forward_hook(lambda _m, _i, out: passes.append(out.requires_grad))
    chunk = model.sample_chunk(obs, noise(3), False)
    assert passes == [False, False], "images and instruction, and the state's token"
    model.chunk_log_probs(obs, chunk).log_probs.sum().backward()
    assert passes[2:] == [False, True]
    assert model.module.smolvla.state_proj.weight.grad.abs().max() > 0
    assert not [n for n, _ in model.weights() if ".vlm." in n]


def test_all_inputs_matter() -> None:
    check_inputs(policy(), observation(2))


@torch.no_grad()
def test_an_action_sees_those_before_it() -> None:
    model, obs = policy(), observation(2)
    prefix, state = model._encode_observation(obs)
    x, time = torch.randn(2, CHUNK, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0.5, 0.9])
    moved = x.clone()
    moved[:, 2] += 1
    one, two = (model.module.run_expert(prefix, state, part, time) for part in (x, moved))
    apart = (one - two).abs().amax((0, 2))
    assert (apart[:2] < 1e-6).all()
    assert (apart[2:] > 1e-4).all()


def test_cloning_learns() -> None:
    model, obs, actions = policy(), observation(8), expert(8)
    optimizer = torch.optim.AdamW([p for p in model.module.parameters() if p.requires_grad], lr=3e-3)
    losses = []
    for _ in range(100):
        optimizer.zero_grad()
        loss = model.imitation_loss(obs, actions)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert np.mean(losses[-20:]) < 0.7 * np.mean(losses[:20])


def test_images_are_in_the_corner() -> None:
    """Images are padded as lerobot does it: black on the left and on top."""
    pixels = CornerImages(64, torch.device("cpu"), torch.float32)([np.full((1, 32, 64, 3), 255, np.uint8)])
    assert pixels.shape == (1, 1, 3, 64, 64)
    assert (pixels[..., :32, :] == -1).all()
    assert (pixels[..., 32:, :] == 1).all()
    tall = CornerImages(64, torch.device("cpu"), torch.float32)([np.full((1, 128, 64, 3), 255, np.uint8)])
    assert (tall[..., :32] == -1).all()
    assert (tall[..., 32:] == 1).all()


def test_prompts() -> None:
    assert prompt_text("Push it\n") == prompt_text("Push it") == "Push it\n"
    model = policy()
    assert (
        model.prompts.tokenizer.decode(model.prompts.encode_instruction("push the red block")) == "push the red block\n"
    )
    assert len(model.prompts.encode_instruction("block " * 100)) == 48


def test_lerobots_layout(saved: Path, tmp_path: Path) -> None:
    """Key by key: names, the processors in lerobot's order, kept as they are when it is saved again."""
    state = load_file(saved / "model.safetensors")
    assert all(name.startswith("model.") for name in state)
    assert "model.vlm_with_expert.vlm.lm_head.weight" in state
    assert len(state) == len(policy().module.network.state_dict())
    steps = json.loads((saved / "policy_preprocessor.json").read_text())["steps"]
    assert [step["registry_name"] for step in steps] == [
        "rename_observations_processor",
        "to_batch_processor",
        "smolvla_new_line_processor",
        "tokenizer_processor",
        "device_processor",
        "normalizer_processor",
    ]
    assert steps[3]["config"]["tokenizer_name"] == "HuggingFaceTB/SmolVLM2-500M-Video-Instruct"
    assert (saved / "policy_postprocessor.json").is_file() and (saved / "architecture.json").is_file()
    again = policy(checkpoint=str(saved))
    one, two = (m.sample_chunk(observation(2), noise(2), False).actions for m in (policy(), again))
    assert torch.equal(one, two)
    again.save(tmp_path)
    assert (tmp_path / "policy_preprocessor.json").read_bytes() == (saved / "policy_preprocessor.json").read_bytes()
    given = SmolVLAConfig(checkpoint=str(saved))
    assert action_dim(given) == 3
    check_checkpoint(given, CheckContext(chunk=CHUNK))


def refused(match: str, **config: Any) -> None:
    with pytest.raises((CheckpointError, MismatchError), match=re.compile(match, re.DOTALL)):
        policy(**config)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"type": "pi0"}, "type 'pi0'; smolvla reads lerobot's layout"),
        ({"adapt_to_pi_aloha": True}, "adapt_to_pi_aloha True is not supported"),
        ({"attention_mode": "self_attn"}, "attention_mode 'self_attn' is not supported, 'cross_attn' is"),
        ({"use_delta_joint_actions_aloha": True}, "which lerobot never implemented"),
        ({"chunk_size": 2}, "chunks of 2 actions, the spec asks for 4"),
    ],
)
def test_a_config_that_does_not_fit(saved: Path, tmp_path: Path, changes: dict[str, Any], match: str) -> None:
    folder = copy(saved, tmp_path / "other", **changes)
    refused(match, checkpoint=str(folder))
    with pytest.raises(Exception, match=match):
        check_checkpoint(SmolVLAConfig(checkpoint=str(folder)), CheckContext(chunk=CHUNK))


def test_a_language_model_of_unknown_size(saved: Path, tmp_path: Path) -> None:
    folder = copy(saved, tmp_path / "other", vlm_model_name="HuggingFaceTB/SmolVLM2-2.2B-Instruct")
    (folder / "architecture.json").unlink()
    refused("on '.*2.2B-Instruct' is not supported", checkpoint=str(folder))
    folder = copy(saved, tmp_path / "shallow", num_expert_layers=8)
    (folder / "architecture.json").unlink()
    refused("an expert of 8 layers for a language model of 16 is not supported", checkpoint=str(folder))


def test_what_does_not_fit(saved: Path, tmp_path: Path) -> None:
    refused("3-dimensional actions, the simulator takes 4", checkpoint=str(saved), env=synthetic.env_info(action_dim=4))
    refused("4-dimensional state, the simulator's has 6", checkpoint=str(saved), env=synthetic.env_info(state_dim=6))
    folder = copy(saved, tmp_path / "other")
    state = load_file(folder / "model.safetensors")
    del state["model.state_proj.bias"]
    save_file(state, folder / "model.safetensors")
    refused(r"does not fit.*missing \(1\): state_proj.bias", checkpoint=str(folder))
    (folder / "model.safetensors").write_bytes(b"cut")
    refused("cannot read .*model.safetensors", checkpoint=str(folder))
    save_file(state, folder / "model.safetensors")
    (folder / "policy_preprocessor.json").unlink()
    refused("has no policy_preprocessor.json", checkpoint=str(folder))
    save_file(state | {"normalize_inputs.buffer_observation_state.mean": torch.zeros(6)}, folder / "model.safetensors")
    refused(
        r"(?s)keeps its statistics among the weights \(normalize_inputs\.buffer_observation_state\.mean\), .*:\n"
        rf"  python -m lerobot\.processor\.migrate_policy_normalization --pretrained-path {folder} --output-dir {folder}-m",
        checkpoint=str(folder),
    )
    (folder / "tokenizer.json").unlink()
    refused("dtype float16 is for GPUs", dtype="float16")
