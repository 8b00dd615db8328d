"""pi0.5 as a policy: what the prompt tells, the critic, layouts, what is refused. What it shares with pi0 is tested
there."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from model_cases import noise, reloading
from pi0_cases import CHUNK, ENV, REFERENCE_SIZES, expert, observation
from pi0_cases import policy as pi0_policy
from safetensors.torch import load_file, save_file

from reference_files import reference
from vla_rl.core.contexts import CheckContext, ModelContext
from vla_rl.core.errors import CheckpointError
from vla_rl.plugins.models.pi0 import pi05
from vla_rl.plugins.models.pi0.builder import Pi05Policy, build_policy, state_text
from vla_rl.plugins.models.pi0.config import Pi05Config, Pi05HeadConfig
from vla_rl.plugins.models.pi0.statistics import action_dim, check_checkpoint
from vla_rl.testing import check_model, synthetic
from vla_rl.toolkit.models.adapters import LoRAConfig
from vla_rl.toolkit.models.checkpoints.fitting import MismatchError
from vla_rl.toolkit.models.flow.config import FlowNoise, FlowSDE
from vla_rl.toolkit.models.prompts import train_tokenizer

STATS = {
    "actions": {"mean": [0.0] * 3, "std": [1.0] * 3, "q01": [-0.5, -1.0, 0.0], "q99": [0.5, 1.0, 0.4]},
    "state": {
        "mean": [0.0] * 8,
        "std": [1.0] * 8,
        "q01": [-1.0, -2.0, 0.0, 0.5, *[0.0] * 4],  # padded to the network's width
        "q99": [1.0, 2.0, 4.0, 0.5, *[0.0] * 4],
    },
}


def policy(env: Any = ENV, context: dict[str, Any] | None = None, **config: Any) -> Pi05Policy:
    if "checkpoint" not in config:
        config.setdefault("preset", "tiny")
    built = build_policy(Pi05Config(**config), ModelContext(**{"env": env, "chunk": CHUNK, **(context or {})}))
    assert isinstance(built, Pi05Policy)
    return built


@pytest.fixture
def openpi(tmp_path: Path) -> Path:
    """A checkpoint in openpi's layout, with the two files that our small networks need."""
    folder = tmp_path / "openpi"
    assets = folder / "assets" / "libero"
    assets.mkdir(parents=True)
    save_file(load_file(reference("pi05", "model.safetensors")), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"action_dim": 8, "action_horizon": 10}))
    (folder / "architecture.json").write_text(json.dumps(attrs.asdict(REFERENCE_SIZES)))
    (assets / "norm_stats.json").write_text(json.dumps({"norm_stats": STATS}))
    tokenizer = train_tokenizer([t.instruction for t in ENV.tasks], lambda t: state_text(t, range(10)), 512)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize(
    ("values", "config"),
    [
        ("action", {"train_expert_only": False, "noise": FlowSDE(steps="all", level=0.3)}),
        ("chunk", {"noise": FlowNoise(), "value_head": Pi05HeadConfig(reads="expert")}),
        ("chunk", {"state_in_prompt": "none", "lora": LoRAConfig(rank=4), "value_head": Pi05HeadConfig(pads=True)}),
    ],
)
def test_contract(values: Any, config: dict[str, Any]) -> None:
    given = Pi05Config(preset="tiny", **config)

    check_model(
        pi05, given, env=ENV, chunk=CHUNK, values=values, atol=2e-5, reload=reloading(given, state_in_prompt=None)
    )


def test_a_network_that_begins_learns_in_all_its_layers() -> None:
    """The gates start at 1: with the official 0, layers would be the identity and get no gradient."""
    model = policy()
    model.imitation_loss(observation(4), expert(4)).backward()
    layers = model.module.pi0.model.dit.layers
    for part in (layers[0].self_attn.q_proj, layers[-1].mlp.up_proj, layers[0].input_layernorm.dense):
        assert part.weight.grad.abs().max() > 1e-6
    assert layers[0].input_layernorm.dense.bias.view(3, -1).mean(1).tolist() == [0, 0, 1]


def test_a_decision_asks_each_norm_once_what_it_makes_of_the_times() -> None:
    model, calls = policy(denoise_steps=4), Counter[Any]()
    norms = model.module.pi0.model.dit.norms
    for norm in norms:
        norm.dense.register_forward_hook(lambda dense, given, result: calls.update([dense]))
    model.sample_chunk(observation(2), noise(2), False)
    assert calls == {norm.dense: 1 for norm in norms}


