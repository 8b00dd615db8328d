"""Signals that stop a run."""

from __future__ import annotations

import os
import signal

import pytest

from vla_rl.core.interrupts import Interrupts, StopRequested


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_the_first_signal_is_a_request(number):
    before = signal.getsignal(number)
    with Interrupts() as interrupts:
        os.kill(os.getpid(), number)
        with pytest.raises(StopRequested):
            interrupts.check_stop()
    assert signal.getsignal(number) == before


def test_nohup_continues_when_the_terminal_closes():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts:
            os.kill(os.getpid(), signal.SIGHUP)
            interrupts.check_stop()
    finally:
        signal.signal(signal.SIGHUP, before)
