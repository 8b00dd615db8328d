"""Manifest of a checkpoint: sizes and hashes of its files, written last and checked before anything is read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from vla_rl.core.errors import UserError
from vla_rl.toolkit.json_files import path_inside, read_record

NAME = "manifest.json"
READ = (".safetensors", ".pt", ".json")
"""Suffixes of weights and settings."""
THREADS = 4
"""Files hashed concurrently; a thread does 0.6 to 2 GB/s, about as fast as disks are."""


def write_manifest(checkpoint: Path) -> None:
    """Write the manifest of all files in a checkpoint folder."""
    names = sorted(str(file.relative_to(checkpoint)) for file in checkpoint.rglob("*") if file.is_file())
    with ThreadPoolExecutor(THREADS) as pool:
        hashes = list(pool.map(lambda name: _hash_file(checkpoint / name), names))
    entries = {
        name: {"size": (checkpoint / name).stat().st_size, "sha256": digest}
        for name, digest in zip(names, hashes, strict=True)
    }
    (checkpoint / NAME).write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")


def find_damage(checkpoint: Path) -> list[str]:
    """Return what is wrong with a checkpoint folder, a line a file; empty if all files are as they were written."""
    if not (checkpoint / NAME).is_file():
        return [f"{NAME} is missing, which is written last: the checkpoint is incomplete"]
    try:
        entries = _read_manifest(checkpoint)
    except UserError as exc:
        return [f"{NAME} cannot be read: {exc}"]
    if problems := [*_wrong_sizes(checkpoint, entries), *_unlisted_files(checkpoint, entries)]:
        return problems
    with ThreadPoolExecutor(THREADS) as pool:
        contents = pool.map(lambda name: _wrong_content(checkpoint, name, entries[name][1]), entries)
        return [text for text in contents if text]


def same_manifest(checkpoint: Path, other: Path) -> bool:
    """Return whether the files of both checkpoints were the same when they were written."""
    try:
        return (checkpoint / NAME).read_bytes() == (other / NAME).read_bytes()
    except OSError:
        return False


def _read_manifest(checkpoint: Path) -> dict[str, tuple[int, str]]:
    """Return name of a file -> (size, hash). Raises UserError."""
    manifest = read_record(checkpoint / NAME)
    entries = {}
    for name in manifest.data:
        path_inside(checkpoint, name, manifest.source)
        entry = manifest.get_record(name)
        entries[name] = entry.get_integer("size"), entry.get_text("sha256")
    return entries


def _wrong_sizes(checkpoint: Path, entries: dict[str, tuple[int, str]]) -> Iterator[str]:
    for name, (size, _) in entries.items():
        file = checkpoint / name
        if not file.is_file():
            yield f"{name} is missing"
        elif file.stat().st_size != size:
            yield f"{name} has {file.stat().st_size} bytes and had {size}"


def _unlisted_files(checkpoint: Path, entries: dict[str, tuple[int, str]]) -> Iterator[str]:
    """Name weights and settings that no hash vouches for, and that a model or an export would read."""
    for file in sorted(checkpoint.rglob("*")):
        name = str(file.relative_to(checkpoint))
        if file.suffix in READ and not file.name.startswith(".") and name not in (*entries, NAME):
            yield f"{name} is not in {NAME}: it was put there later; remove it"


def _wrong_content(checkpoint: Path, name: str, digest: str) -> str:
    try:
        return "" if _hash_file(checkpoint / name) == digest else f"{name} has other content than was written (SHA-256)"
    except OSError as exc:
        return f"{name} cannot be read: {exc}"


def _hash_file(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
