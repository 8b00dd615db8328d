"""ManiSkill as a simulator plugin: properties of the chosen tasks, and env instances on CPUs or a batch on a GPU. On a
CPU each has one simulator of its current task. Those of a batch are copies of one task in a single simulator and step
together, and tensors stay on its device."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from attrs import evolve, frozen
from torch import Tensor

from vla_rl.core.contexts import EnvContext
from vla_rl.core.errors import UserError, did_you_mean
from vla_rl.core.hookspecs import SimEnv
from vla_rl.core.installation import OWN_DIST
from vla_rl.core.requirements import install_command
from vla_rl.core.types import Array, ChunkResult, EnvInfo, Observation, ResetState, TaskInfo, to_numpy
from vla_rl.plugins.envs.maniskill.checks import WRIST_CAMERA, check_task, registered_tasks
from vla_rl.plugins.envs.maniskill.config import ManiSkillConfig, chosen_tasks
from vla_rl.plugins.envs.maniskill.expert import rehearse_chunk
from vla_rl.plugins.envs.maniskill.scene import ManiSkillScene, SavedScene, SceneRecipe, SimulationDevices
from vla_rl.plugins.envs.maniskill.tasks import IDS_PER_TASK, INSTRUCTIONS, states_of
from vla_rl.toolkit.envs.rendering import require_rendering
from vla_rl.toolkit.envs.single_env import Outcome, SingleEnv, View
from vla_rl.toolkit.envs.subproc_envs import SubprocEnvs
from vla_rl.toolkit.envs.vulkan import use_unpacked_driver


@frozen(kw_only=True)
class TaskProperties:
    """Properties of a task, read from its simulator."""

    recipe: SceneRecipe
    info: TaskInfo
    state_dim: int
    low: tuple[float, ...]
    high: tuple[float, ...]
    chooses_things: bool
    """Whether the objects, not only their positions, differ between episodes: they are loaded with the scene."""
    goals_drawn: bool
    """Whether the task has goal markers that ManiSkill would hide."""


def make_env(config: ManiSkillConfig, context: EnvContext) -> SimEnv:
    on_gpu = config.backend == "gpu" or (config.backend == "auto" and context.device.startswith("cuda"))
    if on_gpu and not torch.cuda.is_available():
        raise UserError("maniskill: backend: gpu needs a CUDA device, and torch sees none; take backend: cpu")
    place = _choose_devices(context.device, on_gpu)
    apart = context.num_envs > 1 if config.processes.apart is None else config.processes.apart
    tasks = _probe_in_subprocess(config, place) if apart or on_gpu else probe_tasks(config, place)
    info, recipes = _build_info(tasks), tuple(task.recipe for task in tasks)
    states = {split: _list_states(split, config, tasks) for split in ("train", "eval")}
    if not on_gpu:
        return SubprocEnvs(info, states, MakeManiSkillEnv(recipes, place, os.getpid()), context, config.processes)
    if len(tasks) > 1:
        raise UserError(f"maniskill: backend: gpu plays one task, the spec has {len(tasks)}; take backend: cpu")
    if tasks[0].chooses_things:
        name = tasks[0].info.name
        raise UserError(
            f"maniskill: {name} loads other things for each episode, which a batch cannot; take backend: cpu"
        )
    if config.fast_render:
        raise UserError(
            "maniskill: fast_render is for scenes of one env, on processors; leave it out with backend: gpu"
        )
    info = evolve(info, deterministic=False)  # PhysX on a GPU sums in any order
    return BatchEnv(info, states, ManiSkillScene(recipes[0], place, context.num_envs), place, context.chunk)


def check_simulator(config: ManiSkillConfig) -> None:
    """Raise UserError unless SAPIEN can draw on this machine and the tasks can be built as the settings say. SAPIEN is
    not loaded into this process."""
    if find_spec("mani_skill") is None:
        raise UserError(f"maniskill needs the package 'mani_skill'; try: {install_command(OWN_DIST, 'maniskill')}")
    use_unpacked_driver()
    require_rendering("vulkan", "maniskill")
    _build_info(_probe_in_subprocess(config, _choose_devices("cpu", on_gpu=False)))


def _choose_devices(device: str, on_gpu: bool) -> SimulationDevices:
    """Return the devices of physics and rendering. Rendering is on a GPU wherever there is one, since SAPIEN offers
    nothing else then."""
    index = device.removeprefix("cuda") if device.startswith("cuda") else ""
    drawing = f"sapien_cuda{index}" if torch.cuda.is_available() else "cpu"
    return SimulationDevices(physics=f"physx_cuda{index}" if on_gpu else "physx_cpu", render=drawing)


def _probe_in_subprocess(config: ManiSkillConfig, place: SimulationDevices) -> list[TaskProperties]:
    """Return the properties of the tasks, read in a subprocess whose end frees all memory. PhysX on a GPU also has to
    be the first simulator of its process."""
    forkserver = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(1, mp_context=forkserver) as pool:
        try:
            return pool.submit(probe_tasks, config, place).result()
        except UserError as exc:
            raise UserError(str(exc)) from None  # without the traceback of the other process
        except BrokenProcessPool as exc:
            names = ", ".join(chosen_tasks(config))
            raise UserError(f"maniskill: a process that built {names} ended at once; is there enough memory?") from exc


def probe_tasks(config: ManiSkillConfig, place: SimulationDevices) -> list[TaskProperties]:
    """Build every task once, without rendering. Return its properties. Raise UserError for settings that it lacks."""
    properties = []
    for name in chosen_tasks(config):
        check_task(name, config.imports)
        try:
            if config.robot is not None:
                _check_offered(config.robot, _list_robots(name), f"robot for {name}")
            recipe = SceneRecipe(
                task=name,
                show_goals=False,
                goals_in_state=config.goals_in_state,
                robot=config.robot,
                imports=config.imports,
                kwargs=config.kwargs,
            )
            scene = ManiSkillScene(recipe, evolve(place, physics="physx_cpu"))
        except UserError:
            raise
        except Exception as exc:
            raise UserError(f"ManiSkill cannot build {name}: {type(exc).__name__}: {exc}") from exc
        try:
            properties.append(_properties_of(scene, config))
        finally:
            scene.close()
    return properties


def _properties_of(scene: ManiSkillScene, config: ManiSkillConfig) -> TaskProperties:
    env, name = scene.env, scene.recipe.task
    own_words = None if name in config.instructions else scene.instructions()
    words = own_words[0] if own_words else config.instructions.get(name) or INSTRUCTIONS.get(name)
    if words is None:
        raise UserError(
            f"ManiSkill's {name} has no words for a policy; say what to do, as in\n"
            f"  instructions: {{{name}: pick up the cube}}"
        )
    _check_offered(config.control_mode, scene.agents[0].supported_control_modes, f"control mode of {name}'s robot")
    for agent in scene.agents:
        agent.set_control_mode(config.control_mode)
    if "success" not in env.get_info():
        raise UserError(f"ManiSkill's {name} does not say whether it was solved, so it cannot be trained on here")
    if config.reward == "dense":
        _check_offered("normalized_dense", env.SUPPORTED_REWARD_MODES, f"reward of {name} for reward: dense")
    low, high = scene.bounds()
    if not np.isfinite(low + high).all():
        raise UserError(f"{config.control_mode} of {name} has no bounds: {low}, {high}; take another control mode")
    limit = config.max_steps or registered_tasks()[name].max_episode_steps
    if limit is None:
        raise UserError(f"ManiSkill gives {name} no step limit; set max_steps")
    placements = len(getattr(env, "xyz_configs", ())) * len(getattr(env, "quat_configs", ()))
    return TaskProperties(
        recipe=evolve(
            scene.recipe,
            control_mode=config.control_mode,
            cameras={camera: _change_camera(env, name, camera, size) for camera, size in config.cameras.items()},
            dense=config.reward == "dense",
            show_goals=config.show_goals,
            fast_render=config.fast_render,
            own_instruction=own_words is not None,
            placements=placements,
        ),
        info=TaskInfo(name=name, instruction=words, max_steps=limit, instruction_varies=own_words is not None),
        state_dim=scene.state().shape[1],
        low=tuple(low),
        high=tuple(high),
        chooses_things=env.reconfiguration_freq != 0,
        goals_drawn=config.show_goals and bool(env._hidden_objects),
    )


def _change_camera(env: Any, task: str, camera: str, size: int | None) -> dict[str, Any]:
    """Return the changes to ManiSkill's settings of a camera: the resolution, and with it a calibrated camera's matrix.
    None: the task's own resolution."""
    _check_offered(camera, env._sensor_configs, f"camera of {task}")
    sensor = env._sensor_configs[camera]
    if size is None:
        return {"width": sensor.width, "height": sensor.height}
    change: dict[str, Any] = {"width": size, "height": size}
    if sensor.intrinsic is not None:
        change["intrinsic"] = np.diag([size / sensor.width, size / sensor.height, 1.0]) @ np.asarray(sensor.intrinsic)
    return change


