"""Skipping of tests that shard weights, which older versions of torch cannot."""

from __future__ import annotations

import pytest


def skip_where_torch_cannot_shard() -> None:
    from vla_rl.toolkit.trainers.parallel import sharding_problem

    problem = sharding_problem()
    if problem is not None:
        pytest.skip(f"train.sharding: full {problem}")
