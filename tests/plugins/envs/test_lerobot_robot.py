"""`lerobot_robot`, with a robot of lerobot's own interface (`lerobot_double`) in a separate process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
import threading
import time
import types
import venv
from pathlib import Path

import numpy as np
import pytest
from scripted_runs import scripted_spec

from vla_rl.core.contexts import EnvContext
from vla_rl.core.errors import NobodyAnswered, SafetyStop, UserError
from vla_rl.core.interrupts import StopRequested
from vla_rl.core.spec.spec import make_component, parse_spec
from vla_rl.core.spec.structure import Problems
from vla_rl.core.types import ActionSource
from vla_rl.plugins.envs.lerobot_robot import device_process, plugin
from vla_rl.plugins.envs.lerobot_robot.env import TargetLimits
from vla_rl.runtime.driver.collecting.rollouts import StepRollouts
from vla_rl.runtime.start import run
from vla_rl.testing import check_env

DOUBLE = Path(__file__).parent / "lerobot_double"
JOINTS = ("shoulder.pos", "elbow.pos", "gripper.pos")
CAMERA = {"type": "drawn", "width": 48, "height": 32, "fps": 30}
ZERO = np.zeros(1, np.int64)


@pytest.fixture
def ports(tmp_path, monkeypatch):
    """The serial ports of robot and takeover device, which are files; lerobot is found by child processes."""
    monkeypatch.syspath_prepend(str(DOUBLE))
    for name in ("robot", "device"):
        (tmp_path / name).touch()
    yield tmp_path
    assert "lerobot" not in sys.modules, "the robot's process alone imports lerobot"


@pytest.fixture
def forks(monkeypatch, fork_server):
    """The fork server starts the processes of robots."""

    def start_process(command, *, pass_fds, env, start_new_session, **_):
        arguments = [*command[1:-1], "0"]  # its connection is its stdin, since other descriptors are not passed on
        return fork_server.start_python(*arguments, stdin=pass_fds[0], env=env, start_new_session=start_new_session)

    starting = types.SimpleNamespace(Popen=start_process, DEVNULL=subprocess.DEVNULL)
    monkeypatch.setattr(device_process, "subprocess", starting)


@pytest.fixture
def make(ports, forks):
    """Builder of envs, which are closed at the end."""
    envs = []

    def build(chunk=4, **settings):
        envs.append(plugin.build(config_of(ports, **settings), EnvContext(num_envs=1, chunk=chunk)))
        return envs[-1]

    yield build
    for env in envs:
        env.close()


def settings_of(ports, robot=None, teleoperator=None, **settings):
    robot = {
        "type": "chain_follower", "port": str(ports / "robot"), "log": str(ports / "log"), "cameras": {"front": CAMERA},
        **(robot or {}),
    }  # fmt: skip
    if teleoperator is not None:
        settings["teleoperator"] = {"port": str(ports / "device"), **teleoperator}
    defaults = {
        "tasks": ["lift the cube"],
        "action_bounds": [-90, 90],
        "max_step": 10,
        "control_hz": 200,
        "reset": None,
    }
    return {"robot": robot, **defaults, **settings}


def config_of(ports, **settings):
    return make_component("env", "lerobot_robot", **settings_of(ports, **settings)).config


def notes(ports, kind):
    """The commands that the robot got: the arguments of each call of one kind."""
    lines = [json.loads(line) for line in (ports / "log").read_text().splitlines()]
    return [line[1:] for line in lines if line[0] == kind]


def sent(ports):
    return [[targets[name] for name in JOINTS] for (targets,) in notes(ports, "send")]


def reset(env, state=0):
    return env.reset(ZERO, ZERO + state, ZERO)


def step(env, target, length=4, stop=True):
    return env.chunk_step(np.full((1, length, 3), target, np.float32), np.array([True]), stop)


# ------------------------------------------------------------------------------------------------------------ actions


def test_it_says_what_the_robot_is(make):
    info = make(tasks=["lift the cube", "Drop it!"], episode_seconds=2.0, state=["elbow.pos"]).info
    assert dict(info.cameras) == {"front": (32, 48)}
    assert info.state_dim == 1
    assert info.action_low == (-90.0,) * 3
    assert [(task.name, task.instruction, task.max_steps) for task in info.tasks] == [
        ("lift_the_cube", "lift the cube", 400),
        ("drop_it", "Drop it!", 400),
    ]
    assert not info.deterministic
    assert not info.fixed_states
    assert not info.takeovers
    assert "no episode can be repeated" in info.notes[0]


def test_targets_are_bounded_and_reached_in_steps(make, ports):
    env = make(action_bounds={"shoulder.pos": [-20, 25], "elbow.pos": [-90, 90], "gripper.pos": [0, 1]}, max_step=10)
    assert reset(env).state.tolist() == [[0, 0, 0]]
    result = env.chunk_step(np.full((1, 4, 3), [90, -5, 1], np.float32), np.array([True]), True)
    assert sent(ports) == [[10, -5, 1], [20, -5, 1], [25, -5, 1], [25, -5, 1]]
    assert result.obs.state.tolist() == [[25, -5, 1]]
    assert result.executed.all() and not result.late[0, 0]


def test_steps_add_up_within_the_bounds(make, ports):
    env = make(control="step", max_step={"shoulder.pos": 10, "elbow.pos": 2, "gripper.pos": 1}, action_bounds=[-15, 15])
    assert env.info.action_high == (10.0, 2.0, 1.0)
    assert env.info.action_names == tuple(JOINTS)
    reset(env)
    env.chunk_step(np.full((1, 3, 3), [10, -2, 0.5], np.float32), np.array([True]), True)
    assert sent(ports) == [[10, -2, 0.5], [15, -4, 1.0], [15, -6, 1.5]]


def test_it_moves_to_its_start_pose_before_each_episode(make, ports):
    env = make(start_pose=dict.fromkeys(JOINTS, 25.0))
    assert reset(env).state.tolist() == [[25, 25, 25]]
    assert sent(ports) == [[10] * 3, [20] * 3, [25] * 3]
    step(env, 0)
    assert reset(env).state.tolist() == [[25, 25, 25]]
    assert sent(ports)[7:] == [[10] * 3, [20] * 3, [25] * 3]


def test_images_are_scaled(make):
    env = make(image_size=[16, 24])
    image = reset(env).images["front"]
    assert image.shape == (1, 16, 24, 3)
    assert image.any()


def test_an_inactive_env_does_not_move(make, ports):
    env = make()
    reset(env)
    result = env.chunk_step(np.ones((1, 4, 3), np.float32), np.array([False]), True)
    assert not result.executed.any()
    assert sent(ports) == []


# ---------------------------------------------------------------------------------------------------------- takeovers


def test_a_person_takes_over_and_ends_the_episode(make, ports):
    env = make(teleoperator={"type": "chain_stick", "first": 1, "last": 3}, control="step")
    reset(env)
    result = step(env, -1.0, length=6)
    assert result.source.tolist() == [[0, 1, 1, 1, 0, 0]]
    assert result.executed_actions[0, :4, 0].tolist() == [-1, 10, 10, 10], "the change of the target, to at most 40"
    assert result.executed.tolist() == [[True] * 4 + [False] * 2]
    assert result.terminated.tolist() == [[False] * 3 + [True] + [False] * 2]
    assert result.rewards.tolist() == [[0, 0, 0, 1, 0, 0]]
    assert result.success.tolist() == [True]
    step(env, -1.0, stop=False)
    assert len(sent(ports)) == 4, "nothing moves after the end"


@pytest.mark.parametrize(("button", "end"), [("failure", "terminated"), ("rerecord_episode", "truncated")])
def test_buttons_end_the_episode(make, button, end):
    env = make(teleoperator={"type": "chain_stick", "first": 9, "last": 1, "button": button})
    reset(env)
    result = step(env, 1.0)
    assert getattr(result, end).tolist() == [[False, True, False, False]]
    assert not result.success[0]
    assert (result.source == ActionSource.POLICY).all()


def test_a_leader_arm_records_demonstrations(make, ports):
    env = make(teleoperator={"type": "chain_leader"}, takeover="always")
    reset(env)
    result = step(env, -50.0)
    assert (result.source == ActionSource.PERSON).all()
    assert result.executed_actions[0, :, 0].tolist() == [10, 20, 30, 40]
    assert sent(ports)[-1] == [40, 40, 40]


def test_a_leader_arm_that_does_not_say_when_it_takes_over_is_refused(make):
    with pytest.raises(UserError, match="env.takeover: device 'chain_leader' does not say when a person takes over"):
        make(teleoperator={"type": "chain_leader"})


def test_a_device_that_disappears_stops_the_robot(make, ports):
    env = make(teleoperator={"type": "chain_stick"})
    reset(env)
    step(env, 50.0, length=2)
    (ports / "device").unlink()
    with pytest.raises(SafetyStop, match="env.teleoperator: the takeover device 'chain_stick' is not there any more"):
        step(env, 50.0)
    assert sent(ports) == [[10] * 3, [20] * 3, [20] * 3], "the last one tells it to stay"


def test_a_device_that_was_never_there_is_named(make, ports):
    (ports / "device").unlink()
    with pytest.raises(SafetyStop, match="was not there at the start .connect: DeviceNotConnectedError"):
        reset(make(teleoperator={"type": "chain_stick"}))
    assert not (ports / "log").exists(), "the robot is connected last"


# ------------------------------------------------------------------------------------------------------------- people


def answering(env, answers):
    """Press these buttons, one for each question, from a thread."""

    def press():
        panel = env._panel
        answered = None
        for answer in answers:
            while (question := panel.page_state()["question"]) == answered or not panel.press_button(question, answer):
                time.sleep(0.005)
            answered = question

    thread = threading.Thread(target=press)
    thread.start()
    return thread


def test_it_asks_before_it_moves(make, ports):
    env = make(reset={}, start_pose=dict.fromkeys(JOINTS, 25.0))
    assert env.waits_s == 480.0
    thread = answering(env, ["ready", "ready"])
    reset(env)
    thread.join()
    assert (
        env._panel.page_state()["text"] == "the robot acts on 'lift the cube'; stop ends the run before the next action"
    )
    assert env._panel.image_png() is not None


def test_a_missing_answer_is_named_with_the_deadline(make, ports):
    env = make(reset={"deadline_s": 0.05})
    with pytest.raises(NobodyAnswered, match=r"no one answered \"reset the scene for 'lift the cube': ready\?\" at"):
        reset(env)
    assert sent(ports) == []


def test_a_stop_in_an_episode_lets_the_robot_hold(make, ports):
    env = make(reset={})
    thread = answering(env, ["ready"])
    reset(env)
    thread.join()
    step(env, 50.0, length=2)
    env._panel.request_stop()
    with pytest.raises(SafetyStop, match="a person stopped the robot"):
        step(env, 50.0)
    assert sent(ports) == [[10] * 3, [20] * 3, [20] * 3]


def test_ctrl_c_ends_the_wait(make):
    env = make(reset={})
    env.stop_requested = lambda: True
    with pytest.raises(StopRequested):
        reset(env)


# -------------------------------------------------------------------------------------------------- lost connections


def test_a_lost_connection_is_a_named_fault_and_the_episode_begins_again(make, ports):
    env = make()
    reset(env)
    step(env, 50.0, length=2)
    (ports / "robot").unlink()
    result = step(env, 50.0)
    assert not result.executed.any()
    assert result.obs.state.tolist() == [[20, 20, 20]], "the last observation"
    (fault,) = env.faults()[0]
    assert fault.startswith("the connection to robot 'chain_follower' is lost (send_action: ConnectionError: could not")
    assert notes(ports, "disconnect"), "it was let go"
    (ports / "robot").touch()
    assert reset(env).state.tolist() == [[0, 0, 0]], "a new connection"
    assert step(env, 50.0).executed.all()
    assert env.faults() == {}


def test_a_robot_that_stays_away_ends_the_run(make, ports, monkeypatch):
    monkeypatch.setattr("vla_rl.plugins.envs.lerobot_robot.env.RETRY_S", 0.0)
    (ports / "robot").unlink()
    with pytest.raises(SafetyStop, match=r"env.robot: the connection to robot .* no device at .*; tried 3 times, so"):
        reset(make())


def test_a_robot_that_hangs_is_a_fault(make, monkeypatch):
    monkeypatch.setattr("vla_rl.plugins.envs.lerobot_robot.device_process.ANSWER_S", 0.3)
    monkeypatch.setattr("vla_rl.plugins.envs.lerobot_robot.device_process.CLOSE_S", 0.1)
    env = make(robot={"hang_after": 2})
    reset(env)
    assert not step(env, 50.0).executed.any()
    assert env.faults() == {0: ["robot 'chain_follower' has not answered within 0.3 s (send)"]}


def test_the_robot_is_let_go_when_the_process_of_its_env_is_killed(ports, fork_server):
    script = f"""
