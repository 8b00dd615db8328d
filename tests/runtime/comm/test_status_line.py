from __future__ import annotations

import io
import sys

import pytest

from vla_rl.runtime.comm import status_line
from vla_rl.runtime.comm.status_line import StatusLine, showing_progress
from vla_rl.toolkit import waiting
from vla_rl.toolkit.models.checkpoints.files import find_weights


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(status_line, "monotonic", lambda: now[0])
    return now


def test_a_terminal_has_one_line_that_is_written_over(monkeypatch, clock):
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("COLUMNS", "40")
    line = StatusLine()
    for seconds, done in ((0.0, 0), (1.0, 1), (1.0, 2), (0.1, 3), (1.0, 4)):
        clock[0] += seconds
        line.show_progress("starting envs: push the red block to the pad", done, 8)
    texts = screen.getvalue().split("\r\x1b[2K")
    assert texts == ["", "starting envs: 2 of 8 envs, 0:02 (push ", "starting envs: 4 of 8 envs, 0:03 (push "]
    line.clear()
    assert screen.getvalue().endswith("\r\x1b[2K")
    before = screen.getvalue()
    line.clear()
    assert screen.getvalue() == before


def test_a_log_file_has_a_line_now_and_then(capsys, clock):
    line = StatusLine()
    for second in range(91):
        clock[0] = 100.0 + second
        line.show_progress("eval", second, 1200)
    line.clear()
    assert capsys.readouterr().err.splitlines() == [
        "eval: 30 of 1,200 episodes, 0:30",
        "eval: 60 of 1,200 episodes, 1:00",
        "eval: 90 of 1,200 episodes, 1:30",
    ]


def test_short_waits_are_silent(capsys, monkeypatch, clock):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    line = StatusLine()
    for what in ("starting envs", "loading the model", "eval"):
        for _ in range(3):
            clock[0] += 0.4
            line.show_progress(what, 1, 2)
        line.clear()
    assert capsys.readouterr().err == ""


def test_loading_a_model_says_how_many_bytes(tmp_path, capsys, monkeypatch):
    import torch
    from safetensors.torch import save_file

    save_file({name: torch.zeros(500_000) for name in "abcd"}, tmp_path / "model.safetensors")
    for module in (waiting, status_line):
        monkeypatch.setattr(module, "PATIENCE_S", 0.0)
    monkeypatch.setattr(status_line, "EVERY_S", 0.0)
    with showing_progress():
        find_weights(tmp_path).visit_tensors(lambda name, tensor: None)
    assert capsys.readouterr().err.splitlines() == [f"loading the model: {done} of 8 MB, 0:00" for done in (2, 4, 6, 8)]
