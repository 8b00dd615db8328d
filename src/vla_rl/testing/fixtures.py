"""Pytest fixtures for authors of plugins; pytest finds them by itself where vla-rl is installed.

def test_contract(check_env):
    check_env(plugin)
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from vla_rl.testing.scripted import ScriptedEnv


def _make_check(name: str) -> Any:
    """Return the fixture that gives the check of this name."""

    def check() -> Callable[..., None]:
        checked: Callable[..., None] = getattr(import_module("vla_rl.testing"), name)
        return checked

    check.__doc__ = f"`vla_rl.testing.{name}`."
    return pytest.fixture(scope="session", name=name)(check)


check_algorithm = _make_check("check_algorithm")
check_data = _make_check("check_data")
check_engine = _make_check("check_engine")
check_env = _make_check("check_env")
check_model = _make_check("check_model")
check_placement = _make_check("check_placement")
check_reward_model = _make_check("check_reward_model")
check_trainer = _make_check("check_trainer")
check_world_model = _make_check("check_world_model")


@pytest.fixture
def scripted_env() -> ScriptedEnv:
    """Four envs of `ScriptedEnv` with its default task, for tests of models, hooks and algorithms."""
    from vla_rl.testing import ScriptedEnv

    return ScriptedEnv(4, chunk=2)
