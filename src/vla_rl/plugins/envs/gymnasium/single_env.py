"""Gymnasium environments as a batch of env instances: reset states (which are seeds), one instance, and its actions as
one vector: its bounds, and its parts where the space is a dict."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from attrs import evolve, frozen
from gymnasium import spaces

from vla_rl.core.contexts import EnvContext
from vla_rl.core.errors import UserError, did_you_mean
from vla_rl.core.randomness import derived_seed, generator
from vla_rl.core.types import ActionSource, Array, EnvInfo, ResetState, TaskInfo
from vla_rl.plugins.envs.gymnasium.config import STATES, GymnasiumConfig
from vla_rl.plugins.envs.gymnasium.entries import NoEntry, find_entry, known_paths, walk_leaves
from vla_rl.plugins.envs.gymnasium.observations import check_cameras, fill_cameras, read_images, read_state, state_sizes
from vla_rl.plugins.envs.gymnasium.simulator import Environment, Generators, make_environment, step_limit
from vla_rl.toolkit.envs.mujoco_installation import require_whole_mujoco
from vla_rl.toolkit.envs.real_time import RealTime
from vla_rl.toolkit.envs.rendering import FIXES, require_rendering
from vla_rl.toolkit.envs.single_env import MakeEnv, Outcome, SingleEnv, View, env_factory
from vla_rl.toolkit.envs.subproc_envs import SubprocEnvs

HALF = 2**30
"""First seed of the train split; seeds of the eval split are below it."""
TRIED = 200
"""Most actions of a trial: with an end among them it shows whether success is reported there."""
TRIED_CHUNK = 10
"""Actions of a trial between two answers, so that `processes.deadline_s` does not count a whole episode as one hang."""
logger = logging.getLogger(__name__)


def make_envs(config: GymnasiumConfig, context: EnvContext, make_env: MakeEnv | None = None) -> SubprocEnvs:
    """Return the env instances of a spec. Raise UserError for an environment that does not exist or cannot be used.

    Args:
        make_env: factory of the instances; None: `GymnasiumEnv` with these settings.
    """
    env = make_environment(config)
    try:
        config = fill_cameras(config, env.observation_space)
        layout = action_layout(env.action_space, config)
        max_steps = step_limit(env, config)
        check_cameras(env.observation_space, config)
        sizes = state_sizes(env.observation_space, config)
    finally:
        env.close()
    name = config.id.replace("/", "-").replace(":", "-")
    task = TaskInfo(name=name, instruction=config.instruction, max_steps=max_steps)
    states = {
        split: [ResetState(id=first + i, task=task.name) for i in range(count)]
        for split, first, count in (("eval", 0, config.eval_states), ("train", STATES, config.train_states))
    }
    meaning = "that it ended by itself (terminated)" if config.success == "terminated" else f"info[{config.success!r}]"
    notes = [f"success in {config.id} means {meaning}"]
    if config.fast_render:
        notes.append("fast_render: no shadows, reflections or multisampling")
    info = EnvInfo(
        cameras={name: camera.image_shape for name, camera in config.cameras.items()},
        state_dim=sum(sizes.values()),
        action_low=layout.low,
        action_high=layout.high,
        tasks=(task,),
        notes=tuple(notes),
        deterministic=config.deterministic,
        takeovers=config.interventions is not None,
        control_hz=config.control_hz,
    )
    return SubprocEnvs(info, states, make_env or env_factory(GymnasiumEnv, config), context, config.processes)


def try_out(config: GymnasiumConfig) -> None:
    """Execute actions up to the end of an episode in a separate process, at most `TRIED`, and one in real time. Raise
    UserError for what is wrong with the environment on this machine."""
    try:
        env = make_envs(evolve(config, processes=evolve(config.processes, apart=True)), EnvContext())
        try:
            one = np.zeros(1, np.int64)
            env.reset(one, one, one)
            middle = (np.array(env.info.action_low) + np.array(env.info.action_high)) / 2
            count = TRIED if config.control_hz is None and config.success != "terminated" else 1
            for first in range(0, count, TRIED_CHUNK):
                length = min(TRIED_CHUNK, count - first)
                result = env.chunk_step(np.tile(middle, (1, length, 1)), np.array([True]), True)
                for fault in env.faults().values():
                    raise UserError(f"{config.id} breaks in its first steps:\n{fault[-1]}")
                if (result.terminated | result.truncated).any():
                    break
        finally:
            env.close()
    except Exception:
        if "mujoco" in traceback.format_exc():
            require_whole_mujoco(config.id)
        interface = os.environ.get("MUJOCO_GL")
        if interface in FIXES and {"mujoco", "OpenGL"} & sys.modules.keys():
            require_rendering(interface, config.id)  # adds the fix to the message, if drawing is what fails
        raise


class GymnasiumEnv(SingleEnv):
    """One gymnasium environment. After its end it stays as it is: gymnasium defines no step beyond the end."""

    def __init__(self, config: GymnasiumConfig) -> None:
        self._config = config
        self._env: Environment | None = None
        self._end: Outcome | None = None
        self._warned = False
        self._warned_of_colour = False
        self._reports_failure = False
        """The info of an action of this episode said that the task is not solved: others have to say it too."""
        self._real_time = RealTime(config.control_hz)

    def reset(self, state_id: int, seed: int) -> None:
        """Start an episode. The state id determines the initial state; both determine all later random numbers."""
        if self._env is None:
            self._env = make_environment(self._config)
            self._actions = action_layout(self._env.action_space, self._config)
            self._state_sizes = state_sizes(self._env.observation_space, self._config)
        self._use_own_context()
        purpose = f"gymnasium/{self._config.id}"
        first = derived_seed(0, purpose, state_id) % HALF + (HALF if state_id >= STATES else 0)
        self._generators = Generators(first)
        with self._generators.in_use():
            self._env.unwrapped.np_random = np.random.default_rng(first)  # for wrappers that draw before seeding
            observation, _ = self._env.reset(seed=first)
            self._observation = observation
        self._env.unwrapped.np_random = generator(seed, purpose, state_id)
        self._generators = Generators(derived_seed(seed, purpose, state_id))
        self._end = None
        self._reports_failure = False
        self._real_time.restart()

    def step(self, action: Array) -> Outcome:
        if self._end is not None:
            return self._end._replace(reward=0.0, source=ActionSource.POLICY, executed_action=None, late=False)
        assert self._env is not None
        late = self._real_time.wait()
        self._use_own_context()
        with self._generators.in_use():
            observation, reward, terminated, truncated, info = self._env.step(self._actions.build_action(action))
            self._observation = observation
        success = bool(terminated)
        if self._config.success != "terminated":
            success = self._read_success(info, bool(terminated), bool(truncated))
        source, executed = self._read_takeover(info)
        outcome = Outcome(float(reward), success, bool(terminated), bool(truncated), source, executed, late)
        if outcome.terminated or outcome.truncated:
            self._end = outcome
        return outcome

    def render(self) -> View:
        assert self._env is not None
        self._use_own_context()
        images = read_images(self._observation, self._env.observation_space, self._render_image, self._config)
        if not self._warned_of_colour:
            self._check_colours(images)
        return View(images, read_state(self._observation, self._state_sizes, self._config.id))

    def close(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None

    def _use_own_context(self) -> None:
        """Make the OpenGL context of the environment's renderer the current one. Gymnasium's draws into whichever is
        current, which is that of another environment in this process if that was created later."""
        viewer = getattr(getattr(self._env.unwrapped if self._env else None, "mujoco_renderer", None), "viewer", None)
        if viewer is not None:
            viewer.make_context_current()

    def _check_colours(self, images: Mapping[str, Array]) -> None:
        """Log a warning, once, for an image of one colour."""
        for name, image in images.items():
            colour = image[0, 0]
            if (image[::16, ::16] == colour).all() and (image == colour).all():  # a few pixels rule nearly all out
                logger.warning(
                    "%s: the image of camera %r has one colour, %s: is anything drawn, and does the camera look at it?",
                    *(self._config.id, name, tuple(colour.tolist())),
                )
                self._warned_of_colour = True
                return

    def _render_image(self) -> Any:
        assert self._env is not None
        try:
            with self._generators.in_use():
                return self._env.render()
        except gymnasium.error.DependencyNotInstalled as exc:
            raise UserError(f"{self._config.id} needs a package for images that is not installed: {exc}") from exc

    def _read_takeover(self, info: dict[str, Any]) -> tuple[ActionSource, Array | None]:
        """Return who chose the last action, and the action where it was not the policy."""
        settings = self._config.interventions
        try:
            if settings is None or not find_entry(info, settings.flag):
                return ActionSource.POLICY, None
            executed = self._actions.flatten_action(find_entry(info, settings.action))
        except NoEntry as exc:
            raise UserError(f"interventions: the info of {self._config.id} has {exc}") from None
        return ActionSource[settings.source.upper()], executed

    def _read_success(self, info: dict[str, Any], terminated: bool, truncated: bool) -> bool:
        """Return whether the info of a step reports success. Environments may report it at ends only, and a step limit
        ends an episode without their knowledge. Raise UserError for an end that reports nothing, and for one that
        lacks what earlier actions reported."""
        try:
            success = bool(find_entry(info, self._config.success))
        except NoEntry as exc:
            if not (terminated or truncated):
                return False
            if self._reports_failure:
                raise UserError(
                    f"success: the info of {self._config.id} loses {self._config.success!r}, which it had after "
                    f"earlier actions, at the end of the episode: it has {exc}\n  correct the environment, or add a "
                    "wrapper that keeps the entry; without it a success there would count as a failure"
                ) from None
            if terminated or did_you_mean(self._config.success, known_paths(info)):
                raise UserError(
                    f"success: at the end of an episode, the info of {self._config.id} has {exc}; or count its ends: "
                    "success: terminated"
                ) from None
            if not self._warned:
                logger.warning(
                    "success: at its step limit, the info of %s has %s; such an episode counts as a failure",
                    *(self._config.id, exc),
                )
                self._warned = True
            return False
        self._reports_failure |= not success
        return success


@frozen(eq=False)
class ActionLayout:
    """How the policy's numbers become an action of the environment."""

    parts: tuple[tuple[tuple[Any, ...], Any], ...]
    """(keys that lead to it, Box) of each part in the order of the numbers; no keys for a space that is one Box."""
    low: tuple[float, ...]
    high: tuple[float, ...]

    def build_action(self, numbers: Array) -> Any:
        """Return the action that the environment takes for float [A], clipped to the bounds."""
        numbers = np.clip(numbers, self.low, self.high)
        action: dict[Any, Any] = {}
        start = 0
        for keys, box in self.parts:
            end = start + int(np.prod(box.shape))
            part = numbers[start:end].astype(box.dtype).reshape(box.shape)
            start = end
            if not keys:
                return part
            target = action
            for parent in keys[:-1]:
                target = target.setdefault(parent, {})
            target[keys[-1]] = part
        return action

    def flatten_action(self, action: Any) -> Array:
        """Return an action of the environment as the policy's numbers, float32 [A]: the inverse of `action`, not
        clipped. Raise UserError for one that does not fit the space."""
        parts = []
        for keys, box in self.parts:
            part = action
            try:
                for key in keys:
                    part = part[key]
                parts.append(np.asarray(part, np.float32).reshape(box.shape).reshape(-1))
            except (KeyError, IndexError, TypeError, ValueError) as exc:
                place = "" if not keys else f" at {'.'.join(map(str, keys))}"
                raise UserError(
                    f"an action of a takeover does not fit the action space{place}: {action!r:.200} is not {box} "
                    f"({type(exc).__name__}: {exc})"
                ) from None
        return np.concatenate(parts)


