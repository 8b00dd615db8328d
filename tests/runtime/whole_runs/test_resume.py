"""A run that is killed, interrupted or out of disk continues as if nothing had happened."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import torch
from scripted_runs import read_metrics, scripted_spec, weights_in

from fork_server import ForkedProcess
from vla_rl.core.errors import CheckpointError, UserError
from vla_rl.core.paths import link_or_copy
from vla_rl.core.spec.spec import parse_spec
from vla_rl.runtime.run_folder.folder import RunFolder, State, read_state

LONG = {"train": {"steps": 12, "checkpoint_every": 2}, "eval": {"every": 3}, "env": {"latency_s": 0.02}}
ENDLESS = "train.steps=1000000"
WAIT_S = 240
"""Patience with processes that end, which takes long on a busy machine."""


def wait_for_step(folder: Path, step: int, process: ForkedProcess) -> None:
    while process.poll() is None:
        file = folder / "metrics.jsonl"
        if file.exists() and len(file.read_text().splitlines()) > step:
            return
        time.sleep(0.005)
    pytest.fail(f"the run ended early:\n{process.stdout.read()}")


@pytest.fixture
def spec_file(tmp_path):
    spec = parse_spec(scripted_spec(**LONG))
    spec.dump(tmp_path / "spec.yaml")
    return tmp_path / "spec.yaml"


@pytest.mark.slow
def test_killed_at_three_random_moments_and_resumed_equals_never_killed(spec_file, tmp_path, train, start_run):
    folder, moments = tmp_path / "killed", random.Random(time.time_ns())
    for kill in range(3):
        process = start_run(spec_file, folder, ENDLESS, *(["--resume"] if kill else []))
        wait_for_step(folder, moments.randint(3 * kill + 1, 3 * kill + 3), process)
        time.sleep(moments.random() * 0.2)
        process.kill()
        process.wait()
    last = RunFolder(folder).restore_checkpoint()[0].step + 3
    process = start_run(spec_file, folder, "--resume", f"train.steps={last}")
    output, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, output
    _, expected = train("whole", **{**LONG, "train": {**LONG["train"], "steps": last}})
    assert read_metrics(folder) == expected
    results = json.loads((folder / "results.json").read_text())
    assert results["success"] == json.loads((tmp_path / "whole" / "results.json").read_text())["success"]


def test_a_run_that_is_killed_in_its_evaluations_continues_with_them(tmp_path, train, start_run):
    """The steps before an evaluation are saved when it begins, and the checkpoint gets its result."""
    (tmp_path / "killing.py").write_text(
        "import os, signal\n"
        "from pathlib import Path\n"
        "from vla_rl import hookimpl\n"
        "steps = [0]\n"
        "@hookimpl\n"
        "def on_update_end(step):\n"
        "    steps[0] = step\n"
        "@hookimpl\n"
        "def on_progress(phase):\n"
        f"    mark = Path({str(tmp_path)!r}) / f'killed_{{steps[0]}}'\n"
        "    if phase == 'eval' and steps[0] in (6, 12) and not mark.exists():\n"
        "        mark.touch()\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    changes = {"train": {"steps": 12, "checkpoint_every": 6}, "eval": {"every": 3}}
    expected_results, expected = train("whole", **changes)
    plugins = [*scripted_spec()["plugins"], str(tmp_path / "killing.py")]
    parse_spec(scripted_spec(plugins=plugins, **changes)).dump(tmp_path / "spec.yaml")
    folder = tmp_path / "killed"
    for step, evaluated, last in ((6, 3, 3), (12, 9, 9)):
        process = start_run(tmp_path / "spec.yaml", folder, *(["--resume"] if step > 6 else []))
        output, _ = process.communicate(timeout=120)
        assert process.returncode == -signal.SIGKILL, output
        state, _ = RunFolder(folder).restore_checkpoint()
        assert (state.step, state.evaluated, state.last["step"]) == (step, evaluated, last)
    output, _ = start_run(tmp_path / "spec.yaml", folder, "--resume").communicate(timeout=120)
    assert read_metrics(folder) == expected, output
    results = json.loads((folder / "results.json").read_text())
    kept = ("success", "success_before", "tasks", "tasks_before", "repeats", "steps", "env_steps", "tickets")
    assert {name: results[name] for name in kept} == {name: expected_results[name] for name in kept}
    state, _ = RunFolder(folder).restore_checkpoint()
    assert state.evaluated == 12 and state.last["success"] == results["success"]
    ours, theirs = weights_in(folder), weights_in(tmp_path / "whole")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_state_is_replaced_and_the_other_files_stay(tmp_path):
    """Not where they have other names, as a tracker's upload gives them."""
    folder = RunFolder(tmp_path / "run")
    target = folder.save_checkpoint(State(step=1), lambda model, trainer: (model / "weights").touch(), keep=2)
    weights = (target / "model" / "weights").stat().st_ino
    linked = shutil.copytree(target, tmp_path / "linked", copy_function=link_or_copy)
    assert folder.replace_state(State(step=1, evaluated=1), keep=2) == target
    assert folder.restore_checkpoint()[0].evaluated == 1 and read_state(linked).evaluated == -1
    assert (target / "model" / "weights").stat().st_ino == weights, "nothing is written twice"


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["local", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.own_ray])])
def test_one_ctrl_c_saves_and_leaves_no_process(spec_file, tmp_path, train, backend, start_run):
    process = start_run(spec_file, tmp_path / "run", f"runtime.backend={backend}", ENDLESS)
    wait_for_step(tmp_path / "run", 3, process)
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130, output
    assert "--resume" in output and "Traceback" not in output
    _, alive = psutil.wait_procs(family, timeout=WAIT_S)
    assert not alive
    last = RunFolder(tmp_path / "run").restore_checkpoint()[0].step + 2
    if backend == "local":
        _, expected = train("whole", **{**LONG, "train": {**LONG["train"], "steps": last}})
        process = start_run(spec_file, tmp_path / "run", "--resume", f"train.steps={last}")
        output, _ = process.communicate(timeout=WAIT_S)
        assert read_metrics(tmp_path / "run") == expected, output


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["local", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.own_ray])])
def test_ctrl_c_twice_stops_at_once(spec_file, tmp_path, backend, start_run):
    process = start_run(spec_file, tmp_path / "run", f"runtime.backend={backend}", "env.latency_s=0.5")
    wait_for_step(tmp_path / "run", 0, process)
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130, output
    _, alive = psutil.wait_procs(family, timeout=WAIT_S)
    assert not alive


