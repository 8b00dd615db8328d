"""The last steps of an episode, which no whole chunk follows: told, left out, repeated, or masked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve

from vla_rl.core.catalogue import load
from vla_rl.core.contexts import DataContext, EnvContext, ModelContext
from vla_rl.core.errors import UserError
from vla_rl.core.spec.spec import parse_spec
from vla_rl.core.types import to_numpy
from vla_rl.runtime.start import clone
from vla_rl.testing import synthetic
from vla_rl.toolkit.data.mixture import MixedDemonstrations
from vla_rl.toolkit.data.recording import Recording, encode_png
from vla_rl.toolkit.data.samples import StepWindows
from vla_rl.toolkit.trainers.demonstrated_actions import check_demonstrated_actions
from vla_rl.toolkit.trainers.trained_model import TrainedModel

pytest.importorskip("datasets", reason="needs the extra: pip install -e '.[data]'")

from vla_rl.toolkit.data.lerobot import LeRobotWriter

CHUNK, LENGTHS = 4, (6, 3, 5)
MODELS: list[dict[str, Any]] = [
    {"type": "film_resnet", "shift": 0},
    {"type": "openvla_oft", "preset": "fast"},
    {"type": "pi0", "preset": "tiny"},
]


@pytest.fixture(scope="module")
def info() -> Any:
    tabletop = load("env", "tabletop")
    return tabletop.build(tabletop.config(), EnvContext(num_envs=1, chunk=1)).info


@pytest.fixture(scope="module")
def folder(info: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("short") / "set"
    random = np.random.default_rng(0)
    with LeRobotWriter(path, fps=10, robot="tabletop") as writer:
        for length in LENGTHS:
            images = {
                name: [encode_png(random.integers(0, 256, (*size, 3), dtype=np.uint8)) for _ in range(length)]
                for name, size in info.cameras.items()
            }
            writer.add(
                Recording(
                    images=images,
                    sizes=info.cameras,
                    state=random.normal(size=(length, info.state_dim)).astype(np.float32),
                    actions=random.uniform(-0.9, 0.9, (length, info.action_dim)).astype(np.float32),
                    instruction=info.tasks[0].instruction,
                )
            )
    return path


def opened(folder: Path, info: Any, **keys: Any) -> Any:
    plugin = load("data", "lerobot")
    return plugin.build(plugin.config(folder=folder, **keys), DataContext(env=info, chunk=CHUNK))


@pytest.mark.parametrize(
    ("lengths", "chunk", "told"),
    [
        ([55] * 4, 50, "arm: 24 of 220 steps are samples, which 50 actions follow; the data's key `ends` "),
        ([55, *[30] * 4], 50, "6 of 175 steps are samples, which 50 actions follow; 4 of 5 episodes are shorter and "),
        ([100] * 10, 22, "790 of 1000 steps are samples, which 22 actions follow; the data's key `ends` "),
        ([60, 200], 25, "212 of 260 steps are samples, which 25 actions follow"),
        ([200, 3], 8, "193 of 203 steps are samples, which 8 actions follow; 1 of 2 episodes are shorter and left out"),
        ([200, 120], 8, ""),
    ],
)
def test_steps_and_episodes_without_a_sample_are_told(
    lengths: list[int], chunk: int, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    StepWindows(lengths, chunk, "arm")
    assert told in caplog.text and bool(caplog.records) == bool(told)
    lost = 1 - sum(max(length - chunk + 1, 0) for length in lengths) / sum(lengths)
    assert ("`ends`" in caplog.text) == (lost > 0.2 or min(lengths) < chunk)


def test_data_without_an_episode_of_a_chunk_are_refused_with_the_key() -> None:
    refusal = "arm: none of 4 episodes holds a chunk of 50 actions; the longest has 30; set rollout.chunk to 30 or less; the data's key `ends` "
    with pytest.raises(UserError, match=refusal):
        StepWindows([30] * 4, 50, "arm")
    with pytest.raises(UserError, match="arm: 0 episodes have no steps$"):
        StepWindows([], 1, "arm")


def test_a_mask_says_which_actions_were_recorded(folder: Path, info: Any, caplog: pytest.LogCaptureFixture) -> None:
    every = [min(length - step, CHUNK) for length in LENGTHS for step in range(length)]
    dropped = opened(folder, info)
    assert f"{folder}: 5 of 14 steps are samples" in caplog.text and "1 of 3 episodes" in caplog.text
    masked, repeated = opened(folder, info, ends="mask"), opened(folder, info, ends="repeat")
    assert masked.num_samples() == repeated.num_samples() == sum(LENGTHS)
    indices = np.arange(sum(LENGTHS))[::-1].copy()
    assert np.array_equal(masked.read_samples(indices)[1], repeated.read_samples(indices)[1])
    assert masked.recorded_actions(indices).tolist() == every[::-1]
    assert repeated.recorded_actions(indices) is None and dropped.recorded_actions(np.arange(5)) is None
    mixed = MixedDemonstrations([repeated, masked], ["one", "two"])
    counts = mixed.recorded_actions(np.array([len(every), 0, len(every) + 5]))
    assert counts[0] == every[0] and counts[1] >= CHUNK and counts[2] == every[5] == 1
    with pytest.raises(UserError, match="`ends: mask` is for trainer behaviour_cloning alone"):
        check_demonstrated_actions(masked, info, CHUNK)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model["type"])
def test_a_masked_action_has_no_loss(model: dict[str, Any], info: Any) -> None:
    """The loss is that of the recorded actions, divided by the whole chunk; a copy has no part in it."""
    plugin = load("model", model["type"])
    config = plugin.config(**{name: value for name, value in model.items() if name != "type"})
    policy = plugin.build(config, ModelContext(env=info, chunk=CHUNK))
    train = parse_spec({**SPEC, "model": model}).train
    trained = TrainedModel(policy, train, name=model["type"], device="cpu", info=info, acting=True)
    obs = synthetic.observation(info, 3)
    obs = evolve(obs, instructions=(info.tasks[0].instruction,) * 3)
    actions = np.random.default_rng(0).uniform(-0.9, 0.9, (3, CHUNK, info.action_dim)).astype(np.float32)
    terms = policy.imitation_terms(obs, actions).detach()
    assert terms.shape == (3, CHUNK)
    assert float(trained.imitation_loss(obs, actions).detach()) == pytest.approx(float(terms.mean()), rel=1e-5)
    counts = np.array([1, CHUNK, 2])
    kept = torch.arange(CHUNK) < torch.from_numpy(counts)[:, None]
    loss = trained.imitation_loss(obs, actions, counts).detach()
    assert float(loss) == pytest.approx(float((terms * kept).sum()) / terms.numel(), rel=1e-5)
    if model["type"] == "pi0":
        return  # it sees the actions, with noise
    changed = actions.copy()
    changed[~to_numpy(kept)] *= -1
    with torch.no_grad():
        assert float(trained.imitation_loss(obs, changed, counts)) == pytest.approx(float(loss), rel=1e-6)
        assert float(trained.imitation_loss(obs, changed)) != pytest.approx(float(terms.mean()), rel=1e-6)


SPEC: dict[str, Any] = {
    "name": "clone",
    "model": {"type": "film_resnet"},
    "env": {"type": "tabletop", "num_envs": 4},
    "rollout": {"chunk": CHUNK, "episodes": 4, "group_size": 4, "max_steps": 8},
    "algorithm": {"type": "grpo"},
    "train": {"steps": 1, "lr": 1e-3, "micro_batch": 8},
    "eval": {"before": False, "episodes_per_task": 1},
    "runtime": {"backend": "local"},
    "hooks": [{"type": "jsonl"}],
}


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model["type"])
def test_short_episodes_are_cloned_with_a_mask(model: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    losses = {}
    for ends in ("repeat", "mask"):
        data = {"type": "lerobot", "folder": str(folder), "ends": ends}
        imitation = {"data": data, "lr": 1e-3, "batch": 14, "steps": 2, "report_every": 1}
        clone(parse_spec({**SPEC, "model": model, "imitation": imitation}), tmp_path / ends, False)
        lines = [json.loads(line) for line in (tmp_path / ends / "metrics.jsonl").read_text().splitlines()]
        losses[ends] = [line["loss/imitation"] for line in lines if "loss/imitation" in line]
    assert np.isfinite(losses["mask"]).all() and losses["mask"] != losses["repeat"]