def _list_robots(task: str) -> list[str]:
    """Return the robots that a task is made for; a Panda with a camera in its hand counts where a Panda does."""
    from mani_skill.agents.registration import REGISTERED_AGENTS

    made_for = registered_tasks()[task].cls.SUPPORTED_ROBOTS or REGISTERED_AGENTS
    names = [robot for robot in made_for if isinstance(robot, str)]
    return [*names, *({WRIST_CAMERA} if "panda" in names else ())]


def _check_offered(name: str, known_names: Iterable[str], what: str) -> None:
    if name not in known_names:
        raise UserError(
            f"{name!r} is not a {what}{did_you_mean(name, known_names)}\n  there are: {', '.join(known_names)}"
        )


def _build_info(tasks: Sequence[TaskProperties]) -> EnvInfo:
    first = tasks[0]
    for task in tasks[1:]:
        if (task.state_dim, task.low, task.high) != (first.state_dim, first.low, first.high):
            shapes = "; ".join(f"{t.info.name}: state {t.state_dim}, actions {t.low} to {t.high}" for t in tasks)
            raise UserError(
                f"maniskill: tasks of one spec need robots alike in state and actions, these differ: {shapes}"
            )
    recipe, drawn = first.recipe, [task.info.name for task in tasks if task.goals_drawn]
    notes = {
        f"show_goals: markers that ManiSkill hides from cameras are drawn in {', '.join(drawn)}": bool(drawn),
        "fast_render: meshes are drawn simplified": recipe.fast_render,
        "goals_in_state: the state ends with the place of the goal": recipe.goals_in_state,
        f"robot: {recipe.robot} in place of the tasks' own": recipe.robot is not None,
    }
    return EnvInfo(
        cameras={name: (change["height"], change["width"]) for name, change in recipe.cameras.items()},
        state_dim=first.state_dim,
        action_low=first.low,
        action_high=first.high,
        tasks=tuple(task.info for task in tasks),
        notes=tuple(note for note, holds in notes.items() if holds),
    )


