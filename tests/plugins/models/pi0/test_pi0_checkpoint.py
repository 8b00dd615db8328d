"""Folders in lerobot's and openpi's layouts: what is read, what is written, what is refused."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from model_cases import noise
from pi0_cases import CHUNK, ENV, OPENPI_STATS, observation, openpi_folder, policy
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models

from reference_files import reference
from vla_rl.core.errors import CheckpointError
from vla_rl.core.spec.structure import Problems, Structurer
from vla_rl.plugins.models.pi0.builder import PiPrompts, prompt_text
from vla_rl.plugins.models.pi0.config import Pi0Config
from vla_rl.plugins.models.pi0.statistics import HEAD, TIED, action_dim, open_names
from vla_rl.testing import synthetic
from vla_rl.toolkit.models.checkpoints.fitting import MismatchError
from vla_rl.toolkit.models.checkpoints.lerobot import FeatureScale
from vla_rl.toolkit.models.flow.config import FlowNoise
from vla_rl.toolkit.models.images import ImageProcessor, resize_with_pad
from vla_rl.toolkit.models.scaling import FeatureScaler

CPU = torch.device("cpu")
NORMALIZER = "policy_preprocessor_step_5_normalizer_processor.safetensors"
STATS_4 = {**OPENPI_STATS, "state": {"mean": [1.0, 2.0, 3.0, 4.0], "std": [1.0, 0.5, 0.25, 2.0]}}


@pytest.fixture
def openpi(tmp_path: Path) -> Path:
    return openpi_folder(tmp_path / "openpi", reference("pi0", "model.safetensors"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny preset, as `save` writes it. Tests that change it copy it."""
    folder = tmp_path_factory.mktemp("tiny")
    policy(context={"values": "chunk"}, noise=FlowNoise()).save(folder)
    return folder


def copy(folder: Path, target: Path) -> Path:
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


