"""Every example is checked, and every first-party one really runs, shortened."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from vla_rl.core.errors import UserError
from vla_rl.core.spec.spec import load_spec
from vla_rl.runtime.start import clone, run
from vla_rl.toolkit.envs.rendering import require_rendering
from vla_rl.toolkit.envs.vulkan import use_unpacked_driver

EXAMPLES = Path(__file__).parents[2] / "examples"
SHORT = ["eval.every=0", "train.checkpoint_every=0"]


def start(name: str, folder: Path, *overrides: str) -> dict:
    return run(load_spec(EXAMPLES / f"{name}.yaml", overrides), folder, resume=False)


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.yaml")), ids=lambda file: file.stem)
def test_it_is_a_valid_spec(file):
    assert load_spec(file).name == file.stem.replace("_", "-")


@pytest.mark.slow
@pytest.mark.ray
def test_grpo_learns_on_the_tabletop(tmp_path):
    results = start("tabletop_grpo", tmp_path / "run", *SHORT, "train.steps=12")
    assert 0.3 <= results["success_before"]["rate"] <= 0.6
    assert results["success"]["rate"] >= results["success_before"]["rate"] + 0.05
    assert results["success"]["n"] == 200 and len(results["tasks"]) == 8
    assert len(list((tmp_path / "run" / "videos").glob("*.mp4"))) == 8


@pytest.mark.slow
@pytest.mark.ray
def test_ppo_trains_on_the_tabletop(tmp_path):
    start("tabletop_ppo", tmp_path / "run", *SHORT, "train.steps=3", "eval.before=false")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    values = [line["loss/value"] for line in lines if "loss/value" in line]
    assert len(values) == 3 and values[-1] < values[0]


@pytest.mark.slow
@pytest.mark.ray
def test_rollouts_continue_while_ppo_trains(tmp_path):
    short = ["train.steps=3", "env.num_envs=32", "eval={before: false, episodes_per_task: 1}"]
    start("tabletop_async_ppo", tmp_path / "run", *SHORT, *short)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["policy/lag_max"] for line in lines if "policy/lag_max" in line] == [0, 1, 1]


@pytest.mark.slow
@pytest.mark.ray
def test_gipo_trains_on_trajectories_twice(tmp_path):
    short = ["train.steps=3", "env.num_envs=16", "eval={before: false, episodes_per_task: 1}"]
    results = start("tabletop_accerl", tmp_path / "run", *SHORT, *short)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["policy/lag_max"] for line in lines if "policy/lag_max" in line] == [0, 1, 2]
    assert results["replay"]["reused"] == 2 * 16 and any("sampling/weight/pick_red" in line for line in lines)


def skip_without(package: str) -> None:
    if find_spec(package) is None:
        pytest.skip(f"needs {package}")
    if package == "mani_skill":
        use_unpacked_driver()
        try:
            require_rendering("vulkan", "maniskill")
        except UserError as exc:
            pytest.skip(str(exc))


@pytest.mark.slow
@pytest.mark.sim
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "package"),
    [("libero_three_tasks_ppo", "libero"), ("metaworld_ppo", "metaworld"), ("maniskill_ppo", "mani_skill")],
)
def test_simulators_train_on_from_a_clone(name, package, tmp_path):
    skip_without(package)
    short = [*SHORT, "env.num_envs=2", "eval={before: false, episodes_per_task: 1}"]
    spec = load_spec(EXAMPLES / f"{name}.yaml", [*short, "imitation.expert.episodes=2", "imitation.steps=4"])
    clone(spec, tmp_path / "sft", False)
    checkpoint = f"model.checkpoint={tmp_path / 'sft' / 'checkpoints' / 'last' / 'model'}"
    results = start(name, tmp_path / "run", *short, checkpoint, "train.steps=2", "rollout.episodes=2")
    assert results["steps"] == 2 and results["success"]["n"] == len(results["tasks"])
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sum("env/success_rate" in line for line in lines) == 2


@pytest.mark.slow
@pytest.mark.sim
@pytest.mark.timeout(600)
def test_sac_trains_on_from_a_clone_of_recorded_demonstrations(tmp_path, fork_server):
    skip_without("metaworld")
    example = EXAMPLES / "metaworld_sac.yaml"
    folder = tmp_path / "demonstrations"
    tool = EXAMPLES.parent / "tools" / "record_expert.py"
    fork_server.run_python(tool, example, folder, "--episodes", "2", "env.num_envs=2", check=True)
    short = [*SHORT, "env.num_envs=2", "eval={before: false, episodes_per_task: 1}", f"imitation.data.folder={folder}"]
    clone(load_spec(example, [*short, "imitation.steps=4"]), tmp_path / "sft", False)
    few = ["train.steps=2", "rollout.episodes=2", "rollout.max_steps=16"]
    early = ["trainer.min_data=2", "trainer.critic_updates=4"]
    checkpoint = f"model.checkpoint={tmp_path / 'sft' / 'checkpoints' / 'last' / 'model'}"
    start("metaworld_sac", tmp_path / "run", *short, *few, *early, checkpoint)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sum(line.get("off_policy/updates", 0) for line in lines) == 48  # 8 for each of 8 transitions beyond 2
    assert any("off_policy/cloning" in line for line in lines)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.sim
@pytest.mark.timeout(600)
@pytest.mark.skipif(find_spec("libero") is None, reason="needs pip install -e '.[libero]'")
def test_libero_under_other_placements(tmp_path):
    short = ["train.steps=1", "train.critic_warmup_steps=0", "env.num_envs=2", "rollout.episodes=2"]
    quiet = ["rollout.max_steps=16", "eval={before: false, episodes_per_task: 1}", "hooks=[{type: jsonl}]"]
    found = []
    for kind in ("{type: disaggregated}", "{type: hybrid, pipeline_stages: 2}"):
        folder, placed = tmp_path / str(len(found)), ["runtime={backend: ray}", f"placement={kind}"]
        start("libero_spatial_ppo", folder, *SHORT, *short, *quiet, *placed)
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        found.append(next((m["rollout/env_steps"], m["loss/policy"]) for m in lines if "loss/policy" in m))
    assert found[0][0] == found[1][0] == 32
    assert found[0][1] == pytest.approx(found[1][1], abs=1e-5)


@pytest.mark.slow
def test_a_policy_practises_in_a_world_model(tmp_path):
    fits = "imagination={per_real: 1, start: first, warm_start: 0, fit_updates: 1, fit_updates_below_threshold: 2, fit_batch: 4, quality_thresholds: null}"
    short = ["runtime.backend=local", "train.steps=2", "eval={before: false, episodes_per_task: 1}", fits]
    results = start("tabletop_imagination", tmp_path / "run", *SHORT, *short)
    assert results["imagination"]["imagined_episodes"] == 2 * 64 and results["imagination"]["fit_updates"] == 4
