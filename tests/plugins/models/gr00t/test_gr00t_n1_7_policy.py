"""GR00T N1.7 as a policy: the contract, its inputs, the processor's files, what is refused. What it shares with N1.5 is
tested there."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from flow_cases import check_inputs, check_narrow, contracts
from gr00t_cases import policy
from model_cases import noise, reloading
from pi0_cases import CHUNK, ENV, expert, flow_error, observation
from safetensors.torch import load_file, save_file

from vla_rl.core.contexts import CheckContext
from vla_rl.core.errors import CheckpointError
from vla_rl.plugins.models.gr00t import plugin
from vla_rl.plugins.models.gr00t.builder import resize_by_area
from vla_rl.plugins.models.gr00t.config import GrootConfig
from vla_rl.plugins.models.gr00t.folder import action_dim, check_checkpoint
from vla_rl.plugins.models.gr00t.network import TIED
from vla_rl.plugins.models.gr00t.processor import PROCESSOR, ROWS, SETTINGS, STATISTICS
from vla_rl.testing import check_model, synthetic
from vla_rl.toolkit.models.checkpoints.fitting import MismatchError

PRESET = "tiny_n1_7"


def ranges(low: list[float], high: list[float]) -> dict[str, list[float]]:
    """Six statistics; the percentiles are the inner ones."""
    wide = {"min": [x - 1 for x in low], "max": [x + 1 for x in high]}
    return {**wide, "mean": low, "std": high, "q01": low, "q99": high}


def write_processor(folder: Path, **settings: Any) -> None:
    """Write NVIDIA's processor of a robot with two keys for each part. One number of its state never changes."""
    robot = {
        "video": {"delta_indices": [0], "modality_keys": list(ENV.cameras)},
        "state": {"delta_indices": [0], "modality_keys": ["x", "gripper"]},
        "action": {"delta_indices": list(range(CHUNK)), "modality_keys": ["move", "gripper"], "action_configs": None},
        "language": {"delta_indices": [0], "modality_keys": ["annotation.human.action.task_description"]},
    }
    robot |= settings.pop("robot", {})
    kwargs = {
        "modality_configs": {"libero_sim": robot, "gr1": robot},
        "image_crop_size": [230, 230],
        "image_target_size": [64, 64],
        "shortest_image_edge": 64,
        "crop_fraction": 0.9,
        "use_albumentations": True,
        "use_percentiles": True,
        "clip_outliers": True,
        "formalize_language": True,
    }
    numbers = {
        "state": {"x": ranges([-2.0, 0.0], [2.0, 1.0]), "gripper": ranges([0.5, 0.0], [0.5, 4.0])},
        "action": {"move": ranges([-0.5, -0.25], [0.5, 0.25]), "gripper": ranges([0.0], [1.0])},
        "relative_action": {},
    }
    content = {
        PROCESSOR: {"processor_class": "Gr00tN1d7Processor", SETTINGS: kwargs | settings},
        STATISTICS: {"libero_sim": numbers},
        ROWS: {"libero_sim": 2, "gr1": 20},
    }
    for name, value in content.items():
        (folder / name).write_text(json.dumps(value))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("n1_7") / "tiny"
    policy(preset=PRESET).save(folder)
    return folder


@pytest.fixture
def official(saved: Path, tmp_path: Path) -> Callable[..., str]:
    """A folder with the processor's files, changed by these settings; `config`: keys of config.json."""

    def make(config: dict[str, Any] | None = None, **settings: Any) -> str:
        folder = Path(copytree(saved, tmp_path / f"{len(list(tmp_path.iterdir()))}"))
        raw = json.loads((folder / "config.json").read_text()) | (config or {})
        (folder / "config.json").write_text(json.dumps(raw))
        write_processor(folder, **settings)
        return str(folder)

    return make


@contracts
def test_contract(values: Any, config: dict[str, Any]) -> None:
    given = GrootConfig(preset=PRESET, **config)
    check_model(plugin, given, env=ENV, chunk=CHUNK, values=values, temperature=1.3, atol=2e-5, reload=reloading(given))


def test_nothing_is_made_on_another_device() -> None:
    """All tensors stay on the model's device, as with N1.5: transformers' own vision tower would look at numbers on the
    host."""
    model, obs = policy(preset=PRESET, context={"values": "chunk", "device": "meta"}), observation(3)
    chunk = model.sample_chunk(obs, noise(3), False)
    scores = model.chunk_log_probs(obs, chunk)
    (scores.log_probs.sum() + scores.values.sum()).backward()
    assert all(p.grad is not None and p.grad.is_meta for p in model.module.parameters() if p.requires_grad)


def test_bfloat16() -> None:
    values = {"values": "chunk"}
    check_narrow(policy(preset=PRESET, dtype="bfloat16", context=values), policy(preset=PRESET), observation(4))


def test_all_inputs_matter() -> None:
    check_inputs(policy(preset=PRESET), observation(2))


