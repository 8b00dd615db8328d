"""Envs in separate processes: whatever breaks one costs time, never data."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import fragile
import numpy as np
import psutil
import pytest
from fragile import FragileConfig
from scripted_runs import read_metrics, scripted_spec

from vla_rl.core.contexts import EnvContext
from vla_rl.core.errors import StopAndSave, UserError
from vla_rl.core.spec.spec import parse_spec
from vla_rl.runtime.start import run
from vla_rl.testing import check_env
from vla_rl.toolkit.envs.settings import Processes
from vla_rl.toolkit.process_limits import count_cpus

PLUGINS = ["vla_rl.testing.scripted", "vla_rl.testing.slot_placement", str(Path(fragile.__file__))]
TRAINING = 38
"""A step of an env's life that is in the first rollout; the evaluation before it takes 32."""
FAULTS = ("kill", "stop", "slow", "raise", "nan", "reset")


def fragile_spec(tmp_path, fault, **changes):
    env = {"type": "fragile", "num_envs": 2, "fault": fault, "told": str(tmp_path / "told")}
    spec = {
        "plugins": PLUGINS,
        "env": {**env, "processes": {"deadline_s": 2.0}},
        "rollout": {"chunk": 2, "episodes": 8, "group_size": 2},
        "train": {"steps": 2, "global_batch": 8},
    }
    for name, value in changes.items():
        spec[name] = {**spec.get(name, {}), **value}
    return spec


def without_faults(metrics):
    return [{k: v for k, v in line.items() if k not in ("faults/envs", "rollout/env_steps")} for line in metrics]


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """(results, metrics) of the run in which nothing breaks."""
    folder = tmp_path_factory.mktemp("calm") / "run"
    results = run(parse_spec(scripted_spec(**fragile_spec(folder, "none"))), folder, False)
    return results, read_metrics(folder)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_changes_no_number(train, tmp_path, calm, fault):
    """The same episodes, rewards, losses and evaluation as in a run in which nothing broke."""
    results, metrics = train(**fragile_spec(tmp_path, fault, env={"at_step": TRAINING}))
    assert (calm[0]["faults"], results["faults"]) == (0, 1)
    assert sum(line.get("faults/envs", 0) for line in metrics) == (0 if fault == "reset" else 1)
    assert without_faults(metrics) == without_faults(calm[1])
    assert results["success"] == calm[0]["success"] and results["success"]["n"] == 16


def test_a_fault_in_an_evaluation(train, tmp_path, calm):
    results, metrics = train(**fragile_spec(tmp_path, "kill", env={"at_step": 6}))
    assert results["faults"] == 1
    assert without_faults(metrics) == without_faults(calm[1])


@pytest.mark.parametrize("auto_reset", ["immediate", "deferred"])
def test_a_fault_in_a_rollout_of_fixed_length(train, tmp_path, auto_reset):
    rollout = {"auto_reset": {"steps": 16, "mode": auto_reset}, "episodes": None, "group_size": 1}
    changes = {"rollout": rollout, "algorithm": {"type": "ppo"}}
    _, calm = train("calm", **fragile_spec(tmp_path, "none", **changes))
    results, metrics = train("broken", **fragile_spec(tmp_path, "kill", env={"at_step": TRAINING}, **changes))
    assert results["faults"] == 1
    episodes = [[line["rollout/episodes"] for line in lines if "rollout/episodes" in line] for lines in (calm, metrics)]
    assert episodes == [[8, 8], [8, 8]], "what was lost is played again"
    assert all(np.isfinite(line["loss/policy"]) for line in metrics if "loss/policy" in line)


@pytest.mark.ray
def test_faults_with_ray(train, tmp_path, calm):
    spec = fragile_spec(tmp_path, "kill", env={"at_step": TRAINING})
    results, metrics = train(**spec, runtime={"backend": "ray"})
    assert results["faults"] == 1
    assert without_faults(metrics) == without_faults(calm[1])


def test_demonstrations_survive_a_fault(train, tmp_path):
    warm = {"bc_warmup": {"episodes": 6, "epochs": 2, "lr": 0.01}, "train": {"steps": 0}}
    _, calm = train("calm", **fragile_spec(tmp_path, "none", **warm))
    results, metrics = train("broken", **fragile_spec(tmp_path, "raise", **warm))
    assert results["faults"] == 1
    assert metrics[0]["bc_warmup/samples"] == calm[0]["bc_warmup/samples"] > 0
    assert metrics[0]["bc_warmup/loss"] == calm[0]["bc_warmup/loss"]


