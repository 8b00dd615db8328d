"""GR00T N1.5 as a policy: the contract, what it reads, robots, NVIDIA's layout, what is refused. What flow models share
is tested with pi0."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from shutil import copytree
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from flow_cases import check_inputs, check_narrow, contracts
from gr00t_cases import METADATA, entry, folder_with, policy
from model_cases import noise, reloading
from pi0_cases import CHUNK, ENV, expert, flow_error, observation
from safetensors.torch import load_file, save_file

from vla_rl.core.contexts import CheckContext
from vla_rl.core.errors import CheckpointError
from vla_rl.plugins.models.gr00t import plugin
from vla_rl.plugins.models.gr00t.config import GrootConfig
from vla_rl.plugins.models.gr00t.folder import action_dim, check_checkpoint
from vla_rl.plugins.models.gr00t.network import TIED
from vla_rl.plugins.models.gr00t.robots import ROWS
from vla_rl.testing import check_model, synthetic
from vla_rl.toolkit.models.checkpoints.fitting import MismatchError
from vla_rl.toolkit.models.images import crop_and_resize

UNEMBEDDINGS, EMBEDDINGS = next(iter(TIED.items()))


@pytest.fixture(scope="module")
def official(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_with(tmp_path_factory.mktemp("official") / "tiny")


def copy(folder: Path, target: Path, config: dict[str, Any] | None = None, metadata: Any = None) -> Path:
    copytree(folder, target)
    raw = json.loads((target / "config.json").read_text()) | (config or {})
    (target / "config.json").write_text(json.dumps(raw))
    if metadata is not None:
        (target / METADATA).write_text(json.dumps(metadata))
    return target


@contracts
def test_contract(values: Any, config: dict[str, Any]) -> None:
    given = GrootConfig(preset="tiny", **config)

    check_model(plugin, given, env=ENV, chunk=CHUNK, values=values, temperature=1.3, atol=2e-5, reload=reloading(given))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_contract_on_a_gpu(dtype: str) -> None:
    given = GrootConfig(preset="tiny", dtype=dtype)
    atol = 2e-5 if dtype == "float32" else 0.05
    check_model(plugin, given, env=ENV, chunk=CHUNK, values="chunk", device="cuda", atol=atol, reload=reloading(given))


def test_nothing_is_made_on_another_device() -> None:
    """A policy on a device without memory samples, scores and takes a learner step from frames of the CPU: a tensor that
    is made elsewhere, or a look at a number, would be refused."""
    model, obs = policy(context={"values": "chunk", "device": "meta"}), observation(3)
    chunk = model.sample_chunk(obs, noise(3), False)
    assert chunk.actions.is_meta and chunk.log_probs.is_meta and chunk.extras["chain"].is_meta
    trained = [p for p in model.module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    scores = model.chunk_log_probs(obs, chunk)
    (scores.log_probs.sum() + scores.values.sum()).backward()
    optimizer.step()
    assert all(p.grad is not None and p.grad.is_meta for p in trained)


def test_bfloat16() -> None:
    model = policy(dtype="bfloat16", context={"values": "chunk"})
    check_narrow(model, policy(), observation(4))
    kinds = {name: p.dtype for name, p in model.module.groot.named_parameters()}
    assert kinds["action_head.model.transformer_blocks.0.attn1.to_q.weight"] == torch.bfloat16
    assert kinds["action_head.model.transformer_blocks.0.norm1.linear.weight"] == torch.float32
    assert kinds["action_head.state_encoder.layer1.W"] == kinds["action_head.vlln.weight"] == torch.float32


def test_all_inputs_matter() -> None:
    check_inputs(policy(), observation(2))


@torch.no_grad()
def test_a_row_gets_what_it_gets_alone() -> None:
    """Whatever the length of its instruction and of the others': nothing sees padding, not even the critic."""
    model, obs = policy(context={"values": "chunk"}), observation(4)
    module, state = model.module, model._build_inputs(obs)["state"]
    (ids, mask), pixels = model.prompts.token_rows(obs.instructions), model._build_inputs(obs)["pixels"]
    together, _ = model._encode_observation(obs)
    x, time = torch.randn(4, *module.shape, generator=torch.Generator().manual_seed(0)), torch.full((4,), 0.75)
    found = module.run_expert(together, state, x, time)
    lengths = mask.sum(1).tolist()
    assert len(set(lengths)) == 2 and mask.shape[1] == max(lengths)
    for i, length in enumerate(lengths):
        row = slice(i, i + 1)
        seen = module.run_backbone(pixels[row], ids[row, :length], mask[row, :length])
        alone = module.build_prefix(seen, state[row])
        torch.testing.assert_close(together.summary[row], alone.summary, rtol=0, atol=1e-5)
        torch.testing.assert_close(
            found[row], module.run_expert(alone, state[row], x[row], time[row]), rtol=0, atol=1e-5
        )


