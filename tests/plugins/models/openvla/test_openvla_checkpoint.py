"""The folder: what is written comes back, and everything that does not fit is refused with a reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from model_cases import noise
from openvla_cases import CHUNK, ENV, observation, policy
from safetensors.torch import load_file, save_file

from vla_rl.core.contexts import ModelContext
from vla_rl.core.errors import CheckpointError
from vla_rl.core.spec.structure import Problems
from vla_rl.plugins.models.openvla.builder import build_policy
from vla_rl.plugins.models.openvla.checkpoint import save_checkpoint
from vla_rl.plugins.models.openvla.checks import check_checkpoint
from vla_rl.plugins.models.openvla.config import MLPHeadConfig, OpenVLAOFTConfig
from vla_rl.toolkit.models.adapters import LoRAConfig
from vla_rl.toolkit.models.checkpoints.fitting import MismatchError


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    policy(context={"values": "chunk"}, unnorm_key="table_no_noops").save(tmp_path / "model")
    return tmp_path / "model"


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_public_files(saved: Path) -> None:
    assert {path.name for path in saved.iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "dataset_statistics.json",
        "proprio_projector--latest_checkpoint.pt",
        "value_head.safetensors",
    }
    config = json.loads((saved / "config.json").read_text())
    assert config["model_type"] == "openvla"
    assert config["architectures"] == ["OpenVLAForActionPrediction"]
    assert config["policy_setup"]["cameras"] == ["camera0", "camera1"]
    assert set(json.loads((saved / "dataset_statistics.json").read_text())) == {"table_no_noops"}
    projector = torch.load(saved / "proprio_projector--latest_checkpoint.pt", weights_only=True)
    assert set(projector) == {"fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"}


def test_tokenizer_loads_with_transformers(saved: Path) -> None:
    from transformers import AutoTokenizer

    ours, theirs = policy(checkpoint=str(saved)).prompts, AutoTokenizer.from_pretrained(saved)
    text = ENV.tasks[1].instruction
    ids = theirs(f"In: What action should the robot take to {text}?\nOut: ").input_ids
    assert ids == ours.encode_instruction(text)
    assert len(theirs) == 512 + 256 + 1
    assert theirs.pad_token_id == 768


def test_everything_comes_back(saved: Path) -> None:
    for context in ({"values": "chunk"}, {"values": "chunk", "seed": 9}):
        first, again = policy(context={"values": "chunk"}), policy(checkpoint=str(saved), context=context)
        a, b = (model.sample_chunk(observation(3), noise(3), False) for model in (first, again))
        assert torch.equal(a.log_probs, b.log_probs)
        assert torch.equal(a.values, b.values)
        assert torch.equal(a.actions, b.actions)


def test_adapters_are_saved_merged(tmp_path: Path) -> None:
    model = policy(lora=LoRAConfig(rank=4))
    for name, p in model.module.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.1, generator=torch.Generator().manual_seed(0))
    before = model.sample_chunk(observation(3), noise(3), False)
    model.save(tmp_path)
    assert torch.equal(model.sample_chunk(observation(3), noise(3), False).log_probs, before.log_probs)
    assert not [name for name in load_file(tmp_path / "model.safetensors") if "lora" in name or "base_layer" in name]
    merged = policy(checkpoint=str(tmp_path))
    scores = merged.chunk_log_probs(observation(3), before)
    torch.testing.assert_close(scores.log_probs, before.log_probs, rtol=0, atol=1e-4)
    assert (policy().chunk_log_probs(observation(3), before).log_probs - before.log_probs).abs().max() > 0.01


def test_bfloat16_files_load_into_float32(tmp_path: Path) -> None:
    model = policy()
    save_checkpoint(model.module, model.config, model.prompts.tokenizer, tmp_path, dtype=torch.bfloat16)
    again = policy(checkpoint=str(tmp_path))
    assert {p.dtype for p in again.module.parameters()} == {torch.float32}
    wanted = model.module.vla.projector.fc1.weight.bfloat16().float()
    assert torch.equal(again.module.vla.projector.fc1.weight, wanted)


def test_projector_saved_by_distributed_training(saved: Path) -> None:
    path = saved / "proprio_projector--latest_checkpoint.pt"
    state = torch.load(path, weights_only=True)
    path.unlink()
    wrapped = {f"module.{name}": tensor for name, tensor in state.items()}
    torch.save(wrapped, saved / "proprio_projector--150000_checkpoint.pt")
    model = policy(checkpoint=str(saved))
    assert torch.equal(model.module.proprio_projector.fc1.weight, state["fc1.weight"])


def test_statistics_key_with_and_without_suffix(saved: Path) -> None:
    policy(checkpoint=str(saved), unnorm_key="table")
    with pytest.raises(CheckpointError, match="no statistics 'libero'.*there are: table_no_noops"):
        policy(checkpoint=str(saved), unnorm_key="libero")
    stats = json.loads((saved / "dataset_statistics.json").read_text())
    edit(saved / "dataset_statistics.json", other=stats["table_no_noops"])
    with pytest.raises(CheckpointError, match="set unnorm_key to one of: table_no_noops, other"):
        policy(checkpoint=str(saved))


@pytest.mark.parametrize(
    ("suites", "message"),
    [
        (("libero_goal",), None),
        ((), None),
        (("libero_goal", "another"), None),
        (("libero_spatial", "libero_goal"), "'libero_spatial', which has its own there; run one suite at a time"),
        (("libero_spatial",), "'libero_spatial', which has its own there; set unnorm_key: libero_spatial_no_noops"),
    ],
)
def test_one_suites_statistics_never_scale_another_that_has_its_own(
    saved: Path, suites: tuple[str, ...], message: str | None
) -> None:
    """Where a spec is checked, and where the model is built, which is the first look at a folder of the hub."""
    file = saved / "dataset_statistics.json"
    (entry,) = json.loads(file.read_text()).values()
    file.write_text(json.dumps({f"libero_{name}_no_noops": entry for name in ("spatial", "object", "goal", "10")}))
    config = OpenVLAOFTConfig(checkpoint=str(saved), unnorm_key="libero_goal_no_noops")
    for look in (check_checkpoint, build_policy):
        context = ModelContext(env=ENV, chunk=CHUNK, suites=suites)
        if message is None:
            look(config, context)
            continue
        with pytest.raises((MismatchError, Problems), match=f"statistics 'libero_goal_no_noops' of .* {message}"):
            look(config, context)


def test_statistics_missing(saved: Path) -> None:
    (saved / "dataset_statistics.json").unlink()
    edit(saved / "config.json", norm_stats={})
    with pytest.raises(CheckpointError, match="no statistics to scale actions"):
        policy(checkpoint=str(saved))


def test_statistics_in_config_serve_too(saved: Path) -> None:
    (saved / "dataset_statistics.json").unlink()
    policy(checkpoint=str(saved))


def test_statistics_of_the_state_missing(saved: Path) -> None:
    stats = json.loads((saved / "dataset_statistics.json").read_text())
    del stats["table_no_noops"]["proprio"]
    (saved / "dataset_statistics.json").write_text(json.dumps(stats))
    with pytest.raises(MismatchError, match="needs statistics of the state"):
        policy(checkpoint=str(saved))
    assert policy(checkpoint=str(saved), use_proprio=False).module.proprio_projector is None


def test_folder_missing_or_no_checkpoint_or_of_another_model(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="'/nowhere/at/all' is not a folder"):
        policy(checkpoint="/nowhere/at/all")
    with pytest.raises(CheckpointError, match="no built-in checkpoint 'builtin:nothing'"):
        policy(checkpoint="builtin:nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="it has no config.json"):
        policy(checkpoint=str(tmp_path / "empty"))
    edit(saved / "config.json", model_type="pi0")
    with pytest.raises(CheckpointError, match="model of type 'pi0', not 'openvla'"):
        policy(checkpoint=str(saved))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors", "value_head.safetensors"])
def test_broken_file_is_named(saved: Path, name: str) -> None:
    (saved / name).write_text("{ no")
    with pytest.raises(CheckpointError, match=f"cannot read .*{name}"):
        policy(checkpoint=str(saved), context={"values": "chunk"})


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors"])
def test_missing_file_is_named(saved: Path, name: str) -> None:
    (saved / name).unlink()
    with pytest.raises(CheckpointError, match=f"it has no {name}"):
        policy(checkpoint=str(saved))


def test_keys_that_do_not_fit_are_listed(saved: Path) -> None:
    state = load_file(saved / "model.safetensors")
    del state["projector.fc1.bias"]
    state["extra.weight"] = torch.zeros(2)
    state["projector.fc2.bias"] = torch.zeros(3)
    save_file(state, saved / "model.safetensors")
    with pytest.raises(CheckpointError) as error:
        policy(checkpoint=str(saved))
    for part in (
        "missing (1): projector.fc1.bias",
        "unexpected (1): extra.weight",
        "projector.fc2.bias: (3,) instead of",
    ):
        assert part in str(error.value)


def test_critic_of_another_shape(saved: Path) -> None:
    with pytest.raises(CheckpointError, match=r"(?s)value_head.safetensors does not fit.*layers.2.weight"):
        policy(checkpoint=str(saved), context={"values": "action"})
    with pytest.raises(CheckpointError, match="remove"):
        policy(checkpoint=str(saved), context={"values": "chunk"}, value_head=MLPHeadConfig(hidden=(8,)))


@pytest.mark.parametrize(
    ("changes", "context", "message"),
    [
        (
            {"action_low": (-1.0,) * 2, "action_high": (1.0,) * 2},
            {},
            "for 3-dimensional actions, the simulator takes 2",
        ),
        ({}, {"chunk": 8}, f"trained for chunks of {CHUNK} actions.*asks for 8"),
        ({"state_dim": 9}, {}, "trained on a 4-dimensional state, the simulator's has 9"),
        ({"state_dim": 0}, {}, "this simulator has none; set use_proprio: false"),
        ({"cameras": {"camera0": (64, 64)}}, {}, r"trained with 2 cameras \(camera0, camera1\)"),
        ({"cameras": {}}, {}, "needs at least one camera"),
    ],
)
def test_simulator_that_does_not_fit(saved: Path, changes: Any, context: Any, message: str) -> None:
    with pytest.raises(MismatchError, match=message):
        policy(env=attrs.evolve(ENV, **changes), checkpoint=str(saved), context=context)


def test_unknown_camera() -> None:
    with pytest.raises(MismatchError, match="no camera 'nose' in this simulator; it has: camera0, camera1"):
        policy(cameras=("nose",))


def test_training_order_of_cameras_is_kept(saved: Path) -> None:
    swapped = attrs.evolve(ENV, cameras=dict(reversed(ENV.cameras.items())))
    assert policy(env=swapped, checkpoint=str(saved))._cameras == ("camera0", "camera1")


@pytest.mark.parametrize("fields", [{}, {"checkpoint": "x", "preset": "tiny"}])
def test_exactly_one_source(fields: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="exactly one of"):
        OpenVLAOFTConfig(**fields)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_dropout_and_recomputation_exclude_each_other(recompute: str) -> None:
    with pytest.raises(ValueError, match=f"recompute: {recompute} .* lora.dropout"):
        OpenVLAOFTConfig(preset="fast", lora=LoRAConfig(dropout=0.1), recompute=recompute)


def test_unknown_preset() -> None:
    with pytest.raises(ValueError, match="preset"):
        OpenVLAOFTConfig(preset="huge")
