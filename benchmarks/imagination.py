"""Real episodes to 90 % on tabletop, with practice in a world model and without.

    python benchmarks/imagination.py                                   # all arms, three seeds
    python benchmarks/imagination.py --arms B C --seeds 0 --steps 40   # some
    python benchmarks/imagination.py --arms C --set imagination.fit_updates=40

N90 is the number of real episodes, those that the world model is fitted to included, until greedy success on the eval
split (200 episodes) is at least 90 % at two evaluations in a row; that at the first of the two. Evaluations are not
counted, for any arm.

| arm | |
| A | the shipped recipe, examples/tabletop_grpo.yaml: 256 episodes a step, to the end of its schedule |
| B | tuned for few episodes: 64 a step, a scan of learning rates, the best of which all arms below have too |
| C | B, and practice in `edm`, preset `tiny`, from zero |
| D | B, and practice in `oracle`, the simulator itself: what a perfect model would be worth |

A run is in FOLDER/ARM/seed-N. It ends once N90 is known; finished runs are not repeated, and interrupted runs continue
from their last checkpoint. Each has a core, or as many as OMP_NUM_THREADS says.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from math import inf
from pathlib import Path
from statistics import median

from attrs import frozen

from vla_rl.core.events import wilson_interval
from vla_rl.core.spec.spec import load_spec
from vla_rl.runtime.start import run
from vla_rl.toolkit.processes import leave_with_parent

SHIPPED = Path(__file__).parents[1] / "examples" / "tabletop_grpo.yaml"
REACHED = 0.9
EPISODES = 64
"""Real ones a training step, in all arms but A."""
EVERY = 4
"""Training steps between two evaluations of these."""
FEW = [
    f"rollout.episodes={EPISODES}",
    f"env.num_envs={EPISODES}",
    "model.freeze_vision=false",
    "model.reuse_vision_features=false",
    "train.epochs=2",
    "train.lr_schedule=constant",
    "train.lr_warmup_steps=5",
    f"train.checkpoint_every={EVERY}",
    f"eval.every={EVERY}",
]
LOCAL = ["runtime.backend=local", "placement={type: collocated}", "hooks=[{type: jsonl}]"]
WHOLE = "start: first, horizon: 4"
"""GRPO has no critic: whole episodes."""
EDM = ["world_model={type: edm, preset: tiny}", f"imagination={{{WHOLE}, outcome: most likely}}"]
UNFITTED = "fit_updates_below_threshold: 0, quality_thresholds: null"
ORACLE = [
    "world_model={type: oracle, env: tabletop, history: 5, num_envs: 64}",
    f"imagination={{{WHOLE}, warm_start: 0, fit_updates: 0, {UNFITTED}}}",
]
ARMS: Mapping[str, Sequence[str]] = {
    "C": EDM,
    "D": ORACLE,
}


@frozen(kw_only=True)
class Outcome:
    """Outcome of one run."""

    n90: int | None
    """Real episodes; None: not reached."""
    real: int
    """Episodes that it played in all."""
    best: float
    """Success of its best evaluation."""
    imagined: int
    minutes: float
    """Wall clock of training, evaluations not counted."""
    fit_minutes: float | None
    """Minutes of fitting until all thresholds were met for the first time; None: they never were."""

    @property
    def at_least(self) -> int:
        """N90, or the episodes in which it was not reached."""
        return self.real if self.n90 is None else self.n90


def play(arm: str, seed: int, lr: float | None, steps: int, folder: Path, extra: Sequence[str]) -> Outcome:
    """Run an arm with a seed, piece by piece until N90 is known, or what is left of it."""
    keys = [*LOCAL, f"seed={seed}"]
    if arm == "A":
        keys += ["eval.every=5", "eval.before=true"]
    else:
        keys += [*FEW, f"train.lr={lr}", *ARMS.get(arm, ())]
    if arm in ARMS:
        keys += extra
    shipped = load_spec(SHIPPED).train.steps
    pieces = [shipped] if arm == "A" else range(EVERY, steps + EVERY, EVERY)
    for last in pieces:
        found = read(folder)
        if found is not None and (found[1].n90 is not None or found[0] >= last):
            continue
        resume = (folder / "checkpoints").is_dir()
        run(load_spec(SHIPPED, [*keys, f"train.steps={min(last, shipped if arm == 'A' else steps)}"]), folder, resume)
    found = read(folder)
    assert found is not None
    return found[1]


def read(folder: Path) -> tuple[int, Outcome] | None:
    """(steps, outcome) of what is in a run's folder; None if it is incomplete."""
    if not (folder / "results.json").exists():
        return None
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = {line["step"]: line for line in lines if "time/step" in line}
    success = {line["step"]: line["eval/success_rate"] for line in lines if "eval/success_rate" in line}
    real, at = {0: 0}, sorted(success)
    for step in sorted(steps):
        real[step] = real[step - 1] + int(steps[step]["rollout/episodes"])
    both = (one for one, other in pairwise(at) if min(success[one], success[other]) >= REACHED)
    reached = next(both, None)
    gates = [name for name in next(iter(steps.values()), {}) if name.startswith("imagination/threshold_")]
    opened = next((n for n, line in steps.items() if gates and all(line[name] for name in gates)), None)
    return max(steps, default=0), Outcome(
        n90=None if reached is None else real[reached],
        real=max(real.values()),
        best=max(success.values()),
        imagined=int(sum(line.get("imagination/episodes", 0) for line in steps.values())),
        minutes=sum(line["time/step"] for line in steps.values()) / 60,
        fit_minutes=None if opened is None else sum(steps[n]["time/fit"] for n in steps if n <= opened) / 60,
    )