def test_the_towers_can_be_trained() -> None:
    model, obs = policy(preset=PRESET, train_expert_only=False), observation(2)
    model.chunk_log_probs(obs, model.sample_chunk(obs, noise(2), False)).log_probs.sum().backward()
    without = [name for name, p in model.module.named_parameters() if p.requires_grad and p.grad is None]
    assert not without
    towers: Any = model.module.groot.backbone
    assert towers._visual.deepstack_merger_list[0].linear_fc2.weight.grad.abs().max() > 0
    assert towers._visual.pos_embed.weight.grad.abs().max() > 0


@torch.no_grad()
def test_a_row_gets_what_it_gets_alone() -> None:
    model, obs = policy(preset=PRESET, context={"values": "chunk"}), observation(4)
    module, state = model.module, model._build_inputs(obs)["state"]
    (ids, mask), pixels = model.prompts.token_rows(obs.instructions), model._build_inputs(obs)["pixels"]
    together, _ = model._encode_observation(obs)
    x, time = torch.randn(4, *module.shape, generator=torch.Generator().manual_seed(0)), torch.full((4,), 0.75)
    found = module.run_expert(together, state, x, time)
    for i, length in enumerate(mask.sum(1).tolist()):
        row = slice(i, i + 1)
        alone = module.build_prefix(module.run_backbone(pixels[row], ids[row, :length], mask[row, :length]), state[row])
        torch.testing.assert_close(together.summary[row], alone.summary, rtol=0, atol=1e-5)
        torch.testing.assert_close(
            found[row], module.run_expert(alone, state[row], x[row], time[row]), rtol=0, atol=1e-5
        )


def test_cloning_learns() -> None:
    model, obs, actions = policy(preset=PRESET), observation(8), expert(8)
    optimizer = torch.optim.AdamW([p for p in model.module.parameters() if p.requires_grad], lr=1e-3)
    before = flow_error(model, obs, actions)
    for _ in range(60):
        optimizer.zero_grad()
        model.imitation_loss(obs, actions).backward()
        optimizer.step()
    assert flow_error(model, obs, actions) < 0.8 * before


def test_the_prompt() -> None:
    """One turn of Qwen's chat without a system line and without the assistant's opening; small letters, no marks."""
    model = policy(preset=PRESET)
    text = model.prompts.tokenizer.decode(
        model.prompts.encode_instruction("Push the red block!"), skip_special_tokens=False
    )
    image = "<|vision_start|>" + "<|image_pad|>" * 16 + "<|vision_end|>"
    assert text == f"<|im_start|>user\n{image}{image}push the red block<|im_end|>\n"
    first, second = model.prompts.starts
    assert second - first == 16 + 2
    told = policy(preset=PRESET, system="Act.")
    text = told.prompts.tokenizer.decode(told.prompts.encode_instruction("push"), skip_special_tokens=False)
    assert text.startswith("<|im_start|>system\nAct.<|im_end|>\n<|im_start|>user\n<|vision_start|>")


@pytest.mark.parametrize(("side", "size"), [(60, 64), (96, 64), (128, 64), (64, 64), (61, 57)])
def test_images_are_scaled_as_opencv_does(side: int, size: int) -> None:
    cv2 = pytest.importorskip("cv2", reason="needs opencv-python, which simulators bring")
    frame = np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8)
    wanted = torch.from_numpy(cv2.resize(frame, (size, size), interpolation=cv2.INTER_AREA)).permute(2, 0, 1).float()
    found = resize_by_area(torch.from_numpy(frame).permute(2, 0, 1).float()[None], size)[0]
    assert (found - wanted).abs().max() <= 1  # OpenCV enlarges with whole numbers


def test_the_middle_is_seen() -> None:
    model = policy(preset=PRESET)
    frame = torch.zeros(1, 3, 64, 64)
    frame[..., :2, :] = frame[..., -2:] = 255.0  # 0.95 of 64 are 60 pixels, two are cut off on each side
    assert (model.images.resize(frame, 64) == 0).all()
    frame[..., 32:, :] = 100.0
    assert model.images.resize(frame, 64)[..., 40:, :].unique().tolist() == [100.0]


def test_statistics_of_the_folder(official: Callable[..., str]) -> None:
    """Percentiles, clipped in both directions."""
    model = policy(checkpoint=official())
    assert model.module.row == 2
    state = model._build_inputs(attrs.evolve(observation(1), state=np.array([[1.0, 5.0, 9.0, 1.0]], np.float32)))[
        "state"
    ]
    assert state[0].tolist() == [0.5, 1.0, 0.0, -0.5]
    assert model._actions.restore_units(torch.tensor([[-3.0, 0.5, 1.0]]))[0].tolist() == [-0.5, 0.125, 1.0]
    assert model._actions.normalise_feature(torch.tensor([[0.7, 0.0, 0.5]]), 3)[0].tolist() == [1.0, 0.0, 0.0]
    wide = policy(checkpoint=official(use_percentiles=False, clip_outliers=False))
    state = wide._build_inputs(attrs.evolve(observation(1), state=np.array([[6.0, 0.5, 9.0, 1.5]], np.float32)))[
        "state"
    ]
    assert state[0, 0].item() == 2.0 and wide.checkpoint.statistics.action.values[1] == (1.5, 1.25, 2.0)
    assert policy(checkpoint=official(formalize_language=False)).prompts.encode_instruction(
        "A"
    ) != model.prompts.encode_instruction("A")
    flipped = policy(checkpoint=official(), gripper="libero")
    assert flipped._actions.restore_units(torch.tensor([[0.0, 0.0, 3.0]]))[0, 2] == -1.0