def told(model: Pi05Policy, obs: Any) -> list[str]:
    """The prompts that the network reads."""
    seen: list[torch.Tensor] = []
    see = model.module.run_backbone
    model.module.run_backbone = lambda pixels, ids, mask: seen.extend((ids, mask)) or see(pixels, ids, mask)
    model.sample_chunk(obs, noise(len(obs)), True)
    ids, mask = seen
    assert ids.shape[1] % 16 == 0 or model.state_in_prompt == "none"
    return [model.prompts.tokenizer.decode(row[kept].tolist()) for row, kept in zip(ids, mask, strict=True)]


def test_the_prompt_tells_the_normalised_state(openpi: Path) -> None:
    obs = observation(2)
    obs = attrs.evolve(obs, state=np.array([[0.0, 2.0, -1.0, 0.5], [1.0, -2.0, 1.0, 0.5]], np.float32))
    instruction = obs.instructions[0].strip()
    exact = told(policy(checkpoint=str(openpi), state_in_prompt="exact"), obs)
    assert (
        exact[0] == f"Task: {instruction}, State: 127 255 -1 0;\nAction: "
    )  # 1e-6 wider than 2: just below the middle
    assert ", State: 255 0 63 0;\n" in exact[1] or ", State: 255 0 64 0;\n" in exact[1]
    padded = told(policy(checkpoint=str(openpi), state_in_prompt="padded"), obs)
    assert padded[0] == exact[0].replace(";", " 128 128 128 128;")
    assert told(policy(checkpoint=str(openpi), state_in_prompt="none"), obs)[0] == f"{instruction}\n"


def test_openpis_files_do_not_say_what_the_prompt_tells(openpi: Path) -> None:
    with pytest.raises(CheckpointError, match="set model.state_in_prompt: exact .* or none"):
        policy(checkpoint=str(openpi))
    with pytest.raises(Exception, match="set model.state_in_prompt: exact"):
        check_checkpoint(Pi05Config(checkpoint=str(openpi)), CheckContext(chunk=4))
    check_checkpoint(Pi05Config(checkpoint=str(openpi), state_in_prompt="none"), CheckContext(chunk=4))
    assert action_dim(Pi05Config(checkpoint=str(openpi), state_in_prompt="none")) == 3


@pytest.mark.parametrize("kind", ["exact", "padded", "none"])
def test_openpi_is_written_as_lerobot(openpi: Path, tmp_path: Path, kind: str) -> None:
    """Key by key; with the processors, so that lerobot runs it; the folder says what the prompt tells."""
    model, obs, out = policy(checkpoint=str(openpi), state_in_prompt=kind), observation(2), tmp_path / "out"
    model.save(out)
    old, new = load_file(openpi / "model.safetensors"), load_file(out / "model.safetensors")
    assert {f"model.{name}" for name in old} == set(new)
    assert all(torch.equal(new[f"model.{name}"], tensor) for name, tensor in old.items())
    config = json.loads((out / "config.json").read_text())
    assert (config["type"], config["chunk_size"], config["tokenizer_max_length"]) == ("pi05", 10, 200)
    steps = json.loads((out / "policy_preprocessor.json").read_text())["steps"]
    names = [step["registry_name"] for step in steps]
    begin, text, end = names[:2], ["tokenizer_processor", "device_processor"], ["normalizer_processor"]
    assert begin == ["rename_observations_processor", "to_batch_processor"]
    if kind == "none":
        assert names[2:] == ["pi0_new_line_processor", *text, *end]
    else:  # the state is normalised before it is put into words
        assert names[2:] == [*end, "pi05_prepare_state_tokenizer_processor_step", *text]
    assert json.loads((out / "policy_postprocessor.json").read_text())["steps"][0]["registry_name"] == (
        "unnormalizer_processor"
    )
    tensors = load_file(out / next(step["state_file"] for step in steps if "state_file" in step))
    torch.testing.assert_close(tensors["action.q99"], torch.tensor([0.5, 1.0, 0.4]) + 1e-6, rtol=0, atol=1e-7)

    again = policy(checkpoint=str(out))
    assert again.state_in_prompt == kind
    one, two = (m.sample_chunk(obs, noise(2), False) for m in (model, again))
    torch.testing.assert_close(one.actions, two.actions, rtol=0, atol=1e-5)
    (out / "state_in_prompt.json").unlink()  # lerobot's own files tell whether, and not how
    assert policy(checkpoint=str(out)).state_in_prompt == ("exact" if kind == "padded" else kind)


