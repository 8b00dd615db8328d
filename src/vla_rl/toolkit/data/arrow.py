"""Names of files for pyarrow."""

from __future__ import annotations

import os
from pathlib import Path


def arrow_name(file: Path) -> str:
    """The name as pyarrow wants it, which writes it as UTF-8 whatever the locale is: Python has put marks in the place
    of other letters than ASCII's where the locale is `C`."""
    return os.fsencode(file).decode("utf-8", "surrogateescape")
