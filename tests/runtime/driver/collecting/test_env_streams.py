"""With auto_reset a ticket continues where its env's ticket before ended, also over an evaluation, a stop, a fault and
a dead worker; whatever has to be played again gives the same numbers."""

from __future__ import annotations

from pathlib import Path

import fragile
import numpy as np
import pytest
import torch
from attrs import evolve
from scripted_runs import advance, scripted_spec, weights_in

from vla_rl.core.declarations import EnvPlugin
from vla_rl.core.spec.spec import parse_spec
from vla_rl.runtime.messages.requests import EnvError, EpisodeRequest
from vla_rl.runtime.start import start
from vla_rl.runtime.workers.env.episodes import Episodes
from vla_rl.testing.scripted import ScriptedConfig, ScriptedEnv, read_stamp

SEGMENTS = {"episodes": None, "auto_reset": {"steps": 4}, "group_size": 1}
LONG = {"length": 7, "max_steps": 9}
"""Neither an episode nor its limit is a multiple of a segment, or of a chunk."""
STREAMS = {"rollout": SEGMENTS, "env": LONG, "algorithm": {"type": "ppo"}}
APART = {"runtime": {"backend": "ray"}, "placement": {"type": "disaggregated"}}


class Drifting(ScriptedEnv):
    """Env whose rewards are never the same twice."""

    rewards = 0.0

    def chunk_step(self, actions, active, stop_at_end):
        Drifting.rewards += 0.01
        result = super().chunk_step(actions, active, stop_at_end)
        return evolve(result, rewards=result.rewards + np.float32(Drifting.rewards) * result.executed)


