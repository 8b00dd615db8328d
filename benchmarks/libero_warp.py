"""`libero_warp` against `libero`: agreement after one action, an expert's success, and speed.

    python benchmarks/libero_warp.py agreement [--suites libero_spatial ...] [--states 4]
    python benchmarks/libero_warp.py expert [--tasks libero_spatial/0 ...] [--states 4]
    python benchmarks/libero_warp.py speed --device cuda [--envs 256 1024] [--size 128] [--seconds 8]

Runs where the extra `libero-warp` is installed. `agreement` and `expert` compare with C MuJoCo of the same
environment, stepped by the simulator `libero`; on a CPU they take minutes, most of them for compiling kernels. `speed`
times chunks of 8 actions with one image of two cameras, first in `libero` on all cores. The stages of a GPU, in order
of worth and each with a limit, are those of `benchmarks/gpu.py`, which uses this file.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vla_rl.core.contexts import EnvContext
from vla_rl.core.errors import UserError
from vla_rl.core.randomness import generator
from vla_rl.core.types import Array, to_numpy
from vla_rl.plugins.envs.libero.expert import Expert, find_recipe
from vla_rl.plugins.envs.libero.single_env import suite_numbers
from vla_rl.plugins.envs.libero.suites import Suite
from vla_rl.plugins.envs.libero.warp.config import LiberoWarpConfig
from vla_rl.plugins.envs.libero.warp.env import LiberoWarpEnv, make_env

SUITES = ("libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90")
CHUNK = 8
MIB = 2**20
FIRST_STATE = 1000
"""Distance of the state ids of two tasks."""


def build_env(suite: str, task: int, num_envs: int, cameras: dict[str, int], device: str) -> LiberoWarpEnv:
    config = LiberoWarpConfig(suite=suite, tasks=(task,), cameras=cameras)
    return make_env(config, EnvContext(num_envs=num_envs, chunk=1, device=device))


def list_states(suite: str, task: int, count: int) -> list[int]:
    """Return the ids of the first official states of a task."""
    first = suite_numbers(LiberoWarpConfig(suite=suite).official())[suite] * 1_000_000 + task * FIRST_STATE
    return list(range(first, first + count))


def measure_agreement(suite: str, task: int, states: int, device: str) -> dict[str, Any]:
    """Play random actions, or the expert's, with C MuJoCo, and compare one action from several moments."""
    from vla_rl.plugins.envs.libero.warp.batch import WorldBatch
    from vla_rl.plugins.envs.libero.warp.buffers import choose_sizes
    from vla_rl.plugins.envs.libero.warp.task_model import HostScenes, read_start

    host = HostScenes(LiberoWarpConfig(suite=suite, tasks=(task,), cameras={}).official())
    described, _ = host.find_start(list_states(suite, task, 1)[0])
    scene = host.place_scene(list_states(suite, task, 1)[0])
    model = host.find_model(described)
    choose = _choose_actions(suite, task, described.instruction)
    starts, actions, ends = [], [], []
    for step in range(10 * states):
        action = choose(scene.observation)
        if step % 10 == 5:
            starts.append(read_start(scene, model.model))
            actions.append(action)
        scene.step(action.astype(np.float64))
        if step % 10 == 5:
            ends.append(read_start(scene, model.model).qpos)
    sizes = choose_sizes(model.model, starts[0], None, None)
    batch = WorldBatch(model, starts[0], states, {}, device, sizes, graphs=True)
    batch.place(range(states), starts)
    batch.step(torch.tensor(np.array(actions, np.float32), device=device), np.ones(states, bool))
    differences = np.abs(batch.snapshot()["qpos"].numpy() - np.stack(ends))
    host.close()
    return {
        "max": float(differences.max()),
        "arm": float(differences[:, model.arm_positions].max()),
        "each": [float(f"{value:.1e}") for value in differences.max(1)],
        "where": [
            model.model.joint(model.model.jnt_qposadr.searchsorted(i, "right") - 1).name for i in differences.argmax(1)
        ],
        "median": float(np.median(differences)),
        "contacts": int(batch.peak_contacts.max()),
        "space": sizes.contacts,
    }


def _choose_actions(suite: str, task: int, instruction: str) -> Callable[[dict[str, Array]], Array]:
    """Return the expert of a task that has one, else random actions, in 32 bits."""
    try:
        expert = Expert(find_recipe(suite, task, instruction))
    except UserError:
        rng = generator(0, f"agreement/{suite}/{task}")
        return lambda observation: rng.uniform(-1, 1, 7).astype(np.float32)
    return lambda observation: expert.choose_action(observation).astype(np.float32)


