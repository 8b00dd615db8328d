"""Pytest fixtures for authors of plugins; pytest finds them by itself where vla-rl is installed.

def test_contract(check_env):
    check_env(plugin)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from vla_rl.testing.scripted import ScriptedEnv


@pytest.fixture(scope="session")
def check_env() -> Callable[..., None]:
    """`vla_rl.testing.check_env`."""
    from vla_rl.testing import check_env as check

    return check


@pytest.fixture(scope="session")
def check_model() -> Callable[..., None]:
    """`vla_rl.testing.check_model`."""
    from vla_rl.testing import check_model as check

    return check


@pytest.fixture(scope="session")
def check_algorithm() -> Callable[..., None]:
    """`vla_rl.testing.check_algorithm`."""
    from vla_rl.testing import check_algorithm as check

    return check


@pytest.fixture(scope="session")
def check_data() -> Callable[..., None]:
    """`vla_rl.testing.check_data`."""
    from vla_rl.testing import check_data as check

    return check


@pytest.fixture(scope="session")
def check_engine() -> Callable[..., None]:
    """`vla_rl.testing.check_engine`."""
    from vla_rl.testing import check_engine as check

    return check


@pytest.fixture(scope="session")
def check_placement() -> Callable[..., None]:
    """`vla_rl.testing.check_placement`."""
    from vla_rl.testing import check_placement as check

    return check


@pytest.fixture(scope="session")
def check_world_model() -> Callable[..., None]:
    """`vla_rl.testing.check_world_model`."""
    from vla_rl.testing import check_world_model as check

    return check


@pytest.fixture
def scripted_env() -> ScriptedEnv:
    """Four envs of `ScriptedEnv` with its default task, for tests of models, hooks and algorithms."""
    from vla_rl.testing import ScriptedEnv

    return ScriptedEnv(4, chunk=2)


@pytest.fixture(scope="session")
def check_trainer() -> Callable[..., None]:
    """`vla_rl.testing.check_trainer`."""
    from vla_rl.testing import check_trainer as check

    return check


@pytest.fixture(scope="session")
def check_reward_model() -> Callable[..., None]:
    """`vla_rl.testing.check_reward_model`."""
    from vla_rl.testing import check_reward_model as check

    return check
