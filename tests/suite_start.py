"""What a run of the whole suite needs before it starts, said in one line."""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from pathlib import Path
from typing import IO

import pytest

DISK = 2**30
"""Bytes that the tests write to the folder for temporary files at most; 0.4 GB were seen."""

_locks: list[IO[str]] = []


def check_disk(folder: Path, free: int) -> None:
    """End pytest where the folder for temporary files has too few free bytes."""
    if free < DISK:
        pytest.exit(
            f"tests write up to {DISK / 2**30:.0f} GiB to {folder}, which has {free / 2**30:.1f} free: "
            f"free some, or name another folder with TMPDIR=/path",
            returncode=2,
        )


def claim_checkout(root: Path) -> None:
    """End pytest where another process runs the suite in this checkout: both would write the same folders."""
    file = root / "build" / "suite.lock"
    file.parent.mkdir(exist_ok=True)
    lock = file.open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        pytest.exit(f"another suite runs in {root}: wait for its end, or use another clone", returncode=2)
    _locks.append(lock)


def check_start(root: Path) -> None:
    """Check the disk and claim the checkout until this process ends."""
    folder = Path(tempfile.gettempdir())
    check_disk(folder, shutil.disk_usage(folder).free)
    claim_checkout(root)
