"""Episodes of runs and evaluations as data sets: all of them once, whatever plays, breaks or is resumed."""

from __future__ import annotations

import io
import json
from pathlib import Path

import fragile
import numpy as np
import pytest
from attrs import evolve
from PIL import Image
from scripted_runs import read_metrics, scripted_spec

from vla_rl.core.errors import SpecError, UserError
from vla_rl.core.spec.spec import make_component, parse_spec
from vla_rl.runtime.checks.run import check_spec
from vla_rl.runtime.driver.collecting.recordings import RecordingSchedule
from vla_rl.runtime.start import clone, evaluate, run
from vla_rl.runtime.workers.policy.rollout_loop import RecordingStore

pq = pytest.importorskip("pyarrow.parquet", reason="needs the extra: pip install -e '.[data]'")
pytest.importorskip("datasets", reason="needs the extra: pip install -e '.[data]'")

TABLETOP = {"type": "tabletop", "num_envs": 4, "image_size": 16}
ROLLOUT = {"chunk": 4, "episodes": 8, "group_size": 4, "max_steps": 12}
TRAIN = {"steps": 2, "lr": 1e-2, "micro_batch": 8, "global_batch": 8, "checkpoint_every": 1}


def recorded_spec(*, hook=None, **changes):
    hooks = [{"type": "jsonl"}, *([] if hook is None else [{"type": "lerobot", **hook}])]
    common = {"env": TABLETOP, "rollout": ROLLOUT, "train": TRAIN, "eval": {"episodes_per_task": 1}, "hooks": hooks}
    return parse_spec(scripted_spec(**common | changes))


def rows_of(folder):
    """Return each episode's columns, and what it is of."""
    lines = [json.loads(line) for line in (folder / "meta" / "vla_rl.jsonl").read_text().splitlines()]
    files = [folder / f"data/chunk-000/file-{i:03d}.parquet" for i in range(len(lines))]
    return [(pq.read_table(file).to_pydict(), line) for file, line in zip(files, lines, strict=True)]


def same(first, second):
    """Whether two data sets hold equal episodes in one order."""
    pairs = list(zip(rows_of(first), rows_of(second), strict=True))
    return all(a == b and x["success"] == y["success"] for (a, x), (b, y) in pairs)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One training without a recording, one with rows for steps, one with rows for chunks."""
    home = tmp_path_factory.mktemp("runs")
    hooks = {"none": None, "steps": {"what": "both"}, "chunks": {"what": "both", "rows": "chunks"}}
    for name, hook in hooks.items():
        run(recorded_spec(hook=hook), home / name, False)
    return home


def test_recording_changes_no_number(runs):
    assert read_metrics(runs / "steps") == read_metrics(runs / "chunks") == read_metrics(runs / "none")


def test_every_episode_is_there(runs):
    """Two evaluations of eight states and two rollouts of eight tickets are recorded, as long as the metrics say."""
    found = rows_of(runs / "steps" / "lerobot")
    names = [line["identity"].split(", ")[1] for _, line in found]
    wanted = ("evaluation 0", "rollout 1", "rollout 2", "evaluation 2")
    assert names == [name for name in wanted for _ in range(8)]
    lines = {line["step"]: line for line in read_metrics(runs / "steps") if "rollout/env_steps" in line}
    for step in (1, 2):
        rows = [len(table["action"]) for table, line in found if f"rollout {step}," in line["identity"]]
        assert sum(rows) == lines[step]["rollout/env_steps"]
    assert {line["task"] for _, line in found} >= {"pick_red", "put_blue"}
    assert len({line["identity"] for _, line in found}) == 32


def test_rows_of_steps_and_of_chunks_agree(runs):
    steps, chunks = (rows_of(runs / name / "lerobot") for name in ("steps", "chunks"))
    assert len(steps) == len(chunks)
    new = 0
    for (by_step, _), (by_chunk, _) in zip(steps, chunks, strict=True):
        at = 0
        for i, count in enumerate(by_chunk["action.executed"]):
            assert by_chunk["action"][i][:count] == by_step["action"][at : at + count]
            assert by_chunk["observation.images.wrist"][i]["bytes"] == by_step["observation.images.wrist"][at]["bytes"]
            assert by_chunk["observation.state"][i] == by_step["observation.state"][at]
            assert by_chunk["next.reward"][i] == pytest.approx(sum(by_step["next.reward"][at : at + count]))
            at += count
        assert at == len(by_step["action"])
        shown = [image["bytes"] for image in by_step["observation.images.wrist"]]
        assert np.asarray(Image.open(io.BytesIO(shown[0]))).shape == (16, 16, 3)
        new += len(set(shown)) > len(by_chunk["action"])
    assert new > len(steps) / 2, "the same frame for all steps of a chunk"


def test_a_resumed_run_records_nothing_twice(runs, tmp_path):
    """The run's last checkpoint is lost, so that the second step is rolled out again."""
    import shutil

    spec = recorded_spec(hook={"what": "both", "folder": str(tmp_path / "set")})
    run(spec, tmp_path / "run", False)
    checkpoints = tmp_path / "run" / "checkpoints"
    shutil.rmtree(checkpoints / "step_000002")
    (checkpoints / "last").unlink()
    (checkpoints / "last").symlink_to("step_000001")
    (tmp_path / "run" / "results.json").unlink(missing_ok=True)
    run(spec, tmp_path / "run", True)
    assert same(tmp_path / "set", runs / "steps" / "lerobot")


