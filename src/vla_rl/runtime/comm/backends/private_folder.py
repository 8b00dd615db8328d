"""A temporary folder that only this user can enter, and that lasts as long as this process."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

PREFIX = "vla-rl-ray-"
LOCK = "lock"


class PrivateFolder:
    """Folder with a file that this process locks while it lives. The lock tells others that the folder is in use."""

    def __init__(self, parent: Path) -> None:
        """Create a folder in `parent`, and remove those there whose process was killed."""
        for folder in parent.glob(f"{PREFIX}*"):
            _remove_if_left(folder)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        self._lock = os.open(self.path / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _remove_if_left(folder: Path) -> None:
    with suppress(OSError):  # another user's folder, or one that a live process has locked
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)
