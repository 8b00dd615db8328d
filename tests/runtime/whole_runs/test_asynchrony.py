"""Rollouts that continue while learners train: how old data are, that each ticket is used once, and that nothing else
changes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import slow_model
import torch
from scripted_runs import scripted_spec, weights_in

from vla_rl.core.errors import SpecError
from vla_rl.core.interrupts import RunStopped
from vla_rl.core.spec.spec import parse_spec
from vla_rl.runtime.checks.run import check_spec
from vla_rl.runtime.comm.interfaces import LearnerInterface, PolicyInterface
from vla_rl.runtime.driver.driver import RunWorkers
from vla_rl.runtime.messages.ids import SampleId
from vla_rl.runtime.run_folder.folder import RunFolder
from vla_rl.runtime.start import evaluate

APART = {"runtime": {"backend": "ray"}, "placement": {"type": "disaggregated"}}
UNEVEN = {"env": {"num_envs": 6, "latency_s": 0.004, "latency_sigma": 1.0}}
"""Chunk steps take random times, and 16 tickets do not go evenly into 6 envs."""


def ledger_in(folder):
    return json.loads((folder / "checkpoints" / "last" / "trainer" / "state.json").read_text())["tickets"]


@pytest.mark.parametrize("num_envs", [3, 5, 16, 32])
def test_numbers_do_not_depend_on_envs(train, tmp_path, num_envs):
    _, expected = train("eight")
    _, got = train("others", env={"num_envs": num_envs})
    assert got == expected
    of_eight, of_others = weights_in(tmp_path / "eight"), weights_in(tmp_path / "others")
    assert all(torch.equal(of_eight[name], of_others[name]) for name in of_eight)


def test_more_envs_than_tickets(train):
    _, expected = train("some", rollout={"episodes": 4})
    _, got = train("many", rollout={"episodes": 4}, env={"num_envs": 24})
    assert got == expected


@pytest.mark.ray
@pytest.mark.parametrize("lag", [1, 2])
def test_pinned_weights_give_the_run_that_is_simulated(train, tmp_path, lag):
    """Bit for bit, whatever takes how long."""
    steps = {"train": {"steps": 5}, "algorithm": {"type": "gipo"}}
    _, expected = train("simulated", rollout={"lag": lag}, **steps)
    asynchrony = {"max_lag": {"pinned": lag}}
    _, got = train("asynchronous", asynchrony=asynchrony, **steps, **APART, **UNEVEN)
    learnt = [[line.get("loss/total") for line in lines] for lines in (expected, got)]
    assert learnt[0] == learnt[1]
    assert [line["policy/lag_max"] for line in got if "policy/lag_max" in line] == [min(s, lag) for s in range(5)]
    simulated, found = weights_in(tmp_path / "simulated"), weights_in(tmp_path / "asynchronous")
    assert all(torch.equal(simulated[name], found[name]) for name in simulated)


@pytest.mark.ray
@pytest.mark.parametrize("lag", [1, 3])
def test_no_chunk_is_older_than_was_promised(train, tmp_path, lag):
    """And every ticket ends once, also over a stop and with filters; evaluations come between."""
    changes = {"asynchrony": {"max_lag": lag}, "rollout": {"resample": {"max_rounds": 1}}, **APART, **UNEVEN}
    train(train={"steps": 3, "checkpoint_every": 1}, eval={"every": 2}, **changes)
    results, metrics = train(resume=True, train={"steps": 7, "checkpoint_every": 1}, eval={"every": 2}, **changes)
    steps = [line for line in metrics if "rollout/episodes" in line]
    assert [line["step"] for line in steps] == list(range(1, 8))
    ages = [line["policy/lag_max"] for line in steps if "policy/lag_max" in line]
    assert max(ages) <= lag and (lag > 1 or max(ages) == 1)
    shares = [
        {int(k.removeprefix("rollout/policy_lag_")): v for k, v in s.items() if "/policy_lag_" in k} for s in steps
    ]
    assert all(max(found) <= lag and sum(found.values()) == pytest.approx(1) for found in shares)
    ledger = ledger_in(tmp_path / "run")
    assert ledger == results["tickets"]
    assert ledger["step"] == 7 and ledger["trained"] + ledger["filtered"] + ledger["discarded"] == 4 * ledger["first"]
    assert ledger["trained"] + ledger["filtered"] + ledger["discarded"] == sum(
        line["rollout/episodes"] for line in steps
    )
    assert sum(line["groups/kept"] for line in steps) == ledger["trained"] / 4
    assert results["success"]["n"] == 64


SKIPPING = (
    "from vla_rl import hookimpl\n"
    "@hookimpl(wraps='algorithm')\n"
    "def select(rollout):\n"
    "    keep = yield\n"
    "    return keep & (rollout.step in (3, 6))\n"
)
"""Module that leaves nothing to train on in the other steps."""


@pytest.fixture
def held(monkeypatch):
    """What a run has not freed in the end: tickets on the driver, inferences on the policies, bytes on the learners."""
    found = {}
    close = RunWorkers.close

    def look_and_close(self):
        fleet = self.collector.fleet
        if not found:
            found["driver"] = list(self.collector.trajectories)
            found["policies"] = [n for policy in fleet.policies for n in range(200) if holds(fleet, policy, n)]
            found["learners"] = fleet.get_all([o.call(LearnerInterface.release_samples, {}) for o in fleet.learners])
        close(self)

    monkeypatch.setattr(RunWorkers, "close", look_and_close)
    return found


def holds(fleet, policy, inference):
    try:
        fleet.get(policy.call(PolicyInterface.take_samples, SampleId.pack(inference, np.arange(1))))
    except KeyError:
        return False
    return True


@pytest.mark.ray
@pytest.mark.parametrize(
    ("placement", "asynchrony"),
    [
        ({"type": "disaggregated"}, {"max_lag": 2}),
        ({"type": "disaggregated"}, {"max_lag": {"pinned": 2}}),
        ({"type": "disaggregated"}, {"max_lag": 2, "streaming_update": True}),
        ({"type": "disaggregated"}, {"max_lag": 2, "replay": {"uses": 2}}),
        ({"type": "hybrid", "sim": "0-1", "policy": "2", "learner": "3"}, {"max_lag": 2}),
        ({"type": "slots", "sim": 2, "policy": 2}, {"max_lag": 2}),
        ({"type": "slots", "learner": 2}, {"max_lag": 2}),
    ],
    ids=["disaggregated", "pinned", "streaming", "replay", "hybrid", "two policies", "two learners"],
)
def test_steps_that_train_on_nothing_free_what_they_collected(train, tmp_path, held, placement, asynchrony):
    """Each step collects fewer tickets than there are envs, so that their model inputs have not moved when it ends."""
    (tmp_path / "skipping.py").write_text(SKIPPING)
    changes = {
        "plugins": ["vla_rl.testing.scripted", "vla_rl.testing.slot_placement", str(tmp_path / "skipping.py")],
        "env": {"num_envs": 64, "length": 3, "max_steps": 6},
        "algorithm": {"type": "gipo", "normalize_advantages": None},
        "train": {"steps": 7, "global_batch": None, "epochs": 1, "max_skipped": 3},
        "eval": {"before": False, "episodes_per_task": 1},
    }
    results, metrics = train(
        "asynchronous", asynchrony=asynchrony, placement=placement, runtime={"backend": "ray"}, **changes
    )
    steps = [line for line in metrics if "rollout/episodes" in line]
    assert [line["step"] for line in steps if "update/samples" in line] == [3, 6]
    assert results["tickets"] == {"step": 7, "first": 28, "trained": 32, "filtered": 80, "discarded": 0}
    replays = "replay" in asynchrony
    assert held["driver"] == held["policies"] == []
    assert replays == any(held["learners"]), "only the replay buffer holds samples"
    if "max_lag" in asynchrony and not isinstance(asynchrony["max_lag"], int):
        train("simulated", rollout={"lag": 2}, **changes)
        simulated, found = weights_in(tmp_path / "simulated"), weights_in(tmp_path / "asynchronous")
        assert all(torch.equal(simulated[name], found[name]) for name in simulated)


@pytest.mark.ray
def test_an_evaluation_is_of_one_version(train, tmp_path):
    """What is played is waited for and kept; the evaluation is that of the checkpoint."""
    results, _ = train(asynchrony={"max_lag": 2}, train={"steps": 4}, eval={"every": 2}, **APART, **UNEVEN)
    again = evaluate(parse_spec(scripted_spec()), tmp_path / "run" / "checkpoints" / "last")
    assert again["success"] == results["success"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, r"asynchrony.max_lag: .*one process does one thing after another .*use runtime.backend: ray"),
        ({"runtime": {"backend": "ray"}}, "learners share workers with .*use `placement: {type: disaggregated}`"),
        (
            {**APART, "placement": {"type": "disaggregated", "offload": {"policy": True}}},
            "policy would leave the device between phases; leave out placement.offload",
        ),
    ],
)
def test_what_cannot_run_side_by_side_is_refused(changes, message):
    spec = parse_spec(scripted_spec(asynchrony={"max_lag": 1}, **changes))
    with pytest.raises(SpecError, match=message):
        check_spec(spec, training=True)
    check_spec(spec, training=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"asynchrony": {"max_lag": 1}, "rollout": {"lag": 1}}, "rollout.lag simulates old weights"),
        ({"asynchrony": {"max_lag": {"pinned": 0}}}, "max_lag.pinned: 'pinned' must be >= 1"),
        ({"asynchrony": {"weights": "pinned"}}, r"weights: unknown key; now max_lag: \{pinned: ...\}"),
        (
            {"asynchrony": {"max_lag": {"pinned": 1}}, "rollout": {"resample": {"max_rounds": 1}}},
            "no ticket has a step before it is collected; give a number",
        ),
        ({"asynchrony": {"max_lag": -1}}, "max_lag"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(changes, message):
    with pytest.raises(SpecError, match=message):
        parse_spec(scripted_spec(**changes))


@pytest.mark.ray
def test_a_publication_holds_back_only_the_tickets_that_wait_for_it(train, tmp_path):
    """Weights take long to arrive; policies act and learners train on meanwhile, and no ticket starts too early."""
    plugins = ["vla_rl.testing.scripted", "vla_rl.testing.slot_placement", str(Path(slow_model.__file__))]
    model = {"type": "slow", "stop": str(tmp_path / "stop"), "weights_s": 0.4}
    env = {"length": 8, "latency_s": 0.02}  # rollouts are faster than the learner, which gives its weights out slowly
    _, metrics = train(plugins=plugins, model=model, env=env, asynchrony={"max_lag": 2}, train={"steps": 5}, **APART)
    assert max(line["policy/lag_max"] for line in metrics if "policy/lag_max" in line) == 2
    events = [e for e in json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"] if e["ph"] == "X"]
    loads, updates, acts = (
        [(e["ts"], e["ts"] + e["dur"]) for e in events if e["name"] == name] for name in ("load", "update", "act")
    )
    assert any(load[0] < act[0] and act[1] < load[1] for act in acts for load in loads)
    assert any(load[0] < update[0] < load[1] for update in updates for load in loads)


@pytest.mark.ray
@pytest.mark.parametrize("streaming", [False, True])
def test_a_stop_in_the_middle_of_an_update_loses_nothing(train, tmp_path, streaming):
    """Rollouts that run meanwhile end at once, the update is finished, and the checkpoint is the one after it."""
    (tmp_path / "slow_loss.py").write_text(
        "import os, signal, time\n"
        "from pathlib import Path\n"
        "from vla_rl import hookimpl\n"
        f"STOP, DRIVER = Path({str(tmp_path / 'stop')!r}), Path({str(tmp_path / 'driver')!r})\n"
        "@hookimpl(wraps='algorithm')\n"
        "def loss(scores, batch):\n"
        "    if DRIVER.exists():  # the second update, in the learner's process\n"
        "        driver = int(DRIVER.read_text())\n"
        "        DRIVER.unlink()\n"
        "        os.kill(driver, signal.SIGTERM)\n"
        "    time.sleep(0.15 if STOP.exists() else 0)\n"
        "    return (yield)\n"
        "@hookimpl(wraps='algorithm')\n"
        "def advantages(rollout):\n"
        "    if rollout.step == 2 and STOP.exists():\n"
        "        DRIVER.with_name('named').write_text(str(os.getpid()))\n"
        "        DRIVER.with_name('named').rename(DRIVER)\n"
        "    return (yield)\n"
    )
    steps = {
        "train": {"steps": 3, "global_batch": None},
        "algorithm": {"type": "gipo", "normalize_advantages": None},
    }
    train("simulated", rollout={"lag": 1}, **steps)
    changes = {
        "plugins": ["vla_rl.testing.scripted", "vla_rl.testing.slot_placement", str(tmp_path / "slow_loss.py")],
        "asynchrony": {"max_lag": {"pinned": 1}, "streaming_update": streaming},
        "env": {"latency_s": 0.3},
        **steps,
        **APART,
    }
    (tmp_path / "stop").touch()
    with pytest.raises(RunStopped):
        train("stopped", **changes)
    (tmp_path / "stop").unlink()
    saved = RunFolder(tmp_path / "stopped").restore_checkpoint()
    assert saved is not None and saved[0].step == 2
    train("stopped", resume=True, **changes)
    simulated, found = weights_in(tmp_path / "simulated"), weights_in(tmp_path / "stopped")
    for name, weights in simulated.items():  # streamed sums are added up in another order; a step moves them by 3e-2
        torch.testing.assert_close(found[name], weights, rtol=0, atol=1e-3)


DYING_SIMULATOR = """
import os, signal, time
from pathlib import Path
from vla_rl import hookimpl

