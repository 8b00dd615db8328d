"""Shared memory for requests from a simulator's process to a policy's. Putting a 2 MB observation into Ray's object
store takes milliseconds. A request has one reader, who answers before the next one is made: small requests go as one
pickled string, arrays of larger ones through memory that both have mapped."""

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
"""Bytes of arrays up to which they travel in the message itself."""
ALIGNMENT = 64
LOOKS = 8
"""Number of blocks that a `Pool` checks before it allocates another."""


def _references_to_an_unused_block() -> int:
    """Return the reference count of a block that only `Pool._find_unused_block` holds, taken in the same way as there.
    It is 2 on CPython 3.11 to 3.13 (the local variable, and the argument of `getrefcount`). CPython 3.14 may borrow the
    argument's reference (LOAD_FAST_BORROW), which makes it one less."""
    blocks = deque([np.empty(1, np.uint8)])
    block = blocks.popleft()
    return getrefcount(block)


UNUSED = _references_to_an_unused_block()


def host_key() -> tuple[str, str] | None:
    """Return a key of machine, boot and process namespace; processes with equal keys can share memory. None: no."""
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
    """A message whose arrays are in shared memory."""

    path: str
    key: str
    """Random key that identifies this memory."""
    header: bytes
    spans: Sequence[tuple[int, int]]
    """(offset, bytes) of each array."""


@frozen(kw_only=True, slots=True)
class Small:
    """A message that contains its arrays, as the pickling that measured their size has extracted them."""

    header: bytes
    arrays: Sequence[bytearray]


class SharedMemoryWriter:
    """The simulator's end of a lane; a message overwrites the last. Without a name, memory ends with the processes."""

    def __init__(self) -> None:
        self.file = -1
        self.key = ""
        self.memory: mmap | None = None

    def make_message(self, value: Any, *, shared: bool) -> Any:
        """Return the message, which `SharedMemoryReader.open_message` opens, or the value where no memory is shared."""
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
        if (self.memory is None or len(self.memory) < end) and not self._grow_memory(end):
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

    def _grow_memory(self, size: int) -> bool:
        self.close()
        try:
            self.file = os.memfd_create("vla-rl")
            os.posix_fallocate(self.file, 0, size)  # raises OSError now; a later write would end the process instead
            self.memory = mmap(self.file, size)
            self.key = secrets.token_hex(16)
        except OSError:
            self.close()
            return False
        return True


class SharedMemoryReader:
    """The policy's end, one for each lane."""

    def __init__(self) -> None:
        self.key = ""
        self.memory: mmap | None = None
        self.pool = Pool()

    def open_message(self, message: Any) -> Any:
        """Return the value that was put into a message. Its arrays are copies, so that they can be kept as records."""
        if not isinstance(message, bytes):
            return message
        value = pickle.loads(message)  # noqa: S301 - from our own actors
        if isinstance(value, Small):
            return pickle.loads(value.header, buffers=value.arrays)  # noqa: S301 - from our own actors
        if not isinstance(value, Shared):
            return value
        if value.key != self.key:
            file = os.open(value.path, os.O_RDWR)
            self.memory = mmap(file, 0)
            self.key = value.key
            os.close(file)
        assert self.memory is not None
        with memoryview(self.memory) as view:
            parts = [view[offset : offset + size] for offset, size in value.spans]
            arrays = [self.pool.copy_data(part) if part.nbytes > SMALL else bytearray(part) for part in parts]
        return pickle.loads(value.header, buffers=arrays)  # noqa: S301 - from our own actors


class Pool:
    """Memory blocks for copies, reused when nothing refers to them: filling new pages takes several times as long."""

    def __init__(self) -> None:
        self.blocks: deque[Array] = deque()
        """Blocks in the order in which they were filled."""

    def copy_data(self, data: memoryview) -> Array:
        """Return a copy of the data, uint8 [n]."""
        block = self._find_unused_block(data.nbytes)
        if block is None:
            block = np.empty(data.nbytes, np.uint8)
            self.blocks.append(block)
        copied = block[: data.nbytes]
        copied[:] = np.frombuffer(data, np.uint8)
        return copied

    def _find_unused_block(self, size: int) -> Array | None:
        """Return an unused block of this size or up to twice, if among the next `LOOKS`; unused others are dropped."""
        for _ in range(min(LOOKS, len(self.blocks))):
            block = self.blocks.popleft()
            if getrefcount(block) > UNUSED:
                self.blocks.append(block)
            # A much larger block would keep memory that nobody needs.
            elif size <= block.nbytes <= 2 * size:
                self.blocks.append(block)
                return block
        return None
