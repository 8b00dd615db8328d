"""What the offline trainers make of a recording of mixed quality on tabletop, against cloning of all of it.

    python benchmarks/offline.py FOLDER                                # all arms, three seeds
    python benchmarks/offline.py FOLDER --arms clone awr --seeds 0 1   # some
    python benchmarks/offline.py FOLDER --arms iql --set imitation.trainer.algorithm.expectile=0.8

For each seed:

1. The checkpoint that ships (`openvla_oft`, `builtin:tabletop`) acts for 1,024 episodes, sampled, from training states.
   They are recorded with their rewards, good and bad.
2. A new policy (`film_resnet`) clones all of the recording: the start of each arm.
3. Each arm continues from there, on the same recording: `clone` with cloning, the others with the trainers `offline`
   and `recap`. `ARMS` has their steps, the first of which train critics alone.

Success is greedy, on 200 evaluation states, which no recording holds. Intervals are Wilson's, of 95 %; the difference
is that to `clone`, over all seeds. What is finished in FOLDER/seed-N is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from math import sqrt
from pathlib import Path
from typing import Any

from attrs import asdict

from vla_rl.cli.run_record import RunRecord
from vla_rl.core.events import wilson_interval
from vla_rl.core.spec.spec import parse_spec
from vla_rl.runtime.start import clone, run

EPISODES = 1024
"""Recorded episodes."""
START_STEPS = 500
ARMS: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "clone": (300, {"type": "behaviour_cloning"}),
    "awr": (300, {"type": "offline", "algorithm": {"type": "awr"}, "critic_steps": 80, "temperature": 0.2}),
    "recap": (400, {"type": "recap", "critic_steps": 150}),
    "iql": (300, {"type": "offline", "algorithm": {"type": "iql"}, "critic_steps": 80, "temperature": 0.2}),
}
"""Arm -> (optimiser steps, trainer)."""


def spec_of(seed: int, **sections: Any) -> dict[str, Any]:
    """Return what all runs of a seed share, with sections that are added or replaced."""
    return {
        "name": "offline",
        "seed": seed,
        "model": {"type": "film_resnet"},
        "env": {"type": "tabletop", "num_envs": 128},
        "rollout": {"chunk": 4, "episodes": EPISODES, "group_size": 8},
        "algorithm": {"type": "grpo"},
        "placement": {"type": "collocated"},
        "runtime": {"backend": "local"},
        "train": {"steps": 1, "lr": 1e-6, "micro_batch": 128},
        "eval": {"episodes_per_task": 25, "before": False},
        "hooks": [{"type": "jsonl"}],
        **sections,
    }


def imitation(steps: int, lr: float, **keys: Any) -> dict[str, Any]:
    return {"steps": steps, "lr": lr, "batch": 64, "lr_schedule": "linear", **keys}


def checkpoint_of(folder: Path) -> str:
    return str(RunRecord(folder).checkpoint / "model")


def finished(folder: Path) -> bool:
    return (folder / "results.json").exists()


def record(seed: int, folder: Path) -> dict[str, Any]:
    """Make the recording of a seed, and the policy that clones all of it. Return figures of the recording."""
    rollout = folder / "rollout"
    model = {"type": "openvla_oft", "checkpoint": "builtin:tabletop"}
    if not finished(rollout):
        hooks = [{"type": "jsonl"}, {"type": "lerobot", "what": "rollout", "rows": "chunks"}]
        run(parse_spec(spec_of(seed, model=model, hooks=hooks)), rollout)
    start = folder / "start"
    if not finished(start):
        section = imitation(START_STEPS, 1e-3, data=data_of(folder))
        clone(parse_spec(spec_of(seed, imitation=section)), start)
    metrics = RunRecord(rollout).metrics
    return {"success": float(metrics["env/success_rate"][-1]), "start": success_of(start)}


def data_of(folder: Path) -> dict[str, Any]:
    return {"type": "lerobot", "folder": str(folder / "rollout" / "lerobot")}


def play(arm: str, seed: int, folder: Path, extra: Sequence[str]) -> dict[str, Any]:
    """Run an arm from the clone of the recording. Return its success."""
    place = folder / "-".join([arm, *(text.split(".")[-1].replace("=", "-") for text in extra)])
    if not finished(place):
        model = {"type": "film_resnet", "checkpoint": checkpoint_of(folder / "start")}
        steps, trainer = ARMS[arm]
        section = imitation(steps, 5e-4, data=data_of(folder), trainer=dict(trainer))
        clone(parse_spec(spec_of(seed, model=model, imitation=section), extra), place)
    return success_of(place)


def success_of(folder: Path) -> dict[str, Any]:
    """Return the success of a finished run with its interval, of one episode from each state: repeats of a greedy
    policy on this simulator are equal."""
    results = RunRecord(folder).results
    first = results["repeats"][0]
    count = results["success"]["n"] // len(results["repeats"])
    return asdict(wilson_interval(round(first * count), count))


def pooled(rates: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    total = sum(rate["n"] for rate in rates)
    return asdict(wilson_interval(round(sum(rate["rate"] * rate["n"] for rate in rates)), total))


def difference(arm: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[float, float, float]:
    """Return the difference of two rates, and the ends of its interval (Newcombe 1998, method 10)."""
    value = arm["rate"] - other["rate"]
    below = sqrt((arm["rate"] - arm["low"]) ** 2 + (other["high"] - other["rate"]) ** 2)
    above = sqrt((arm["high"] - arm["rate"]) ** 2 + (other["rate"] - other["low"]) ** 2)
    return value, value - below, value + above


def percent(rate: Mapping[str, Any]) -> str:
    return f"{100 * rate['rate']:.1f} % [{100 * rate['low']:.1f}, {100 * rate['high']:.1f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the runs")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="further keys of all arms")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    figures: dict[str, Any] = {"recording": {}, "start": {}, **{arm: {} for arm in options.arms}}
    for seed in options.seeds:
        folder = options.folder / f"seed-{seed}"
        recording = record(seed, folder)
        figures["recording"][seed] = recording["success"]
        figures["start"][seed] = recording["start"]
        print(f"seed {seed}: recording {100 * recording['success']:.1f} %, cloned {percent(recording['start'])}")
        for arm in options.arms:
            figures[arm][seed] = play(arm, seed, folder, options.set)
            print(f"seed {seed}: {arm} {percent(figures[arm][seed])}", flush=True)
    print()
    rates = {arm: pooled(list(figures[arm].values())) for arm in ("start", *options.arms)}
    for arm, rate in rates.items():
        each = ", ".join(f"{100 * one['rate']:.1f}" for one in figures[arm].values())
        text = f"{arm:>10} {percent(rate)} ({each})"
        if "clone" in rates and arm not in ("start", "clone"):
            value, low, high = (100 * x for x in difference(rate, rates["clone"]))
            text += f"   {value:+.1f} points [{low:+.1f}, {high:+.1f}]"
        print(text)
    if options.json is not None:
        options.json.write_text(json.dumps({**figures, "pooled": rates}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
