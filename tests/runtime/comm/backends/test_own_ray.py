"""The Ray that a run starts for itself, or enters."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
import venv
from pathlib import Path

import psutil
import pytest
from scripted_runs import one_token

from vla_rl.core.errors import UserError
from vla_rl.runtime.comm.backends.own_ray import OwnRay, PrivateFolder, join_cluster, read_token_again
from vla_rl.toolkit import process_limits

ray = pytest.importorskip("ray")
from ray._raylet import GcsClient  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402

NICENESS = "RAY_worker_niceness"
pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.own_ray]


@pytest.fixture
def own():
    own = OwnRay()
    yield own
    own.stop()


@pytest.mark.parametrize("asked", [None, 3])
def test_its_workers_get_their_share_of_a_busy_machine(monkeypatch, own, asked):
    """Ray's own default starves them next to any other work; what the user asks for holds."""
    monkeypatch.delenv(NICENESS, raising=False)
    if asked is not None:
        monkeypatch.setenv(NICENESS, str(asked))
    own.start(num_cpus=1)
    found = ray.get(ray.remote(lambda: os.nice(0)).remote())
    assert found == os.nice(0) + (asked or 0)


@pytest.mark.parametrize("asked", [None, 1])
def test_it_starts_only_workers_that_were_asked_for(monkeypatch, own, asked):
    """Ray's own default is one for every core, which an actor does not use; what the user asks for holds."""

    class Actor:
        def answer(self):
            return 42

    if asked is not None:
        monkeypatch.setenv("RAY_prestart_worker_first_driver", str(asked))
    own.start(num_cpus=2)
    actor = ray.remote(num_cpus=0)(Actor).remote()
    assert ray.get(actor.answer.remote()) == 42
    commands = [" ".join(process.cmdline()) for process in own.vital["raylet"].children()]
    waiting = [command for command in commands if "ray::IDLE" in command or "default_worker.py" in command]
    assert bool(waiting) == bool(asked)


@pytest.mark.parametrize("asked", [None, 1000])
def test_it_keeps_no_record_of_calls(monkeypatch, own, asked):
    """Ray's own default keeps one of each of the last 100,000, which a long run would see as a leak; what the user asks for
    holds."""

    class Actor:
        def process(self):
            return os.getpid()

    monkeypatch.delenv("RAY_task_events_report_interval_ms", raising=False)
    if asked is not None:
        monkeypatch.setenv("RAY_task_events_report_interval_ms", str(asked))
    own.start(num_cpus=1)
    actor = ray.remote(num_cpus=0)(Actor).remote()
    process = psutil.Process(ray.get(actor.process.remote()))
    actor.__ray_terminate__.remote()
    process.wait(60)  # it hands in its records at its end
    assert bool(ray.timeline()) == bool(asked)


@pytest.mark.parametrize("allowed", [200, 2000])
def test_a_limit_of_processes_is_said_before_the_start(monkeypatch, own, tmp_path, caplog, allowed):
    group = tmp_path / "pids" / "job"
    group.mkdir(parents=True)
    (group / "pids.max").write_text(str(allowed))
    (group / "pids.current").write_text("30")
    (tmp_path / "membership").write_text("3:pids:/job\n")
    monkeypatch.setattr(process_limits, "GROUPS", tmp_path)
    monkeypatch.setattr(process_limits, "MEMBERSHIP", tmp_path / "membership")
    own.start(num_cpus=1)
    assert ("only 170 more processes and threads may start here" in caplog.text) == (allowed == 200)


@pytest.mark.parametrize("failures", [1, 2])
def test_a_start_that_fails_is_tried_once_more(monkeypatch, own, failures, caplog):
    start, tried = ray.init, []

    def init(**options):
        tried.append(options)
        if len(tried) <= failures:
            raise RuntimeError("The current node timed out during startup.\nSee the logs.")
        return start(**options)

    monkeypatch.setattr(ray, "init", init)
    busy = rf"load \d+\.\d on {os.cpu_count()} cores"
    if failures == 1:
        own.start(num_cpus=1)
        assert set(own.vital) == {"raylet", "gcs_server"}
        assert re.search(rf"Ray did not start \({busy}\), and is tried once more: The current node", caplog.text)
    else:
        with pytest.raises(UserError, match=rf"tried twice \({busy}\): The current node timed out during startup\.\n"):
            own.start(num_cpus=1)
        assert own.folder is None
    assert len(tried) == 2


