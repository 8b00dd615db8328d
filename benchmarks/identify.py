"""How often `vla-rl identify` finds the conventions that were broken.

    python benchmarks/identify.py train FOLDER                # six tiny policies on tabletop, 20 minutes of a core
    python benchmarks/identify.py run FOLDER --json FILE      # 40 broken, 10 sound, 5 that nothing can tell apart

Each broken case has one to three conventions of a policy changed, or left out where its training had them, by a seeded
draw. The answer is written into the spec, and both are evaluated on the same 200 states. FILE keeps finished cases.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

import vla_rl
from vla_rl.cli.identify.identify import with_weights
from vla_rl.cli.identify.keys import list_conventions, read_settings, with_settings
from vla_rl.core.errors import UserError
from vla_rl.core.spec.spec import Spec
from vla_rl.runtime.run_folder.folder import checkpoint_in
from vla_rl.runtime.run_folder.spec_file import load_run_spec
from vla_rl.runtime.start import evaluate

SPEC: dict[str, Any] = {
    "name": "policy",
    "model": {"type": "film_resnet"},
    "env": {"type": "tabletop", "num_envs": 64},
    "imitation": {
        "expert": {"episodes": 2048, "noise": 0.3},
        "steps": 900,
        "lr": 2e-3,
        "lr_schedule": "linear",
        "lr_warmup_steps": 10,
        "report_every": 100,
    },
    "rollout": {"chunk": 4, "episodes": 64, "group_size": 8},
    "algorithm": {"type": "grpo"},
    "train": {"steps": 10, "lr": 1e-4, "micro_batch": 64},
    "eval": {"before": False, "episodes_per_task": 25},
    "runtime": {"backend": "local"},
    "hooks": [{"type": "console"}],
}
TWO_TASKS = ["env.tasks=[pick_red, put_red]", "imitation.steps=600"]
POLICIES: dict[str, list[str]] = {
    "oft": [
        "model={type: openvla_oft, checkpoint: 'builtin:tabletop'}",
        "imitation.expert={episodes: 512, noise: 0.2}",
        "imitation.steps=60",
        "imitation.lr=5.0e-4",
    ],
    "film": [],
    "film_turned": ["conventions={images: rotated, channels: bgr, action_negated: [2]}", "seed=1"],
    "film_swapped": [
        "conventions={state_order: [1, 0, 2, 3], action_order: [2, 0, 1]}",
        "model.cameras=[wrist, overhead]",
        "seed=2",
    ],
    "pi0": ["model={type: pi0, preset: tiny, train_expert_only: false}", *TWO_TASKS],
    "smol": ["model={type: smolvla, preset: tiny, train_expert_only: false}", *TWO_TASKS],
}
CAMERAS = ["overhead", "wrist"]
"""Order that the simulator gives, and a policy without `cameras` has."""
VALUES: dict[str, list[Any]] = {
    "conventions.images": ["as_is", "rotated", "flipped", "mirrored"],
    "conventions.channels": ["rgb", "bgr"],
    "conventions.state_order": [[], [1, 0, 2, 3]],
    "conventions.state_negated": [[], [0], [1]],
    "conventions.action_order": [[], [1, 0, 2], [2, 0, 1]],
    "conventions.action_negated": [[], [0], [1], [2]],
    "conventions.action_scale": [0.5, 1.0, 2.0],
    "model.cameras": [CAMERAS, ["wrist", "overhead"]],
    "model.gripper": ["keep", "widowx"],
    "model.gripper of flow models": ["libero", "widowx"],
}
TWINS = [("rotated", [0, 1]), ("flipped", [1]), ("mirrored", [0])]
"""Worlds that tabletop cannot tell from itself: frames, and numbers of state and actions that are turned."""


def train_policies(folder: Path) -> None:
    for name, overrides in POLICIES.items():
        if not (folder / name / "checkpoints" / "last").exists():
            vla_rl.clone(SPEC, folder / name, overrides=overrides)


def open_spec(folder: Path) -> Spec:
    """Return the spec of a policy with its weights as `model.checkpoint`, and the conventions of its training."""
    checkpoint = checkpoint_in(folder)
    return with_weights(load_run_spec(checkpoint.parents[1], ["eval.episodes_per_task=null"]), checkpoint)


def measure_success(spec: Spec) -> dict[str, Any]:
    tasks = len(spec.env.config.tasks) or 8
    result = evaluate(vla_rl.parse_spec(spec.to_dict(), overrides=[f"eval.episodes_per_task={200 // tasks}"]))
    return dict(result["success"])


def break_spec(spec: Spec, rng: np.random.Generator) -> dict[str, Any]:
    """Return one to three keys of a spec with wrong values, or the default where the training had another."""
    keys = list_conventions(type(spec.model.config))
    true, usual = read_settings(spec, keys), {key.path: key.default for key in keys}
    chosen = rng.permutation([path for path in VALUES if path in true])[: rng.integers(1, 4)]
    broken: dict[str, Any] = {}
    for path in chosen.tolist():
        present = CAMERAS if true[path] is None else true[path]
        others = [
            value
            for value in VALUES[path + " of flow models" * (path == "model.gripper" and present == "as_is")]
            if value != present
        ]
        unnamed = true[path] != usual[path] and rng.random() < 0.5
        broken[path] = usual[path] if unnamed else others[rng.integers(len(others))]
    return broken


def list_cases(folder: Path) -> list[tuple[str, str, dict[str, Any], int]]:
    """Return (kind, policy, changed keys, seed of the frames) of each case."""
    names = list(POLICIES)
    cases: list[tuple[str, str, dict[str, Any], int]] = []
    for number in range(40):
        name = names[number % len(names)]
        cases.append(("broken", name, break_spec(open_spec(folder / name), np.random.default_rng(number)), number))
    cases += [("sound", names[number % len(names)], {}, 100 + number) for number in range(10)]
    for number in range(5):
        images, turned = TWINS[number % 3]
        twin = {"conventions.images": images, "conventions.state_negated": turned, "conventions.action_negated": turned}
        cases.append(("twin", ["film", "oft"][number // 3], twin, 200 + number))
    return cases


def run_case(folder: Path, kind: str, name: str, broken: dict[str, Any], seed: int, success: Any) -> dict[str, Any]:
    true = open_spec(folder / name)
    given = with_settings(true, broken)
    result = vla_rl.identify(given, overrides=[f"seed={seed}"], env=True)
    keys = list_conventions(type(true.model.config))
    wanted, changed = read_settings(true, keys), result["changed"]
    answer = {**read_settings(given, keys), **changed}
    worlds = [answer, *({**answer, **change} for change in result["open"])]
    found = {path: value for path, value in answer.items() if value != wanted[path]}
    # as in the folder, the cameras of the training are the same as none given
    found = {p: v for p, v in found.items() if not (p == "model.cameras" and wanted[p] is None and v == CAMERAS)}
    rate = success(name, {}) if not found else success(name, found)
    truth = success(name, {})
    return {
        "kind": kind,
        "policy": name,
        "broken": broken,
        "changed": changed,
        "differs": found,
        "confidence": result["confidence"],
        "open": result["open"],
        "true_listed": any(all(world[p] == v for p, v in wanted.items()) for world in worlds),
        "rate_true": truth,
        "rate_broken": success(name, broken),
        "rate_found": rate,
        "restored": truth["low"] <= rate["rate"],
        "passes": result["passes"],
        "builds": result["builds"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["train", "run"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", type=Path, default=Path("identify.json"))
    parser.add_argument("--cases", type=int, nargs="*", help="numbers of some cases; default: all")
    given = parser.parse_args()
    if given.what == "train":
        train_policies(given.folder)
        return
    done: dict[str, Any] = json.loads(given.json.read_text()) if given.json.exists() else {"cases": {}, "success": {}}

    def success(name: str, changes: dict[str, Any]) -> Any:
        mark = json.dumps([name, changes], sort_keys=True)
        if mark not in done["success"]:
            try:
                done["success"][mark] = measure_success(with_settings(open_spec(given.folder / name), changes))
            except UserError as exc:
                done["success"][mark] = {"rate": 0.0, "low": 0.0, "high": 0.0, "n": 0, "refused": str(exc)}
        return done["success"][mark]

    for number, (kind, name, broken, seed) in enumerate(list_cases(given.folder)):
        chosen = given.cases is None or number in given.cases
        if chosen and str(number) not in done["cases"]:
            case = run_case(given.folder, kind, name, broken, seed, success)
            done["cases"][str(number)] = case
            given.json.write_text(json.dumps(done, indent=1))
            rates = " ".join(f"{case[key]['rate']:.3f}" for key in ("rate_true", "rate_broken", "rate_found"))
            print(
                f"{number} {kind} {name} {broken} -> {case['changed']}: {rates}, restored {case['restored']}, "
                f"confidence {case['confidence']:.2f}, open {len(case['open'])}, {case['passes']} passes",
                flush=True,
            )
    cases = list(done["cases"].values())
    for kind in ("broken", "sound", "twin"):
        chosen = [case for case in cases if case["kind"] == kind]
        wrong = sum(not case["restored"] and case["confidence"] >= 0.9 for case in chosen)
        restored, kept = sum(case["restored"] for case in chosen), sum(not case["changed"] for case in chosen)
        listed = sum(case["true_listed"] for case in chosen)
        print(
            f"{kind}: {len(chosen)}, restored {restored}, unchanged {kept}, truth listed {listed}, "
            f"wrong and sure {wrong}"
        )


if __name__ == "__main__":
    main()
