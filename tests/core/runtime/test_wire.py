"""Requests between processes: small ones inline, the arrays of others in shared memory."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from vla_rl.core.runtime import wire
from vla_rl.core.runtime.wire import FOLDER, SMALL, Inbox, Outbox

pytestmark = pytest.mark.skipif(wire.here() is None, reason="this system has no /dev/shm")


def value_of(size: int, seed: int = 0) -> dict:
    draws = np.random.default_rng(seed)
    image = draws.integers(0, 255, size, dtype=np.uint8)
    return {"image": image, "state": draws.standard_normal((3, 5)), "text": "lift", "rows": np.arange(4)}


def same(a: dict, b: dict) -> bool:
    return all(np.array_equal(a[key], b[key]) for key in a)


def ours() -> set[Path]:
    return set(FOLDER.glob(f"vla-rl-{os.getpid()}-*"))


def test_small_values_are_in_the_message():
    message = Outbox().put(value_of(SMALL // 2), shared=True)
    assert isinstance(message, bytes) and len(message) > SMALL // 2
    assert same(Inbox().take(message), value_of(SMALL // 2)) and not ours()


def test_arrays_of_large_values_go_through_shared_memory():
    outbox, inbox = Outbox(), Inbox()
    first = inbox.take(outbox.put(value_of(10**6), shared=True))
    message = outbox.put(value_of(10**6, seed=1), shared=True)
    assert len(message) < 4096
    second = inbox.take(message)
    assert same(first, value_of(10**6)), "what was taken is a copy"
    assert same(second, value_of(10**6, seed=1))
    second["image"][0] = 1  # records may be written to


def test_the_memory_goes_with_the_processes():
    outbox, inbox = Outbox(), Inbox()
    message = outbox.put(value_of(10**6), shared=True)
    assert len(ours()) == 1
    inbox.take(message)
    assert not ours(), "unlinked as soon as both have it"
    grown = outbox.put(value_of(10**7), shared=True)
    assert same(inbox.take(grown), value_of(10**7)) and not ours()
    outbox.put(value_of(2 * 10**7), shared=True)
    outbox.close()
    assert not ours(), "unlinked by its owner where no reader has come"


def test_a_request_that_was_never_read_is_made_again():
    """As after a simulator elsewhere died: the round begins anew."""
    outbox, inbox = Outbox(), Inbox()
    outbox.put(value_of(10**6), shared=True)
    assert same(inbox.take(outbox.put(value_of(10**6, seed=1), shared=True)), value_of(10**6, seed=1))


def test_without_shared_memory_the_value_itself_travels(monkeypatch):
    value = value_of(10**6)
    assert Outbox().put(value, shared=False) is value

    def full(handle, offset, size):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert Outbox().put(value, shared=True) is value and not ours()
    assert Inbox().take(value) is value


def test_a_message_says_where_its_arrays_are():
    outbox = Outbox()
    shared = pickle.loads(outbox.put(value_of(10**6), shared=True))
    assert Path(shared.path) in ours() and all(offset % wire.ALIGNMENT == 0 for offset, _ in shared.spans)
    outbox.close()
