"""Whole runs of a trainer of transitions: what reaches it, resume, placements, and what is refused."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scripted_runs import read_metrics, scripted_spec, weights_in
from typer.testing import CliRunner

from vla_rl.cli.main import app
from vla_rl.core.errors import CheckpointError, SpecError, UserError
from vla_rl.core.spec.spec import parse_spec
from vla_rl.plugins.trainers.off_policy.demonstrations import DemonstratedTransitions
from vla_rl.runtime.checks.no_effect import without_effect
from vla_rl.runtime.checks.run import check_spec
from vla_rl.runtime.start import run
from vla_rl.toolkit.trainers.frame_records import frame_dtype
from vla_rl.toolkit.trainers.record_log import RecordLog
from vla_rl.toolkit.trainers.replay import _transition_dtype

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "off-policy.md"
NETWORK = {
    "image_size": 32, "channels": [8], "keypoints": 2, "words": 16, "instruction": 4, "hidden": [16], "head": {"type": "gaussian"}
}  # fmt: skip
TRAINER = {"type": "off_policy", "min_data": 20, "batch": 16, "hidden": [16], "updates_per_step": 0.25, "capacity": 200}


def off_policy_spec(**changes: Any) -> dict[str, Any]:
    spec = scripted_spec(
        model={"type": "film_resnet", "network": NETWORK},
        env={"num_envs": 4},
        rollout={"episodes": 4, "group_size": 1, "max_steps": 5},
        trainer=TRAINER,
    )
    del spec["algorithm"]
    spec["train"] = {"steps": 4, "lr": 1e-3, "micro_batch": 8, "checkpoint_every": 2}
    for name, value in changes.items():
        spec[name] = {**spec[name], **value} if isinstance(value, dict) and name in spec else value
    return spec


def train(folder, resume=False, **changes):
    run(parse_spec(off_policy_spec(**changes)), folder, resume)
    return read_metrics(folder)


def test_a_run_collects_trains_and_resumes_exactly(tmp_path):
    whole = train(tmp_path / "whole")
    steps = [line for line in whole if "off_policy/updates" in line]
    assert len(steps) == 4
    updates = [line["off_policy/updates"] for line in steps]
    kept = [line["off_policy/transitions"] for line in steps]
    assert kept == np.cumsum([line["update/samples"] for line in steps]).tolist()
    assert np.cumsum(updates).tolist() == [max(0, (count - 20) // 4) for count in kept]
    assert updates[-1] > 0
    assert "loss/critic" in steps[-1] and "off_policy/temperature" in steps[-1]

    train(tmp_path / "parts", train={"steps": 3})
    parts = train(tmp_path / "parts", train={"steps": 4}, resume=True)
    assert [line for line in parts if "off_policy/updates" in line] == steps
    one, other = weights_in(tmp_path / "whole"), weights_in(tmp_path / "parts")
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_continues_from_the_checkpoint_before_where_its_replay_is_damaged(tmp_path, caplog):
    whole = train(tmp_path / "whole")
    train(tmp_path / "run")
    file = tmp_path / "run" / "replay" / "frames" / "00000000.bin"
    os.truncate(file, file.stat().st_size - 1)
    mended = train(tmp_path / "run", resume=True)
    assert re.search(
        r"00000000.bin ends early: .*\n  kept as damaged_step_000004; continuing from step_000002", caplog.text
    )
    assert mended == whole
    one, other = weights_in(tmp_path / "whole"), weights_in(tmp_path / "run")
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_without_a_sound_replay_does_not_advise_to_resume(tmp_path):
    train(tmp_path / "run")
    file = tmp_path / "run" / "replay" / "transitions" / "00000000.bin"
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(CheckpointError) as caught:
        train(tmp_path / "run", resume=True)
    message = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert message.count("00000000.bin does not hold record 0 as it was written") == 2
    last = message.splitlines()[-1]
    weights = tmp_path / "run" / "checkpoints" / "step_000004" / "model"
    assert last.endswith(f"these weights are sound: model.checkpoint={weights}")
    assert "--resume" not in message
    train(tmp_path / "new", model={"checkpoint": str(weights)}, train={"steps": 1})


@pytest.mark.parametrize("auto_reset", ["off", "immediate", "deferred"])
def test_transitions_are_what_happened(tmp_path, auto_reset):
    """Images are stamped with (env, episode, step): a chunk of 2 leads 2 steps on, or to the end of an episode."""
    spec = off_policy_spec(train={"steps": 1}, env={"stamp": True}, trainer={"min_data": 100})
    if auto_reset != "off":
        del spec["rollout"]["episodes"]
        spec["rollout"] |= {"auto_reset": {"steps": 8, "mode": auto_reset}}
    run(parse_spec(spec), tmp_path)
    info = parse_info(tmp_path)
    frames, transitions = stored(tmp_path, info)
    stamps = frames["image/main"][:, 0, :4].astype(np.int64)
    stamp = stamps[..., 0] + 256 * stamps[..., 1] + 65536 * stamps[..., 2]
    before, after = stamp[transitions["first"]], stamp[transitions["following"]]
    valid = transitions["valid"].sum(1)
    ended = transitions["terminated"]
    assert ended.any() and not ended.all()
    assert (after[~ended][:, :2] == before[~ended][:, :2]).all(), "the same env and episode"
    assert (after[~ended][:, 2] == before[~ended][:, 2] + valid[~ended]).all(), "as many steps later as were valid"
    assert (transitions["rewards"][~transitions["valid"]] == 0).all()
    assert len(frames) < 2 * len(transitions), "frames are shared"


def parse_info(folder):
    from vla_rl.core.types import EnvInfo
    from vla_rl.runtime.run_folder.env_info import read_env_info

    info = read_env_info(folder / "checkpoints" / "last")
    assert isinstance(info, EnvInfo)
    return info


def stored(folder, info):
    """Return all frames and transitions of a run's buffer."""
    counts = torch.load(folder / "checkpoints" / "last" / "trainer" / "learner.pt", weights_only=True)
    state = counts["trainers"]["collected"]["state"]["buffer"]
    logs = {"frames": frame_dtype(info), "transitions": _transition_dtype(2, (2, info.action_dim))}
    records = []
    for name, dtype in logs.items():
        log = RecordLog(folder / "replay" / name, dtype)
        records.append(log.read_records(np.arange(state[name])))
        log.close()
    return records


