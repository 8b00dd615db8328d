"""Practice in a world model: what it trains on, what it is refused for, when it pauses, and that a run that was killed
gives the same numbers."""

from __future__ import annotations

import json
import math
import random
import signal
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from imagination_runs import EDM, ORACLE, practise, small
from PIL import Image
from recorded_episodes import recorder, tabletop
from scripted_runs import read_metrics, weights_in

from vla_rl import SpecError, UserError
from vla_rl.cli.report.gather import read_report_data
from vla_rl.cli.report.page import render_report as render
from vla_rl.core.events import Run
from vla_rl.core.interrupts import RunStopped, StopRequested
from vla_rl.core.run.shape import RunShape
from vla_rl.core.spec.spec import parse_spec
from vla_rl.core.types import Advantages, ResetState
from vla_rl.plugins.hooks.console.screen import step_line
from vla_rl.plugins.hooks.console.status import Status
from vla_rl.runtime.checks.run import check_spec
from vla_rl.runtime.driver.collecting.assembler import joined_advantages
from vla_rl.runtime.imagination.worker.episode_store import EpisodeStore
from vla_rl.runtime.imagination.worker.imagined_envs import ImaginedEnvs
from vla_rl.runtime.imagination.worker.world_model_worker import GAP, WorldModelWorker, limit_steps, spare_of
from vla_rl.runtime.messages.requests import EpisodeRequest
from vla_rl.runtime.workers.added_roles import RoleContext

WORLDS = pytest.mark.parametrize("world", [ORACLE, EDM], ids=["oracle", "edm"])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """World model -> (folder, results, metrics) of an undisturbed run."""
    found = {}
    for world in (ORACLE, EDM):
        folder = tmp_path_factory.mktemp(world["type"])
        found[world["type"]] = (folder, *practise(folder, world_model=world))
    return found


def steps_of(metrics) -> dict[int, dict]:
    return {line["step"]: line for line in metrics if "world_model/updates" in line}


@WORLDS
def test_the_policy_practises_after_the_warm_start(whole, world) -> None:
    _, results, metrics = whole[world["type"]]
    steps = steps_of(metrics)
    assert [steps[n]["imagination/paused"] for n in (1, 2, 3, 4)] == [1, 0, 0, 0]
    assert "imagination/episodes" not in steps[1] and steps[3]["imagination/episodes"] == 32
    assert steps[1]["world_model/updates"] == 2, "fitted in the warm start too"
    practice = results["imagination"]
    assert (
        practice["imagined_episodes"] == 96
        and practice["fit_updates"] == steps[4]["world_model/updates"]
        and practice["paused_steps"] == 1
    )
    assert practice["tickets"] == {"step": 3, "first": 96, "trained": 96, "filtered": 0, "discarded": 0}
    assert results["env_steps"] == sum(step["rollout/env_steps"] for step in steps.values()), "real ones only"
    assert practice["imagined_steps"] == sum(step.get("imagination/env_steps", 0) for step in steps.values()) > 0
    assert results["tickets"]["trained"] == 64


def test_with_the_oracle_the_policy_succeeds_as_often_as_it_did(whole) -> None:
    """From the same first frames and with other draws: the gap is what chance makes of it."""
    _, _, metrics = whole["oracle"]
    for step in steps_of(metrics).values():
        assert step["imagination/over_estimation_low"] <= 0 <= step["imagination/over_estimation_high"]
        assert step["world_model/state_mae/1"] == 0


@WORLDS
def test_what_is_imagined_is_trained_on(whole, tmp_path, world) -> None:
    """The same run whose warm start never ends has the same real rollout, and other weights after."""
    _, _, metrics = whole[world["type"]]
    real_only = {"imagination": {"warm_start": 9}, "train": {"steps": 2}}
    practise(tmp_path / "real", world_model=world, **real_only)
    practise(tmp_path / "both", world_model=world, train={"steps": 2})
    real, both = (steps_of(read_metrics(tmp_path / name)) for name in ("real", "both"))
    assert real[1] == both[1] == steps_of(metrics)[1]
    assert real[2]["env/return"] == both[2]["env/return"]
    assert both[2]["update/samples"] > real[2]["update/samples"]
    one, other = (weights_in(tmp_path / name) for name in ("real", "both"))
    assert any(not torch.equal(one[name], other[name]) for name in one)


