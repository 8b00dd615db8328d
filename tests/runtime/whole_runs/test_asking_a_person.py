"""Whole runs with a person who judges success, resets the scene and stops the robot. The person is a thread that uses
the page's requests.
"""

from __future__ import annotations

import json
import signal
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from scripted_runs import scripted_spec

from vla_rl.core.errors import NobodyAnswered, SafetyStop, UserError
from vla_rl.core.interrupts import RunStopped
from vla_rl.core.spec.spec import parse_spec
from vla_rl.runtime.start import run

PERSON = {"type": "person", "deadline_s": 30.0}
CHANGES: dict[str, Any] = {
    "env": {"num_envs": 1},
    "rollout": {"episodes": 4, "group_size": 1},
    "algorithm": {"type": "ppo"},
    "eval": {"before": False, "episodes_per_task": 1},
    "train": {"steps": 2, "micro_batch": 8, "global_batch": None, "checkpoint_every": 1},
}


@contextmanager
def watching(file: Path, answer: Callable[[dict, int], str | None]) -> Iterator[list[str]]:
    """Let a person watch the page whose address is in a file, and press what `answer` says to (state, number of presses
    so far). Yield what was pressed.
    """
    pressed: list[str] = []
    over = Event()

    def watch() -> None:
        while not over.wait(0.002):
            if not file.exists():
                continue
            root, _, token = file.read_text().strip().partition("/?token=")
            try:
                state = json.loads(request(root, token, "/state"))
                chosen = None if state["answered"] or state["stopped"] else answer(state, len(pressed))
                if chosen is not None:
                    request(root, token, "/press", chosen if chosen == "stop" else f"{state['question']} {chosen}")
                    pressed.append(chosen)
            except OSError:  # the run has ended, or the question is another one by now
                continue

    person = Thread(target=watch)
    person.start()
    try:
        yield pressed
    finally:
        over.set()
        person.join()


def request(root: str, token: str, path: str, body: str | None = None) -> bytes:
    data = None if body is None else body.encode()
    with urllib.request.urlopen(urllib.request.Request(root + path, data, {"X-Token": token}), timeout=5) as reply:
        return reply.read()


def start(folder: Path, address: Path, resume: bool = False, **rewards) -> dict:
    spec = scripted_spec(
        **CHANGES, rewards={**PERSON, "ask": {"type": "page", "address_file": str(address)}, **rewards}
    )
    return run(parse_spec(spec), folder, resume)


def steps_of(folder: Path) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "env/success_rate" in line]


def obliging(state: dict, count: int) -> str | None:
    """Reset when asked to, and call every episode a success when it is over."""
    if "ready" in state["answers"]:
        return "ready"
    return "success" if "was it a success" in state["text"] else None


def test_a_person_judges_success_and_resets(tmp_path):
    with watching(tmp_path / "address", obliging) as pressed:
        start(tmp_path / "run", tmp_path / "address")
    assert [line["env/success_rate"] for line in steps_of(tmp_path / "run")] == [1.0, 1.0]
    assert [line["env/return"] for line in steps_of(tmp_path / "run")] == [1.0, 1.0]
    assert pressed.count("success") == 8
    assert pressed.count("ready") == 8 + 2  # episodes of the evaluation at the end too, one of each task


def test_a_stop_saves_and_the_run_continues_from_there(tmp_path):
    """The stop comes after twelve answers, in the second step: each of its episodes has two."""

    def stopping(state: dict, count: int) -> str | None:
        return "stop" if count == 12 else obliging(state, count)

    with watching(tmp_path / "address", stopping), pytest.raises(SafetyStop, match="person stopped the robot") as error:
        start(tmp_path / "run", tmp_path / "address")
    assert "stopped after step 1; saved in" in "".join(error.value.__notes__)
    assert len(steps_of(tmp_path / "run")) == 1
    with watching(tmp_path / "address", obliging):
        results = start(tmp_path / "run", tmp_path / "address", resume=True)
    assert len(steps_of(tmp_path / "run")) == 2
    assert results["success"]["n"] == 2


def test_ctrl_c_while_a_person_is_waited_for(tmp_path):
    """The signal comes when the scene of the second step is to be reset."""

    left = Event()

    def leaving(state: dict, count: int) -> str | None:
        if count == 8 and "ready" in state["answers"] and not left.is_set():
            left.set()
            signal.raise_signal(signal.SIGINT)
        return None if left.is_set() else obliging(state, count)

    with watching(tmp_path / "address", leaving), pytest.raises(RunStopped, match="stopped after step 1; saved in"):
        start(tmp_path / "run", tmp_path / "address", deadline_s=250.0)


def test_a_run_without_a_person_ends_with_a_name(tmp_path):
    with pytest.raises(NobodyAnswered, match=r"no one answered 'reset the scene: ready\?' .* within 0.2 s"):
        start(tmp_path / "run", tmp_path / "address", deadline_s=0.2)


def test_waiting_longer_than_a_call_may_take_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"'person' waits up to 400 s .* runtime.deadline_s is 600; give more than 800"):
        start(tmp_path / "run", tmp_path / "address", deadline_s=400.0)
