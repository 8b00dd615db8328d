"""Requests on their way from a simulator's process to a policy's.

Ray's object store is right for what many read, or what is read later; to put one 2 MB observation there takes
milliseconds. A request has one reader, who answers before the next one is made: small ones go as one pickled string,
and the arrays of larger ones through a piece of memory that both processes have mapped.
"""

from __future__ import annotations

import os
import pickle
import secrets
from collections import deque
from collections.abc import Sequence
from mmap import mmap
from pathlib import Path
from sys import getrefcount
from typing import Any

import numpy as np
from attrs import frozen

from vla_rl.core.types import Array

SMALL = 64 * 1024
"""Bytes of arrays that go in the message itself."""
ALIGNMENT = 64
LOOKS = 8
"""Blocks that a `Pool` looks at before it makes another."""
UNUSED = 2
"""References to such a block that nobody uses: the one that looks, and the one with which it asks."""


def host_key() -> tuple[str, str] | None:
    """Two processes can share memory if this is equal in both: the machine since its start, and the name space of its
    processes. None: not on this system."""
    try:
        if not hasattr(os, "memfd_create"):
            return None
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii"), str(
            Path("/proc/self/ns/pid").readlink()
        )
    except OSError:
        return None


@frozen(kw_only=True, slots=True)
class Shared:
    """A value whose arrays lie in shared memory."""

    path: str
    key: str
    """Of this memory and no other."""
    header: bytes
    spans: Sequence[tuple[int, int]]
    """(offset, bytes) of each array."""


@frozen(kw_only=True, slots=True)
class Small:
    """A value with its arrays beside it, which need not be looked for again."""

    header: bytes
    arrays: Sequence[bytearray]


class SharedMemoryWriter:
    """The simulator's end, one a lane; what was put is overwritten by what is put next. The memory has no name of its
    own, so that it goes with the processes, however they end."""

    def __init__(self) -> None:
        self.file = -1
        self.key = ""
        self.memory: mmap | None = None

    def put(self, value: Any, *, shared: bool) -> Any:
        """-> the message, which `SharedMemoryReader.take` opens; the value itself where there is no memory left to share."""
        buffers: list[pickle.PickleBuffer] = []
        header = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        arrays = [buffer.raw() for buffer in buffers]
        if sum(array.nbytes for array in arrays) <= SMALL:
            return pickle.dumps(Small(header=header, arrays=[bytearray(array) for array in arrays]), protocol=5)
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
        path = f"/proc/{os.getpid()}/fd/{self.file}"
        return pickle.dumps(Shared(path=path, key=self.key, header=header, spans=spans))

    def close(self) -> None:
        if self.memory is not None:
            self.memory.close()
            self.memory = None
        if self.file >= 0:
            os.close(self.file)
            self.file = -1

    def _grow(self, size: int) -> bool:
        self.close()
        try:
            self.file = os.memfd_create("vla-rl")
            os.posix_fallocate(self.file, 0, size)  # fails now, where a write would end the process
            self.memory, self.key = mmap(self.file, size), secrets.token_hex(16)
        except OSError:
            self.close()
            return False
        return True


class SharedMemoryReader:
    """The policy's end, one a lane."""

    def __init__(self) -> None:
        self.key = ""
        self.memory: mmap | None = None
        self.pool = Pool()

    def take(self, message: Any) -> Any:
        """What was put. Arrays are copies, for records to keep."""
        if not isinstance(message, bytes):
            return message
        value = pickle.loads(message)  # noqa: S301 - from our own actors
        if isinstance(value, Small):
            return pickle.loads(value.header, buffers=value.arrays)  # noqa: S301 - from our own actors
        if not isinstance(value, Shared):
            return value
        if value.key != self.key:
            file = os.open(value.path, os.O_RDWR)
            self.memory, self.key = mmap(file, 0), value.key
            os.close(file)
        assert self.memory is not None
        with memoryview(self.memory) as view:
            parts = [view[offset : offset + size] for offset, size in value.spans]
            arrays = [self.pool.copy(part) if part.nbytes > SMALL else bytearray(part) for part in parts]
        return pickle.loads(value.header, buffers=arrays)  # noqa: S301 - from our own actors


class Pool:
    """Memory for copies, which is used again when nobody refers to what was in it: pages that are new to a process take
    several times as long to fill as it takes to copy into old ones, and the system gets back what is freed at the end
    of a rollout."""

    def __init__(self) -> None:
        self.blocks: deque[Array] = deque()
        """In the order in which they were filled."""

    def copy(self, data: memoryview) -> Array:
        """-> uint8 [n], with this in it."""
        block = self._free(data.nbytes)
        if block is None:
            block = np.empty(data.nbytes, np.uint8)
            self.blocks.append(block)
        copied = block[: data.nbytes]
        copied[:] = np.frombuffer(data, np.uint8)
        return copied

    def _free(self, size: int) -> Array | None:
        """A block of that size or little more, if one is found soon; free ones of other sizes leave."""
        for _ in range(min(LOOKS, len(self.blocks))):
            block = self.blocks.popleft()
            if getrefcount(block) > UNUSED:
                self.blocks.append(block)
            elif size <= block.nbytes <= 2 * size:
                self.blocks.append(block)
                return block
        return None
