"""What a run says while it is running: its devices first, then how far a long phase is."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from scripted_runs import scripted_spec
from typer.testing import CliRunner

from vla_rl.cli.main import app
from vla_rl.core.errors import SpecError, UserError
from vla_rl.core.plan import Slot
from vla_rl.core.spec.spec import parse_spec
from vla_rl.runtime.comm import status_line
from vla_rl.runtime.comm.backends import local, ray
from vla_rl.runtime.comm.interfaces import EnvInterface, HostInterface
from vla_rl.runtime.messages.reports import RolloutProgress
from vla_rl.runtime.placement.hardware import WorkerDevice, describe_placement
from vla_rl.runtime.start import run, start
from vla_rl.runtime.workers.policy.rollout_loop import ProgressCounter
from vla_rl.runtime.workers.role_calls import Heartbeats

LINE = re.compile(r"step (\d+) (rollout|eval|update): (?:(\d+) of (\d+) (chunk steps|episodes), )?\d+:\d\d")


def said(folder, capsys, **changes):
    """The lines of a run that ticks at every chance and prints every tick."""
    spec = scripted_spec(hooks=[{"type": "console", "mode": "plain", "every_s": 1e-9}], **changes)
    run(parse_spec(spec), folder, False)
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("backend", ["local", pytest.param("ray", marks=pytest.mark.ray)])
def test_a_line_comes_within_rollouts_and_evaluations(tmp_path, capsys, monkeypatch, backend):
    monkeypatch.setattr(local, "TICK_S", 0.0)
    monkeypatch.setattr(ray, "TICK_S", 0.01)
    slow = {"latency_s": 0.1} if backend == "ray" else {}
    train = {"steps": 2}
    lines = said(tmp_path / "run", capsys, runtime={"backend": backend}, env=slow, train=train, eval={"every": 0})
    assert lines[0].startswith("devices: sim cpu, policy cpu, learner cpu")
    found = [match.groups() for match in map(LINE.fullmatch, lines) if match]
    rollouts = [
        (int(step), int(done), int(total)) for step, phase, done, total, _ in found if phase == "rollout" and total
    ]
    assert {step for step, _, _ in rollouts} == {1, 2}
    assert {total for _, _, total in rollouts} == {64}, "16 tickets of at most eight steps in chunks of two"
    assert len({done for _, done, _ in rollouts}) > 1 and all(done <= total for _, done, total in rollouts)
    evaluations = [(int(done), int(total)) for _, phase, done, total, _ in found if phase == "eval"]
    assert len({total for _, total in evaluations}) == 1 and len({done for done, _ in evaluations}) > 1
    assert all(done <= total for done, total in evaluations)


@pytest.mark.parametrize("backend", ["local", pytest.param("ray", marks=pytest.mark.ray)])
def test_a_line_comes_while_the_expert_plays(tmp_path, capsys, monkeypatch, backend):
    monkeypatch.setattr(local, "TICK_S", 0.0)
    monkeypatch.setattr(ray, "TICK_S", 0.01)
    warm = {"episodes": 24, "epochs": 1, "lr": 1e-3, "batch": 16}
    slow = {"latency_s": 0.1} if backend == "ray" else {}
    lines = said(tmp_path / "run", capsys, runtime={"backend": backend}, env=slow, bc_warmup=warm, train={"steps": 1})
    found = [re.match(r"step 0 demonstrations: (\d+) of 24 episodes", line) for line in lines]
    done = [int(match[1]) for match in found if match]
    assert done == sorted(done) and len(set(done)) > 2 and done[-1] <= 24


def test_an_evaluation_by_itself_says_how_far_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "TICK_S", 0.0)
    monkeypatch.setattr(status_line, "EVERY_S", 0.0)
    monkeypatch.setattr(status_line, "PATIENCE_S", 0.0)
    spec = tmp_path / "spec.yaml"
    parse_spec(scripted_spec(runtime={"backend": "local"})).dump(spec)
    result = CliRunner().invoke(app, ["eval", str(spec)])
    assert result.exit_code == 0, result.output
    found = re.findall(r"^eval: (\d+) of (\d+) episodes, \d+:\d\d$", result.stderr, flags=re.MULTILINE)
    assert len({total for _, total in found}) == 1 and len({done for done, _ in found}) > 1
    assert not re.search(r"\d of \d", result.stdout), "results alone"


def test_tickets_and_chunk_steps_are_counted():
    progress = ProgressCounter()
    progress.reset_counts()

    def note(lane: int, chunks: list[int], finished: int = 0) -> None:
        progress.note_request(lane, SimpleNamespace(steps=sum(chunks), finished=range(finished)))

    note(0, [0, 0])
    note(1, [0, 0])
    assert progress.current_progress() == RolloutProgress(tickets=0, steps=0)
    note(0, [1, 1])
    note(1, [1, 0], finished=1)
    assert progress.current_progress() == RolloutProgress(tickets=1, steps=3)
    note(0, [], finished=2)
    assert progress.current_progress() == RolloutProgress(tickets=3, steps=1)
    progress.reset_counts()
    assert progress.current_progress() == RolloutProgress()


def assignments(*slots: Slot):
    return [SimpleNamespace(slot=slot) for slot in slots]


def test_devices_in_words():
    H200 = "NVIDIA H200"
    together = Slot(roles=("policy", "learner"), device="cuda", gpus=1.0)
    sim = Slot(roles=("sim",), device="cpu")
    apart = assignments(sim, sim, together, *[Slot(roles=("learner",), device="cuda", gpus=1.0)] * 3)
    devices = [WorkerDevice(), WorkerDevice(), *(WorkerDevice(i, H200) for i in (0, 1, 2, 4))]
    assert describe_placement(apart, devices) == "sim cpu x2, policy cuda:0, learner cuda:0-2,4 (NVIDIA H200)"
    nodes = assignments(
        *(Slot(roles=("sim", "policy", "learner"), device="cuda", gpus=0.5, node=n) for n in ("a", "a", "b"))
    )
    shared = [WorkerDevice(0, H200), WorkerDevice(0, H200), WorkerDevice(1, "L40S")]
    assert describe_placement(nodes, shared).startswith("sim a:cuda:0 x2 + b:cuda:1, policy a:cuda:0 x2 + b:cuda:1, ")
    assert describe_placement(nodes, shared).endswith(" (NVIDIA H200, L40S)")
    slots = assignments(
        Slot(roles=("sim", "policy", "learner"), index=0), Slot(roles=("sim", "policy", "learner"), index=1)
    )
    words = "sim cpu x2, policy cpu x2, learner cpu x2 (no GPU was found: devices are CPU slots)"
    assert describe_placement(slots, [WorkerDevice(), WorkerDevice()]) == words


def test_a_gpu_can_be_required(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    spec = scripted_spec(runtime={"require": "cuda"})
    with pytest.raises(
        SpecError, match=r"runtime.require: cuda is required, and there is no GPU: .* 0 GPUs were found"
    ):
        run(parse_spec(spec), tmp_path / "run", False)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("offered", [False, True])
def test_an_expert_that_is_not_there_is_an_error_of_the_spec_and_a_bug_is_a_bug(tmp_path, offered):
    raised = "TypeError('mute')" if offered else "UserError('Mute has no scripted expert')"
    (tmp_path / "mute.py").write_text(
        "import dataclasses\nfrom vla_rl import UserError\n"
        "from vla_rl.testing.scripted import vla_rl_plugins as doubles\n"
        "double = doubles['env']['scripted']\n"
        "def build(config, context):\n"
        "    env = double.build(config, context)\n"
        "    def fail(self):\n"
        f"        raise {raised}\n"
        "    return type('Mute', (type(env),), {'__init__': lambda self: vars(self).update(vars(env)), "
        "'expert_chunk': fail})()\n"
        "vla_rl_plugins = {'env': {'mute': dataclasses.replace(double, build=build)}}\n"
    )
    plugins = ["vla_rl.testing.scripted", str(tmp_path / "mute.py")]
    bc_warmup = {"episodes": 2, "epochs": 1, "lr": 1e-3}
    spec = scripted_spec(plugins=plugins, env={"type": "mute"}, bc_warmup=bc_warmup)
    expected = (TypeError, "^mute")
    if not offered:
        expected = (UserError, r"env 'mute' has no scripted expert to learn from here .Mute has no scripted")
    with pytest.raises(expected[0], match=expected[1]):
        run(parse_spec(spec), tmp_path / "run", False)


def test_a_worker_that_works_for_itself_is_named_once(monkeypatch):
    heard = []
    monkeypatch.setattr(Heartbeats, "record_heartbeat", lambda heartbeats, activity=None: heard.append(activity))
    runtime = start(parse_spec(scripted_spec()))
    heard.clear()
    try:
        runtime.fleet.get(runtime.fleet.workers[0].call(HostInterface.read_clock))
        runtime.fleet.get(runtime.fleet.sims[0].call(EnvInterface.eval_states))
    finally:
        runtime.workers.close()
    assert heard[0] == "worker 0 (model 'linear'): read_clock" and "sim worker 0 (env 'scripted'): eval_states" in heard