@pytest.mark.ray
def test_recordings_with_ray(runs, tmp_path):
    """Two workers, so that it is not known which of them has an episode."""
    changes = {"runtime": {"backend": "ray"}, "placement": {"type": "collocated", "workers": 2}}
    run(recorded_spec(hook={"what": "both"}, **changes), tmp_path / "run", False)
    assert same(tmp_path / "run" / "lerobot", runs / "steps" / "lerobot")


@pytest.mark.ray
def test_a_policy_that_dies_before_its_recordings_are_fetched_loses_none(runs, tmp_path):
    """The run continues from its last checkpoint, and records the step again."""
    (tmp_path / "dying_policy.py").write_text(
        "import os, signal\n"
        "from pathlib import Path\n"
        "from vla_rl import hookimpl\n"
        f"PROCESS = Path({str(tmp_path / 'process')!r})\n"
        "@hookimpl(wraps='engine')\n"
        "def act():\n"
        "    if not PROCESS.exists():\n"
        "        PROCESS.write_text(str(os.getpid()))\n"
        "    return (yield)\n"
        "@hookimpl(wraps='algorithm')\n"
        "def select(rollout):\n"
        "    if rollout.step == 2 and (process := PROCESS.read_text()):\n"
        "        PROCESS.write_text('')\n"
        "        os.kill(int(process), signal.SIGKILL)\n"
        "    return (yield)\n"
    )
    plugins = ["vla_rl.testing.scripted", "vla_rl.testing.slot_placement", str(tmp_path / "dying_policy.py")]
    changes = {"plugins": plugins, "runtime": {"backend": "ray"}, "placement": {"type": "disaggregated"}}
    run(recorded_spec(hook={"what": "both"}, **changes), tmp_path / "run", False)
    assert (tmp_path / "process").read_text() == ""
    assert same(tmp_path / "run" / "lerobot", runs / "steps" / "lerobot")


@pytest.mark.parametrize("rows", ["steps", "chunks"])
def test_an_env_that_breaks_is_recorded_once(tmp_path, rows):
    """In a rollout: what is played again is what is kept."""
    for name, fault in (("calm", "none"), ("broken", "raise")):
        env = {"type": "fragile", "num_envs": 2, "fault": fault, "told": str(tmp_path / "told"), "at_step": 38}
        spec = recorded_spec(
            hook={"what": "rollout", "rows": rows},
            plugins=["vla_rl.testing.scripted", "vla_rl.testing.slot_placement", str(Path(fragile.__file__))],
            env=env,
            rollout={"chunk": 2, "episodes": 8, "group_size": 2},
            eval={},
            train={**TRAIN, "steps": 1},
        )
        results = run(spec, tmp_path / name, False)
        assert results["faults"] == (name == "broken")
    assert same(tmp_path / "calm" / "lerobot", tmp_path / "broken" / "lerobot")


