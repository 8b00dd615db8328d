"""Trying what a machine can do."""

from __future__ import annotations

import pytest

from vla_rl.core.errors import UserError
from vla_rl.toolkit.envs import rendering as machine


def test_drawing_that_does_not_work_is_refused_with_the_command_that_mends_it(monkeypatch):
    monkeypatch.setattr(
        machine, "probe_once", lambda name: machine.ProbeResult(False, "libEGL.so.1: cannot open shared object file")
    )
    with pytest.raises(
        UserError, match=r"libero draws with egl.*cannot open(.|\n)*apt-get install -y libegl1"
    ) as caught:
        machine.require_rendering("egl", "libero")
    assert "vla-rl doctor" in str(caught.value)


def test_a_probe_that_fails_says_why():
    result = machine.probe_rendering("nonsense")
    assert not result.works and "nonsense" in result.detail


def test_a_probe_that_gives_no_answer_does_not_advise_to_install(monkeypatch):
    monkeypatch.setattr(machine, "probe_once", lambda name: machine.ProbeResult(False, "no answer within 90 s", True))
    with pytest.raises(UserError, match=r"no answer within 90 s\n  the machine may be busy") as caught:
        machine.require_rendering("egl", "libero")
    assert "apt-get" not in str(caught.value)