@pytest.mark.parametrize("name", ["my work", "it's(a\\b)&$c"])
def test_the_environment_is_in_a_folder_with_characters_that_a_shell_interprets(tmp_path, name):
    folder = tmp_path / name
    venv.create(folder, symlinks=True)
    own = next((folder / "lib").glob("python*/site-packages"))
    own.rmdir()
    own.symlink_to(Path(ray.__file__).parents[1])
    start = """
        import os
        import sys
        import ray
        from vla_rl.runtime.comm.backends.own_ray import OwnRay

        class Actor:
            def describe(self):
                return sys.executable, os.path.abspath(ray.__file__), os.getcwd(), os.environ["PYTHONPATH"]

        own = OwnRay()
        own.start(num_cpus=1, runtime_env={"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"]}})
        print(*ray.get(ray.remote(num_cpus=0)(Actor).remote().describe.remote(), timeout=100), sep="\\n")
        own.stop()
        """
    source = next(path for path in sys.path if path.endswith("src"))
    python, path = folder / "bin" / "python", os.pathsep.join([source, str(folder)])
    done = subprocess.run(
        [python, "-c", textwrap.dedent(start)],
        env=os.environ | {"PYTHONPATH": path}, cwd=folder, capture_output=True, text=True, timeout=200, check=True,
    )  # fmt: skip
    used = own / "ray" / "__init__.py"
    assert done.stdout.splitlines() == [str(python), str(used), str(folder), path]


def test_a_raylet_that_logs_to_stderr_names_no_worker(tmp_path):
    """RAY_LOG_TO_STDERR=1 does that."""
    own = OwnRay(folder=PrivateFolder(tmp_path))
    own.note_launch()
    own.check_starting_workers()


def test_samples_that_have_no_room_on_their_way_are_refused_with_their_size(tmp_path, caplog):
    own = OwnRay(folder=PrivateFolder(tmp_path), shared=2**28)
    own.check_store(2**28)
    assert not caplog.text
    own.check_store(2**28 + 1)
    assert "up to 0.3 GiB of samples move to the learners in a step, and Ray keeps 0.2 GiB in /dev/shm" in caplog.text
    with pytest.raises(UserError, match=r"up to 1048576.0 GiB of samples .* 0.2 GiB in /dev/shm and for .* RAY_TMPDIR"):
        own.check_store(2**50)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:1", r"runtime.address='127.0.0.1:1': .*refused"),
        ("auto", r"runtime.address='auto' \(RAY_ADDRESS=127.0.0.1:2\): .*refused"),
        ("nowhere", r"runtime.address='nowhere': neither host:port nor auto"),
        ("auto", r"runtime.address='auto' \(RAY_ADDRESS=local\): neither host:port nor auto"),
    ],
)
def test_a_cluster_that_is_not_there(train, monkeypatch, address, message):
    monkeypatch.setenv("RAY_ADDRESS", "local" if "=local" in message else "127.0.0.1:2")
    with pytest.raises(UserError, match=message):
        train(runtime={"backend": "ray", "address": address})


def test_a_cluster_that_does_not_take_this_process(monkeypatch):
    with one_token():
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
        try:
            metadata = b"CLUSTER_METADATA", b"cluster"
            gcs = GcsClient(address=cluster.address)
            versions = json.loads(gcs.internal_kv_get(*metadata))
            gcs.internal_kv_put(
                metadata[0], json.dumps({**versions, "python_version": "3.9.1"}).encode(), True, metadata[1]
            )
            with pytest.raises(
                UserError, match=r"has other versions than this process: .* Python: 3\.9\.1 This process"
            ):
                join_cluster(cluster.address)
            assert not ray.is_initialized()
            monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)
            read_token_again()
            with pytest.raises(UserError, match="it asks for a token; set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or"):
                join_cluster(cluster.address)
            monkeypatch.undo()
            read_token_again()
        finally:
            cluster.shutdown()
