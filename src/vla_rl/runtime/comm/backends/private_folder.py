"""A temporary folder that only this user can enter, and that lasts as long as this process."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

PREFIX = "vla-rl-ray-"


class PrivateFolder:
    """Folder that this process locks while it lives. The lock tells others that the folder is in use."""

    def __init__(self, parent: Path) -> None:
        """Create a folder in `parent`, and remove those there whose process was killed."""
        for folder in parent.glob(f"{PREFIX}*"):
            _remove_if_left(folder)
        path, lock = _create_locked_folder(parent)
        self.path = path
        self._lock = lock

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _create_locked_folder(parent: Path) -> tuple[Path, int]:
    """Return a new folder, and the descriptor that holds its lock.

    The folder itself is locked, not a file in it: a process that is killed while it removes the folder would leave one
    without that file, and no process could tell any more whether it is in use.
    """
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        with suppress(FileNotFoundError):  # another process took it for one that was left, before it was locked
            lock = _open_folder(path)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if path.exists():
                return path, lock
            os.close(lock)


def _remove_if_left(folder: Path) -> None:
    with suppress(OSError):  # another user's folder, or one that a live process has locked
        lock = _open_folder(folder)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)


def _open_folder(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