@pytest.mark.parametrize("backend", ["local", pytest.param("ray", marks=pytest.mark.ray)])
def test_an_env_that_breaks_too_often_ends_the_run_which_is_saved_and_continues(train, tmp_path, calm, backend):
    spec = fragile_spec(tmp_path, "raise", env={"at_step": TRAINING}, runtime={"max_faults": 0, "backend": backend})
    with pytest.raises(
        StopAndSave, match=r"broke 1 time \(runtime.max_faults: 0\)(.|\n)*the gripper fell off"
    ) as error:
        train(**spec)
    assert "saved in" in str(error.value.__notes__) and "--resume" in str(error.value.__notes__)
    _, metrics = train(resume=True, **spec)
    assert without_faults(metrics) == without_faults(calm[1])


def test_an_env_that_always_breaks_ends_the_run_with_its_own_words(train, tmp_path):
    with pytest.raises(StopAndSave, match=r"broke 4 times \(runtime.max_faults: 3\)(.|\n)*the gripper fell off"):
        train(**fragile_spec(tmp_path, "raise", env={"always": True}, runtime={"max_faults": 3}))


def test_an_env_that_cannot_even_be_reset(tmp_path):
    config = FragileConfig(fault="reset", always=True, env_id=0, told=str(tmp_path / "told"))
    env = fragile.build(config, EnvContext(num_envs=1))
    with pytest.raises(UserError, match=r"env 0 broke 3 times in reset, from state 0:(.|\n)*the scene fell apart"):
        env.reset(np.array([0]), np.array([0]), np.array([0]))


@pytest.mark.parametrize("num_envs", [1, 3])
def test_contract(num_envs):
    check_env(fragile.vla_rl_plugins["env"]["fragile"], FragileConfig(), num_envs=num_envs, expert_success=1.0)


@pytest.mark.parametrize(("limit", "fresh"), [({"recycle_episodes": 2}, [2, 4]), ({"recycle_mib": 1}, [1, 2, 3, 4, 5])])
def test_processes_are_recycled(limit, fresh):
    env = fragile.build(FragileConfig(processes=Processes(apart=True, **limit)), EnvContext(num_envs=1))
    env_id, pids = np.array([0]), []
    for _ in range(6):
        env.reset(env_id, env_id, env_id)
        pids.append(env.pids[0])
    assert [i for i in range(1, 6) if pids[i] != pids[i - 1]] == fresh
    assert not any(psutil.pid_exists(pid) for pid in pids[:-1] if pid != pids[-1])
    assert env.faults() == {}, "recycling is not a fault"
    env.close()


def test_envs_start_and_reset_side_by_side():
    """Not one after the other: all processes exist before the first has answered."""
    env = fragile.build(FragileConfig(fault="none"), EnvContext(num_envs=4))
    env_ids = np.arange(4)
    env.reset(env_ids, env_ids, env_ids)
    children = {child.pid for child in psutil.Process(os.getpid()).children(recursive=True)}
    assert len(set(env.pids) & children) == 4
    env.close()
    assert sys.modules["fragile"] is fragile


def test_signals_to_all_processes_of_a_job_reach_no_env():
    """Nor the fork server, which starts the next one."""
    fresh = Processes(recycle_episodes=1)  # another process for every episode
    env = fragile.build(FragileConfig(fault="none", processes=fresh), EnvContext(num_envs=2))
    env_ids = np.arange(2)
    env.reset(env_ids, env_ids, env_ids)
    before = env.pids
    for number in (signal.SIGINT, signal.SIGTERM):
        for process in psutil.Process().children(recursive=True):
            process.send_signal(number)
    result = env.chunk_step(np.zeros((2, 1, 2), np.float32), np.ones(2, bool), True)
    assert env.faults() == {}
    assert result.executed.all()
    env.reset(env_ids, env_ids, env_ids)
    assert env.faults() == {} and not set(env.pids) & set(before)
    env.close()


def test_a_process_ends_though_it_did_not_close_its_envs(fork_server):
    code = (
        "import fragile, numpy as np\n"
        "from vla_rl.core.contexts import EnvContext\n"
        "env = fragile.build(fragile.FragileConfig(), EnvContext(num_envs=2))\n"
        "env.reset(np.arange(2), np.arange(2), np.arange(2))\n"
        "print(*env.pids)\n"
    )
    here = Path(fragile.__file__).parent
    path = os.pathsep.join([str(here), *filter(None, sys.path)])
    done = fork_server.run_python("-c", code, env=os.environ | {"PYTHONPATH": path}, check=True)
    assert not any(psutil.pid_exists(int(pid)) for pid in done.stdout.split())