@WORLDS
def test_images_of_what_it_imagines_are_in_the_run_folder(whole, world) -> None:
    folder, _, _ = whole[world["type"]]
    images = sorted((folder / "imagined").glob("update_*.png"))
    assert len(images) == 2
    pixels = np.asarray(Image.open(images[-1]))
    across, pair = (16 * 2 + 2 * GAP) * 5, 2 * (16 + GAP) + 3 * GAP
    assert pixels.shape[1:] == (across, 3), "two cameras, the first frame and four chunks"
    assert pixels.shape[0] % pair == 0, "recorded above imagined, and a band below each pair"
    if world is ORACLE:
        pairs = pixels.reshape(-1, pair, across, 3)
        recorded, imagined = pairs[:, : 16 + GAP], pairs[:, 16 + GAP : 2 * (16 + GAP)]
        assert np.array_equal(recorded, imagined)
        assert recorded[:, :16, :16].std() > 0


# ---------------------------------------------------------------------------------------------------------- resume


@WORLDS
def test_a_resumed_run_gives_the_same_numbers(whole, tmp_path, world) -> None:
    """From step 3; by then older episodes were overwritten."""
    folder, results, metrics = whole[world["type"]]
    practise(tmp_path, world_model=world, train={"steps": 3})
    again, resumed = practise(tmp_path, True, world_model=world)
    assert steps_of(resumed) == steps_of(metrics)
    assert without_seconds(again) == without_seconds(results)
    for name, weights in weights_in(folder).items():
        assert torch.equal(weights, weights_in(tmp_path)[name])
    one, other = (
        torch.load(f / "checkpoints/last/trainer/world_model.pt", weights_only=True) for f in (folder, tmp_path)
    )
    for name, weights in one["weights"].items():
        assert torch.equal(weights, other["weights"][name])


def without_seconds(results) -> dict:
    return {name: value for name, value in results["imagination"].items() if name != "fit_seconds"}


@pytest.mark.parametrize(("world", "where"), [(ORACLE, "_measure_model"), (EDM, "draw_starts")], ids=["oracle", "edm"])
def test_a_stop_in_the_midst_of_practice_saves_what_the_last_step_left(
    whole, tmp_path, monkeypatch, world, where
) -> None:
    """When the world model is fitted already, and episodes are recorded."""
    _, results, metrics = whole[world["type"]]
    calls, original = [0], getattr(WorldModelWorker, where)

    def stops(self, *arguments):
        calls[0] += 1
        if calls[0] == (2 if where == "draw_starts" else 3):
            raise StopRequested
        return original(self, *arguments)

    stops.__name__, stops.remote = where, getattr(original, "remote", None)
    with monkeypatch.context() as patch:
        patch.setattr(WorldModelWorker, where, stops)
        with pytest.raises(RunStopped, match="saved in"):
            practise(tmp_path, world_model=world)
    again, resumed = practise(tmp_path, True, world_model=world)
    assert steps_of(resumed) == steps_of(metrics)
    assert without_seconds(again) == without_seconds(results)


