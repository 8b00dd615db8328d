"""Reader of JSON files from other programs: every problem is explained in one sentence. Cheap to import."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from attrs import evolve, frozen

from vla_rl.core.errors import UserError
from vla_rl.core.spec.structure import format_value

MAX_BYTES = 64 << 20
"""Most bytes of a file that is read; parsing takes up to 30 times as much memory."""
LARGEST = 2**53
"""Largest integer that every JSON reader keeps exactly."""
LARGEST_NUMBER = 1e300
LONGEST_NAME = 255
"""Bytes of a file's name on the usual file systems."""


@frozen(kw_only=True)
class Record:
    """A JSON object, or a row of a table, whose values are checked as they are asked for. Methods raise `error`, which
    names file, key, what is there and what is expected. A missing key has the `default`, if any."""

    source: str
    """File of the object, and the place in it."""
    data: Mapping[str, Any]
    error: type[UserError] = UserError

    def get_text(self, key: str, default: str | None = None) -> str:
        expected = "a text"
        value = self._find_value(key, expected, default)
        if not isinstance(value, str) or not _is_encodable(value):
            raise self.build_error(key, expected)
        return value

    def get_texts(self, key: str, default: Sequence[str] | None = None) -> tuple[str, ...]:
        """A list of texts."""
        return self._get_list(key, "a text", lambda item: isinstance(item, str) and _is_encodable(item), default)

    def get_integer(self, key: str, low: int = 0, high: int = LARGEST, default: int | None = None) -> int:
        expected = f"a whole number from {low} {f'to {high:,}' if high < LARGEST else 'on'}"
        value = self._find_value(key, expected, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.build_error(key, expected)
        return value

    def get_number(
        self,
        key: str,
        low: float = -math.inf,
        above: float = -math.inf,
        high: float = math.inf,
        default: float | None = None,
    ) -> float:
        """A finite number, at least `low`, more than `above` and at most `high`."""
        bounds = [f"from {low:g} {f'to {high:g}' if high < math.inf else 'on'}"] if low > -math.inf else []
        bounds += [f"above {above:g}"] if above > -math.inf else []
        expected = " ".join(["a number", *bounds])
        value = self._find_value(key, expected, default)
        if not (_is_number(value) and low <= value <= high and value > above):
            raise self.build_error(key, expected)
        return float(value)

    def get_numbers(self, key: str) -> tuple[float, ...]:
        """A list of finite numbers."""
        return tuple(map(float, self._get_list(key, "a number", _is_number)))

    def get_boolean(self, key: str, default: bool | None = None) -> bool:
        value = self._find_value(key, "true or false", default)
        if not isinstance(value, bool):
            raise self.build_error(key, "true or false")
        return value

    def get_sizes(self, key: str, low: int = 0, high: int = LARGEST) -> tuple[int, ...]:
        """A list of whole numbers."""
        expected = f"a list of whole numbers from {low} {f'to {high:,}' if high < LARGEST else 'on'}"
        value = self._find_value(key, expected)
        if not isinstance(value, list | tuple) or not all(type(size) is int and low <= size <= high for size in value):
            raise self.build_error(key, expected)
        return tuple(value)

    def get_records(self, key: str) -> dict[str, Record]:
        """A JSON object of JSON objects."""
        return self.get_record(key).records_here()

    def records_here(self) -> dict[str, Record]:
        """Return all values, each a JSON object."""
        return {name: self.get_record(name) for name in self.data}

    def get_record(self, key: str, default: Mapping[str, Any] | None = None) -> Record:
        """A JSON object."""
        value = self._find_value(key, "a JSON object", default)
        if not isinstance(value, Mapping):
            raise self.build_error(key, "a JSON object")
        return Record(source=f"{self.source}: {key}", data=value, error=self.error)

    def get_section(self, key: str) -> Record:
        """A JSON object, an empty one where it is left out or null."""
        return self.get_record(key) if self.has_value(key) else evolve(self, source=f"{self.source}: {key}", data={})

    def list_of_records(self, key: str, default: Sequence[Mapping[str, Any]] | None = None) -> list[Record]:
        """A list of JSON objects."""
        items = self._get_list(key, "a JSON object", lambda item: isinstance(item, Mapping), default)
        return [Record(source=f"{self.source}: {key}[{i}]", data=x, error=self.error) for i, x in enumerate(items)]

    def has_value(self, key: str) -> bool:
        """Whether the key is there with a value other than null."""
        return self.data.get(key) is not None

    def build_error(self, key: str, expected: str) -> UserError:
        """The error for a key that is missing or holds something else."""
        fact = format_value(self.data[key]) if key in self.data else "missing"
        return self.error(f"{self.source}: {key!r} is {fact}, {expected} is expected")

    def _get_list(self, key: str, expected: str, fits: Callable[[Any], bool], default: Any = None) -> tuple[Any, ...]:
        """A list of which each item is what is expected."""
        value = self._find_value(key, f"a list (each item {expected})", default)
        if not isinstance(value, list | tuple):
            raise self.build_error(key, f"a list (each item {expected})")
        for i, item in enumerate(value):
            if not fits(item):
                raise self.error(f"{self.source}: {f'{key}[{i}]'!r} is {format_value(item)}, {expected} is expected")
        return tuple(value)

    def _find_value(self, key: str, expected: str, default: Any = None) -> Any:
        if key in self.data:
            return self.data[key]
        if default is None:
            raise self.build_error(key, expected)
        return default


def read_record(file: Path, error: type[UserError] = UserError, limit: int = MAX_BYTES) -> Record:
    """Read a file that holds a JSON object. Raise `error`."""
    value = read_value(file, error, limit)
    if not isinstance(value, dict):
        raise error(f"{file} holds {format_value(value)}, a JSON object is expected")
    return Record(source=str(file), data=value, error=error)


def read_records(file: Path, error: type[UserError] = UserError, limit: int = MAX_BYTES) -> Iterator[Record]:
    """Yield the JSON object on each line, without blank lines (JSON lines). Raise `error`."""
    for number, line in enumerate(_read_limited(file, error, limit).split("\n"), 1):
        if line.strip():
            source = f"{file}, line {number}"
            value = _parse_json(line, source, error)
            if not isinstance(value, dict):
                raise error(f"{source} holds {format_value(value)}, a JSON object is expected")
            yield Record(source=source, data=value, error=error)


def read_value(file: Path, error: type[UserError] = UserError, limit: int = MAX_BYTES) -> Any:
    """Return the value in a JSON file. Raise `error`."""
    return _parse_json(_read_limited(file, error, limit), str(file), error)


def encode_json(content: Any, indent: int = 2) -> bytes:
    """Return the content of a JSON file."""
    return f"{json.dumps(content, indent=indent)}\n".encode()


def path_inside(folder: Path, name: str, source: str, error: type[UserError] = UserError) -> Path:
    """Return `folder / name`. Raise `error` if it leaves it. Links are followed: the hub's cache consists of them.

    Args:
        source: file and key that the name comes from.
    """
    parts = PurePosixPath(name).parts
    too_long = any(len(part.encode(errors="replace")) > LONGEST_NAME for part in parts)
    if not parts or PurePosixPath(name).is_absolute() or ".." in parts or "\0" in name or "\\" in name or too_long:
        raise error(f"{source} names the file {name!r:.200}, which is not inside {folder}; a relative path is expected")
    return folder / name


def _read_limited(file: Path, error: type[UserError], limit: int) -> str:
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


def _parse_json(text: str, source: str, error: type[UserError]) -> Any:
    if not text.strip():
        raise error(f"cannot read {source}: it is empty, JSON is expected; fetch it again")
    try:
        return json.loads(text, object_pairs_hook=_refuse_duplicates)
    except json.JSONDecodeError as exc:
        cut = exc.msg.startswith("Unterminated") or exc.pos >= len(text.rstrip())
        early = "; it ends too early, as after a download that was cut off: fetch it again" if cut else ""
        raise error(f"cannot read {source}: it is not JSON: {exc}{early}") from exc
    except RecursionError as exc:
        raise error(f"cannot read {source}: it is nested too deeply") from exc
    except ValueError as exc:  # a key that is there twice, a number of more than 4300 digits
        raise error(f"cannot read {source}: {exc}") from exc


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        (twice, count), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"it has the key {twice!r} {count} times, and only one of them can be meant")
    return result


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST_NUMBER


def _is_encodable(text: str) -> bool:
    """Return whether the text can be encoded as UTF-8; half of a surrogate pair cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