def _list_states(split: str, config: ManiSkillConfig, tasks: Sequence[TaskProperties]) -> list[ResetState]:
    count = config.eval_states if split == "eval" else config.train_states
    return [
        state
        for index, task in enumerate(tasks)
        for state in states_of(split, index, task.info.name, count, task.recipe.placements)
    ]


class BatchEnv(SimEnv):
    """Batched simulator of one task. Physics moves every env instance at each step; instances that have to stay still
    are restored afterwards."""

    def __init__(
        self,
        info: EnvInfo,
        states: Mapping[str, Sequence[ResetState]],
        scene: ManiSkillScene,
        place: SimulationDevices,
        chunk: int,
    ) -> None:
        """Create the batched simulator.

        Args:
            states: split -> its reset states.
            place: devices of `scene`, also for a second scene in which the expert plans.
        """
        self.num_envs = scene.num_envs
        self.info = info
        self._states = {split: tuple(of_split) for split, of_split in states.items()}
        self._scene = scene
        self._place = place
        self._chunk = chunk
        self._twin: ManiSkillScene | None = None

    def reset_states(self, split: str) -> tuple[ResetState, ...]:
        return self._states[split]

    def reset(self, env_ids: Any, state_ids: Any, seed: Any) -> Observation:
        """Start episodes. A state id fixes the scene. Random numbers that a few tasks draw during an episode are shared
        by all instances, and depend on the `seed` of the instance that was reset last."""
        env_ids = to_numpy(env_ids)
        for env_id, state, key in zip(env_ids, to_numpy(state_ids), to_numpy(seed), strict=True):
            self._scene.reset(int(env_id), int(state) % IDS_PER_TASK, int(key))
        return self._observe_envs().take(env_ids)

    def chunk_step(self, actions: Any, active: Any, stop_at_end: bool) -> ChunkResult:
        device = self._scene.device
        actions = torch.as_tensor(actions, dtype=torch.float32, device=device)
        moving = torch.tensor(to_numpy(active), dtype=torch.bool, device=device)
        shape = actions.shape[:2]
        rewards = torch.zeros(shape, device=device)
        succeeded, terminated, executed = torch.zeros((3, *shape), dtype=torch.bool, device=device)
        # ManiSkill steps all envs: those that are to stand still are put back afterwards.
        still = None if moving.all() else self._scene.save()
        for i in range(shape[1]):
            result = self._scene.step(actions[:, i] * moving[:, None])
            executed[:, i], rewards[:, i] = moving, result.reward * moving
            succeeded[:, i], terminated[:, i] = result.success & moving, result.ended & moving
            ended = terminated[:, i]
            if stop_at_end and ended.any():
                still = _merge_scenes(still, self._scene.save(), ended)
                moving = moving & ~ended
                if not moving.any():
                    break
        if still is not None:
            self._scene.restore(still, torch.nonzero(~moving)[:, 0].tolist())
        last = (executed.sum(1) - 1).clip(min=0)
        return ChunkResult(
            obs=self._observe_envs(),
            rewards=rewards,
            terminated=terminated,
            truncated=torch.zeros_like(terminated),
            executed=executed,
            success=succeeded.gather(1, last[:, None])[:, 0],
            succeeded=succeeded,
        )

    def expert_chunk(self) -> Tensor:
        """Return the expert's next chunk. Raise UserError for a task without an expert."""
        if self._twin is None:
            self._twin = ManiSkillScene(evolve(self._scene.recipe, cameras={}), self._place, self.num_envs)
        return rehearse_chunk(self._twin, self._scene.save(), self._chunk)

    def close(self) -> None:
        for scene in (self._scene, self._twin):
            if scene is not None and scene.env.scene is not None:
                scene.close()

    def _observe_envs(self) -> Observation:
        scene = self._scene
        words = scene.instructions() or [self.info.tasks[0].instruction] * self.num_envs
        return Observation(images=scene.images(), instructions=tuple(words), state=scene.state())