import time
import numpy as np
from vla_rl.core.spec.spec import make_component
from vla_rl.core.contexts import EnvContext
from vla_rl.plugins.envs.lerobot_robot import device_process, plugin
from vla_rl.plugins.envs.lerobot_robot.env import TargetLimits
env = plugin.build(make_component("env", "lerobot_robot", **{settings_of(ports)!r}).config, EnvContext(num_envs=1, chunk=4))
one = np.zeros(1, np.int64)
env.reset(one, one, one)
env.chunk_step(np.full((1, 2, 3), 50, np.float32), np.array([True]), True)
print("moved", flush=True)
time.sleep(60)
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with fork_server.start_python("-c", script, stdout=subprocess.PIPE, env=environment) as child:
        assert child.stdout.readline() == "moved\n"
        child.send_signal(signal.SIGKILL)
    until = time.monotonic() + 10
    while not notes(ports, "disconnect") and time.monotonic() < until:
        time.sleep(0.02)
    assert notes(ports, "disconnect")
    assert sent(ports) == [[10] * 3, [20] * 3, [20] * 3], "it was commanded to stay where it was"


# -------------------------------------------------------------------------------------------------------- what is wrong


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"robot": {"type": "so101_follower"}}, "env.robot.type: lerobot knows no 'so101_follower'; it knows: chain_f"),
        ({"robot": {"speed": 3}}, "env.robot: lerobot cannot make 'chain_follower' of these settings: .*speed"),
        ({"robot": {"cameras": {"front": {"type": "drawn"}}}}, "Specifying 'width' is required"),
        ({"robot": {"cameras": {}}}, "env.cameras: the robot has no camera; give it one in env.robot.cameras"),
        ({"cameras": ["top"]}, "env.cameras: the robot has front, and no top"),
        ({"state": ["wrist.pos"]}, "env.state: the robot reports shoulder.pos, elbow.pos, gripper.pos, and no wrist.pos"),
        ({"imports": ["no_such_robots"]}, "env.imports: no_such_robots cannot be imported"),
        ({"tasks": ["lift it", "Lift it!"]}, "env.tasks: two instructions differ only in signs"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_the_robot_are_refused(make, settings, message):
    with pytest.raises(UserError, match=message):
        make(**settings)


def install(folder, name, source):
    """Put a distribution of one module with a `config` next to it where child processes find it."""
    module = name.replace("-", "_")
    (folder / module).mkdir(parents=True)
    (folder / module / "__init__.py").write_text(source)
    (folder / module / "config.py").write_text(
        "from lerobot.robots.chain_follower.config_chain_follower import ChainFollowerConfig\n"
        "from lerobot.robots.config import RobotConfig\n"
        "from dataclasses import dataclass\n"
        "@RobotConfig.register_subclass('dashed')\n"
        "@dataclass\n"
        "class DashedConfig(ChainFollowerConfig): ...\n"
    )
    about = folder / f"{module}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")