def test_the_head_is_trained_with_a_frozen_language_model() -> None:
    model, obs = policy(context={"values": "chunk"}), observation(3)
    scores = model.chunk_log_probs(obs, model.sample_chunk(obs, noise(3), False))
    (scores.log_probs.sum() + scores.values.sum()).backward()
    head = model.module.groot.action_head
    assert head.vl_self_attention["transformer_blocks"][0].attn1.to_k.weight.grad.abs().max() > 0
    assert not [name for name, _ in model.weights() if "backbone" in name]
    used = head.action_encoder.W2.W.grad.abs().amax((1, 2)) > 0
    assert used.nonzero().flatten().tolist() == [ROWS["new_embodiment"]], "other robots' layers stay"


def test_cloning_learns() -> None:
    model, obs, actions = policy(), observation(8), expert(8)
    optimizer = torch.optim.AdamW([p for p in model.module.parameters() if p.requires_grad], lr=1e-3)
    before = flow_error(model, obs, actions)
    for _ in range(100):
        optimizer.zero_grad()
        model.imitation_loss(obs, actions).backward()
        optimizer.step()
    assert flow_error(model, obs, actions) < 0.7 * before


def test_images() -> None:
    """The middle 0.95, stretched to a square, in whole levels."""
    frame = torch.zeros(1, 3, 100, 200)
    frame[..., :2, :] = frame[..., :4] = 255.0
    assert (crop_and_resize(frame, 64) == 0).all(), "the border is cut off"
    frame[..., 50:, :] = 200.5
    seen = crop_and_resize(frame, 64)
    assert seen.shape == (1, 3, 64, 64)
    assert set(seen[..., 40:, :].unique().tolist()) == {200.0}


def test_the_prompt_is_one_turn_of_a_chat() -> None:
    model = policy()
    text = model.prompts.tokenizer.decode(
        model.prompts.encode_instruction("push the red block"), skip_special_tokens=False
    )
    image = "<img>" + "<IMG_CONTEXT>" * 16 + "</img>"
    assert text == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
        f"<image 1>{image}<image 2>{image}push the red block<|im_end|>\n<|im_start|>assistant\n"
    )
    cut = model.prompts.encode_instruction("block " * 100)
    assert cut[-2:] == model.prompts.encode_instruction("push")[-2:], "the end of the turn is kept"
    with pytest.raises(CheckpointError, match="stands for a part of an image"):
        model.prompts.encode_instruction("push <IMG_CONTEXT>")


