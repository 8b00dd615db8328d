from __future__ import annotations

from pathlib import Path
from time import sleep
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from vla_rl.plugins.hooks.tensorboard import plugin
from vla_rl.testing.events import a_run, an_evaluation
from vla_rl.toolkit.no_settings import NoSettings


def train(folder: Path, first_step: int, last_step: int, offset: float = 0.0) -> None:
    hook: Any = plugin.build(NoSettings())
    hook.on_run_start(run=a_run(folder, first_step))
    for step in range(first_step + 1, last_step + 1):
        hook.on_update_end(step=step, metrics={"loss/policy": step + offset, "env/success_rate": 0.5})
    hook.on_eval_end(step=last_step, evaluation=an_evaluation(last_step))
    hook.on_close()


def read(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def test_metrics_evaluations_and_the_spec_can_be_read_back(tmp_path: Path) -> None:
    train(tmp_path, 0, 3)
    events = read(tmp_path)
    assert [(e.step, e.value) for e in events.Scalars("loss/policy")] == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert events.Scalars("eval/success_rate")[0].value == pytest.approx(0.75)
    assert events.Scalars("eval/success_low")[0].value == pytest.approx(0.598, abs=1e-3)
    assert events.Scalars("eval_task/push")[0].step == 3
    text = events.Tensors("spec/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "seed: 0" in text and "env: {type: x}" in text


def test_a_resumed_run_purges_what_the_killed_one_wrote_after_its_checkpoint(tmp_path: Path) -> None:
    train(tmp_path, 0, 6, offset=100.0)
    sleep(1.1)  # the names of TensorBoard's files are in order by whole seconds
    train(tmp_path, 4, 8)
    curve = [(e.step, e.value) for e in read(tmp_path).Scalars("loss/policy")]
    assert curve == [(1, 101.0), (2, 102.0), (3, 103.0), (4, 104.0), (5, 5.0), (6, 6.0), (7, 7.0), (8, 8.0)]