class Honest(Drifting):
    """And says so."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.info = evolve(self.info, deterministic=False)


def building(env):
    def build(config, context):
        return env(context.num_envs, chunk=context.chunk, first_env=context.first_env, length=9, max_steps=9)

    return EnvPlugin(config=ScriptedConfig, build=build, summary="an env that cannot be repeated")


vla_rl_plugins = {"env": {"drifting": building(Drifting), "honest": building(Honest)}}


def assert_same(folder, one, other):
    first, second = weights_in(folder / one), weights_in(folder / other)
    assert all(torch.equal(first[name], second[name]) for name in first)


# ------------------------------------------------------------------------------------------------------ one env's envs


def draw(ticket, episode):
    return evolve(ticket, episode=episode, state=ENV.reset_states("train")[8 * episode + ticket.env_id])


ENV = ScriptedEnv(3, max_steps=9, length=7, chunk=2)


def segments(mode, count=4, left=()):
    """Envs 4 to 6 of a run play `count` tickets each, of 2 chunk steps. -> (what the policy saw, the tickets)."""
    env = ScriptedEnv(3, max_steps=9, length=7, chunk=2, first_env=4)
    episodes = Episodes(
        env,
        name="scripted",
        seed=7,
        chunk=2,
        first_env=4,
        auto_reset=mode,
        chunk_steps=2,
        draw=draw,
        bootstrap="truncated",
    )
    states, shown, finished = env.reset_states("train"), [], []
    tickets = [
        EpisodeRequest(state=states[env_id], number=env_id, env_id=env_id, actions=np.zeros((0, 2, 2), np.float32))
        for env_id in (4, 5, 6)
    ]
    for number in range(count):
        episodes.clear_tickets()
        if number in left:
            episodes.streams.forget_all_observations()
        request = episodes.step(None, tickets)
        done = []
        while not request.done:
            keys = (*request.asking[2:5], read_stamp(request.obs).step)
            assert request.obs.steps.tolist() == read_stamp(request.obs).step.tolist()
            shown += zip(*(key.tolist() for key in keys), strict=True)
            request = episodes.step(np.full((len(request.positions), 2, 2), 0.25, np.float32))
            done += request.finished
        finished += done
        tickets = [evolve(ticket.after, number=ticket.number + 8, follows=ticket.number) for ticket in done]
    return shown, finished


@pytest.mark.parametrize("mode", ["immediate", "deferred"])
@pytest.mark.parametrize("left", [(), (1, 2, 3)])
def test_a_ticket_continues_where_the_one_before_ended(mode, left):
    shown, finished = segments(mode, left=left)
    of_env = [(episode, chunk, step) for env_id, episode, chunk, step in shown if env_id == 5]
    assert of_env == [(0, 0, 0), (0, 1, 2), (0, 2, 4), (0, 3, 6), (1, 0, 0), (1, 1, 2), (1, 2, 4), (1, 3, 6)]
    ended = [(e.number, e.episode, e.steps) for ticket in finished for e in ticket.episodes if e.number == 5]
    assert ended == [(5, 0, 7), (5, 1, 7)]


def test_the_observation_is_that_at_which_the_env_stands():
    """Played on, or played again."""
    assert segments("immediate")[0] == segments("immediate", left=(1, 2, 3))[0]


# --------------------------------------------------------------------------------------------------------------- runs


def test_episodes_are_longer_than_a_ticket(train):
    _, metrics = train(**STREAMS, train={"steps": 6})
    lengths = [line["env/episode_length"] for line in metrics if "env/episode_length" in line]
    assert lengths == [7.0] * 3
    assert not any("env/success_rate" in line for line in metrics if line.get("rollout/episodes") == 0)


def test_an_evaluation_between_changes_no_number(train, tmp_path):
    _, calm = train("calm", **STREAMS, train={"steps": 6}, eval={"before": False})
    _, other = train("other", **STREAMS, train={"steps": 6}, eval={"before": False, "every": 1})
    assert_same(tmp_path, "calm", "other")
    losses = [[line["loss/total"] for line in lines if "loss/total" in line] for lines in (calm, other)]
    assert losses[0] == losses[1]
    again = [line.get("rollout/replayed_steps", 0) for line in other if "loss/total" in line]
    assert again == [0, 8 * 4, 0, 8 * 4, 0, 8 * 4], "an episode of 7 steps has 4 behind it, or ends with the ticket"


@pytest.mark.parametrize("lag", [0, 2])
def test_a_resumed_run_continues(train, tmp_path, lag):
    changes = {**STREAMS, "rollout": {**SEGMENTS, "lag": lag, "task_sampling": {"type": "weighted"}}}
    train("whole", **changes, train={"steps": 5, "checkpoint_every": 1})
    train("parts", **changes, train={"steps": 3, "checkpoint_every": 1})
    train("parts", resume=True, **changes, train={"steps": 5, "checkpoint_every": 1})
    assert_same(tmp_path, "whole", "parts")


@pytest.mark.parametrize("at_step", [35, 38, 46])
def test_a_fault_changes_no_number(train, tmp_path, at_step):
    plugins = ["vla_rl.testing.scripted", "vla_rl.testing.slot_placement", str(Path(fragile.__file__))]
    env = {"type": "fragile", "num_envs": 2, "told": str(tmp_path / "told"), "processes": {"deadline_s": 2.0}}
    rollout = {**SEGMENTS, "auto_reset": {"steps": 3}, "chunk": 1}
    changes = {"plugins": plugins, "rollout": rollout, "algorithm": {"type": "ppo"}}
    _, calm = train("calm", env=env, **changes, train={"steps": 5})
    fault = {**env, "fault": "raise", "at_step": at_step}
    results, broken = train("broken", env=fault, **changes, train={"steps": 5})
    assert results["faults"] == 1
    assert_same(tmp_path, "calm", "broken")
    losses = [[line["loss/total"] for line in lines if "loss/total" in line] for lines in (calm, broken)]
    assert losses[0] == losses[1]


@pytest.mark.ray
def test_pinned_weights_give_the_run_that_is_simulated(train, tmp_path):
    """Also with evaluations between, after which streams are played again."""
    steps = {"train": {"steps": 6}, "algorithm": {"type": "gipo"}, "env": {**LONG, "num_envs": 6}}
    train("simulated", rollout={**SEGMENTS, "lag": 1}, **steps)
    uneven = {**steps["env"], "latency_s": 0.004, "latency_sigma": 1.0}
    asynchrony = {"max_lag": {"pinned": 1}}
    train("ahead", rollout=SEGMENTS, asynchrony=asynchrony, **{**steps, "env": uneven}, eval={"every": 2}, **APART)
    assert_same(tmp_path, "simulated", "ahead")


def test_a_simulator_that_is_not_deterministic_is_found_out(train):
    with pytest.raises(EnvError, match=r"env 'drifting' is not deterministic: chunk 2 of 2 .*EnvInfo\(deterministic=F"):
        train(
            plugins=["vla_rl.testing.scripted", __file__],
            env={"type": "drifting", "num_envs": 2},
            rollout=SEGMENTS,
            algorithm={"type": "ppo"},
            eval={"every": 1, "episodes_per_task": 1},
        )


def test_streams_that_cannot_be_played_again_restart(train):
    _, metrics = train(
        plugins=["vla_rl.testing.scripted", __file__],
        env={"type": "honest", "num_envs": 2},
        rollout=SEGMENTS,
        algorithm={"type": "ppo"},
        eval={"before": False, "every": 1, "episodes_per_task": 1},
    )
    assert [line.get("rollout/restarted_streams", 0) for line in metrics if "loss/total" in line] == [0, 2, 2, 2]
    assert not any("rollout/replayed_steps" in line for line in metrics)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_long_task_is_learned_from_short_segments(seed):
    """What pays is 96 actions after the reset, and a ticket has 32: after fresh resets it would never be seen."""
    train = {"steps": 20, "lr": 3e-2, "micro_batch": 128, "global_batch": None, "epochs": 2}
    long, rollout = (
        {"num_envs": 32, "length": 96, "max_steps": 96},
        {**SEGMENTS, "chunk": 8, "auto_reset": {"steps": 32}},
    )
    ppo = {"type": "ppo", "gamma": 1.0, "lam": 1.0}
    runtime = start(parse_spec(scripted_spec(seed=seed, env=long, rollout=rollout, algorithm=ppo, train=train)))
    try:
        rollouts = [advance(runtime, step)[0] for step in range(1, 21)]
        success = runtime.workers.evaluate(20).success.rate
    finally:
        runtime.workers.close()
    assert [len(rollout.episodes) for rollout in rollouts] == [0, 0, 32] * 6 + [0, 0]
    assert success >= 0.95
