"""Weighted sampling of tasks: what fails more comes up more."""

from __future__ import annotations

import json

import pytest
from scripted_runs import advance

from vla_rl.core.contexts import EnvContext
from vla_rl.core.declarations import EnvPlugin
from vla_rl.core.errors import SpecError
from vla_rl.core.spec.spec import parse_spec
from vla_rl.core.types import Episode
from vla_rl.runtime.driver.collecting.rollouts import TaskWeighting
from vla_rl.runtime.start import run, start
from vla_rl.testing.scripted import ScriptedConfig, ScriptedEnv


def build_uneven(config: ScriptedConfig, context: EnvContext) -> ScriptedEnv:
    """Episodes of task-0 always succeed, those of task-1 always fail."""
    return ScriptedEnv(
        context.num_envs,
        lambda state: (2, "failure" if state % 2 else "success"),
        chunk=context.chunk,
        first_env=context.first_env,
        stamp=False,
    )


vla_rl_plugins = {
    "env": {"uneven": EnvPlugin(config=ScriptedConfig, build=build_uneven, summary="one easy task, one hard")}
}


def episode(number: int, task: str, success: bool) -> Episode:
    return Episode(
        number=number, episode=0, task=task, state=0, steps=1, total_reward=0.0,
        success_once=success, success_at_end=success, truncated=False,
    )  # fmt: skip


def test_a_task_weighs_its_failures_in_the_window_plus_smoothing():
    windows = TaskWeighting(["a", "b"], window=3, smoothing=0.5)
    assert windows.group_weights(1, 0) == {"a": 0.5, "b": 0.5}
    windows.record_step_outcomes(1, [episode(0, "a", False), episode(1, "a", False), episode(2, "b", True)])
    assert windows.group_weights(2, 3) == {"a": 2.5, "b": 0.5}
    windows.record_step_outcomes(2, [episode(0, "a", True), episode(1, "a", True), episode(2, "b", False)])
    assert windows.group_weights(3, 6) == {"a": 1.5, "b": 1.5}, "the first failure of a left its window of 3"


def test_the_last_outcomes_of_a_rollout_are_the_same_under_any_placement():
    episodes = [episode(number, "a", number % 2 == 1) for number in range(4)]
    for order in (episodes, episodes[::-1]):
        windows = TaskWeighting(["a"], window=1, smoothing=1.0)
        windows.record_step_outcomes(1, order)
        assert windows.group_weights(2, 4) == {"a": 1.0}


def test_a_step_that_is_played_again_finds_its_weights(tmp_path):
    windows = TaskWeighting(["a"], window=2, smoothing=1.0)
    for step, success in ((1, False), (2, True), (3, True)):
        before = windows.group_weights(step, step)
        windows.record_step_outcomes(step, [episode(0, "a", success)])
    windows.save(tmp_path / "tasks.json")
    again, after = (TaskWeighting(["a"], window=2, smoothing=1.0) for _ in range(2))
    for other in (again, after):
        other.load(tmp_path / "tasks.json")
    assert again.group_weights(3, 3) == before == {"a": 2.0}, "stopped before step 3 was trained on"
    assert after.group_weights(4, 4) == windows.group_weights(4, 4) == {"a": 1.0}
    fresh = TaskWeighting(["a"], window=2, smoothing=1.0)
    fresh.load(tmp_path / "none.json")
    assert fresh.group_weights(4, 4) == {"a": 1.0}


def test_what_was_issued_keeps_its_weights(tmp_path):
    """Tickets of two steps are issued at once; those that are issued again, after a stop, start where they started."""
    windows = TaskWeighting(["a"], window=9, smoothing=1.0, ahead=1)
    first = [windows.group_weights(1, group) for group in range(4)]
    windows.record_step_outcomes(1, [episode(0, "a", False), episode(1, "a", False)])
    second = [windows.group_weights(2, group) for group in (4, 5)]
    assert first == [{"a": 1.0}] * 4 and second == [{"a": 3.0}] * 2
    windows.save(tmp_path / "tasks.json")
    again = TaskWeighting(["a"], window=9, smoothing=1.0, ahead=1)
    again.load(tmp_path / "tasks.json")
    assert [again.group_weights(2, group) for group in range(2, 6)] == [*first[2:], *second]


