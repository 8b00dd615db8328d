"""LIBERO with many envs and many tasks; `benchmarks/simulators.py libero --scale --all-suites` runs it."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import numpy as np
from measuring import Figures, all_pids, apart, interleaved, proportional_mib, seconds

from vla_rl.core.contexts import EnvContext

CHUNK = 8


def libero_env(num_envs: int, tasks: tuple[int, ...] = (0,), **changes: Any) -> tuple[Any, dict[str, list[int]]]:
    """-> the public environment, and its evaluation states by task."""
    from vla_rl.plugins.envs.libero import plugin
    from vla_rl.plugins.envs.libero.config import LiberoConfig
    from vla_rl.toolkit.envs.settings import SharedProcesses

    processes = SharedProcesses(envs_per_process=changes.pop("envs_per_process", 1))
    given = {"suite": "libero_spatial", "tasks": tasks, "processes": processes} | changes
    env = plugin.build(LiberoConfig(**given), EnvContext(num_envs=num_envs, chunk=CHUNK))
    states: dict[str, list[int]] = {}
    for state in env.reset_states("eval"):
        states.setdefault(state.task, []).append(state.id)
    return env, states


class Playing:
    """An environment whose envs all play chunks, from official states."""

    def __init__(self, env: Any, ids: list[int]) -> None:
        self.env, env_ids = env, np.arange(len(ids))
        self._actions = np.random.default_rng(0).uniform(-1, 1, (len(ids), CHUNK, 7)).astype(np.float32)
        self._on = np.ones(len(ids), bool)
        env.reset(env_ids, np.array(ids), env_ids)

    def __call__(self) -> None:
        self.env.chunk_step(self._actions, self._on, False)


def libero_many_envs() -> Figures:
    """32 envs of one task in two processes, against two envs in two processes."""
    few, states = libero_env(2)
    many, _ = libero_env(32, envs_per_process=16)
    [ids] = states.values()
    works = {"few": Playing(few, ids[:2]), "many": Playing(many, ids[:32])}
    interleaved(works, rounds=1)
    times = interleaved(works, rounds=4)
    env_id = (proportional_mib(many.pids) - proportional_mib(few.pids)) / 30
    few.close()
    works["many"]()
    total = proportional_mib(all_pids())
    many.close()
    return {
        "libero_envs32_memory_gib": total / 1024,
        "libero_env_extra_mib": env_id,
        "libero_scale_throughput_ratio": median(16 * a / b for a, b in zip(times["few"], times["many"], strict=True)),
        "libero_envs32_steps_per_second": 32 * CHUNK / median(times["many"]),
    }


def libero_switch(memory_mib: int) -> float:
    """Median seconds of a reset to a task other than the last one, which was compiled before, settling and two images
    included."""
    env, states = libero_env(1, (0, 1), memory_mib=memory_mib)
    env_id, ids = np.array([0]), [state for pair in zip(*states.values(), strict=True) for state in pair]
    times = [seconds(lambda state=state: env.reset(env_id, np.array([state]), env_id)) for state in ids[:12]]
    env.close()
    return median(times[2:])


def libero_scale() -> Figures:
    """Many envs and many tasks."""
    figures: Figures = apart(libero_many_envs)
    for name, memory_mib in (("memory", 2000), ("disk", 0)):
        figures[f"libero_task_switch_{name}_s"] = apart(libero_switch, memory_mib)
    return figures


def libero_all_suites() -> Figures:
    """130 tasks in turn on 16 envs: each env plays one chunk of a task, then one of another."""
    suites = dict.fromkeys(("libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90"))
    env, states = libero_env(16, suite=None, tasks=None, suites=suites, envs_per_process=8)
    first = [ids[0] for ids in states.values()]
    figures: Figures = {"libero_all_suites_tasks": len(first)}
    for name in ("first", "again"):
        peak, begun = 0.0, time.perf_counter()
        for start in range(0, len(first), 16):
            Playing(env, (first * 2)[start : start + 16])()
            peak = max(peak, proportional_mib(all_pids()))
        figures[f"libero_all_suites_{name}_s"] = time.perf_counter() - begun
        figures[f"libero_all_suites_{name}_peak_gib"] = peak / 1024
    env.close()
    return figures
