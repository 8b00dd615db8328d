"""What a process may use of its machine, as files of control groups say it."""

from __future__ import annotations

import os

import psutil
import pytest

from vla_rl.toolkit import process_limits
from vla_rl.toolkit.process_limits import count_cpus, count_free_processes, read_memory

GIB = 2**30
V1 = {
    "cpu/{}/cpu.cfs_quota_us": "100000",
    "cpu/{}/cpu.cfs_period_us": "50000",
    "memory/{}/memory.limit_in_bytes": f"{3 * GIB}",
    "memory/{}/memory.usage_in_bytes": f"{2 * GIB}",
    "memory/{}/memory.stat": f"inactive_file 7\ntotal_inactive_file {GIB // 2}\ntotal_active_file {GIB // 4}\n",
    "pids/{}/pids.max": "200",
    "pids/{}/pids.current": "30",
}
V2 = {
    "{}/cpu.max": "100000 50000",
    "{}/memory.max": f"{3 * GIB}",
    "{}/memory.current": f"{2 * GIB}",
    "{}/memory.stat": f"anon 5\ninactive_file {GIB // 2}\nactive_file {GIB // 4}\n",
    "{}/pids.max": "200",
    "{}/pids.current": "30",
}
UNLIMITED_V1 = {
    "cpu/{}/cpu.cfs_quota_us": "-1",
    "memory/{}/memory.limit_in_bytes": "9223372036854771712",
    "pids/{}/pids.max": "max",
}
UNLIMITED_V2 = {"{}/cpu.max": "max 100000", "{}/memory.max": "max", "{}/pids.max": "max"}
MEMBERS = {"v1": "9:name=systemd:/\n5:cpu,cpuacct:/{0}\n4:memory:/{0}\n3:pids:/{0}\n0::/\n", "v2": "0::/{0}\n"}


@pytest.fixture
def write_groups(tmp_path, monkeypatch):
    """Function that writes the files of a group, on a machine of 64 CPUs with 48 of 64 GiB available."""
    monkeypatch.setattr(process_limits, "GROUPS", tmp_path)
    monkeypatch.setattr(process_limits, "MEMBERSHIP", tmp_path / "cgroup")
    monkeypatch.setattr(process_limits.os, "sched_getaffinity", lambda process: range(64))
    virtual = psutil.virtual_memory()._replace(total=64 * GIB, available=48 * GIB)
    monkeypatch.setattr(process_limits.psutil, "virtual_memory", lambda: virtual)

    def write(version, files, folder):
        (tmp_path / "cgroup").write_text(MEMBERS[version].format("job/step"))
        for name, text in files.items():
            path = tmp_path / name.format(folder)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    return write


@pytest.mark.parametrize("folder", ["job/step", "job", "."])
@pytest.mark.parametrize(("version", "files"), [("v1", V1), ("v2", V2)])
def test_a_limit_of_the_group_or_one_above_holds(write_groups, version, files, folder):
    """A container may see its own group at the root, and its path as the machine names it."""
    write_groups(version, files, folder)
    assert count_cpus() == 2
    assert read_memory() == (3 * GIB, GIB + 3 * GIB // 4)
    assert count_free_processes() == 170


@pytest.mark.parametrize(("version", "files"), [("v1", V1 | UNLIMITED_V1), ("v2", V2 | UNLIMITED_V2)])
def test_groups_without_limits_leave_the_machine(write_groups, version, files):
    write_groups(version, files, "job")
    assert (count_cpus(), read_memory(), count_free_processes()) == (64, (64 * GIB, 48 * GIB), None)


def test_half_a_processor_is_one(write_groups):
    write_groups("v2", {"{}/cpu.max": "50000 100000"}, ".")
    assert count_cpus() == 1


def test_a_system_without_groups(monkeypatch, tmp_path):
    monkeypatch.setattr(process_limits, "MEMBERSHIP", tmp_path / "absent")
    assert count_cpus() == len(os.sched_getaffinity(0))
    assert read_memory()[0] == psutil.virtual_memory().total and count_free_processes() is None
