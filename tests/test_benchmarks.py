"""Benchmarks and tools import names that exist; they are run by hand, so nothing else would notice."""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted([*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "tools").glob("*.py")])


def exists(module: str, name: str) -> bool:
    """Return whether a module has this name, or a submodule of this name."""
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as exc:
        if (exc.name or "").startswith("vla_rl"):
            raise
        pytest.skip(f"{module} needs {exc.name}, which is not installed")
    if hasattr(imported, name):
        return True
    return hasattr(imported, "__path__") and importlib.util.find_spec(f"{module}.{name}") is not None


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_imported_name_exists(file):
    missing = [
        f"line {node.lineno}: {node.module}.{alias.name}"
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vla_rl")
        for alias in node.names
        if not exists(node.module, alias.name)
    ]
    assert not missing


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_every_stage_for_a_gpu_runs_with_tiny_sizes(tmp_path):
    """On a card, minutes are few: nothing of the benchmark's own may fail there. `smoke` runs tests of a GPU."""
    stages = [
        "card",
        "frozen",
        "oft_step",
        "oft_act",
        "openvla",
        "pi0",
        "pi05",
        "weights",
        "simulator",
        "control",
        "run",
    ]
    command = [sys.executable, ROOT / "benchmarks" / "gpu.py", "--tiny", "--minutes", "22"]
    output = [*command, "--json", tmp_path / "figures.json", "--only", *stages]
    done = subprocess.run(output, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    measured = {figure["name"].partition(":")[0] for figure in json.loads((tmp_path / "figures.json").read_text())}
    assert measured == set(stages)