@pytest.mark.ray
def test_ray_workers_collect_the_same(tmp_path):
    local = train(tmp_path / "local", train={"steps": 2})
    ray = train(tmp_path / "ray", train={"steps": 2}, runtime={"backend": "ray"})
    counts = [
        [line["off_policy/transitions"] for line in lines if "off_policy/updates" in line] for lines in (local, ray)
    ]
    assert counts[0] == counts[1]


def test_half_of_each_batch_can_come_from_a_recording(tmp_path, monkeypatch):
    """A run records its rollouts; the next one draws demonstrations from them."""
    recorder = {"type": "lerobot", "what": "rollout", "rows": "chunks"}
    train(tmp_path / "first", train={"steps": 1}, hooks=[{"type": "jsonl"}, recorder])
    read = DemonstratedTransitions.read_batch
    counts = []

    def counted(self, indices):
        counts.append(len(indices))
        return read(self, indices)

    monkeypatch.setattr(DemonstratedTransitions, "read_batch", counted)
    imitation = {"data": {"type": "lerobot", "folder": str(tmp_path / "first" / "lerobot")}, "steps": 1, "lr": 1e-3}
    keys = {
        "trainer": {"demonstrations": {"share": 0.5}, "min_data": 4, "updates_per_step": 1},
        "imitation": imitation,
        "train": {"steps": 1},
    }
    metrics = train(tmp_path / "second", **keys)
    updates = sum(line.get("off_policy/updates", 0) for line in metrics)
    assert counts == [8] * int(updates) and updates > 0


def test_a_run_on_a_full_disk_names_the_file_and_resumes(tmp_path, monkeypatch):
    expected = [line for line in train(tmp_path / "whole") if "off_policy/updates" in line]
    write = os.pwrite
    writes = []

    def full(descriptor, data, offset):
        writes.append(offset)
        if len(writes) > 5:  # two logs a step: in the third step, after the checkpoint of the second
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    text = "replay buffer could not be written to .*00000000.bin: No space left on device. Free disk space, or lower"
    with pytest.raises(UserError, match=text):
        train(tmp_path / "full")
    monkeypatch.undo()
    resumed = train(tmp_path / "full", resume=True)
    assert [line for line in resumed if "off_policy/updates" in line] == expected


