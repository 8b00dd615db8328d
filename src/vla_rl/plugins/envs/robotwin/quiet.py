"""Keeps RoboTwin's prints and its seeding of the global generators away from the rest of the process."""

from __future__ import annotations

import io
import random
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager, redirect_stdout

import numpy as np

_lock = threading.RLock()


class NullStream(io.TextIOBase):
    """Text stream that drops what is written."""

    def write(self, text: str) -> int:
        return len(text)


@contextmanager
def suppress_prints() -> Generator[None]:
    """Suppress prints of all threads of the process inside the context; one calling thread at a time."""
    with _lock, redirect_stdout(NullStream()):
        yield


@contextmanager
def kept_randomness() -> Generator[None]:
    """Restore the global generators of Python, NumPy and torch (where that is loaded) after the context."""
    torch = sys.modules.get("torch")
    python_state, numpy_state = random.getstate(), np.random.get_state()
    torch_state = torch.get_rng_state() if torch is not None else None
    cuda_states = torch.cuda.get_rng_state_all() if torch is not None and torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        if torch is not None and torch_state is not None:
            torch.set_rng_state(torch_state)
            if cuda_states is not None:
                torch.cuda.set_rng_state_all(cuda_states)
