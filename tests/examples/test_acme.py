"""A third party's project, installed into a separate environment, works without any change to vla-rl."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

ACME = Path(__file__).parents[2] / "examples" / "acme_env"

VLA_RL = ("-m", "vla_rl.cli.main")

FAR = """
from attrs import frozen
from vla_rl import Advantages, Algorithm, AlgorithmPlugin, Loss

@frozen
class Config: ...

class Far(Algorithm):
    def __init__(self, config, context): ...

    def advantages(self, rollout):
        return Advantages(advantages=-rollout.extras["distance"], weights=rollout.valid.float())

    def loss(self, scores, batch):
        total = -(scores.log_probs.sum(-1) * batch.advantages * batch.weights).sum()
        return Loss(total=total, metrics={"loss/policy": total.detach()}, maxima={"far": batch.extras["distance"].max()})

vla_rl_plugins = {"algorithm": {"far": AlgorithmPlugin(config=Config, build=Far, summary="reads a distance")}}
"""
"""An algorithm that reads a number of the simulator, in two of its lines."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy, since building writes into the folder."""
    copy = tmp_path_factory.mktemp("acme") / "acme_env"
    shutil.copytree(ACME, copy, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__", "runs"))
    return copy


@pytest.fixture(scope="module")
def python(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment that sees this one's packages and has acme-env installed."""
    home = tmp_path_factory.mktemp("venv")
    venv.create(home, symlinks=True)
    python = home / "bin" / "python"
    site = next((home / "lib").glob("python*/site-packages"))
    outer = sysconfig.get_paths()["purelib"]
    (site / "outer.pth").write_text(f"import site; site.addsitedir({outer!r})\n")
    run(python, "-m", "pip", "install", "--no-deps", "--no-index", "--no-build-isolation", "-q", str(project))
    return python


def run(python: Path, *arguments: str, cwd: Path | None = None) -> str:
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONNOUSERSITE": "1"}
    done = subprocess.run(
        [python, *arguments], cwd=cwd, env=env, text=True, capture_output=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_the_plugin_is_listed(python: Path) -> None:
    plugins = json.loads(run(python, *VLA_RL, "plugins", "--json"))
    (beacons,) = [plugin for plugin in plugins if plugin["name"] == "beacons"]
    assert (beacons["kind"], beacons["dist"], beacons["version"]) == ("env", "acme-env", "0.1.0")


def test_its_own_test_passes_with_the_fixtures_of_vla_rl(python: Path, project: Path) -> None:
    assert "1 passed" in run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests", cwd=project)


def test_its_spec_is_right(python: Path, project: Path) -> None:
    run(python, *VLA_RL, "check", "spec.yaml", cwd=project)


def test_an_algorithm_reads_the_distance_that_it_declares(python: Path, project: Path) -> None:
    """The puck is never farther from a beacon than the table is wide, and nearer at success."""
    (project / "far.py").write_text(FAR)
    overrides = ["plugins=[far.py]", "algorithm={type: far}", "rollout.episodes=8", "train.steps=1", "eval.every=0"]
    overrides += ["bc_warmup=null", "rollout.group_size=1", "eval.before=false", "env.num_envs=8"]
    run(python, *VLA_RL, "run", "spec.yaml", *overrides, "runtime.backend=local", "--folder", "far", cwd=project)
    lines = (project / "far" / "metrics.jsonl").read_text().splitlines()
    (farthest,) = [line["far"] for line in map(json.loads, lines) if "far" in line]
    assert 0.2 < farthest < 2.9


def test_two_steps_of_training(python: Path, project: Path) -> None:
    overrides = [
        "train.steps=2",
        "bc_warmup.episodes=16",
        "bc_warmup.epochs=1",
        "rollout.episodes=16",
        "eval.episodes_per_task=4",
    ]
    run(python, *VLA_RL, "run", "spec.yaml", *overrides, "runtime.backend=local", cwd=project)
    results = json.loads((project / "runs" / "acme-beacons" / "results.json").read_text())
    assert results["success"]["n"] == 8
    assert sorted(results["tasks"]) == ["blue", "red"]
    lines = (project / "runs" / "acme-beacons" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines if "rollout/episodes" in line]
    assert steps == [1, 2] and any("loss/policy" in line for line in lines)
    assert len(list((project / "runs" / "acme-beacons" / "videos").glob("step_000002_ep*.mp4"))) == 2
