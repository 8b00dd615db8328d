"""What breaks is named: plugin, role, worker, and what to do."""

from __future__ import annotations

import re
from pathlib import Path

import dying_model
import psutil
import pytest

from vla_rl.core.errors import PluginError, SpecError, UserError, WorkerDied
from vla_rl.core.installation import console_command
from vla_rl.runtime.comm.backend import CallHung
from vla_rl.runtime.comm.backends.ray import RayBackend
from vla_rl.runtime.messages.requests import EnvError
from vla_rl.runtime.run_folder.folder import RunFolder
from vla_rl.testing.scripted import SimulatorFault

BACKENDS = ["local", pytest.param("ray", marks=pytest.mark.ray)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_simulator_that_raises_is_named(train, backend):
    with pytest.raises(SimulatorFault) as caught:
        train(env={"fault": "raise", "fault_at": 2}, runtime={"backend": backend})
    assert any("in plugin 'scripted', hook 'chunk_step'" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("fault", "message"), [("nan", "not finite"), ("shape", "has shape")])
def test_a_simulator_that_breaks_its_contract_is_named(train, backend, fault, message):
    with pytest.raises(EnvError, match=rf"env 'scripted'.*{message}"):
        train(env={"fault": fault}, runtime={"backend": backend})


@pytest.mark.ray
@pytest.mark.parametrize("restarts", [3, 0])
def test_a_worker_that_dies_while_a_checkpoint_is_written(train, tmp_path, caplog, restarts):
    """A death in the second checkpoint is a worker's death, and no fault of the disk."""
    changes = {
        "runtime": {"backend": "ray", "restarts": restarts},
        "train": {"steps": 3, "checkpoint_every": 1},
        "eval": {"before": False},
        "plugins": ["vla_rl.testing.scripted", str(Path(dying_model.__file__))],
        "model": {"type": "dying", "end": "saver", "killed": str(tmp_path / "killed")},
    }
    if not restarts:
        with pytest.raises(WorkerDied, match=r"worker \d \(.*learner") as caught:
            train(**changes)
        assert any("last checkpoint is step_000001; continue from it with" in note for note in caught.value.__notes__)
        assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == ["last", "step_000001"]
        return
    _, metrics = train(**changes)
    assert (tmp_path / "killed").exists()
    assert "continuing from the last checkpoint" in caplog.text
    _, undisturbed = train("whole", **changes)
    assert metrics == undisturbed


@pytest.mark.ray
def test_a_worker_that_dies_before_the_first_checkpoint(train, tmp_path, caplog):
    """A learner dies in the first save, and the run starts over."""
    changes = {
        "runtime": {"backend": "ray", "restarts": 1},
        "train": {"steps": 3, "checkpoint_every": 2},
        "plugins": ["vla_rl.testing.scripted", str(Path(dying_model.__file__))],
        "model": {"type": "dying", "end": "saver", "version": 1, "killed": str(tmp_path / "killed")},
    }
    results, metrics = train(**changes)
    assert "starting over in" in caplog.text and "starts over at step 0" in caplog.text
    expected_results, undisturbed = train("whole", **changes)
    assert metrics == undisturbed
    assert results["success_before"] == expected_results["success_before"]


@pytest.mark.ray
def test_a_worker_that_dies_while_the_run_starts(train, tmp_path, caplog):
    """It would die again, after minutes for a large model."""
    plugins = ["vla_rl.testing.scripted", str(Path(dying_model.__file__))]
    model = {"type": "dying", "end": "sender", "version": -1, "killed": str(tmp_path / "killed")}
    with pytest.raises(WorkerDied, match=r"worker 0 \(.*learner"):
        train(plugins=plugins, model=model, runtime={"backend": "ray"})
    assert (tmp_path / "killed").exists() and "starting over" not in caplog.text


@pytest.mark.ray
def test_a_worker_that_dies_is_named(train, caplog):
    """And as often as `runtime.restarts` allows, where it dies in each attempt."""
    with pytest.raises(WorkerDied, match=r"worker 0 \(sim"):
        train(env={"fault": "exit"}, runtime={"backend": "ray", "restarts": 1})
    assert caplog.text.count("starting over in") == 1


@pytest.mark.ray
def test_a_call_that_hangs_hits_the_deadline_and_is_named(train):
    with pytest.raises(CallHung, match=r"sim worker 0, lane 0 \(env 'scripted'\): step has not returned for .* 12 s"):
        train(env={"fault": "hang"}, runtime={"backend": "ray", "deadline_s": 12.0})


@pytest.mark.ray
def test_a_hang_in_a_separate_process_is_named(train):
    with pytest.raises(CallHung, match=r"sim worker 0, lane 0 \(env 'scripted'\): step has not returned for .* 12 s"):
        train(env={"fault": "hang"}, runtime={"backend": "ray", "deadline_s": 12.0}, placement={"type": "slots"})


@pytest.mark.ray
def test_a_worker_that_is_stopped_is_killed_and_the_run_continues(train, tmp_path, monkeypatch, caplog):
    """It simulates, acts and learns; once stopped, it answers no call."""
    stopped: list[psutil.Process] = []
    wait = RayBackend._wait_on

    def stop_once(self):
        if not stopped and RunFolder(tmp_path / "run").latest_checkpoint() is not None:
            _, number = self.ray.get(self.processes[0])
            stopped.append(psutil.Process(number))
            stopped[0].suspend()
            self.deadline = 1.0
        wait(self)

    monkeypatch.setattr(RayBackend, "_wait_on", stop_once)
    changes = {"train": {"steps": 2, "checkpoint_every": 1}, "eval": {"before": False}}
    _, metrics = train(runtime={"backend": "ray"}, env={"latency_s": 0.3}, **changes)
    monkeypatch.undo()
    assert re.search(r"worker 0 \(.*\) did not answer for 1 s \(runtime.deadline_s\) and was killed", caplog.text)
    assert "continuing from the last checkpoint" in caplog.text
    assert not stopped[0].is_running()
    assert metrics == train("whole", **changes)[1]


def test_an_end_that_a_run_can_be_resumed_from_says_how(train, tmp_path):
    with pytest.raises(SimulatorFault) as caught:
        train(env={"fault": "raise", "fault_at": 30}, train={"steps": 4, "checkpoint_every": 1}, eval={"before": False})
    folder = tmp_path / "run"
    latest = RunFolder(folder).latest_checkpoint().name
    assert caught.value.__notes__[-1] == (
        f"the last checkpoint is {latest}; continue from it with: {console_command()} run {folder} --resume"
    )


@pytest.mark.parametrize(
    ("base", "body", "lack"),
    [
        (
            "VLAModel",
            "sample_chunk = chunk_log_probs = imitation_loss = save = None",
            "does not inherit vla_rl.HasCritic",
        ),
        ("LinearModel", "critic = property(lambda self: None, lambda *_: None)", "its `critic` is None"),
    ],
)
def test_an_algorithm_that_needs_values_refuses_a_model_without(train, tmp_path, base, body, lack):
    (tmp_path / "mute.py").write_text(
        "import attrs\n"
        "from vla_rl.core.hookspecs import VLAModel\n"
        "from vla_rl.testing.linear import LinearModel\n"
        "from vla_rl.core.declarations import ModelPlugin\n"
        f"class Mute({base}):\n"
        f"    {body}\n"
        "def build(config, context):\n"
        "    return Mute(context.env, context.chunk, values=context.values) if Mute.__init__ is LinearModel.__init__ else Mute()\n"
        "@attrs.frozen(kw_only=True)\n"
        "class Config: pass\n"
        "vla_rl_plugins = {'model': {'mute': ModelPlugin(config=Config, build=build, summary='no critic')}}\n"
    )
    plugins = ["vla_rl.testing.scripted", str(tmp_path / "mute.py")]
    with pytest.raises(PluginError, match=rf"algorithm 'ppo' needs values.*model 'mute' has no value head \(.*{lack}"):
        train(plugins=plugins, model={"type": "mute"}, algorithm={"type": "ppo"}, rollout={"group_size": 1})


def test_more_envs_than_the_machine_can_carry(train, tmp_path):
    (tmp_path / "huge.py").write_text(
        "import dataclasses\n"
        "from vla_rl.testing.scripted import vla_rl_plugins as doubles\n"
        "vla_rl_plugins = {'env': {'huge': dataclasses.replace(doubles['env']['scripted'], env_memory=10**12)}}\n"
    )
    plugins = ["vla_rl.testing.scripted", str(tmp_path / "huge.py")]
    with pytest.raises(SpecError, match=r"8 envs of huge need about 7450.6 GiB .* lower env.num_envs"):
        train(plugins=plugins, env={"type": "huge"})


def test_a_machine_that_cannot_draw_is_reported_before_any_worker_starts(train, tmp_path):
    (tmp_path / "blind.py").write_text(
        "import dataclasses\n"
        "from vla_rl.core.errors import UserError\n"
        "from vla_rl.testing.scripted import vla_rl_plugins as doubles\n"
        "def look(config):\n"
        "    raise UserError('blind draws with egl, which does not work on this machine')\n"
        "def build(config, context):\n"
        "    raise AssertionError('a worker started')\n"
        "vla_rl_plugins = {'env': {'blind': dataclasses.replace(doubles['env']['scripted'], preflight=look, build=build)}}\n"
    )
    plugins = ["vla_rl.testing.scripted", str(tmp_path / "blind.py")]
    with pytest.raises(UserError, match="blind draws with egl"):
        train(plugins=plugins, env={"type": "blind"}, runtime={"backend": "ray"})


def test_more_workers_than_cores(train):
    with pytest.raises(SpecError, match="4096 workers need a CPU core each"):
        train(env={"num_envs": 4096}, rollout={"episodes": 4096}, placement={"type": "collocated", "workers": 4096})


def test_envs_that_do_not_divide(train):
    with pytest.raises(SpecError, match="9 envs cannot be shared evenly by 2 workers"):
        train(
            env={"num_envs": 9},
            rollout={"episodes": 9, "group_size": 3},
            placement={"type": "collocated", "workers": 2},
        )


def test_a_gradient_that_is_not_finite_stops_the_run(train):
    with pytest.raises(UserError, match="loss or gradient of model 'linear' is not finite in step 1"):
        train(
            rollout={"reward_coef": 1e38},
            algorithm={"type": "ppo", "normalize_advantages": None, "huber_delta": None, "value_clip": None},
        )


@pytest.mark.ray
@pytest.mark.parametrize("restarts", [2, 1])
def test_a_worker_that_dies_while_it_is_started_again_is_started_once_more(train, tmp_path, caplog, restarts):
    """With one restart of sim workers at most the whole run starts over instead."""
    (tmp_path / "frail.py").write_text(
        "import attrs, dataclasses, os\n"
        "from pathlib import Path\n"
        "from vla_rl.testing.scripted import vla_rl_plugins as doubles\n"
        "double = doubles['env']['scripted']\n"
        f"lives = Path({str(tmp_path)!r})\n"
        "def build(config, context):\n"
        "    life = len(list(lives.glob('life*')))\n"
        "    (lives / f'life{life}').touch()\n"
        "    if life == 1:\n"
        "        os._exit(1)\n"
        "    return double.build(attrs.evolve(config, fault='none' if life else 'exit', fault_at=3), context)\n"
        "vla_rl_plugins = {'env': {'frail': dataclasses.replace(double, build=build)}}\n"
    )
    changes = {
        "plugins": ["vla_rl.testing.scripted", str(tmp_path / "frail.py")],
        "runtime": {"backend": "ray", "restarts": restarts},
        "placement": {"type": "hybrid", "sim": "cpu", "policy": "0", "learner": "0"},
    }
    results, metrics = train(env={"type": "frail"}, **changes)
    assert ("starting over in" in caplog.text) == (restarts == 1)
    assert restarts == 1 or results["faults"] == 2
    assert metrics == train("whole", **changes | {"env": {"type": "scripted"}})[1]
