"""One process at a time writes to a run folder, and a lock never outlives its owner."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from threading import Event, Thread

import psutil
import pytest
from scripted_runs import read_metrics, scripted_spec

from vla_rl.core.errors import RunFolderGone, UserError
from vla_rl.core.spec.spec import parse_spec
from vla_rl.runtime.run_folder.folder import RunFolder
from vla_rl.runtime.run_folder.lock import NAME, FolderInUse, RunLock
from vla_rl.runtime.start import run

ENDLESS = {"train": {"steps": 10**6, "checkpoint_every": 1}, "env": {"latency_s": 0.05}}


def leave(folder: Path, **owner) -> None:
    """A lock as its owner left it on a file system where the kernel knows of no lock."""
    me = {"host": socket.gethostname(), "pid": os.getpid(), "started": psutil.Process().create_time(), "since": "noon"}
    (folder / NAME).write_text(json.dumps(me | owner))


def test_a_second_owner_is_refused_with_the_name_of_the_first(tmp_path):
    with RunLock(tmp_path):
        mine = rf"in use by process {os.getpid()} on host {socket.gethostname()} since 2\d\d\d-"
        with pytest.raises(FolderInUse, match=mine):
            RunLock(tmp_path)
    RunLock(tmp_path).release()


def test_a_copy_of_a_folder_that_is_held_is_free(tmp_path):
    copy = tmp_path / "copy"
    with RunLock(tmp_path):
        copy.mkdir()
        shutil.copyfile(tmp_path / NAME, copy / NAME)
        RunLock(copy).release()


@pytest.mark.slow
def test_a_run_is_not_resumed_while_it_runs_and_is_once_it_was_killed(tmp_path, train, start_run, caplog):
    spec = parse_spec(scripted_spec(**ENDLESS))
    spec.dump(tmp_path / "spec.yaml")
    folder = tmp_path / "run"
    with start_run(tmp_path / "spec.yaml", folder, stdout=subprocess.DEVNULL) as process:
        while not (folder / "checkpoints" / "last").exists():
            assert process.poll() is None
            time.sleep(0.01)
        for resume in (True, False):
            with pytest.raises(FolderInUse, match=f"in use by process {process.pid} on host"):
                run(spec, folder, resume)
        process.kill()
        process.wait()
        last = RunFolder(folder).restore_checkpoint()[0].step + 2
        ends = {**ENDLESS, "train": {**ENDLESS["train"], "steps": last}}
        run(parse_spec(scripted_spec(**ends)), folder, True)
    assert f"was held by process {process.pid} on host" in caplog.text
    _, expected = train("whole", **ends)
    assert read_metrics(folder) == expected


def test_what_a_killed_owner_started_does_not_hold_its_lock(tmp_path, fork_server):
    script = (
        "import os, subprocess, sys, time\n"
        "from pathlib import Path\n"
        "from vla_rl.runtime.run_folder.lock import RunLock\n"
        "lock = RunLock(Path(sys.argv[1]))\n"
        "started = subprocess.Popen(['sleep', '600'], close_fds=False, stdout=subprocess.DEVNULL)\n"
        "if os.fork() == 0: print(started.pid, os.getpid(), flush=True)\n"
        "time.sleep(600)\n"
    )
    with fork_server.start_python("-c", script, tmp_path, stdout=subprocess.PIPE) as owner:
        left = [psutil.Process(int(pid)) for pid in owner.stdout.readline().split()]
        try:
            with pytest.raises(FolderInUse, match=f"process {owner.pid} "):
                RunLock(tmp_path)
            owner.send_signal(signal.SIGKILL)
            owner.wait(60)
            assert all(process.is_running() for process in left)
            RunLock(tmp_path).release()
        finally:
            for process in left:
                process.kill()


def test_a_number_that_another_process_got_since_is_not_an_owner(tmp_path, caplog):
    leave(tmp_path, started=psutil.Process().create_time() - 3600)
    RunLock(tmp_path).release()
    assert "which is gone; taken over" in caplog.text


def test_a_process_that_ended_and_was_not_waited_for_is_not_an_owner(tmp_path):
    with subprocess.Popen(["sleep", "600"]) as process:
        ended = psutil.Process(process.pid)
        process.kill()
        while ended.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        leave(tmp_path, pid=ended.pid, started=ended.create_time())
        RunLock(tmp_path).release()


def test_an_owner_that_lives_is_believed_where_the_kernel_knows_of_no_lock(tmp_path):
    leave(tmp_path)
    with pytest.raises(FolderInUse, match=f"in use by process {os.getpid()} "):
        RunLock(tmp_path)
    assert json.loads((tmp_path / NAME).read_text())["since"] == "noon"


def test_an_owner_on_another_machine_that_has_gone_silent_is_replaced(tmp_path, caplog):
    leave(tmp_path, host="elsewhere", pid=1)
    RunLock(tmp_path, patience_s=0.1).release()
    assert "locked by process 1 on host elsewhere" in caplog.text and "taken over" in caplog.text


def test_an_owner_on_another_machine_that_renews_its_lock_is_left_alone(tmp_path):
    leave(tmp_path, host="elsewhere", pid=1)
    done = Event()

    def renew() -> None:
        while not done.wait(0.02):
            os.utime(tmp_path / NAME)

    renewing = Thread(target=renew)
    renewing.start()
    try:
        with pytest.raises(FolderInUse, match=rf"host elsewhere(.|\n)*clear the lock: rm {tmp_path / NAME}"):
            RunLock(tmp_path, patience_s=60)
    finally:
        done.set()
        renewing.join()


def test_an_owner_renews_its_lock(tmp_path, monkeypatch):
    monkeypatch.setattr("vla_rl.runtime.run_folder.lock.RENEWAL_S", 0.01)
    with RunLock(tmp_path):
        os.utime(tmp_path / NAME, (0, 0))
        while (tmp_path / NAME).stat().st_mtime == 0:
            time.sleep(0.01)


def test_a_run_whose_folder_is_moved_ends_and_writes_no_second_half(tmp_path, monkeypatch):
    monkeypatch.setattr("vla_rl.runtime.run_folder.lock.RENEWAL_S", 0.01)
    spec = parse_spec(scripted_spec(train={"steps": 2000, "checkpoint_every": 1}))
    folder, moved = tmp_path / "run", tmp_path / "moved"

    def take_away():
        while not (folder / "checkpoints" / "step_000001").exists():
            time.sleep(0.01)
        folder.rename(moved)

    taking = Thread(target=take_away)
    taking.start()
    with pytest.raises(UserError) as caught:
        run(spec, folder, False)
    taking.join()
    told = "\n".join((str(caught.value), *getattr(caught.value, "__notes__", ())))
    assert f"{folder} was moved to {moved} while the run wrote to it; --resume continues it there" in told
    assert f"{folder} --resume" not in told and not folder.exists()
    assert RunFolder(moved).restore_checkpoint()[0].step >= 1


def test_a_folder_that_is_removed_is_missed(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    with RunLock(folder) as lock:
        shutil.rmtree(folder)
        with pytest.raises(RunFolderGone, match="was moved, or removed"):
            lock.check_place()


def test_a_lock_that_is_removed_ends_no_run(tmp_path):
    with RunLock(tmp_path) as lock:
        (tmp_path / NAME).unlink()
        lock.check_place()


def test_a_lock_whose_handle_is_stale_ends_no_run(tmp_path, monkeypatch):
    """On NFS it is, where another machine removed the lock."""
    with RunLock(tmp_path) as lock, monkeypatch.context() as patch:
        (tmp_path / NAME).unlink()

        def fail(descriptor):
            raise OSError(errno.ESTALE, "Stale file handle")

        patch.setattr(os, "fstat", fail)
        lock.check_place()


def test_a_file_that_a_kill_left_empty_or_half_written_is_not_an_owner(tmp_path):
    (tmp_path / NAME).write_text('{"host": "el')
    RunLock(tmp_path).release()
    assert (tmp_path / NAME).read_text() == ""


def test_a_run_that_lost_a_worker_continues_and_keeps_its_folder_meanwhile(tmp_path, train):
    (tmp_path / "mortal.py").write_text(
        "from pathlib import Path\n"
        "import pytest\n"
        "from vla_rl import hookimpl\n"
        "from vla_rl.runtime.comm.backends.ray import WorkerDied\n"
        "from vla_rl.runtime.run_folder.lock import FolderInUse, RunLock\n"
        "starts = []\n"
        "@hookimpl\n"
        "def on_run_start(run):\n"
        "    starts.append(run.first_step)\n"
        "    with pytest.raises(FolderInUse):\n"
        "        RunLock(run.folder)\n"
        "    (run.folder / 'starts').write_text(str(starts))\n"
        "@hookimpl(wraps='algorithm')\n"
        "def advantages(rollout):\n"
        "    if rollout.step == 3 and len(starts) == 1:\n"
        "        raise WorkerDied('worker 0 died')\n"
        "    return (yield)\n"
    )
    plugins = ["vla_rl.testing.scripted", "vla_rl.testing.slot_placement"]
    changes = {"train": {"checkpoint_every": 2}}
    _, expected = train("whole", plugins=plugins, **changes)
    _, metrics = train("parts", plugins=[*plugins, str(tmp_path / "mortal.py")], **changes)
    assert (tmp_path / "parts" / "starts").read_text() == "[0, 2]"
    assert metrics == expected
