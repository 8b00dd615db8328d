"""N copies of one task as a batch of torch tensors: one copy on a CPU, many on a GPU. Meshes are simplified for
rendering: a Panda arm has 135,000 triangles, which take nine tenths of a CPU's rendering time of a small image."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import lru_cache, partial
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from attrs import field, frozen
from torch import Tensor

from vla_rl.core.types import Array
from vla_rl.plugins.envs.maniskill.checks import registered_tasks
from vla_rl.toolkit.envs.meshes import MANY, cells_for, cluster_vertices, normals_of


@frozen(kw_only=True)
class SceneRecipe:
    """Settings from which a task's simulator is built. Picklable."""

    task: str
    control_mode: str | None = None
    """Controller; None: the robot's first."""
    cameras: Mapping[str, Mapping[str, Any]] = field(factory=dict)
    """Camera -> changes to ManiSkill's settings of it; other cameras are not rendered."""
    dense: bool = False
    """Whether the reward is ManiSkill's normalized_dense, else success as 0 or 1."""
    show_goals: bool = True
    fast_render: bool = False
    goals_in_state: bool = False
    robot: str | None = None
    """Robot by ManiSkill's name; None: the task's own."""
    imports: tuple[str, ...] = ()
    """Modules that register tasks."""
    kwargs: Mapping[str, Any] = field(factory=dict)
    """Further arguments of the task's class."""
    own_instruction: bool = True
    """Whether the policy gets the task's own instruction where it has one, not that of the spec."""
    placements: int = 0
    """Number of fixed placements among which the task chooses; 0: it draws placements at random."""


@frozen
class SimulationDevices:
    """Devices of a simulator, by ManiSkill's names."""

    physics: str = "physx_cpu"
    render: str = "cpu"


class Stream:
    """Private random stream, for the CPU and on a GPU the device's generator, for tasks that draw from torch's global
    generators, which stay unchanged."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seed_generators(0)

    def seed_generators(self, seed: int) -> None:
        devices = {"cpu", str(self._device)}
        states = {name: torch.Generator(name).manual_seed(seed).get_state() for name in devices}
        self._host = states.pop("cpu")
        self._gpu = next(iter(states.values()), None)

    @contextmanager
    def drawn_from(self) -> Iterator[None]:
        """Make the global generators draw from this stream inside the context."""
        host = torch.get_rng_state()
        torch.set_rng_state(self._host)
        if self._gpu is not None:
            gpu = torch.cuda.get_rng_state(self._device)
            torch.cuda.set_rng_state(self._gpu, self._device)
        try:
            yield
        finally:
            self._host = torch.get_rng_state()
            torch.set_rng_state(host)
            if self._gpu is not None:
                self._gpu = torch.cuda.get_rng_state(self._device)
                torch.cuda.set_rng_state(gpu, self._device)


class PlannedEpisode(NamedTuple):
    """Result of one action in each env instance."""

    reward: Tensor
    """float32 [N]."""
    success: Tensor
    """bool [N]."""
    ended: Tensor
    """bool [N]: the episode ended, by success or failure."""


class SavedScene(NamedTuple):
    """Saved state of all env instances."""

    bodies: dict[str, Any]
    """State in the form of ManiSkill's `get_state_dict`: poses and velocities of objects, joints of robots."""
    kept: tuple[dict[str, Tensor], ...]
    """Tensors that the task and the robots' controllers keep for each env instance."""


