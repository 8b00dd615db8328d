"""Names of files that hooks write in the run folder: plain names that the run itself does not use."""

from __future__ import annotations

import re
import unicodedata
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from vla_rl.core.errors import UserError

RUN_FILES = (
    "spec.yaml",
    "spec-until_step_*.yaml",
    "environment.json",
    "results.json",
    "trace.json",
    "checkpoints",
    "episodes",
    "imagined",
    "benchmarks",
    "report.html",
    "trackers.json",
)
"""Patterns of files that a run or command of `vla-rl`, writes in the run folder. Names with a leading dot are too."""
LONGEST = 200
"""Most bytes of a name: file systems end at 255, and copies get a few more."""


def file_in_run(instance: object, attribute: Any, value: str) -> None:
    """Validate a name in the run folder (attrs validator): ValueError for paths, hidden names, and the run's."""
    flaw = flaw_of(value)
    if flaw:
        raise ValueError(f"{value!r} {flaw}; give a plain name, such as {attribute.default!r}")


def flaw_of(name: str) -> str:
    """Describe what is wrong with the name of a file in the run folder; empty if nothing is."""
    if not name.strip() or re.search(r"[/\\\x00-\x1f\x7f]", name) or name in (".", ".."):
        return "is not the name of a file in the run folder"
    if name.startswith(".") or name.endswith((".", " ")) or name != name.strip():
        return "begins or ends with a dot or a space"
    if len(name.encode()) > LONGEST:
        return f"is longer than {LONGEST} bytes"
    return "is a file of the run itself" if belongs_to_run(name) else ""


def belongs_to_run(name: str) -> bool:
    """Return whether the run itself writes this file or folder in its folder."""
    return any(fnmatchcase(same_file(name), pattern) for pattern in RUN_FILES)


def same_file(name: str) -> str:
    """Return the name as a file system sees it that ignores case and accents' encoding: equal names may be one file."""
    return unicodedata.normalize("NFC", name).casefold()


def check_outside(run: Path, path: Path, key: str) -> None:
    """Raise UserError if a path that the user gave a hook is the run folder, or one of the run's own files in it."""
    try:
        inside = path.resolve().relative_to(run.resolve())
    except ValueError:
        return
    flaw = "is the run folder" if not inside.parts else flaw_of(inside.parts[0])
    if flaw:
        raise UserError(f"{key}: {path} {flaw}; choose another folder")