FOLDER = Path(__file__).parent
PROCESS, ACTING, ENDED = FOLDER / "process", FOLDER / "acting", FOLDER / "ended"
ended = 0

@hookimpl(wraps="engine")
def wake_up():
    ACTING.touch()
    return (yield)

@hookimpl(wraps="engine")
def sleep():
    ACTING.unlink(missing_ok=True)
    return (yield)

@hookimpl(wraps="env")
def chunk_step():
    global ended
    if not PROCESS.exists():
        PROCESS.write_text(str(os.getpid()))
    with ENDED.open("a") as file:
        file.write("." * ended)  # the policy has answered what came with these ends
    result = yield
    ended = int(result.terminated.sum())
    return result

def wait_until(happened):
    deadline = time.monotonic() + 120
    while not happened() and time.monotonic() < deadline:
        time.sleep(0.01)

def kill_simulator(step, handed_over):
    if step == 2 and PROCESS.exists():
        wait_until(lambda: ENDED.stat().st_size >= handed_over)
        os.kill(int(PROCESS.read_text()), signal.SIGKILL)
        wait_until(lambda: not ACTING.exists())
"""
DIES_AHEAD = """
@hookimpl
def on_update_end(step):
    kill_simulator(step, 2 * 16 + 8)
"""
DIES_BETWEEN_ROLLOUTS = """
@hookimpl(wraps="algorithm")
def select(rollout):
    kill_simulator(rollout.step, 0)
    return (yield)
