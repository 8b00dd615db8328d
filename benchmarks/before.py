"""Whether synchronous training is as fast as in another checkout: the loop's own cost in addition to sleeps.

    git worktree add /tmp/before COMMIT
    python benchmarks/before.py /tmp/before [--rounds 3] [--steps 6] [--json FILE]

Both train on tickets of equal length, on Ray, as separate processes and in turn: 16 envs that play 4 tickets of 48
chunk steps each, half simulation and half inference, all of it sleeps (the rollout of `benchmarks/asynchronous.py`).
Printed are the median seconds of a training step of each, and their ratio within a round of turns, the median of these:
`sync_over_before`, 1 where nothing was lost.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parents[1]
ENVS, TICKETS, LENGTH = 16, 4, 48
LATENCY = 2.7 / (TICKETS * LENGTH) / 2
"""Seconds of a simulation, and of an inference."""
WARM_UP = 2


def spec(steps: int) -> dict[str, object]:
    env = {"type": "scripted", "num_envs": ENVS, "length": LENGTH, "max_steps": LENGTH, "num_states": 10**5}
    return {
        "name": "before",
        "plugins": ["vla_rl.testing.scripted", "vla_rl.testing.slot_placement"],
        "model": {"type": "linear", "latency_s": LATENCY},
        "env": {**env, "latency_s": LATENCY},
        "rollout": {"chunk": 1, "episodes": TICKETS * ENVS},
        "algorithm": {"type": "ppo"},
        "placement": {"type": "slots"},
        "train": {"steps": WARM_UP + steps, "lr": 1e-4, "micro_batch": 10 * TICKETS * ENVS * LENGTH},
        "eval": {"before": False, "episodes_per_task": 1},
        "hooks": [{"type": "jsonl"}],
    }


def seconds_a_step(checkout: Path, steps: int) -> float:
    """The median of a run's steps, in that checkout."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "spec.yaml").write_text(json.dumps(spec(steps)))
        command = [sys.executable, "-m", "vla_rl.cli.main", "run", "spec.yaml", "--folder", "run"]
        environment = os.environ | {"PYTHONPATH": str(checkout.resolve() / "src")}
        subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
        lines = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    seconds: list[float] = [line["time/step"] for line in lines if "time/step" in line]
    return statistics.median(seconds[WARM_UP:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="the other checkout")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="measured training steps of a turn")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    turns = [[seconds_a_step(of, options.steps) for of in (options.before, HERE)] for _ in range(options.rounds)]
    figures = {
        "before_s": statistics.median(before for before, _ in turns),
        "sync_s": statistics.median(now for _, now in turns),
        "sync_over_before": statistics.median(now / before for before, now in turns),
    }
    for name, value in figures.items():
        print(f"{name:20} {value:10.4f}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
