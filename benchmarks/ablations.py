"""Ablations of design choices on the built-in simulator: runs, success curves, and an image of each comparison.

    python benchmarks/ablations.py                       # everything: 114 runs of two to fifteen minutes on a core each
    python benchmarks/ablations.py --only filter lag-4   # some comparisons
    python benchmarks/ablations.py --list                # the comparisons
    python benchmarks/ablations.py --plot                # images and table of what has been run so far

A run is in FOLDER/COMPARISON/VARIANT/seed-N, or where a comparison before it has the same run. Finished runs are not
repeated, and interrupted runs continue from their last checkpoint, so the command can be stopped and repeated at
will. Variants of a comparison differ in the keys that --list shows. Curves are the mean of the seeds, bands their
range; success is greedy, on states that training never sees.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import yaml

from vla_rl.core.spec.spec import parse_spec
from vla_rl.runtime.start import run
from vla_rl.toolkit.processes import leave_with_parent

Keys = Mapping[str, Any]
EXAMPLES = Path(__file__).parent.parent / "examples"
REACHED = 0.9
"""Success whose first step is printed."""


def merged(*parts: Keys) -> dict[str, Any]:
    """Sections joined key by key; later parts win."""
    out: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            out[key] = merged(out.get(key) or {}, value) if isinstance(value, Mapping) else value
    return out


GRPO: Keys = {"algorithm": {"type": "grpo"}, "train": {"steps": 120}, "eval": {"every": 20}}
"""After 40 steps seeds differ by more than variants."""
CRITIC: Keys = {
    "model": {"value_head": {"type": "mlp", "hidden": [128], "detach": True}},
    "rollout": {"group_size": 1},
    "algorithm": {"time_limit": "terminal", "value_coef": 0.5, "value_clip": None, "huber_delta": None},
    "train": {"value_lr": 1e-3, "critic_warmup_steps": 2},
}
PPO: Keys = {**CRITIC, "algorithm": {**CRITIC["algorithm"], "type": "ppo"}}
PARTIAL: Keys = {"episodes": None, "auto_reset": {"steps": 48}}
LAGGED: Keys = merged(
    CRITIC,
    {
        "env": {"tasks": ["pick_red", "put_red"], "num_envs": 64},
        "rollout": {"episodes": None, "auto_reset": {"steps": 24}},
        "train": {"global_batch": 128, "lr_warmup_steps": 5},
        "eval": {"every": 20, "episodes_per_task": 100},
    },
)
"""Three optimiser steps a version, and two tasks, so that a run can have many times more versions than its lag."""
OLD_DATA: Keys = merged(
    CRITIC,
    {"train": {"steps": 100, "global_batch": 128, "lr": 1e-4, "lr_warmup_steps": 5}, "rollout": {"lag": 16}},
)
METHODS: dict[str, Keys] = {
    "GIPO": {"algorithm": {"type": "gipo", "sigma": 0.5, "behaviour_kl_coef": 0.1}},
    "PPO": {"algorithm": {"type": "ppo"}},
    "decoupled": {"algorithm": {"type": "ppo", "correction": {"type": "decoupled"}}},
    "truncated": {"algorithm": {"type": "ppo", "correction": {"type": "truncated"}}},
    "V-trace": {"algorithm": {"type": "ppo", "correction": {"type": "v-trace"}}},
}
"""What is done about old data. At lag 0 decoupled and truncated are PPO, bit for bit."""
WITH_KL: Keys = {"algorithm": {"type": "gipo", "sigma": 0.3, "behaviour_kl_coef": 0.3}}
POOR_START: Keys = merged(
    GRPO,
    {
        "env": {"tasks": ["put_red", "put_green", "put_blue", "put_yellow"]},
        "eval": {"every": 5, "episodes_per_task": 50},
    },
)
"""Tasks in which the base checkpoint seldom succeeds."""


def srpo(**keys: Any) -> Keys:
    """With groups of failures, which are what it is for, and successes well above any failure."""
    fixed = {"type": "srpo", "filter": None, "reward_scale": 0.3, "frames": 4, "image_size": 64}
    return {"algorithm": {**fixed, **keys}}


def example(name: str, **keys: Any) -> Keys:
    """A shipped spec with what it leaves out, so that the keys of all comparisons do not hold, and with more
    evaluations."""
    unset: Keys = {"rollout": {"group_size": 1, "episodes": None}, "runtime": {"backend": "ray"}}
    often: Keys = {"eval": {"every": 10}, "hooks": [{"type": "jsonl"}]}
    shipped = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())
    return merged(unset, {key: part for key, part in shipped.items() if key not in ("name", "seed")}, often, keys)


PRECISIONS: dict[str, Keys] = {"float32": {}, "bfloat16": {"model": {"dtype": "bfloat16"}}}
"""For GPUs: a processor without instructions for bfloat16 takes ten times as long as in float32."""
COMPARISONS: dict[str, tuple[Keys, dict[str, Keys]]] = {
    "value": (
        merged(PPO, {"rollout": PARTIAL}),
        {"chunk-level": {"algorithm": {"advantage": "chunk"}}, "action-level": {"algorithm": {"advantage": "action"}}},
    ),
    "reset": (
        PPO,
        {
            "partial reset": {"rollout": PARTIAL},
            "fixed length": {"rollout": {**PARTIAL, "ignore_terminations": True}},
        },
    ),
    "length-normalisation": (
        GRPO,
        {
            "trajectory-mean": {"algorithm": {"aggregation": "trajectory-mean"}},
            "step-mean": {"algorithm": {"aggregation": "step-mean"}},
        },
    ),
    "mask": (
        GRPO,
        {"valid action mask": {}, "every action": {"rollout": {"ignore_terminations": True}}},
    ),
    "filter": (
        GRPO,
        {
            "equal scores": {},
            "success 0.2 to 0.8": {"algorithm": {"filter": {"lower": 0.2, "upper": 0.8}}},
            "none": {"algorithm": {"filter": None, "filter_identical": False}},
        },
    ),
    "trust-or-clip": (
        merged(CRITIC, {"rollout": PARTIAL}),
        {"PPO": METHODS["PPO"], "GIPO": WITH_KL, "GIPO, 80 steps": merged(WITH_KL, {"train": {"steps": 80}})},
    ),
    "gipo-kl": (OLD_DATA, {"no KL": {"algorithm": {"type": "gipo"}}, "KL 0.3, sigma 0.3": WITH_KL}),
    "lag-0": (
        merged(LAGGED, {"train": {"steps": 100}}),
        {name: METHODS[name] for name in ("GIPO", "PPO", "V-trace")},
    ),
    "lag-1": (merged(LAGGED, {"rollout": {"lag": 1}, "train": {"steps": 100}}), METHODS),
    "lag-4": (merged(LAGGED, {"rollout": {"lag": 4}, "train": {"steps": 100}}), METHODS),
    "lag-16": (merged(LAGGED, {"rollout": {"lag": 16}, "train": {"steps": 240}}), METHODS),
    "async-ppo": (
        {},
        {
            "synchronous": example("tabletop_ppo"),
            "max_lag 1, decoupled": example("tabletop_async_ppo"),
            "max_lag 1, no correction": example("tabletop_async_ppo", algorithm={"correction": None}),
        },
    ),
    "accerl": (
        {},
        {
            "synchronous": example("tabletop_accerl", asynchrony={"max_lag": 0, "replay": None}),
            "max_lag 1, two uses": example("tabletop_accerl"),
        },
    ),
    "srpo": (
        POOR_START,
        {
            "GRPO": {},
            "SRPO, trained encoder": srpo(encoder="builtin:tabletop", camera="wrist"),
            "SRPO, random encoder": srpo(encoder="tiny"),
        },
    ),
    "precision": (
        # All weights are trained, the vision transformers too, since precision matters to each of them.
        example(
            "tabletop_grpo",
            runtime={"backend": "local"},
            model={"freeze_vision": False, "reuse_vision_features": False},
            train={"steps": 105, "lr": 2e-4, "lr_warmup_steps": 0, "epochs": 2, "checkpoint_every": 35},
        ),
        PRECISIONS,
    ),
    "precision-pi0": (
        example(
            "tabletop_pi0", model={"checkpoint": None}, runtime={"backend": "local"}, eval={"episodes_per_task": 100}
        ),
        PRECISIONS,
    ),
}
"""Name -> what its variants share, and the variants."""


def spec_of(options: argparse.Namespace, comparison: str, variant: str, seed: int) -> dict[str, Any]:
    base, variants = COMPARISONS[comparison]
    common: Keys = {
        "name": comparison,
        "seed": seed,
        "model": {"type": "openvla_oft", "checkpoint": "builtin:tabletop"},
        "env": {"type": "tabletop", "num_envs": options.num_envs},
        "rollout": {"chunk": 4, "episodes": options.num_envs, "group_size": 8},
        "runtime": {"backend": "local"},
        "train": {
            "steps": options.steps,
            "lr": 2e-4,
            "lr_schedule": "linear",
            "micro_batch": 64,
            "global_batch": 64,
            "checkpoint_every": 10,
        },
        "eval": {"every": options.every, "episodes_per_task": options.episodes_per_task},
        "hooks": [{"type": "jsonl"}],
    }
    return merged(common, base, variants[variant])


def curve(folder: Path) -> dict[int, float]:
    """Evaluated success by training step; empty where nothing has been evaluated."""
    file = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {line["step"]: line["eval/success_rate"] for line in lines if "eval/success_rate" in line}


def first_step(curve: Mapping[int, float], rate: float) -> int | None:
    """The first evaluated step with that success."""
    return min((step for step, found in curve.items() if found >= rate), default=None)


def home(options: argparse.Namespace, comparison: str, variant: str, seed: int) -> Path:
    """Folder of the run; that of the first comparison which has the same one."""
    wanted = resolved(options, comparison, variant, seed)
    for name, (_, variants) in COMPARISONS.items():
        for other in variants:
            if resolved(options, name, other, seed) == wanted:
                return options.folder / name / other.replace(" ", "-") / f"seed-{seed}"
    raise AssertionError("unreachable")


def resolved(options: argparse.Namespace, comparison: str, variant: str, seed: int) -> dict[str, Any]:
    return parse_spec(spec_of(options, comparison, variant, seed)).to_dict() | {"name": None}


def play(options: argparse.Namespace, comparison: str, variant: str, seed: int) -> str:
    """Run it, or what is left of it. -> its name."""
    folder = home(options, comparison, variant, seed)
    if not (folder / "results.json").exists():
        run(parse_spec(spec_of(options, comparison, variant, seed)), folder, resume=(folder / "checkpoints").exists())
    return f"{comparison}: {variant}, seed {seed}"


def begin(cores: Any) -> None:
    leave_with_parent()
    os.sched_setaffinity(0, {cores.get()})


def play_all(options: argparse.Namespace) -> None:
    """Every run once, `--jobs` at a time, each on a separate core."""
    context = multiprocessing.get_context("spawn")
    cores = context.Queue()
    for core in sorted(os.sched_getaffinity(0))[: options.jobs]:
        cores.put(core)
    jobs = {}
    for comparison in options.only:
        for seed in options.seeds:
            for variant in COMPARISONS[comparison][1]:
                jobs.setdefault(home(options, comparison, variant, seed), (comparison, variant, seed))
    with ProcessPoolExecutor(options.jobs, mp_context=context, initializer=begin, initargs=(cores,)) as pool:
        for name in pool.map(play, *zip(*((options, *job) for job in jobs.values()), strict=True)):
            print(name, flush=True)


def gathered(options: argparse.Namespace, comparison: str) -> dict[str, list[dict[int, float]]]:
    """Variant -> curves of its seeds."""
    found = {}
    for variant in COMPARISONS[comparison][1]:
        paths = [home(options, comparison, variant, seed) for seed in options.seeds]
        found[variant] = [c for c in map(curve, paths) if c]
    return {variant: curves for variant, curves in found.items() if curves}


def plot(comparison: str, curves: Mapping[str, list[dict[int, float]]], file: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(5, 3.2), dpi=150)
    for variant, seeds in curves.items():
        steps = sorted(set.intersection(*(set(seed) for seed in seeds)))
        rates = [[100 * seed[step] for seed in seeds] for step in steps]
        label = f"{variant} ({len(seeds)} seed{'s' * (len(seeds) > 1)})"
        (line,) = axes.plot(steps, [statistics.mean(r) for r in rates], label=label)
        axes.fill_between(steps, [min(r) for r in rates], [max(r) for r in rates], alpha=0.2, color=line.get_color())
    axes.set(title=comparison, xlabel="training step", ylabel="success (%)", ylim=(0, 100))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(COMPARISONS), default=list(COMPARISONS), metavar="COMPARISON")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=10, help="training steps between evaluations")
    parser.add_argument(
        "--num-envs", type=int, default=128, help="simulator envs, and episodes a step; a multiple of 8"
    )
    parser.add_argument("--episodes-per-task", type=int, default=25, help="evaluation states of each task")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time; at most one a core")
    parser.add_argument("--folder", type=Path, default=Path("runs/ablations"))
    parser.add_argument("--images", type=Path, default=Path("docs/ablations"))
    parser.add_argument("--plot", action="store_true", help="run nothing, show the existing runs")
    parser.add_argument("--list", action="store_true", help="name the comparisons and the keys in which they differ")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    if options.list:
        for comparison in options.only:
            print(comparison)
            for variant, keys in COMPARISONS[comparison][1].items():
                print(f"  {variant}: {json.dumps(keys)}")
        return
    if not options.plot:
        play_all(options)
    figures: dict[str, float] = {}
    for comparison in options.only:
        curves = gathered(options, comparison)
        if not curves:
            continue
        plot(comparison, curves, options.images / f"{comparison}.png")
        for variant, seeds in curves.items():
            last = [seed[max(seed)] for seed in seeds]
            mean = statistics.mean(last)
            figures[f"{comparison}/{variant}"] = mean
            each = ", ".join(f"{100 * rate:.1f}" for rate in last)
            reached = ", ".join(str(first_step(seed, REACHED) or "never") for seed in seeds)
            print(f"{comparison:22} {variant:22} {100 * mean:5.1f} %   (seeds: {each}; step {max(seeds[0])})", end="")
            print(f"   {REACHED:.0%} at: {reached}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
