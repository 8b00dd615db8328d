"""`vla-rl plugins`: what is ready, what is missing, and at what cost."""

from __future__ import annotations

import re
import sys
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from fork_server import ForkServer
from vla_rl.cli.list_plugins import plugin_rows, table_lines
from vla_rl.core import requirements

LIGHT = {"attrs", "cattrs", "lazy-loader", "packaging", "pluggy", "pyyaml", "rich", "typer", "vla-rl"}
MODULES = {"pillow": "PIL", "huggingface-hub": "huggingface_hub", "scikit-learn": "sklearn"}
"""Modules of distributions with other names."""


def test_nothing_heavy_is_imported(bare_fork_server: ForkServer) -> None:
    """Each package that a simulator or a model brings would cost more than the whole table."""
    required = {canonicalize_name(Requirement(line).name) for line in metadata.requires("vla-rl") or ()} - LIGHT
    heavy = {MODULES.get(name, name.replace("-", "_")) for name in required}
    assert {"torch", "ray", "numpy", "transformers", "PIL", "mujoco"} <= heavy
    code = "import sys; from vla_rl.cli.main import app; app(['plugins'], standalone_mode=False); print('LOADED', *sys.modules)"
    out = bare_fork_server.run_python("-c", code, check=True).stdout
    table, _, loaded = out.partition("LOADED ")
    modules = set(loaded.split())
    assert "tabletop" in table and not heavy & modules
    assert not {"attrs", "cattrs", "pluggy", "rich", "yaml"} & modules, "declarations need none of them"
    of_plugins = {name.rpartition(".")[2] for name in modules if re.match(r"vla_rl\.plugins\.\w+\.\w+\.", name)}
    assert of_plugins == {"interpreter", "label"}, "settings and implementations are not imported"


@pytest.mark.parametrize("width", [80, 140])
def test_the_table_fits_the_terminal(width: int) -> None:
    missing = {"ready": False, "status": "needs vroom>=2: pip install 'acme[fast]'", "summary": "drives"}
    entries = [*plugin_rows(), {"kind": "env", "name": "vroom", "dist": "acme", "version": "0.1", **missing}]
    heading, rule, *lines = table_lines(entries, width)
    assert heading.split()[:5] == ["kind", "name", "dist", "version", "ready"] and rule == "-" * width
    assert max(map(len, lines)) <= width
    at = next(i for i, line in enumerate(lines) if "vroom" in line)
    assert "not ready" in lines[at]
    assert "needs vroom>=2: pip install 'acme[fast]'" in lines[at + (width == 80)]
    assert lines[-1].strip() == "drives"
    (tabletop,) = [i for i, line in enumerate(lines) if line.split()[:2] == ["env", "tabletop"]]
    assert "Embedded: pick and put coloured blocks" in lines[tabletop + (width == 80)]


def test_a_plugin_is_ready_or_names_what_its_extra_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    real = requirements._installed_version
    monkeypatch.setattr(
        requirements, "_installed_version", lambda name, path: None if name == "peft" else real(name, path)
    )
    status = {row["name"]: row["status"] for row in plugin_rows() if row["kind"] in ("model", "env")}
    assert status["tabletop"] == status["film_resnet"] == "ready"
    assert status["openvla"].startswith("needs peft>=0.17: pip install ")


def test_versions_are_those_of_the_metadata() -> None:
    for name in ("attrs", "numpy", "torch", "vla-rl"):
        assert requirements._installed_version(name, tuple(sys.path)) == metadata.version(name)
    assert requirements._installed_version("no-such-distribution", tuple(sys.path)) is None
