"""Reading of micro-batches while earlier ones are trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from vla_rl.core.types import Array

T = TypeVar("T")


def read_ahead(read: Callable[[Array], T], micro_batches: Sequence[Array]) -> Iterator[T]:
    """Yield `read(indices)` for each micro-batch. One thread reads the next one while the last one is trained on."""
    if not micro_batches:
        return
    with ThreadPoolExecutor(1, "demonstrations") as reader:
        following = reader.submit(read, micro_batches[0])
        for indices in micro_batches[1:]:
            ready, following = following, reader.submit(read, indices)
            yield ready.result()
        yield following.result()
