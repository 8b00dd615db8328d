"""Where the numbers of the original implementations are: small files in the repository, large ones next to it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "reference"
SHARED = Path(os.environ.get("VLA_RL_REFERENCE", Path(__file__).parents[2] / "shared" / "reference"))


def reference(*parts: str) -> Path:
    """The file of that name, such as `reference("pi0", "io.safetensors")`; the test is skipped where it is missing."""
    for folder in (HERE, SHARED):
        path = folder.joinpath(*parts)
        if path.is_file():
            return path
    name = "/".join(parts)
    pytest.skip(f"no {name}: it is too large for tests/reference; set VLA_RL_REFERENCE to a folder that holds it")
