"""Real ManiSkill on a processor, at 64 pixels: PickCube-v1, one env in this process unless a test says otherwise."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vla_rl.core.contexts import EnvContext
from vla_rl.core.errors import UserError
from vla_rl.core.types import Array, ChunkResult, Observation, to_numpy
from vla_rl.plugins.envs.maniskill import plugin
from vla_rl.plugins.envs.maniskill.config import ManiSkillConfig
from vla_rl.plugins.envs.maniskill.env import BatchEnv
from vla_rl.plugins.envs.maniskill.scene import ManiSkillScene, SimulationDevices
from vla_rl.plugins.envs.maniskill.tasks import states_of
from vla_rl.testing import check_env
from vla_rl.toolkit.envs import vulkan as driver
from vla_rl.toolkit.envs.rendering import require_rendering
from vla_rl.toolkit.envs.settings import Processes

if find_spec("mani_skill") is None:
    pytest.skip("needs ManiSkill: pip install -e '.[maniskill]'", allow_module_level=True)

SIZE, CHUNK = 64, 8
ONE_ENV, ON = np.array([0]), np.array([True])


@pytest.fixture(scope="module")
def vulkan() -> None:
    driver.use_unpacked_driver()
    try:
        require_rendering("vulkan", "maniskill")
    except UserError as exc:
        pytest.skip(str(exc))


def make(num_envs: int = 1, **changes: Any) -> Any:
    config = {"task": "PickCube-v1", "cameras": {"base_camera": SIZE}} | changes
    return plugin.build(ManiSkillConfig(**config), EnvContext(num_envs=num_envs, chunk=CHUNK))


@pytest.fixture(scope="module")
def env(vulkan: None) -> Iterator[Any]:
    """Kept through the module: what was compiled for drawing goes with the last simulator of a process."""
    env = make()
    env.reset(ONE_ENV, ONE_ENV, ONE_ENV)
    yield env
    env.close()


def pressing(seed: int) -> Array:
    """Actions that press the hand down onto the table and the cube: float32 [1, 32, 7]."""
    actions = np.random.default_rng(seed).uniform(-1, 1, (1, 4 * CHUNK, 7)).astype(np.float32)
    actions[..., :3] *= 0.7
    actions[..., 2] = -0.5
    return actions


def play(env: Any, state_id: int, actions: Array) -> list[Any]:
    seen = [env.reset(ONE_ENV, np.array([state_id]), ONE_ENV)]
    return seen + [env.chunk_step(actions[:, i : i + CHUNK], ON, False).obs for i in range(0, actions.shape[1], CHUNK)]


def same(one: Observation, other: Observation) -> bool:
    pairs = [(one.images[name], other.images[name]) for name in one.images] + [(one.state, other.state)]
    return all(np.array_equal(to_numpy(a), to_numpy(b)) for a, b in pairs)


def scene_of(env: Any) -> Any:
    return env.inline_env(0)._scene


# ------------------------------------------------------------------------------------------------- episodes


@pytest.mark.sim
def test_it_keeps_to_the_contract(env: Any) -> None:
    config = ManiSkillConfig(
        task="PickCube-v1", cameras={"base_camera": SIZE}, train_states=50, processes=Processes(apart=False)
    )
    check_env(plugin, config, num_envs=2, chunk=6, expert_success=1.0, seconds=10)


@pytest.mark.sim
def test_a_state_gives_the_same_episode_whatever_went_before(env: Any) -> None:
    """In a scene that was used before, PhysX's memory of contacts made one in nine of such episodes differ."""
    seen: dict[int, list[Any]] = {}
    for state in [5, 3, 3, 1, 0, 3, 4, 3, 5, 1, 3]:
        episode = play(env, state, pressing(100 + state))
        assert all(map(same, seen.setdefault(state, episode), episode)), f"state {state} played differently"
    assert not same(seen[3][0], seen[5][0])


