"""LIBERO's processor time and bits against another checkout, side by side.

    git worktree add /tmp/before COMMIT
    python benchmarks/libero_before.py /tmp/before [--suite libero_spatial] [--task 0] [--num-envs 8] [--cameras]
        [--rounds 24] [--json FILE]

Two processes, one of each checkout, play the same chunks of random actions in turn, with all envs in one process, and
start again from official states every fourth round. Printed are the milliseconds of processor time (threads included)
of a step of an env, or with `--cameras` of a chunk with two images of 224 px, their ratio, and in which share of the
rounds the states of the simulators, rewards, proprioception and images have the same bits.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from libero_scale import CHUNK, libero_env
from measuring import Figures, write_json

HERE = Path(__file__).parents[1]
SIZE, PLAYED_AGAIN = 224, 4
WARM_UP = 2


def serve_rounds(options: argparse.Namespace) -> None:
    """Play a round for each line of the standard input; print its processor seconds and a hash of what it gave."""
    from vla_rl.toolkit.envs.settings import SharedProcesses

    cameras = dict.fromkeys(("agentview", "wrist"), SIZE) if options.cameras else {}
    processes = SharedProcesses(apart=False)
    env, states = libero_env(
        options.num_envs, (options.task,), suite=options.suite, cameras=cameras, processes=processes
    )
    ids, env_ids = np.array(next(iter(states.values()))[: options.num_envs]), np.arange(options.num_envs)
    for line in sys.stdin:
        number = int(line)
        if number % PLAYED_AGAIN == 0:
            env.reset(env_ids, ids, env_ids)
        draw = np.random.default_rng(number)
        means, noise = draw.uniform(-1, 1, (len(ids), 1, 7)), draw.normal(0, 0.3, (len(ids), CHUNK, 7))
        actions = np.clip(means + noise, -1, 1).astype(np.float32)
        begun = time.process_time()
        result = env.chunk_step(actions, np.ones(len(ids), bool), False)
        seconds = time.process_time() - begun
        scenes = (env.inline_env(env_id)._current_scene for env_id in env_ids)  # noqa: SLF001  nothing public says it
        arrays = [scene.simulator_state() for scene in scenes]
        arrays += [result.rewards, result.obs.state, *result.obs.images.values()]
        digest = hashlib.sha256(b"".join(np.ascontiguousarray(array).tobytes() for array in arrays))
        print(json.dumps([seconds, digest.hexdigest()]), flush=True)


class Player:
    """Process that plays with one checkout."""

    def __init__(self, checkout: Path) -> None:
        environment = {"MUJOCO_GL": "egl", **os.environ, "PYTHONPATH": str(checkout.resolve() / "src")}
        command = [sys.executable, __file__, *sys.argv[1:], "--serve"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)

    def play_round(self, number: int) -> tuple[float, str]:
        """Return processor seconds and hash of a round."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{number}\n")
        self._process.stdin.flush()
        seconds, digest = json.loads(self._process.stdout.readline())
        return seconds, digest

    def close(self) -> None:
        self._process.communicate()


def compare_rounds(options: argparse.Namespace) -> Figures:
    players = {"before": Player(options.before), "now": Player(HERE)}
    times: dict[str, list[float]] = {name: [] for name in players}
    equal = 0
    for number in range(options.rounds + WARM_UP):
        digests = set()
        for name in sorted(players, reverse=number % 2 == 0):
            seconds, digest = players[name].play_round(number)
            digests.add(digest)
            times[name].append(seconds)
        equal += len(digests) == 1
    for player in players.values():
        player.close()
    parts = options.num_envs * (1 if options.cameras else CHUNK)
    figures: Figures = {f"{name}_ms": median(times[name][WARM_UP:]) / parts * 1e3 for name in times}
    figures["now_over_before"] = figures["now_ms"] / figures["before_ms"]
    figures["rounds_with_the_same_bits"] = equal / (options.rounds + WARM_UP)
    return figures


def parse_options() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="the other checkout")
    parser.add_argument("--suite", default="libero_spatial")
    parser.add_argument("--task", type=int, default=0)
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--cameras", action="store_true", help="chunks with two images instead of steps without any")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    if options.serve:
        serve_rounds(options)
        return
    figures = compare_rounds(options)
    for name, value in figures.items():
        print(f"{name:28} {value:10.3f}")
    write_json(figures, options.json)


if __name__ == "__main__":
    main()
