"""The controller and the success predicates of `libero_warp` against what LIBERO and robosuite said of recorded states.
tools/record_libero_control.py records them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from vla_rl.core.contexts import CheckContext
from vla_rl.core.errors import UserError
from vla_rl.core.spec.structure import Problems
from vla_rl.plugins.envs.libero.suites import LiberoTask
from vla_rl.plugins.envs.libero.warp import predicates as predicates_of_libero
from vla_rl.plugins.envs.libero.warp.config import LiberoWarpConfig
from vla_rl.plugins.envs.libero.warp.controller import ArmGoal, ArmState, compute_torques, move_grip, set_goal
from vla_rl.plugins.envs.libero.warp.goals import check_goal
from vla_rl.plugins.envs.libero.warp.predicates import GeomContacts, Predicate, SceneView, evaluate_goal

CONTROL = dict(np.load(Path(__file__).with_name("libero_control.npz")))
"""200 of the 2,000 states of `record_libero_control.py torques`: ten tasks of five suites under random actions."""
PREDICATES = dict(np.load(Path(__file__).with_name("libero_predicates.npz")))
"""States of nine tasks of five suites, as `record_libero_control.py predicates` keeps them."""
CASES = sorted({name.rpartition("/")[0] for name in PREDICATES})


def arm_of(dtype: torch.dtype) -> ArmState:
    return ArmState(*(torch.from_numpy(CONTROL[name]).to(dtype) for name in ArmState._fields))


def goal_of(dtype: torch.dtype) -> ArmGoal:
    names = ("goal_hand", "goal_rotation", "posture")
    return ArmGoal(*(torch.from_numpy(CONTROL[name]).to(dtype) for name in names), torch.zeros(200, dtype=dtype))


def test_torques_are_robosuites() -> None:
    torques = compute_torques(arm_of(torch.float64), goal_of(torch.float64))
    assert (torques.numpy() - CONTROL["torques"]) == pytest.approx(0, abs=1e-9)


def test_torques_in_32_bits_are_close() -> None:
    torques = compute_torques(arm_of(torch.float32), goal_of(torch.float32)).double().numpy()
    largest = np.abs(CONTROL["torques"]).max(1, keepdims=True)
    assert (torques - CONTROL["torques"]) / largest == pytest.approx(0, abs=1e-4)


def test_goals_follow_actions_as_in_robosuite() -> None:
    arm = arm_of(torch.float64)
    names = ("first_hand", "first_rotation", "action", "goal_before")
    hand, rotation, actions, before = (torch.from_numpy(CONTROL[name]) for name in names)
    goal = goal_of(torch.float64)._replace(rotation=before)
    goal = set_goal(goal, arm._replace(hand=hand, rotation=rotation), actions)
    still = (CONTROL["action"][:, 3:6] == 0).all(1)
    assert goal.hand.numpy() - CONTROL["goal_hand"] == pytest.approx(0, abs=1e-15)
    assert goal.rotation.numpy() - CONTROL["goal_rotation"] == pytest.approx(0, abs=2e-7), "robosuite has 32 bits here"
    assert 20 < still.sum() < 180
    assert (goal.rotation.numpy()[still] == CONTROL["goal_before"][still]).all()


def test_one_singular_arm_leaves_the_others_alone() -> None:
    arm, goal = arm_of(torch.float64), goal_of(torch.float64)
    alone = compute_torques(arm, goal)
    arm.masses[3] = 0.0
    arm.hand[5] = torch.nan
    torques = compute_torques(arm, goal)
    sound = torch.ones(200, dtype=torch.bool)
    sound[[3, 5]] = False
    assert not torques[~sound].isfinite().all(1).any()
    assert (torques[sound] - alone[sound]).abs().max() == 0


def test_the_gripper_closes_by_the_sign_of_an_action() -> None:
    goal = goal_of(torch.float64)
    actions = torch.zeros(200, 7, dtype=torch.float64)
    actions[0, 6], actions[1, 6] = 0.3, -2.0
    for _ in range(150):
        goal = move_grip(goal, actions)
    assert goal.grip[:3].tolist() == [1.0, -1.0, 0.0]


# --------------------------------------------------------------------------------------------------- predicates


def read_predicate(kind: str, fields: dict[str, object]) -> Predicate:
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    contact = fields.get("contact")
    if isinstance(contact, dict):
        values["contact"] = GeomContacts(one=tuple(contact["one"]), other=tuple(contact["other"]))
    predicate = getattr(predicates_of_libero, kind)(**values)
    assert isinstance(predicate, Predicate)
    return predicate


def read_case(name: str) -> tuple[tuple[Predicate, ...], SceneView, torch.Tensor]:
    parts = (torch.from_numpy(PREDICATES[f"{name}/{part}"]) for part in SceneView._fields)
    view = SceneView(*(part.long() if part.dtype == torch.int16 else part for part in parts))
    goal = tuple(read_predicate(kind, fields) for kind, fields in json.loads(str(PREDICATES[f"{name}/goal"])))
    return goal, view, torch.from_numpy(PREDICATES[f"{name}/truth"])


@pytest.mark.parametrize("name", CASES)
def test_predicates_judge_as_liberos(name: str) -> None:
    goal, view, truth = read_case(name)
    judged = torch.stack([*(predicate.evaluate(view) for predicate in goal), evaluate_goal(goal, view)], dim=1)
    assert (judged == truth).all()
    assert truth.any(0).all() and not truth.all(0).any(), "each is seen to hold and not to hold"


def test_all_suites_and_kinds_of_predicates_are_recorded() -> None:
    kinds = {type(predicate).__name__ for name in CASES for predicate in read_case(name)[0]}
    assert kinds == {"OnObject", "OnSite", "InSite", "JointThreshold"}
    assert {name.split("/")[0] for name in CASES} == {
        f"libero_{suite}" for suite in ("spatial", "object", "goal", "10", "90")
    }


def test_contacts_belong_to_their_world() -> None:
    goal, view, truth = read_case("libero_spatial/0")
    held = int(truth[:, 0].nonzero()[0])
    elsewhere = view._replace(worlds=torch.where(view.worlds == held, -1, view.worlds))
    judged = goal[0].evaluate(elsewhere)
    expected = truth[:, 0].clone()
    expected[held] = False
    assert (judged == expected).all()


def test_a_goal_with_an_unknown_predicate_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "task.bddl"
    file.write_text("(define (problem x)\n (:init (Near a b))\n (:goal (And (On a b) ; (Near c d)\n (Stack a b))))\n")
    task = LiberoTask(index=0, name="stack_them", instruction="stack them", bddl_file=str(file))
    with pytest.raises(UserError, match=r"'stack_them' asks 'stack'.*written are: on, in, open, close"):
        check_goal(task)
    file.write_text("(define (problem x)\n (:goal (And (On a b) (Close c) (Turnon d))))\n")
    check_goal(task)


# ----------------------------------------------------------------------------------------------------- settings


def test_settings_of_libero_are_those_of_the_same_tasks() -> None:
    config = LiberoWarpConfig(suite="libero_goal", tasks=(3,), settle_steps=2, train_states="official")
    official = config.official()
    assert (official.suite, official.tasks, official.settle_steps) == ("libero_goal", (3,), 2)
    assert official.train_states == "official"
    assert not official.cameras
    with pytest.raises(ValueError, match="give one of suite"):
        LiberoWarpConfig()


def test_a_cpu_is_said_to_be_for_tests(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("libero", reason="needs the extra libero or libero-warp")
    from vla_rl.plugins.envs.libero.warp.checks import check_tasks

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    check_tasks(LiberoWarpConfig(suite="libero_spatial", tasks=(0,)), CheckContext())
    assert "on a CPU it is for tests" in caplog.text
    caplog.clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    check_tasks(LiberoWarpConfig(suite="libero_spatial", tasks=(0,)), CheckContext())
    assert not caplog.text
    with pytest.raises(Problems, match="no LIBERO suite 'libero_spacial'"):
        check_tasks(LiberoWarpConfig(suite="libero_spacial"), CheckContext())