def _merge_scenes(old: SavedScene | None, new: SavedScene, chosen: Tensor) -> SavedScene:
    """Return the old state with these envs (bool [N]) replaced by those of the new one."""
    return (
        new
        if old is None
        else SavedScene(
            _merge_tensors(old.bodies, new.bodies, chosen),
            tuple(_merge_tensors(one, other, chosen) for one, other in zip(old.kept, new.kept, strict=True)),
        )
    )


def _merge_tensors(old: Mapping[str, Any], new: Mapping[str, Any], chosen: Tensor) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for name, tensor in new.items():
        if isinstance(tensor, Mapping):
            merged[name] = _merge_tensors(old[name], tensor, chosen)
        else:
            merged[name] = torch.where(chosen.view(-1, *[1] * (tensor.ndim - 1)), tensor, old.get(name, tensor))
    return merged


@frozen
class MakeManiSkillEnv:
    """Factory that creates env instances in their processes."""

    recipes: tuple[SceneRecipe, ...]
    """Recipes of the tasks, in the order of the spec."""
    place: SimulationDevices
    owner_pid: int
    """Process id of the process that owns the batch."""

    def __call__(self, number: int) -> ManiSkillEnv:
        if os.getpid() != self.owner_pid:
            torch.set_num_threads(1)  # envs are many, and their tensors tiny
        return ManiSkillEnv(self.recipes, self.place)


class ManiSkillEnv(SingleEnv):
    """Env instance that builds a task's simulator at its first reset, and again when the task changes. Everything runs
    in inference mode: a step is hundreds of operations on tiny tensors."""

    def __init__(self, recipes: Sequence[SceneRecipe], place: SimulationDevices) -> None:
        self._recipes = recipes
        self._place = place
        self._scene: Any = None
        self._twin: Any = None

    @torch.inference_mode()
    def reset(self, state_id: int, seed: int) -> None:
        """Start an episode. The state id fixes the scene; `seed` determines what a few tasks draw during an episode."""
        index, number = divmod(state_id, IDS_PER_TASK)
        if self._scene is None or self._scene.recipe != self._recipes[index]:
            scene = ManiSkillScene(
                self._recipes[index], self._place
            )  # built before the old one is closed, which would discard the compiled shaders
            self.close()
            self._scene = scene
        self._scene.reset(0, number, seed)

    @torch.inference_mode()
    def step(self, action: Array) -> Outcome:
        result = self._scene.step(torch.tensor(action)[None])
        success, ended = bool(result.success), bool(result.ended)
        return Outcome(float(result.reward), success, terminated=ended)

    @torch.inference_mode()
    def render(self) -> View:
        images = {name: to_numpy(image)[0] for name, image in self._scene.images().items()}
        words = self._scene.instructions()
        return View(images, to_numpy(self._scene.state())[0], words[0] if words else None)

    @torch.inference_mode()
    def expert_chunk(self, length: int) -> Array:
        """Return the actions that the closed-loop expert takes in the next steps if nothing disturbs it. They are found
        in a second simulator: going back to an earlier state leaves traces in PhysX."""
        if self._twin is None:
            self._twin = ManiSkillScene(evolve(self._scene.recipe, cameras={}), self._place)
        actions: Array = to_numpy(rehearse_chunk(self._twin, self._scene.save(), length))[0]
        return actions

    def close(self) -> None:
        for scene in (self._scene, self._twin):
            if scene is not None:
                scene.close()
        self._scene = self._twin = None