@pytest.mark.sim
def test_an_episode_is_that_of_maniskill_itself(env: Any) -> None:
    import gymnasium

    official = gymnasium.make(
        "PickCube-v1",
        obs_mode="rgb",
        control_mode="pd_ee_delta_pose",
        sensor_configs={"width": SIZE, "height": SIZE},
        sim_backend="physx_cpu",
        render_backend="cpu",
    )
    observation, _ = official.reset(seed=3, options={"reconfigure": True})
    actions, hidden = pressing(103), make(show_goals=False)
    ours = play(hidden, 3, actions)
    assert np.array_equal(ours[0].images["base_camera"], observation["sensor_data"]["base_camera"]["rgb"].numpy())
    for action in actions[0]:
        observation, *_ = official.step(action)
    assert np.array_equal(ours[-1].images["base_camera"], observation["sensor_data"]["base_camera"]["rgb"].numpy())
    assert np.array_equal(ours[-1].state[0, :9], observation["agent"]["qpos"][0].numpy())
    official.close()
    for state in range(3):  # goals are drawn in `env`, as green spheres
        pair = [
            one.reset(ONE_ENV, np.array([state]), ONE_ENV).images["base_camera"][0].astype(int) for one in (env, hidden)
        ]
        red, green, blue = (pair[0] - pair[1]).sum((0, 1))
        assert green > red and green > blue
    hidden.close()
    assert hidden.info.notes == ()
    assert env.info.notes == ("show_goals: markers that ManiSkill hides from cameras are drawn in PickCube-v1",)


@pytest.mark.sim
def test_a_saved_scene_continues_towards_the_targets_of_its_controller(env: Any) -> None:
    """ManiSkill's `set_state_dict` leaves them out: the hand then moves on from where it is, not from where it was
    sent."""
    first, other, bare = (make(control_mode="pd_ee_target_delta_pose", cameras={"base_camera": 16}) for _ in range(3))
    free = np.tile(np.array([0.3, -0.3, 0.6, 0, 0.2, 0, 1], np.float32), (1, 2 * CHUNK, 1))  # up, away from the cube
    first.reset(ONE_ENV, np.array([3]), ONE_ENV)
    first.chunk_step(free[:, :CHUNK], ON, False)
    saved = scene_of(first).save()
    for env_after in (other, bare):
        env_after.reset(ONE_ENV, np.array([3]), ONE_ENV)
    with torch.inference_mode():
        scene_of(other).restore(saved, [0])
        scene_of(bare).env.set_state_dict(saved.bodies)
    ends = [each.chunk_step(free[:, CHUNK:], ON, False).obs.state[0] for each in (first, other, bare)]
    assert np.abs(to_numpy(ends[1]) - to_numpy(ends[0])).max() < 1e-4
    assert np.abs(to_numpy(ends[2]) - to_numpy(ends[0])).max() > 0.02
    for each in (first, other, bare):
        each.close()


@pytest.mark.sim
def test_splits_share_no_scene(env: Any) -> None:
    train, evaluation = env.reset_states("train"), env.reset_states("eval")
    assert (len(train), len(evaluation)) == (1000, 100)
    assert not {state.id for state in train} & {state.id for state in evaluation}
    places = []
    for state in train[:10] + evaluation[:10]:
        env.reset(ONE_ENV, np.array([state.id]), ONE_ENV)
        places.append(scene_of(env).env.cube.pose.raw_pose[0].numpy())
    gaps = np.linalg.norm(np.array(places)[:, None] - np.array(places)[None], axis=-1) + np.eye(20)
    assert gaps.min() > 1e-3


def test_fixed_placements_are_split() -> None:
    train, evaluation = (states_of(split, 2, "Put", 1000, 24) for split in ("train", "eval"))
    assert [state.id for state in evaluation] == [2_000_000 + i for i in range(0, 24, 3)]
    assert sorted(state.id for state in train + evaluation) == [2_000_000 + i for i in range(24)]
    assert len(states_of("train", 0, "Put", 5, 24)) == 5
    drawn = {split: [state.id for state in states_of(split, 1, "Pick", 256, 0)] for split in ("train", "eval")}
    assert drawn == {"train": list(range(1_001_000, 1_001_256)), "eval": list(range(1_000_000, 1_000_256))}


