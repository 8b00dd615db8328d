"""Append-only files of records: order, files of a bounded size, resume, full disks, damage, links."""

from __future__ import annotations

import errno
import os

import numpy as np
import psutil
import pytest

from vla_rl.core.errors import CheckpointError, UserError
from vla_rl.toolkit.trainers.record_log import OPEN_FILES, RecordLog

DTYPE = np.dtype([("number", np.int64), ("pixels", np.uint8, (3, 2))])
BYTES = DTYPE.itemsize + 4
"""Bytes of a record in a file, with its checksum."""
PER_FILE = 4


def records(start, end):
    made = np.zeros(end - start, DTYPE)
    made["number"] = np.arange(start, end)
    made["pixels"] = (np.arange(start, end) % 251)[:, None, None]
    return made


def log_of(folder):
    return RecordLog(folder, DTYPE, file_bytes=PER_FILE * BYTES + 3)


def test_records_come_back_in_any_order(tmp_path):
    log = log_of(tmp_path / "log")
    for start, end in ((0, 3), (3, 3), (3, 12), (12, 13)):
        log.append(records(start, end))
    indices = np.array([12, 0, 5, 5, 11, 3])
    assert np.array_equal(log.read_records(indices), records(0, 13)[indices])
    assert [p.stat().st_size // BYTES for p in sorted((tmp_path / "log").iterdir())] == [4, 4, 4, 1]


def test_files_of_old_records_are_deleted_whole(tmp_path):
    log = log_of(tmp_path)
    log.append(records(0, 13))
    log.drop_before(7)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["00000001.bin", "00000002.bin", "00000003.bin"]
    assert np.array_equal(log.read_records(np.array([4, 12])), records(0, 13)[[4, 12]])
    with pytest.raises(UserError, match=r"00000000.bin is not there; run again with --resume"):
        log.read_records(np.array([2]))


def test_a_log_continues_from_a_count(tmp_path):
    before = log_of(tmp_path)
    before.append(records(0, 13))  # 9 of them before the checkpoint
    again = log_of(tmp_path)
    again.truncate(2, 9)
    again.append(records(20, 22))
    expected = np.concatenate([records(0, 9), records(20, 22)])
    assert np.array_equal(again.read_records(np.arange(11)), expected)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["00000000.bin", "00000001.bin", "00000002.bin"]


def test_missing_or_short_files_are_refused(tmp_path):
    log_of(tmp_path).append(records(0, 13))
    os.truncate(tmp_path / "00000001.bin", 2 * BYTES)
    with pytest.raises(
        CheckpointError, match=r"00000001.bin ends early: the checkpoint needs the replay buffer's records 5 to 8"
    ):
        log_of(tmp_path).truncate(5, 9)
    (tmp_path / "00000000.bin").unlink()
    with pytest.raises(CheckpointError, match=r"00000000.bin is not there: .* records 2 to 8"):
        log_of(tmp_path).truncate(2, 9)
    log_of(tmp_path).truncate(8, 13)
    with pytest.raises(UserError, match="ends before record 7"):
        log_of(tmp_path).read_records(np.array([7]))


def test_a_run_that_starts_over_deletes_earlier_files(tmp_path):
    log_of(tmp_path).append(records(0, 13))
    log = log_of(tmp_path)
    log.append(records(50, 51))
    assert [p.name for p in tmp_path.iterdir()] == ["00000000.bin"]
    assert log.read_records(np.array([0]))["number"] == 50


def test_nothing_is_added_on_a_full_disk(tmp_path, monkeypatch):
    log = log_of(tmp_path)
    log.append(records(0, 3))
    real = os.pwrite
    left = [2 * BYTES]

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
    assert log.read_records(np.arange(5))["number"].tolist() == [0, 1, 2, 30, 31]


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


def test_few_files_are_open(tmp_path):
    log = log_of(tmp_path)
    count = 5 * OPEN_FILES * PER_FILE
    log.append(records(0, count))
    draws = np.random.default_rng(0)
    before = psutil.Process().num_fds()
    for _ in range(3):
        indices = draws.integers(0, count, 50)
        assert np.array_equal(log.read_records(indices), records(0, count)[indices])
        log.sync()
        assert psutil.Process().num_fds() <= before + OPEN_FILES
    log.close()
    assert psutil.Process().num_fds() == before


@pytest.mark.parametrize("damage", ["zeros", "bit", "swapped"])
def test_records_that_changed_are_refused(tmp_path, damage):
    log = log_of(tmp_path)
    log.append(records(0, 13))
    file = tmp_path / "00000001.bin"
    content = bytearray(file.read_bytes())
    if damage == "zeros":
        content[:] = bytes(len(content))
    elif damage == "bit":
        content[3 * BYTES + 9] ^= 4
    else:
        content[3 * BYTES :] = content[2 * BYTES : 3 * BYTES]
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"00000001.bin does not hold record 7 as it was written"):
        log.read_records(np.array([0, 7]))
    with pytest.raises(CheckpointError, match=r"00000001.bin does not hold record \d as it was written"):
        log_of(tmp_path).truncate(2, 9)
    assert (tmp_path / "00000002.bin").stat().st_size == 4 * BYTES, "a log that is refused stays as it is"
    log_of(tmp_path).truncate(8, 9)  # what is damaged is not needed


def test_other_files_in_the_folder_do_not_count(tmp_path):
    strays = ["notes.bin", "00000001 (copy).bin", "1.bin", "-0000001.bin", "00000002.bin.part", "000000003.bin"]
    for name in strays:
        (tmp_path / name).write_text("stray")
    (tmp_path / "00000009.bin").mkdir()
    log = log_of(tmp_path)
    log.append(records(0, 13))
    log.drop_before(7)
    again = log_of(tmp_path)
    again.truncate(7, 12)
    assert np.array_equal(again.read_records(np.arange(7, 12)), records(7, 12))
    assert all((tmp_path / name).read_text() == "stray" for name in strays)


@pytest.mark.parametrize("link", [os.link, os.symlink])
def test_a_copy_by_links_does_not_change_the_original(tmp_path, link):
    original, copied = tmp_path / "original" / "log", tmp_path / "copied" / "log"
    log_of(original).append(records(0, 10))
    copied.mkdir(parents=True)
    for file in original.iterdir():
        link(file, copied / file.name)
    before = {file.name: file.read_bytes() for file in original.iterdir()}
    copy = log_of(copied)
    copy.truncate(2, 9)
    copy.append(records(90, 99))
    copy.drop_before(8)
    assert {file.name: file.read_bytes() for file in original.iterdir()} == before
    assert np.array_equal(
        copy.read_records(np.array([8, 9, 17])), np.concatenate([records(8, 9), records(90, 91), records(98, 99)])
    )
    same = log_of(original)
    same.truncate(0, 10)
    same.append(records(50, 51))
    assert np.array_equal(same.read_records(np.array([9, 10])), np.concatenate([records(9, 10), records(50, 51)]))


def test_a_folder_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "log").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"log is a link, and a copy of the run folder would write to the same files"):
        log_of(tmp_path / "log").append(records(0, 1))
    assert not list((tmp_path / "elsewhere").iterdir())
