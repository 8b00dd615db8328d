"""A run on one machine can be reached from nowhere else, and Ray's part of it only with its token."""

from __future__ import annotations

import os
import signal
import stat
from ipaddress import ip_address
from pathlib import Path

import psutil
import pytest
import torch
from scripted_runs import play, scripted_spec

from vla_rl.core.spec.spec import parse_spec
from vla_rl.runtime.comm.backends import own_ray
from vla_rl.runtime.comm.backends.own_ray import MODE, TOKEN, PrivateFolder
from vla_rl.runtime.comm.process_group import address_of, enter_group, open_listener
from vla_rl.runtime.start import start

TWO_LEARNERS = {"placement": {"type": "collocated", "workers": 2}, "train": {"steps": 1}}
ASK = "import sys; from ray._raylet import GcsClient; print(GcsClient(address=sys.argv[1]).internal_kv_keys(b'', None))"


def listening(processes):
    """(process, address, port) of every socket that waits for connections."""
    return {
        (process.pid, ip_address(socket.laddr.ip.removeprefix("::ffff:")), socket.laddr.port)
        for process in processes
        for socket in process.net_connections("inet")
        if socket.status == psutil.CONN_LISTEN
    }


def ask(fork_server, address, **variables):
    """Ask a Ray for its secrets, from another process. -> whether it answered, and what was said."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    done = fork_server.run_python("-c", ASK, address, env=env | variables)
    return done.returncode == 0, done.stdout + done.stderr


@pytest.mark.ray
@pytest.mark.own_ray
def test_two_learners_listen_on_the_loopback_only_and_ray_wants_its_token(monkeypatch, bare_fork_server):
    for name in (MODE, TOKEN, own_ray.TOKEN_FILE):
        monkeypatch.delenv(name, raising=False)
    before = listening([psutil.Process()])
    runtime = start(parse_spec(scripted_spec(runtime={"backend": "ray"}, **TWO_LEARNERS)))
    try:
        token, folder = os.environ[TOKEN], runtime.backend.own.folder.path
        play(runtime, 1)
        family = [psutil.Process(), *psutil.Process().children(recursive=True)]
        found = listening(family) - before
        assert len({process for process, _, _ in found}) > 4 and all(address.is_loopback for _, address, _ in found)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert not any(token in part for process in family for part in process.cmdline())
        gcs = runtime.backend.own.vital["gcs_server"]
        address = next(f"127.0.0.1:{port}" for process, _, port in found if process == gcs.pid)
        assert ask(bare_fork_server, address, **{MODE: "token", TOKEN: token})[0]
        for variables in ({MODE: "token", TOKEN: "0" * len(token)}, {MODE: "disabled"}):
            answered, said = ask(bare_fork_server, address, **variables)
            assert not answered and "RAY_AUTH_TOKEN" in said
    finally:
        runtime.workers.close()
    assert not {MODE, TOKEN} & set(os.environ) and not folder.exists()


@pytest.mark.ray
@pytest.mark.own_ray
def test_a_ray_without_tokens_is_mentioned(tmp_path, start_run):
    """In a separate process: Ray reads the mode once and keeps it."""
    spec = scripted_spec(runtime={"backend": "ray"}, train={"steps": 1}, eval={"before": False, "every": 0})
    parse_spec(spec).dump(tmp_path / "spec.yaml")
    process = start_run(tmp_path / "spec.yaml", tmp_path / "run", env=os.environ | {MODE: "disabled"})
    said, _ = process.communicate()
    assert process.returncode == 0, said
    assert "asks for no token" in said and "RAY_AUTH_MODE=disabled" in said


def test_the_store_of_a_learner_group_listens_at_its_door_only(monkeypatch):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    before = listening([psutil.Process()])
    listener = open_listener("127.0.0.1")
    port = listener.getsockname()[1]
    enter_group("gloo", address_of(listener), rank=0, world=1, listener=listener)
    try:
        found = listening([psutil.Process()]) - before
        assert port in {port for _, _, port in found} and all(address.is_loopback for _, address, _ in found)
        value = torch.ones(1)
        torch.distributed.all_reduce(value)
        assert value.item() == 1.0
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("moment", ["in use", "while its files are removed"])
def test_a_private_folder_of_a_killed_process_is_removed_by_the_next(tmp_path, fork_server, moment):
    mine = PrivateFolder(tmp_path)
    code = (
        "import os, shutil, signal, sys\n"
        "from pathlib import Path\n"
        "from vla_rl.runtime.comm.backends.own_ray import PrivateFolder\n"
        "folder = PrivateFolder(Path(sys.argv[1]))\n"
        "(folder.path / 'ray').mkdir()\n"
        "print(folder.path, flush=True)\n"
        "def part(path, **_):\n"
        "    for entry in Path(path).iterdir():\n"
        "        entry.rmdir() if entry.is_dir() else entry.unlink()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "if sys.argv[2] != 'in use':\n"
        "    shutil.rmtree = part\n"
        "    folder.remove()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = fork_server.run_python("-c", code, tmp_path, moment)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    left = Path(killed.stdout.strip())
    assert left.exists()
    PrivateFolder(tmp_path).remove()
    assert list(tmp_path.iterdir()) == [mine.path]
    mine.remove()
    assert not list(tmp_path.iterdir())