def test_a_robot_of_a_distribution_with_dashes_is_found(make, tmp_path, monkeypatch):
    """lerobot 0.6.1 imports `lerobot-robot-dashed` by that name, which is none of a module."""
    source = "from lerobot.robots.chain_follower import ChainFollower\nfrom lerobot_robot_dashed import config\n"
    install(tmp_path / "site", "lerobot-robot-dashed", f"{source}class Dashed(ChainFollower): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert make(robot={"type": "dashed"}).info.action_low == (-90.0,) * 3


def test_a_plugin_that_cannot_be_imported_is_named_where_its_robot_is_asked_for(make, tmp_path, monkeypatch):
    install(tmp_path / "site", "lerobot-robot-dashed", "import no_such_sdk\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert make().info.action_low == (-90.0,) * 3
    wanted = "no 'dashed'; it knows: .*\n  the plugin lerobot_robot_dashed cannot be imported: .*no_such_sdk"
    with pytest.raises(UserError, match=wanted):
        make(robot={"type": "dashed"})


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (
            "get_observation",
            "announces front, shoulder.pos, .* in its observation_features, and its .* gives shoulder.pos.left, ",
        ),
        (
            "send_action",
            "announces shoulder.pos, .* in its action_features, and its send_action answers shoulder.pos.left, ",
        ),
    ],
)
def test_a_robot_that_answers_with_other_names_than_it_announces_is_named(make, tmp_path, monkeypatch, method, message):
    source = (
        "from lerobot.robots.chain_follower import ChainFollower\nfrom lerobot_robot_dashed import config\n"
        "class Dashed(ChainFollower):\n"
        f"    def {method}(self, *arguments):\n"
        f"        return {{f'{{name}}.left': value for name, value in super().{method}(*arguments).items()}}\n"
    )
    install(tmp_path / "site", "lerobot-robot-dashed", source)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    env = make(robot={"type": "dashed"})
    with pytest.raises(UserError, match=message):
        reset(env)
        step(env, 1.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_step": {"shoulder.pos": 1}}, "env.max_step: .* missing: elbow.pos, gripper.pos"),
        ({"action_bounds": {"wrist": [0, 1]}}, "env.action_bounds: .* missing: .*; unknown: wrist"),
        ({"start_pose": dict.fromkeys(JOINTS, 100)}, "env.start_pose: shoulder.pos: 100 is outside env.action_bounds"),
    ],
)
def test_limits_that_do_not_fit_the_robot_are_refused(tmp_path, settings, message):
    with pytest.raises(UserError, match=message):
        TargetLimits(config_of(tmp_path, **settings), JOINTS)


