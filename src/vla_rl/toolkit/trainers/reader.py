"""Reading of data in a thread while earlier data are trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

S = TypeVar("S")
T = TypeVar("T")


def read_in_background(read: Callable[[S], T], parts: Sequence[S]) -> Iterator[T]:
    """Yield `read(part)` for each part. One thread reads the next one while the last one is used."""
    if not parts:
        return
    with ThreadPoolExecutor(1, "reader") as reader:
        following = reader.submit(read, parts[0])
        for part in parts[1:]:
            ready, following = following, reader.submit(read, part)
            yield ready.result()
        yield following.result()
