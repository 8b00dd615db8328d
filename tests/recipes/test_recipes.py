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

from recipe_sources import all_names, read_kept
from vla_rl.cli.inputs import cluster_of
from vla_rl.cli.main import app
from vla_rl.cli.protocol.protocols import load_protocol
from vla_rl.core.errors import SpecError
from vla_rl.core.spec.spec import Spec, load_spec, parse_spec
from vla_rl.core.spec.yaml import parse_yaml, value_at
from vla_rl.runtime.checks.run import check_spec
from vla_rl.runtime.start import run

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))
WRITTEN = [file for file in RECIPES if file.stem not in all_names() or not read_kept(file.stem).head]
"""Recipes that are written by hand; tools/recipe_sources.py makes the others."""
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
PROTOCOLS = {"rlinf": "rlinf", "pirl": "rlinf", "rlvla3": "rlinf", "simplevla": "simplevla", "srpo": "simplevla"}
"""Beginning of a recipe's name -> the protocol of its authors, or of the code that theirs is built like."""
TRAINS_OTHERWISE = {
    ("rlinf_oft_libero_spatial_grpo", "rollout.max_steps"): 512,  # :76 of its YAML; the protocol has pi0.5's 240
    ("rlinf_oft_libero_10_grpo", "rollout.max_steps"): 512,  # :77
    ("rlinf_oft_libero_10_grpo", "eval.repeats"): 1,  # :82
    ("pirl_pi05_libero_10_ppo", "rollout.max_steps"): 480,  # :73
    ("pirl_pi05_libero_10_ppo", "rollout.chunk"): 10,  # model/pi0_5.yaml:9
    ("rlvla3_gr00t_libero_10_async", "rollout.max_steps"): 480,  # Table 2
    ("rlvla3_oft_libero_10_async", "rollout.max_steps"): 512,  # Table 2
    ("rlvla3_oft_libero_10_async", "eval.repeats"): 1,
    ("rlvla3_pi05_libero_10_async", "rollout.max_steps"): 480,  # Table 2
    ("rlvla3_pi05_libero_10_async", "rollout.chunk"): 10,  # Table 2
    ("rlvla3_pi05_libero_10_async", "model.denoise_steps"): 4,  # Table 2
}
"""(recipe, key) -> the value of its training, where its authors evaluate otherwise."""
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
    assert len(RECIPES) >= 40
    names = " ".join(file.stem for file in RECIPES)
    for part in (
        "rlinf_openvla",
        "rlinf_oft",
        "rlinf_gr00t",
        "dsrl",
        "metaworld",
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
    bound = "at least " if "simulation not counted" in head else ""
    assert re.search(rf"Expected: {bound}[\d,.]+ s a step", head)
    assert load_spec(file).name == file.stem.replace("_", "-")


@pytest.fixture
def tokenizers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working folder has the tokenizers that the recipes' heads tell to fetch."""
    for name in ("paligemma", "eagle"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").touch()
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_it_is_accepted_for_eight_gpus_and_for_one_without_a_warning(
    file: Path, tokenizers: None, caplog: pytest.LogCaptureFixture
) -> None:
    spec = load_spec(file)
    package = {"libero": "libero", "maniskill": "mani_skill"}.get(spec.env.type)
    if package is not None and find_spec(package) is None:
        pytest.skip(f"needs {package}")
    encoder = WITHOUT_NETWORK if spec.algorithm.type == "srpo" else []
    for devices, changes in ((8, []), (1, one_gpu(file))):
        changed = load_spec(file, [*changes, *encoder])
        assert not refusal(changed, devices)
    assert not [record.getMessage() for record in caplog.records if "warning" in record.getMessage()]


@pytest.mark.parametrize(
    "file", [f for f in RECIPES if parse_yaml(f.read_text()).data["model"].get("tokenizer")], ids=str
)
def test_a_tokenizer_that_is_not_there_yet_is_refused_as_the_run_would_be(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head names where it comes from, its licence and the key."""
    monkeypatch.chdir(tmp_path)
    spec = load_spec(file)
    if find_spec("libero") is None:
        pytest.skip("needs libero")
    assert f"model.tokenizer: no tokenizer at {spec.model.config.tokenizer};" in refusal(spec, 8)
    (needs,) = re.findall(r"^Needs: .*?(?=^The authors)", head_of(file), flags=re.MULTILINE | re.DOTALL)
    assert "model.tokenizer" in needs and f"{spec.model.config.tokenizer}" in needs
    if spec.model.config.tokenizer == "paligemma":
        assert "Gemma's licence" in needs
        assert "\n  hf download google/paligemma-3b-pt-224 tokenizer.json --local-dir paligemma\n" in needs


@pytest.mark.parametrize(
    "file", [f for f in WRITTEN if "libero" in f.stem and "accerl" not in f.stem], ids=lambda f: f.stem
)
def test_it_measures_as_its_authors_do(file: Path) -> None:
    """Keys that the authors' protocol sets have its values, but for those of the training alone. Other recipes are
    their source's conversion to the letter (test_sources.py)."""
    plain = load_spec(file).to_dict()
    protocol = load_protocol(PROTOCOLS[file.stem.partition("_")[0]])
    known = {key: value.value for key, value in protocol.keys_for(plain).items()}
    ours = {key: value_at(plain, key.split(".")) for key in known}
    if ours["env.cameras"].items() <= known["env.cameras"].items():  # further ones are drawn there, and not seen
        del ours["env.cameras"]
    if known["eval.episodes_per_task"] == 50 and ours["eval.episodes_per_task"] is None:  # all there are
        del ours["eval.episodes_per_task"]
    differences = {key: value for key, value in ours.items() if value != known[key]}
    assert differences == {key: value for (name, key), value in TRAINS_OTHERWISE.items() if name == file.stem}


def test_what_no_key_can_repeat_is_named() -> None:
    for file in WRITTEN:
        head = " ".join(head_of(file).split())
        if file.stem.startswith("rlinf_oft_libero"):
            assert "`reset_gripper_open: False`" in head
        if "maniskill" in file.stem:
            assert "sampling at temperature 0.6" in head


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
    data = parse_yaml(file.read_text()).data
    model = {key: value for key, value in data["model"].items() if key in KEPT}
    # GRPO learns from groups in which some succeed: OpenVLA-OFT has a tiny checkpoint that does.
    model |= {"checkpoint": "builtin:tabletop"} if model["type"] == "openvla_oft" else {"preset": "tiny"}
    model |= {"lora": {"rank": 2}} if "lora" in data["model"] else {}
    model |= {"denoise_steps": 2} if "denoise_steps" in model else {}
    rollout = data["rollout"] | {"chunk": 4, "max_steps": 16}
    rollout |= {"auto_reset": {"steps": 16}} if "auto_reset" in rollout else {"episodes": 16}
    algorithm = dict(data.get("algorithm", {"type": "ppo"}))
    if algorithm["type"] == "srpo":
        algorithm |= {"encoder": "tiny", "camera": "wrist", "frames": 4, "image_size": None, "dtype": "float32"}
    if algorithm["type"] in ("grpo", "srpo"):
        algorithm["filter"] = None  # a random policy fails in all groups
    overlaps = "asynchrony" in data
    train = data["train"] | {"steps": 1, "micro_batch": 4, "precision": "float32"}
    train |= {"global_batch": 16} if "global_batch" in train else {}
    train |= {"mini_batches": 2} if "mini_batches" in train else {}
    steered = {"trainer": data["trainer"] | {"batch": 8, "min_data": 8, "hidden": [8]}} if "trainer" in data else {}
    model |= {"steering": data["model"]["steering"] | {"hidden": [8]}} if "steering" in data["model"] else {}
    imagination = {"per_real": 1, "start": "first", "warm_start": 0, "fit_updates": 1, "fit_batch": 4}
    imagination |= {"fit_updates_below_threshold": 2, "quality_thresholds": None}
    return {
        **data,
        "model": model,
        "env": {"type": "tabletop", "num_envs": 8},
        "rollout": rollout,
        **({"algorithm": algorithm} if "algorithm" in data else {}),
        **steered,
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
    if spec.trainer.type == "dsrl":
        assert "loss/critic" in line
    elif spec.algorithm.type in ("ppo", "gipo") or spec.model.type == "openvla_oft":
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


def test_the_command_finds_them_by_name_and_refuses_what_does_not_fit(tokenizers: None) -> None:
    name = "pirl_pi05_libero_spatial_ppo"
    if find_spec("libero") is None:
        pytest.skip("needs libero")
    result = CliRunner().invoke(app, ["check", name, "--devices", "8", "--gpu-memory", "80"])
    assert result.exit_code == 0 and "ok: pi05 on libero (64 envs) with ppo" in result.stdout, result.output
    assert CliRunner().invoke(app, ["check", f"{name}s"]).output.count("did you mean") == 1
    unfit = CliRunner().invoke(app, ["check", "rlinf_openvla_maniskill_ppo", "--devices", "4"])
    assert unfit.exit_code == 2 and "device 7 is needed, and there are 4 GPUs: 0-3" in unfit.output
