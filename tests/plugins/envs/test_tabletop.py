"""The embedded simulator: physics by hand, scenes, batching, and what a plugin promises core."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
import torch

from vla_rl.core.contexts import EnvContext
from vla_rl.core.types import ChunkResult, Observation
from vla_rl.plugins.envs.tabletop import plugin
from vla_rl.plugins.envs.tabletop.config import TabletopConfig
from vla_rl.plugins.envs.tabletop.simulator import GAP, REACH, SPEED, TOLERANCE, Tabletop, split_scenes
from vla_rl.plugins.envs.tabletop.tasks import COLOURS, TASKS

OPEN, CLOSED = -1.0, 1.0


def make(num_envs: int = 8, chunk: int = 4, **config: object) -> Tabletop:
    return plugin.build(TabletopConfig(**config), EnvContext(num_envs=num_envs, chunk=chunk))  # type: ignore[arg-type]


def reset(env: Tabletop, ids: list[int]) -> Observation:
    return env.reset(np.arange(len(ids)), np.array(ids), np.zeros(len(ids), np.int64))


def states(env: Tabletop, split: str = "eval") -> list[int]:
    return [state.id for state in env.reset_states(split)]


def act(env: Tabletop, *steps: tuple[float, float, float], stop: bool = True) -> ChunkResult:
    """The same actions for all envs."""
    actions = torch.tensor(steps).repeat(env.num_envs, 1, 1)
    return env.chunk_step(actions, np.ones(env.num_envs, bool), stop)


def same(a: ChunkResult, b: ChunkResult) -> bool:
    images = all(torch.equal(a.obs.images[name], b.obs.images[name]) for name in a.obs.images)
    return images and torch.equal(a.obs.state, b.obs.state) and torch.equal(a.rewards, b.rewards)  # type: ignore[arg-type]


def above(env: Tabletop, thing: int) -> None:
    """Put every gripper over a thing of its env."""
    env.move_gripper(env.snapshot()["position"][:, thing])


def target_of(env: Tabletop) -> torch.Tensor:
    return env.snapshot()["target"]  # type: ignore[no-any-return]


def test_grasping_the_named_block_succeeds_and_pays_once():
    env = make(4)
    reset(env, states(env)[:4])
    env.move_gripper(env.snapshot()["position"][torch.arange(4), target_of(env)])
    result = act(env, (0, 0, OPEN), (0, 0, CLOSED), (0, 0, CLOSED))
    assert result.rewards.tolist() == [[0, 1, 0]] * 4
    assert result.terminated.tolist() == [[False, True, False]] * 4
    assert result.executed.tolist() == [[True, True, False]] * 4, "an env stops at its end"
    assert result.success.all()


def test_grasping_another_block_ends_the_episode_without_reward():
    env = make(4)
    reset(env, states(env)[:4])
    wrong = (target_of(env) + 1) % 3
    env.move_gripper(env.snapshot()["position"][torch.arange(4), wrong])
    result = act(env, (0, 0, CLOSED))
    assert result.terminated.all()
    assert not result.success.any()
    assert result.rewards.sum() == 0


def test_closing_over_a_plate_or_over_nothing_does_not_end_anything():
    env = make(4)
    reset(env, states(env)[:4])
    above(env, 3)
    assert not act(env, (0, 0, CLOSED)).terminated.any()


def test_letting_go_over_the_named_plate_succeeds_and_elsewhere_fails():
    env = make(4)
    puts = states(env)[4:8]
    reset(env, puts)
    env.move_gripper(env.snapshot()["position"][torch.arange(4), target_of(env)])
    held = act(env, (0, 0, CLOSED))
    assert not held.terminated.any()
    assert not held.success.any()
    assert not act(env, (0, 0, OPEN), (0, 0, CLOSED)).terminated.any(), "one opening step does not let go"
    assert act(env, (0, 0, OPEN), (0, 0, OPEN)).rewards[:, 1].sum() == 4
    reset(env, puts)
    lost = act(env, (0, 0, OPEN), (0, 0, OPEN))
    assert lost.terminated[:, 1].all()
    assert not lost.success.any()


def test_tolerance_is_a_square_around_the_thing():
    env = make(1)
    for offset, expected in (((0.9, 0.9), True), ((1.1, 0.0), False)):
        reset(env, states(env)[:1])
        place = env.snapshot()["position"][torch.arange(1), target_of(env)]
        # Toward the table's middle, where nothing stops the gripper.
        env.move_gripper(place - place.sign() * torch.tensor([offset]) * TOLERANCE)
        assert bool(act(env, (0, 0, CLOSED)).success[0]) is expected


def test_moves_are_speed_times_action_right_and_up():
    env = make(1)
    before = reset(env, states(env)[:1]).state
    after = act(env, (1, -0.5, OPEN)).obs.state
    assert (after - before)[0, :2].tolist() == pytest.approx([SPEED, -SPEED / 2], abs=1e-6)


def test_envs_that_run_on_after_their_end_are_paid_once_and_report_it_once():
    env = make(2)
    reset(env, states(env)[:2])
    env.move_gripper(env.snapshot()["position"][torch.arange(2), target_of(env)])
    result = act(env, (0, 0, CLOSED), (0, 0, OPEN), (0, 0, OPEN), (0, 0, CLOSED), stop=False)
    assert result.executed.all()
    assert result.rewards.tolist() == [[1, 0, 0, 0]] * 2
    assert result.succeeded.tolist() == [[True, True, False, True]] * 2


def test_inactive_envs_are_untouched():
    env = make(2)
    reset(env, states(env)[:2])
    before = env.snapshot()
    actions = torch.ones(2, 3, 3)
    result = env.chunk_step(actions, np.array([False, True]), True)
    after = env.snapshot()
    assert all(np.array_equal(before[name][0], after[name][0]) for name in before)
    assert not result.executed[0].any()
    assert result.executed[1].any()


@pytest.mark.parametrize("split", ["train", "eval"])
def test_the_expert_solves_every_scene_in_three_chunks(split: str):
    env = make(200)
    reset(env, states(env, split)[:200])
    active = np.ones(200, bool)
    for _ in range(3):
        result = env.chunk_step(env.expert_chunk(), active, True)
        active &= ~result.terminated.any(1).numpy()
    assert result.success.all()


def test_the_expert_changes_nothing():
    env = make(4)
    reset(env, states(env)[:4])
    before = env.snapshot()
    chunk = env.expert_chunk()
    assert chunk.shape == (4, 4, 3)
    assert chunk.abs().max() <= 1
    assert all(np.array_equal(before[name], value) for name, value in env.snapshot().items())


def test_splits_are_large_and_share_no_scene():
    env = make(1)
    train, evaluation = env.reset_states("train"), env.reset_states("eval")
    assert len(train) >= 2000
    assert len(evaluation) >= 200
    assert not {s.id for s in train} & {s.id for s in evaluation}
    a, b = split_scenes("train").position[:, :3], split_scenes("eval").position[:, :3]
    closest = np.abs(a[:, None] - b[None]).max((2, 3)).min()
    assert closest > 0, "no layout of one split occurs in the other"
    with pytest.raises(ValueError, match="no split 'test'; splits: train, eval"):
        env.reset_states("test")


def test_scenes_keep_distance_and_name_one_thing():
    scenes = split_scenes("eval")
    things = scenes.position[:, :3]
    gaps = np.abs(things[:, :, None] - things[:, None]).max(-1) + 9 * np.eye(3)
    assert gaps.min() >= GAP
    assert np.abs(things).max() <= REACH
    env_ids = np.arange(len(scenes))
    wanted = np.array([task.colour for task in TASKS])[scenes.task]
    assert (scenes.colour[env_ids, scenes.target] == wanted).all()
    assert all(len(set(env_id)) == 3 for env_id in scenes.colour[:, :3].tolist()), "three colours to choose from"
    assert set(np.bincount(scenes.target, minlength=3)) != {0}
    assert set(scenes.colour.flatten().tolist()) == set(range(len(COLOURS)))


def test_a_state_is_the_same_scene_in_any_env_batch_and_process():
    one, other = make(8), make(3, tasks=("pick_blue", "put_green"))
    ids = states(other)[:3]
    a = one.reset(np.array([7, 2, 4]), np.array(ids), np.array([1, 2, 3]))
    b = other.reset(np.arange(3), np.array(ids), np.array([9, 9, 9]))
    assert a.instructions == b.instructions
    assert torch.equal(a.state, b.state)
    assert all(torch.equal(a.images[name], b.images[name]) for name in a.images)


def test_same_actions_give_bit_identical_results():
    first, second = make(8), make(8)
    actions = torch.rand(3, 8, 4, 3) * 2 - 1
    for env in (first, second):
        reset(env, states(env)[:8])
    for chunk in actions:
        results = [env.chunk_step(chunk, np.ones(8, bool), False) for env in (first, second)]
        assert same(*results)


def test_a_snapshot_continues_where_it_left_off():
    env, other = make(8), make(8)
    reset(env, states(env)[:8])
    act(env, (1, 1, OPEN))
    other.restore(env.snapshot())
    assert same(act(env, (1, 0, CLOSED)), act(other, (1, 0, CLOSED)))


def test_images_show_the_scene():
    env = make(8, image_size=48)
    obs = reset(env, states(env)[:8])
    assert list(obs.images) == ["overhead", "wrist"] == list(env.info.cameras)
    for image in obs.images.values():
        assert image.shape == (8, 48, 48, 3)
        assert image.dtype == torch.uint8
        assert image.is_contiguous()
    x, y = env.snapshot()["position"][0, 0].tolist()
    column, env_id = int((x + 1) * 24), int((1 - y) * 24)
    colour = env.snapshot()["colour"][0, 0]
    from vla_rl.plugins.envs.tabletop import render

    assert obs.images["overhead"][0, env_id, column].tolist() == list(render.COLOURS[colour])
    moved = act(env, (1, 0, OPEN)).obs
    assert not torch.equal(moved.images["wrist"], obs.images["wrist"])


def test_tasks_can_be_chosen_and_step_limit_is_reported():
    env = make(2, tasks=("put_red",), max_steps=12)
    assert [(t.name, t.instruction, t.max_steps) for t in env.info.tasks] == [
        ("put_red", "put the block on the red plate", 12)
    ]
    assert {s.task for s in env.reset_states("train")} == {"put_red"}
    assert set(reset(env, states(env)[:2]).instructions) == {"put the block on the red plate"}


def test_it_keeps_the_promises_of_a_simulator(check_env):
    check_env(plugin, TabletopConfig(), expert_success=1.0)


def test_config_and_shapes_are_checked():
    with pytest.raises(ValueError, match="no tabletop task 'pick_pink'; tasks: pick_red"):
        TabletopConfig(tasks=("pick_pink",))
    env = make(2)
    reset(env, states(env)[:2])
    with pytest.raises(ValueError, match=r"actions \[2, C, 3\] .* got \[2, 4, 2\]"):
        env.chunk_step(torch.zeros(2, 4, 2), np.ones(2, bool), True)
    with pytest.raises(ValueError, match="no state 999999"):
        reset(env, [0, 999999])
    assert len({field.name for field in attrs.fields(TabletopConfig)} & {"type", "num_envs"}) == 0
