"""The Ray that a run starts for itself."""

from __future__ import annotations

import os

import pytest

from vla_rl.runtime.backends.own_ray import NICENESS, OwnRay

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.ray]


@pytest.mark.parametrize("asked", [None, 3])
def test_its_workers_get_their_share_of_a_busy_machine(monkeypatch, asked):
    """Ray's own default starves them beside any other work; what the user asks for holds."""
    monkeypatch.delenv(NICENESS, raising=False)
    if asked is not None:
        monkeypatch.setenv(NICENESS, str(asked))
    own = OwnRay()
    own.start(num_cpus=1)
    try:
        found = ray.get(ray.remote(lambda: os.nice(0)).remote())
        assert found == os.nice(0) + (asked or 0)
    finally:
        own.stop()
