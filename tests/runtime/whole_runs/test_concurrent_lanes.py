"""Lanes of envs that step at the same time: the same numbers, no lane waits for a slow env, and what breaks is
named."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path

import fragile
import pytest
import torch
import waiting_env
from chrome_trace import check_chrome
from scripted_runs import read_metrics, scripted_spec, weights_in

from vla_rl.cli.report.timeline import draw_timelines
from vla_rl.core.errors import SpecError
from vla_rl.core.spec.spec import parse_spec
from vla_rl.runtime.checks.run import check_spec
from vla_rl.runtime.comm.backend import CallHung
from vla_rl.runtime.driver.reports.trace import LANE_THREADS
from vla_rl.runtime.planning.profile import from_trace
from vla_rl.runtime.start import run
from vla_rl.testing.scripted import SimulatorFault

RAY = {"runtime": {"backend": "ray"}}
ENVS = {**RAY, "placement": {"type": "disaggregated", "lanes": "envs"}}
UNEVEN = {"env": {"independent_envs": True, "latency_s": 0.004, "latency_sigma": 1.0}}
SHORT = {"train": {"steps": 2}, "eval": {"before": False, "episodes_per_task": 4}}
WAITING = ["vla_rl.testing.scripted", str(Path(waiting_env.__file__))]


@pytest.fixture(scope="module")
def lock_step(tmp_path_factory):
    """(metrics, weights) of the scripted spec in one process: all envs step and wait together."""
    folder = tmp_path_factory.mktemp("lock-step") / "run"
    run(parse_spec(scripted_spec()), folder, False)
    return read_metrics(folder), weights_in(folder)


def waiting(trouble, **changes):
    return {"plugins": WAITING, "env": {"type": "waiting", "num_envs": 4, "trouble": trouble, **changes}, **ENVS}


@pytest.mark.ray
@pytest.mark.parametrize(
    "placement",
    [
        {},
        {"lanes": 2, "sim_workers": 2, "batching": {"max_batch": 4, "max_wait_s": 0.005}},
        {"type": "hybrid", "sim": "cpu"},
    ],
    ids=["envs", "two envs and a window", "hybrid"],
)
def test_lanes_of_envs_give_the_numbers_of_lock_step(train, tmp_path, lock_step, placement):
    """Bit for bit, with chunk steps of random lengths; evaluations too."""
    _, metrics = train(**RAY, placement={**ENVS["placement"], **placement}, **UNEVEN)
    assert metrics == lock_step[0]
    found = weights_in(tmp_path / "run")
    assert all(torch.equal(wanted, found[name]) for name, wanted in lock_step[1].items())


@pytest.mark.ray
def test_the_trace_shows_every_lane(train, tmp_path):
    """Each has a separate thread; a worker is busy while one of its lanes is; a profile has the seconds of an env."""
    results, _ = train(**ENVS, **SHORT, env={"independent_envs": True, "num_envs": 4, "latency_s": 0.02})
    data = json.loads((tmp_path / "run" / "trace.json").read_text())
    threads = check_chrome(data)
    lanes = [events for (_, thread), events in threads.items() if thread >= LANE_THREADS]
    assert len(lanes) == 4 and all(any(name == "step" for *_, name in events) for events in lanes)
    at_once = sorted((start, -minus) for events in lanes for start, minus, name in events if name == "step")
    assert any(later < start + seconds for (start, seconds), (later, _) in pairwise(at_once))
    busy = results["roles"]["sim"]
    assert busy["busy"] + sum(busy["waits_for"].values()) == pytest.approx(1.0, abs=0.01) and busy["bubbles"] >= 0
    profile = from_trace(data)
    longest = max(seconds for _, seconds in at_once) / 1e6
    assert profile.sim.each and 0.0 < profile.sim.mean <= longest
    assert max(profile.sim.seconds) >= 0.02, "what an env sleeps"
    assert draw_timelines(data)[0][1].count("worker 0: sim") == 2, "one for each shape of screen"


@pytest.mark.ray
def test_simulators_without_a_line_answer_at_the_same_time_too(train, tmp_path, lock_step):
    """Simulators answer through Ray alone, as on another machine."""
    far = tmp_path / "far.py"
    far.write_text(
        "import os\n"
        "from vla_rl.runtime.comm import rpc_server\n"
        f"if os.getpid() != {os.getpid()}:\n"
        "    rpc_server.host_key = lambda: None\n"
        "    rpc_server.RpcServer.serve = None\n"
        "vla_rl_plugins = {}\n"
    )
    spec = waiting("wait")
    _, metrics = train(**{**spec, "plugins": [*WAITING, str(far)]})
    assert metrics == lock_step[0]


@pytest.mark.ray
def test_a_slow_env_delays_no_other(train, lock_step):
    """A reset that takes until another env has played an episode, a step that takes until this env has made one."""
    _, metrics = train(**waiting("wait"))
    assert metrics == lock_step[0]


@pytest.mark.ray
def test_the_lane_that_raises_is_named(train):
    with pytest.raises(SimulatorFault, match="the gripper fell off") as caught:
        train(**waiting("raise"))
    assert "in sim worker 0, lane 2" in caught.value.__notes__


@pytest.mark.ray
def test_the_lane_that_hangs_is_named(train):
    with pytest.raises(CallHung, match=r"sim worker 0, lane 2 \(env 'waiting'\): step has not returned for .* 12 s"):
        train(**{**waiting("hang"), "runtime": {"backend": "ray", "deadline_s": 12.0}})


@pytest.mark.ray
def test_a_worker_that_dies_with_its_lanes_is_started_again(train, tmp_path, lock_step):
    results, metrics = train(**waiting("exit", told=str(tmp_path / "told")))
    assert (tmp_path / "told").exists() and results["faults"] == 1
    assert metrics == lock_step[0]
    found = weights_in(tmp_path / "run")
    assert all(torch.equal(wanted, found[name]) for name, wanted in lock_step[1].items())


@pytest.mark.ray
def test_an_env_is_in_a_separate_process_and_may_break(train, tmp_path):
    """Each lane has one env, which by itself would live in the worker's process."""
    env = {"type": "fragile", "num_envs": 2, "fault": "kill", "at_step": 6, "processes": {"deadline_s": 20.0}}
    spec = {"plugins": ["vla_rl.testing.scripted", str(Path(fragile.__file__))], "env": env, **SHORT}
    _, calm = train("calm", **{**spec, "env": {**env, "fault": "none"}})
    results, metrics = train("lanes", **{**spec, "env": {**env, "told": str(tmp_path / "told")}}, **ENVS)
    assert results["faults"] == 1
    varying = ("faults/envs", "rollout/env_steps")
    assert [{k: v for k, v in line.items() if k not in varying} for line in metrics] == [
        {k: v for k, v in line.items() if k not in varying} for line in calm
    ]


