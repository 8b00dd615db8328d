from __future__ import annotations

import json
import threading
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest

from vla_rl.testing.events import METRICS, a_run, an_evaluation
from vla_rl.toolkit.hooks.tracking import Tracker, TrackerSettings, flatten_spec


class Journal:
    """A tracker that keeps a list; `broken` names methods that raise."""

    def __init__(self, *broken: str) -> None:
        self.told: list[Any] = []
        self.broken, self.go = broken, threading.Event()
        self.go.set()

    def _note(self, what: str, *rest: Any) -> None:
        self.go.wait(20)
        if what in self.broken:
            raise ConnectionError(f"no route to host, in {what}")
        self.told.append((what, *rest))

    def open_run(self, run, known):
        self._note("open", known)
        return known or "id-1", "somewhere"

    def log_metrics(self, step, values):
        self._note("scalars", step, len(values))

    def upload_video(self, step, file):
        self._note("video", step, file.name)

    def upload_checkpoint(self, step, folder):
        self._note("checkpoint", step, (folder / "model" / "weights").read_text())

    def close_run(self, finished):
        self._note("close", finished)


def tracker(store: Journal, **settings: Any) -> Tracker:
    return Tracker("journal", TrackerSettings(**{"wait_s": 20.0, **settings}), store)


def a_checkpoint(folder: Path, step: int) -> Path:
    made = folder / "checkpoints" / f"step_{step:06d}"
    (made / "model").mkdir(parents=True)
    (made / "model" / "weights").write_text(f"weights {step}")
    return made


def test_a_run_is_sent_in_order_and_once(tmp_path):
    store = Journal()
    hook = tracker(store, artifacts="last")
    hook.on_run_start(a_run(tmp_path))
    hook.on_eval_end(0, an_evaluation(0))
    (tmp_path / "videos").mkdir()
    (tmp_path / "videos" / "step_000000_ep0_success.mp4").write_bytes(b"film")  # as a hook told later makes it
    hook.on_update_end(1, METRICS)
    hook.on_checkpoint(1, a_checkpoint(tmp_path, 1))
    hook.on_update_end(2, METRICS)
    hook.on_checkpoint(2, a_checkpoint(tmp_path, 2))
    hook.on_run_end()
    hook.on_close()
    n = len(METRICS)
    assert store.told == [
        ("open", None),
        ("scalars", 0, 6),
        ("video", 0, "step_000000_ep0_success.mp4"),
        ("scalars", 1, n),
        ("scalars", 2, n),
        ("checkpoint", 2, "weights 2"),
        ("close", True),
    ]
    assert not (tmp_path / ".uploading").exists()


def test_a_checkpoint_is_uploaded_though_the_run_removed_it(tmp_path):
    store = Journal()
    hook = tracker(store, artifacts="all")
    store.go.clear()  # the network is slow
    hook.on_run_start(a_run(tmp_path))
    for step in (1, 2):
        made = a_checkpoint(tmp_path, step)
        hook.on_checkpoint(step, made)
        (made / "model" / "weights").unlink()
    assert store.told == []  # no one waited
    store.go.set()
    hook.on_run_end()
    hook.on_close()
    assert [entry for entry in store.told if entry[0] == "checkpoint"] == [
        ("checkpoint", 1, "weights 1"),
        ("checkpoint", 2, "weights 2"),
    ]


def test_a_resumed_run_continues_the_same_one_there(tmp_path):
    for first_step, known in ((0, None), (3, "id-1"), (0, None)):
        store = Journal()
        hook = tracker(store)
        hook.on_run_start(a_run(tmp_path, first_step))
        hook.on_run_end()
        hook.on_close()
        assert store.told[0] == ("open", known)
    assert json.loads((tmp_path / "trackers.json").read_text()) == {"journal": "id-1"}


def test_a_run_that_was_stopped_is_closed_as_unfinished(tmp_path):
    store = Journal()
    hook = tracker(store)
    hook.on_run_start(a_run(tmp_path))
    hook.on_close()
    assert store.told[-1] == ("close", False)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (("open",), "journal takes nothing of this run, which continues without it: no route to host, in open"),
        (("scalars", "video", "close"), "journal did not take metrics: no route to host, in scalars"),
    ],
)
def test_a_tracker_that_fails_is_said_once_and_never_raises(tmp_path, caplog, broken, said):
    hook = tracker(Journal(*broken))
    hook.on_run_start(a_run(tmp_path))
    for step in range(1, 4):
        hook.on_update_end(step, METRICS)
    hook.on_run_end()
    hook.on_close()
    assert len(caplog.records) == 1 and said in caplog.text


def test_a_tracker_that_refuses_the_run_keeps_no_checkpoints(tmp_path, caplog):
    """Their hard links would hold what the run removes."""
    store = Journal("open")
    hook = tracker(store, artifacts="all")
    store.go.clear()
    hook.on_run_start(a_run(tmp_path))
    hook.on_checkpoint(1, a_checkpoint(tmp_path, 1))
    assert list((tmp_path / ".uploading").rglob("weights"))
    store.go.set()
    end = monotonic() + 60
    while "takes nothing of this run" not in caplog.text:
        assert monotonic() < end
        sleep(0.01)
    hook.on_checkpoint(2, a_checkpoint(tmp_path, 2))
    hook.on_run_end()
    hook.on_close()
    assert not list((tmp_path / ".uploading").rglob("weights"))


def test_the_end_does_not_wait_for_ever(tmp_path, caplog):
    store = Journal()
    hook = tracker(store, wait_s=0.2)
    store.go.clear()
    hook.on_run_start(a_run(tmp_path))
    hook.on_run_end()
    hook.on_close()
    assert "did not take all of the run within 0 s" in caplog.text
    store.go.set()


def test_flat_names_every_key():
    assert flatten_spec({"env": {"type": "x", "tasks": ["a"], "none": {}}, "seed": 0}) == {
        "env.type": "x",
        "env.tasks": ["a"],
        "env.none": {},
        "seed": 0,
    }