class ManiSkillScene:
    """Simulator of N copies of one task. Images are rendered only when they are asked for."""

    def __init__(self, recipe: SceneRecipe, place: SimulationDevices, num_envs: int = 1) -> None:
        spec = _register_tasks_once(recipe.imports)[recipe.task]
        kind = _reduce_task_class(spec.cls, recipe)
        self.recipe = recipe
        self.num_envs = num_envs
        self.env: Any = kind(
            num_envs=num_envs,
            obs_mode=_image_mode(kind.SUPPORTED_OBS_MODES),
            reward_mode=_choose_reward_mode(kind.SUPPORTED_REWARD_MODES, recipe.dense),
            control_mode=recipe.control_mode,
            sim_backend=place.physics,
            render_backend=place.render,
            sensor_configs=deepcopy(dict(recipe.cameras)),
            **spec.default_kwargs,
            **({} if recipe.robot is None else {"robot_uids": recipe.robot}),
            **recipe.kwargs,
        )
        self.device: torch.device = self.env.device
        self._info: Mapping[str, Any] = self.env.get_info()
        self._stream = Stream(self.device)

    @property
    def agents(self) -> list[Any]:
        """Robots, in the order of their parts in an action."""
        return getattr(self.env.agent, "agents", None) or [self.env.agent]

    def bounds(self) -> tuple[list[float], list[float]]:
        """Return the lower and the upper bounds of an action."""
        spaces = [agent.single_action_space for agent in self.agents]
        return [float(x) for s in spaces for x in s.low], [float(x) for s in spaces for x in s.high]

    def reset(self, env_id: int, number: int, seed: int) -> None:
        """Start instance `env_id` again from ManiSkill's seed (or the placement) `number`, whatever happened before.
        `seed` determines what the task draws in later steps, such as the noise of a camera.

        On a CPU the scene is built again: PhysX remembers contacts, so that an episode in a used scene differs now and
        then. On a GPU the instances share the scene, and such differences remain.
        """
        options: dict[str, Any] = {"reconfigure": True}
        if self.device.type != "cpu":
            options = {"env_idx": torch.tensor([env_id], device=self.device)}
        if self.recipe.placements:
            options["episode_id"] = torch.tensor([number], device=self.device)
        gymnasium.Env.reset(self.env, seed=number)  # ManiSkill leaves out this generator, which some tasks draw from
        others = [i for i in range(self.num_envs) if i != env_id]
        saved_tensors = self._saved_tensors()
        # One instance at a time with one seed for all: ManiSkill draws for a batch from the seed of its first instance.
        _, info = self.env.reset(seed=[number] * self.num_envs, options=options)
        self._info = info
        self._stream.seed_generators(seed)
        self._restore_tensors(saved_tensors, others)  # a reset sets up the controllers of all instances

    def step(self, actions: Tensor) -> PlannedEpisode:
        """Apply one action to each instance, float32 [N, A]."""
        with self._stream.drawn_from():
            _, reward, _, _, info = self.env.step(self._for_agents(actions.to(self.device)))
        self._info = info
        success = info["success"].reshape(self.num_envs).bool()
        failed = info["fail"].reshape(self.num_envs).bool() if "fail" in info else torch.zeros_like(success)
        return PlannedEpisode(reward.float() if self.recipe.dense else success.float(), success, success | failed)

    def images(self) -> dict[str, Tensor]:
        """Return the images: camera -> uint8 [N, H, W, 3]."""
        data = self.env._get_obs_sensor_data()
        return {name: data[name]["rgb"].clone() for name in self.recipe.cameras}

    def state(self) -> Tensor:
        """Return proprioception, float32 [N, S]: joint positions of each robot [rad, m]; then, of those with a hand,
        its position [m] and quaternion (w first) in the world; with `goals_in_state` the goal's position [m]."""
        joints = [agent.robot.get_qpos() for agent in self.agents]
        hands = [getattr(agent, "tcp_pose", None) for agent in self.agents]
        parts = joints + [hand.raw_pose for hand in hands if hand is not None]
        if self.recipe.goals_in_state:
            extra = self.env._get_obs_extra(self.env.get_info())
            parts.append(extra.get("goal_pos", torch.zeros(self.num_envs, 3, device=self.device)))
        return torch.cat(parts, dim=1).float()

    def instructions(self) -> list[str] | None:
        """Return the task's own instructions, one per instance, or None if it has none or the spec gives another one:
        what `get_language_instruction` returns, or `language_instruction` in the info of the last reset or action."""
        if not self.recipe.own_instruction:
            return None
        instruction_of = getattr(self.env, "get_language_instruction", None)
        # Not from a new `get_info`: tasks count what happens in it.
        words = self._info.get("language_instruction") if instruction_of is None else instruction_of()
        return [words] * self.num_envs if isinstance(words, str) else words and list(words)

    def save(self) -> SavedScene:
        return SavedScene(_clone_tensors(self.env.get_state_dict()), self._saved_tensors())

    def restore(self, saved: SavedScene, env_ids: Sequence[int]) -> None:
        """Put instances (`env_ids`) back into a saved state, which may come from another simulator of the same task."""
        index = torch.tensor(list(env_ids), device=self.device)
        self.env.set_state_dict(_envs_of(saved.bodies, index), index)
        self._restore_tensors(saved.kept, env_ids)

    def close(self) -> None:
        self.env.close()

    # --------------------------------------------------------------------------------------------------- inside

    def _for_agents(self, actions: Tensor) -> Tensor | dict[str, Tensor]:
        named = getattr(self.env.agent, "agents_dict", None)
        if named is None:
            return actions
        sizes = [agent.single_action_space.shape[0] for agent in self.agents]
        return dict(zip(named, actions.split(sizes, dim=1), strict=True))

    def _keepers(self) -> Iterator[Any]:
        """Yield the objects that keep state for each instance."""
        yield self.env
        for agent in self.agents:
            yield from getattr(agent.controller, "controllers", {"": agent.controller}).values()

    def _saved_tensors(self) -> tuple[dict[str, Tensor], ...]:
        return tuple(
            {name: tensor.clone() for name, tensor, _ in _env_tensors(keeper, self.num_envs)}
            for keeper in self._keepers()
        )

    def _restore_tensors(self, saved_tensors: Sequence[Mapping[str, Tensor]], env_ids: Sequence[int]) -> None:
        if not env_ids:
            return
        for saved, keeper in zip(saved_tensors, self._keepers(), strict=True):
            for name, tensor, replace in list(_env_tensors(keeper, self.num_envs)):
                if name in saved:
                    merged = tensor.clone()
                    merged[list(env_ids)] = saved[name][list(env_ids)]
                    replace(merged)


