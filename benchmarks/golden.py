"""Short trainings whose figures a change of structure must not move: every algorithm with every model, in one process
and on Ray, with one and two learners, and each stopped in the middle and resumed.

    python benchmarks/golden.py record before.json          # in the old tree
    python benchmarks/golden.py record after.json           # in the new one, on the same machine
    python benchmarks/golden.py compare before.json after.json

A recording holds all metrics of all steps but times, and a hash of the weights at the end. Floats are compared bit by
bit, so both recordings have to come from one kind of processor. Exits with 1 where anything differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

SHARED = Path(__file__).parents[1] / "tests" / "plugins" / "test_combinations.py"
sys.path.insert(0, str(SHARED.parent))
from test_combinations import ALGORITHMS, MODELS  # noqa: E402 - the combinations that the tests train, and a lottery

PLACES: dict[str, dict[str, Any]] = {
    "local": {"runtime": {"backend": "local"}},
    "ray, 1 learner": {"runtime": {"backend": "ray"}, "placement": {"type": "collocated", "workers": 1}},
    "ray, 2 learners": {"runtime": {"backend": "ray"}, "placement": {"type": "collocated", "workers": 2}},
}
STEPS = 3


def spec_of(model: str, algorithm: str, place: str, steps: int) -> dict[str, Any]:
    return {
        "name": "golden",
        "plugins": [str(SHARED)],
        "model": {"type": model, "preset": "tiny", **MODELS[model]},
        "env": {"type": "tabletop", "num_envs": 16, "tasks": ["pick_red"]},
        "rollout": {"chunk": 4, "episodes": 16, "group_size": 8, "max_steps": 12},
        "algorithm": {"type": algorithm, **ALGORITHMS[algorithm]},
        "train": {"steps": steps, "epochs": 2, "lr": 1e-3, "micro_batch": 16, "checkpoint_every": 1},
        "eval": {"before": False, "episodes_per_task": 2},
        "hooks": [{"type": "jsonl"}],
        **PLACES[place],
    }


def record(only: str) -> dict[str, Any]:
    """The runs whose names hold `only`."""
    import ray

    from vla_rl.core.spec.spec import parse_spec
    from vla_rl.runtime.start import run

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    recorded: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as home:
        for place in PLACES:
            for model in MODELS:
                for algorithm in ALGORITHMS:
                    for resumed in (False, True):
                        name = f"{model}, {algorithm}, {place}{', resumed' if resumed else ''}"
                        if only not in name:
                            continue
                        folder = Path(home) / name.replace(", ", "-").replace(" ", "")
                        if resumed:
                            run(parse_spec(spec_of(model, algorithm, place, 2)), folder, False)
                        run(parse_spec(spec_of(model, algorithm, place, STEPS)), folder, resumed)
                        recorded[name] = {"lines": lines(folder), "weights": weights(folder)}
                        print(f"{name}: {recorded[name]['weights'][:12]}", flush=True)
    return recorded


def lines(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics of each line, without times."""
    read = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "throughput/"))} for line in read]


def weights(folder: Path) -> str:
    """A hash of the last checkpoint's model."""
    digest = hashlib.sha256()
    files = sorted((folder / "checkpoints" / "last" / "model").rglob("*.safetensors"))
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest() if files else "none"


def compare(before: dict[str, Any], after: dict[str, Any]) -> int:
    """Print what differs, and return the number of runs that do."""
    different = 0
    for name in sorted(before.keys() | after.keys()):
        one, other = before.get(name), after.get(name)
        if one == other:
            continue
        different += 1
        print(f"{name}: {'only in one' if one is None or other is None else first_difference(one, other)}")
    print(f"{len(before.keys() & after.keys())} runs compared, {different} differ")
    return different


def first_difference(one: dict[str, Any], other: dict[str, Any]) -> str:
    for a, b in zip(one["lines"], other["lines"], strict=False):
        for key in sorted(a.keys() | b.keys()):
            if a.get(key) != b.get(key):
                return f"step {a.get('step')}, {key}: {a.get(key)} and {b.get(key)}"
    if len(one["lines"]) != len(other["lines"]):
        return f"{len(one['lines'])} and {len(other['lines'])} lines of metrics"
    return "other weights"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("file", type=Path)
    recording.add_argument(
        "--only", default="", metavar="TEXT", help='runs whose names hold it, such as "ray, 2 learners"'
    )
    comparison = commands.add_parser("compare")
    comparison.add_argument("before", type=Path)
    comparison.add_argument("after", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "record":
        arguments.file.write_text(json.dumps(record(arguments.only), indent=1, default=str))
    else:
        before, after = (json.loads(file.read_text()) for file in (arguments.before, arguments.after))
        sys.exit(min(1, compare(before, after)))


if __name__ == "__main__":
    main()
