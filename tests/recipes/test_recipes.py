"""Every recipe is documented, checked for eight GPUs and for one, and trains a step with a tiny network in its place."""

from __future__ import annotations

import json
import re
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from vla_rl.cli.inputs import cluster_of
from vla_rl.cli.main import app
from vla_rl.core.errors import SpecError
from vla_rl.core.spec.spec import Spec, load_spec, parse_spec
from vla_rl.core.spec.yaml import parse
from vla_rl.runtime.checks.run import check_spec
from vla_rl.runtime.start import run

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))
LABELS = (
    "Source: ",
    "Hardware: ",
    "The authors report: ",
    "Differs here: ",
    "Expected: ",
    "On one GPU:",
    "On eight GPUs:",
)
QUICK = ("rlinf_oft_libero_spatial_grpo", "pirl_pi05_libero_spatial_ppo")
"""Recipes that train a step in CI."""
WITHOUT_NETWORK = ["algorithm.encoder=tiny", "algorithm.image_size=null"]
"""What SRPO's encoder is replaced by where the hub cannot be reached."""
KEPT = ("type", "denoise_steps", "noise", "value_head", "recompute", "state_in_prompt", "center_crop")


def head_of(file: Path) -> str:
    lines = file.read_text().splitlines()
    return "\n".join(line[2:] for line in lines if line.startswith("# "))


def one_gpu(file: Path) -> list[str]:
    """Return the changes that the head gives for one GPU."""
    (line,) = re.findall(r"^On one GPU:\n +vla-rl run (.+)$", head_of(file), flags=re.MULTILINE)
    name, *changes = shlex.split(line)
    assert name == file.stem and changes
    return changes


def test_there_are_enough_of_them() -> None:
    assert len(RECIPES) >= 14
    names = " ".join(file.stem for file in RECIPES)
    for part in (
        "rlinf_openvla",
        "rlinf_oft",
        "robotwin",
        "pirl_pi0_",
        "pirl_pi05_",
        "simplevla",
        "srpo",
        "accerl",
        "rlvla3",
    ):
        assert part in names


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_its_head_says_what_a_reader_has_to_know(file: Path) -> None:
    head = head_of(file)
    positions = [head.find(f"\n{label}") for label in LABELS]
    assert -1 not in positions and positions == sorted(positions), dict(zip(LABELS, positions, strict=True))
    assert "`vla-rl plan" in head and "not calibrated" in head
    assert re.search(r"Expected: [\d,.]+ s a step", head)
    assert load_spec(file).name == file.stem.replace("_", "-")


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_it_is_accepted_for_eight_gpus_and_for_one(file: Path) -> None:
    spec = load_spec(file)
    package = {"libero": "libero", "maniskill": "mani_skill"}.get(spec.env.type)
    if package is not None and find_spec(package) is None:
        pytest.skip(f"needs {package}")
    encoder = WITHOUT_NETWORK if spec.algorithm.type == "srpo" else []
    for devices, changes in ((8, []), (1, one_gpu(file))):
        changed = load_spec(file, [*changes, *encoder])
        assert not refusal(changed, devices)


def refusal(spec: Spec, devices: int) -> str:
    """Return why the recipe is refused; "" where it is not, or where RoboTwin's files are all that is missing."""
    try:
        check_spec(spec, training=True, cluster=cluster_of(devices, None, None, 79))
    except SpecError as exc:
        text = str(exc)
        is_assets = spec.env.type == "robotwin" and "RoboTwin's assets are not there" in text
        return "" if is_assets and len(text.splitlines()) == 3 else text
    return ""