@pytest.mark.sim
def test_a_chunk_is_drawn_once_and_leaves_generators_alone(env: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    play(env, 3, pressing(0)[:, :CHUNK])
    draw = scene_of(env).env._get_obs_sensor_data
    monkeypatch.setattr(scene_of(env).env, "_get_obs_sensor_data", lambda: drawn.append(1) or draw())
    before = torch.get_rng_state(), numpys()
    env.chunk_step(pressing(0)[:, :CHUNK], ON, False)
    assert drawn == [1]
    env.reset(ONE_ENV, np.array([3]), ONE_ENV)
    assert torch.equal(before[0], torch.get_rng_state()) and np.array_equal(before[1], numpys())


def numpys() -> Array:
    return np.random.get_state()[1].copy()  # noqa: NPY002


@pytest.mark.sim
def test_what_a_task_draws_while_it_is_played_is_keyed(env: Any) -> None:
    """SO100GraspCube-v1 moves its camera a little at every step."""
    shaky = make(task="SO100GraspCube-v1", control_mode="pd_joint_delta_pos")
    actions = np.zeros((1, CHUNK, 6), np.float32)

    def view(seed: int) -> Array:
        shaky.reset(ONE_ENV, np.array([4]), np.array([seed]))
        return shaky.chunk_step(actions, ON, False).obs.images["base_camera"]

    torch.manual_seed(1)
    first = view(7)
    torch.manual_seed(2)
    assert np.array_equal(first, view(7))
    assert not np.array_equal(first, view(8))
    shaky.close()


# --------------------------------------------------------------------------------------- rewards and experts


@pytest.mark.sim
@pytest.mark.parametrize("mode", ["pd_ee_delta_pose", "pd_ee_delta_pos"])
@pytest.mark.parametrize("task", ["PickCube-v1", "PushCube-v1", "StackCube-v1"])
def test_the_expert_solves_its_tasks(env: Any, task: str, mode: str) -> None:
    demonstrated = make(task=task, control_mode=mode, reward="dense", cameras={"base_camera": 16})
    for state in demonstrated.reset_states("train")[:3]:
        result, rewards = demonstrate(demonstrated, state.id)
        assert result.success[0] and result.terminated.any()
        assert all(0 <= reward <= 1 for reward in rewards) and len({round(reward, 3) for reward in rewards}) > 5
        assert rewards[-1] == 1.0
    demonstrated.close()


def demonstrate(env: Any, state_id: int) -> tuple[ChunkResult, list[float]]:
    env.reset(ONE_ENV, np.array([state_id]), ONE_ENV)
    rewards: list[float] = []
    while len(rewards) < env.info.tasks[0].max_steps:
        result = env.chunk_step(env.expert_chunk(), ON, True)
        rewards += result.rewards[result.executed].tolist()
        if result.terminated.any():
            break
    return result, rewards


@pytest.mark.sim
def test_the_expert_leaves_no_trace_and_success_is_the_sparse_reward(env: Any) -> None:
    state, chunks, rewards = env.reset_states("train")[0].id, [], []
    env.reset(ONE_ENV, np.array([state]), ONE_ENV)
    while not rewards or not rewards[-1]:
        chunks.append(env.expert_chunk())
        result = env.chunk_step(chunks[-1], ON, True)
        rewards += result.rewards[result.executed].tolist()
    assert rewards == [0.0] * (len(rewards) - 1) + [1.0]
    env.reset(ONE_ENV, np.array([state]), ONE_ENV)
    for chunk in chunks:
        replay = env.chunk_step(chunk, ON, True)
    assert same(result.obs, replay.obs)


@pytest.mark.sim
def test_a_task_without_expert_says_who_has_one(env: Any) -> None:
    env = make(task="PullCube-v1", cameras={"base_camera": 16})
    env.reset(ONE_ENV, ONE_ENV, ONE_ENV)
    with pytest.raises(UserError, match="no scripted expert for PullCube-v1 .* it has for: PickCube-v1, PushCube-v1"):
        env.expert_chunk()
    env.close()


# -------------------------------------------------------------------------------------------- tasks and envs


@pytest.mark.sim
def test_tasks_alike_take_turns_in_an_env(env: Any) -> None:
    two = make(task=None, tasks=("PushCube-v1", "PickCube-v1"), instructions={"PickCube-v1": "fetch"})
    assert [(t.name, t.instruction, t.max_steps) for t in two.info.tasks] == [
        ("PushCube-v1", "push the blue cube to the red and white target", 50),
        ("PickCube-v1", "fetch", 50),
    ]
    assert two.reset(ONE_ENV, np.array([3]), ONE_ENV).instructions == (
        "push the blue cube to the red and white target",
    )
    picked = two.reset(ONE_ENV, np.array([1_000_003]), ONE_ENV)
    assert picked.instructions == ("fetch",)
    assert same(picked, env.reset(ONE_ENV, np.array([3]), ONE_ENV)), "another scene of PickCube-v1 than alone"
    two.close()
    with pytest.raises(UserError, match=r"robots alike .* PickCube-v1: state 16, actions .*; PushT-v1: state 7"):
        make(task=None, tasks=("PickCube-v1", "PushT-v1"))


@pytest.mark.sim
def test_a_camera_in_the_hand_and_the_place_of_the_goal(env: Any) -> None:
    changes = {"robot": "panda_wristcam", "cameras": {"hand_camera": SIZE}, "goals_in_state": True}
    both = make(task=None, tasks=("PickCube-v1", "PushCube-v1"), **changes)
    assert both.info.state_dim == 16 + 3 and tuple(both.info.cameras) == ("hand_camera",)
    seen = both.reset(ONE_ENV, np.array([3]), ONE_ENV)
    goal = scene_of(both).env.goal_site.pose.p.numpy()
    assert np.array_equal(seen.state[:, 16:], goal) and goal[0, 2] > 0
    own = env.reset(ONE_ENV, np.array([3]), ONE_ENV).state
    assert np.array_equal(seen.state[:, :6], own[:, :6]) and np.array_equal(scene_of(env).env.goal_site.pose.p, goal)
    red, green, blue = seen.images["hand_camera"][0].reshape(-1, 3).astype(int).T
    assert ((red > 150) & (green < 60) & (blue < 60)).any(), "the hand sees the cube"
    assert not both.reset(ONE_ENV, np.array([1_000_003]), ONE_ENV).state[:, 16:].any()
    both.close()
    assert both.info.notes[-2:] == (
        "goals_in_state: the state ends with the place of the goal",
        "robot: panda_wristcam in place of the tasks' own",
    )


@pytest.mark.sim
def test_simplified_meshes_look_alike_and_nothing_else_changes(env: Any) -> None:
    changes = {"robot": "panda_wristcam", "cameras": {"base_camera": 2 * SIZE, "hand_camera": 2 * SIZE}}
    pair = [make(**changes, fast_render=fast) for fast in (False, True)]
    whole, simple = (play(one, 3, pressing(103)) for one in pair)
    for one, other in zip(whole, simple, strict=True):
        assert np.array_equal(one.state, other.state)
        for name, image in one.images.items():
            apart = np.abs(image.astype(int) - other.images[name]).max(-1)
            assert (apart > 16).mean() < 0.03, "pixels that differ"
    assert any(
        not np.array_equal(one.images["base_camera"], other.images["base_camera"])
        for one, other in zip(whole, simple, strict=True)
    )
    again = play(pair[1], 3, pressing(103))
    assert all(map(same, simple, again))
    drawn = [triangles_of(scene_of(one).env.scene.sub_scenes[0], "panda_link") for one in pair]
    assert drawn[1] < drawn[0] / 2
    assert pair[1].info.notes[-2] == "fast_render: meshes are drawn simplified"
    for one in pair:
        one.close()


def triangles_of(scene: Any, name: str) -> int:
    from sapien import render

    named = [entity for entity in scene.entities if name in entity.name]
    bodies = filter(None, (entity.find_component_by_type(render.RenderBodyComponent) for entity in named))
    return sum(len(part.triangles) for body in bodies for shape in body.render_shapes for part in shape.parts)


@pytest.mark.sim
def test_two_arms_are_one_robot(env: Any) -> None:
    pair = make(task="TwoRobotStackCube-v1", max_steps=9)
    assert (pair.info.action_dim, pair.info.state_dim, pair.info.tasks[0].max_steps) == (14, 32, 9)
    before = pair.reset(ONE_ENV, ONE_ENV, ONE_ENV).state[0]
    action = np.zeros((1, CHUNK, 14), np.float32)
    action[..., 9] = 0.5  # the second arm's hand goes up
    after = pair.chunk_step(action, ON, False).obs.state[0]
    assert after[27] - before[27] > 0.05 and abs(after[20] - before[20]) < 0.01  # z of its hand and the other's
    pair.close()


@pytest.mark.sim
def test_an_env_in_a_process(env: Any) -> None:
    there = make(processes=Processes(apart=True))
    assert same(there.reset(ONE_ENV, np.array([3]), ONE_ENV), env.reset(ONE_ENV, np.array([3]), ONE_ENV))
    there.close()


class Several:
    """Simulators of one env each, in place of one with several envs, which only a GPU can have."""

    def __init__(self, recipe: Any, place: Any, num_envs: int) -> None:
        self.scenes = [ManiSkillScene(recipe, place) for _ in range(num_envs)]
        self.recipe, self.num_envs, self.device = recipe, num_envs, torch.device("cpu")
        self.env = SimpleNamespace(scene=self)

    def reset(self, env_id: int, number: int, seed: int) -> None:
        self.scenes[env_id].reset(0, number, seed)

    def step(self, actions: Any) -> Any:
        played = [scene.step(action[None]) for scene, action in zip(self.scenes, actions, strict=True)]
        return type(played[0])(*map(torch.cat, zip(*played, strict=True)))

    def images(self) -> Any:
        return stacked([scene.images() for scene in self.scenes])

    def state(self) -> Any:
        return torch.cat([scene.state() for scene in self.scenes])

    def instructions(self) -> None:
        return None

    def save(self) -> Any:
        saved = [scene.save() for scene in self.scenes]
        bodies, kept = (list(parts) for parts in zip(*saved, strict=True))
        return type(saved[0])(stacked(bodies), tuple(map(stacked, zip(*kept, strict=True))))

    def restore(self, saved: Any, env_ids: Any) -> None:
        for env_id in env_ids:
            pick = partial(each, lambda tensor, env_id=env_id: tensor[env_id : env_id + 1])
            self.scenes[env_id].restore(type(saved)(pick(saved.bodies), tuple(map(pick, saved.kept))), [0])

    def close(self) -> None:
        self.env.scene = None
        for scene in self.scenes:
            scene.close()


def each(function: Any, nested: Any) -> Any:
    return {k: each(function, part) if isinstance(part, dict) else function(part) for k, part in nested.items()}


def stacked(parts: Any) -> Any:
    """State that all envs share: a controller on a CPU notes the pose it was last sent to, until its env is reset."""
    names = [k for k in parts[0] if all(k in part for part in parts)]
    return {k: (stacked if isinstance(parts[0][k], dict) else torch.cat)([part[k] for part in parts]) for k in names}


@pytest.fixture
def batch(env: Any) -> Iterator[Any]:
    """The component that drives a GPU, over simulators of one env each."""
    scene = scene_of(env)
    states = {split: env.reset_states(split) for split in ("train", "eval")}
    batch = BatchEnv(env.info, states, Several(scene.recipe, SimulationDevices(), 2), SimulationDevices(), CHUNK)  # type: ignore[arg-type]
    yield batch
    batch.close()


@pytest.mark.sim
def test_a_batch_keeps_to_the_contract(batch: Any) -> None:
    check_env(batch, chunk=CHUNK, expert=False, seconds=4)


@pytest.mark.sim
def test_envs_of_a_batch_that_ended_stand_still(env: Any, batch: Any) -> None:
    """Env 0 is solved in the course of a chunk, env 1 continues: each as if it were alone."""
    state, both = env.reset_states("train")[0].id, np.array([0, 1])
    env.reset(ONE_ENV, np.array([state]), ONE_ENV)
    chunks = [env.expert_chunk()]
    alone = [env.chunk_step(chunks[0], ON, True)]
    while not alone[-1].terminated.any():
        chunks.append(env.expert_chunk())
        alone.append(env.chunk_step(chunks[-1], ON, True))
    steps = int(alone[-1].executed.sum())
    assert 0 < steps < CHUNK, "this state does not end within a chunk; take another"
    batch.reset(both, np.array([state, 5]), both)
    other = play(env, 5, np.concatenate([pressing(9)[:, :CHUNK]] * len(chunks), 1))
    for i, chunk in enumerate(chunks):
        together = batch.chunk_step(np.concatenate([chunk, pressing(9)[:, :CHUNK]]), np.array([True, True]), True)
        assert same(together.obs.take(both[:1]), alone[i].obs) and same(together.obs.take(both[1:]), other[i + 1])
    assert together.executed.tolist() == [[j < steps for j in range(CHUNK)], [True] * CHUNK]
    assert together.success.tolist() == [True, False]
    assert together.rewards[0].tolist() == [float(j == steps - 1) for j in range(CHUNK)]
    idle = batch.chunk_step(np.concatenate([chunk, chunk]), np.array([False, False]), True)
    assert torch.allclose(idle.obs.state, together.obs.state, atol=1e-5)
    assert not idle.executed.any() and not idle.rewards.any()


@pytest.mark.sim
def test_a_batch_has_the_expert_too(env: Any) -> None:
    states = {split: env.reset_states(split) for split in ("train", "eval")}
    one = BatchEnv(
        env.info, states, ManiSkillScene(scene_of(env).recipe, SimulationDevices()), SimulationDevices(), CHUNK
    )
    result, rewards = demonstrate(one, states["train"][1].id)
    assert result.success.tolist() == [True] and rewards[-1] == 1.0
    assert isinstance(result.obs.images["base_camera"], torch.Tensor)
    one.close()
    one.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("task", ["PickCube-v1", "StackCube-v1"])
def test_a_batch_on_a_gpu(vulkan: None, task: str) -> None:
    """In a separate process: PhysX has to be on the GPU from its first use in a process."""
    code = f"""
import torch
from vla_rl.testing import check_env
from vla_rl.core.contexts import EnvContext
from vla_rl.plugins.envs.maniskill import plugin
from vla_rl.plugins.envs.maniskill.config import ManiSkillConfig
if __name__ == "__main__":
    config = ManiSkillConfig(task={task!r}, cameras={{"base_camera": {SIZE}}}, backend="gpu")
    env = plugin.build(config, EnvContext(num_envs=4, chunk={CHUNK}, device="cuda"))
    envs = torch.arange(4)
    seen = env.reset(envs, torch.tensor([s.id for s in env.reset_states("train")[:4]]), envs)
    assert seen.images["base_camera"].is_cuda and seen.state.is_cuda
    check_env(env, chunk={CHUNK}, seconds=10)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
