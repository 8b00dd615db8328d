"""A run that is finished is not lost by the end of its simulators, and does not wait for them for ever."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from scripted_runs import scripted_spec

from vla_rl.core.spec.spec import parse_spec
from vla_rl.runtime.start import run
from vla_rl.runtime.workers.env import simulator
from vla_rl.toolkit.envs.env_process import EnvProcess, Inline
from vla_rl.toolkit.envs.single_env import SingleEnv, View
from vla_rl.toolkit.processes import limit_time

UNCLOSABLE = str(Path(__file__).with_name("unclosable.py"))


def finish(folder: Path, closes: str, backend: str = "local") -> None:
    env = {"type": "unclosable", "closing": closes, "told": str(folder / "told")}
    plugins = ["vla_rl.testing.scripted", "vla_rl.testing.slot_placement", UNCLOSABLE]
    spec = scripted_spec(plugins=plugins, env=env, runtime={"backend": backend}, train={"steps": 1})
    results = run(parse_spec(spec), folder / "run", False)
    assert results["steps"] == 1
    assert (folder / "told").exists()


@pytest.mark.parametrize(
    ("closes", "said"), [("raise", "RuntimeError: the window was gone"), ("exit", "SystemExit: 5")]
)
def test_a_close_that_raises_is_reported(tmp_path, caplog, closes, said):
    finish(tmp_path, closes)
    assert re.search(rf"env 'unclosable': close failed \(.*unclosable.py:\d+\): {said}", caplog.text)


@pytest.mark.parametrize("closes", ["sleep", "wait", "spin"])
def test_a_close_that_does_not_end_is_left(tmp_path, caplog, monkeypatch, closes):
    monkeypatch.setattr(simulator, "CLOSE_S", 0.2)
    finish(tmp_path, closes)
    assert "env 'unclosable': close has not returned within 0.2 s" in caplog.text


@pytest.mark.ray
@pytest.mark.parametrize(
    ("closes", "said"),
    [("raise", r"env 'unclosable': close failed \("), ("sleep", "worker 0 .*: close has not returned within 2 s")],
)
def test_on_ray_it_is_the_same(tmp_path, caplog, monkeypatch, closes, said):
    monkeypatch.setattr("vla_rl.runtime.comm.backends.ray.CLOSE_S", 2.0)
    finish(tmp_path, closes, "ray")
    assert re.search(said, caplog.text)


def test_an_alarm_of_another_owner_continues():
    heard = []
    before = signal.signal(signal.SIGALRM, lambda *_: heard.append(1))
    theirs = signal.setitimer(signal.ITIMER_REAL, 3.0)
    try:
        with pytest.raises(TimeoutError), limit_time(0.05):
            time.sleep(60)
        assert not heard
        until = time.monotonic() + 60
        while not heard and time.monotonic() < until:
            time.sleep(0.01)
        assert heard == [1]
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *theirs)


def test_envs_of_this_process_are_all_closed(caplog):
    closed = []

    class Stuck(SingleEnv):
        def __init__(self, number):
            self.number = number

        def reset(self, state_id, seed):
            pass

        def step(self, action):
            raise NotImplementedError

        def render(self):
            return View({})

        def close(self):
            closed.append(self.number)
            raise OSError(f"window {self.number} is gone")

    process = EnvProcess(env_ids=range(2), first=4, make=Stuck, process_type=Inline, empty=np.zeros(1))
    process.start_process()
    process.send_requests("reset", {0: (0, 0), 1: (0, 0)})
    process.receive_answers(1.0, 1.0)
    process.discard()
    assert sorted(closed) == [4, 5]
    assert not process.is_running
    assert re.search(r"envs 4 to 5: close failed \(.*test_closing.py:\d+\): window [45] is gone", caplog.text)
