"""Checks of `libero` that need no simulator."""

from __future__ import annotations

import logging

import pytest

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
    monkeypatch.setattr(checks.metadata, "version", lambda name: "3.9.0")
    with caplog.at_level(logging.WARNING):
        checks.check_rendering(None)
    assert "MuJoCo 3.9.0 draws the floors of libero_object darker" in caplog.text