def test_a_robot_outside_the_bounds_approaches_them_by_steps(tmp_path):
    limits = TargetLimits(config_of(tmp_path), JOINTS)
    outside = np.array([120, -95, 0], np.float32)
    assert list(limits.by_name(outside, outside).values()) == [110, -90, 0]


def test_a_target_that_is_not_finite_is_never_sent(tmp_path):
    limits = TargetLimits(config_of(tmp_path), JOINTS)
    with pytest.raises(UserError, match="the next target is not finite"):
        limits.by_name(np.array([np.nan, 0, 0], np.float32), np.zeros(3, np.float32))


def test_a_robot_without_calibration_is_refused(make):
    with pytest.raises(
        UserError, match="env.robot: chain_follower is not calibrated; run lerobot-calibrate --robot.ty"
    ):
        reset(make(robot={"calibrated": False}))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"robot": {"type": 3}}, "has no type"),
        ({"tasks": []}, "give an instruction"),
        ({"action_bounds": [3, 3]}, "is not a range"),
        ({"max_step": 0}, "above 0"),
        ({"takeover": "always"}, "has no effect without a teleoperator"),
        ({"image_size": 4}, "give 8 to 1024"),
    ],
)
def test_settings_that_mean_nothing_are_refused(ports, settings, message):
    with pytest.raises(Problems, match=message):
        config_of(ports, **settings)