def compare_expert(suite: str, task: int, states: int, device: str, limit: int) -> dict[str, Any]:
    """Run the closed-loop expert from the same official states with both simulators."""
    env = build_env(suite, task, states, {}, device)
    ids = list_states(suite, task, states)
    instruction = Suite(suite).tasks[task].instruction
    env.reset(np.arange(states), np.array(ids), np.zeros(states, np.int64))
    experts = [Expert(find_recipe(suite, task, instruction)) for _ in ids]
    ended = np.full(states, limit)
    running = np.ones(states, bool)
    began = time.process_time()
    for step in range(limit):
        poses = {name: value.cpu().numpy() for name, value in env.read_poses().items()}
        actions = np.stack(
            [
                expert.choose_action({name: value[i] for name, value in poses.items()})
                for i, expert in enumerate(experts)
            ]
        )
        result = env.chunk_step(actions[:, None].astype(np.float32), running, True)
        success = to_numpy(result.success)
        ended[running & success] = step + 1
        running &= ~success
        if faults := env.faults():
            print(f"faults: {faults}")
        if not running.any():
            break
    seconds = time.process_time() - began
    scene_ends = [_run_official(env, state, Expert(find_recipe(suite, task, instruction)), limit) for state in ids]
    env.close()
    return {
        "warp": int((ended < limit).sum()),
        "c": sum(end < limit for end in scene_ends),
        "of": states,
        "warp_steps": ended.tolist(),
        "c_steps": scene_ends,
        "processor_seconds": round(seconds, 1),
    }


def _run_official(env: LiberoWarpEnv, state: int, expert: Expert, limit: int) -> int:
    """Return the number of actions until success with C MuJoCo, or the limit."""
    scene = env.host.place_scene(state)
    for step in range(limit):
        _, success = scene.step(expert.choose_action(scene.observation).astype(np.float32).astype(np.float64))
        if success:
            return step + 1
    return limit


def start_worlds(num_envs: int, size: int, device: str, host: Any = None) -> LiberoWarpEnv:
    """Return envs of libero_spatial's task 0 at official states, without cameras if `size` is 0.

    Args:
        host: the scenes on the host of other envs, which are used again: starting them takes ten seconds.
    """
    env = build_env("libero_spatial", 0, num_envs, make_cameras(size), device)
    env.host = host or env.host
    ids = list_states("libero_spatial", 0, 10)
    env.reset(np.arange(num_envs), np.resize(ids, num_envs), np.zeros(num_envs, np.int64))
    return env


def make_cameras(size: int) -> dict[str, int]:
    return {"agentview": size, "wrist": size} if size else {}


def draw_actions(num_envs: int, device: str) -> Any:
    return torch.rand(num_envs, CHUNK, 7, device=device) * 2 - 1


def measure_speed(num_envs: int, size: int, device: str, seconds: float, host: Any = None) -> dict[str, Any]:
    """Time chunks of random actions, with an image of each camera at their end.

    Returns:
        "start_s": seconds of a first reset, which builds the batch, and a first chunk. "per_s": actions of all envs.
        "mib", "predicted_mib": on a GPU, memory that the batch takes, and what is predicted before it is built.
    """
    free, began = _read_free_mib(device), time.perf_counter()
    env = start_worlds(num_envs, size, device, host)
    actions, active = draw_actions(num_envs, device), np.ones(num_envs, bool)
    env.chunk_step(actions, active, False)
    result = {"start_s": round(time.perf_counter() - began, 1)}
    result["per_s"] = round(_time_chunks(env, actions, active, seconds), 1)
    (batch,) = env._batches  # noqa: SLF001 - memory is not part of its interface
    if device != "cpu":
        result["mib"] = free - _read_free_mib(device)
        result["predicted_mib"] = batch.sizes.predict_bytes(num_envs, make_cameras(size)) // MIB
    return result | {"contacts": int(batch.peak_contacts.max()), "faults": len(env.faults()), "host": env.host}