def test_only_some_are_kept(runs, tmp_path):
    every = [line["success"] for _, line in rows_of(runs / "steps" / "lerobot")][:8]
    for only, most, wanted in (("failure", 2, 2), ("all", 3, 3), ("success", None, sum(every))):
        spec, folder = recorded_spec(), tmp_path / f"{only}"
        hook = make_component("hook", "lerobot", folder=str(folder), only=only, max_episodes=most)
        checked = evaluate(evolve(spec, model=spec.model), record=hook)
        assert checked["success"]["n"] == 8
        found = rows_of(folder) if wanted else []
        assert len(found) == wanted
        assert all(line["success"] == (only == "success") for _, line in found if only != "all")


def test_evaluations_append(tmp_path):
    hook = make_component("hook", "lerobot", folder=str(tmp_path), max_episodes=2)
    for _ in range(2):
        evaluate(recorded_spec(), record=hook)
    assert [line["episode_index"] for _, line in rows_of(tmp_path)] == [0, 1, 2, 3]
    with pytest.raises(UserError, match="has other rows than rows: chunks"):
        evaluate(recorded_spec(), record=make_component("hook", "lerobot", folder=str(tmp_path), rows="chunks"))


def test_what_cannot_be_recorded_is_refused_before_a_run(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    streams = {**ROLLOUT, "episodes": None, "auto_reset": {"steps": 8}}
    for hooks, rollout, message in (
        ([{"what": "both"}], streams, r"hooks\.0\.what: with rollout\.auto_reset rollouts end in the midst"),
        ([{"every": 1}, {"every": 2}], ROLLOUT, r"hooks\.1: another hook records episodes"),
        ([{"folder": str(tmp_path)}], ROLLOUT, r"hooks\.0\.folder: .* is neither a LeRobot data set nor empty"),
    ):
        spec = recorded_spec(hooks=[{"type": "lerobot", **hook} for hook in hooks], rollout=rollout)
        with pytest.raises(SpecError, match=message):
            check_spec(spec, training=True)


@pytest.mark.parametrize("rows", ["steps", "chunks"])
def test_what_was_recorded_is_cloned(runs, tmp_path, rows):
    """By `vla-rl sft`, with the statistics of the recording."""
    data = {"type": "lerobot", "folder": str(runs / rows / "lerobot")}
    section = {"data": data, "steps": 24, "lr": 1e-1, "batch": 32, "report_every": 8}
    clone(recorded_spec(imitation=section), tmp_path / "run", False)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss/imitation"] for line in lines if "loss/imitation" in line]
    assert len(losses) == 3 and losses[-1] < losses[0]


def test_the_first_tickets_of_a_step_are_marked():
    hook = {"what": "rollout", "every": 2, "max_episodes": 3}
    marks = RecordingSchedule(recorded_spec(hook=hook))
    assert [[marks.is_next_recorded(step) for _ in range(5)] for step in (1, 2, 4)] == [
        [False] * 5,
        [True] * 3 + [False] * 2,
        [True] * 3 + [False] * 2,
    ]
    assert all(RecordingSchedule(recorded_spec(hook={**hook, "only": "success"})).is_next_recorded(2) for _ in range(9))
    assert not RecordingSchedule(recorded_spec()).is_next_recorded(2)


def test_a_spool_is_emptied():
    spool = RecordingStore()
    for number in range(3):
        spool.put((number, 0), {"of": number})
    assert [spool.get((number, 0)) for number in range(3)] == [{"of": 0}, {"of": 1}, {"of": 2}]
    assert spool.get((0, 1)) is None
    spool.put((1, 0), {"of": "the second try"})
    assert spool.get((1, 0)) == {"of": "the second try"}
    spool.forget_up_to(1)
    assert spool.get((1, 0)) is None and spool.get((2, 0)) == {"of": 2}
    spool.forget_up_to(None)
    assert spool.get((2, 0)) is None and spool._file.seek(0, 2) == 0
