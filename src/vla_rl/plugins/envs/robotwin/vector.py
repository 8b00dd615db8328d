"""Vector API of RoboTwin: `robotwin.envs.vector_env.VectorEnv`, whose env instances are threads and whose call is a
whole chunk.

`VectorEnv.step` moves every instance. So an instance is stepped through its `SubEnv` in the thread pool of the vector
environment, as `VectorEnv.step` does, and inactive ones stay as they are. RoboTwin does not say at which action of a
chunk success came, so a chunk's result is reported at its last action.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

import numpy as np

from vla_rl.core.contexts import EnvContext
from vla_rl.core.errors import UserError
from vla_rl.core.hookspecs import SimEnv
from vla_rl.core.randomness import derived_seed
from vla_rl.core.types import Array, ChunkResult, EnvInfo, Observation, ResetState, at_last_action, to_numpy
from vla_rl.plugins.envs.robotwin.config import STATE_DIM
from vla_rl.plugins.envs.robotwin.end_effector import move_to_poses
from vla_rl.plugins.envs.robotwin.expert import JOINTS_ONLY, ExpertMotion, solve_scene
from vla_rl.plugins.envs.robotwin.installation import Installation
from vla_rl.plugins.envs.robotwin.patches import kept_randomness, suppress_prints
from vla_rl.plugins.envs.robotwin.seeds import SeedBook
from vla_rl.toolkit.envs.single_env import View
from vla_rl.toolkit.waiting import register_work

IMAGES = {"head": "full_image", "left_wrist": "left_wrist_image", "right_wrist": "right_wrist_image"}
"""Camera name in specs and observations -> key of `VectorEnv`'s observation."""