def test_one_env_drives_one_robot(ports):
    with pytest.raises(UserError, match="drives one robot, and this worker has 2; give env.num_envs: 1"):
        plugin.build(config_of(ports), EnvContext(num_envs=2))


def test_without_lerobot_it_says_where_to_name_it(tmp_path):
    with pytest.raises(UserError, match="env.python: .* cannot import lerobot"):
        plugin.build(config_of(tmp_path), EnvContext(num_envs=1))


# --------------------------------------------------------------------------------------------------------------- runs


def test_it_keeps_to_the_contract(ports):
    config = config_of(ports, control_hz=500, episode_seconds=0.04, start_pose=dict.fromkeys(JOINTS, 20.0))
    check_env(plugin, config, num_envs=1, seconds=3)


NETWORK = {
    "image_size": 32, "channels": [8], "keypoints": 2, "words": 16, "instruction": 4, "hidden": [16], "head": {"type": "gaussian"}
}  # fmt: skip


def robot_spec(ports, **changes):
    """SAC on the robot, with a person who takes over and presses success."""
    settings = settings_of(ports, teleoperator={"type": "chain_stick"}, control="step", episode_seconds=0.1)
    spec = scripted_spec(
        model={"type": "film_resnet", "network": NETWORK},
        env={"num_envs": 1},
        rollout={"episodes": 3, "group_size": 1},
        trainer={"type": "off_policy", "min_data": 4, "batch": 4, "hidden": [16], "capacity": 100},
    )
    del spec["algorithm"]
    del spec["plugins"]
    spec["env"] = {"type": "lerobot_robot", "num_envs": 1, **settings}
    spec["train"] = {"steps": 2, "lr": 1e-3, "micro_batch": 4}
    spec["eval"] = {"before": False, "episodes_per_task": 1}
    return parse_spec({**spec, **changes})


