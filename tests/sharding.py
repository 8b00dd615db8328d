"""Skipping of tests that shard weights, which older versions of torch cannot."""

from __future__ import annotations

import pytest


def skip_where_torch_cannot_shard() -> None:
    from vla_rl.runtime.workers.learner.parallel.fsdp import missing_support

    missing = missing_support()
    if missing is not None:
        pytest.skip(missing)
