"""Append-only log of records of one size, in files of a bounded number of records each."""

from __future__ import annotations

import os
import re
import zlib
from collections import deque
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from vla_rl.core.errors import CheckpointError, UserError
from vla_rl.core.paths import own_copy
from vla_rl.core.types import Array

FILE_BYTES = 64 << 20
"""Size up to which a file grows, at least one record."""
OPEN_FILES = 16
"""Files that are kept open for reading."""
VERIFIED_BYTES = 4 << 20
"""Bytes that are read at a time where all records are verified."""
PROTECTED = 2
"""Checkpoints whose records are not deleted: the last one may be damaged."""
NAME = re.compile(r"(\d{8,})\.bin")


class RecordLog:
    """Records of a NumPy dtype, numbered from 0. A file holds equally many; names tell the number of the first one.

    Written records never change, and each has a checksum (CRC-32) of its content and its number. A process that is
    killed may leave records behind the `count` that a checkpoint knows, which `truncate` drops. Reads do not map files
    into memory, so a damaged disk is an error and no signal. A file that has other names (a copy of the run by
    `cp -al`, or a link) is never shortened: `truncate` replaces it by a separate file.
    """

    def __init__(self, folder: Path, dtype: np.dtype[np.void], file_bytes: int = FILE_BYTES) -> None:
        """Open a log without records; `truncate` continues from those of an earlier process.

        Args:
            folder: folder for the files of this log alone; it is created with the first record.
        """
        self.folder = folder
        self.count = 0
        """Number of the next record."""
        self.dtype = dtype
        self._stored = np.dtype([("record", dtype), ("crc", np.uint32)])
        self._per_file = max(1, file_bytes // self._stored.itemsize)
        self._descriptors: dict[int, int] = {}
        """Number of a file -> its descriptor for reading, the last used one last."""
        self._unsynced: set[int] = set()
        """Files that were written to since the last `sync`."""

    def append(self, records: Array) -> None:
        """Add records of the dtype, [K]. Raises UserError where the disk is full; then none of them is added."""
        if self.count == 0:
            self.truncate(0, 0)  # files of a run that ended before its first checkpoint
        stored = np.empty(len(records), self._stored)
        self._content_bytes(stored)[:] = _record_bytes(
            np.ascontiguousarray(records, dtype=self.dtype)
        )  # faster than by fields
        stored["crc"] = self._compute_checksums(stored, np.arange(self.count, self.count + len(records)))
        start = 0
        while start < len(stored):
            number, at = divmod(self.count + start, self._per_file)
            end = min(len(stored), start + self._per_file - at)
            self._write_records(number, at, stored[start:end])
            start = end
        self.count += len(stored)

    def read_records(self, indices: Array) -> Array:
        """Return the records of these numbers (int64 [B]). UserError for one lost or with another checksum."""
        stored = np.empty(len(indices), self._stored)
        for row in np.argsort(indices, kind="stable").tolist():  # so that each file is opened once
            number, at = divmod(int(indices[row]), self._per_file)
            buffer = stored[row : row + 1].view(np.uint8).data
            if os.preadv(self._open_file(number), [buffer], at * self._stored.itemsize) < self._stored.itemsize:
                raise self._damage_error(number, f"ends before record {indices[row]}")
        self._verify_checksums(stored, indices, UserError)
        return stored["record"]

    def drop_before(self, index: int) -> None:
        """Delete the files that only hold records below this number."""
        for number in self._file_sizes():
            if (number + 1) * self._per_file <= index:
                self._delete_file(number)

    def truncate(self, first: int, count: int) -> None:
        """Continue from `count` records, of which those from `first` on are needed; drop later ones. Reads all needed
        records. Raises CheckpointError where one is not there, or does not have its checksum; then no file is changed.
        """
        for folder in (self.folder, self.folder.parent):
            if folder.is_symlink():
                raise UserError(
                    f"{folder} is a link, and a copy of the run folder would write to the same files; put the whole "
                    f"run folder on that disk (--folder), or replace the link by what it points to"
                )
        files = self._file_sizes()
        size = self._stored.itemsize
        for number in range(first // self._per_file, -(-count // self._per_file)):
            begin = number * self._per_file
            end = min(count, begin + self._per_file)
            if files.get(number, -1) < (end - begin) * size:
                state = "ends early" if number in files else "is not there"
                text = f"the checkpoint needs the replay buffer's records {first} to {count - 1}"
                raise CheckpointError(f"{self._file_path(number)} {state}: {text}")
            step = max(1, VERIFIED_BYTES // size)
            for start in range(max(begin, first), end, step):
                indices = np.arange(start, min(start + step, end))
                stored = np.empty(len(indices), self._stored)
                os.preadv(self._open_file(number), [stored.view(np.uint8).data], (start - begin) * size)
                self._verify_checksums(stored, indices, CheckpointError)
        for number in files:
            kept = min(max(count - number * self._per_file, 0), self._per_file) * size
            if kept == 0:
                self._delete_file(number)
            elif kept < self._per_file * size:  # the only one that is written to
                self._shorten_file(number, kept)
        self.count = count

    def sync(self) -> None:
        """Wait until all records are on the disk. UserError where it is full or broken: some tell it only now."""
        for number in self._unsynced:
            try:
                os.fsync(self._open_file(number))
            except OSError as exc:
                raise self._not_written(number, exc) from exc
        self._unsynced.clear()

    def close(self) -> None:
        """Close the files, without `sync`."""
        for number in list(self._descriptors):
            self._close_file(number)

    # -------------------------------------------------------------------------------------------------- checksums

    def _compute_checksums(self, stored: Array, indices: Array) -> list[int]:
        """Return the checksum of each stored record, [K], with its number: a record in another one's place is wrong."""
        rows = self._content_bytes(stored)
        return [zlib.crc32(row, index & 0xFFFFFFFF) for row, index in zip(rows, indices.tolist(), strict=True)]

    def _content_bytes(self, stored: Array) -> Array:
        """Return records' bytes without their checksums, uint8 [K, size of the dtype], sharing memory."""
        return _record_bytes(stored)[:, : self.dtype.itemsize]

    def _verify_checksums(self, stored: Array, indices: Array, error: type[UserError]) -> None:
        wrong = np.flatnonzero(stored["crc"] != np.array(self._compute_checksums(stored, indices), np.uint32))
        if len(wrong):
            index = int(indices[wrong[0]])
            text = f"does not hold record {index} as it was written (its checksum is wrong)"
            raise self._damage_error(index // self._per_file, text, error)

    def _damage_error(self, number: int, text: str, error: type[UserError] = UserError) -> UserError:
        advice = "" if issubclass(error, CheckpointError) else "; run again with --resume: it looks for a sound state"
        return error(f"the replay buffer was damaged: {self._file_path(number)} {text}{advice}")

    # ------------------------------------------------------------------------------------------------------ files

    def _write_records(self, number: int, at: int, stored: Array) -> None:
        data = stored.view(np.uint8).reshape(-1).data
        offset = at * self._stored.itemsize
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(
                self._file_path(number), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666
            )
            try:
                self._unsynced.add(number)
                while data:
                    written = os.pwrite(descriptor, data, offset)
                    data = data[written:]
                    offset += written
            finally:
                os.close(descriptor)
        except OSError as exc:
            raise self._not_written(number, exc) from exc

    def _not_written(self, number: int, exc: OSError) -> UserError:
        return UserError(
            f"the replay buffer could not be written to {self._file_path(number)}: {exc.strerror}. Free disk space, or "
            f"lower trainer.capacity; the run resumes from its last checkpoint"
        )

    def _shorten_file(self, number: int, size: int) -> None:
        """Cut a file to this size. One with other names is replaced by a copy, which is written to from then on."""
        file = self._file_path(number)
        self._close_file(number)  # of a copy there is another descriptor
        own_copy(file)
        if file.stat().st_size > size:
            os.truncate(file, size)

    def _open_file(self, number: int) -> int:
        """Return the descriptor of a file for reading, and close the one that was not used for longest."""
        descriptor = self._descriptors.pop(number, None)
        if descriptor is None:
            while len(self._descriptors) >= OPEN_FILES:
                self._close_file(next(iter(self._descriptors)))
            try:
                descriptor = os.open(self._file_path(number), os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError as exc:
                raise self._damage_error(number, "is not there") from exc
        self._descriptors[number] = descriptor
        return descriptor

    def _close_file(self, number: int) -> None:
        if number in self._descriptors:
            os.close(self._descriptors.pop(number))

    def _delete_file(self, number: int) -> None:
        self._close_file(number)
        self._unsynced.discard(number)
        self._file_path(number).unlink()

    def _file_path(self, number: int) -> Path:
        return self.folder / f"{number:08d}.bin"

    def _file_sizes(self) -> Mapping[int, int]:
        """Return number -> bytes of the log's files that are there; others in the folder do not count."""
        if not self.folder.is_dir():
            return {}
        named = {match[1]: p for p in self.folder.iterdir() if (match := NAME.fullmatch(p.name)) and p.is_file()}
        files = {int(text): path for text, path in named.items() if path == self._file_path(int(text))}
        return {number: files[number].stat().st_size for number in sorted(files)}


class RecordBuffer(RecordLog):
    """Records of which the newest count. Files hold these, those of the last two checkpoints, and their files' rest."""

    def __init__(self, folder: Path, dtype: np.dtype[np.void], capacity: int, file_bytes: int = FILE_BYTES) -> None:
        """Open a buffer without records; `go_on` continues an earlier process's.

        Args:
            folder: folder for the files of this buffer alone.
            capacity: most records that count.
        """
        super().__init__(folder, dtype, file_bytes)
        self.capacity = capacity
        self._protected: deque[int] = deque(maxlen=PROTECTED)
        """First records of the last checkpoints."""

    def __len__(self) -> int:
        return self.count - self.oldest_record

    @property
    def oldest_record(self) -> int:
        """Number of the oldest record that counts."""
        return self._first_of(self.count)

    @property
    def oldest_needed(self) -> int:
        """Number of the oldest record that counts or that a checkpoint needs."""
        return min([self.oldest_record, *self._protected])

    def protect_records(self) -> None:
        """Keep the records that count for a checkpoint. Raises UserError where they cannot be written to the disk."""
        self.sync()
        if not self._protected or self._protected[-1] != self.oldest_record:
            self._protected.append(self.oldest_record)

    def go_on(self, count: int) -> None:
        """Continue from the checkpoint that was made at this `count`. Raises UserError if records are missing."""
        self.truncate(self._first_of(count), count)
        self._protected.clear()
        self._protected.append(self.oldest_record)

    def _first_of(self, count: int) -> int:
        return max(0, count - self.capacity)


def _record_bytes(records: Array) -> Array:
    """Return the bytes of records, uint8 [K, size of a record], which share memory with them."""
    return records.view(np.uint8).reshape(len(records), records.itemsize)
