"""Control cost of a chunk step: Ray backend, simulator and policy in separate processes, given latencies.

    python benchmarks/control.py [--rollouts 5] [--json FILE]

Zero latency shows what one chunk step costs by itself; 100 + 100 ms shows how close one and two lanes come to the
ideal (serial: sum of both; two lanes: the slower of both, plus one of the other at the start). Medians of the rollouts.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from time import perf_counter

from vla_rl.core.runtime.driver import Runtime
from vla_rl.core.spec import parse_spec

ROWS, STEPS = 16, 32


def measure(image: int, latency: float, lanes: int, rollouts: int, chunk_steps: int) -> float:
    """Median seconds of one rollout of `chunk_steps` chunk steps."""
    spec = parse_spec(
        {
            "name": "control",
            "plugins": ["vla_rl.core.testing.scripted", "vla_rl.core.testing.slots"],
            "model": {"type": "linear", "latency_s": latency / lanes},
            "env": {
                "type": "scripted",
                "num_envs": ROWS,
                "image": image,
                "length": 10**6,
                "max_steps": chunk_steps,
                "latency_s": latency / lanes,
            },
            "rollout": {"chunk": 1, "episodes": ROWS},
            "algorithm": {"type": "ppo"},
            "placement": {"type": "slots", "stages": lanes},
            "train": {"steps": 1, "lr": 1e-3, "micro_batch": 64},
            "hooks": [],
        }
    )
    runtime = Runtime(spec)
    try:
        runtime.rollout(0)
        times = []
        for step in range(1, rollouts + 1):
            before = perf_counter()
            runtime.rollout(step)
            times.append(perf_counter() - before)
        return statistics.median(times)
    finally:
        runtime.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    figures: dict[str, float] = {}
    print(f"{'case':44} {'measured':>12} {'ideal':>10} {'ratio':>7}")
    for image in (8, 224):
        steps = 128
        cost = 1000 * measure(image, 0.0, 1, arguments.rollouts, steps) / steps
        figures[f"control_ms_{image}px"] = cost
        print(f"{f'{ROWS} rows of {image} px, no latency':44} {cost:9.2f} ms {'0':>10}")
    for lanes, ideal in ((1, STEPS * 0.2), (2, STEPS * 0.1 + 0.05)):
        seconds = measure(224, 0.1, lanes, max(1, arguments.rollouts), STEPS)
        figures[f"rollout_s_{lanes}_lanes"] = seconds
        case = f"{ROWS} rows of 224 px, 100 + 100 ms, {lanes} lane{'s' * (lanes > 1)}, {STEPS} steps"
        print(f"{case:44} {seconds:10.2f} s {ideal:8.2f} s {seconds / ideal:7.3f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