class VectorRobotwin(SimEnv):
    """Vectorised RoboTwin with N env instances. A task's `VectorEnv` is created at the first reset to one of its
    scenes, with N sub-environments; instance i uses sub-environment i."""

    def __init__(self, info: EnvInfo, book: SeedBook, robotwin: Installation, context: EnvContext) -> None:
        self.num_envs = context.num_envs
        self.info = info
        self._book = book
        self._robotwin = robotwin
        self._first_env = context.first_env
        self._chunk = context.chunk
        self._low = np.asarray(info.action_low, np.float32)
        self._high = np.asarray(info.action_high, np.float32)
        self._deadline_s = robotwin.config.processes.deadline_s
        self._states = {split: book.list_states(split) for split in ("train", "eval")}
        self._venvs: dict[str, Any] = {}
        self._tasks = [info.tasks[0].name] * self.num_envs
        dummy_images = {name: np.zeros((*size, 3), np.uint8) for name, size in info.cameras.items()}
        self._views = [View(dummy_images, np.zeros(STATE_DIM, np.float32), info.tasks[0].instruction)] * self.num_envs
        self._ready = np.zeros(self.num_envs, bool)
        self._solved = np.zeros(self.num_envs, bool)
        self._executed = np.zeros(self.num_envs, np.int64)
        """Actions of each instance's episode."""
        self._seeds = [0] * self.num_envs
        self._usable: dict[tuple[str, int], bool] = {}
        self._solutions: dict[tuple[str, int], ExpertMotion | None] = {}
        """(Task, seed) -> the expert's solution, of the scenes that it has played; None: it failed."""
        self._faults: dict[int, list[str]] = {}
        robotwin.make_importable()

    def reset_states(self, split: str) -> tuple[ResetState, ...]:
        return self._states[split]

    def reset(self, env_ids: Any, state_ids: Any, seed: Any) -> Observation:
        """Start episodes, one instance after the other: RoboTwin sets up one scene at a time. The state id determines
        everything, the wording too; `seed` has no effect."""
        env_ids = [int(env_id) for env_id in to_numpy(env_ids)]
        with suppress_prints(), kept_randomness():
            for env_id, state in zip(env_ids, to_numpy(state_ids), strict=True):
                self._ready[env_id] = False
                self._place_scene(env_id, int(state))
                self._ready[env_id] = True
        return self._build_observation(env_ids)

    def chunk_step(self, actions: Any, active: Any, stop_at_end: bool) -> ChunkResult:
        """Execute a chunk. After success the robot moves no more: RoboTwin ignores further actions."""
        actions = np.asarray(to_numpy(actions), np.float64)
        rewards = np.zeros(actions.shape[:2], np.float32)
        succeeded, truncated, executed = np.zeros((3, *rewards.shape), bool)
        before = self._solved.copy()
        for env_id, (solved_at, cut) in self._execute_chunks(np.flatnonzero(to_numpy(active)), actions).items():
            executed[env_id] = True
            first = 0 if before[env_id] else solved_at
            if first is not None:
                # RoboTwin ignores actions after success, which without `stop_at_end` count as executed.
                executed[env_id, first + 1 :] = not stop_at_end
                succeeded[env_id, first:] = executed[env_id, first:]
            truncated[env_id, -1] = cut and first is None
        rewards[succeeded] = 1.0
        self._executed += executed.sum(1)
        return ChunkResult(
            obs=self._build_observation(range(self.num_envs)),
            rewards=rewards,
            terminated=succeeded,
            truncated=truncated,
            executed=executed,
            success=at_last_action(succeeded, executed),
            succeeded=succeeded,
        )

    def expert_chunk(self) -> Array:
        """Return the next targets of the expert's solution of each scene, by the number of actions that were executed;
        where the expert cannot solve the scene, the targets that the joints have."""
        if self._robotwin.config.control != "joints":
            raise UserError(JOINTS_ONLY)
        chunks, length = [], self._chunk
        with suppress_prints(), kept_randomness():
            for env_id, start in enumerate(self._executed):
                solution = self._find_solution(env_id) if self._ready[env_id] else None
                seen = self._views[env_id].state
                assert seen is not None
                state = np.clip(seen, self._low, self._high)
                chunks.append(
                    np.tile(state, (length, 1)) if solution is None else solution.take_chunk(int(start), length)
                )
        return np.stack(chunks)

    def faults(self) -> Mapping[int, Sequence[str]]:
        faults = self._faults
        self._faults = {}
        return faults

    def close(self) -> None:
        with suppress_prints():
            for venv in self._venvs.values():
                venv.close(clear_cache=True)
                venv.env_thread_pool.shutdown(wait=False, cancel_futures=True)
        self._venvs = {}

    # --------------------------------------------------------------------------------------------------- inside

    def _execute_chunks(self, env_ids: Array, actions: Array) -> dict[int, tuple[int | None, bool]]:
        """Execute chunks and return instance -> (index of the action that solved the task, truncated), without the
        instances that broke."""
        outcomes: dict[int, tuple[int | None, bool]] = {}
        execute = _execute_joint_targets if self._robotwin.config.control == "joints" else _execute_poses
        with suppress_prints(), kept_randomness():
            running = {}
            for env_id in (int(env_id) for env_id in env_ids):
                if self._ready[env_id]:
                    venv = self._venvs[self._tasks[env_id]]
                    running[env_id] = venv.env_thread_pool.submit(execute, venv.envs[env_id], actions[env_id])
                else:
                    self._mark_broken(env_id, "it has not been reset since it broke")
            for env_id, future in running.items():
                try:
                    obs, solved_at, truncated = future.result(self._deadline_s)
                    self._views[env_id] = self._build_view(obs)
                except FutureTimeoutError as exc:
                    raise RuntimeError(
                        f"env {self._first_env + env_id} ({self._tasks[env_id]}) gave no answer for "
                        f"{self._deadline_s:g} s "
                        "(processes.deadline_s); its thread cannot be stopped, so this process has to end"
                    ) from exc
                except UserError:
                    raise
                except Exception:
                    self._mark_broken(env_id, traceback.format_exc())
                    continue
                outcomes[env_id] = solved_at, truncated
                self._solved[env_id] = solved_at is not None
        return outcomes

    def _mark_broken(self, env_id: int, what: str) -> None:
        self._ready[env_id] = False
        self._faults.setdefault(env_id, []).append(f"env {self._first_env + env_id}: {what}")

    def _place_scene(self, env_id: int, state_id: int) -> None:
        """Set up a state's scene in an instance, with the first of its seeds that can be used."""
        task = self._book.find_task(state_id)
        seeds = self._book.list_candidates(state_id)
        venv = self._open_venv(task, seeds[0])
        if self._tasks[env_id] != task and self._tasks[env_id] in self._venvs:
            self._venvs[self._tasks[env_id]].envs[env_id].close(clear_cache=False)
        self._tasks[env_id], sub = task, venv.envs[env_id]
        check = self._book.needs_check(state_id, without_file=True)
        for number, seed in enumerate(seeds):
            if not self._usable.get((task, seed), True):
                continue
            if check and (task, seed) not in self._usable:
                with register_work(
                    "checking seeds by the expert", len(seeds), f"{task}, state {state_id}"
                ) as checked_seeds:
                    checked_seeds(number)
                    self._usable[task, seed] = self._solve_seed(sub.task, task, seed) is not None
                if not self._usable[task, seed]:
                    continue
            try:
                venv.reset(env_idx=[env_id], env_seeds=[seed])
            except RuntimeError as exc:  # any error but an unstable seed
                raise UserError(f"RoboTwin cannot set up task {task} with seed {seed}: {exc}") from exc
            if sub.task.ep_num == seed:
                break
            self._usable[task, seed] = False  # `reset` silently took another seed, perhaps of another state
        else:
            raise self._book.no_seed_works(
                state_id, list(seeds), "things do not come to rest, or the expert does not solve it"
            )
        # `VectorEnv` fills instructions with the objects of the seed that it was created with, not of this one.
        key = derived_seed(0, "robotwin/instruction", state_id)
        sub.instruction = self._robotwin.draw_instruction(task, sub.task.get_info(), key)
        sub.task.set_instruction(sub.instruction)
        self._seeds[env_id] = seed
        self._executed[env_id] = 0
        self._solved[env_id] = False
        self._views[env_id] = self._build_view(sub.get_obs())

    def _find_solution(self, env_id: int) -> ExpertMotion | None:
        """Return the expert's solution of an instance's scene. It is played in another scene of the same seed."""
        task, seed = self._tasks[env_id], self._seeds[env_id]
        if (task, seed) not in self._solutions:
            with register_work("the expert solves a scene", 1, f"{task}, seed {seed}"):
                self._solve_seed(self._robotwin.create_task(task), task, seed)
        return self._solutions[task, seed]

    def _solve_seed(self, scene: Any, task: str, seed: int) -> ExpertMotion | None:
        """Let the expert play a seed in this scene, which is closed before and after."""
        scene.close_env()
        try:
            solution = solve_scene(self._robotwin, scene, task, seed)
        finally:
            scene.close_env()
        self._solutions[task, seed] = solution
        return solution

    def _open_venv(self, task: str, seed: int) -> Any:
        if task not in self._venvs:
            self._try_out(task, seed)
            self._venvs[task] = self._robotwin.vector_env()(
                task_config=self._robotwin.task_settings(task),
                n_envs=self.num_envs,
                env_seeds=[seed] * self.num_envs,
                instruction_type=self._robotwin.instruction_type,
            )
        return self._venvs[task]

    def _try_out(self, task: str, seed: int) -> None:
        """Set up one scene, to raise errors early: `VectorEnv` takes failures for bad seeds and tries on for ever."""
        scene, unstable = self._robotwin.create_task(task), self._robotwin.unstable_error()
        try:
            scene.setup_demo(now_ep_num=seed, seed=seed, is_test=True, **self._robotwin.setup_arguments(task))
        except unstable:
            pass
        except UserError:
            raise
        except Exception as exc:
            raise UserError(f"RoboTwin cannot set up task {task}:\n{traceback.format_exc()}") from exc
        scene.close_env()

    def _build_view(self, obs: Mapping[str, Any]) -> View:
        state = np.asarray(obs["state"], np.float32)
        if state.shape != (STATE_DIM,):
            raise UserError(f"the robot has a state of {state.shape[0]} numbers; actions here are for {STATE_DIM}")
        images = {name: np.ascontiguousarray(obs[IMAGES[name]]) for name in self.info.cameras}
        return View(images, state, str(obs["instruction"]))

    def _build_observation(self, env_ids: Iterable[int]) -> Observation:
        views = [self._views[env_id] for env_id in env_ids]
        return Observation(
            images={name: np.stack([view.images[name] for view in views]) for name in self.info.cameras},
            instructions=tuple(view.instruction or "" for view in views),
            state=np.stack([view.state for view in views if view.state is not None]),
        )


def _execute_joint_targets(sub: Any, actions: Array) -> tuple[Mapping[str, Any], int | None, bool]:
    """Execute a chunk of joint targets, which RoboTwin plays as one motion. Return the observation, the action that
    solved the task (RoboTwin tells only that one did: the last), and whether RoboTwin truncated the episode."""
    result = sub.step(actions)
    solved = bool(result["info"]["success"])
    return result["obs"], len(actions) - 1 if solved else None, bool(result["truncated"][0])


def _execute_poses(sub: Any, actions: Array) -> tuple[Mapping[str, Any], int | None, bool]:
    """Execute a chunk of end-effector actions, one motion each. Return as `_execute_joint_targets` does."""
    solved_at = None
    with sub.lock:
        for index, action in enumerate(actions):
            move_to_poses(sub.task, action)
            if sub.task.eval_success:
                solved_at = index
                break
    return sub.get_obs(), solved_at, False
