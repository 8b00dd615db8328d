"""Files with long tests begin first, so that with several processes (`make test`) none has a long file left."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from fork_server import ForkServer

os.environ.setdefault("MUJOCO_GL", "egl")  # mujoco reads it at import, and loading a model may import mujoco
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as a shell leaves it for jobs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # as nohup leaves it
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

settings.register_profile("busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy machine")

SECONDS = {"slow": 20.0, "ray": 10.0, "sim": 4.0}
"""About how long a test of this mark takes."""


EXHAUSTIVE = {
    line.partition("  #")[0]
    for line in (Path(__file__).parent / "exhaustive.txt").read_text().splitlines()
    if not line.startswith("#")
}


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid in EXHAUSTIVE:
            item.add_marker(pytest.mark.exhaustive)
    length: Counter[str] = Counter()
    for item in items:
        length[item.nodeid.partition("::")[0]] += max(
            (SECONDS.get(mark.name, 0.1) for mark in item.iter_markers()), default=0.1
        )
    items.sort(key=lambda item: -length[item.nodeid.partition("::")[0]])


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """Forks programs from an interpreter that has imported torch and vla_rl; the first test that asks for it waits."""
    server = ForkServer()
    yield server
    server.close()
