"""The global random generators of a process, which a plugin has to leave alone; torch's is one where it is imported."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from attrs import frozen

from vla_rl.testing.common.findings import Findings

SEEDED = "seed by Context.seed inside torch.random.fork_rng(), or draw from vla_rl.generator"
OWN = "draw from `noise`; seed a separate torch.Generator, or work inside torch.random.fork_rng()"


def generator_states() -> Mapping[str, Any]:
    """Return the states of the global generators, by library."""
    name, keys, *rest = np.random.get_state()  # noqa: NPY002 - it is the old one that plugins may touch
    states = {"NumPy": (name, np.asarray(keys).tobytes(), *rest), "Python": random.getstate()}
    if "torch" in sys.modules:
        states["torch"] = sys.modules["torch"].get_rng_state().numpy().tobytes()
    return states


@frozen
class Ran:
    """The result of a call, and the states of the global generators before and after it."""

    result: Any
    start: Mapping[str, Any]
    end: Mapping[str, Any]

    @property
    def changed_generators(self) -> list[str]:
        """Libraries whose global generator moved."""
        return [name for name in self.start if self.start[name] != self.end[name]]


def run_from(seed: int, call: Callable[[], Any]) -> Ran:
    """Call with all global generators at this seed, and put them back."""
    torch = sys.modules.get("torch")
    original = np.random.get_state(), random.getstate(), torch and torch.get_rng_state()  # noqa: NPY002
    try:
        np.random.seed(seed)  # noqa: NPY002
        random.seed(seed)
        if torch:
            torch.manual_seed(seed)
        start = generator_states()
        return Ran(call(), start, generator_states())
    finally:
        np.random.set_state(original[0])  # noqa: NPY002
        random.setstate(original[1])
        if torch:
            torch.set_rng_state(original[2])


def expect_untouched(
    f: Findings, where: str, moved: Sequence[str], got: str = "a change of {}'s", remedy: str = OWN
) -> None:
    """Record a finding if a library's global generator moved, or was seeded."""
    f.expect(not moved, where, "the global random generators left alone", got.format(" and ".join(moved)), remedy)


def seeded_generators(one: Ran, other: Ran) -> list[str]:
    """Libraries whose global generator stands at the same place after both, though they began at different ones: the
    call seeds it."""
    return [name for name in one.start if one.start[name] != other.start[name] and one.end[name] == other.end[name]]
