"""Whole runs of `dagger` and `hg_dagger`: what they learn, resume after a kill, placements, and what is refused."""

from __future__ import annotations

import logging
import subprocess
import time
from typing import Any

import helped_env
import no_expert
import pytest
import torch
from scripted_runs import read_metrics, scripted_spec, weights_in

from vla_rl.core.errors import SpecError, UserError
from vla_rl.core.spec.spec import parse_spec
from vla_rl.runtime.checks.run import check_spec
from vla_rl.runtime.start import run

DAGGER = {"type": "dagger", "updates": 20, "batch": 16, "capacity": 60}
HG_DAGGER = {"type": "hg_dagger", "updates": 20, "batch": 16}


def dagger_spec(base=DAGGER, **changes: Any) -> dict[str, Any]:
    spec = scripted_spec(rollout={"group_size": 1}, trainer=dict(base))
    del spec["algorithm"]
    spec["train"] = {"steps": 4, "lr": 3e-2, "micro_batch": 16, "checkpoint_every": 2}
    for name, value in changes.items():
        spec[name] = {**spec[name], **value} if isinstance(value, dict) and name in spec else value
    return spec


def helped_spec(env=None, **changes: Any) -> dict[str, Any]:
    """A person takes over for whole chunks of two, steps 2 to 5 of 6, in all states."""
    spec = dagger_spec(HG_DAGGER, **changes)
    spec["env"] = {"type": "helped", "num_envs": 4, "first": 2, "last": 5, "each": 1, **(env or {})}
    return {**spec, "plugins": [*spec["plugins"], helped_env.__name__]}


def train(folder, resume=False, **changes):
    run(parse_spec(dagger_spec(**changes)), folder, resume)
    return read_metrics(folder)


def of_updates(lines):
    return [line for line in lines if "update/samples" in line]


def test_the_expert_acts_first_and_its_labels_are_cloned(tmp_path):
    lines = of_updates(train(tmp_path))
    assert [line["env/intervention_rate"] for line in lines] == [1.0, 0.0, 0.0, 0.0]
    assert lines[0]["env/success_rate"] == 1.0 and lines[-1]["env/success_rate"] > 0.9
    assert [line["dagger/labelled"] for line in lines] == [line["update/samples"] for line in lines]
    assert [line["dagger/samples"] for line in lines] == [32, 60, 60, 60], "16 episodes of two chunks, 60 at most"


@pytest.mark.parametrize("auto_reset", ["off", "immediate"])
def test_a_resumed_run_equals_a_whole_one(tmp_path, auto_reset):
    changes: dict[str, Any] = {"trainer": {"beta": 0.7, "beta_decay": 0.8}}
    if auto_reset != "off":
        changes["rollout"] = {"auto_reset": {"steps": 6, "mode": auto_reset}, "episodes": None}
    whole = of_updates(train(tmp_path / "whole", **changes))
    shares = [line["dagger/expert_acts"] for line in whole]
    assert 0.4 < shares[0] < 1.0 and 0 < shares[3] < shares[0], "the expert acts in fewer and fewer chunks"
    train(tmp_path / "parts", train={"steps": 3}, **changes)
    parts = of_updates(train(tmp_path / "parts", train={"steps": 4}, resume=True, **changes))
    if auto_reset == "off":
        assert parts == whole
    else:  # streams were brought back to where they were, and episodes count what was executed since
        uncounted = ("rollout/replayed_steps", "env/intervention_rate", "env/episodes_with", "env/unaided_success")
        for one, other in zip(parts, whole, strict=True):
            assert {k: v for k, v in one.items() if not k.startswith(uncounted)} == {
                k: v for k, v in other.items() if not k.startswith(uncounted)
            }
    one, other = weights_in(tmp_path / "whole"), weights_in(tmp_path / "parts")
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_killed_between_checkpoints_a_run_loses_nothing(tmp_path, start_run):
    changes: dict[str, Any] = {"train": {"steps": 8, "checkpoint_every": 3}, "env": {"latency_s": 0.05}}
    whole = train(tmp_path / "whole", **changes)
    parse_spec(dagger_spec(**changes)).dump(tmp_path / "spec.yaml")
    folder = tmp_path / "killed"
    with start_run(tmp_path / "spec.yaml", folder, stdout=subprocess.DEVNULL) as process:
        lines = folder / "metrics.jsonl"
        while not lines.exists() or len(lines.read_text().splitlines()) < 6:  # before the first step, and five of them
            assert process.poll() is None, "the run ended early"
            time.sleep(0.01)
        process.kill()
    assert train(folder, resume=True, **changes) == whole
    one, other = weights_in(tmp_path / "whole"), weights_in(folder)
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.ray
def test_ray_workers_label_the_same(tmp_path):
    changes: dict[str, Any] = {"train": {"steps": 1}, "trainer": {"beta": 0.5}}
    local, ray = (train(tmp_path / backend, runtime={"backend": backend}, **changes) for backend in ("local", "ray"))
    names = ("dagger/labelled", "env/intervention_rate", "env/success_rate")
    assert [[line[name] for name in names] for line in of_updates(local)] == [
        [line[name] for name in names] for line in of_updates(ray)
    ]