def action_layout(space: Any, config: GymnasiumConfig) -> ActionLayout:
    """Return the layout of an action space. Raise UserError for actions that are not vectors of continuous numbers, and
    for bounds that are missing or too wide."""
    parts = _list_parts(space, config)
    space_low = np.concatenate([box.low.reshape(-1) for _, box in parts]).astype(np.float64)
    space_high = np.concatenate([box.high.reshape(-1) for _, box in parts]).astype(np.float64)
    if config.action_low is None or config.action_high is None:
        if not (np.isfinite(space_low).all() and np.isfinite(space_high).all()):
            raise UserError(
                f"{config.id} takes actions without bounds, {space}; say within which ones to act: action_low and "
                f"action_high, {len(space_low)} numbers each"
            )
        return ActionLayout(parts, tuple(space_low.tolist()), tuple(space_high.tolist()))
    low, high = config.action_low, config.action_high
    if len(low) != len(space_low):
        raise UserError(f"action_low has {len(low)} numbers, and {config.id} takes actions of {len(space_low)}")
    if (np.array(low) < space_low - 1e-6).any() or (np.array(high) > space_high + 1e-6).any():
        raise UserError(
            f"action_low {list(low)} and action_high {list(high)} reach beyond what {config.id} takes: {space}"
        )
    return ActionLayout(parts, low, high)


