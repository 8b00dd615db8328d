"""Settings of `libero_warp`, and tasks that it refuses; without a simulator."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from vla_rl.core.contexts import CheckContext
from vla_rl.core.errors import UserError
from vla_rl.core.spec.structure import Problems
from vla_rl.plugins.envs.libero.suites import LiberoTask
from vla_rl.plugins.envs.libero.warp.config import LiberoWarpConfig
from vla_rl.plugins.envs.libero.warp.goals import check_goal


def test_a_goal_with_an_unknown_predicate_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "task.bddl"
    file.write_text("(define (problem x)\n (:init (Near a b))\n (:goal (And (On a b) ; (Near c d)\n (Stack a b))))\n")
    task = LiberoTask(index=0, name="stack_them", instruction="stack them", bddl_file=str(file))
    with pytest.raises(UserError, match=r"'stack_them' asks 'stack'.*written are: on, in, open, close"):
        check_goal(task)
    file.write_text("(define (problem x)\n (:goal (And (On a b) (Close c) (Turnon d))))\n")
    check_goal(task)


def test_settings_of_libero_are_those_of_the_same_tasks() -> None:
    config = LiberoWarpConfig(suite="libero_goal", tasks=(3,), settle_steps=2, train_states="official")
    official = config.official()
    assert (official.suite, official.tasks, official.settle_steps) == ("libero_goal", (3,), 2)
    assert official.train_states == "official"
    assert not official.cameras
    with pytest.raises(ValueError, match="give one of suite"):
        LiberoWarpConfig()


def test_a_cpu_is_said_to_be_for_tests(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("libero", reason="needs the extra libero or libero-warp")
    from vla_rl.plugins.envs.libero.warp.checks import check_tasks

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    check_tasks(LiberoWarpConfig(suite="libero_spatial", tasks=(0,)), CheckContext())
    assert "on a CPU it is for tests" in caplog.text
    caplog.clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    check_tasks(LiberoWarpConfig(suite="libero_spatial", tasks=(0,)), CheckContext())
    assert not caplog.text
    with pytest.raises(Problems, match="no LIBERO suite 'libero_spacial'"):
        check_tasks(LiberoWarpConfig(suite="libero_spacial"), CheckContext())
