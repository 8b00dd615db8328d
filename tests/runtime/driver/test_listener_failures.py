"""A listener that fails ends a run as a signal does: after a checkpoint, with a sentence that names the listener."""

from __future__ import annotations

import os
import subprocess
from contextlib import nullcontext
from pathlib import Path

import psutil
import pytest
from scripted_runs import read_metrics, scripted_spec

from vla_rl.core.errors import HookFailed, UserError
from vla_rl.core.installation import console_command
from vla_rl.core.spec.spec import parse_spec
from vla_rl.runtime.driver.evaluation.checkpoint_evaluation import NotRecorded
from vla_rl.runtime.run_folder.folder import RunFolder
from vla_rl.runtime.start import evaluate, run

BAD = Path(__file__).with_name("failing_listener.py")
CLOSING = Path(__file__).with_name("closing_listener.py")
SHORT = {"train": {"steps": 3}, "eval": {"before": False}}


def spec_with(hooks=None, **settings):
    plugins = ["vla_rl.testing.scripted", "vla_rl.testing.slot_placement", str(BAD), str(CLOSING)]
    hooks = hooks or [{"type": "bad", **settings}, {"type": "jsonl"}]
    return parse_spec(scripted_spec(plugins=plugins, hooks=hooks, **SHORT))


def failing(folder: Path, **settings) -> str:
    """What the command line shows of a run that such a listener ends."""
    with pytest.raises(HookFailed) as caught:
        run(spec_with(**settings), folder, False)
    return "\n".join((str(caught.value), *caught.value.__notes__))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    run(parse_spec(scripted_spec(**SHORT)), folder, False)
    return read_metrics(folder)


@pytest.mark.parametrize(
    ("event", "saved"),
    [
        ("on_progress", 0),
        ("on_rollout_end", 1),
        ("on_weights_published", 2),
        ("on_update_end", 2),
        ("frames_wanted", 3),
    ],
)
def test_what_was_learned_is_saved_and_the_run_continues_from_it(tmp_path, undisturbed, event, saved):
    told = failing(tmp_path, event=event)
    assert f"hook 'bad' failed in {event} ({BAD}:" in told
    assert "ValueError: the plot has no axes" in told
    assert (
        f"stopped after step {saved}; saved in {tmp_path}; continue with: {console_command()} run {tmp_path} --resume"
        in told
    )
    assert RunFolder(tmp_path).latest_checkpoint().name == f"step_{saved:06d}"
    run(parse_spec(scripted_spec(**SHORT)), tmp_path, True)
    assert read_metrics(tmp_path) == undisturbed


@pytest.mark.parametrize("event", ["on_checkpoint", "on_eval_end", "on_run_end"])
def test_at_the_end_of_a_run_its_results_are_there(tmp_path, undisturbed, event):
    told = failing(tmp_path, event=event)
    assert f"the run itself is finished, and its results are in {tmp_path}" in told
    assert (tmp_path / "results.json").exists()
    assert RunFolder(tmp_path).latest_checkpoint().name == "step_000003"
    assert read_metrics(tmp_path) == undisturbed


def test_before_the_first_step_there_is_nothing_to_save(tmp_path):
    assert "stopped before there was anything to save" in failing(tmp_path, event="on_run_start")
    assert RunFolder(tmp_path).latest_checkpoint() is None


@pytest.mark.parametrize(
    ("event", "ended"),
    [("none", "None"), ("on_run_start", "StopRequested"), ("on_update_end", "HookFailed"), ("on_run_end", "None")],
)
def test_listeners_are_closed_however_a_run_ends(tmp_path, event, ended):
    hooks = [{"type": "bad", "event": event}, {"type": "jsonl"}, {"type": "tensorboard"}]
    hooks.append({"type": "closing", "file": str(tmp_path / "ends")})
    spec = spec_with(hooks=hooks)
    with pytest.raises(HookFailed) if event != "none" else nullcontext():
        run(spec, tmp_path / "run", False)
    assert (tmp_path / "ends").read_text() == f"{ended}\n"
    assert not [file.path for file in psutil.Process().open_files() if Path(file.path).is_relative_to(tmp_path)]


@pytest.mark.parametrize(
    ("does", "said"),
    [
        ("exit", "SystemExit: 5"),
        ("interrupt", "KeyboardInterrupt"),
        ("bare", "BaseException: bare"),
        ("write", "TypeError: what listeners hear is read-only, since all hear the same; make a copy"),
    ],
)
def test_whatever_it_raises(tmp_path, undisturbed, does, said):
    told = failing(tmp_path, does=does)
    assert said in told
    assert "stopped after step 2; saved" in told
    assert read_metrics(tmp_path) == [line for line in undisturbed if line["step"] <= 2]


@pytest.mark.parametrize(("does", "said"), [("raise", "hook 'bad' failed in on_eval_end"), ("die", "worker 1 .* died")])
def test_in_an_evaluation_it_is_named_and_the_result_is_reported(does, said):
    """A worker that held the recordings may have died."""
    spec = spec_with(event="on_eval_end", at=0, does=does)
    with pytest.raises(NotRecorded, match=said) as caught:
        evaluate(spec, record=spec.hooks[0])
    assert caught.value.result["success"]["n"]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a tiny file system needs root")
@pytest.mark.parametrize(("event", "at"), [("on_rollout_end", 1), ("on_checkpoint", 3)])
def test_a_disk_that_is_full(tmp_path, undisturbed, event, at):
    """The first to meet it is metrics.jsonl, or results.json."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(disk)]
    if subprocess.run(mounting, capture_output=True, check=False).returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        with pytest.raises(UserError) as caught:
            run(spec_with(does="fill", event=event, at=at, file=str(disk / "filler")), disk / "run", False)
        told = "\n".join((str(caught.value), *caught.value.__notes__))
        (disk / "filler").unlink()
        if event == "on_rollout_end":
            assert "jsonl/writer.py" in told and "0.0 MiB were free" in told
            assert "make room, and resume the run" in told
        else:
            assert f"{disk / 'run' / 'results.json'} cannot be written: No space left" in told
            assert f"continue from it with: {console_command()} run {disk / 'run'} --resume" in told
        run(parse_spec(scripted_spec(**SHORT)), disk / "run", True)
        assert read_metrics(disk / "run") == undisturbed
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