def list_parts(env: LiberoWarpEnv, device: str) -> dict[str, Callable[[], Any]]:
    """Return what a chunk consists of, one callable for each part. Each goes on from where the last one ended."""
    import mujoco_warp as mjw
    import warp as wp

    from vla_rl.plugins.envs.libero.warp.controller import make_controller

    (batch,) = env._batches  # noqa: SLF001 - the parts of an action are nobody else's business
    actions, active = draw_actions(env.num_envs, device), np.ones(env.num_envs, bool)

    def on_device(work: Callable[..., Any], *given: Any, **named: Any) -> Callable[[], None]:
        def run() -> None:
            with batch._on_device():  # noqa: SLF001
                work(*given, **named)

        return run

    controls = [False, *batch._control_inputs]  # noqa: SLF001
    world = batch._model, batch._data  # noqa: SLF001
    return {
        f"chunk of {CHUNK} actions and an observation": lambda: env.chunk_step(actions, active, False),
        "action": lambda: batch.step(actions[:, 0], active),
        "action, the graph alone": on_device(batch._act),  # noqa: SLF001
        "observation": batch.observe,
        "observation, the graph alone": on_device(batch._look),  # noqa: SLF001
        "controller of a sub-step": on_device(wp.launch, make_controller(float), dim=env.num_envs, inputs=controls),
        "first half of a sub-step, kernel by kernel": on_device(mjw.step1, *world),
        "second half of a sub-step, kernel by kernel": on_device(mjw.step2, *world),
        "capturing the graph of an action": lambda: batch._capture(batch._launch_action, True),  # noqa: SLF001
    }


def _read_free_mib(device: str) -> int:
    """Return the free memory of a GPU, whoever allocated the rest: Warp does so beside torch."""
    if device == "cpu":
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0] // MIB


def _time_chunks(env: Any, actions: Any, active: Array, seconds: float) -> float:
    """Return actions a second, of all envs together."""
    began, chunks = time.perf_counter(), 0
    while time.perf_counter() - began < seconds or chunks == 0:
        env.chunk_step(actions, active, False)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        chunks += 1
    return chunks * actions.shape[0] * actions.shape[1] / (time.perf_counter() - began)


def measure_libero(num_envs: int, size: int, seconds: float) -> float:
    """Return actions a second of the simulator `libero` in its processes, one for each core, with the images that
    OpenGL draws; without cameras if `size` is 0."""
    from vla_rl.plugins.envs.libero import plugin
    from vla_rl.plugins.envs.libero.config import LiberoConfig

    config = LiberoConfig(suite="libero_spatial", tasks=(0,), cameras=make_cameras(size))
    env = plugin.build(config, EnvContext(num_envs=num_envs, chunk=CHUNK))
    ids = np.resize([state.id for state in env.reset_states("eval")], num_envs)
    env.reset(np.arange(num_envs), ids, np.zeros(num_envs, np.int64))
    actions = generator(0, "speed").uniform(-1, 1, (num_envs, CHUNK, 7)).astype(np.float32)
    active = np.ones(num_envs, bool)
    env.chunk_step(actions, active, False)
    rate = _time_chunks(env, actions, active, seconds)
    env.close()
    return round(rate, 1)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("agreement", "expert", "speed"))
    parser.add_argument("--suites", nargs="+", default=SUITES)
    parser.add_argument("--tasks", nargs="+", default=["libero_spatial/0", "libero_object/0", "libero_spatial/3"])
    parser.add_argument("--states", type=int, default=4)
    parser.add_argument("--limit", type=int, default=220)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--envs", type=int, nargs="*", default=[256, 1024])
    parser.add_argument(
        "--libero-envs", type=int, help="envs of the simulator `libero`, 0 for none; two a core if not given"
    )
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    results: dict[str, Any] = {}

    def add_result(name: str, result: dict[str, Any]) -> None:
        results[name] = result
        print(f"{name}: {result}", flush=True)
        if args.json:
            args.json.write_text(json.dumps(results, indent=1), encoding="utf-8")

    if args.what == "agreement":
        for suite in args.suites:
            add_result(suite, measure_agreement(suite, 0, args.states, args.device))
    elif args.what == "expert":
        for name in args.tasks:
            suite, _, task = name.partition("/")
            add_result(name, compare_expert(suite, int(task), args.states, args.device, args.limit))
    else:
        cores = len(os.sched_getaffinity(0))
        official = 2 * cores if args.libero_envs is None else args.libero_envs
        for size in (0, args.size) if official else ():  # first, since it needs OpenGL
            rate = measure_libero(official, size, args.seconds)
            add_result(f"libero, {cores} cores, {size} px", {"envs": official, "per_s": rate})
        host = None
        for size in (0, args.size):
            for num_envs in args.envs:
                result = measure_speed(num_envs, size, args.device, args.seconds, host)
                host = result.pop("host")
                add_result(f"libero_warp, {num_envs} envs, {size} px", result)


if __name__ == "__main__":
    main()
