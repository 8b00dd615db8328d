"""Small messages between Ray actors as bytes.

Ray sends arrays out of band, which is right for frames and costs a third of a millisecond a message; up to the size
that it sends inline anyway, one pickled string is faster.
"""

from __future__ import annotations

import pickle
from typing import Any

SMALL = 64 * 1024
"""Bytes."""


def pack(value: Any, size: int) -> Any:
    """The value as bytes where its arrays (about `size` bytes) are small, else itself."""
    return pickle.dumps(value, protocol=5) if size <= SMALL else value


def unpack(message: Any) -> Any:
    """What was packed."""
    return pickle.loads(message) if isinstance(message, bytes) else message  # noqa: S301 - from our own actors
