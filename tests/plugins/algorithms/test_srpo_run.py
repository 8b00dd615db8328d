"""SRPO in the real runtime: frames of training episodes become features, features become rewards and files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from PIL import Image

from vla_rl.core.contexts import EnvContext
from vla_rl.core.declarations import EnvPlugin
from vla_rl.core.errors import PluginError, SpecError, UserError
from vla_rl.core.events import Run
from vla_rl.core.run.flow import Ticket
from vla_rl.core.run.loop import collect_rollout, flow_of
from vla_rl.core.run.state import State
from vla_rl.core.spec.spec import load_spec, parse_spec
from vla_rl.core.types import Observation, to_numpy
from vla_rl.plugins.algorithms.srpo import srpo_report
from vla_rl.plugins.algorithms.srpo.config import ReportConfig
from vla_rl.plugins.algorithms.srpo.impl import SRPO
from vla_rl.runtime.comm.interfaces import EnvInterface
from vla_rl.runtime.placement.components import build_algorithm
from vla_rl.runtime.start import run, start
from vla_rl.runtime.workers.env.episodes import Episodes
from vla_rl.testing.scripted import ScriptedConfig, ScriptedEnv

EXAMPLE = Path(__file__).parents[3] / "examples" / "tabletop_srpo.yaml"
SHORT = [
    "env.num_envs=8",
    "rollout.episodes=16",
    "rollout.group_size=4",
    "rollout.max_steps=12",
    "algorithm.frames=4",
    "algorithm.image_size=32",
    "train.steps=2",
    "train.epochs=1",
    "train.checkpoint_every=0",
    "eval={before: false, episodes_per_task: 1}",
    "hooks=[{type: jsonl}, {type: srpo_report}]",
    "plugins=[vla_rl.testing.slot_placement]",
    "placement={type: slots}",
]
SCRIPTED = {
    "name": "srpo",
    "plugins": ["vla_rl.testing.scripted", __file__],
    "model": {"type": "linear"},
    "env": {"type": "scripted", "num_envs": 8, "stamp": True},
    "rollout": {"chunk": 3, "episodes": 16, "group_size": 4},
    "algorithm": {"type": "srpo", "encoder": "tiny", "frames": 4, "image_size": 32},
    "runtime": {"backend": "local"},
    "train": {"steps": 2, "lr": 1e-4, "micro_batch": 64},
}


ALGORITHMS: dict[str, Any] = {"grpo": {"type": "grpo"}, "srpo": SCRIPTED["algorithm"]}


class Blind(ScriptedEnv):
    """Without cameras."""

    def __init__(self, config: ScriptedConfig, context: EnvContext) -> None:
        super().__init__(context.num_envs, chunk=context.chunk)
        self.info = evolve(self.info, cameras={})

    def _make_observation(self, env_ids: Any) -> Observation:
        return evolve(super()._make_observation(env_ids), images={})


class Brittle(ScriptedEnv):
    """SingleEnv 2 breaks once, after the first chunk of its first episode."""

    def __init__(self, config: ScriptedConfig, context: EnvContext) -> None:
        super().__init__(context.num_envs, chunk=context.chunk)
        self.due = True

    def faults(self) -> dict[int, list[str]]:
        if not self.due or not self._step[2]:
            return {}
        self.due = False
        return {2: ["broke"]}


vla_rl_plugins = {
    "env": {
        "blind": EnvPlugin(config=ScriptedConfig, build=Blind, summary="no cameras"),
        "brittle": EnvPlugin(config=ScriptedConfig, build=Brittle, summary="breaks once"),
    }
}


def metrics_of(folder: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "throughput/"))} for line in lines]


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    folder = tmp_path_factory.mktemp("local") / "run"
    run(load_spec(EXAMPLE, [*SHORT, "runtime.backend=local"]), folder, resume=False)
    return folder


# ------------------------------------------------------------------------------------------------------ frames


def play(runtime):
    """The tickets of the first step. -> (rollout, which are kept, metrics)."""
    return collect_rollout(runtime, flow_of(runtime.spec, State()), 1)


def recorded(monkeypatch, **changes) -> tuple[Any, tuple[Any, ...]]:
    """A rollout of the scripted simulator, and the frames of its trajectories, column by column."""
    spec = parse_spec({**SCRIPTED, **changes})
    films: list[Any] = []
    monkeypatch.setattr(SRPO, "features", lambda self, frames: films.extend(frames) or torch.ones(len(frames), 2))
    runtime = start(spec)
    try:
        rollout, *_ = play(runtime)
    finally:
        runtime.workers.close()
    return rollout, tuple(films)


def test_every_trajectory_has_its_own_frames(monkeypatch):
    rollout, frames = recorded(monkeypatch)
    assert len(frames) == rollout.valid.shape[1] == 16
    shown = set()
    for film, task in zip(frames, rollout.tasks, strict=True):
        env, episode, step, state = (film[:, 0, i].astype(int) @ [1, 256, 65536] for i in range(4))
        assert len(set(env)) == len(set(episode)) == 1
        shown.add((env[0], episode[0]))
        assert step.tolist() == [0, 3, 4], "the first observation and one after each chunk, to the end at step 4"
        assert task == f"task-{state[0] % 2}"
    assert shown == {(env, episode) for env in range(8) for episode in range(2)}


def test_a_row_that_broke_shows_its_second_try_only(monkeypatch):
    rollout, films = recorded(monkeypatch, env={"type": "brittle", "num_envs": 8})
    assert [len(film) for film in films] == [3] * 16
    shown = {env: sorted(film[0, 0, 1, 0] for film in films if film[0, 0, 0, 0] == env) for env in (2, 3)}
    assert shown == {2: [1, 2], 3: [0, 1]}, "resets of each env, of which that of number 0 was for nothing in env 2"
    assert all((film[:, 0, 1, 0] == film[0, 0, 1, 0]).all() for film in films)
    assert (rollout.valid.sum((0, 2)) == 4).all()


@pytest.mark.parametrize("algorithm", ["grpo", "srpo"])
def test_frames_are_recorded_only_for_who_needs_them(algorithm, monkeypatch):
    step, asked = Episodes.step, []

    def watched(self, actions=None, tickets=()):
        asked.extend(ticket.record for ticket in tickets)
        return step(self, actions, tickets)

    monkeypatch.setattr(Episodes, "step", watched)
    runtime = start(parse_spec({**SCRIPTED, "algorithm": ALGORITHMS[algorithm]}))
    try:
        rollout, *_ = play(runtime)
    finally:
        runtime.workers.close()
    assert asked == [algorithm == "srpo"] * 16
    assert (rollout.features is None) == (algorithm == "grpo")


def test_the_algorithm_chooses_the_camera(monkeypatch):
    table = {
        "env": {"type": "tabletop", "num_envs": 8},
        "model": {"type": "openvla_oft", "checkpoint": "builtin:tabletop"},
        "rollout": {"chunk": 4, "episodes": 8, "group_size": 4},
    }

    def first_frames(**keys: Any) -> list[np.ndarray[Any, Any]]:
        _, films = recorded(monkeypatch, **table, algorithm={**SCRIPTED["algorithm"], **keys})
        return sorted((film[0] for film in films), key=lambda image: image.tobytes())

    runtime = start(parse_spec({**SCRIPTED, **table}))
    try:
        tickets = [runtime.rollouts.requests.build_request(Ticket(number, number // 4), 1, 0) for number in range(8)]
        seen = runtime.fleet.get(runtime.fleet.sims[0].call(EnvInterface.begin, 0, "action", tickets)).obs.images
    finally:
        runtime.workers.close()
    for keys, camera in (({}, "overhead"), ({"camera": "wrist"}, "wrist"), ({"camera": "overhead"}, "overhead")):
        wanted = sorted((to_numpy(image) for image in seen[camera]), key=lambda image: image.tobytes())
        np.testing.assert_array_equal(first_frames(**keys), wanted)


def test_the_algorithm_learns_of_its_workers_device():
    assert build_algorithm(parse_spec(SCRIPTED), "cuda:3").device == "cuda:3"


def test_wrong_features_are_refused(monkeypatch):
    wrong = iter([None, torch.ones(8), torch.ones(7, 4), torch.ones(8, 4).double(), torch.full((8, 4), torch.nan)])
    monkeypatch.setattr(SRPO, "features", lambda self, frames: next(wrong))
    for _ in range(5):
        runtime = start(parse_spec(SCRIPTED))
        with pytest.raises(PluginError, match="the algorithm's features are"):
            play(runtime)
        runtime.workers.close()


# -------------------------------------------------------------------------------------------------------- runs


def test_a_run_shapes_rewards(local):
    first, second, _ = metrics_of(local)
    for line in (first, second):
        assert 0 < line["srpo/shaped"] < 1 and 0 < line["srpo/reward"] < 0.6 and line["srpo/distance"] > 0
    weights = [value for name, value in second.items() if name.startswith("sampling/weight/")]
    assert len(weights) == 8 and sum(weights) == 8 + round(16 * (1 - first["env/success_rate"]))


@pytest.mark.ray
def test_ray_with_a_worker_for_every_role_equals_local(local, tmp_path):
    run(load_spec(EXAMPLE, SHORT), tmp_path / "ray", resume=False)
    for expected, got in zip(metrics_of(local), metrics_of(tmp_path / "ray"), strict=True):
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            assert got[name] == pytest.approx(value, abs=2e-3), name
    for step in (1, 2):
        expected, got = (np.load(folder / "srpo" / f"step_{step:06d}.npz") for folder in (local, tmp_path / "ray"))
        assert (got["task"] == expected["task"]).all() and (got["success"] == expected["success"]).all()
        np.testing.assert_allclose(got["embedding"], expected["embedding"], atol=1e-4)


# ------------------------------------------------------------------------------------------------------- files


def test_the_report_holds_what_was_measured(local):
    files = sorted(path.name for path in (local / "srpo").iterdir())
    assert files == ["step_000001.npz", "step_000001.png", "step_000002.npz", "step_000002.png"]
    saved = np.load(local / "srpo" / "step_000002.npz")
    assert saved["embedding"].shape == (16, 72) and saved["embedding"].any(1).all()
    shaped = ~np.isnan(saved["distance"])
    assert shaped.any() and not saved["success"][shaped].any()
    sigmoid = 0.6 / (1 + np.exp(-10 * (0.5 - saved["normalized_distance"][shaped])))
    np.testing.assert_allclose(saved["reward"][shaped], sigmoid)
    assert len(set(saved["group"])) == 4 and saved["task"].shape == (16,)
    with Image.open(local / "srpo" / "step_000002.png") as image:
        assert len(set(image.convert("RGB").resize((200, 150)).getdata())) > 50, "axes, points and a legend"


def test_the_keys_of_the_report_count(tmp_path):
    from vla_rl.testing import synthetic

    about = Run(name="r", folder=tmp_path, spec={}, first_step=0, steps=4, mode="training")
    report = srpo_report.build(ReportConfig(every=2, plot=False))
    for step in (1, 2, 3, 4):
        report.on_rollout_end(about, step, synthetic.rollout(features=3), {})
    assert sorted(path.name for path in (tmp_path / "srpo").iterdir()) == ["step_000002.npz", "step_000004.npz"]


# --------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"env": {"type": "blind", "num_envs": 8}}, "looks at the frames of episodes, and env 'blind' has no cameras"),
        (
            {"algorithm": {"type": "srpo", "encoder": "tiny", "camera": "nose"}},
            "camera 'nose', and env 'scripted' has none of that name; it has: ",
        ),
        ({"algorithm": {"type": "srpo", "encoder": "/nowhere/vjepa2"}}, "hf download facebook/vjepa2"),
        (
            {"algorithm": {"type": "grpo"}, "hooks": [{"type": "srpo_report"}]},
            "reports on algorithm 'srpo', and this run has 'grpo'",
        ),
        ({"rollout": {"chunk": 3, "auto_reset": {"steps": 6}, "group_size": 4}}, "without rollout.auto_reset"),
        ({"rollout": {"chunk": 3, "episodes": 16, "group_size": 1}}, "rollout.group_size >= 2"),
    ],
)
def test_a_run_that_cannot_be_is_refused_before_it_starts(changes, message, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match=message):
        run(parse_spec({**SCRIPTED, **changes}), tmp_path / "run", resume=False)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_evaluation_needs_no_encoder():
    start(parse_spec({**SCRIPTED, "algorithm": {"type": "srpo", "encoder": "/nowhere/vjepa2"}})).workers.close()


def test_the_encoder_has_to_be_named():
    with pytest.raises(SpecError, match="algorithm.encoder"):
        parse_spec({**SCRIPTED, "algorithm": {"type": "srpo"}})
