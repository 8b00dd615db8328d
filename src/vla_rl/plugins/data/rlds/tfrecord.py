"""Reads TFRecord files of `tf.train.Example` messages, without TensorFlow. Byte strings, which are images, are
located in their file and not copied.

Sources: TensorFlow's guide "TFRecord and tf.train.Example", its `example.proto` and `feature.proto`, and the wire
format of protocol buffers. Checksums are not verified."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from attrs import frozen

from vla_rl.core.errors import UserError
from vla_rl.core.types import Array

HEAD, TAIL = 12, 4
"""Bytes before a record, its length and that number's checksum, and after it, its checksum."""
BYTES_LIST, FLOAT_LIST, INT64_LIST = 1, 2, 3
VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
Span = tuple[int, int]
"""Place of a byte string: its first byte, and the byte after its last."""


@frozen(eq=False)
class ExampleFeature:
    """A feature of an example: numbers, or byte strings."""

    numbers: Array | None = None
    """float32 or int64 [n]."""
    spans: tuple[Span, ...] | None = None
    """Places of the byte strings in the file."""


@frozen(eq=False)
class Example:
    """One example of a file."""

    features: dict[str, ExampleFeature]
    record: bytes
    offset: int
    """Place of the record in its file."""

    def read_span(self, span: Span) -> bytes:
        """Return a byte string of the example, without reading the file again."""
        return self.record[span[0] - self.offset : span[1] - self.offset]


@frozen
class ExampleRecord:
    """Place of one example in a file."""

    file: Path
    start: int
    """First byte of its head."""
    length: int
    """Bytes of the example itself."""


def find_records(file: Path) -> Iterator[ExampleRecord]:
    """Yield the place of each example of a file, without reading it. Raise UserError for a file that is cut."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        start = 0
        while start < size:
            opened.seek(start)
            head = opened.read(HEAD)
            length = struct.unpack("<Q", head[:8])[0] if len(head) == HEAD else size
            end = start + HEAD + length + TAIL
            if end > size:
                raise UserError(f"{file}: its record at byte {start} ends behind the file; download it again")
            yield ExampleRecord(file, start, length)
            start = end


def read_example(record: ExampleRecord) -> Example:
    """Read an example. Raise UserError for what is not one."""
    first = record.start + HEAD
    content = read_bytes(record.file, (first, first + record.length))
    try:
        return Example(_parse_features(content, first), content, first)
    except (ValueError, struct.error) as exc:
        raise UserError(f"{record.file}: its record at byte {record.start} is not a tf.train.Example ({exc})") from exc


def read_bytes(file: Path, span: Span) -> bytes:
    """Return a byte string of a file."""
    with file.open("rb") as opened:
        opened.seek(span[0])
        return opened.read(span[1] - span[0])


def _parse_features(record: bytes, offset: int) -> dict[str, ExampleFeature]:
    """Return the features of an example. `offset`: place of the record in its file."""
    features = {}
    for field, features_span in _walk_fields(record, (0, len(record))):
        if field != 1:
            continue
        for _, entry in _walk_fields(record, features_span):
            parts = dict(_walk_fields(record, entry))
            if 1 not in parts or 2 not in parts:
                raise ValueError("a feature has no name or no value")
            name = record[slice(*parts[1])].decode()
            features[name] = _parse_feature(record, parts[2], offset)
    return features


def _parse_feature(record: bytes, span: Span, offset: int) -> ExampleFeature:
    for kind, values in _walk_fields(record, span):
        if kind == BYTES_LIST:
            spans = tuple((offset + first, offset + last) for _, (first, last) in _walk_fields(record, values))
            return ExampleFeature(spans=spans)
        if kind == FLOAT_LIST:
            parts = [np.frombuffer(record[slice(*part)], "<f4") for _, part in _walk_fields(record, values)]
            return ExampleFeature(
                numbers=np.concatenate(parts).astype(np.float32) if parts else np.empty(0, np.float32)
            )
        if kind == INT64_LIST:
            return ExampleFeature(numbers=np.array(_parse_integers(record, values), np.int64))
    return ExampleFeature(numbers=np.empty(0, np.float32))


def _parse_integers(record: bytes, values: Span) -> list[int]:
    numbers = []
    for _, (first, last) in _walk_fields(record, values):
        at = first
        while at < last:
            number, at = _read_varint(record, at, last)
            numbers.append(number - (1 << 64) if number >> 63 else number)
    return numbers


def _walk_fields(record: bytes, span: Span) -> Iterator[tuple[int, Span]]:
    """Yield the number and the place within the record of each field of a message. Raise ValueError for no message."""
    at, end = span
    while at < end:
        tag, at = _read_varint(record, at, end)
        encoding = tag & 7
        if encoding == LENGTH:
            length, at = _read_varint(record, at, end)
        elif encoding == VARINT:
            length = _read_varint(record, at, end)[1] - at
        elif encoding in (FIXED64, FIXED32):
            length = 8 if encoding == FIXED64 else 4
        else:
            raise ValueError(f"wire type {encoding}")
        if at + length > end:
            raise ValueError("a field ends behind its message")
        yield tag >> 3, (at, at + length)
        at += length


def _read_varint(record: bytes, at: int, end: int) -> tuple[int, int]:
    """Return the number that begins at a byte, and the byte after it."""
    number = 0
    for shift in range(0, 70, 7):
        if at >= end:
            raise ValueError("a number is cut")
        byte = record[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number & ((1 << 64) - 1), at
    raise ValueError("a number has more than 64 bits")