@pytest.mark.slow
@WORLDS
def test_killed_at_three_moments_and_resumed_equals_never_killed(whole, tmp_path, start_run, world) -> None:
    _, results, metrics = whole[world["type"]]
    parse_spec(small(world_model=world)).dump(tmp_path / "spec.yaml")
    folder, moments = tmp_path / "killed", random.Random(time.time_ns())
    command = (tmp_path / "spec.yaml", folder)
    for kill in range(3):
        again = ["--resume"] if (folder / "spec.yaml").exists() else []
        process = start_run(*command, *again)
        while process.poll() is None and not lines_of(folder) > kill:
            time.sleep(0.005)
        time.sleep(moments.random() * 0.5)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    process = start_run(*command, "--resume")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert steps_of(read_metrics(folder)) == steps_of(metrics)
    assert without_seconds(json.loads((folder / "results.json").read_text())) == without_seconds(results)


def lines_of(folder) -> int:
    file = folder / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


# ----------------------------------------------------------------------------------------------------------- gates


def test_a_model_that_is_not_good_enough_is_fitted_and_not_used(tmp_path) -> None:
    """`edm` after eight updates; the gates say why, the model learns on, and the run trains on real episodes."""
    results, metrics = practise(tmp_path, world_model=EDM, imagination={"quality_thresholds": {}})
    steps, practice = steps_of(metrics), results["imagination"]
    assert all(step["imagination/paused"] == 1 for step in steps.values())
    assert practice["paused_steps"] == 4 and practice["imagined_steps"] == 0 and practice["fit_updates"] == 8
    assert "not good enough yet on held-out episodes: " in practice["paused"]
    shut = [name for name in ("changed_pixels", "actions", "replay") if not steps[4][f"imagination/threshold_{name}"]]
    assert shut and all(name.replace("_", " ") in practice["paused"] for name in shut)


def test_imagination_pauses_while_success_is_inflated(tmp_path, monkeypatch, caplog) -> None:
    """A model that lets every chunk succeed, behind gates that are open."""
    monkeypatch.setattr(
        "vla_rl.runtime.imagination.worker.world_model_worker.thresholds_met", lambda *_: {"changed pixels": True}
    )
    monkeypatch.setattr("vla_rl.plugins.world_models.oracle.model.Oracle.outcome", succeeds)
    results, metrics = practise(tmp_path, imagination={"quality_thresholds": {}})
    steps = steps_of(metrics)
    assert steps[4]["imagination/over_estimation"] > 0.3 and steps[4]["imagination/over_estimation_low"] > 0.15
    assert all(step["imagination/paused"] == 1 for step in steps.values())
    assert "more often in the world model than in the simulator" in results["imagination"]["paused"]
    assert "imagination pauses: the policy succeeds more often" in caplog.text


def succeeds(self, windows, actions, after):
    chances = np.zeros((len(actions), 1 + 2 * actions.shape[1]), np.float32)
    chances[:, 1] = 1
    return chances


# -------------------------------------------------------------------------------------------------------- refusals


def refused(**changes) -> str:
    with pytest.raises(SpecError) as caught:
        check_spec(parse_spec(small(**changes)), training=True)
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "key", "remedy"),
    [
        ({"world_model": None}, "imagination", "give world_model"),
        ({"imagination": None}, "imagination", "remove world_model"),
        ({"rollout": {"auto_reset": {"steps": 16}, "episodes": None}}, "rollout.auto_reset", "rollout.episodes"),
        ({"rollout": {"ignore_terminations": True}}, "rollout.ignore_terminations", "set it to false"),
        ({"asynchrony": {"streaming_update": True}}, "asynchrony.streaming_update", "streaming_update: false"),
        (
            {"asynchrony": {"replay": {"uses": 2}}, "algorithm": {"type": "gipo"}},
            "asynchrony.replay",
            "leave it out",
        ),
        ({"algorithm": {"type": "grpo"}, "rollout": {"group_size": 4}}, "imagination.start", "start: first"),
        (
            {
                "algorithm": {"type": "grpo"},
                "rollout": {"group_size": 4, "max_steps": 16},
                "imagination": {"start": "first", "horizon": 3},
            },
            "imagination.horizon",
            "at least 4",
        ),
        ({"env": {"python": sys.executable}, "runtime": {"backend": "ray"}}, "env.python", "remove it"),
        (
            {"imagination": {"max_over_estimation": 0.3}},
            "imagination.max_over_estimation",
            "now quality_thresholds: {max_over_estimation: ...}",
        ),
        ({"world_model": {"type": "edn"}}, "world_model.type", "edm"),
        ({"imagination": {"horizont": 3}}, "imagination.horizont", "horizon"),
    ],
)
def test_it_is_refused_with_a_remedy(changes, key, remedy) -> None:
    text = refused(**changes)
    assert f"{key}: " in text and remedy in text


