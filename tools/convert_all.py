"""Convert every configuration of other projects' checkouts, and print what became of them.

    python tools/convert_all.py --rlinf RLINF --simplevla SIMPLEVLA --siirl SIIRL [--to FOLDER]

Needs the extra convert. Experiments of which only the weights are missing count as checked: their model is checked with
random weights of the public size.
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from vla_rl.cli.convert.convert import Conversion, convert_file
from vla_rl.cli.inputs import cluster_of
from vla_rl.core.errors import UserError
from vla_rl.core.spec.spec import parse_spec
from vla_rl.runtime.checks.run import check_spec

TOKENIZERS = ("paligemma", "eagle", "cosmos")
ASSETS = "RoboTwin's assets are not there"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("rlinf", "simplevla", "siirl", "to"):
        parser.add_argument(f"--{name}", type=Path)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    sources = {
        "RLinf": sorted(arguments.rlinf.resolve().glob("examples/**/*.yaml")) if arguments.rlinf else [],
        "SimpleVLA-RL": sorted(arguments.simplevla.resolve().glob("examples/run_*.sh")) if arguments.simplevla else [],
        "siiRL": sorted(arguments.siirl.resolve().glob("examples/embodied*/*.sh")) if arguments.siirl else [],
    }
    folder = (arguments.to or Path(tempfile.mkdtemp())).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    for name in TOKENIZERS:  # which the checkpoints lack
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "tokenizer.json").touch()
    for project, files in sources.items():
        if files:
            count_project(project, files, folder)


def count_project(project: str, files: list[Path], folder: Path) -> None:
    """Convert files, and print the counts and each refusal."""
    counts: Counter[str] = Counter()
    unknown: Counter[str] = Counter()
    for file in files:
        try:
            converted = convert_file(file)
        except UserError as exc:
            counts["refused by name"] += 1
            print(f"  refused: {str(exc).splitlines()[0]}")
            continue
        counts["converted"] += 1
        unknown.update(one.key for one in converted.of_kind("unknown"))
        (folder / f"{file.stem}.yaml").write_text(converted.text, encoding="utf-8")
        refusal = check(converted)
        counts["refused by check" if refusal else "accepted by check"] += 1
        if refusal:
            print(f"  check: {file.name}: {refusal}")
    print(f"{project}: {len(files)} files: {dict(counts)}; keys unaccounted for: {dict(unknown) or 0}")


def check(converted: Conversion) -> str:
    """Return why a run on eight GPUs would be refused, weights and RoboTwin's assets aside; "" where it would not."""
    spec: dict[str, Any] = {**converted.spec, "model": dict(converted.spec["model"])}
    if spec["env"]["type"] == "robotwin" and spec["env"]["tasks"] == "TASK_NAME_YOU_SELECT":
        spec["env"] = {**spec["env"], "tasks": "lift_pot"}  # the script leaves it to its user
    try:
        return _refusal(spec)
    except UserError as exc:
        if "is not a folder" not in str(exc) and "gave no V-JEPA 2 checkpoint" not in str(exc):
            return str(exc)
    if spec.get("algorithm", {}).get("type") == "srpo":
        spec["algorithm"] = {**spec["algorithm"], "encoder": "tiny", "image_size": None}
    preset = "full_n1_7" if "N1.7" in str(spec["model"]["checkpoint"]) else "full"
    for key in ("checkpoint", "tokenizer", "embodiment", "unnorm_key", "statistics_range", "append_stop_token"):
        spec["model"].pop(key, None)
    spec["model"]["preset"] = preset
    try:
        return _refusal(spec)
    except UserError as exc:
        return str(exc)


def _refusal(spec: dict[str, Any]) -> str:
    try:
        check_spec(parse_spec(spec), training=True, cluster=cluster_of(8, None, None, 141))
    except UserError as exc:
        lines = str(exc).splitlines()
        if not (ASSETS in lines[0] and len(lines) == 3):
            raise
    return ""


if __name__ == "__main__":
    main()