@lru_cache(maxsize=1)
def _register_tasks_once(imports: tuple[str, ...]) -> Mapping[str, Any]:
    """Return `registered_tasks(imports)` once, and exclude what was imported from garbage collection: ManiSkill
    collects whenever it builds a scene, which takes a quarter of a second with torch loaded."""
    tasks = registered_tasks(imports)
    gc.collect()
    gc.freeze()
    return tasks


def _reduce_task_class(kind: Any, recipe: SceneRecipe) -> Any:
    """Return the task's class without its own observations and without cameras that are not asked for."""

    class Quiet(kind):
        def get_obs(self, info: Any = None, unflattened: bool = False) -> dict[str, Any]:
            return {}

        def _setup_sensors(self, options: Any) -> None:
            super()._setup_sensors(options)
            if recipe.fast_render and recipe.cameras:
                cells = cells_for(max(max(c["width"], c["height"]) for c in recipe.cameras.values()))
                for scene in self.scene.sub_scenes:
                    simplify_meshes(scene, cells)
            if recipe.show_goals:
                self._hidden_objects.clear()
            for name in set(self._sensors) - set(recipe.cameras):
                del self._sensors[name]

    return Quiet


def _image_mode(modes: Sequence[str]) -> str:
    """Return the observation mode that renders colours and as little else as the task allows."""
    if "any_textures" in modes or "rgb" in modes:
        return "rgb"
    return next(mode for mode in modes if mode.startswith("rgb"))


