"""Append-only log of records of one size, in files of a bounded number of records each."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from vla_rl.core.errors import UserError
from vla_rl.core.types import Array

FILE_BYTES = 64 << 20
"""Size up to which a file grows, at least one record."""


class RecordLog:
    """Records of a NumPy dtype, numbered from 0. A file holds equally many; names tell the number of the first one.

    Written records never change. A process that is killed may leave records behind the `count` that a checkpoint knows,
    which `truncate` drops. Reads do not map files into memory, so a damaged disk is an error and no signal.
    """

    def __init__(self, folder: Path, dtype: np.dtype[np.void], file_bytes: int = FILE_BYTES) -> None:
        """Open a log without records; `truncate` goes on from those of an earlier process.

        Args:
            folder: folder for the files of this log alone; it is created with the first record.
        """
        self.folder = folder
        self.count = 0
        """Number of the next record."""
        self.dtype = dtype
        self._per_file = max(1, file_bytes // dtype.itemsize)
        self._descriptors: dict[int, int] = {}
        """Number of a file -> its descriptor."""
        self._unsynced: set[int] = set()
        """Files that were written to since the last `sync`."""

    def append(self, records: Array) -> None:
        """Add records of the dtype, [K]. Raises UserError where the disk is full; then none of them is added."""
        if self.count == 0:
            self.truncate(0, 0)  # files of a run that ended before its first checkpoint
        data = np.ascontiguousarray(records, dtype=self.dtype)
        start = 0
        while start < len(data):
            number, at = divmod(self.count + start, self._per_file)
            end = min(len(data), start + self._per_file - at)
            self._write(number, at, data[start:end])
            start = end
        self.count += len(data)

    def read(self, indices: Array) -> Array:
        """Return the records with these numbers (int64 [B]), in this order. Raises UserError for one that is lost."""
        records = np.empty(len(indices), self.dtype)
        for row, index in enumerate(indices.tolist()):
            number, at = divmod(index, self._per_file)
            buffer = records[row : row + 1].view(np.uint8).data
            if os.preadv(self._open(number), [buffer], at * self.dtype.itemsize) < self.dtype.itemsize:
                raise UserError(f"{self._file(number)} ends before record {index}: the replay buffer was damaged")
        return records

    def drop_before(self, index: int) -> None:
        """Delete the files that only hold records below this number."""
        for number in self._files():
            if (number + 1) * self._per_file <= index:
                self._close(number)
                self._file(number).unlink()

    def truncate(self, first: int, count: int) -> None:
        """Go on from `count` records, of which those from `first` on are needed; drop later ones. Raises UserError
        where needed ones are not there.
        """
        files = self._files()
        for number in range(first // self._per_file, -(-count // self._per_file)):
            size = (min(count, (number + 1) * self._per_file) - number * self._per_file) * self.dtype.itemsize
            if files.get(number, -1) < size:
                raise UserError(
                    f"{self._file(number)} is not there, or ends early: the checkpoint needs the replay buffer's "
                    f"records {first} to {count - 1}. Copy the whole run folder, or start a new run"
                )
        for number, size in files.items():
            kept = min(max(count - number * self._per_file, 0), self._per_file) * self.dtype.itemsize
            if kept == 0:
                self._close(number)
                self._file(number).unlink()
            elif size > kept:
                os.truncate(self._file(number), kept)
        self.count = count

    def sync(self) -> None:
        """Wait until all records are on the disk, for a checkpoint that relies on them. Raises UserError where the disk
        is full or broken: some file systems tell it only now.
        """
        for number in self._unsynced:
            try:
                os.fsync(self._open(number))
            except OSError as exc:
                raise self._not_written(number, exc) from exc
        self._unsynced.clear()

    def close(self) -> None:
        """Close the files, without `sync`."""
        for number in list(self._descriptors):
            self._close(number)

    def _write(self, number: int, at: int, records: Array) -> None:
        data = records.view(np.uint8).reshape(-1).data
        offset = at * self.dtype.itemsize
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor = self._open(number, create=True)
            self._unsynced.add(number)
            while data:
                written = os.pwrite(descriptor, data, offset)
                data = data[written:]
                offset += written
        except OSError as exc:
            raise self._not_written(number, exc) from exc

    def _not_written(self, number: int, exc: OSError) -> UserError:
        return UserError(
            f"the replay buffer could not be written to {self._file(number)}: {exc.strerror}. Free disk space, or "
            f"lower trainer.capacity; the run resumes from its last checkpoint"
        )

    def _open(self, number: int, create: bool = False) -> int:
        if number not in self._descriptors:
            flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
            try:
                self._descriptors[number] = os.open(self._file(number), flags, 0o666)
            except FileNotFoundError as exc:
                raise UserError(f"{self._file(number)} is not there: the replay buffer was damaged") from exc
        return self._descriptors[number]

    def _close(self, number: int) -> None:
        if number in self._descriptors:
            os.close(self._descriptors.pop(number))
            self._unsynced.discard(number)

    def _file(self, number: int) -> Path:
        return self.folder / f"{number:08d}.bin"

    def _files(self) -> Mapping[int, int]:
        """Return number -> bytes of the files that are there."""
        return {int(path.stem): path.stat().st_size for path in sorted(self.folder.glob("*.bin"))}
