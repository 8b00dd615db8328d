"""What the tests of the small policy share."""

from __future__ import annotations

from typing import Any

import numpy as np

from vla_rl.core.contexts import ModelContext
from vla_rl.core.types import EnvInfo, Observation
from vla_rl.plugins.models.film_resnet.builder import FilmResnetPolicy, build_policy
from vla_rl.plugins.models.film_resnet.config import Bins, FilmResnetConfig, NetworkConfig
from vla_rl.testing import synthetic

ENV = synthetic.env_info(bounds=((-1.0, 1.0),))
CHUNK = 4
SMALL = NetworkConfig(channels=(8, 16), keypoints=4, words=64, instruction=8, hidden=(32,), head=Bins(count=9))


def policy(env: EnvInfo = ENV, context: dict[str, Any] | None = None, **config: Any) -> FilmResnetPolicy:
    if "checkpoint" not in config:
        config.setdefault("network", SMALL)
    return build_policy(FilmResnetConfig(**config), ModelContext(**{"env": env, "chunk": CHUNK, **(context or {})}))


def observation(rows: int, env: EnvInfo = ENV) -> Observation:
    return synthetic.observation(env, rows)


def demonstrated(rows: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).uniform(-1, 1, (rows, CHUNK, ENV.action_dim)).astype(np.float32)