# -------------------------------------------------------------------------------------------------------- runs


def uneven(**changes):
    spec = {
        "name": "uneven",
        "plugins": ["vla_rl.testing.scripted", __file__],
        "model": {"type": "linear"},
        "env": {"type": "uneven", "num_envs": 16},
        "rollout": {"chunk": 2, "episodes": 32, "task_sampling": {"type": "weighted"}},
        "algorithm": {"type": "ppo"},
        "runtime": {"backend": "local"},
        "train": {"steps": 4, "lr": 1e-3, "micro_batch": 64, "checkpoint_every": 1},
        "eval": {"before": False, "episodes_per_task": 1},
        "hooks": [{"type": "jsonl"}],
    }
    return parse_spec({**spec, **changes})


def played(spec, steps=4):
    """Episodes of the hard task in each rollout, and its weight."""
    runtime = start(spec)
    try:
        rollouts = [advance(runtime, step) for step in range(1, steps + 1)]
    finally:
        runtime.workers.close()
    hard = [sum(e.task == "task-1" for e in rollout.episodes) / len(rollout.episodes) for rollout, _ in rollouts]
    return hard, [metrics.get("sampling/weight/task-1") for _, metrics in rollouts]


OFF = {"chunk": 2, "episodes": 32}
AUTO = {"chunk": 2, "auto_reset": {"steps": 8}}


@pytest.mark.parametrize("mode", [OFF, AUTO], ids=["off", "immediate"])
def test_weighted_sampling_plays_what_fails(mode):
    hard, weights = played(uneven(rollout={**mode, "task_sampling": {"type": "weighted"}}))
    assert weights[0] == 1.0 and weights == sorted(weights) and weights[-1] > 20
    assert all(share > 0.8 for share in hard[1:])
    even, none = played(uneven(rollout={**mode, "task_sampling": {"type": "uniform"}}))
    assert all(0.2 < share < 0.8 for share in even) and none == [None] * 4


def test_window_and_smoothing_bound_the_weights():
    _, weights = played(uneven(rollout={**OFF, "task_sampling": {"type": "weighted", "window": 3}}))
    assert weights == [1.0, 4.0, 4.0, 4.0]
    hard, weights = played(uneven(rollout={**OFF, "task_sampling": {"type": "weighted", "smoothing": 1e6}}))
    assert weights[0] == 1e6 and all(share < 0.8 for share in hard)


def test_a_resumed_run_samples_as_if_it_had_not_stopped(tmp_path):
    run(uneven(), tmp_path / "whole", resume=False)
    part = {"lr": 1e-3, "micro_batch": 64, "checkpoint_every": 1}
    run(uneven(train={"steps": 2, **part}), tmp_path / "parts", resume=False)
    run(uneven(), tmp_path / "parts", resume=True)

    def lines(folder):
        read = [json.loads(line) for line in (tmp_path / folder / "metrics.jsonl").read_text().splitlines()]
        wanted = ("step", "env/", "sampling/", "loss/")
        return [{k: v for k, v in line.items() if k.startswith(wanted)} for line in read if "loss/total" in line]

    whole = lines("whole")
    assert lines("parts") == whole
    assert [line["sampling/weight/task-1"] for line in whole][-1] > 20


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"window": 10}, "task_sampling.type: required, but missing; one of 'uniform', 'weighted'"),
        ({"type": "uniform", "smoothing": 2.0}, "task_sampling.smoothing: unknown key"),
    ],
)
def test_keys_of_weighted_sampling_are_refused_without_it(keys, message):
    with pytest.raises(SpecError, match=message):
        uneven(rollout={**OFF, "task_sampling": keys})


@pytest.mark.parametrize("keys", [{"window": 0}, {"smoothing": 0.0}, {"type": "wieghted"}])
def test_keys_out_of_range_are_refused(keys):
    with pytest.raises(SpecError, match=f"rollout.task_sampling.{next(iter(keys))}"):
        uneven(rollout={**OFF, "task_sampling": {"type": "weighted", **keys}})
