"""Rendered env-steps a second of the embedded simulator: every step rendered, both cameras, one thread."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np
import torch

from vla_rl.core.contexts import EnvContext
from vla_rl.plugins.envs.tabletop import plugin
from vla_rl.plugins.envs.tabletop.config import TabletopConfig


def measure(num_envs: int, size: int, seconds: float) -> float:
    """Env-steps a second over about `seconds`, chunks of one action."""
    env = plugin.build(TabletopConfig(image_size=size), EnvContext(num_envs=num_envs))
    states = env.reset_states("train")[:num_envs]
    env.reset(np.arange(num_envs), np.array([s.id for s in states]), np.zeros(num_envs, np.int64))
    actions, active = torch.rand(num_envs, 1, 3) * 2 - 1, np.ones(num_envs, bool)
    env.chunk_step(actions, active, False)
    steps, start = 0, time.perf_counter()
    while (passed := time.perf_counter() - start) < seconds:
        env.chunk_step(actions, active, False)
        steps += num_envs
    return steps / passed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--seconds", type=float, default=1.0, help="time of one measurement")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures = {}
    print(f"{'envs':>5} {'pixels':>7} {'env-steps/s':>12}   (median of 5)")
    for num_envs, size in ((16, 64), (64, 64), (256, 64), (64, 224)):
        rate = statistics.median(measure(num_envs, size, options.seconds) for _ in range(5))
        figures[f"env_steps_per_second_{num_envs}x{size}px"] = rate
        print(f"{num_envs:>5} {size:>7} {rate:>12,.0f}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