def edit(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


# ------------------------------------------------------------------------------------------------- both layouts


def test_openpi_is_read_and_written_as_lerobot(openpi: Path, tmp_path: Path) -> None:
    """Key by key; the saved folder gives the same actions, statistics included."""
    model, obs = policy(checkpoint=str(openpi)), observation(3)
    out = tmp_path / "out"
    model.save(out)
    old, new = load_file(openpi / "model.safetensors"), load_file(out / "model.safetensors")
    assert {f"model.{name}" for name in old if name != TIED} == set(new)
    assert all(torch.equal(new[f"model.{name}"], tensor) for name, tensor in old.items() if name != TIED)

    config = json.loads((out / "config.json").read_text())
    assert config["type"] == "pi0"
    assert (config["chunk_size"], config["max_action_dim"], config["max_state_dim"]) == (10, 8, 8)
    assert list(config["input_features"]) == [
        "observation.images.camera0", "observation.images.camera1", "observation.state",
    ]  # fmt: skip
    stats = load_file(out / NORMALIZER)
    torch.testing.assert_close(stats["action.std"], torch.tensor([0.5, 0.4, 0.2]) + 1e-6)
    torch.testing.assert_close(stats["observation.state.mean"], torch.tensor([1.0, 2.0, 3.0, 4.0]))

    again = policy(checkpoint=str(out))
    one, two = (m.sample_chunk(obs, noise(3), False) for m in (model, again))
    assert torch.equal(one.actions, two.actions)
    assert torch.equal(one.log_probs, two.log_probs)
    assert one.extras["chain"].shape == (3, 5, 10, 8), "the whole horizon and all dimensions are denoised"
    assert one.actions.shape == (3, CHUNK, 3)


def test_openpi_statistics_scale_actions_and_state(openpi: Path) -> None:
    wide = attrs.evolve(ENV, action_low=(-9.0,) * 3, action_high=(9.0,) * 3)
    model, obs = policy(checkpoint=str(openpi), env=wide), observation(2)
    chunk = model.sample_chunk(obs, noise(2), False)
    raw = chunk.extras["chain"][:, -1, :CHUNK, :3]
    wanted = raw * (torch.tensor([0.5, 0.4, 0.2]) + 1e-6) + torch.tensor([0.1, -0.2, 0.3])
    torch.testing.assert_close(chunk.actions, wanted, rtol=0, atol=1e-6)
    state = model._build_inputs(obs)["state"]
    means, deviations = np.array([1, 2, 3, 4]), np.array([1, 0.5, 0.25, 2]) + 1e-6
    np.testing.assert_allclose(state[:, :4], (obs.state - means) / deviations, rtol=1e-5)
    assert not state[:, 4:].any()
    assert state.shape == (2, 8)


def test_log_probs_count_the_actions_that_the_simulator_takes(openpi: Path) -> None:
    model, obs = policy(checkpoint=str(openpi)), observation(2)
    chunk = model.sample_chunk(obs, noise(2), False)
    base = model.chunk_log_probs(obs, chunk).log_probs
    at = torch.arange(2), chunk.extras["step"] + 1
    for change, counts in (((slice(None), CHUNK, 0), False), ((slice(None), 0, 3), False), ((slice(None), 0, 2), True)):
        chain = chunk.extras["chain"].clone()
        landed = chain[at]
        landed[change] += 0.5
        chain[at] = landed
        other = attrs.evolve(chunk, extras={**chunk.extras, "chain": chain})
        assert torch.equal(model.chunk_log_probs(obs, other).log_probs, base) != counts


def test_demonstrations_may_be_shorter_than_the_horizon(openpi: Path) -> None:
    model, obs = policy(checkpoint=str(openpi)), observation(2)
    loss = model.imitation_loss(obs, np.zeros((2, CHUNK, 3), np.float32))
    assert loss.requires_grad
    assert 0 < loss.item() < 100


def test_lerobot_files_are_kept_as_they_are(saved: Path, tmp_path: Path) -> None:
    source = copy(saved, tmp_path / "source")
    edit(source / "config.json", device="cuda", push_to_hub=True)
    steps = json.loads((source / "policy_preprocessor.json").read_text())["steps"]
    steps.insert(0, {"registry_name": "unknown_step", "config": {}})
    edit(source / "policy_preprocessor.json", steps=steps)
    policy(checkpoint=str(source)).save(tmp_path / "out")
    for path in source.iterdir():
        if path.name not in ("value_head.safetensors", "noise_head.safetensors", "tokenizer.json", "model.safetensors"):
            other = (tmp_path / "out" / path.name).read_text("latin1")
            same = json.loads(other) == json.loads(path.read_text()) if path.suffix == ".json" else None
            assert same or other == path.read_text("latin1"), path.name


def test_heads_are_saved_next_to_the_weights(saved: Path, tmp_path: Path) -> None:
    method = FlowNoise()
    model = policy(context={"values": "chunk"}, noise=method)
    with torch.no_grad():
        for head in (model.module.value_head, model.module.noise_head):
            head.layers[-1].bias.fill_(0.7)
    model.save(tmp_path / "out")
    again = policy(checkpoint=str(tmp_path / "out"), context={"values": "chunk"}, noise=method)
    for (name, one), (_, two) in zip(model.weights(), again.weights(), strict=True):
        assert torch.equal(one, two), name
    with pytest.raises(
        CheckpointError, match=r"(?s)value_head.*remove the file.*layers\.0\.weight: \(512, 64\) instead of"
    ):
        from vla_rl.toolkit.models.flow.config import ValueHeadConfig

        policy(checkpoint=str(saved), context={"values": "chunk"}, value_head=ValueHeadConfig(hidden=(8,)))


def test_names_of_either_layout_are_opened() -> None:
    lerobot = [f"model.{TIED}", "model.time_mlp_in.bias"]
    assert open_names(lerobot) == {lerobot[0]: HEAD, lerobot[1]: "action_time_mlp_in.bias"}
    assert open_names([TIED, HEAD, "state_proj.bias"]) == {HEAD: HEAD, "state_proj.bias": "state_proj.bias"}


@pytest.mark.parametrize(
    ("mode", "values", "physical", "scaled"),
    [
        ("MEAN_STD", ((2.0,), (4.0,)), 10.0, 2.0),
        ("MIN_MAX", ((2.0,), (4.0,)), 3.5, 0.5),
        ("QUANTILES", ((-1.0,), (3.0,)), 0.0, -0.5),
        ("QUANTILE10", ((0.0,), (1.0,)), 1.0, 1.0),
        ("IDENTITY", (), 7.0, 7.0),
    ],
)
def test_lerobots_normalisations(mode: str, values: Any, physical: float, scaled: float) -> None:
    scaler = FeatureScaler(FeatureScale(mode=mode, values=values, dim=1), CPU)
    got = scaler.normalise_feature(torch.tensor([physical]), 3)
    torch.testing.assert_close(got, torch.tensor([scaled, 0, 0]))
    torch.testing.assert_close(scaler.restore_units(got), torch.tensor([physical]))


def test_a_dimension_that_never_moves_stays_finite() -> None:
    flat = FeatureScaler(FeatureScale(mode="MIN_MAX", values=((2.0,), (2.0,)), dim=1), CPU)
    assert flat.normalise_feature(torch.tensor([2.0]), 1).item() == -1
    z = FeatureScaler(FeatureScale(mode="MEAN_STD", values=((2.0,), (0.0,)), dim=1), CPU)
    assert z.normalise_feature(torch.tensor([2.0]), 1).item() == 0


def test_action_dimensions_are_known_without_building(openpi: Path, saved: Path) -> None:
    assert action_dim(Pi0Config(checkpoint=str(openpi))) == 3
    assert action_dim(Pi0Config(checkpoint=str(saved))) == 3
    assert action_dim(Pi0Config(preset="tiny")) is None
    assert action_dim(Pi0Config(checkpoint="nowhere")) is None


# ---------------------------------------------------------------------------------------------- images, prompts


def test_images_are_resized_as_pillow_does() -> None:
    frames = synthetic.observation(synthetic.env_info(cameras=1, pixels=100), 1).images["camera0"][:, :60]
    got = resize_with_pad(torch.from_numpy(frames).permute(0, 3, 1, 2).float(), 64)[0].permute(1, 2, 0).numpy()
    wanted = np.asarray(Image.fromarray(frames[0]).resize((64, 38), Image.Resampling.BILINEAR), np.float32)
    assert not got[:13].any()
    assert not got[51:].any()
    assert np.array_equal(got[13:51], wanted)
    pixels = ImageProcessor(64, CPU, torch.float32)([np.full((1, 64, 64, 3), 255, np.uint8)])
    assert pixels.shape == (1, 1, 3, 64, 64)
    assert (pixels == 1).all()
    assert ImageProcessor(64, CPU, torch.float32)([frames])[0, 0, :, 0, 0].tolist() == [-1, -1, -1]


def test_prompts() -> None:
    assert prompt_text(" pick_up the\nRed block ") == "pick up the Red block\n"
    model = policy()
    tokenizer = model.prompts.tokenizer
    ids = model.prompts.encode_instruction("push the red block")
    assert ids[0] == tokenizer.token_to_id("<bos>") == 2
    assert tokenizer.decode(ids) == "push the red block\n"
    assert tokenizer.decode(model.prompts.encode_instruction("Öl über 3")) == "Öl über 3\n", "bytes for a missing piece"
    ids, mask = model.prompts.token_rows(["push the red block", "pick up the blue bowl on the left"])
    assert mask.sum(1).tolist() == [
        len(model.prompts.encode_instruction(text))
        for text in ("push the red block", "pick up the blue bowl on the left")
    ]
    assert not ids[~mask].any()
    assert len(model.prompts.encode_instruction("block " * 100)) == 48


# ------------------------------------------------------------------------------------------------- what is refused


def refused(match: str, **config: Any) -> None:
    with pytest.raises((CheckpointError, MismatchError), match=re.compile(match, re.DOTALL)):
        policy(**config)


def test_a_folder_that_is_not_a_checkpoint(tmp_path: Path, saved: Path) -> None:
    refused("'nowhere' is not a folder", checkpoint="nowhere")
    refused("not a complete checkpoint: it has no config.json", checkpoint=str(tmp_path))
    other = copy(saved, tmp_path / "other")
    edit(other / "config.json", type="act")
    refused("type 'act'.*lerobot.*openpi", checkpoint=str(other))
    (other / "config.json").write_text("[")
    refused("cannot read .*config.json", checkpoint=str(other))
    no_weights = copy(saved, tmp_path / "no_weights")
    (no_weights / "model.safetensors").unlink()
    refused("it has no model.safetensors", checkpoint=str(no_weights))
    (no_weights / "model.safetensors").write_bytes(b"not weights")
    refused("cannot read .*model.safetensors", checkpoint=str(no_weights))
    (other / "config.json").write_text('{"type": "pi0", "paligemma_variant": "gemma_9b"}')
    (other / "architecture.json").unlink()
    refused("'gemma_9b'.*gemma_300m, gemma_2b", checkpoint=str(other))


def test_statistics_that_are_missing(tmp_path: Path, saved: Path) -> None:
    weights = reference("pi0", "model.safetensors")
    bare = openpi_folder(tmp_path / "bare", weights, stats=None)
    refused("no statistics to scale.*policy_preprocessor.json.*norm_stats.json", checkpoint=str(bare))
    partial = openpi_folder(tmp_path / "partial", weights, stats={"actions": OPENPI_STATS["actions"]})
    refused("no mean and std of 'state'; it has: actions", checkpoint=str(partial))

    old = load_file(bare / "model.safetensors") | {"unnormalize_outputs.buffer_action.mean": torch.zeros(3)}
    save_file(old, bare / "model.safetensors")
    refused(
        rf"(?s)keeps its statistics among the weights .*\n  python -m .*migrate_policy_normalization .*{bare} ",
        checkpoint=str(bare),
    )

    lerobot = copy(saved, tmp_path / "lerobot")
    tensors = load_file(lerobot / NORMALIZER)
    save_file({"action.min": tensors["action.min"]}, lerobot / NORMALIZER)
    refused("normalises 'action' by MIN_MAX and lacks action.max; .*there are: action.min", checkpoint=str(lerobot))
    (lerobot / NORMALIZER).unlink()
    refused(f"no statistics.*{NORMALIZER} is missing", checkpoint=str(lerobot))
    edit(lerobot / "policy_preprocessor.json", steps=[])
    refused("no step 'normalizer_processor'", checkpoint=str(lerobot))


def test_only_lists_as_wide_as_the_network_are_padded(openpi: Path) -> None:
    """A number that never moved has the mean 0 and the deviation 0, as padding has."""
    file = next(openpi.rglob("norm_stats.json"))
    still = {"mean": [0.1, -0.2, 0.0], "std": [0.5, 0.4, 0.0]}
    padded = {name: [*values, *[0.0] * 5] for name, values in OPENPI_STATS["actions"].items()}
    for actions in (still, padded):
        file.write_text(json.dumps({"norm_stats": {**STATS_4, "actions": actions}}))
        assert action_dim(Pi0Config(checkpoint=str(openpi))) == 3
        assert policy(checkpoint=str(openpi)).sample_chunk(observation(2), noise(2), True).actions.isfinite().all()
    file.write_text(json.dumps({"norm_stats": {**STATS_4, "actions": {"mean": [0.0] * 3, "std": [1.0] * 2}}}))
    refused("actions has 3 numbers of 'mean' and 2 of 'std'", checkpoint=str(openpi))


def test_several_statistics_need_a_name(openpi: Path) -> None:
    droid = openpi / "assets" / "droid"
    droid.mkdir()
    (droid / "norm_stats.json").write_text(json.dumps({"norm_stats": STATS_4}))
    refused("several.*asset_id to one of: droid, physical-intelligence/libero", checkpoint=str(openpi))
    refused("no statistics 'drod'.*did you mean 'droid'", checkpoint=str(openpi), asset_id="drod")
    assert policy(checkpoint=str(openpi), asset_id="droid")


def test_keys_that_do_not_fit_are_listed(openpi: Path) -> None:
    path = openpi / "model.safetensors"
    state = load_file(path)
    del state["state_proj.bias"]
    state["time_embedder.weight"] = torch.zeros(3)
    state["action_in_proj.weight"] = torch.zeros(32, 7)
    save_file(state, path)
    refused(
        r"does not fit.*missing \(1\): \S*state_proj.bias\n.*unexpected \(1\): time_embedder.weight\n"
        r".*another shape \(1\): \S*action_in_proj.weight: \(32, 7\) instead of \(32, 8\)",
        checkpoint=str(openpi),
    )


def test_a_simulator_that_does_not_fit(openpi: Path, saved: Path) -> None:
    def env(**changes: Any) -> Any:
        return synthetic.env_info(**changes)

    refused("3-dimensional actions, the simulator takes 4", checkpoint=str(openpi), env=env(action_dim=4))
    refused("4-dimensional state, the simulator's has 6", checkpoint=str(openpi), env=env(state_dim=6))
    refused("4-dimensional state, and this simulator has none", checkpoint=str(openpi), env=env(state_dim=0))
    assert policy(checkpoint=str(openpi), env=env(state_dim=0), use_state=False)
    refused("needs a state", checkpoint=str(openpi), env=env(state_dim=0), use_state=True)
    refused("chunks of 10 actions, the spec asks for 11", checkpoint=str(openpi), context={"chunk": 11})
    refused("takes 3 cameras, the policy would see 4", checkpoint=str(openpi), env=env(cameras=4))
    refused("trained with 2 cameras .camera0, camera1., .*has 1", checkpoint=str(saved), env=env(cameras=1))
    assert policy(checkpoint=str(saved), env=env(cameras=3))._cameras == ("camera0", "camera1")
    refused("no camera 'camera9'.*has: camera0, camera1; did you mean 'camera[01]'", cameras=("camera9",))
    refused("at least one camera", env=env(cameras=0))


def test_a_tokenizer_that_does_not_fit(openpi: Path, tmp_path: Path) -> None:
    file = (openpi / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    refused("no tokenizer at .*openpi.tokenizer.json.*model.tokenizer", checkpoint=str(openpi))
    assert policy(checkpoint=str(openpi), tokenizer=str(file))
    assert policy(checkpoint=str(openpi), tokenizer=str(tmp_path))
    Tokenizer(models.BPE()).save(str(tmp_path / "empty.json"))
    refused("no '<bos>'", checkpoint=str(openpi), tokenizer=str(tmp_path / "empty.json"))
    with pytest.raises(CheckpointError, match="another model's tokenizer"):
        PiPrompts(Tokenizer.from_file(str(file)), vocab=100, max_length=48, device=CPU, instructions=["push"])


def test_half_precision_on_the_cpu() -> None:
    refused("float16 is for GPUs.*float32 or bfloat16", dtype="float16")


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({}, "exactly one of `checkpoint`"),
        ({"checkpoint": "a", "preset": "tiny"}, "exactly one of `checkpoint`"),
        ({"preset": "tiny", "tokenizer": "x"}, "`tokenizer` says how to read a checkpoint"),
        ({"preset": "tiny", "asset_id": "x"}, "`asset_id` says how to read a checkpoint"),
        ({"preset": "tiny", "denoise_steps": 0}, "denoise_steps"),
        ({"preset": "tiny", "dtype": "int8"}, "dtype"),
    ],
)
def test_settings_that_contradict(config: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Pi0Config(**config)


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"noise": {"type": "flow_noise", "level": 0.5}}, "noise.level: unknown key"),
        ({"noise": {"type": "flow_noise", "steps": "one"}}, "noise.steps: unknown key"),
        ({"noise": {"type": "flow_sde", "std_range": [0.1, 0.2]}}, "noise.std_range: unknown key"),
        ({"noise": {"type": "flow_noise", "std_range": [0.2, 0.1]}}, "0 < low < high"),
        ({"noise": {"type": "flow_sde", "level": 0.0}}, "noise.level: 'level' must be > 0"),
        ({"noise": {"type": "flow_ode"}}, "noise.type: expected one of 'flow_sde', 'flow_cps', 'flow_noise', got"),
        ({"noise": {"type": "flow_cps", "level": 1.5}}, "noise.level: 'level' must be <= 1.0: 1.5"),
        ({"noise": {"method": "flow_cps"}}, "noise.type: required, but missing"),
    ],
)
def test_noise_that_contradicts(config: dict[str, Any], match: str) -> None:
    with pytest.raises(Problems, match=match):
        Structurer().read_class({"preset": "tiny", **config}, Pi0Config)


