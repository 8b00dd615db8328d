"""The Ray that a run starts for itself, or enters."""

from __future__ import annotations

import os
import re

import pytest

from vla_rl.core.errors import UserError
from vla_rl.runtime.comm.backends.own_ray import OwnRay

ray = pytest.importorskip("ray")
NICENESS = "RAY_worker_niceness"
pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.own_ray]


@pytest.fixture
def own():
    own = OwnRay()
    yield own
    own.stop()


@pytest.mark.parametrize("asked", [None, 3])
def test_its_workers_get_their_share_of_a_busy_machine(monkeypatch, own, asked):
    """Ray's own default starves them next to any other work; what the user asks for holds."""
    monkeypatch.delenv(NICENESS, raising=False)
    if asked is not None:
        monkeypatch.setenv(NICENESS, str(asked))
    own.start(num_cpus=1)
    found = ray.get(ray.remote(lambda: os.nice(0)).remote())
    assert found == os.nice(0) + (asked or 0)


@pytest.mark.parametrize("asked", [None, 1])
def test_it_starts_only_workers_that_were_asked_for(monkeypatch, own, asked):
    """Ray's own default is one for every core, which an actor does not use; what the user asks for holds."""

    class Actor:
        def answer(self):
            return 42

    if asked is not None:
        monkeypatch.setenv("RAY_prestart_worker_first_driver", str(asked))
    own.start(num_cpus=2)
    actor = ray.remote(num_cpus=0)(Actor).remote()
    assert ray.get(actor.answer.remote()) == 42
    commands = [" ".join(process.cmdline()) for process in own.vital["raylet"].children()]
    waiting = [command for command in commands if "ray::IDLE" in command or "default_worker.py" in command]
    assert bool(waiting) == bool(asked)


@pytest.mark.parametrize("failures", [1, 2])
def test_a_start_that_fails_is_tried_once_more(monkeypatch, own, failures, caplog):
    start, tried = ray.init, []

    def init(**options):
        tried.append(options)
        if len(tried) <= failures:
            raise RuntimeError("The current node timed out during startup.\nSee the logs.")
        return start(**options)

    monkeypatch.setattr(ray, "init", init)
    busy = rf"load \d+\.\d on {os.cpu_count()} cores"
    if failures == 1:
        own.start(num_cpus=1)
        assert set(own.vital) == {"raylet", "gcs_server"}
        assert re.search(rf"Ray did not start \({busy}\), and is tried once more: The current node", caplog.text)
    else:
        with pytest.raises(UserError, match=rf"tried twice \({busy}\): The current node timed out during startup\.\n"):
            own.start(num_cpus=1)
        assert own.folder is None
    assert len(tried) == 2


def test_a_cluster_that_is_not_there(train):
    with pytest.raises(UserError, match=r"runtime.address='127.0.0.1:1'"):
        train(runtime={"backend": "ray", "address": "127.0.0.1:1"})