@pytest.mark.ray
def test_demonstrations_are_played_in_all_lanes(train):
    _, metrics = train(
        **ENVS, env={"independent_envs": True}, bc_warmup={"episodes": 8, "epochs": 2, "lr": 0.01}, **SHORT
    )
    assert metrics[0]["bc_warmup/expert_success"] == 1.0 and metrics[0]["bc_warmup/samples"] >= 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({**ENVS, "runtime": {"backend": "local"}}, r"placement.lanes: one process .* use runtime.backend: ray"),
        (ENVS, "placement.lanes: the envs of env 'scripted' step as one batch .* leave lanes out, or give"),
        (
            {**ENVS, "plugins": ["vla_rl.testing.scripted", str(Path(fragile.__file__))], "env": {"type": "fragile", "processes": {"apart": False}}},
            "the envs of env 'fragile' step as one batch with these settings",
        ),
        ({"placement": {"type": "collocated", "lanes": "envs"}}, "lanes: unknown key; it is a key of disagg.*, hybrid"),
        (
            {**RAY, "placement": {"type": "disaggregated", "batching": {"max_wait_s": 0.1}}},
            r"every policy worker acts for one lane; leave it out, or give .* \(placement.lanes, or more sim workers",
        ),
        (
            {**RAY, "placement": {"type": "disaggregated", "batching": {"max_batch": 4, "max_wait_s": None}}},
            r"at most 4 envs \(placement.batching.max_batch\) would split lanes of 8 envs.* set it to 8 or more",
        ),
        ({**ENVS, **UNEVEN, "placement": {"type": "disaggregated", "lanes": 3}}, "lanes of 3; set placement.lanes to"),
        ({**ENVS, **UNEVEN, "placement": {"type": "disaggregated", "lanes": 0}}, "a lane of 0 envs; give 1 or more"),
        (
            {**ENVS, **UNEVEN, "placement": {"type": "hybrid", "lanes": "envs", "pipeline_stages": 2}},
            "pipeline_stages: has no effect with lanes: envs",
        ),
    ],
)  # fmt: skip
def test_lanes_and_windows_that_cannot_be_are_refused(changes, message):
    with pytest.raises(SpecError, match=message):
        check_spec(parse_spec(scripted_spec(**changes)), training=True)


@pytest.mark.parametrize("kind", ["tabletop", "maniskill"])
def test_envs_of_a_batch_stay_together(kind):
    env = {"type": kind, "num_envs": 8, **({"task": "PickCube-v1"} if kind == "maniskill" else {})}
    spec = scripted_spec(**ENVS)
    with pytest.raises(SpecError, match=rf"the envs of env '{kind}' step as one batch"):
        check_spec(parse_spec({**spec, "env": env}), training=True)
