"""`vla-rl plugins`: what is ready, what is missing, and at what cost."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import pytest
from packaging.requirements import Requirement

from vla_rl.cli.list_plugins import rows
from vla_rl.core import catalogue

LIGHT = {"attrs", "cattrs", "packaging", "pluggy", "pyyaml", "rich", "typer", "vla-rl"}
MODULES = {"pillow": "PIL", "huggingface-hub": "huggingface_hub", "scikit-learn": "sklearn"}
"""Modules of distributions with other names."""


def test_nothing_heavy_is_imported() -> None:
    """Each package that a simulator or a model brings would cost more than the whole table."""
    required = {Requirement(line).name for line in metadata.requires("vla-rl") or ()} - LIGHT
    heavy = {MODULES.get(name, name.replace("-", "_")) for name in required}
    assert {"torch", "ray", "numpy", "transformers", "PIL", "mujoco"} <= heavy
    code = "import sys; from vla_rl.cli.list_plugins import main; main(False); print('LOADED', *sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    table, _, loaded = out.partition("LOADED ")
    assert "tabletop" in table and not heavy & set(loaded.split())


def test_a_plugin_is_ready_or_names_what_its_extra_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    real = catalogue._version
    monkeypatch.setattr(catalogue, "_version", lambda name, path: None if name == "peft" else real(name, path))
    status = {row["name"]: row["status"] for row in rows() if row["kind"] in ("model", "env")}
    assert status["tabletop"] == status["film_resnet"] == "ready"
    assert status["openvla"].startswith("needs peft>=0.17: pip install ")


def test_versions_are_those_of_the_metadata() -> None:
    for name in ("attrs", "numpy", "torch", "vla-rl"):
        assert catalogue._version(name, tuple(sys.path)) == metadata.version(name)
    assert catalogue._version("no-such-distribution", tuple(sys.path)) is None
