"""File names for pyarrow."""

from __future__ import annotations

import os
from pathlib import Path


def arrow_name(file: Path) -> str:
    """Return the name for pyarrow, which encodes it as UTF-8: Python's has surrogates in locale `C`."""
    return os.fsencode(file).decode("utf-8", "surrogateescape")
