"""Reader of JSON files from other programs: every problem is explained in one sentence. Cheap to import."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from attrs import frozen

from vla_rl.core.errors import UserError
from vla_rl.core.spec.structure import said

MAX_BYTES = 64 << 20
"""Most bytes of a file that is read; parsing takes up to 30 times as much memory."""
LARGEST = 2**53
"""Largest integer that every JSON reader keeps exactly."""
LARGEST_NUMBER = 1e300


@frozen(kw_only=True)
class Record:
    """A JSON object, or a row of a table, whose values are checked when they are read. Each method raises `error`,
    which names the file, the key, the value and what is expected."""

    source: str
    """File of the object, and the place in it."""
    data: Mapping[str, Any]
    error: type[UserError] = UserError

    def text(self, key: str) -> str:
        value = self._find(key, "a text")
        if not isinstance(value, str) or not _encodes(value):
            raise self._wrong(key, "a text")
        return value

    def integer(self, key: str, low: int = 0) -> int:
        expected = f"a whole number from {low} on"
        value = self._find(key, expected)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= LARGEST:
            raise self._wrong(key, expected)
        return value

    def number(self, key: str, low: float = -math.inf, above: float = -math.inf) -> float:
        """Return a finite number, at least `low` and more than `above`."""
        bounds = [f"from {low:g} on"] if low > -math.inf else []
        bounds += [f"above {above:g}"] if above > -math.inf else []
        expected = " ".join(["a number", *bounds])
        value = self._find(key, expected)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (is_number and abs(value) <= LARGEST_NUMBER and value >= low and value > above):
            raise self._wrong(key, expected)
        return float(value)

    def boolean(self, key: str) -> bool:
        value = self._find(key, "true or false")
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def sizes(self, key: str) -> tuple[int, ...]:
        """Return a list of whole numbers from 0 on."""
        expected = "a list of whole numbers from 0 on"
        value = self._find(key, expected)
        if not isinstance(value, list | tuple) or not all(type(size) is int and 0 <= size <= LARGEST for size in value):
            raise self._wrong(key, expected)
        return tuple(value)

    def records(self, key: str) -> dict[str, Record]:
        """Return a JSON object of JSON objects."""
        value = self._find(key, "a JSON object")
        if not isinstance(value, Mapping):
            raise self._wrong(key, "a JSON object")
        return Record(source=f"{self.source}: {key}", data=value, error=self.error).records_here()

    def records_here(self) -> dict[str, Record]:
        """Return all values, each a JSON object."""
        return {name: self.record(name) for name in self.data}

    def record(self, key: str) -> Record:
        value = self._find(key, "a JSON object")
        if not isinstance(value, Mapping):
            raise self._wrong(key, "a JSON object")
        return Record(source=f"{self.source}: {key}", data=value, error=self.error)

    def _find(self, key: str, expected: str) -> Any:
        if key not in self.data:
            raise self.error(f"{self.source}: {key!r} is missing, {expected} is expected")
        return self.data[key]

    def _wrong(self, key: str, expected: str) -> UserError:
        return self.error(f"{self.source}: {key!r} is {said(self.data[key])}, {expected} is expected")


def read_record(file: Path, error: type[UserError] = UserError, limit: int = MAX_BYTES) -> Record:
    """Read a file that holds a JSON object. Raise `error`."""
    value = read_value(file, error, limit)
    if not isinstance(value, dict):
        raise error(f"{file} holds {said(value)}, a JSON object is expected")
    return Record(source=str(file), data=value, error=error)


def read_records(file: Path, error: type[UserError] = UserError, limit: int = MAX_BYTES) -> Iterator[Record]:
    """Yield the JSON object on each line, without blank lines (JSON lines). Raise `error`."""
    for number, line in enumerate(_read(file, error, limit).split("\n"), 1):
        if line.strip():
            source = f"{file}, line {number}"
            value = _parse(line, source, error)
            if not isinstance(value, dict):
                raise error(f"{source} holds {said(value)}, a JSON object is expected")
            yield Record(source=source, data=value, error=error)


def read_value(file: Path, error: type[UserError] = UserError, limit: int = MAX_BYTES) -> Any:
    """Return the value in a JSON file. Raise `error`."""
    return _parse(_read(file, error, limit), str(file), error)


def path_inside(folder: Path, name: str, source: str, error: type[UserError] = UserError) -> Path:
    """Return `folder / name`. Raise `error` if the name leaves the folder. Links are followed, since the Hugging Face
    hub's cache consists of them.

    Args:
        source: file and key that the name comes from.
    """
    parts = PurePosixPath(name).parts
    if not parts or PurePosixPath(name).is_absolute() or ".." in parts or "\0" in name or "\\" in name:
        raise error(f"{source} names the file {name!r:.200}, which is not inside {folder}; a relative path is expected")
    return folder / name


def _read(file: Path, error: type[UserError], limit: int) -> str:
    """Return a file's text, with or without a byte order mark."""
    try:
        if not file.is_file():
            raise error(f"{file} {'is not a regular file' if file.exists() else 'does not exist'}")
        size = file.stat().st_size
        if size > limit:
            raise error(
                f"cannot read {file}: it has {size:,} bytes, more than the {limit:,} that are read of such a file"
            )
        content = file.read_bytes()
    except OSError as exc:
        raise error(f"cannot read {file}: {exc.strerror}") from exc
    if content.startswith(b"version https://git-lfs"):
        raise error(f"{file} is a Git LFS pointer and not the file itself; run `git lfs pull` there")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        byte = f"byte 0x{content[exc.start]:02x} at {exc.start}"
        raise error(
            f"cannot read {file}: it is not UTF-8 text ({byte}); save it in that encoding, or fetch it again"
        ) from exc


def _parse(text: str, source: str, error: type[UserError]) -> Any:
    if not text.strip():
        raise error(f"cannot read {source}: it is empty, JSON is expected; fetch it again")
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as exc:
        cut = exc.msg.startswith("Unterminated") or exc.pos >= len(text.rstrip())
        early = "; it ends too early, as after a download that was cut off: fetch it again" if cut else ""
        raise error(f"cannot read {source}: it is not JSON: {exc}{early}") from exc
    except RecursionError as exc:
        raise error(f"cannot read {source}: it is nested too deeply") from exc
    except ValueError as exc:  # a key that is there twice, a number of more than 4300 digits
        raise error(f"cannot read {source}: {exc}") from exc


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        (twice, count), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"it has the key {twice!r} {count} times, and only one of them can be meant")
    return result


def _encodes(text: str) -> bool:
    """Return whether the text can be encoded as UTF-8; half of a surrogate pair cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
