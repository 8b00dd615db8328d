"""SIGTERM is taken as Ctrl-C is, whichever processes of the job it reaches first, and a stop waits for no rollout."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import fragile
import psutil
import pytest
from scripted_runs import read_metrics, scripted_spec
from typer.testing import CliRunner

from vla_rl.cli import main as commands
from vla_rl.core.interrupts import RunStopped
from vla_rl.core.spec.spec import parse_spec
from vla_rl.runtime.comm.backends.ray import RayBackend
from vla_rl.runtime.run_folder.folder import RunFolder

RAY = pytest.param("ray", marks=pytest.mark.ray)
FRAGILE = ["vla_rl.testing.scripted", "vla_rl.testing.slot_placement", str(Path(fragile.__file__))]
ENVS_APART = {
    "plugins": FRAGILE,
    "env": {"type": "fragile", "num_envs": 2, "latency_s": 0.02},
    "rollout": {"chunk": 2, "episodes": 8, "group_size": 2},
    "train": {"steps": 10**6, "global_batch": 8, "checkpoint_every": 2},
}
WAIT_S = 240
"""Patience with processes that end, which takes long on a busy machine."""
ENDLESS = {"env": {"length": 10**6, "max_steps": 10**6, "latency_s": 0.05}, "eval": {"before": False}}
ROOT = Path(__file__).parents[3]
KILLS = ROOT / "benchmarks" / "kills.py"

pytestmark = [pytest.mark.slow, pytest.mark.own_ray]


@pytest.fixture
def begin(tmp_path, start_run):
    """Start a run in a separate process group; -> its process."""
    begun = []

    def start(backend, *options, folder="run", **changes):
        parse_spec(scripted_spec(**changes)).dump(tmp_path / "spec.yaml")
        given = (tmp_path / "spec.yaml", tmp_path / folder, f"runtime.backend={backend}", *options)
        with (tmp_path / "output").open("w") as output:
            process = start_run(*given, stdout=output, start_new_session=True)
        begun.append(process)
        return process

    yield start
    for process in begun:
        process.kill()


def wait_for(happened, process):
    while not happened():
        assert process.poll() is None, "the run ended early"
        time.sleep(0.02)


def lines_of(folder):
    file = folder / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def below(process):
    return psutil.Process(process.pid).children(recursive=True)


def assert_nothing_was_lost(train, folder, changes):
    """Two more steps of the stopped run are those of a run that was not stopped."""
    last = RunFolder(folder).restore_checkpoint()[0].step + 2
    ends = {**changes, "train": {**changes["train"], "steps": last}}
    _, expected = train("whole", **ends)
    train(resume=True, **ends)
    assert read_metrics(folder) == expected


def stopped(process, family):
    """The exit status, once no process is left."""
    status = process.wait(WAIT_S)
    assert not psutil.wait_procs(family, timeout=WAIT_S)[1]
    return status


def terminate(process, family, reached):
    number = signal.SIGUSR1 if reached.endswith("SIGUSR1") else signal.SIGTERM
    if reached == "group":
        os.killpg(process.pid, number)
        return
    if reached.startswith("driver last"):
        for other in family:
            other.send_signal(number)
        time.sleep(0.5)
    process.send_signal(number)


@pytest.mark.parametrize(
    ("backend", "reached"),
    [
        ("local", "group"),
        ("local", "driver last"),
        pytest.param("ray", "driver", marks=pytest.mark.ray),
        pytest.param("ray", "driver last", marks=pytest.mark.ray),
        ("local", "driver last, by SIGUSR1"),
        pytest.param("ray", "driver last, by SIGUSR1", marks=pytest.mark.ray),
    ],
)
def test_sigterm_saves_leaves_no_process_and_loses_nothing(begin, train, tmp_path, backend, reached):
    process = begin(backend, **ENVS_APART)
    wait_for(lambda: lines_of(tmp_path / "run") > 2, process)
    family = below(process)
    terminate(process, family, reached)
    assert stopped(process, family) == 130, (tmp_path / "output").read_text()
    assert "--resume" in (tmp_path / "output").read_text()
    assert_nothing_was_lost(train, tmp_path / "run", ENVS_APART)


def test_ctrl_c_in_the_quickstart_leaves_its_link_and_prints_a_command_that_resumes(tmp_path):
    for name in ("Makefile", "constraints.txt", "pyproject.toml", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "bin").symlink_to(Path(sys.executable).parent)
    (tmp_path / ".venv" / ".run").touch()  # newer than what it is made of
    changes = "runtime.backend=local env.num_envs=8 rollout.episodes=8 train.steps=2 eval.before=false"
    command = ["make", "quickstart", f"ARGS={changes} eval.episodes_per_task=1 train.checkpoint_every=1"]
    with (tmp_path / "output").open("w") as output:
        process = subprocess.Popen(
            command, cwd=tmp_path, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    wait_for(lambda: lines_of(tmp_path / "runs" / "quickstart"), process)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(WAIT_S)
    text = (tmp_path / "output").read_text()
    (resume,) = re.findall(r"continue with: (.*)", text) or [text]
    done = subprocess.run(resume, shell=True, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "runs" / "quickstart" / "results.json").is_file()


@pytest.mark.parametrize(
    ("backend", "placement"),
    [
        ("local", {"type": "collocated"}),
        pytest.param("ray", {"type": "collocated"}, marks=pytest.mark.ray),
        pytest.param("ray", {"type": "slots"}, marks=pytest.mark.ray),
    ],
)
def test_a_stop_does_not_wait_for_the_rollout(begin, tmp_path, backend, placement):
    """The rollout of this spec takes a day."""
    hooks = [{"type": "console", "mode": "plain", "every_s": 0.1}]
    process = begin(backend, placement=placement, hooks=hooks, **ENDLESS)
    wait_for(lambda: re.search(r"rollout: [1-9]\d* of", (tmp_path / "output").read_text()), process)
    family = below(process)
    process.send_signal(signal.SIGTERM)
    assert stopped(process, family) == 130, (tmp_path / "output").read_text()
    assert RunFolder(tmp_path / "run").restore_checkpoint()[0].step == 0


@pytest.mark.parametrize("backend", ["local", RAY])
def test_a_stop_does_not_wait_for_demonstrations(begin, tmp_path, backend):
    warm = {"episodes": 10**6, "epochs": 1, "lr": 1e-3, "batch": 16}
    hooks = [{"type": "console", "mode": "plain", "every_s": 0.1}]
    process = begin(backend, bc_warmup=warm, hooks=hooks, env={"latency_s": 0.05}, eval={"before": False})
    wait_for(lambda: re.search(r"demonstrations: [1-9]\d* of", (tmp_path / "output").read_text()), process)
    family = below(process)
    process.send_signal(signal.SIGTERM)
    assert stopped(process, family) == 130
    assert "stopped before there was anything to save" in (tmp_path / "output").read_text()


def test_a_rollout_that_is_left_keeps_the_newest_weights(train, tmp_path):
    """With a lag, policies act with older ones meanwhile."""
    endless = {"train": {"steps": 10**6}}
    changes = {"rollout": {"lag": 1}, "algorithm": {"type": "gipo"}, "env": {"latency_s": 0.02}, **endless}

    def stop_in_a_rollout():
        while lines_of(tmp_path / "run") < 4:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGTERM)

    watching = threading.Thread(target=stop_in_a_rollout)
    watching.start()
    with pytest.raises(RunStopped):
        train(**changes)
    watching.join()
    assert_nothing_was_lost(train, tmp_path / "run", changes)


@pytest.mark.ray
def test_a_stop_while_workers_start_leaves_no_process(begin, tmp_path):
    (tmp_path / "sleepy.py").write_text(
        "import time\n"
        "from pathlib import Path\n"
        "import dataclasses\n"
        "from vla_rl.testing.scripted import vla_rl_plugins as doubles\n"
        "def build(config, context):\n"
        f"    Path({str(tmp_path / 'asleep')!r}).touch()\n"
        "    time.sleep(3600)\n"
        "vla_rl_plugins = {'env': {'sleepy': dataclasses.replace(doubles['env']['scripted'], build=build)}}\n"
    )
    plugins = ["vla_rl.testing.scripted", str(tmp_path / "sleepy.py")]
    process = begin("ray", plugins=plugins, env={"type": "sleepy"})
    wait_for((tmp_path / "asleep").exists, process)
    family = below(process)
    process.send_signal(signal.SIGTERM)
    assert stopped(process, family) == 130
    assert "stopped before there was anything to save" in (tmp_path / "output").read_text()
    assert RunFolder(tmp_path / "run").latest_checkpoint() is None


@pytest.mark.ray
def test_a_run_whose_ray_is_killed_says_so_and_can_be_resumed(begin, train, tmp_path):
    slow = {**ENVS_APART, "env": {**ENVS_APART["env"], "latency_s": 0.1}}
    process = begin("ray", "runtime.restarts=0", **slow)
    wait_for(lambda: lines_of(tmp_path / "run") > 4, process)
    family = below(process)
    next(other for other in family if other.name() == "raylet").kill()
    assert stopped(process, family) == 2
    output = (tmp_path / "output").read_text()
    assert "Ray's raylet ended" in output and "Traceback" not in output
    assert_nothing_was_lost(train, tmp_path / "run", slow)


@pytest.mark.ray
def test_a_run_whose_ray_is_killed_continues_with_another_one(train, tmp_path, monkeypatch):
    killed = []
    wait = RayBackend._wait_on

    def kill_once(self):
        if not killed and RunFolder(tmp_path / "run").latest_checkpoint() is not None:
            killed.append(self.own.vital["gcs_server"])
            killed[0].kill()
        wait(self)

    monkeypatch.setattr(RayBackend, "_wait_on", kill_once)
    changes = {"train": {"steps": 2, "checkpoint_every": 1}, "eval": {"before": False}}
    _, metrics = train(runtime={"backend": "ray"}, env={"latency_s": 0.6}, **changes)
    monkeypatch.undo()
    _, expected = train("whole", **changes)
    assert killed and metrics == expected


@pytest.mark.timeout(900)
@pytest.mark.parametrize("backend", ["local", RAY])
def test_killed_at_random_moments_a_run_loses_and_leaves_nothing(backend):
    """SIGINT has its tests in test_resume.py."""
    signals = ["--signal", "SIGKILL", "SIGTERM"]
    done = subprocess.run(
        [sys.executable, str(KILLS), "--backend", backend, "--moments", "1", "--seed", str(time.time_ns()), *signals],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(1800)
def test_killed_at_random_moments_a_replay_buffer_of_10000_transitions_loses_nothing():
    """Old files are deleted meanwhile; what is left are the files of the undisturbed run."""
    options = ["--replay", "--backend", "local", "--moments", "3", "--signal", "SIGKILL"]
    done = subprocess.run(
        [sys.executable, str(KILLS), *options, "--seed", str(time.time_ns())],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "replay/frames/00000000.bin" not in done.stdout, "25,600 transitions were kept"


def test_sigterm_outside_of_a_run_is_an_interrupt_too(monkeypatch):
    """While a command imports what it needs, for instance."""
    monkeypatch.setattr("vla_rl.cli.inputs.read_spec", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        result = CliRunner().invoke(commands.app, ["run", "spec.yaml"])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert result.exit_code == 130
    assert result.output == "interrupted\n"
