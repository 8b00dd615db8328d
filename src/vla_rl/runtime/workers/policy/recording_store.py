"""Recorded episodes on their way to the driver, in the worker of the policy that acted.

A simulator's worker that dies takes none of them with it; when a policy's dies, the run repeats, and records again,
what came after its last checkpoint. The temporary file has no name, so it disappears with its process.
"""

from __future__ import annotations

import pickle
import tempfile
from threading import Lock
from typing import Any

from attrs import define, field

from vla_rl.runtime.messages.requests import RecordingKey
from vla_rl.toolkit.data.recording import Recording


@define
class RecordingStore:
    """Recorded episodes in a file, in the order in which they end. The file is emptied when all of them are forgotten.
    Any thread may use the store."""

    _file: Any = field(factory=tempfile.TemporaryFile, init=False)
    _positions: dict[RecordingKey, tuple[int, int]] = field(factory=dict, init=False)
    _lock: Any = field(factory=Lock, init=False)

    def put(self, key: RecordingKey, recording: Recording) -> None:
        data = pickle.dumps(recording, protocol=pickle.HIGHEST_PROTOCOL)
        with self._lock:
            self._positions[key] = self._file.seek(0, 2), len(data)
            self._file.write(data)

    def get(self, key: RecordingKey) -> Recording | None:
        """Return the recording of an episode; None: it was not kept."""
        with self._lock:
            if key not in self._positions:
                return None
            start, length = self._positions[key]
            self._file.seek(start)
            recording: Recording = pickle.loads(self._file.read(length))  # noqa: S301 - this process wrote it
            return recording

    def forget_up_to(self, last: int | None) -> None:
        """Forget the episodes of tickets up to this number; None: all."""
        with self._lock:
            self._positions = {key: p for key, p in self._positions.items() if last is not None and key[0] > last}
            if not self._positions:
                self._file.seek(0)
                self._file.truncate()