def _choose_reward_mode(modes: Sequence[str], dense: bool) -> str:
    if dense:
        return "normalized_dense"
    return "none" if "none" in modes else "sparse"


def _env_tensors(keeper: Any, num_envs: int) -> Iterator[tuple[str, Tensor, Callable[[Tensor], None]]]:
    """Yield the tensors that an object keeps for each instance, in dictionaries and poses too: name, tensor, and a
    function that replaces it."""
    for name, value in vars(keeper).items():
        if isinstance(value, dict):
            entries = [(f"{name}/{part}", tensor, partial(value.__setitem__, part)) for part, tensor in value.items()]
        elif hasattr(value, "raw_pose"):
            entries = [(name, value.raw_pose, partial(setattr, value, "raw_pose"))]
        else:
            entries = [(name, value, partial(setattr, keeper, name))]
        for where, tensor, replace in entries:
            if isinstance(tensor, Tensor) and tensor.ndim and len(tensor) == num_envs:
                yield where, tensor, replace


def _clone_tensors(nested: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _clone_tensors(part) if isinstance(part, Mapping) else part.clone() for name, part in nested.items()}


def _envs_of(nested: Mapping[str, Any], env_ids: Tensor) -> dict[str, Any]:
    return {
        name: _envs_of(part, env_ids) if isinstance(part, Mapping) else part[env_ids] for name, part in nested.items()
    }


_MADE: dict[tuple[str, tuple[float, ...], int, int], tuple[Array, Array, Array]] = {}
"""Cache of simplified meshes by file, scale, part and cells: scenes are built again at each reset."""
_MANY_FACES: dict[str, bool] = {}
"""Cache by file: whether its mesh has many triangles and no textures."""


def simplify_meshes(scene: Any, cells: int) -> None:
    """Simplify the meshes that a SAPIEN scene draws. Shapes with textures and collision shapes stay as they are.

    Args:
        cells: resolution, as `cluster_vertices` takes it.
    """
    from sapien import render

    for entity in scene.entities:
        body = entity.find_component_by_type(render.RenderBodyComponent)
        if body is None or not any(map(_has_many_faces, body.render_shapes)):
            continue
        lighter = render.RenderBodyComponent()
        for shape in body.render_shapes:
            for part in _simplify_shape(shape, cells) if _has_many_faces(shape) else [shape.clone()]:
                lighter.attach(part)
        lighter.visibility, lighter.shading_mode = body.visibility, body.shading_mode
        entity.remove_component(body)
        entity.add_component(lighter)


def _has_many_faces(shape: Any) -> bool:
    from sapien import render

    if not isinstance(shape, render.RenderShapeTriangleMesh) or not shape.filename:
        return False
    if shape.filename not in _MANY_FACES:
        many = sum(len(part.triangles) for part in shape.parts) > MANY
        plain = all(part.material.base_color_texture is None for part in shape.parts)
        _MANY_FACES[shape.filename] = many and plain
    return _MANY_FACES[shape.filename]


def _simplify_shape(shape: Any, cells: int) -> list[Any]:
    from sapien import render

    lighter_parts, scale = [], np.asarray(shape.scale)
    for i, part in enumerate(shape.parts):
        key = (shape.filename, tuple(scale.tolist()), i, cells)
        if key not in _MADE:
            vertices, triangles = np.asarray(part.vertices) * scale, np.asarray(part.triangles, np.int64)
            mesh = cluster_vertices(vertices, triangles, cells)
            _MADE[key] = mesh.vertices, mesh.triangles.astype(np.uint32), normals_of(vertices, triangles, mesh)
        points, corners, normals = _MADE[key]
        if len(corners):
            none = np.zeros((len(points), 2), np.float32)
            lighter = render.RenderShapeTriangleMesh(points, corners, normals, none, part.material)
            lighter.local_pose = shape.local_pose
            lighter_parts.append(lighter)
    return lighter_parts
