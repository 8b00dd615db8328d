"""Reading of demonstrations while earlier ones are trained on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from vla_rl.core.hookspecs import Demonstrations
from vla_rl.core.types import Array, Observation


def read_ahead(
    demonstrations: Demonstrations | None, micro_batches: Sequence[Array]
) -> Iterator[tuple[Observation, Any]]:
    """Yield the demonstrations with these indices; the next ones are read while the last ones are trained on."""
    if demonstrations is None or not micro_batches:
        return
    with ThreadPoolExecutor(1, "demonstrations") as reader:
        following = reader.submit(demonstrations.read_samples, micro_batches[0])
        for indices in micro_batches[1:]:
            ready, following = following, reader.submit(demonstrations.read_samples, indices)
            yield ready.result()
        yield following.result()
