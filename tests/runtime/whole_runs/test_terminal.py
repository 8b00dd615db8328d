"""What a person sees of a run that ended early: its last lines, not erased by the panel."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import fragile
import pytest
from scripted_runs import scripted_spec

from terminal import Terminal
from vla_rl.core.spec.spec import parse_spec
from vla_rl.runtime.run_folder.folder import RunFolder

DRIVER = Path(__file__).parents[1] / "driver"
PLUGINS = [
    "vla_rl.testing.scripted",
    "vla_rl.testing.slot_placement",
    fragile.__file__,
    str(DRIVER / "failing_listener.py"),
    str(DRIVER / "closing_listener.py"),
]
PANEL = "╭─ scripted"


@pytest.fixture
def start(tmp_path, fork_server):
    """Start a run in a terminal; -> (the terminal, its process)."""
    with Terminal(columns=250) as terminal:
        processes = []

        def start_run(*hooks, **changes):
            spec = scripted_spec(plugins=PLUGINS, hooks=[{"type": "console"}, *hooks], **changes)
            parse_spec(spec).dump(tmp_path / "spec.yaml")
            command = ("-m", "vla_rl.cli.main", "run", tmp_path / "spec.yaml", "--folder", tmp_path / "run")
            streams = dict.fromkeys(("stdin", "stdout", "stderr"), terminal.stream)
            processes.append(fork_server.start_python(*command, **streams, env=os.environ | {"TERM": "xterm"}))
            return terminal, processes[-1]

        yield start_run
        for process in processes:
            process.kill()


def end(terminal, process, status):
    """The screen at the end of a run with this exit status."""
    terminal.wait_for(lambda text: process.poll() is not None)
    text = terminal.read()
    assert process.wait() == status, text
    assert PANEL not in text and not terminal.cursor_hidden
    return text


def test_the_error_of_a_hook_stays(start):
    text = end(*start({"type": "bad"}), status=2)
    assert "hook 'bad' failed in on_update_end" in text and "ValueError: the plot has no axes" in text


def test_the_error_of_a_simulator_stays(start, tmp_path):
    env = {"type": "fragile", "fault": "raise", "always": True, "told": str(tmp_path / "told")}
    text = end(*start(env=env, runtime={"backend": "local", "max_faults": 1}), status=2)
    assert "runtime.max_faults: 1" in text


def test_ctrl_c_says_what_it_does_and_what_was_saved(start, tmp_path):
    waiting = {"type": "closing", "file": str(tmp_path / "ends"), "waits": "on_checkpoint"}
    terminal, process = start(waiting, train={"steps": 10**6})
    terminal.wait_for(lambda text: PANEL in text)
    process.send_signal(signal.SIGINT)
    text = terminal.wait_for(lambda text: "waiting in on_checkpoint" in text and PANEL in text)
    assert text.index("stopping: saving first; once more to stop at once") < text.index(PANEL)
    process.send_signal(signal.SIGINT)
    text = end(terminal, process, status=130)
    assert "stopping: saving first; once more to stop at once" in text
    assert "stopped at once; the last checkpoint is step_" in text
    assert (tmp_path / "ends").read_text() == "StopAtOnce\n"


@pytest.mark.parametrize("errors", ["apart", "same"])
def test_an_output_that_its_reader_closes_ends_the_run_saved(tmp_path, fork_server, errors):
    """`vla-rl run ... | head -3`, and the same with `2>&1`."""
    parse_spec(scripted_spec(hooks=[{"type": "console"}], train={"steps": 10**6})).dump(tmp_path / "spec.yaml")
    command = ("-m", "vla_rl.cli.main", "run", tmp_path / "spec.yaml", "--folder", tmp_path / "run")
    with (tmp_path / "errors").open("w") as file:
        stderr = subprocess.STDOUT if errors == "same" else file
        process = fork_server.start_python(*command, stdout=subprocess.PIPE, stderr=stderr)
    assert next(line for line in process.stdout if line.startswith("step 1/"))
    process.stdout.close()
    assert process.wait(100) == 2
    assert RunFolder(tmp_path / "run").latest_checkpoint() is not None
    if errors == "apart":
        assert (
            "hook 'console', on_update_end: the output was closed by the program that reads it\n  stopped after step"
            in ((tmp_path / "errors").read_text())
        )