def test_nvidias_layout(official: Callable[..., str], tmp_path: Path) -> None:
    """What was opened is kept; one of the tied pair is enough; a chunk that is saved acts the same."""
    folder = Path(official())
    given = GrootConfig(checkpoint=str(folder))
    assert action_dim(given) == 3
    check_checkpoint(given, CheckContext(chunk=CHUNK))
    model = policy(checkpoint=str(folder))
    model.save(tmp_path / "again")
    for name in ("config.json", PROCESSOR, STATISTICS, ROWS, "tokenizer.json"):
        assert json.loads((tmp_path / "again" / name).read_text()) == json.loads((folder / name).read_text())
    state = load_file(tmp_path / "again" / "model.safetensors")
    (head, embeddings), *_ = (pair for pair in TIED.items() if pair[1] in state)
    assert head not in state
    state[head] = state.pop(embeddings)
    save_file(state, tmp_path / "again" / "model.safetensors")
    again = policy(checkpoint=str(tmp_path / "again"))
    one, two = (m.sample_chunk(observation(2), noise(2), False).actions for m in (model, again))
    assert torch.equal(one, two)


def test_scales_by_the_demonstrations_are_kept(tmp_path: Path) -> None:
    part = {"q01": [-1.0, 0.0, 0.5], "q99": [1.0, 0.5, 0.5]}
    scaling = {"action": part, "state": {name: [*values, 0.0] for name, values in part.items()}}
    model = policy(preset=PRESET, context={"scaling": scaling})
    model.save(tmp_path)
    again = policy(checkpoint=str(tmp_path))
    actions = torch.tensor([[0.5, 0.25, 0.7]])
    for one in (model, again):
        assert one._actions.normalise_feature(actions, 3)[0].tolist() == [0.5, 0.0, 0.0]
    assert torch.equal(model._build_inputs(observation(2))["state"], again._build_inputs(observation(2))["state"])


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"use_mean_std": True}, "use_mean_std True is not supported"),
        ({"letter_box_transform": True}, "letter_box_transform True is not supported"),
        ({"use_albumentations": False}, "use_albumentations False is not supported, True is"),
        (
            {
                "apply_sincos_state_encoding": True,
                "robot": {"state": {"modality_keys": ["x"], "sin_cos_embedding_keys": ["x"]}},
            },
            "angles as sines and cosines",
        ),
        ({"robot": {"state": {"modality_keys": ["x"], "mean_std_embedding_keys": ["x"]}}}, "mean and deviation"),
        ({"robot": {"video": {"delta_indices": [-1, 0], "modality_keys": ["a"]}}}, "more than the last frame"),
        ({"robot": {"state": {"delta_indices": [-1, 0], "modality_keys": ["x"]}}}, "more than the last state"),
        ({"robot": {"action": {"delta_indices": [0, 1], "modality_keys": ["move", "gripper"]}}}, "chunks of 2 actions"),
        ({"shortest_image_edge": 256}, "scales images to 256 pixels, 64 are supported"),
        ({"shortest_image_edge": None, "image_target_size": None}, "does not say how images are scaled"),
        ({"config": {"use_alternate_vl_dit": False}}, "use_alternate_vl_dit False is not supported, True is"),
        ({"config": {"state_history_length": 2}}, "state_history_length 2 is not supported"),
        ({"config": {"model_type": "Gr00tN1d6"}}, "type 'Gr00tN1d6': N1.6, which has another vision-language model"),
    ],
)
def test_a_folder_that_does_not_fit(official: Callable[..., str], settings: dict[str, Any], match: str) -> None:
    folder = official(**settings)
    with pytest.raises((CheckpointError, MismatchError), match=re.compile(match, re.DOTALL)):
        policy(checkpoint=folder)


def test_what_does_not_fit(official: Callable[..., str]) -> None:
    folder = official()

    def refused(match: str, **config: Any) -> None:
        with pytest.raises((CheckpointError, MismatchError), match=re.compile(match, re.DOTALL)):
            policy(**{"checkpoint": folder, **config})

    refused("no embodiment 'libero_sin' in .*did you mean", embodiment="libero_sin")
    refused("no embodiment 'gr1' in", embodiment="gr1")  # it has no statistics
    refused("no action key 'mve'; it has: move, gripper; did you mean", action_keys=("mve",))
    cameras = dict.fromkeys(ENV.cameras, (64, 48))
    refused("gives 48 x 64 pixels; .* only square", env=attrs.evolve(ENV, cameras=cameras))
    refused("3-dimensional actions, the simulator takes 4", env=synthetic.env_info(action_dim=4))
    (Path(folder) / ROWS).write_text(json.dumps({"gr1": 20}))
    refused("has no row for embodiment 'libero_sim'; it has: gr1")
    (Path(folder) / STATISTICS).unlink()
    refused("has no statistics.json")
