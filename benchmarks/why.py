"""How often `vla-rl why` names the cause: planted faults in short runs on the built-in simulator, and healthy runs.

    python benchmarks/why.py                       # all; about a minute each
    python benchmarks/why.py --only clip healthy-grpo
    python benchmarks/why.py --seed 1 --json why.json

Prints the first three answers of each run, and how many were right. Faults are keys of a spec, or wrappers of
benchmarks/why_faults.py.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from attrs import frozen
from measuring import command_line, write_json

FAULTS = str(Path(__file__).with_name("why_faults.py"))
ROOT = Path(__file__).parents[1]
BUDGET = "400s"
"""Budget of each search: these runs take seconds, most of which their start takes."""

OFT = {"type": "openvla_oft", "checkpoint": "builtin:tabletop", "freeze_vision": True, "reuse_vision_features": True}
CRITIC = {"type": "mlp", "hidden": [128], "detach": True}
COMMON: dict[str, Any] = {
    "name": "why",
    "plugins": [FAULTS],
    "placement": {"type": "collocated", "cpu_workers": 1},
    "runtime": {"backend": "local"},
    "eval": {"before": False, "episodes_per_task": 8},
    "hooks": [{"type": "jsonl"}],
}
GRPO: dict[str, Any] = {
    **COMMON,
    "model": OFT,
    "env": {"type": "tabletop", "num_envs": 64},
    "rollout": {"chunk": 4, "episodes": 64, "group_size": 8},
    "algorithm": {"type": "grpo"},
    "train": {
        "steps": 5,
        "lr": 2e-4,
        "micro_batch": 32,
        "global_batch": 64,
        "checkpoint_every": 1,
        "keep_checkpoints": 9,
    },
}
PPO: dict[str, Any] = {
    **COMMON,
    "model": {**OFT, "value_head": CRITIC},
    "env": {"type": "tabletop", "num_envs": 32},
    "rollout": {"chunk": 4, "auto_reset": {"steps": 32}},
    "algorithm": {
        "type": "ppo",
        "advantage": "chunk",
        "time_limit": "terminal",
        "value_clip": None,
        "huber_delta": None,
    },
    "train": {**GRPO["train"], "steps": 5, "value_lr": 3e-3},
}
PI0: dict[str, Any] = {
    **GRPO,
    "model": {"type": "pi0", "preset": "tiny", "cameras": ["wrist"], "train_expert_only": False,
              "noise": {"type": "flow_sde", "level": 0.7, "steps": "all"}},
    "env": {"type": "tabletop", "num_envs": 64, "tasks": ["pick_red", "put_red"]},
    "bc_warmup": {"episodes": 1500, "epochs": 3, "lr": 1e-3, "batch": 64, "noise": 0.6},
}  # fmt: skip
SAC: dict[str, Any] = {
    **COMMON,
    "model": {"type": "pi0", "preset": "tiny", "cameras": ["wrist"], "steering": {}},
    "env": PI0["env"],
    "imitation": {"expert": {"episodes": 256, "noise": 0.6}, "steps": 60, "batch": 64, "lr": 1e-3, "report_every": 30},
    "rollout": {"chunk": 4, "episodes": 64},
    "trainer": {"type": "dsrl", "updates_per_step": 1, "min_data": 200, "batch": 64, "hidden": [64, 64],
                "critic_updates": 20, "lr": 1e-3, "discount": 0.98, "target_rate": 0.01},
    "train": {"steps": 4, "lr": 1e-3, "micro_batch": 64, "checkpoint_every": 1},
}  # fmt: skip


@frozen
class Case:
    """A run, what is wrong with it, and the answers that count as right."""

    base: dict[str, Any]
    right: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    fault: str = ""


LORA = ("model.lora={rank: 8}", "model.freeze_vision=false", "model.reuse_vision_features=false")
CASES = {
    "negated rewards": Case(GRPO, ("rewards have the wrong sign",), ("rollout.reward_coef=-1",)),
    "late reward": Case(GRPO, ("rewards come late", "success brings no reward"), fault="late reward"),
    "false successes": Case(GRPO, ("false successes",), fault="false successes"),
    "success lost at the limit": Case(GRPO, ("successes are lost",), fault="success lost at the limit"),
    "rate x 10": Case(GRPO, ("rate too high",), ("train.lr=5.0e-3",)),
    "rate / 100": Case(GRPO, ("rate too low",), ("train.lr=2.0e-6",)),
    "bfloat16": Case(GRPO, ("rounding hides the update",), ("model.dtype=bfloat16", "train.lr=1.0e-8")),
    "stale weights": Case(GRPO, ("stale weights act",), ("train.lr=1.0e-3",), "stale weights act"),
    "wrong mask": Case(GRPO, ("a wrong mask",), fault="wrong mask"),
    "detached critic": Case(PPO, ("the critic explains nothing",), ("train.value_lr=1.0e-9", "train.steps=10")),
    "clip": Case(GRPO, ("clip too narrow",), ("algorithm.clip_low=0.0001", "algorithm.clip_high=0.0001", "train.epochs=2")),  # noqa: E501
    "no exploration": Case(GRPO, ("no exploration",), ("rollout.temperature=0.01",)),
    "discount": Case(PPO, ("discount too strong",), ("algorithm.gamma=0.3",)),
    "identical groups": Case(GRPO, ("members of a group are alike",), fault="identical groups"),
    "statistics": Case(GRPO, ("hardly any success", "actions are changed"), fault="statistics of another suite"),
    "flipped camera": Case(GRPO, ("acting sees other images",), LORA[1:], "flipped camera in acting"),
    "bootstrapped ends": Case(PPO, ("episodes bootstrap past their end",), ("algorithm.time_limit=always",)),
    "padding": Case(PPO, ("normalised over padding",), ("rollout={chunk: 4, episodes: 32}",), "normalised over padding"),  # noqa: E501
    "starving task": Case(GRPO, ("a task starves",), fault="starving task"),
    "ignored dimension": Case(GRPO, ("actions are changed",), fault="ignored dimension"),
    "KL": Case(GRPO, ("KL penalty too strong",), (*LORA, "algorithm.kl={coef: 300}")),
    "epochs": Case(GRPO, ("too many epochs",), ("train.epochs=30",)),
    "micro-batches": Case(GRPO, ("micro-batches are weighed wrongly",), ("train.micro_batch=24",), "micro-batches weighed wrongly"),  # noqa: E501
    "idle adapter": Case(GRPO, ("weights without a gradient",), (*LORA,), "idle adapter"),
    "value loss": Case(PPO, ("the value loss drowns the policy",), ("model.value_head.detach=false", "algorithm.value_coef=1000")),  # noqa: E501
    "clipped rewards": Case(GRPO, ("rewards are clipped",), fault="clipped rewards"),
    "wrong tokens": Case(GRPO, ("acting and scoring differ",), fault="wrong tokens scored"),
    "lag": Case(GRPO, ("data too old",), ("rollout.lag=3", "train.lr=1.0e-3", "train.steps=8")),
    "greedy evaluation": Case(GRPO, ("evaluation is greedy",), fault="evaluation is greedy"),
    "budget": Case(GRPO, ("slow",), ("train.steps=3", "train.lr=1.0e-4")),
}  # fmt: skip
HEALTHY = {
    "healthy GRPO": Case(GRPO, ("",)),
    "healthy GRPO, weighted tasks": Case(GRPO, ("",), ("rollout.task_sampling={type: weighted, smoothing: 20}",)),
    "healthy GRPO, resampled": Case(GRPO, ("",), ("rollout.resample={max_rounds: 2}", "train.epochs=2")),
    "healthy PPO": Case(PPO, ("",)),
    "healthy PPO, episodes": Case(PPO, ("",), ("rollout={chunk: 4, episodes: 32}",)),
    "healthy GIPO": Case(PPO, ("",), ("algorithm={type: gipo, sigma: 0.3, time_limit: terminal}",)),
    "healthy lag 1": Case(PPO, ("",), ("rollout.lag=1", "algorithm.correction={type: decoupled}")),
    "healthy SRPO": Case(GRPO, ("",), ("algorithm={type: srpo, encoder: 'builtin:tabletop', camera: wrist, frames: 4}",)),  # noqa: E501
    "healthy pi0": Case(PI0, ("",)),
    "healthy SAC": Case(SAC, ("",)),
}  # fmt: skip
ALL = CASES | HEALTHY


def diagnose(name: str, seed: int, home: Path) -> dict[str, Any]:
    """Train one run, and ask why it does not learn."""
    import vla_rl
    from vla_rl.core.spec.spec import parse_spec

    case, folder = ALL[name], home / name.replace(" ", "-").replace("/", "")
    os.environ["WHY_FAULT"] = case.fault
    begun = time.perf_counter()
    vla_rl.run(parse_spec(case.base, overrides=[*case.overrides, f"seed={seed}"]), folder)
    trained = time.perf_counter() - begun
    found = vla_rl.why(folder, budget=BUDGET)
    answers = [cause.name for cause in found.causes[:3]] or [found.answer]
    if name in HEALTHY:
        first = three = not found.causes
    else:
        first, three = answers[0] in case.right, any(answer in case.right for answer in answers)
    return {
        "first": first,
        "three": three,
        "answers": answers,
        "text": found.text,
        "evidence": [cause.evidence for cause in found.causes],
        "train_s": trained,
        "why_s": found.seconds,
    }


def main() -> None:
    parser = command_line(__doc__, list(ALL), "CASE")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder for the runs; default: a temporary one")
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name in given.only:
            try:
                figures[name] = diagnose(name, given.seed, given.keep or Path(temporary))
            except Exception as exc:  # one run that fails says nothing about the others
                traceback.print_exc()
                figures[name] = {"first": False, "three": False, "answers": [f"error: {exc}"], "train_s": 0, "why_s": 0}
            row = figures[name]
            mark = "right" if row["first"] else "among three" if row["three"] else "WRONG"
            print(
                f"{name:30} {mark:12} {'; '.join(row['answers'])}  ({row['train_s']:.0f} + {row['why_s']:.0f} s)",
                flush=True,
            )
            for line in row.get("evidence", ())[:3]:
                print(f"{'':30}   {line}", flush=True)
            write_json(figures, given.json)
    planted = [figures[name] for name in CASES if name in figures]
    healthy = [figures[name] for name in HEALTHY if name in figures]
    print(
        f"planted: {sum(row['first'] for row in planted)} first, {sum(row['three'] for row in planted)} among three, of "  # noqa: E501
        f"{len(planted)}; healthy: {sum(row['first'] for row in healthy)} of {len(healthy)} without a cause"
    )
    print(json.dumps({name: row["answers"] for name, row in figures.items() if not row["first"]}, indent=1))


if __name__ == "__main__":
    sys.exit(main())