def test_a_short_horizon_without_a_critic_is_refused_once_episodes_are_known(tmp_path) -> None:
    groups = {"algorithm": {"type": "grpo"}, "rollout": {"group_size": 4}}
    with pytest.raises(SpecError, match="3 chunks end before an episode of 4 does; give at least 4"):
        practise(tmp_path, imagination={"start": "first", "horizon": 3}, **groups)


def test_groups_are_imagined_from_one_window(tmp_path) -> None:
    """GRPO, whole episodes: filters and advantages as of real groups."""
    groups = {"algorithm": {"type": "grpo"}, "rollout": {"group_size": 4}}
    results, metrics = practise(tmp_path, imagination={"start": "first"}, train={"steps": 2}, **groups)
    assert steps_of(metrics)[2]["imagination/episodes"] == 32
    tickets = results["imagination"]["tickets"]
    assert sum(tickets[end] for end in ("trained", "filtered", "discarded")) == 32 and tickets["filtered"] % 4 == 0


def test_a_world_model_of_other_images_is_refused(tmp_path) -> None:
    with pytest.raises(UserError, match=r"oracle.*cameras.*64.*keys"):
        practise(tmp_path, world_model={**ORACLE, "keys": []})


def test_a_buffer_that_does_not_fit_is_refused_before_anything_is_played(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=10**6, total=10**9))
    with pytest.raises(UserError, match="record fewer episodes"):
        practise(tmp_path, imagination={"buffer": 1000})
    assert not (tmp_path / "metrics.jsonl").exists() or not (tmp_path / "metrics.jsonl").read_text()


def test_numbers_that_are_not_finite_are_faults_of_their_envs(tmp_path, monkeypatch) -> None:
    """Such episodes are rolled out again, until there are too many faults."""
    monkeypatch.setattr("vla_rl.plugins.world_models.oracle.model.Oracle.outcome", never_finite)
    limit = {"backend": "local", "max_faults": 3}
    with pytest.raises(UserError, match=r"broke 4 times \(runtime.max_faults: 3\).*\n.*not finite"):
        practise(tmp_path, runtime=limit)


def never_finite(self, windows, actions, after):
    return np.full((len(actions), 1 + 2 * actions.shape[1]), np.nan, np.float32)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("placement", [{"type": "collocated", "workers": 1}, {"type": "disaggregated"}])
def test_on_ray_it_gives_the_same_numbers(whole, tmp_path, placement) -> None:
    _, results, metrics = whole["edm"]
    again, found = practise(tmp_path, world_model=EDM, runtime={"backend": "ray"}, placement=placement)
    assert steps_of(found) == steps_of(metrics)
    assert without_seconds(again) == without_seconds(results)


# ----------------------------------------------------------------------------------------------------------- parts


def test_advantages_of_two_sources_stand_side_by_side() -> None:
    one = Advantages(advantages=torch.ones(2, 3), weights=torch.ones(2, 3), metrics={"a": 1.0})
    other = Advantages(advantages=torch.full((1, 2), 5.0), weights=torch.ones(1, 2), metrics={"b": 2.0})
    both = joined_advantages(one, other)
    assert both.advantages.tolist() == [[1, 1, 1, 5, 5], [1, 1, 1, 0, 0]]
    assert both.divisors[0].sum() == 8 and both.returns is None and both.metrics == {"b": 2.0}


