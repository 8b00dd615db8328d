"""Files with long tests begin first, so that with several processes (`make test`) none has a long file left; before
them come those that share a Ray."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

SECONDS = {"slow": 20.0, "ray": 10.0, "sim": 4.0}
"""About how long a test of this mark takes."""


SHARED_RAY = "one_ray"
"""Fixture of the files whose runs share one Ray. They come one after another, so that a process starts it once."""

_sharing: set[Path] = set()
_file_of_last_test: list[Path] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    length: Counter[Path] = Counter()
    for item in items:
        length[item.path] += max((SECONDS.get(mark.name, 0.1) for mark in item.iter_markers()), default=0.1)
    _sharing.update(item.path for item in items if SHARED_RAY in getattr(item, "fixturenames", ()))
    items.sort(key=lambda item: (item.path not in _sharing, -length[item.path]))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Stop the Ray that files shared before a file begins that expects none."""
    if _file_of_last_test != [item.path] and item.path not in _sharing:
        stop_ray()
    _file_of_last_test[:] = [item.path]


def pytest_sessionfinish() -> None:
    stop_ray()


def stop_ray() -> None:
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        sys.modules["ray"].shutdown()