# -------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"algorithm": {"type": "grpo"}}, "trainer 'off_policy' takes no loss of an algorithm; leave `algorithm` out"),
        ({"asynchrony": {"replay": {"uses": 2}}}, "keeps transitions itself, as trainer.capacity says"),
        ({"trainer": {"updates_per_step": 0}}, r"trainer.updates_per_step: 0 updates .* SAC makes 1, RLPD 20"),
    ],
)
def test_what_does_not_go_with_transitions_is_refused(changes, text):
    with pytest.raises(SpecError, match=text):
        check_spec(parse_spec(off_policy_spec(**changes)), training=True)


def test_no_algorithm_without_a_trainer_of_transitions():
    with pytest.raises(SpecError, match="algorithm: required, but missing"):
        parse_spec(off_policy_spec() | {"trainer": {"type": "policy_gradient"}})
    spec = off_policy_spec(algorithm={"type": "transitions"}) | {"trainer": {"type": "policy_gradient"}}
    with pytest.raises(SpecError, match="takes the loss of an algorithm; 'transitions' has none"):
        check_spec(parse_spec(spec), training=True)


def test_keys_of_policy_gradients_are_reported():
    spec = parse_spec(off_policy_spec(train={"epochs": 2, "global_batch": 16}))
    found = {path for path, text in without_effect(spec, training=True, imitation=False) if "draws its own" in text}
    assert found == {("train", "epochs"), ("train", "global_batch")}


@pytest.mark.parametrize(
    ("trainer", "key", "text"),
    [
        ({"min_data": 49}, "min_data", "4 steps (train.steps) collect 48 at most"),
        ({"critic_updates": 12}, "critic_updates", "4 steps (train.steps) make 12 at most"),
    ],
)
def test_a_run_that_is_too_short_to_train_the_policy_is_reported(trainer, key, text):
    """4 steps of 4 episodes of 3 chunks, and an update for each 4 transitions."""

    def warnings(**changes):
        spec = parse_spec(off_policy_spec(trainer={**changes, "updates_per_step": 0.25}))
        return dict(without_effect(spec, training=True, imitation=False))

    assert text in warnings(**trainer)["trainer", key]
    assert (
        not {("trainer", "min_data"), ("trainer", "critic_updates")} & warnings(min_data=48, critic_updates=11).keys()
    )


def test_a_plan_with_several_learners_is_refused():
    changes = {"runtime": {"backend": "ray"}, "placement": {"type": "collocated", "workers": 2}}
    with pytest.raises(SpecError, match="keeps its transitions on one learner, and this plan has 2"):
        check_spec(parse_spec(off_policy_spec(**changes)), training=True)


def test_demonstrations_have_to_be_there(tmp_path):
    with pytest.raises(UserError, match="share of demonstrations in a batch, and there are none"):
        train(tmp_path, trainer={"demonstrations": {"share": 0.5}})


def test_a_model_without_reparameterised_actions_is_refused(tmp_path):
    with pytest.raises(UserError, match="needs actions with a gradient, and model 'linear' gives none"):
        run(parse_spec(off_policy_spec() | {"model": {"type": "linear"}}), tmp_path)


def test_a_spec_with_its_algorithm_is_read_back(tmp_path):
    spec = parse_spec(off_policy_spec())
    assert parse_spec(spec.to_dict()) == spec
    assert json.loads(json.dumps(spec.to_dict()))["algorithm"] == {"type": "transitions"}


def test_the_spec_of_the_page_clones_and_trains(tmp_path, monkeypatch):
    """With its two commands, shortened."""
    (text,) = re.findall(r"```yaml\n(# sac.yaml\n.*?)```", PAGE.read_text(), flags=re.DOTALL)
    (tmp_path / "sac.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    short = ["runtime.backend=local", "eval.before=false", "eval.episodes_per_task=1", "env.num_envs=4"]
    of_clone = ["imitation.expert.episodes=4", "imitation.steps=1"]
    of_run = [
        "train.steps=1",
        "rollout.episodes=4",
        "trainer.min_data=4",
        "trainer.critic_updates=1",
        "trainer.batch=4",
    ]
    for command, keys in zip(
        re.findall("^vla-rl (.*sac.yaml.*)$", PAGE.read_text(), flags=re.MULTILINE), (of_clone, of_run), strict=True
    ):
        done = CliRunner().invoke(app, [*shlex.split(command), *short, *keys])
        assert done.exit_code == 0, done.output
    assert any(line.get("off_policy/updates") for line in read_metrics(tmp_path / "runs" / "sac"))
