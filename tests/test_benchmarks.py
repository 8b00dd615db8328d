"""Benchmarks and tools import names that exist; they are run by hand, so nothing else would notice."""

from __future__ import annotations

import ast
import importlib.util
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
