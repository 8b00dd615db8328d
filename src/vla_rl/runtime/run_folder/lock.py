"""Lock of a run folder: one process at a time writes to it.

The kernel's lock (flock) on RUN/.lock decides; it ends with its process, in whatever way that ends. Some file systems
do not share it between machines. So the file names its owner, who renews the file's date, and the lock of an owner on
another machine is taken over only if the date stays the same for a while.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from threading import Event, Thread
from time import monotonic, sleep
from types import TracebackType
from typing import Self

import psutil
from attrs import asdict, frozen

from vla_rl.core.errors import RunFolderGone, UserError

logger = logging.getLogger(__name__)

NAME = ".lock"
RENEWAL_S = 10.0
PATIENCE_S = 60.0
"""Seconds for which another machine's lock is watched: several renewals, and the caching of network file systems."""
TICKS_S = 2.0
"""Seconds that the start time of a process may seem to move by."""

_held: set[int] = set()


class FolderInUse(UserError):
    """Another process writes to the run folder."""


@frozen(kw_only=True)
class Owner:
    """Owner of a lock."""

    host: str
    pid: int
    started: float
    """Time at which the process was created, in seconds since 1970, because process ids are reused."""
    since: str
    file: int = 0
    """Inode of the lock: a copy of a run folder has another one. 0: not known."""

    def __str__(self) -> str:
        return f"process {self.pid} on host {self.host} since {self.since}"

    @property
    def is_here(self) -> bool:
        return self.host == socket.gethostname()

    @property
    def is_running(self) -> bool:
        """Whether the process of an owner on this machine is still running."""
        with suppress(psutil.Error):
            process = psutil.Process(self.pid)
            same: bool = abs(process.create_time() - self.started) < TICKS_S
            return same and process.status() != psutil.STATUS_ZOMBIE
        return False


class RunLock:
    """Lock of a run folder from `__init__` to `release`. Raises FolderInUse, and OSError where nothing can be
    written. Its thread calls `lost` once if the folder is moved or removed."""

    def __init__(
        self, folder: Path, patience_s: float = PATIENCE_S, lost: Callable[[UserError], None] = lambda error: None
    ) -> None:
        self._path = folder / NAME
        self._lost = lost
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self._take_lock(patience_s)
        except BaseException:
            os.close(self._file)
            raise
        _held.add(self._file)
        self._released = Event()
        self._renewing = Thread(target=self._renew_lock, name="run-lock", daemon=True)
        self._renewing.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.release()

    def release(self) -> None:
        self._released.set()
        self._renewing.join()
        _held.discard(self._file)
        with suppress(OSError):
            os.ftruncate(self._file, 0)
        os.close(self._file)

    def check_place(self) -> None:
        """Raise RunFolderGone if the folder is no longer where it was locked."""
        try:
            held = os.fstat(self._file)
            if self._path.stat().st_ino == held.st_ino:
                return
        except FileNotFoundError:
            if self._path.parent.is_dir() and not held.st_nlink:
                return  # the lock alone was removed
        except OSError:  # a network file system that does not answer now
            return
        what = f"{self._path.parent} was moved, or removed, while the run wrote to it"
        with suppress(OSError):
            now = Path(f"/proc/self/fd/{self._file}").readlink().parent
            if now.is_dir() and now != self._path.parent.absolute():
                what = f"{self._path.parent} was moved to {now} while the run wrote to it; --resume continues it there"
        raise RunFolderGone(f"{what}\n  what was not saved before is lost")

    def _take_lock(self, patience_s: float) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._in_use_error(self._read_owner()) from None
        except OSError as exc:
            logger.warning("%s cannot be locked: %s; do not start a second process there", self._path.parent, exc)
        owner, file = self._read_owner(), os.fstat(self._file).st_ino
        copied = owner is not None and owner.is_here and owner.file not in (0, file)
        if owner is not None and not copied:
            if owner.is_running if owner.is_here else self._is_renewed(owner, patience_s):
                raise self._in_use_error(owner)
            logger.warning("%s was held by %s, which is gone; taken over", self._path.parent, owner)
        me = psutil.Process()
        since = datetime.now(UTC).isoformat(timespec="seconds")
        record = asdict(Owner(host=socket.gethostname(), pid=me.pid, started=me.create_time(), since=since, file=file))
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, json.dumps(record).encode(), 0)

    def _read_owner(self) -> Owner | None:
        """Return the owner that the file names; None after a release."""
        try:
            return Owner(**json.loads(self._path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def _is_renewed(self, owner: Owner, patience_s: float) -> bool:
        logger.warning("%s is locked by %s; watching for %g s if it lives", self._path.parent, owner, patience_s)
        before, end = self._read_date(), monotonic() + patience_s
        while monotonic() < end:
            sleep(min(1.0, patience_s / 4))
            if self._read_date() != before:
                return True
        return False

    def _read_date(self) -> int:
        """Return the date of the file. It is opened again, since network file systems ask the server only then."""
        with self._path.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns

    def _renew_lock(self) -> None:
        while not self._released.wait(RENEWAL_S):
            with suppress(OSError):
                os.utime(self._file)
            try:
                self.check_place()
            except RunFolderGone as exc:
                self._lost(exc)
                return

    def _in_use_error(self, owner: Owner | None) -> FolderInUse:
        text = f"{self._path.parent} is in use by {owner or 'another process'}; wait for its end, or stop it"
        if owner is not None and not owner.is_here:
            text += f"\n  if you know that it is gone, clear the lock: rm {self._path}"
        return FolderInUse(f"{text}\n  another run needs another --folder")


def _close_held_locks() -> None:
    """Close the locks in a forked process, which would hold them as long as it lives."""
    for file in _held:
        with suppress(OSError):
            os.close(file)
    _held.clear()


os.register_at_fork(after_in_child=_close_held_locks)
