"""robotwin/envs/vector_env.py of the wheel 0.1.3 (in RLinf_support at 0008ae6 the same, but for its imports)."""
# ruff: noqa: NPY002  the sources draw from NumPy's global generator

import importlib
import os
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import yaml
from robotwin.assets import validate_root
from robotwin.config import load_task_config
from robotwin.description import generate_episode_descriptions
from robotwin.envs.utils.create_actor import UnStableError


def _settings(name):
    return yaml.safe_load((Path(CONFIGS_PATH) / f"{name}.yml").read_text())  # noqa: F821  of the branch


def class_decorator(task_name):
    module = importlib.import_module(f"robotwin.envs.{task_name}")
    try:
        return getattr(module, task_name)()
    except Exception:
        raise SystemExit("No Task") from None


def update_obs(observation):
    """What a caller sees: KeyError without a head camera or `qpos`; None for a wrist camera that is not collected."""
    cameras = observation["observation"]
    return {
        "full_image": cameras["head_camera"]["rgb"],
        "left_wrist_image": cameras.get("left_camera", {}).get("rgb", None),
        "right_wrist_image": cameras.get("right_camera", {}).get("rgb", None),
        "state": observation["joint_action"]["vector"],
    }


class SubEnv:
    def __init__(self, env_id, task_name, args, env_seed=None, instruction_type="seen", global_lock=None):
        self.env_id, self.task_name, self.args = env_id, task_name, args
        self.env_seed = env_id if env_seed is None else env_seed
        self.instruction = None
        self.task = class_decorator(task_name)
        self.instruction_type = instruction_type
        self.global_lock, self.lock = global_lock, threading.Lock()
        self.reset_count = 0
        self.clear_cache_freq = max(1, int(args.get("clear_cache_freq", 8)))

    def setup_task(self):
        """Sets up a scene only to note its things, from which all later instructions are made. Any exception counts as
        a bad seed: it continues with the next one, for ever. (The double gives up after 50, so that a test can end.)"""
        self.close()
        self.task = class_decorator(self.task_name)
        with self.global_lock, self.lock:
            for trial_seed in range(self.env_seed, self.env_seed + 50):
                task = class_decorator(self.task_name)
                try:
                    task.setup_demo(now_ep_num=trial_seed, seed=trial_seed, is_test=True, **self.args)
                    self.episode_info_list = [task.get_info()]
                except Exception:
                    task.close_env()
                    continue
                task.close_env()
                return
            raise SystemExit("the source would hang here")

    def create_instruction(self):
        texts = generate_episode_descriptions(self.task_name, self.episode_info_list, 1, self.env_seed)
        return np.random.choice(texts[0][self.instruction_type])

    def step(self, actions):
        """-> {"obs", "reward", "terminated", "truncated", "info"}. Resets by itself when it never was."""
        if self.get_instruction() is None:
            self.reset(env_seed=None)
        with self.lock:
            reward, termination, truncation, info = self.task.gen_sparse_reward_data(actions)
            obs = update_obs(self.task.get_obs())
            obs["instruction"] = self.task.get_instruction()
        return {"obs": obs, "reward": reward, "terminated": termination, "truncated": truncation, "info": info}

    def reset(self, env_seed=None):
        """Sets up the scene of `env_seed`, or of the first one after it whose things come to rest, without saying so
        (`task.ep_num` is that seed). Another error is raised, after the scene was closed."""
        with self.global_lock, self.lock:
            self.reset_count += 1
            self.task.close_env(clear_cache=self.reset_count % self.clear_cache_freq == 0)
            if env_seed is not None:
                self.env_seed = env_seed
            self.instruction = self.create_instruction()
            self.args["instruction"] = self.instruction
            trial_seed = self.env_seed
            while True:
                try:
                    self.task.setup_demo(now_ep_num=trial_seed, seed=trial_seed, **self.args)
                except UnStableError:
                    self.task.close_env(clear_cache=True)
                    trial_seed += 1
                except Exception:
                    self.task.close_env(clear_cache=True)
                    raise
                else:
                    self.task.step_lim = self.args["step_lim"]
                    self.task.run_steps = self.task.reward_step = 0
                    return

    def get_obs(self):
        with self.lock:
            obs = update_obs(self.task.get_obs())
            obs["instruction"] = self.task.get_instruction()
        return obs

    def get_instruction(self):
        with self.lock:
            return self.instruction

    def close(self, clear_cache=True):
        with self.lock:
            self.task.close_env(clear_cache=clear_cache)

    def check_seed(self, seed):
        """The expert's try. Errors are noted, not raised; the scene is left as it is then."""
        result = {"setup_demo_success": False, "play_once_success": False, "cost_time": 0.0}
        with self.global_lock, self.lock:
            try:
                self.task.setup_demo(now_ep_num=seed, seed=seed, **self.args)
                result["setup_demo_success"] = True
                self.task.get_obs()
                self.task.play_once()
                result["play_once_success"] = bool(self.task.plan_success and self.task.check_success())
            except Exception:
                return result
        return result