def test_sac_trains_on_the_robot_with_takeovers(ports):
    results = run(robot_spec(ports), ports / "run")
    lines = [json.loads(line) for line in (ports / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "env/success_rate" in line]
    assert [line["env/success_rate"] for line in steps] == [1.0, 1.0]
    assert all(0 < line["env/intervention_rate"] < 1 for line in steps)
    assert steps[-1]["off_policy/updates"] > 0
    assert "env/late_actions" in steps[-1]
    assert any("no episode can be repeated" in note for note in results["notes"])
    assert len(notes(ports, "disconnect")) == 1


def test_recorded_episodes_have_the_robots_names_and_rate(ports):
    spec = robot_spec(ports, hooks=[{"type": "lerobot", "what": "rollout", "only": "success"}])
    run(spec, ports / "run")
    info = json.loads((ports / "run" / "lerobot" / "meta" / "info.json").read_text())
    assert info["fps"] == 200
    assert info["features"]["action"]["names"] == list(JOINTS)
    assert info["features"]["observation.state"]["names"] == list(JOINTS)


def test_a_run_whose_device_is_unplugged_saves_and_resumes(ports, monkeypatch):
    issue = StepRollouts.issue

    def unplugging(rollouts, step, tickets):
        if step == 2:
            (ports / "device").unlink()
        issue(rollouts, step, tickets)

    monkeypatch.setattr(StepRollouts, "issue", unplugging)
    with pytest.raises(SafetyStop, match="takeover device 'chain_stick' is not there any more") as error:
        run(robot_spec(ports), ports / "run")
    assert "stopped after step 1; saved in" in "".join(error.value.__notes__)
    assert notes(ports, "disconnect")
    monkeypatch.setattr(StepRollouts, "issue", issue)
    (ports / "other").mkdir()
    for name in ("device", "robot"):
        (ports / "other" / name).touch()
    elsewhere = robot_spec(ports).to_dict()
    elsewhere["env"]["robot"]["port"] = str(ports / "other" / "robot")
    elsewhere["env"]["teleoperator"]["port"] = str(ports / "other" / "device")
    assert run(parse_spec(elsewhere), ports / "run", resume=True)["success"]["n"] == 1, "plugged in at other ports"


@pytest.fixture
def robots_python(tmp_path):
    """An interpreter that alone finds lerobot."""
    folder = tmp_path / "robot's venv"
    venv.create(folder, with_pip=False, symlinks=True)
    own = sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)})
    shared = [path for path in sys.path if path.endswith(("site-packages", "src"))]
    (Path(own) / "shared.pth").write_text("\n".join([*shared, str(DOUBLE)]) + "\n")
    return folder / "bin" / "python"


@pytest.mark.ray
@pytest.mark.slow
def test_lerobot_is_in_a_separate_interpreter(tmp_path, robots_python):
    for name in ("robot", "device"):
        (tmp_path / name).touch()
    spec = robot_spec(tmp_path, runtime={"backend": "ray"})
    spec = parse_spec({**spec.to_dict(), "env": {**spec.to_dict()["env"], "python": str(robots_python)}})
    results = run(spec, tmp_path / "run")
    assert results["success"]["n"] == 1
    assert len(notes(tmp_path, "disconnect")) == 1
