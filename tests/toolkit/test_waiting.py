from __future__ import annotations

import pytest

from vla_rl.toolkit import waiting as module
from vla_rl.toolkit.waiting import Work, list_running_work, listen_to_work, merge_works, register_work


def test_work_is_shown_once_it_takes_long(monkeypatch):
    heard = []
    with register_work("starting envs", 8, "push") as note, listen_to_work(lambda: heard.append(list_running_work())):
        note(1)
        monkeypatch.setattr(module, "PATIENCE_S", 0.0)
        note(3)
    assert heard[0] == ()
    (work,) = heard[1]
    assert (work.title, work.done, work.total) == ("starting envs: push", 3, 8)
    assert list_running_work() == ()


def test_work_that_fails_is_over_too(monkeypatch):
    monkeypatch.setattr(module, "PATIENCE_S", 0.0)
    with pytest.raises(ValueError), register_work("loading the model"):
        assert list_running_work()
        raise ValueError
    assert list_running_work() == ()


def test_workers_that_do_the_same_are_one():
    rows = [Work(what="starting envs", done=done, total=4, about="push") for done in (1, 2)]
    other = Work(what="loading the model", done=5, total=9)
    found = merge_works([rows[0], other, rows[1]])
    assert found is not None and (found.title, found.done, found.total) == ("starting envs: push", 3, 8)
    assert merge_works([]) is None
