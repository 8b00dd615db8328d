"""Files that are there as a whole, or as they were before."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(file: Path, text: str) -> None:
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, file)