def tiny(file: Path) -> dict[str, Any]:
    """Return the recipe with a tiny network, on the built-in simulator, in a step of a few episodes."""
    data = parse(file.read_text()).data
    model = {key: value for key, value in data["model"].items() if key in KEPT}
    # GRPO learns from groups in which some succeed: OpenVLA-OFT has a tiny checkpoint that does.
    model |= {"checkpoint": "builtin:tabletop"} if model["type"] == "openvla_oft" else {"preset": "tiny"}
    model |= {"lora": {"rank": 2}} if "lora" in data["model"] else {}
    model |= {"denoise_steps": 2} if "denoise_steps" in model else {}
    rollout = data["rollout"] | {"chunk": 4, "max_steps": 16}
    rollout |= {"steps": 16} if "steps" in rollout else {"episodes": 16}
    algorithm = dict(data["algorithm"])
    if algorithm["type"] == "srpo":
        algorithm |= {"encoder": "tiny", "camera": "wrist", "frames": 4, "image_size": None, "dtype": "float32"}
    if algorithm["type"] in ("grpo", "srpo"):
        algorithm["filter"] = None  # a random policy fails in all groups
    overlaps = "asynchrony" in data
    train = data["train"] | {"steps": 1, "micro_batch": 4, "precision": "float32"}
    train |= {"global_batch": 16} if "global_batch" in train else {}
    imagination = {"per_real": 1, "start": "first", "warm_start": 0, "fit_updates": 1, "fit_batch": 4}
    imagination |= {"fit_updates_below_threshold": 2, "quality_thresholds": False}
    return {
        **data,
        "model": model,
        "env": {"type": "tabletop", "num_envs": 8},
        "rollout": rollout,
        "algorithm": algorithm,
        "placement": {"type": "disaggregated"} if overlaps else {"type": "collocated", "workers": 1},
        "runtime": {"backend": "ray" if overlaps else "local"},
        "train": train,
        "eval": {"before": False, "episodes_per_task": 1},
        "hooks": [{"type": "jsonl"}],
        **(
            {"world_model": {"type": "edm", "preset": "tiny"}, "imagination": imagination}
            if "world_model" in data
            else {}
        ),
    }


def train_a_step(file: Path, folder: Path) -> None:
    spec = parse_spec(tiny(file))
    results = run(spec, folder, resume=False)
    assert results["steps"] == 1
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (line,) = [line for line in lines if "rollout/env_steps" in line]
    assert line["rollout/env_steps"] > 0
    if spec.algorithm.type in ("ppo", "gipo") or spec.model.type == "openvla_oft":
        assert "loss/policy" in line
    else:  # a random policy seldom succeeds, and groups of equal scores teach nothing
        assert "loss/policy" in line or line["update/skipped"] == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_it_trains_a_step_with_a_tiny_network(name: str, tmp_path: Path) -> None:
    (file,) = [file for file in RECIPES if file.stem == name]
    train_a_step(file, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.exhaustive
@pytest.mark.parametrize("file", [file for file in RECIPES if file.stem not in QUICK], ids=lambda file: file.stem)
def test_each_trains_a_step_with_a_tiny_network(file: Path, tmp_path: Path) -> None:
    train_a_step(file, tmp_path / "run")


def test_clip_ranges_of_mean_and_sum_of_log_probs_agree() -> None:
    """Flow-Noise: RLinf's log-ratio is the mean over K steps and the initial noise, ours the sum, K + 1 times as much."""
    (file,) = [file for file in RECIPES if "flow_noise" in file.stem]
    spec = load_spec(file)
    terms = spec.model.config.denoise_steps + 1
    config = spec.algorithm.config
    assert 1 - config.clip_low == pytest.approx(0.8**terms, abs=1e-4)
    assert 1 + config.clip_high == pytest.approx(1.2**terms, abs=1e-4)


def test_the_command_finds_them_by_name_and_refuses_what_does_not_fit() -> None:
    name = "pirl_pi05_libero_spatial_ppo"
    if find_spec("libero") is None:
        pytest.skip("needs libero")
    result = CliRunner().invoke(app, ["check", name, "--devices", "8", "--gpu-memory", "80"])
    assert result.exit_code == 0 and "ok: pi05 on libero (64 envs) with ppo" in result.stdout, result.output
    assert CliRunner().invoke(app, ["check", f"{name}s"]).output.count("did you mean") == 1
    unfit = CliRunner().invoke(app, ["check", "rlinf_openvla_maniskill_ppo", "--devices", "4"])
    assert unfit.exit_code == 2 and "device 7 is needed, and there are 4 GPUs: 0-3" in unfit.output