def plot(table: Mapping[str, Mapping[int, Path]], file: Path) -> None:
    """Success over real episodes, a line for each run; and success over-estimation below it."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, figsize=(9, 8), sharex=True)
    for index, (arm, runs) in enumerate(table.items()):
        for number, folder in enumerate(runs.values()):
            lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
            episodes, success, gaps = 0, [], []
            for line in lines:
                episodes += int(line.get("rollout/episodes", 0))
                if "eval/success_rate" in line:
                    success.append((episodes, line["eval/success_rate"]))
                if "imagination/over_estimation" in line:
                    gaps.append((episodes, line["imagination/over_estimation"]))
            style = {"color": f"C{index}", "label": arm if number == 0 else None, "alpha": 0.8}
            above.plot(*zip(*success, strict=True), **style)
            if gaps:
                below.plot(*zip(*gaps, strict=True), **style)
    above.axhline(REACHED, color="grey", linewidth=0.5)
    above.set(ylabel="greedy success on the eval split", ylim=(0, 1))
    below.set(ylabel="success over-estimation", xlabel="real episodes")
    above.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def show(outcomes: Mapping[str, Sequence[Outcome]]) -> None:
    print("| arm | N90: median [min, max] | reached | best success | imagined | minutes |")
    print("| --- | --- | --- | --- | --- | --- |")
    for arm, found in outcomes.items():
        n90 = sorted(outcome.at_least for outcome in found)
        more = "" if all(outcome.n90 is not None for outcome in found) else "at least "
        best = median(outcome.best for outcome in found)
        interval = wilson_interval(round(200 * best), 200)
        print(
            f"| {arm} | {more}{median(n90):,.0f} [{n90[0]:,}, {n90[-1]:,}] | "
            f"{sum(o.n90 is not None for o in found)} of {len(found)} | "
            f"{best:.1%} [{interval.low:.1%}, {interval.high:.1%}] | "
            f"{median(o.imagined for o in found):,.0f} | {median(o.minutes for o in found):.1f} |"
        )


def figures(outcomes: Mapping[str, Sequence[Outcome]], tuned: str) -> dict[str, float | None]:
    """For `--json`. Where 90 % was not reached, the episodes played count: a ratio is at most this with those of B, and
    at least this with those of another arm; None where that one was broken off before B, as nothing is known then."""

    def over(arm: str) -> float | None:
        if tuned not in outcomes or arm not in outcomes:
            return None
        base = median(outcome.at_least for outcome in outcomes[tuned])
        least = median(outcome.at_least for outcome in outcomes[arm])
        reached = median(inf if outcome.n90 is None else outcome.n90 for outcome in outcomes[arm]) < inf
        return least / base if reached or least >= base else None

    fits = [outcome.fit_minutes for outcome in outcomes.get("C", ())]
    known = [minutes for minutes in fits if minutes is not None]
    return {
        "oracle_over_tuned": over("D"),
        "edm_over_tuned": over("C"),
        "fit_minutes": median(known) if known and len(known) == len(fits) else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", default=list("ABCD"), choices=list("ABCD"))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=200, help="training steps at most, of all arms but A")
    parser.add_argument("--lrs", nargs="+", type=float, default=[1e-4, 2e-4, 4e-4], help="that B scans")
    parser.add_argument("--lr", type=float, help="of C and D; by default the best of B")
    parser.add_argument("--set", nargs="*", default=[], help="other keys of C and D, as in `vla-rl run`")
    parser.add_argument("--folder", type=Path, default=Path("runs/imagination"))
    parser.add_argument("--workers", type=int, default=1, help="runs at a time")
    parser.add_argument("--image", type=Path, help="PNG: success and inflation over real episodes")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    outcomes: dict[str, list[Outcome]] = {}
    folders: dict[str, dict[int, Path]] = {}

    def play_all(named: Mapping[str, tuple[str, float | None]]) -> None:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(options.workers, mp_context=context, initializer=leave_with_parent) as pool:
            pending = {}
            for name, (arm, lr) in named.items():
                folders[name] = {seed: options.folder / name / f"seed-{seed}" for seed in options.seeds}
                for seed, folder in folders[name].items():
                    pending[name, seed] = pool.submit(play, arm, seed, lr, options.steps, folder, options.set)
            for (name, _), future in pending.items():
                outcomes.setdefault(name, []).append(future.result())

    scan = {f"B lr {lr:g}": ("B", lr) for lr in options.lrs}
    play_all({name: of for name, of in {"A": ("A", None), **scan}.items() if name[0] in options.arms})
    tried = [name for name in scan if name in outcomes]
    tuned = min(tried, key=lambda n: median(o.at_least - o.best for o in outcomes[n])) if tried else ""
    lr = options.lr or (scan[tuned][1] if tuned else options.lrs[len(options.lrs) // 2])
    play_all({arm: (arm, lr) for arm in ARMS if arm in options.arms})
    show(outcomes)
    print(f"tuned: {tuned or 'not run'}; C and D have lr {lr:g}")
    found = figures(outcomes, tuned)
    print(json.dumps(found))
    if options.image:
        plot(folders, options.image)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