def test_demonstrations_are_part_of_the_data(tmp_path):
    """A run of the expert is recorded; the next one begins with its chunks."""
    recorder = {"type": "lerobot", "what": "rollout", "rows": "chunks"}
    train(tmp_path / "first", train={"steps": 1}, hooks=[{"type": "jsonl"}, recorder])
    data = {"type": "lerobot", "folder": str(tmp_path / "first" / "lerobot")}
    imitation = {"data": data, "steps": 1, "lr": 1e-3}
    (line,) = of_updates(
        train(tmp_path / "second", train={"steps": 1}, imitation=imitation, trainer={"beta": 0.0, "capacity": 100})
    )
    assert line["env/intervention_rate"] == 0.0
    assert line["dagger/samples"] - line["dagger/labelled"] == 32


def test_takeovers_are_cloned(tmp_path):
    """The person acts in four of six steps of every episode."""
    run(parse_spec(helped_spec()), tmp_path)
    lines = of_updates(read_metrics(tmp_path))
    assert [line["hg_dagger/labelled"] for line in lines] == [32] * 4, "two of three chunks of 16 episodes"
    assert lines[-1]["hg_dagger/samples"] == 128
    assert lines[-1]["loss/imitation"] < lines[0]["loss/imitation"] / 2


def test_a_run_in_which_no_one_takes_over_says_so(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        run(parse_spec(helped_spec(env={"first": helped_env.LENGTH}, train={"steps": 2})), tmp_path)
    texts = [record.getMessage() for record in caplog.records if "no takeover covered" in record.getMessage()]
    assert len(texts) == 1 and texts[0].startswith("warning: step 1: no takeover covered a whole chunk")


# -------------------------------------------------------------------------------------------------------- bad input


def test_a_simulator_without_an_expert_is_refused():
    spec = {**helped_spec(), "trainer": DAGGER}
    with pytest.raises(SpecError, match=r"asks the simulator's scripted expert, and 'helped' has none") as refused:
        check_spec(parse_spec(spec), training=True)
    assert "tabletop" in str(refused.value) and "scripted" in str(refused.value)
    assert "gym_hil" not in str(refused.value)


def test_tasks_without_an_expert_end_the_run(tmp_path):
    """The plugin has an expert, and the chosen task has none."""
    spec = dagger_spec(env={"type": "without_expert"})
    spec["plugins"] = [*spec["plugins"], no_expert.__name__]
    with pytest.raises(UserError, match="env 'without_expert' has no scripted expert to learn from here"):
        run(parse_spec(spec), tmp_path)


def test_a_simulator_without_takeovers_is_refused(tmp_path):
    with pytest.raises(UserError, match="this simulator has none"):
        run(parse_spec(dagger_spec(HG_DAGGER)), tmp_path)


def test_a_takeover_device_that_disappears_ends_the_run_with_its_name(tmp_path):
    with pytest.raises(UserError, match="the takeover device 'lever' is not there any more"):
        run(parse_spec(helped_spec(env={"unplugged": 3})), tmp_path)


@pytest.mark.parametrize(
    ("keys", "text"),
    [({"beta": 1.5}, r"trainer\.beta"), ({"beta_decay": -1}, r"trainer\.beta_decay"), ({"updates": 0}, "updates")],
)
def test_keys_out_of_range_are_refused(keys, text):
    with pytest.raises(SpecError, match=text):
        parse_spec(dagger_spec(trainer={**DAGGER, **keys}))


def test_an_algorithm_is_refused():
    with pytest.raises(SpecError, match="trainer 'dagger' takes no loss of an algorithm"):
        check_spec(parse_spec(dagger_spec(algorithm={"type": "grpo"})), training=True)
