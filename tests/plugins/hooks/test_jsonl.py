from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from vla_rl.plugins.hooks.jsonl import plugin
from vla_rl.plugins.hooks.jsonl.config import JsonlConfig
from vla_rl.testing.events import a_run, an_evaluation


def train(folder: Path, first_step: int, last_step: int, finish: bool = True) -> None:
    """Steps with an evaluation at 0 and after every second one, in the loop's order."""
    hook: Any = plugin.build(JsonlConfig())
    hook.on_run_start(run=a_run(folder, first_step))
    if first_step == 0:
        hook.on_eval_end(step=0, evaluation=an_evaluation(0))
    for step in range(first_step + 1, last_step + 1):
        hook.on_update_end(step=step, metrics={"loss/policy": step / 7})
        if step % 2 == 0:
            hook.on_eval_end(step=step, evaluation=an_evaluation(step, successes=step))
    if finish:
        hook.on_close()


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_line_for_every_step_and_evaluation(tmp_path: Path) -> None:
    train(tmp_path, 0, 2)
    kinds = [(line["step"], "eval/success_rate" in line) for line in lines(tmp_path)]
    assert kinds == [(0, True), (1, False), (2, False), (2, True)]
    assert lines(tmp_path)[1] == {"step": 1, "loss/policy": 1 / 7}
    assert lines(tmp_path)[0]["eval/success_rate"] == 0.75
    assert lines(tmp_path)[0]["eval/episodes"] == 40
    assert lines(tmp_path)[0]["eval/task/reach"] == 0.75


def test_lines_are_on_disk_at_once(tmp_path: Path) -> None:
    train(tmp_path, 0, 3, finish=False)
    assert [line["step"] for line in lines(tmp_path)] == [0, 1, 2, 2, 3]


@pytest.mark.parametrize("killed_at", [4, 5, 6, 7])
@pytest.mark.parametrize("rest", ["", '{"step": 8, "loss/po', "\x00\x00"])
def test_a_resumed_file_equals_that_of_a_run_never_killed(tmp_path: Path, killed_at: int, rest: str) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir(), killed.mkdir()
    train(whole, 0, 10)
    train(killed, 0, killed_at, finish=False)
    with (killed / "metrics.jsonl").open("a") as file:
        file.write(rest)
    train(killed, 4, 10)
    assert (killed / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


def test_an_evaluation_that_is_repeated_replaces_its_line(tmp_path: Path) -> None:
    train(tmp_path, 0, 4)
    before = lines(tmp_path)
    hook: Any = plugin.build(JsonlConfig())
    hook.on_run_start(run=a_run(tmp_path, 4))
    hook.on_eval_end(step=4, evaluation=an_evaluation(4, successes=4))
    hook.on_close()
    assert lines(tmp_path) == before


def test_a_killed_evaluation_is_written_when_the_resumed_run_makes_up_for_it(tmp_path: Path) -> None:
    train(tmp_path, 0, 4)
    whole = (tmp_path / "metrics.jsonl").read_bytes()
    without_eval = whole[: whole.rstrip(b"\n").rindex(b"\n") + 1]
    (tmp_path / "metrics.jsonl").write_bytes(without_eval)
    hook: Any = plugin.build(JsonlConfig())
    hook.on_run_start(run=a_run(tmp_path, 4))
    hook.on_eval_end(step=4, evaluation=an_evaluation(4, successes=4))
    assert (tmp_path / "metrics.jsonl").read_bytes() == whole


def test_a_run_that_starts_over_repeats_nothing(tmp_path: Path) -> None:
    for _ in range(2):
        hook: Any = plugin.build(JsonlConfig())
        hook.on_run_start(run=a_run(tmp_path))
        hook.on_update_end(step=0, metrics={"bc_warmup/loss": 0.5})
        hook.on_eval_end(step=0, evaluation=an_evaluation(0))
        hook.on_update_end(step=1, metrics={"loss/policy": 0.5})
    assert [list(line)[1] for line in lines(tmp_path)] == ["bc_warmup/loss", "eval/success_rate", "loss/policy"]


def test_nan_becomes_null(tmp_path: Path) -> None:
    hook: Any = plugin.build(JsonlConfig())
    hook.on_run_start(run=a_run(tmp_path))
    hook.on_update_end(step=1, metrics={"a": float("nan"), "b": float("inf"), "c": 1.5})
    assert lines(tmp_path) == [{"step": 1, "a": None, "b": None, "c": 1.5}]


def test_a_copy_of_a_run_by_links_does_not_change_the_original(tmp_path: Path) -> None:
    original, copied = tmp_path / "original", tmp_path / "copied"
    original.mkdir(), copied.mkdir()
    train(original, 0, 4)
    before = (original / "metrics.jsonl").read_bytes()
    os.link(original / "metrics.jsonl", copied / "metrics.jsonl")
    train(copied, 4, 6)
    assert (original / "metrics.jsonl").read_bytes() == before
    assert (copied / "metrics.jsonl").read_bytes().startswith(before)
    assert lines(copied)[-1]["step"] == 6
