"""Settings that a run takes and that will not do what they say are warned of, with the line of their key."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from attrs import frozen

from vla_rl.core.declarations import DataPlugin
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
        ["algorithm.correction={type: decoupled}", "rollout.lag=1"],
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
        (["train.precision=bf16"], "train.precision", "adds up the gradients of LayerNorms"),
        (["model={type: pi0, preset: tiny, dtype: bfloat16}"], "model.dtype", "adds up the gradients of LayerNorms"),
        (["runtime.restarts=1"], "runtime.restarts", "has no effect with backend: local"),
        (["runtime.deadline_s=9"], "runtime.deadline_s", "has no effect with backend: local"),
        (["runtime.address=here"], "runtime.address", "has no effect with backend: local"),
        ([PPO, "algorithm.value_coef=0"], "algorithm.value_coef", "the critic is never trained"),
        (["algorithm.filter={lower: 0, upper: 1}"], "algorithm.filter", "0 to 1 keeps every group"),
        (["algorithm.correction={type: decoupled}"], "algorithm.correction", "nothing that is trained on is old"),
        (
            ["algorithm.correction={type: decoupled}", "asynchrony.replay={uses: 5}"],
            "asynchrony.replay.uses", "nothing is trained on more than once in each of 4 steps",
        ),
    ],
)  # fmt: skip
def test_what_has_none_is_said(caplog, overrides, key, message):
    (said,) = warnings(caplog, *overrides)
    assert said.startswith(f"warning: override: {key}: ") and message in said


OFF_POLICY = "algorithm={type: transitions}"


@pytest.mark.parametrize(
    ("overrides", "key", "message"),
    [
        (
            ["trainer={type: off_policy, min_data: 8, demonstrations: {share: 0.05}, batch: 8}"],
            "trainer.demonstrations.share", "0.05 of a batch of 8 is not one sample; give trainer.batch: 11",
        ),
        (
            ["trainer={type: off_policy, min_data: 8, actor_interval: 97}"],
            "trainer.actor_interval", "the policy is trained in every 97th update, and 4 steps (train.steps) make 96 at",
        ),
        (
            ["trainer={type: off_policy, min_data: 8, actor_interval: 20, critic_updates: 81}"],
            "trainer.actor_interval", "it stays as it is",
        ),
        (
            ["trainer={type: off_policy, min_data: 8}", "train.max_skipped=3"],
            "train.max_skipped", "has no effect: trainer 'off_policy' skips no step",
        ),
        (
            ["trainer={type: off_policy, min_data: 8, discount: 1e-300}"],
            "trainer.discount", "what comes next counts 0 times its value",
        ),
        (["algorithm={type: ppo, gamma: 1e-9}"], "algorithm.gamma", "what comes next counts 1e-09 times its value"),
        (
            ["env.num_envs=1", "rewards={type: person, threshold: 0.9}"],
            "rewards.threshold", "has no effect: 'person' answers yes or no",
        ),
    ],
)  # fmt: skip
def test_keys_of_trainers_and_persons_without_effect_are_said(caplog, overrides, key, message):
    data = "imitation={data: {type: recorded}}"
    off_policy = "off_policy" in overrides[0]
    further = [OFF_POLICY, data, "plugins=[vla_rl.testing.scripted, test_no_effect]"] if off_policy else []
    (said,) = warnings(caplog, *further, *overrides)
    assert said.startswith(f"warning: override: {key}: ") and message in said


def test_effective_keys_of_off_policy_are_not_warned_of(caplog):
    trainer = "trainer={type: off_policy, min_data: 8, demonstrations: {share: 0.05}, batch: 11, actor_interval: 96, discount: 0.1}"
    further = ["imitation={data: {type: recorded}}", "plugins=[vla_rl.testing.scripted, test_no_effect]"]
    assert warnings(caplog, OFF_POLICY, *further, trainer) == []


@frozen
class NoKeys:
    """Settings of the data below."""


def never_opened(config, context):
    raise AssertionError("checks open nothing")


vla_rl_plugins = {"data": {"recorded": DataPlugin(config=NoKeys, build=never_opened, summary="recordings of nothing")}}


def test_a_clone_warns_of_its_own_schedule(caplog):
    (said,) = warnings(caplog, "imitation.lr_warmup_steps=4", "train.lr_warmup_steps=9", imitation=True)
    assert said.startswith("warning: override: imitation.lr_warmup_steps: ")


def test_a_warning_has_its_line(caplog):
    Path("other.yaml").write_text(SPEC.replace("max_steps: 12", "max_steps: 12, lag: 4"))
    with caplog.at_level(logging.WARNING):
        check_spec(load_spec("other.yaml"), training=True)
    assert caplog.records[-1].getMessage().startswith("warning: other.yaml:5: rollout.lag: ")