def test_statistics_of_the_folder(official: Path) -> None:
    model = policy(checkpoint=str(official))
    state = model._build_inputs(attrs.evolve(observation(1), state=np.array([[1.0, 0.25, 9.0, 1.0]], np.float32)))[
        "state"
    ]
    assert state[0].tolist() == [0.5, -0.5, 0.0, -0.5], "a number that never changed is 0"
    restored = model._actions.restore_units(torch.tensor([[-1.0, 0.5, 1.0]]))
    assert restored[0].tolist() == [-0.5, 0.125, 1.0]
    swapped = policy(checkpoint=str(official), state_keys=("gripper", "x"), action_keys=("gripper", "move"))
    assert swapped.checkpoint.statistics.action.values[0] == (0.0, -0.5, -0.25)
    assert swapped.checkpoint.statistics.state.values[1] == (0.5, 4.0, 2.0, 1.0)


def test_scales_by_the_demonstrations_are_kept(tmp_path: Path) -> None:
    """Also of a number that never changed in them."""
    part = {"q01": [-1.0, 0.0, 0.5], "q99": [1.0, 0.5, 0.5]}
    scaling = {"action": part, "state": {name: [*values, 0.0] for name, values in part.items()}}
    model = policy(context={"scaling": scaling})
    model.save(tmp_path)
    again = policy(checkpoint=str(tmp_path))
    actions = torch.tensor([[0.5, 0.25, 0.7]])
    for one in (model, again):
        assert one._actions.normalise_feature(actions, 3)[0].tolist() == [0.5, 0.0, 0.0]
        assert one._actions.restore_units(actions)[0].tolist() == [0.5, 0.3125, 0.5]
    assert torch.equal(model._build_inputs(observation(2))["state"], again._build_inputs(observation(2))["state"])


def test_liberos_gripper(official: Path) -> None:
    """Trained as 0 for closed and 1 for open; LIBERO takes +1 and -1. Cloning scales the other way."""
    model = policy(checkpoint=str(official), gripper="libero")
    actions = model._actions.restore_units(torch.tensor([[0.0, 0.0, -0.9], [0.0, 0.0, 0.4]]))
    assert actions[:, 2].tolist() == [1.0, -1.0]
    assert model._actions.normalise_feature(actions, 3)[:, 2].tolist() == [-1.0, 1.0]
    acted = model.sample_chunk(observation(4), noise(4), False).actions
    assert set(acted[..., 2].unique().tolist()) <= {-1.0, 1.0}


def test_a_robot_has_its_own_layers(official: Path, tmp_path: Path) -> None:
    both = {"new_embodiment": entry(), "libero_panda": entry(action={"all": {"min": [-1] * 3, "max": [1] * 3}})}
    folder = copy(official, tmp_path / "two", metadata=both)
    one, two = (policy(checkpoint=str(folder), embodiment=tag) for tag in both)
    assert (one.module.row, two.module.row) == (31, 2)
    assert two.checkpoint.statistics.action.values[1] == (1.0, 1.0, 1.0)
    a, b = (m.sample_chunk(observation(2), noise(2), True).extras["chain"][:, -1] for m in (one, two))
    assert (a - b).abs().max() > 1e-4
    refused("has 2 embodiments; set model.embodiment: new_embodiment, libero", checkpoint=str(folder))
    refused("no embodiment 'libero_pand' in .*did you mean", checkpoint=str(folder), embodiment="libero_pand")
    other = copy(official, tmp_path / "other", metadata={"my_robot": entry()})
    refused("which of the model's layers embodiment 'my_robot' has is not known", checkpoint=str(other))


