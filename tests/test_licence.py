"""The licence goes with what is installed."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

from vla_rl.cli.new_plugin import new_plugin

ROOT = Path(__file__).parents[1]
APACHE_2 = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
"""SHA-256 of https://www.apache.org/licenses/LICENSE-2.0.txt."""


def test_the_text_is_the_standard_one() -> None:
    assert hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest() == APACHE_2


def test_metadata_name_it(tmp_path: Path) -> None:
    own = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert own["license"] == "Apache-2.0"
    assert own["license-files"] == ["LICENSE"]
    assert "[Apache-2.0](LICENSE)" in (ROOT / "README.md").read_text()
    for project in (ROOT / "examples" / "acme_env", new_plugin("env", "licensed", tmp_path / "made")):
        assert tomllib.loads((project / "pyproject.toml").read_text())["project"]["license"] == "Apache-2.0"


@pytest.mark.slow
def test_the_wheel_carries_it(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="pip install hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as content:
        names = content.namelist()
        (licence,) = [name for name in names if name.endswith(".dist-info/licenses/LICENSE")]
        assert content.read(licence) == (ROOT / "LICENSE").read_bytes()
        (metadata,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        assert message_from_bytes(content.read(metadata))["License-Expression"] == "Apache-2.0"
        for spec in (ROOT / "examples").glob("*.yaml"):
            assert content.read(f"vla_rl/cli/examples/{spec.name}") == spec.read_bytes()
        assert content.read("vla_rl/toolkit/envs/install_vulkan.sh").startswith(b"#!/bin/sh")
