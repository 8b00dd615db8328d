"""A whole iteration on real LIBERO, collocated, against the way of SimpleVLA-RL and against the simulator alone.

    python benchmarks/libero_iteration.py [--rounds 5] [--num-envs 2] [--steps 80] [--json FILE]

The baseline is written here, after SimpleVLA-RL's rollout: a process and a new official environment for every
trajectory, an image of each camera at every step, all envs inferred until the step limit, observations collected in
order. Both infer with the same tiny OpenVLA-OFT. Ours is the wall-clock time of a run's iteration: rollout, loss,
gradients, optimiser. The baseline is charged with its rollout and the time of our update. The simulator alone plays the
same number of steps in as many processes without a policy. All three in turn, medians.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from vla_rl.core import catalogue as plugins
from vla_rl.core.contexts import EnvContext, ModelContext
from vla_rl.core.hookspecs import SimEnv, VLAModel
from vla_rl.core.randomness import Noise
from vla_rl.core.run.flow import Flow
from vla_rl.core.run.loop import collect_rollout, finish_step, flow_of
from vla_rl.core.run.selection import take_columns
from vla_rl.core.run.state import State
from vla_rl.core.spec.spec import Spec, parse_spec
from vla_rl.core.types import Observation
from vla_rl.runtime.driver.driver import Driver
from vla_rl.runtime.start import start

SIZE, CHUNK, SETTLE = 128, 8, 10
CAMERAS = {"agentview": "agentview_image", "wrist": "robot0_eye_in_hand_image"}


def spec_of(num_envs: int, steps: int) -> Spec:
    """Random weights: every episode lasts until the limit, so that all three play the same number of steps."""
    return parse_spec(
        {
            "name": "libero-iteration",
            "model": {"type": "openvla_oft", "preset": "tiny"},
            "env": {
                "type": "libero",
                "suite": "libero_spatial",
                "tasks": [0],
                "num_envs": num_envs,
                "cameras": dict.fromkeys(CAMERAS, SIZE),
            },
            "rollout": {"chunk": CHUNK, "episodes": num_envs, "max_steps": steps},
            "algorithm": {"type": "ppo"},
            "train": {"steps": 10**6, "lr": 1e-5, "micro_batch": 32},
            "hooks": [],
        }
    )


def trajectory(bddl_file: str, steps: int, pipe: Connection) -> None:
    """One episode in a separate process; observations out, chunks of actions in."""
    from libero.libero.envs import OffScreenRenderEnv

    env = OffScreenRenderEnv(bddl_file_name=bddl_file, camera_heights=SIZE, camera_widths=SIZE)
    env.seed(0)
    env.reset()
    for _ in range(SETTLE):
        seen = env.step([0.0] * 6 + [-1.0])[0]
    for _ in range(0, steps, CHUNK):
        state = np.concatenate([seen["robot0_eef_pos"], seen["robot0_eef_quat"][:3], seen["robot0_gripper_qpos"]])
        pipe.send(({name: seen[key][::-1, ::-1].copy() for name, key in CAMERAS.items()}, state.astype(np.float32)))
        for action in pipe.recv():
            seen = env.step(action)[0]
    env.close()


def baseline_rollout(model: VLAModel, bddl_file: str, instruction: str, num_envs: int, steps: int) -> None:
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for _ in range(num_envs):
        here, there = context.Pipe()
        processes.append(context.Process(target=trajectory, args=(bddl_file, steps, there)))
        processes[-1].start()
        pipes.append(here)
    for chunk in range(steps // CHUNK):
        seen = [pipe.recv() for pipe in pipes]
        obs = Observation(
            images={name: np.stack([images[name] for images, _ in seen]) for name in CAMERAS},
            instructions=(instruction,) * num_envs,
            state=np.stack([state for _, state in seen]),
        )
        noise = Noise(0, "action", list(range(num_envs)), [0] * num_envs, [chunk] * num_envs)
        for pipe, actions in zip(pipes, np.asarray(model.sample_chunk(obs, noise, False).actions), strict=True):
            pipe.send(actions)
    for process in processes:
        process.join()


def iteration(runtime: Driver, flow: Flow) -> tuple[float, float]:
    """Seconds of the iteration and of its update."""
    before = perf_counter()
    rollout, kept_columns, _ = collect_rollout(runtime, flow, flow.step + 1)
    keep = np.flatnonzero(kept_columns.numpy())
    middle = perf_counter()
    kept = runtime.samples.prepare(take_columns(rollout, keep), keep)
    runtime.learners.train(kept, runtime.algorithm.advantages(kept))
    after = perf_counter()
    finish_step(runtime, runtime.fleet.version + 1, True)
    flow.finish_step()
    return after - before, after - middle


def play_alone(env: SimEnv, states: Any, steps: int) -> None:
    num_envs = env.num_envs
    env.reset(np.arange(num_envs), np.array([state.id for state in states[:num_envs]]), np.arange(num_envs))
    still = np.zeros((num_envs, CHUNK, 7), np.float32)
    for _ in range(0, steps, CHUNK):
        env.chunk_step(still, np.ones(num_envs, bool), True)


def seconds(work: Callable[[], Any]) -> float:
    before = perf_counter()
    work()
    return perf_counter() - before


def measure(rounds: int, num_envs: int, steps: int) -> dict[str, float]:
    from vla_rl.plugins.envs.libero.suites import Suite

    spec = spec_of(num_envs, steps)
    task = Suite("libero_spatial").tasks[0]
    alone: SimEnv = plugins.build("env", "libero", spec.env.config, EnvContext(num_envs=num_envs, chunk=CHUNK))
    states = alone.reset_states("train")
    model: VLAModel = plugins.build(
        "model", spec.model.type, spec.model.config, ModelContext(env=alone.info, chunk=CHUNK)
    )
    runtime = start(spec)
    try:
        flow = flow_of(spec, State())
        iteration(runtime, flow)
        play_alone(alone, states, CHUNK)
        times: dict[str, list[float]] = {"ours": [], "update": [], "baseline": [], "alone": []}
        for _ in range(rounds):
            whole, update = iteration(runtime, flow)
            times["ours"].append(whole)
            times["update"].append(update)
            times["baseline"].append(
                update + seconds(lambda: baseline_rollout(model, task.bddl_file, task.instruction, num_envs, steps))
            )
            times["alone"].append(seconds(lambda: play_alone(alone, states, steps)))
    finally:
        runtime.workers.close()
        alone.close()
    played = num_envs * steps
    figures = {f"steps_per_s_{name}": played / median(times[name]) for name in ("ours", "baseline", "alone")}
    figures["over_baseline"] = median(b / o for b, o in zip(times["baseline"], times["ours"], strict=True))
    figures["share_of_simulator"] = median(a / o for a, o in zip(times["alone"], times["ours"], strict=True))
    figures["update_s"] = median(times["update"])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--num-envs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=80, help="actions of an episode, a multiple of 8")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    os.environ.setdefault("MUJOCO_GL", "egl")
    figures = measure(options.rounds, options.num_envs, options.steps)
    print(
        f"{options.num_envs} envs of {options.steps} steps, two cameras of {SIZE} px; "
        f"medians of {options.rounds} rounds"
    )
    for name, value in figures.items():
        print(f"{name:<24} {value:>10.2f}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
