"""Idle steps of robots whose actions are targets, differences, or have no state beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vla_rl.core.contexts import DataContext
from vla_rl.core.errors import UserError
from vla_rl.core.types import EnvInfo, TaskInfo
from vla_rl.toolkit.data.idle_steps import choose_moving_steps, find_idle_steps, find_no_ops
from vla_rl.toolkit.data.inspection.recorded import InspectedEpisode, RecordedData
from vla_rl.toolkit.data.inspection.report import inspect_recordings
from vla_rl.toolkit.data.recording import Recording, encode_png

T = 100


def moved(rest: int, targets: bool = True) -> tuple[Any, Any]:
    """Return actions and states of an arm that moves, but for the first `rest` of T steps."""
    path = np.concatenate([np.zeros(rest), np.linspace(0, 1, T - rest + 1)])[:, None] * np.array([1.0, -2.0])
    actions = path[1:] if targets else np.diff(path, axis=0)
    return np.concatenate([actions, np.zeros((T, 1))], axis=1).astype(np.float32), path[:-1].astype(np.float32)


@pytest.mark.parametrize("targets", [True, False])
@pytest.mark.parametrize("rest", [0, 45])
def test_a_resting_arm_is_idle_whatever_its_actions_mean(targets: bool, rest: int) -> None:
    actions, state = moved(rest, targets)
    noise = np.random.default_rng(0).uniform(-5e-4, 5e-4, state.shape).astype(np.float32)
    (idle,) = find_idle_steps([(actions, state + noise)])
    assert idle[1 : max(rest - 1, 1)].all() and not idle[rest + 1 :].any() and not idle[0]


def test_a_creeping_arm_keeps_a_step_for_each_change() -> None:
    actions = np.linspace(0, 1, 10_001, dtype=np.float32)[:, None]
    (idle,) = find_idle_steps([(actions, actions)])
    kept = actions[~idle, 0]
    assert len(kept) < 5_000 and np.diff(kept).max() < 0.003 and kept[-1] > 0.997


def test_an_episode_in_another_unit_does_not_make_the_others_idle() -> None:
    actions, state = moved(0)
    idle = find_idle_steps([(actions, state), (actions, state), (1000 * actions, 1000 * state)])
    assert not np.concatenate(idle).any()


def test_a_gripper_that_moves_is_not_idle() -> None:
    actions, state = moved(T - 1)
    actions[10:20, 2] = 1
    (idle,) = find_idle_steps([(actions, state)])
    assert np.flatnonzero(~idle)[:3].tolist() == [0, 10, 20]
    (idle,) = find_idle_steps([(actions[: T - 1], None)])
    assert np.flatnonzero(~idle).tolist() == np.flatnonzero(~find_no_ops(actions[: T - 1])).tolist() == [10, 20]


def test_data_without_motion_are_refused() -> None:
    still = np.zeros((5, 3), np.float32)
    with pytest.raises(UserError, match="drop_no_ops leaves no step, since nothing moves in any; set drop_no_ops: fal"):
        choose_moving_steps("data", [(still, None)])


@pytest.mark.parametrize(("rest", "named"), [(33, ""), (45, "nothing moves and no command changes in 44% of")])
def test_a_data_set_that_mostly_rests_is_named(rest: int, named: str) -> None:
    actions, state = moved(rest)
    data = RecordedData(
        folder=Path("data"),
        layout="LeRobot",
        fps=10,
        episodes=[
            InspectedEpisode(
                number=number,
                task="a",
                times=np.arange(T, dtype=np.float64),
                vectors={"action": actions, "state": state},
            )
            for number in range(3)
        ],
        action="action",
        state="state",
        cameras=(),
        read_image=lambda *_: np.zeros((1, 1, 3), np.uint8),
    )
    texts = [finding.describe() for finding in inspect_recordings(data).findings]
    idle = [text for text in texts if "nothing moves" in text]
    assert len(idle) == bool(named) and all(named in text and "`drop_no_ops: true`" in text for text in idle)


def test_lerobot_reads_the_steps_in_which_something_moves(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("datasets", reason="needs the extra: pip install -e '.[data]'")
    from vla_rl.plugins.data.lerobot import plugin
    from vla_rl.plugins.data.lerobot.config import LeRobotConfig
    from vla_rl.toolkit.data.lerobot import LeRobotWriter

    info = EnvInfo(
        cameras={"front": (8, 6)},
        state_dim=2,
        action_low=(-2.0,) * 3,
        action_high=(2.0,) * 3,
        tasks=(TaskInfo(name="a", instruction="do a", max_steps=9),),
    )
    with LeRobotWriter(tmp_path, fps=10, robot="arm") as writer:
        for rest in (45, 0):
            actions, state = moved(rest)
            writer.add(
                Recording(
                    images={"front": [encode_png(np.full((8, 6, 3), step, np.uint8)) for step in range(T)]},
                    sizes={"front": (8, 6)},
                    state=state,
                    actions=actions,
                    instruction="do a",
                    rewards=np.zeros(T, np.float32),
                )
            )
    context = DataContext(env=info, chunk=4)
    data = plugin.build(LeRobotConfig(folder=tmp_path, drop_no_ops=True), context)
    assert f"{tmp_path}: drop_no_ops leaves out 44 of 200 steps, in which nothing moves" in caplog.text
    assert data.num_samples() == 56 - 3 + 100 - 3
    obs, chunks = data.read_samples(np.array([0, 1, 53, 54]))
    assert obs.images["front"][:, 0, 0, 0].tolist() == [0, 45, 0, 1]
    actions, state = moved(45)
    assert np.array_equal(chunks[0], actions[[0, 45, 46, 47]]) and np.array_equal(obs.state[1], state[45])
    kept = np.concatenate([actions[[0, *range(45, T)]], moved(0)[0]])
    assert data.data_statistics()["action"]["mean"] == pytest.approx(kept.astype(np.float64).mean(0), abs=1e-6)
    with pytest.raises(UserError, match="`drop_no_ops` reads samples without those that follow them"):
        data.read_rewards(np.array([0]), 0.99)
    assert plugin.build(LeRobotConfig(folder=tmp_path), context).num_samples() == 2 * (T - 3)