def test_nvidias_layout(official: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Names as the public files have them; what was opened is kept, and one of the tied pair is enough."""
    state = load_file(official / "model.safetensors")
    assert "backbone.eagle_model.vision_model.vision_model.post_layernorm.weight" in state
    assert EMBEDDINGS in state and UNEMBEDDINGS not in state
    with caplog.at_level(logging.WARNING):
        model = policy(checkpoint=str(official))
    assert "could not be compared with the original's" in caplog.text
    model.save(tmp_path / "again")
    for name in ("config.json", METADATA, "tokenizer.json"):
        assert json.loads((tmp_path / "again" / name).read_text()) == json.loads((official / name).read_text())
    state[UNEMBEDDINGS] = state.pop(EMBEDDINGS)
    save_file(state, tmp_path / "again" / "model.safetensors")
    again = policy(checkpoint=str(tmp_path / "again"))
    one, two = (m.sample_chunk(observation(2), noise(2), False).actions for m in (model, again))
    assert torch.equal(one, two)
    given = GrootConfig(checkpoint=str(official))
    assert action_dim(given) == 3
    check_checkpoint(given, CheckContext(chunk=CHUNK))


def refused(match: str, **config: Any) -> None:
    with pytest.raises((CheckpointError, MismatchError), match=re.compile(match, re.DOTALL)):
        policy(**config)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"model_type": "Gr00tN1d6"}, "type 'Gr00tN1d6': N1.6, which has another vision-language model"),
        ({"model_type": "Gr00tN1d7"}, "has no processor_config.json"),
        ({"model_type": "groot"}, "lerobot's, which names tensors otherwise"),
        ({"model_type": "llama"}, "type 'llama'; gr00t reads N1.5 .* and N1.7 .* in NVIDIA's layout"),
        ({"action_head_cfg": {"use_vlln": False}}, "action_head_cfg.use_vlln False is not supported, True is"),
        ({"backbone_cfg": {"project_to_dim": 1536}}, "backbone_cfg.project_to_dim 1536 is not supported"),
        ({"action_head_cfg": {"action_horizon": 2}}, "chunks of 2 actions, the spec asks for 4"),
    ],
)
def test_a_config_that_does_not_fit(official: Path, tmp_path: Path, changes: dict[str, Any], match: str) -> None:
    folder = copy(official, tmp_path / "other", config=changes)
    refused(match, checkpoint=str(folder))
    with pytest.raises(Exception, match=re.compile(match, re.DOTALL)):
        check_checkpoint(GrootConfig(checkpoint=str(folder)), CheckContext(chunk=CHUNK))


def test_what_does_not_fit(official: Path, tmp_path: Path) -> None:
    there = str(official)
    refused("3-dimensional actions, the simulator takes 4", checkpoint=there, env=synthetic.env_info(action_dim=4))
    refused("4-dimensional state, the simulator's has 6", checkpoint=there, env=synthetic.env_info(state_dim=6))
    refused("trained with 2 cameras", checkpoint=there, env=synthetic.env_info(cameras=1))
    refused("no action key 'mve'; it has: move, gripper; did you mean", checkpoint=there, action_keys=("mve",))
    refused("no min and max of state key 'x'", checkpoint=str(_without_range(official, tmp_path / "range")))
    refused("no statistics of the action", checkpoint=str(copy(official, tmp_path / "none", metadata={"gr1": {}})))
    folder = copy(official, tmp_path / "other")
    state = load_file(folder / "model.safetensors")
    del state["action_head.vlln.bias"]
    save_file(state, folder / "model.safetensors")
    refused(r"does not fit.*missing \(1\): action_head.vlln.bias", checkpoint=str(folder))
    (folder / "architecture.json").unlink()
    refused("does not fit.*of another shape", checkpoint=str(folder))
    (folder / "model.safetensors").write_bytes(b"cut")
    refused("cannot read .*model.safetensors", checkpoint=str(folder))
    tokens = json.loads((folder / "tokenizer.json").read_text())
    tokens["added_tokens"] = [token for token in tokens["added_tokens"] if token["content"] != "<img>"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokens))
    refused("the tokenizer has no <img>", checkpoint=there, tokenizer=str(tmp_path))
    (folder / "tokenizer.json").unlink()
    refused("no tokenizer at", checkpoint=str(folder))
    (folder / METADATA).unlink()
    refused("has no metadata.json", checkpoint=str(folder))


def _without_range(folder: Path, target: Path) -> Path:
    return copy(folder, target, metadata={"new_embodiment": entry(state={"x": {"mean": [0.0], "min": [0.0]}})})