# ------------------------------------------------------------------------------- folders as trainers leave them


def test_openpis_trainers(openpi: Path, tmp_path: Path) -> None:
    """The step that the error names is enough."""
    (openpi / "config.json").unlink()
    (openpi / "metadata.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"(?s)openpi's PyTorch trainer.*model.type: pi0;") as error:
        policy(checkpoint=str(openpi))
    command = next(line for line in str(error.value).splitlines() if line.startswith("  echo"))
    assert '"action_dim": 8,' in command
    subprocess.run(command, shell=True, check=True)
    assert policy(checkpoint=str(openpi)).checkpoint.shape.horizon == 50
    (tmp_path / "jax" / "params").mkdir(parents=True)
    refused("convert_jax_model_to_pytorch.py --checkpoint_dir .*jax --config_name", checkpoint=str(tmp_path / "jax"))


def test_an_adapter_of_lerobots_is_merged_first(tmp_path: Path, saved: Path) -> None:
    folder = copy(saved, tmp_path / "adapter")
    (folder / "model.safetensors").unlink()
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "lerobot/pi0_base"}')
    refused(
        r"peft adapter of 'lerobot/pi0_base' and not the weights.*from_pretrained\('lerobot/pi0_base', config=c\).*"
        r"merge_and_unload\(\).save_pretrained\('.*adapter-merged'\).*set model.checkpoint: .*adapter-merged",
        checkpoint=str(folder),
    )


def test_the_folder_below_is_named(tmp_path: Path, saved: Path) -> None:
    (tmp_path / "000100").mkdir()
    copy(saved, tmp_path / "000100" / "pretrained_model")
    refused("it has no config.json; there is one in .*000100/pretrained_model", checkpoint=str(tmp_path / "000100"))
