"""File names for pyarrow."""

from __future__ import annotations

import os
from pathlib import Path


def arrow_name(file: Path) -> str:
    """Return the name in the form that pyarrow needs: pyarrow encodes it as UTF-8 in any locale, while Python in locale
    `C` has replaced non-ASCII letters by surrogates."""
    return os.fsencode(file).decode("utf-8", "surrogateescape")
