"""Append-only files of records: order, files of a bounded size, resume, full disks."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest

from vla_rl.core.errors import UserError
from vla_rl.toolkit.trainers.record_log import RecordLog

DTYPE = np.dtype([("number", np.int64), ("pixels", np.uint8, (3, 2))])
PER_FILE = 4


def records(start, end):
    made = np.zeros(end - start, DTYPE)
    made["number"] = np.arange(start, end)
    made["pixels"] = (np.arange(start, end) % 251)[:, None, None]
    return made


def log_of(folder):
    return RecordLog(folder, DTYPE, file_bytes=PER_FILE * DTYPE.itemsize + 3)


def test_records_come_back_in_any_order(tmp_path):
    log = log_of(tmp_path / "log")
    for start, end in ((0, 3), (3, 3), (3, 12), (12, 13)):
        log.append(records(start, end))
    indices = np.array([12, 0, 5, 5, 11, 3])
    assert np.array_equal(log.read(indices), records(0, 13)[indices])
    assert [p.stat().st_size // DTYPE.itemsize for p in sorted((tmp_path / "log").iterdir())] == [4, 4, 4, 1]


def test_files_of_old_records_are_deleted_whole(tmp_path):
    log = log_of(tmp_path)
    log.append(records(0, 13))
    log.drop_before(7)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["00000001.bin", "00000002.bin", "00000003.bin"]
    assert np.array_equal(log.read(np.array([4, 12])), records(0, 13)[[4, 12]])
    with pytest.raises(UserError, match="00000000.bin is not there"):
        log.read(np.array([2]))


def test_a_log_goes_on_from_a_count(tmp_path):
    before = log_of(tmp_path)
    before.append(records(0, 13))  # 9 of them before the checkpoint
    again = log_of(tmp_path)
    again.truncate(2, 9)
    again.append(records(20, 22))
    expected = np.concatenate([records(0, 9), records(20, 22)])
    assert np.array_equal(again.read(np.arange(11)), expected)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["00000000.bin", "00000001.bin", "00000002.bin"]


def test_missing_or_short_files_are_refused(tmp_path):
    log_of(tmp_path).append(records(0, 13))
    os.truncate(tmp_path / "00000001.bin", 2 * DTYPE.itemsize)
    with pytest.raises(UserError, match=r"00000001.bin is not there, or ends early: .* records 5 to 8"):
        log_of(tmp_path).truncate(5, 9)
    log_of(tmp_path).truncate(8, 13)
    with pytest.raises(UserError, match="ends before record 7"):
        log_of(tmp_path).read(np.array([7]))


def test_a_run_that_starts_over_deletes_earlier_files(tmp_path):
    log_of(tmp_path).append(records(0, 13))
    log = log_of(tmp_path)
    log.append(records(50, 51))
    assert [p.name for p in tmp_path.iterdir()] == ["00000000.bin"]
    assert log.read(np.array([0]))["number"] == 50


def test_nothing_is_added_on_a_full_disk(tmp_path, monkeypatch):
    log = log_of(tmp_path)
    log.append(records(0, 3))
    real = os.pwrite
    left = [2 * DTYPE.itemsize]

    def pwrite(descriptor, data, offset):
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = real(descriptor, data[: left[0]], offset)
        left[0] -= written
        return written

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(UserError, match=r"No space left on device. Free disk space, or lower trainer.capacity"):
        log.append(records(3, 9))
    assert log.count == 3
    monkeypatch.undo()
    log.append(records(30, 32))
    assert log.read(np.arange(5))["number"].tolist() == [0, 1, 2, 30, 31]


def test_a_disk_that_turns_out_full_is_named(tmp_path, monkeypatch):
    """Some file systems accept a write and fail when it has to be on the disk."""
    log = log_of(tmp_path)
    log.append(records(0, 2))

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="could not be written to .*00000000.bin: No space left on device. Free disk"):
        log.sync()


def test_all_written_files_are_synced_once(tmp_path, monkeypatch):
    log = log_of(tmp_path)
    log.append(records(0, 9))
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)
    log.sync()
    log.sync()
    assert len(synced) == len(set(synced)) == 3
    log.append(records(9, 10))
    log.sync()
    assert len(synced) == 4
    log.close()
