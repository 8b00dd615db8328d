"""What the scripts in this folder print at their end."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path


def report(figures: Mapping[str, float], out: Path, file: Path | None) -> None:
    """Print the figures and the folder that was written; the figures into a JSON file too, if one was asked for."""
    for name, value in figures.items():
        print(f"{name:>30} {value:,.3f}" if value < 1000 else f"{name:>30} {value:,.0f}")
    print(f"wrote {out}")
    if file:
        file.write_text(json.dumps(figures, indent=1) + "\n")
