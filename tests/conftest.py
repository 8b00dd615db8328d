"""Files whose tests start a Ray run first, then those with long tests, so that with several processes (`make test`) the
shared Ray is started once in each, and none has a long file left."""

from __future__ import annotations

import os
import signal
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from fork_server import ForkServer
from shared_ray import start_shared_ray, stop_shared_ray
from suite_start import check_start

pytest_plugins = ["chromium"]

os.environ["PATH"] = os.pathsep.join(
    [str(Path(sys.executable).parent), os.environ["PATH"]]
)  # as in an activated environment
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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part",
        metavar="K/N",
        help="only the K-th of N parts of the tests, K from 0; by names, so that a part stays the same",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):  # as `make test` starts it
        check_start(config.rootpath)


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if part := config.getoption("part"):
        chosen, parts = map(int, part.split("/"))
        items[:] = [item for item in items if zlib.crc32(item.nodeid.encode()) % parts == chosen]
    for item in items:
        if {item.nodeid, item.nodeid.partition("[")[0]} & EXHAUSTIVE:
            item.add_marker(pytest.mark.exhaustive)
    length: Counter[str] = Counter()
    apart = {item.nodeid.partition("::")[0] for item in items if item.get_closest_marker("own_ray")}
    for item in items:
        length[item.nodeid.partition("::")[0]] += max(
            (SECONDS.get(mark.name, 0.1) for mark in item.iter_markers()), default=0.1
        )

    def sort_key(file: str) -> tuple[bool, float]:
        return file not in apart, -length[file]

    items.sort(key=lambda item: sort_key(item.nodeid.partition("::")[0]))


@pytest.hookimpl(tryfirst=True)  # before fixtures of the test
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("own_ray"):
        stop_shared_ray()
    elif item.get_closest_marker("ray"):
        start_shared_ray()


def pytest_sessionfinish() -> None:
    stop_shared_ray()


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """Forks programs from an interpreter that has imported torch and vla_rl; the first test that asks for it waits."""
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture(scope="session")
def bare_fork_server() -> Iterator[ForkServer]:
    """Forks programs from an interpreter that has imported nothing, for tests of what an import brings."""
    server = ForkServer(())
    yield server
    server.close()
