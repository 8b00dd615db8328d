"""Requests on their way from a simulator's process to a policy's.

Ray's object store is right for what many read, or what is read later; to put one 2 MB observation there takes
milliseconds. A request has one reader, who answers before the next one is made: small ones go as one pickled string,
which Ray sends inline, and the arrays of larger ones through a piece of memory that both processes have mapped.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from mmap import mmap
from pathlib import Path
from typing import Any

from attrs import frozen

SMALL = 64 * 1024
"""Bytes of arrays that go in the message itself."""
FOLDER = Path("/dev/shm")  # noqa: S108 - memory, not a temporary file
ALIGNMENT = 64
_serial = count()


def here() -> tuple[str, int] | None:
    """Two processes share memory if this is equal in both. None: not on this system."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(), FOLDER.stat().st_dev
    except OSError:
        return None


@frozen(kw_only=True, slots=True)
class Shared:
    """A value whose arrays lie in shared memory."""

    path: str
    header: bytes
    spans: Sequence[tuple[int, int]]
    """(offset, bytes) of each array."""


class Outbox:
    """The simulator's end, one a lane; what was put is overwritten by what is put next."""

    def __init__(self) -> None:
        self.path = ""
        self.memory: mmap | None = None

    def put(self, value: Any, *, shared: bool) -> Any:
        """-> the message, which `Inbox.take` opens; the value itself where there is no memory left to share."""
        buffers: list[pickle.PickleBuffer] = []
        header = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        arrays = [buffer.raw() for buffer in buffers]
        if sum(array.nbytes for array in arrays) <= SMALL:
            return pickle.dumps(value, protocol=5)
        if not shared:
            return value
        spans, end = [], 0
        for array in arrays:
            spans.append((end, array.nbytes))
            end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        if (self.memory is None or len(self.memory) < end) and not self._grow(end):
            return value
        assert self.memory is not None
        for array, (offset, size) in zip(arrays, spans, strict=True):
            self.memory[offset : offset + size] = array
        return pickle.dumps(Shared(path=self.path, header=header, spans=spans))

    def close(self) -> None:
        if self.memory is not None:
            self.memory.close()
            self.memory = None
            with suppress(FileNotFoundError):  # the reader has it
                Path(self.path).unlink()

    def _grow(self, size: int) -> bool:
        self.close()
        path = FOLDER / f"vla-rl-{os.getpid()}-{next(_serial)}"
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            os.posix_fallocate(handle, 0, size)  # fails now, where a write would end the process
            self.memory, self.path = mmap(handle, size), str(path)
        except OSError:
            path.unlink()
            return False
        finally:
            os.close(handle)
        return True


class Inbox:
    """The policy's end, one a lane. It unlinks what it has mapped, so that the memory goes with the processes."""

    def __init__(self) -> None:
        self.path = ""
        self.memory: mmap | None = None

    def take(self, message: Any) -> Any:
        """What was put. Arrays are copies, for records to keep."""
        if not isinstance(message, bytes):
            return message
        value = pickle.loads(message)  # noqa: S301 - from our own actors
        if not isinstance(value, Shared):
            return value
        if value.path != self.path:
            handle = os.open(value.path, os.O_RDWR)
            self.memory, self.path = mmap(handle, 0), value.path
            os.close(handle)
            Path(value.path).unlink()
        assert self.memory is not None
        with memoryview(self.memory) as view:
            arrays = [bytearray(view[offset : offset + size]) for offset, size in value.spans]
        return pickle.loads(value.header, buffers=arrays)  # noqa: S301 - from our own actors