def test_room_for_episodes_between_two_checkpoints() -> None:
    spec = parse_spec(small())
    assert spare_of(spec) == 2 * 16 + 16, "two steps, and one that is not over"
    assert spare_of(parse_spec(small(train={"checkpoint_every": 100}))) == 32 + 16, "never more than the buffer"


def test_the_step_limit_of_the_spec_is_that_of_the_world_model() -> None:
    info = tabletop(1).info
    assert limit_steps(info, None) == info
    assert {task.max_steps for task in limit_steps(info, 8).tasks} == {8}


def test_measured_episodes_are_half_successes_where_there_are_as_many(tmp_path) -> None:
    made: EpisodeStore = recorder(tmp_path, 96)
    held = made.start_windows("first", held_out=True)
    outcomes = made.read_windows(np.array([s.id for s in held]), history=1, rollout=4).outcomes.max(1)
    wins = int(((outcomes > 0) & (outcomes <= 4)).sum())
    few = min(wins, len(held) - wins)
    assert few >= 2, "both kinds are there"
    chosen = made.read_windows(made.held_out(2 * few), history=1, rollout=4).outcomes.max(1)
    assert ((chosen > 0) & (chosen <= 4)).sum() == few and len(chosen) == 2 * few
    assert len(made.held_out(1000)) == len(held)
    assert math.isclose(len(held) / 96, 0.2, abs_tol=0.12)


def test_envs_refuse_tickets_of_another_version_of_the_world_model(tmp_path) -> None:
    spec = parse_spec(small())
    context = RoleContext(
        spec=spec,
        info=tabletop(1).info,
        device="cpu",
        wrappers=(),
        bootstrap="truncated",
        heartbeat=lambda: None,
        stop_requested=lambda: False,
    )
    practice = WorldModelWorker(context, tmp_path)
    env_ids = ImaginedEnvs(practice, {0: 2}, bootstrap="truncated")
    start = EpisodeRequest(state=ResetState(id=0, task="pick_red"), number=7, world=1)
    with pytest.raises(RuntimeError, match="ticket 7 is of world model version 1, not 0"):
        env_ids.begin(0, "imagination", [start])


def test_what_is_imagined_counts_among_what_learners_hold() -> None:
    spec = parse_spec(small(asynchrony={"max_lag": 2}))
    assert RunShape.from_spec(spec).groups_held == 3 * 16 + 2 * 16
    assert (
        RunShape.from_spec(parse_spec(small(asynchrony={"max_lag": 2}, imagination=None, world_model=None))).groups_held
        == 3 * 16
    )


# ---------------------------------------------------------------------------------------------------------- report


def test_the_report_shows_imagined_next_to_real_episodes(whole) -> None:
    folder, results, _ = whole["oracle"]
    page = render(read_report_data(folder), 0)
    assert "<h2>Imagination</h2>" in page and 'class="strip"' in page
    assert f"{results['env_steps']:,}" in page and f"{results['imagination']['imagined_steps']:,}" in page
    assert 'aria-label="success over-estimation"' in page
    chart = page.partition('aria-label="success over-estimation"')[2].partition("</svg>")[0]
    assert 'class="band"' in chart and 'class="line"' in chart


def test_the_report_says_why_nothing_is_imagined(tmp_path) -> None:
    practise(tmp_path, world_model=EDM, imagination={"warm_start": 3}, train={"steps": 2})
    page = render(read_report_data(tmp_path), 0)
    assert "2 of 2" in page and "imagination.warm_start" in page


def test_the_console_says_what_was_imagined(whole) -> None:
    _, _, metrics = whole["oracle"]
    status = Status(Run(name="a", mode="training", folder=None, spec={}, first_step=0, steps=4, devices=""))
    for step, said in ((1, "imagination paused"), (2, "32 episodes imagined")):
        status.note_update(step, {**steps_of(metrics)[step], "time/step": 1.0})
        assert said in step_line(status)
