"""Private random stream for tasks that draw from torch's global generators, which stay unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stream:
    """Random stream for the CPU and, on a GPU, the device's generator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seed_generators(0)

    def seed_generators(self, seed: int) -> None:
        devices = {"cpu", str(self._device)}
        states = {name: torch.Generator(name).manual_seed(seed).get_state() for name in devices}
        self._host = states.pop("cpu")
        self._gpu = next(iter(states.values()), None)

    @contextmanager
    def drawn_from(self) -> Iterator[None]:
        """Make the global generators draw from this stream inside the context."""
        host = torch.get_rng_state()
        torch.set_rng_state(self._host)
        if self._gpu is not None:
            gpu = torch.cuda.get_rng_state(self._device)
            torch.cuda.set_rng_state(self._gpu, self._device)
        try:
            yield
        finally:
            self._host = torch.get_rng_state()
            torch.set_rng_state(host)
            if self._gpu is not None:
                self._gpu = torch.cuda.get_rng_state(self._device)
                torch.cuda.set_rng_state(gpu, self._device)
