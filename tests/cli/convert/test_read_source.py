"""Files of other projects are read with the place of each value; what is none of them is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import vla_rl
from vla_rl.cli.convert.sources import read_source
from vla_rl.cli.main import app
from vla_rl.core.errors import UserError
from vla_rl.core.spec.spec import load_spec

MAIN = """\
defaults:
  - env/suite@env.train
  - model/policy@actor.model
  - override hydra/job_logging: stdout
hydra: {searchpath: ["file://${oc.env:EMBODIED_PATH}/config/"]}
runner: {task_type: embodied, max_epochs: 7, max_steps: -1, val_check_interval: -1, save_interval: 2}
cluster: {component_placement: {"actor,env,rollout": all}}
algorithm: {adv_type: grpo, loss_type: actor, group_size: 8, logprob_type: token_level, filter_rewards: false}
env:
  train:
    total_num_envs: 64
    rollout_epoch: 2
    group_size: ${algorithm.group_size}
actor:
  micro_batch_size: 32
  global_batch_size: 1024
  optim: {lr: 2.0e-5}
  model:
    model_path: ${oc.env:NO_SUCH_VARIABLE,/mine/weights}
reward: {half: "${int_div:${env.train.total_num_envs},2}"}
"""
ENV = """\
env_type: libero
task_suite_name: libero_goal
total_num_envs: null
max_steps_per_rollout_epoch: 80
max_episode_steps: 80
"""
MODEL = """\
model_type: openvla_oft
num_action_chunks: 8
unnorm_key: libero_goal_no_noops
implement_version: rlinf
"""
SCRIPT = """\
set -x
export ROBOT_PLATFORM=LIBERO   # or ALOHA
SUITE="libero_goal"
GPUS=${GPUS:-8}
HYDRA_FULL_ERROR=1 python -u -m verl.trainer.main_ppo \\
    data.task_suite_name=$SUITE \\
    data.n_samples=8 \\
    data.train_batch_size=64 \\
    q
    actor_rollout_ref.model.path=$HOME_OF_WEIGHTS/base \\
    actor_rollout_ref.model.vla=openvla-oft \\
    actor_rollout_ref.model.action_chunks_len=8 \\
    actor_rollout_ref.actor.traj_mini_batch_size=16 \\
    actor_rollout_ref.actor.optim.lr=5e-6 \\
    actor_rollout_ref.rollout.micro_batch_size=1 \\
    algorithm.adv_estimator=grpo \\
    trainer.total_epochs=100 \\
    trainer.n_gpus_per_node=$GPUS