def test_a_run_folder_is_not_overwritten(train):
    train(train={"steps": 0})
    with pytest.raises(UserError, match="already holds a run; add --resume"):
        train(train={"steps": 0})


def test_a_finished_run_can_be_extended(train):
    _, expected = train("whole", train={"steps": 4})
    train("parts", train={"steps": 2})
    _, metrics = train("parts", resume=True, train={"steps": 4})
    steps = [m for m in metrics if "loss/total" in m]
    assert steps == [m for m in expected if "loss/total" in m]


def test_a_full_disk_keeps_the_previous_checkpoint(tmp_path):
    folder = RunFolder(tmp_path)

    def write(model: Path, trainer: Path) -> None:
        (model / "weights").write_text("good")

    def full(model: Path, trainer: Path) -> None:
        (model / "weights").write_text("half")
        raise OSError(28, "No space left on device")

    folder.save_checkpoint(State(step=1), write, keep=2)
    with pytest.raises(CheckpointError, match=r"step 2 .*No space left(.|\n)*step_000001"):
        folder.save_checkpoint(State(step=2), full, keep=2)
    state, trainer = folder.restore_checkpoint()
    assert state.step == 1
    assert (trainer.parent / "model" / "weights").read_text() == "good"
    assert sorted(p.name for p in folder.checkpoints.iterdir()) == ["last", "step_000001"]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a tiny file system needs root")
@pytest.mark.slow
def test_a_disk_that_is_really_full(tmp_path, spec_file, start_run):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        process = start_run(spec_file, disk / "run", ENDLESS, "train.keep_checkpoints=2")
        wait_for_step(disk / "run", 5, process)
        with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as filler:
            while True:  # the run writes meanwhile: what is free is known only when nothing is left
                filler.write(b"x" * 1024)
        output, _ = process.communicate(timeout=60)
        assert process.returncode != 0
        at_a_checkpoint = re.search(r"could not be written(.|\n)*0\.\d MiB were free on that disk", output)
        assert at_a_checkpoint or "No space left" in output, output  # or when it wrote down its metrics
        assert RunFolder(disk / "run").restore_checkpoint() is not None
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    folder = RunFolder(tmp_path)
    for step in range(1, 5):
        folder.save_checkpoint(State(step=step), lambda model, trainer: None, keep=2)
    assert sorted(p.name for p in folder.checkpoints.iterdir()) == ["last", "step_000003", "step_000004"]


def test_weights_of_another_model_are_refused(train, tmp_path):
    train(train={"steps": 1})
    file = tmp_path / "run" / "spec.yaml"
    file.write_text(file.read_text().replace("bins: 8", "bins: 4"))
    with pytest.raises(UserError, match="shape"):
        train(resume=True, model={"bins": 4}, train={"steps": 2})


def test_a_run_without_a_sound_checkpoint_is_not_resumed(train, tmp_path):
    train(train={"steps": 1})
    (tmp_path / "run" / "checkpoints" / "last" / "trainer" / "state.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"step_000001 is damaged: trainer/state.json has 1 bytes and had"):
        train(resume=True, train={"steps": 2})
