"""Settings that a run takes and that will not do what they say are warned of, with the line of their key."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from vla_rl.core.spec.spec import load_spec
from vla_rl.runtime.checks.run import check_spec

SPEC = """\
name: toy
plugins: [vla_rl.testing.scripted]
model: {type: linear}
env: {type: tabletop, num_envs: 8}
rollout: {chunk: 4, episodes: 8, group_size: 4, max_steps: 12}
algorithm: {type: grpo}
runtime: {backend: local}
train: {steps: 4, lr: 0.1, micro_batch: 8}
imitation: {expert: {episodes: 2}, steps: 4, lr: 0.1}
hooks: []
"""
PPO = "algorithm={type: ppo}"


def warnings(caplog: pytest.LogCaptureFixture, *overrides: str, imitation: bool = False) -> list[str]:
    Path("spec.yaml").write_text(SPEC)
    with caplog.at_level(logging.WARNING):
        check_spec(load_spec("spec.yaml", overrides), training=not imitation, imitation=imitation)
    return [record.getMessage() for record in caplog.records]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["train.lr_warmup_steps=3", "train.global_batch=24", "rollout.lag=3"],
        ["rollout.chunk=12"],
        ["train.steps=0", "train.lr_warmup_steps=3"],
        ["algorithm.correction=decoupled", "rollout.lag=1"],
        [PPO, "train.critic_warmup_steps=3"],
        ["runtime.restarts=0"],
    ],
)
def test_what_has_an_effect_is_not_warned_of(caplog, overrides):
    assert warnings(caplog, *overrides) == []


@pytest.mark.parametrize(
    ("overrides", "key", "message"),
    [
        (["train.lr_warmup_steps=50"], "train.lr_warmup_steps", "rise over 50 steps, and there are 4: they end at 0.078"),
        ([PPO, "train.critic_warmup_steps=4"], "train.critic_warmup_steps", "all 4 steps train the critic alone"),
        (["train.global_batch=25"], "train.global_batch", "takes 25 samples, and a training step has 24 at most (8 traj"),
        (["rollout.lag=4"], "rollout.lag", "the weights that the run begins with act in all its 4 steps"),
        (["rollout.chunk=16"], "rollout.chunk", "16 actions are chosen at once, and an episode ends after 12"),
        (["plugins=[vla_rl.testing.scripted, os]"], "plugins.1", "module 'os' is imported, and nothing of it takes part"),
        (["runtime.restarts=1"], "runtime.restarts", "has no effect with backend: local"),
        (["runtime.deadline_s=9"], "runtime.deadline_s", "has no effect with backend: local"),
        (["runtime.address=here"], "runtime.address", "has no effect with backend: local"),
        ([PPO, "algorithm.value_coef=0"], "algorithm.value_coef", "the critic is never trained"),
        (["algorithm.filter={lower: 0, upper: 1}"], "algorithm.filter", "0 to 1 keeps every group"),
        (["algorithm.correction=decoupled"], "algorithm.correction", "nothing that is trained on is old"),
        (
            ["algorithm.correction=decoupled", "asynchrony.replay={uses: 2, capacity: 9}"],
            "asynchrony.replay.capacity", "sampling: oldest keeps 2 groups (1 x 2); room for more has no effect",
        ),
        (
            ["algorithm.correction=decoupled", "asynchrony.replay={uses: 5}"],
            "asynchrony.replay.uses", "nothing is trained on more than once in each of 4 steps",
        ),
    ],
)  # fmt: skip
def test_what_has_none_is_said(caplog, overrides, key, message):
    (said,) = warnings(caplog, *overrides)
    assert said.startswith(f"warning: override: {key}: ") and message in said


def test_a_clone_warns_of_its_own_schedule(caplog):
    (said,) = warnings(caplog, "imitation.lr_warmup_steps=4", "train.lr_warmup_steps=9", imitation=True)
    assert said.startswith("warning: override: imitation.lr_warmup_steps: ")


def test_a_warning_has_its_line(caplog):
    Path("other.yaml").write_text(SPEC.replace("max_steps: 12", "max_steps: 12, lag: 4"))
    with caplog.at_level(logging.WARNING):
        check_spec(load_spec("other.yaml"), training=True)
    assert caplog.records[-1].getMessage().startswith("warning: other.yaml:5: rollout.lag: ")
