"""How many demonstrations DAgger saves on the tabletop: a clone of N of the expert's episodes, one of half of them, and
`dagger` with half of them labelled.

    OMP_NUM_THREADS=1 python benchmarks/dagger.py [--seeds 0 1 2] [--episodes 192] [--json FILE]

All begin with the same random weights of `film_resnet` and make as many optimiser steps of the same size at the same
learning rate. `dagger` labels whole rollouts, failed ones included: in the first of `--steps` rollouts the expert acts,
in the others the policy. Greedy success on the evaluation states of all tasks, with 95 % intervals.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from vla_rl.core.spec.spec import parse_spec
from vla_rl.runtime.start import clone, run

BATCH = 64


def spec_of(options: argparse.Namespace, seed: int, **sections: Any) -> dict[str, Any]:
    env = {"type": "tabletop", "num_envs": 32, "tasks": options.tasks}
    tasks = len(options.tasks) or 8
    spec = {
        "name": "dagger",
        "seed": seed,
        "model": {"type": "film_resnet", "network": {"channels": [8, 16], "keypoints": 8}},
        "env": env,
        "rollout": {"chunk": 4, "episodes": 32},
        "train": {"steps": 1, "lr": 1e-3, "micro_batch": BATCH},
        "eval": {"before": False, "episodes_per_task": -(-options.evaluations // tasks)},
        "hooks": [{"type": "jsonl"}],
        "runtime": {"backend": "local"},
    }
    return {**spec, **sections}


def cloned(options: argparse.Namespace, seed: int, episodes: int, noise: float = 0.0) -> dict[str, float]:
    """Return the results of cloning the expert."""
    imitation = {
        "expert": {"episodes": episodes, "noise": noise},
        "steps": options.updates,
        "batch": BATCH,
        "lr": 1e-3,
    }
    spec = spec_of(
        options,
        seed,
        imitation=imitation,
        algorithm={"type": "grpo"},
        rollout={"chunk": 4, "episodes": 32, "group_size": 2},
    )
    with tempfile.TemporaryDirectory() as folder:
        clone(parse_spec(spec), folder)
        return results_in(Path(folder))


def aggregated(options: argparse.Namespace, seed: int, episodes: int) -> dict[str, float]:
    """Return the results of `dagger` with this many labelled episodes."""
    trainer = {"type": "dagger", "updates": options.updates // options.steps, "batch": BATCH}
    train = {"steps": options.steps, "lr": 1e-3, "micro_batch": BATCH}
    rollout = {"chunk": 4, "episodes": episodes // options.steps}
    with tempfile.TemporaryDirectory() as folder:
        run(parse_spec(spec_of(options, seed, trainer=trainer, train=train, rollout=rollout)), folder)
        return results_in(Path(folder))


def results_in(folder: Path) -> dict[str, float]:
    """Return success with its interval, and the labelled chunks that were cloned."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    results: dict[str, float] = {}
    for line in lines:
        for name in ("dagger/samples", "imitation/samples"):
            if name in line:
                results["chunks"] = line[name]
        if "eval/success_rate" in line:
            results |= {
                name: line[f"eval/{name}"] for name in ("success_rate", "success_low", "success_high", "episodes")
            }
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--episodes", type=int, default=192, help="demonstrations of the clone")
    parser.add_argument("--steps", type=int, default=3, help="rollouts of dagger")
    parser.add_argument("--updates", type=int, default=300, help="optimiser steps of each")
    parser.add_argument("--tasks", nargs="*", default=["pick_red"], help="tabletop's tasks; none: all eight")
    parser.add_argument("--evaluations", type=int, default=400, help="evaluation episodes")
    parser.add_argument("--noise", type=float, default=0.0, help="of a further clone's demonstrations; 0: no such row")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    half = options.episodes // 2
    cases = {
        f"dagger with {half}": lambda seed: aggregated(options, seed, half),
        f"clone of {options.episodes}": lambda seed: cloned(options, seed, options.episodes),
        f"clone of {half}": lambda seed: cloned(options, seed, half),
    }
    if options.noise:
        noisy = f"clone of {options.episodes}, noise {options.noise:g}"
        cases[noisy] = lambda seed: cloned(options, seed, options.episodes, options.noise)
    rows = []
    for seed in options.seeds:
        for case, results_of in cases.items():
            row = {"case": case, "seed": seed, **results_of(seed)}
            rows.append(row)
            interval = f"[{100 * row['success_low']:.1f}, {100 * row['success_high']:.1f}]"
            print(
                f"seed {seed}  {case:>22}: {100 * row['success_rate']:5.1f} % {interval} of {row['episodes']:.0f}, "
                f"{row['chunks']:.0f} chunks",
                flush=True,
            )
            if options.json:
                options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
