"""The rehearsal: lerobot's own classes and a twin of the SO-101 arm in MuJoCo, in the robot's process.

Run it with an interpreter that has them: pip install -e . examples/so101_twin
"""

from __future__ import annotations

import json
import urllib.request
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from time import sleep

import pytest

from vla_rl.core.errors import SafetyStop
from vla_rl.core.spec.spec import load_spec, make_component
from vla_rl.plugins.envs.lerobot_robot import plugin
from vla_rl.runtime.start import clone, evaluate, run
from vla_rl.testing import check_env

EXAMPLE = Path(__file__).parents[2] / "examples" / "rehearse_so101.yaml"
JOINTS = ["shoulder_pan.pos", "shoulder_lift.pos", "elbow_flex.pos", "wrist_flex.pos", "wrist_roll.pos", "gripper.pos"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.sim,
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("lerobot_robot_so101_twin") is None, reason="needs examples/so101_twin, and lerobot"),
]


def load_short(home: Path, *changes: str):
    """Load the example, shortened, in one process, with a cable and demonstrations in a folder."""
    return load_spec(
        EXAMPLE,
        [
            "env.python=null",
            "runtime.backend=local",
            f"env.robot.port={home / 'cable'}",
            f"env.teleoperator.port={home / 'cable'}",
            "env.robot.seed=1",
            "env.eval_episodes=2",
            f"imitation.data.folder={home / 'demonstrations'}",
            "imitation.steps=4",
            "train={steps: 2, lr: 2.0e-4, micro_batch: 16, checkpoint_every: 1}",
            "rollout.episodes=2",
            "trainer.min_data=4",
            "trainer.critic_updates=2",
            "trainer.batch=16",
            *changes,
        ],
    )


def read_steps(folder: Path) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "env/success_rate" in line]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with two demonstrations of the operator."""
    home = tmp_path_factory.mktemp("rehearsal")
    record = make_component("hook", "lerobot", folder=str(home / "demonstrations"))
    results = evaluate(load_short(home, "env.takeover=always"), record=record)
    assert results["success"]["rate"] == 1.0
    return home


def test_demonstrations_have_the_names_and_the_rate_of_the_arm(home):
    info = json.loads((home / "demonstrations" / "meta" / "info.json").read_text())
    assert (info["total_episodes"], info["fps"]) == (2, 40)
    assert info["features"]["action"]["names"] == JOINTS


def test_the_twin_keeps_to_the_contract(tmp_path):
    spec = load_short(tmp_path, "env.control_hz=200", "env.episode_seconds=0.04")
    check_env(plugin, spec.env.config, num_envs=1, seconds=3)


def test_it_is_cloned_and_trained_on(home, tmp_path):
    clone(load_short(home), tmp_path / "sft", False)
    checkpoint = f"model.checkpoint={tmp_path / 'sft' / 'checkpoints' / 'last' / 'model'}"
    results = run(load_short(home, checkpoint), tmp_path / "run")
    steps = read_steps(tmp_path / "run")
    assert results["success"]["n"] == 2
    assert steps[-1]["off_policy/updates"] > 0
    assert "env/late_actions" in steps[-1]


def test_an_operator_without_patience_helps_every_time(home):
    results = evaluate(load_short(home, "env.teleoperator.patience=0"))
    assert (results["success"]["rate"], results["interventions"]["rate"]) == (1.0, 1.0)


def test_a_slow_bus_is_counted_and_the_run_ends_as_it_should(home, tmp_path):
    run(load_short(home, "env.robot.bus_seconds=0.06"), tmp_path / "run")
    assert all(line["env/late_actions"] > 0.9 for line in read_steps(tmp_path / "run"))


@pytest.fixture
def cable(tmp_path):
    """Changes of the spec for another cable, which can be lost."""
    return [f"env.{device}.port={tmp_path / 'cable'}" for device in ("robot", "teleoperator")]


def test_a_loose_contact_is_a_fault_and_the_run_ends_as_it_should(home, tmp_path, cable):
    results = run(load_short(home, *cable, "env.robot.lose_after=30"), tmp_path / "run")
    assert (results["success"]["n"], results["faults"]) == (2, 1)
    assert len(read_steps(tmp_path / "run")) == 2


def test_a_cable_that_was_lost_before_holds_and_says_so(home, tmp_path, cable, caplog):
    """The page's two rows, one after the other: the second needs the file of the first to be gone."""
    from lerobot_robot_so101_twin import SO101Twin, SO101TwinConfig

    changes = [*cable, "env.robot.lose_after=30"]
    assert evaluate(load_short(home, *changes))["faults"] == 1
    assert evaluate(load_short(home, *changes, "env.robot.lose_seconds=1000"))["faults"] == 0
    SO101Twin(SO101TwinConfig(id="twin", port=str(tmp_path / "cable"), lose_after=30))
    assert "lose_after does nothing" in caplog.text
    (tmp_path / "cable").unlink()
    with pytest.raises(SafetyStop, match="tried 3 times"):
        evaluate(load_short(home, *changes, "env.robot.lose_seconds=1000"))


def test_a_lost_cable_ends_the_run_which_is_saved_and_continues(home, tmp_path, cable):
    spec = load_short(
        home,
        *cable,
        "env.robot.lose_after=110",
        "env.robot.lose_seconds=1000",
        "train={steps: 3, lr: 2.0e-4, micro_batch: 16}",
    )
    with pytest.raises(
        SafetyStop, match="env.robot: the connection to robot 'so101_twin' is lost .*tried 3 times"
    ) as error:
        run(spec, tmp_path / "run")
    saved = len(read_steps(tmp_path / "run"))
    assert saved, "no step was finished, so this test shows nothing"
    assert f"stopped after step {saved}; saved in" in "".join(error.value.__notes__)
    (tmp_path / "cable").write_text("0")  # plugged in again
    run(spec, tmp_path / "run", resume=True)
    assert [line["step"] for line in read_steps(tmp_path / "run")] == [1, 2, 3]


def press_ready_then_stop(file: Path, episodes: int, pressed: list[str]) -> None:
    """Press ready at the page that `file` names, and stop in the midst of an episode. Append what was pressed."""
    while not file.exists():
        sleep(0.05)
    address, _, token = file.read_text().strip().partition("?token=")

    def ask_page(path: str, body: str | None = None) -> dict:
        request = urllib.request.Request(f"{address}{path}", body and body.encode(), {"X-Token": token})
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)

    state = {"text": ""}
    while pressed.count("ready") < episodes or not state["text"].startswith("the robot acts"):
        state = ask_page("state")
        if "ready" in state["answers"] and state["answered"] is None:
            ask_page("press", f"{state['question']} ready")
            pressed += ["ready"] if state["text"].startswith("reset the scene") else []
        sleep(0.02)
    pressed.append("stop")
    ask_page("press", "stop")


def test_a_stop_in_an_episode_ends_the_run_which_is_saved_and_continues(home, tmp_path):
    file, pressed = tmp_path / "page", []
    person = Thread(target=press_ready_then_stop, args=(file, 3, pressed), daemon=True)
    person.start()
    reset = f"env.reset={{ask: {{type: page, address_file: {file}}}, deadline_s: 100}}"
    with pytest.raises(SafetyStop, match="a person stopped the robot at the page") as error:
        run(load_short(home, reset), tmp_path / "run")
    person.join()
    assert "stopped after step 1; saved in" in "".join(error.value.__notes__)
    assert pressed == ["ready", "ready", "ready", "stop"]
    run(load_short(home), tmp_path / "run", resume=True)
    assert [line["step"] for line in read_steps(tmp_path / "run")] == [1, 2]