def _list_parts(space: Any, config: GymnasiumConfig) -> tuple[tuple[tuple[Any, ...], Any], ...]:
    if not isinstance(space, spaces.Dict):
        if config.actions:
            raise UserError(f"actions: {config.id} takes actions of {space}, not of a Dict; leave `actions` out")
        if not isinstance(space, spaces.Box) or len(space.shape) != 1 or space.dtype.kind != "f":
            raise UserError(
                f"{config.id} takes actions of {space}, and a model here gives vectors of continuous numbers: the "
                "action space must be a Box of floats with one dimension, or a Dict of Boxes\n"
                "  choose another environment (MountainCarContinuous-v0 instead of CartPole-v1), or add a wrapper that "
                "converts"
            )
        return (((), space),)
    boxes = {".".join(map(str, keys)): (keys, box) for keys, box in walk_leaves(space)}
    if set(config.actions) != set(boxes):
        raise UserError(
            f"{config.id} takes a dict of actions; give all of its entries in the order of the policy's numbers: "
            f"actions: [{', '.join(boxes)}]" + _describe_difference(config.actions, list(boxes))
        )
    for path, (_, box) in boxes.items():
        if not isinstance(box, spaces.Box) or box.dtype.kind != "f":
            raise UserError(
                f"actions: {path!r} of {config.id} is {box}, not a Box of floats; add a wrapper that converts it"
            )
    return tuple(boxes[path] for path in config.actions)


def _describe_difference(given: tuple[str, ...], paths: list[str]) -> str:
    missing = [path for path in paths if path not in given]
    unknown = [path for path in given if path not in paths]
    lists = {"missing": missing, "unknown": unknown} if given else {}
    return "".join(f"; {title}: {', '.join(names)}" for title, names in lists.items() if names)