"""


@pytest.mark.ray
@pytest.mark.parametrize(("lag", "moment"), [(1, DIES_AHEAD), (0, DIES_BETWEEN_ROLLOUTS)], ids=["ahead", "recorded"])
def test_a_simulator_that_dies_after_a_rollout_is_started_again(train, tmp_path, lag, moment):
    """With lag 1 half of the next rollout was handed over, and it has ended before further tickets are given; with lag 0
    the simulator was to be offloaded. Its recordings travelled with their trajectories, so none is lost.
    """
    (tmp_path / "dying_simulator.py").write_text(DYING_SIMULATOR + moment)
    steps = {"train": {"steps": 4}, "algorithm": {"type": "gipo"}}
    train("simulated", rollout={"lag": lag}, **steps)
    folder = tmp_path / "recorded"
    changes = {
        "plugins": ["vla_rl.testing.scripted", "vla_rl.testing.slot_placement", str(tmp_path / "dying_simulator.py")],
        "asynchrony": {"max_lag": {"pinned": 1}} if lag else {},
        "env": {"latency_s": 0.3 * lag},
        "eval": {"before": False},
        "hooks": [{"type": "jsonl"}, {"type": "lerobot", "what": "rollout", "rows": "chunks", "folder": str(folder)}],
    }
    placement = {"type": "disaggregated", "offload": {"sim": not lag}}
    results, _ = train("died", **changes, **steps, **APART | {"placement": placement})
    assert results["faults"] == 1
    simulated, found = weights_in(tmp_path / "simulated"), weights_in(tmp_path / "died")
    assert all(torch.equal(simulated[name], found[name]) for name in simulated)
    recorded = [json.loads(line)["identity"] for line in (folder / "meta" / "vla_rl.jsonl").read_text().splitlines()]
    assert [identity.split(", ")[2] for identity in recorded] == [f"ticket {number}" for number in range(64)]