def test_lerobots_scale_is_the_files(openpi: Path, tmp_path: Path) -> None:
    """Never quantiles by name: public checkpoints have z-scores too."""
    out = tmp_path / "out"
    policy(checkpoint=str(openpi), state_in_prompt="exact").save(out)
    before = json.loads((out / "policy_preprocessor.json").read_text())
    step = next(s for s in before["steps"] if s["registry_name"] == "normalizer_processor")
    step["config"]["norm_map"] |= {"ACTION": "MEAN_STD", "STATE": "MEAN_STD"}
    (out / "policy_preprocessor.json").write_text(json.dumps(before))
    moments = {"action.mean": torch.ones(3), "action.std": torch.full((3,), 2.0)}
    moments |= {"observation.state.mean": torch.zeros(4), "observation.state.std": torch.ones(4)}
    save_file(moments, out / step["state_file"])
    wide = attrs.evolve(ENV, action_low=(-9.0,) * 3, action_high=(9.0,) * 3)
    chunk = policy(checkpoint=str(out), env=wide).sample_chunk(observation(2), noise(2), False)
    torch.testing.assert_close(chunk.actions, chunk.extras["chain"][:, -1, :CHUNK, :3] * 2 + 1)


def test_the_demonstrations_scale_is_saved(openpi: Path, tmp_path: Path) -> None:
    part = {"mean": [0.0] * 4, "std": [1.0] * 4, "q01": [-3.0] * 4, "q99": [3.0] * 4}
    scaling = {"state": part, "action": {name: values[:3] for name, values in part.items()}}
    policy(checkpoint=str(openpi), state_in_prompt="exact").save(tmp_path / "first")
    model = policy(checkpoint=str(tmp_path / "first"), context={"scaling": scaling})
    model.save(tmp_path / "second")
    again = policy(checkpoint=str(tmp_path / "second"))
    one, two = (m.sample_chunk(observation(2), noise(2), False).actions for m in (model, again))
    assert torch.equal(one, two)
    assert again.checkpoint.statistics.action.values == ((-3.0,) * 3, (3.0,) * 3)


@torch.no_grad()
def test_the_critic_takes_no_pass_of_the_expert_and_no_padding() -> None:
    for head, passes in ((Pi05HeadConfig(), 4), (Pi05HeadConfig(reads="expert"), 5)):
        model, obs = policy(context={"values": "chunk"}, value_head=head), observation(3)
        calls: list[int] = []
        model.module.pi0.model.dit.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        chunk = model.sample_chunk(obs, noise(3), False)
        assert len(calls) == passes
        assert torch.equal(model.values(obs), chunk.values)
    one = policy(context={"values": "chunk"}, value_head=Pi05HeadConfig())
    other = policy(context={"values": "chunk"}, value_head=Pi05HeadConfig(pads=True))
    found = [m.values(observation(3)) for m in (one, other)]
    assert not torch.allclose(*found)
    for model, same in ((one, True), (other, False)):
        before = model.values(observation(3))
        model.prompts.limit, model.prompts._full_width = 160, True
        assert torch.allclose(model.values(observation(3)), before, atol=1e-5) == same


@pytest.mark.parametrize(("head", "trained"), [(Pi05HeadConfig(), True), (Pi05HeadConfig(detach=True), False)])
def test_the_last_layer_matters_to_a_critic_on_the_prefix(head: Pi05HeadConfig, trained: bool) -> None:
    model = policy(train_expert_only=False, value_head=head, context={"values": "chunk"})
    name = "pi0.model.vlm.language_model.layers.2.mlp.up_proj.weight"
    assert dict(model.module.named_parameters())[name].requires_grad == trained


def refused(match: str, **config: Any) -> None:
    with pytest.raises((CheckpointError, MismatchError), match=re.compile(match, re.DOTALL)):
        policy(**config)


def test_what_does_not_fit(openpi: Path, tmp_path: Path) -> None:
    blind = synthetic.env_info(state_dim=0)
    refused("exact needs a state.*set state_in_prompt: none", env=blind, state_in_prompt="exact")
    assert policy(env=blind).state_in_prompt == "none"
    common: dict[str, Any] = {"checkpoint": str(openpi), "state_in_prompt": "exact"}
    refused("4-dimensional state, the simulator's has 6", env=synthetic.env_info(state_dim=6), **common)
    refused("3-dimensional actions, the simulator takes 4", env=synthetic.env_info(action_dim=4), **common)
    with pytest.raises(CheckpointError, match="weights in .* are those of pi05, not of pi0; set model.type: pi05"):
        pi0_policy(checkpoint=str(openpi))
    stats = openpi / "assets" / "libero" / "norm_stats.json"
    kept = stats.read_text()
    stats.write_text(json.dumps({"norm_stats": {"actions": {"mean": [0.0], "std": [1.0]}}}))
    refused("no q01 and q99 of 'actions'", **common)
    stats.write_text(kept)
    policy(**common).save(tmp_path / "lerobot")
    with pytest.raises(CheckpointError, match="type 'pi05'; pi0 reads .*; set model.type: pi05"):
        pi0_policy(checkpoint=str(tmp_path / "lerobot"))
    (tmp_path / "lerobot" / "policy_preprocessor.json").unlink()
    refused("no statistics to scale", checkpoint=str(tmp_path / "lerobot"))