SHARED = Processes(envs_per_process=2)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_process_that_envs_share_changes_no_number(train, tmp_path, calm, fault):
    """What breaks with its process breaks all of its envs, and counts once."""
    shared = {"at_step": TRAINING, "processes": {"deadline_s": 1.0, "envs_per_process": 2}}
    results, metrics = train(**fragile_spec(tmp_path, fault, env=shared))
    assert (calm[0]["faults"], results["faults"]) == (0, 1)
    assert without_faults(metrics) == without_faults(calm[1])


@pytest.mark.parametrize(("fault", "with_it"), [("kill", [0, 1]), ("slow", [0, 1]), ("raise", [1]), ("nan", [1])])
def test_who_breaks_with_an_env_that_shares_its_process(tmp_path, fault, with_it):
    processes = Processes(envs_per_process=2, deadline_s=1.0)
    told = str(tmp_path / "told")
    config = FragileConfig(fault=fault, told=told, at_step=1, processes=processes)
    env = fragile.build(config, EnvContext(num_envs=4, chunk=1))
    env_ids = np.arange(4)
    env.reset(env_ids, env_ids, env_ids)
    before = env.pids
    assert before[0] == before[1] != before[2] == before[3]
    played = env.chunk_step(np.ones((4, 1, 2), np.float32), np.ones(4, bool), True)
    faults = env.faults()
    assert sorted(faults) == with_it and sum(map(len, faults.values())) == 1
    assert np.flatnonzero(~played.executed[:, 0]).tolist() == with_it
    again = env.chunk_step(np.ones((4, 1, 2), np.float32), np.ones(4, bool), True)
    assert np.flatnonzero(~again.executed[:, 0]).tolist() == with_it == sorted(env.faults()), "until they are reset"
    broken = np.array(with_it)
    env.reset(broken, broken, broken)
    assert (env.pids[0] == before[0]) == (with_it == [1]) and env.pids[2:] == before[2:]
    assert env.chunk_step(np.ones((4, 1, 2), np.float32), np.ones(4, bool), True).executed.all()
    assert env.faults() == {}
    env.close()


def test_a_process_that_dies_while_some_of_its_envs_are_reset_takes_the_others_with_it():
    env = fragile.build(FragileConfig(processes=SHARED), EnvContext(num_envs=2, chunk=1))
    env_ids = np.arange(2)
    env.reset(env_ids, env_ids, env_ids)
    os.kill(env.pids[0], signal.SIGKILL)
    env.reset(env_ids[:1], env_ids[:1], env_ids[:1])
    assert {env_id: len(texts) for env_id, texts in env.faults().items()} == {0: 1, 1: 0}
    played = env.chunk_step(np.ones((2, 1, 2), np.float32), np.ones(2, bool), True)
    assert played.executed[:, 0].tolist() == [True, False] and env.faults() == {1: []}
    env.close()


def test_an_env_that_is_rebuilt_in_vain_gets_another_process(tmp_path):
    config = FragileConfig(fault="reset", always=True, env_id=1, told=str(tmp_path / "told"), processes=SHARED)
    env = fragile.build(config, EnvContext(num_envs=2))
    env_ids = np.arange(2)
    env.reset(env_ids[:1], env_ids[:1], env_ids[:1])
    [before] = set(env.pids)
    env.reset(env_ids[1:], env_ids[1:], env_ids[1:])
    faults = env.faults()
    assert before not in env.pids and sorted(faults) == [0, 1] and "the scene fell apart" in faults[1][-1]
    env.close()


@pytest.mark.parametrize(("num_envs", "each", "expected"), [(5, 2, [1, 2, 2]), (4, 1, [1] * 4), (3, 8, [3])])
def test_envs_are_spread_evenly(num_envs, each, expected):
    shares = Processes(envs_per_process=each).split_envs(num_envs)
    assert [len(share) for share in shares] == expected
    assert [env_id for share in shares for env_id in share] == list(range(num_envs))


def test_envs_that_share_a_process_cannot_get_a_fresh_one():
    with pytest.raises(ValueError, match="also give envs_per_process: 1"):
        Processes(envs_per_process=None, recycle_mib=4000)
    assert len(Processes(envs_per_process=None).split_envs(100)) == count_cpus()