"""


def checkout_in(folder: Path) -> Path:
    """Write a checkout like RLinf's, with one experiment. Return the experiment's file."""
    config = folder / "examples" / "embodiment" / "config"
    for part in ("env", "model"):
        (config / part).mkdir(parents=True)
    (folder / "rlinf").mkdir()
    (config / "goal_grpo.yaml").write_text(MAIN)
    (config / "env" / "suite.yaml").write_text(ENV)
    (config / "model" / "policy.yaml").write_text(MODEL)
    return config / "goal_grpo.yaml"


def test_groups_packages_and_interpolations_are_composed(tmp_path: Path) -> None:
    source = read_source(checkout_in(tmp_path))
    at = "examples/embodiment/config"
    expected = {
        "env.train.task_suite_name": ("libero_goal", f"{at}/env/suite.yaml:2"),
        "env.train.total_num_envs": (64, f"{at}/goal_grpo.yaml:11"),  # the file wins over its groups
        "env.train.group_size": (8, f"{at}/goal_grpo.yaml:13"),
        "actor.model.unnorm_key": ("libero_goal_no_noops", f"{at}/model/policy.yaml:3"),
        "actor.model.model_path": ("/mine/weights", f"{at}/goal_grpo.yaml:19"),
        "reward.half": (32, f"{at}/goal_grpo.yaml:20"),
    }
    assert {key: (source.values[key].value, source.values[key].place) for key in expected} == expected


def test_an_experiment_outside_of_the_checkout_names_it(tmp_path: Path) -> None:
    file = checkout_in(tmp_path / "RLinf")
    mine = tmp_path / "mine.yaml"
    mine.write_text(file.read_text())
    with pytest.raises(UserError, match="name the folder with --checkout"):
        read_source(mine)
    assert read_source(mine, tmp_path / "RLinf").values["env.train.env_type"].value == "libero"
    with pytest.raises(UserError, match="is no checkout of the project: it has no folder rlinf"):
        read_source(mine, tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("env/suite@", "env/none@", r"goal_grpo.yaml: cannot be composed: .*'env/none'"),
        ("algorithm: {", "algorithm: {a: ", "goal_grpo.yaml:8: "),
        ("runner:", "walker:", "a part of RLinf's configurations, not an experiment"),
    ],
)
def test_what_cannot_be_composed_is_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    file = checkout_in(tmp_path)
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(UserError, match=message):
        read_source(file)


def test_without_hydra_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "hydra", None)
    with pytest.raises(UserError, match="Hydra, .* is not installed; extra convert"):
        read_source(checkout_in(tmp_path))


def test_a_script_is_read_with_its_variables(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(SCRIPT)
    source = read_source(tmp_path / "run.sh")
    assert source.project == "simplevla"
    assert source.values["data.task_suite_name"].value == "libero_goal"
    assert source.values["data.task_suite_name"].place == "run.sh:6"
    assert source.values["trainer.n_gpus_per_node"].value == 8
    assert source.values["actor_rollout_ref.actor.optim.lr"].value == 5e-6
    assert "$HOME_OF_WEIGHTS is not set" in source.values["actor_rollout_ref.model.path"].unresolved
    assert source.strays == ("run.sh:9: 'q'",)
    with pytest.raises(UserError, match=r"model.path \(run.sh:10\) cannot be resolved: \$HOME_OF_WEIGHTS is not set"):
        vla_rl.convert(tmp_path / "run.sh")
    (tmp_path / "run.sh").write_text(SCRIPT.replace("$HOME_OF_WEIGHTS", "/weights"))
    converted = vla_rl.convert(tmp_path / "run.sh")
    assert converted.spec["rollout"]["episodes"] == 512 and converted.spec["env"]["num_envs"] == 64
    assert converted.spec["train"]["steps"] == 700 and "'q' is left out" in converted.text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.sh", "python train.py a.b=1"),
        ("a.json", '{"a": 1}'),
        ("a.json", "{"),
        ("a.yaml", "a: 1"),
        ("a.yaml", "- 1"),
        ("a.txt", "x"),
        ("a.yaml", "a: [1"),
    ],
)
def test_a_file_of_no_known_project_is_refused(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match="no configuration of a project|not JSON|not valid YAML"):
        read_source(tmp_path / name)
    with pytest.raises(UserError, match="no such file"):
        read_source(tmp_path / "none.yaml")
    (tmp_path / "binary.sh").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not text"):
        read_source(tmp_path / "binary.sh")


def test_lerobots_training_becomes_a_spec_for_cloning(tmp_path: Path) -> None:
    config = {
        "dataset": {"repo_id": "lerobot/libero", "episodes": None},
        "policy": {"type": "pi05", "pretrained_path": "lerobot/pi05_base", "n_action_steps": 10, "dtype": "bfloat16"},
        "env": {"type": "libero", "task": "libero_10"},
        "eval": {"n_episodes": 50, "batch_size": 10},
        "steps": 30000, "batch_size": 32, "seed": 1000, "save_freq": 10000,
        "optimizer": {"type": "adamw", "lr": 2.5e-5, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.01},
        "scheduler": {"type": "cosine_decay_with_warmup", "num_warmup_steps": 1000, "num_decay_steps": 30000,
                      "peak_lr": 2.5e-5, "decay_lr": 2.5e-6},
        "wandb": {"enable": True},
    }  # fmt: skip
    (tmp_path / "train_config.json").write_text(json.dumps(config))
    converted = vla_rl.convert(tmp_path / "train_config.json")
    assert not converted.of_kind("unknown")
    spec = converted.spec
    assert spec["imitation"]["lr_end"] == pytest.approx(0.1) and spec["imitation"]["steps"] == 30000
    assert spec["imitation"]["data"] == {
        "folder": "lerobot/libero",
        "episodes": None,
        "type": "lerobot",
        "ends": "repeat",
    }
    assert spec["train"]["adam_betas"] == [0.9, 0.95] and spec["rollout"]["chunk"] == 10


def test_the_command_writes_a_spec_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.sh").write_text(SCRIPT.replace("$HOME_OF_WEIGHTS", "/weights"))
    result = CliRunner().invoke(app, ["convert", "run.sh"])
    assert result.exit_code == 0, result.output
    assert "wrote run.yaml" in result.stdout and "  data.n_samples: 8 -> rollout.group_size: 8" in result.stdout
    assert load_spec(tmp_path / "run.yaml").rollout.group_size == 8
    again = CliRunner().invoke(app, ["convert", "run.sh"])
    assert again.exit_code == 2 and "run.yaml exists" in again.output
    listed = CliRunner().invoke(app, ["convert", "run.sh", "--json"])
    assert json.loads(listed.stdout)["project"] == "SimpleVLA-RL"