class VectorEnv:
    def __init__(self, task_config, n_envs, env_seeds=None, instruction_type="seen"):
        """Changes `task_config`, and shares it between its rows. KeyError without embodiment, save_path or task_name;
        step_lim is missed at the first reset only."""
        if env_seeds is not None:
            assert len(env_seeds) == n_envs
            assert all(type(seed) is int for seed in env_seeds)
        self.env_seeds = env_seeds
        ROOT = validate_root(os.environ["ROBOTWIN_ASSETS_ROOT"])["root"]
        os.environ["ASSETS_PATH"] = ROOT
        self.task_name = task_config.get("task_name")
        args = task_config
        args["planner_backend"] = args.get("planner_backend", "curobo")
        args["clear_cache_freq"] = max(1, int(args.get("clear_cache_freq", 8)))
        robots, camera = load_task_config("_embodiment_config"), load_task_config("_camera_config")["D435"]
        embodiment = args.get("embodiment")
        if len(embodiment) not in (1, 3):
            raise ValueError("embodiment must contain either one or three items")
        for side, name in (("left", embodiment[0]), ("right", embodiment[min(1, len(embodiment) - 1)])):
            args[f"{side}_robot_file"] = str(Path(ROOT) / robots[name]["file_path"])
            config = Path(args[f"{side}_robot_file"]) / "config.yml"
            args[f"{side}_embodiment_config"] = yaml.safe_load(config.read_text())
        if len(embodiment) == 3:
            args["embodiment_dis"] = embodiment[2]
        args["save_path"] += f"/{args['task_name']}_reward"
        args |= {
            "head_camera_h": camera["h"], "head_camera_w": camera["w"], "dual_arm_embodied": len(embodiment) == 1,
            "embodiment_name": "_".join(map(str, embodiment[:2])), "rdt_step": 10, "n_envs": n_envs, "action_dim": 14,
            "eval_mode": True, "eval_video_log": False, "render_freq": 0,
        }  # fmt: skip
        self.args, self.n_envs, self.envs = args, n_envs, []
        self.instruction_type = instruction_type
        self.global_lock = threading.Lock()
        self.env_thread_pool = ThreadPoolExecutor(max_workers=n_envs)
        self._init_envs()

    def _init_envs(self):
        for i in range(self.n_envs):
            seed = self.env_seeds[i] if self.env_seeds else None
            sub_env = SubEnv(i, self.task_name, self.args, seed, self.instruction_type, self.global_lock)
            sub_env.setup_task()
            self.envs.append(sub_env)

    def step(self, actions):
        """Every row, in threads. -> lists of obs, reward, terminated, truncated, info."""
        futures = [self.env_thread_pool.submit(env.step, actions[i]) for i, env in enumerate(self.envs)]
        results = defaultdict(list)
        for i, future in enumerate(futures):
            try:
                answer = future.result(timeout=120)
            except Exception as exc:
                raise RuntimeError(f"SubEnv {i} step error: {exc}") from exc
            for key, value in answer.items():
                results[key].append(value)
        return tuple(results[key] for key in ("obs", "reward", "terminated", "truncated", "info"))

    def reset(self, env_idx=None, env_seeds=None):
        """-> None. Rows out of range are left out; seeds that are not as many as the rows are not used."""
        if not self.envs:
            self._init_envs()
        rows = list(range(self.n_envs)) if env_idx is None else list(np.atleast_1d(env_idx))
        if env_seeds is not None and len(env_seeds) != len(rows):
            raise ValueError("the source would read past these seeds")
        futures = {
            row: self.env_thread_pool.submit(self.envs[row].reset, env_seed=None if env_seeds is None else env_seeds[i])
            for i, row in enumerate(rows)
        }
        for row, future in futures.items():
            try:
                future.result(timeout=120)
            except Exception as exc:
                raise RuntimeError(f"SubEnv {row} reset error: {exc}") from exc

    def get_obs(self):
        return [env.get_obs() for env in self.envs]

    def close(self, clear_cache=True):
        for env in self.envs:
            env.close(clear_cache=clear_cache)
        if clear_cache:
            self.envs = []

    def check_seeds(self, seeds):
        assert len(seeds) == self.n_envs
        return list(
            self.env_thread_pool.map(lambda pair: pair[0].check_seed(pair[1]), zip(self.envs, seeds, strict=True))
        )
