"""Tools to test plugins with: `check_*` for components, and test doubles.

    from vla_rl.testing import check_env
    check_env(plugin, MyConfig(size=3))        # or a component that is already built

Each check returns nothing, or raises one `CheckFailed` that lists everything it found. The doubles are `scripted`
(an environment), `linear` (a model), `synthetic` (rollouts, observations) and `events` (what hooks hear); `train_on`
is one update of a model by an algorithm. The same
checks come as pytest fixtures of their names. Importing this package imports no torch: names load on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vla_rl.testing.algorithms import check_algorithm
    from vla_rl.testing.common.findings import CheckFailed
    from vla_rl.testing.data import check_data
    from vla_rl.testing.engines import check_engine
    from vla_rl.testing.envs import check_env
    from vla_rl.testing.linear import LinearModel
    from vla_rl.testing.models import check_model
    from vla_rl.testing.placements import check_placement
    from vla_rl.testing.reward_models import check_reward_model
    from vla_rl.testing.scripted import ScriptedEnv
    from vla_rl.testing.trainers import check_trainer
    from vla_rl.testing.training import train_on
    from vla_rl.testing.world_models import check_world_model

__all__ = [
    "CheckFailed",
    "LinearModel",
    "ScriptedEnv",
    "check_algorithm",
    "check_data",
    "check_engine",
    "check_env",
    "check_model",
    "check_placement",
    "check_reward_model",
    "check_trainer",
    "check_world_model",
    "train_on",
]

_HOMES = {
    "CheckFailed": "common.findings",
    "LinearModel": "linear",
    "ScriptedEnv": "scripted",
    "check_algorithm": "algorithms",
    "check_data": "data",
    "check_engine": "engines",
    "check_env": "envs",
    "check_model": "models",
    "check_placement": "placements",
    "check_reward_model": "reward_models",
    "check_trainer": "trainers",
    "check_world_model": "world_models",
    "train_on": "training",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
