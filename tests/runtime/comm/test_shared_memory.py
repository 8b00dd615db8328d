"""Requests between processes: small ones inline, the arrays of others in shared memory."""

from __future__ import annotations

import gc
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from vla_rl.runtime.comm import shared_memory as wire
from vla_rl.runtime.comm.shared_memory import SMALL, SharedMemoryReader, SharedMemoryWriter

pytestmark = pytest.mark.skipif(wire.host_key() is None, reason="no memory to share on this system")


def value_of(size: int, seed: int = 0) -> dict:
    draws = np.random.default_rng(seed)
    image = draws.integers(0, 255, size, dtype=np.uint8)
    return {"image": image, "state": draws.standard_normal((3, 5)), "text": "lift", "rows": np.arange(4)}


def same(a: dict, b: dict) -> bool:
    return all(np.array_equal(a[key], b[key]) for key in a)


def shared_files() -> int:
    """Memory files that this process has open."""
    return sum(link.is_symlink() and "memfd:vla-rl" in str(link.readlink()) for link in Path("/proc/self/fd").iterdir())


def test_small_values_are_in_the_message():
    message = SharedMemoryWriter().make_message(value_of(SMALL // 2), shared=True)
    assert isinstance(message, bytes) and len(message) > SMALL // 2
    assert same(SharedMemoryReader().open_message(message), value_of(SMALL // 2))


def test_arrays_of_large_values_go_through_shared_memory():
    outbox, inbox = SharedMemoryWriter(), SharedMemoryReader()
    first = inbox.open_message(outbox.make_message(value_of(10**6), shared=True))
    message = outbox.make_message(value_of(10**6, seed=1), shared=True)
    assert len(message) < 4096
    second = inbox.open_message(message)
    assert same(first, value_of(10**6)), "what was taken is a copy"
    assert same(second, value_of(10**6, seed=1))
    second["image"][0] = 1  # records may be written to


def test_the_memory_has_no_name_and_is_given_back():
    before, names = shared_files(), set(Path("/dev/shm").iterdir())
    outbox, inbox = SharedMemoryWriter(), SharedMemoryReader()
    for size in (10**6, 10**7):
        assert same(inbox.open_message(outbox.make_message(value_of(size), shared=True)), value_of(size))
    assert shared_files() > before and set(Path("/dev/shm").iterdir()) == names
    outbox.close()
    del inbox
    gc.collect()
    assert shared_files() == before


def test_another_memory_is_never_taken_for_the_one_before():
    """A simulator that is started again writes to other memory."""
    inbox, first, second = SharedMemoryReader(), SharedMemoryWriter(), SharedMemoryWriter()
    inbox.open_message(first.make_message(value_of(10**6), shared=True))
    first.close()
    assert same(inbox.open_message(second.make_message(value_of(10**6, seed=1), shared=True)), value_of(10**6, seed=1))
    second.close()


def test_a_request_that_was_never_read_is_made_again():
    """A round restarts after a simulator elsewhere died."""
    outbox, inbox = SharedMemoryWriter(), SharedMemoryReader()
    outbox.make_message(value_of(10**6), shared=True)
    assert same(inbox.open_message(outbox.make_message(value_of(10**6, seed=1), shared=True)), value_of(10**6, seed=1))


def test_without_shared_memory_the_value_itself_travels(monkeypatch):
    value, before = value_of(10**6), shared_files()
    assert SharedMemoryWriter().make_message(value, shared=False) is value

    def full(handle, offset, size):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert SharedMemoryWriter().make_message(value, shared=True) is value and shared_files() == before
    assert SharedMemoryReader().open_message(value) is value


def test_a_message_says_where_its_arrays_are():
    outbox = SharedMemoryWriter()
    shared = pickle.loads(outbox.make_message(value_of(10**6), shared=True))
    assert Path(shared.path).exists() and all(offset % wire.ALIGNMENT == 0 for offset, _ in shared.spans)
    outbox.close()


def test_memory_of_copies_is_used_again_but_not_while_anybody_refers_to_it():
    outbox, inbox = SharedMemoryWriter(), SharedMemoryReader()
    values = [value_of(4 * SMALL, seed) for seed in range(4)]
    kept = [inbox.open_message(outbox.make_message(value, shared=True)) for value in values]
    assert all(map(same, kept, values)) and len(inbox.pool.blocks) == 4
    view, tensor = kept[0]["image"][5:9], torch.from_numpy(kept[1]["image"])
    there = {block.ctypes.data for block in inbox.pool.blocks}
    del kept
    found = inbox.open_message(outbox.make_message(value_of(4 * SMALL, 9), shared=True))
    assert same(found, value_of(4 * SMALL, 9)) and found["image"].ctypes.data in there
    assert np.array_equal(view, values[0]["image"][5:9]) and np.array_equal(tensor, values[1]["image"])
    further = [inbox.open_message(outbox.make_message(value_of(4 * SMALL, seed), shared=True)) for seed in (10, 11)]
    assert len(inbox.pool.blocks) == 5, "one of the four was free in addition to the first"
    assert np.array_equal(view, values[0]["image"][5:9]) and np.array_equal(tensor, values[1]["image"])
    assert all(map(same, further, [value_of(4 * SMALL, 10), value_of(4 * SMALL, 11)]))


def test_memory_of_another_size_is_given_back():
    outbox, inbox = SharedMemoryWriter(), SharedMemoryReader()
    for size in (16, 4, 64):
        inbox.open_message(outbox.make_message(value_of(size * SMALL), shared=True))
        assert [block.nbytes for block in inbox.pool.blocks] == [size * SMALL]
