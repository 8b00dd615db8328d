"""Files with long tests begin first, so that with several processes (`make test`) none has a long file left."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("MUJOCO_GL", "egl")  # mujoco reads it at import, and loading a model may import mujoco
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as a shell leaves it for jobs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # as nohup leaves it
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

settings.register_profile("busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy machine")

ROOT = Path(__file__).parents[1]
SECONDS = {"slow": 20.0, "ray": 10.0, "sim": 4.0}
"""About how long a test of this mark takes."""


EXHAUSTIVE = {
    line.partition("  #")[0]
    for line in (Path(__file__).parent / "exhaustive.txt").read_text().splitlines()
    if not line.startswith("#")
}


CASES = pytest.StashKey[Counter[str]]()


def name_case(item: pytest.Item) -> tuple[str, str]:
    """Return the name of a test and what tells its cases apart, except for files of the repository: a test that is run
    for every file of a folder has one case, so that files can be removed."""
    name, _, case = item.nodeid.partition("[")
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    files = [key for key, value in parameters.items() if isinstance(value, Path) and value.is_relative_to(ROOT)]
    return name, repr([value for key, value in parameters.items() if key not in files]) if files else case


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-cases", action="store_true", help="write tests/cases.txt: see tests/test_cases.py")


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.stash[CASES] = Counter(name for name, _ in set(map(name_case, items)))
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
def collected_cases(pytestconfig: pytest.Config) -> Counter[str]:
    """Number of cases of every test that was collected, those that `-m` left out included."""
    return pytestconfig.stash[CASES]
