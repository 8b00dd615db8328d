"""The controller and the success predicates of `libero_warp` against what LIBERO and robosuite said of recorded states.
tools/record_libero_control.py records them. `make libero-warp` runs these tests in an environment that has Warp."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from attrs import evolve

wp = pytest.importorskip("warp", reason="warp is not installed; make libero-warp runs this test")

from vla_rl.plugins.envs.libero.warp.controller import make_controller  # noqa: E402
from vla_rl.plugins.envs.libero.warp.goals import GeomContacts, Predicate  # noqa: E402
from vla_rl.plugins.envs.libero.warp.success import GoalKernels  # noqa: E402

CONTROL = dict(np.load(Path(__file__).with_name("libero_control.npz")))
"""200 of the 2,000 states of `record_libero_control.py torques`: ten tasks of five suites under random actions."""
PREDICATES = dict(np.load(Path(__file__).with_name("libero_predicates.npz")))
"""States of nine tasks of five suites, as `record_libero_control.py predicates` keeps them."""
CASES = sorted({name.rpartition("/")[0] for name in PREDICATES})
VIEW = {
    "bodies": "vec3",
    "sites": "vec3",
    "site_rotations": "mat33",
    "joints": "float32",
    "pairs": "vec2i",
    "worlds": "int32",
}


class Controls(NamedTuple):
    """What a sub-step of the controller leaves."""

    torques: np.ndarray
    fingers: np.ndarray
    hand: np.ndarray
    rotation: np.ndarray
    grip: np.ndarray


def run_controller(states: dict[str, np.ndarray], real: Any = wp.float64, first: bool = False) -> Controls:
    """Launch the kernel for recorded states. MuJoCo's axes are about the hand here, so that they are the Jacobian."""
    count = len(states["positions"])
    precision = np.float64 if real is wp.float64 else np.float32
    vector, square = wp.types.vector(3, real), wp.types.matrix((3, 3), real)

    def put(array: Any, dtype: Any = real) -> Any:
        return wp.array(np.ascontiguousarray(array).astype(precision), dtype=dtype)

    turning, moving = states["jacobian"][:, 3:], states["jacobian"][:, :3]
    hand, joints = put(states["hand"][:, None], vector), np.arange(7, dtype=np.int32)
    goals = put(states["goal_hand"], vector), put(states["goal_rotation"], square)
    grip = put(states.get("grip", np.zeros(count)))
    control = wp.zeros((count, 9), dtype=real)
    inputs = [
        *(first, 0, 0),
        wp.array(np.stack([joints, joints, joints]), dtype=int),
        wp.array(np.arange(49, dtype=np.int32).reshape(7, 7), dtype=int),
        put(np.outer([-np.inf, np.inf], np.ones(7))),
        wp.array(np.array([7, 8], np.int32), dtype=int),
        put([[0.0, 0.0], [-1.0, 1.0]]),
        put(states["action"]),
        put(np.concatenate([turning, moving], 1).transpose(0, 2, 1), wp.types.vector(6, real)),
        hand,
        put(states["masses"].reshape(count, 49)),
        put(states["bias"]),
        put(states["positions"]),
        put(states["velocities"]),
        hand,
        put(states["rotation"][:, None], square),
        *goals,
        put(states["posture"]),
        grip,
    ]
    wp.launch(make_controller(real), dim=count, inputs=inputs, outputs=[control], device="cpu")
    commands = control.numpy()
    return Controls(commands[:, :7], commands[:, 7:], *(array.numpy() for array in (*goals, grip)))


def test_torques_are_robosuites() -> None:
    assert run_controller(CONTROL).torques - CONTROL["torques"] == pytest.approx(0, abs=1e-9)


def test_torques_in_32_bits_are_close() -> None:
    torques = run_controller(CONTROL, wp.float32).torques.astype(np.float64)
    largest = np.abs(CONTROL["torques"]).max(1, keepdims=True)
    assert (torques - CONTROL["torques"]) / largest == pytest.approx(0, abs=1e-4)


def test_goals_follow_actions_as_in_robosuite() -> None:
    first = {"hand": CONTROL["first_hand"], "rotation": CONTROL["first_rotation"]}
    found = run_controller(CONTROL | first | {"goal_rotation": CONTROL["goal_before"]}, first=True)
    still = (CONTROL["action"][:, 3:6] == 0).all(1)
    assert found.hand - CONTROL["goal_hand"] == pytest.approx(0, abs=1e-15)
    assert found.rotation - CONTROL["goal_rotation"] == pytest.approx(0, abs=2e-7), "robosuite has 32 bits here"
    assert 20 < still.sum() < 180
    assert (found.rotation[still] == CONTROL["goal_before"][still]).all()
    later = run_controller(CONTROL)
    assert (later.hand == CONTROL["goal_hand"]).all() and (later.rotation == CONTROL["goal_rotation"]).all()


def test_one_singular_arm_leaves_the_others_alone() -> None:
    alone = run_controller(CONTROL).torques
    changed = {name: CONTROL[name].copy() for name in ("masses", "hand")}
    changed["masses"][3] = 0.0
    changed["hand"][5] = np.nan
    torques = run_controller(CONTROL | changed).torques
    sound = np.ones(200, bool)
    sound[[3, 5]] = False
    assert not np.isfinite(torques[~sound]).all(1).any()
    assert (torques[sound] == alone[sound]).all()


def test_the_gripper_closes_by_the_sign_of_an_action() -> None:
    actions, grip = np.zeros((200, 7)), np.zeros(200)
    actions[0, 6], actions[1, 6] = 0.3, -2.0
    for _ in range(150):
        found = run_controller(CONTROL | {"action": actions, "grip": grip})
        grip = found.grip
    assert grip[:3].tolist() == [1.0, -1.0, 0.0]
    assert found.fingers[:3].tolist() == [[-1.0, 1.0], [1.0, -1.0], [0.0, 0.0]]


# --------------------------------------------------------------------------------------------------- predicates


def read_predicate(fields: dict[str, Any]) -> Predicate:
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    if contact := fields.get("contact"):
        values["contact"] = GeomContacts(one=tuple(contact["one"]), other=tuple(contact["other"]))
    return Predicate(**values)


def read_case(name: str) -> tuple[tuple[Predicate, ...], dict[str, np.ndarray], np.ndarray]:
    view = {part: PREDICATES[f"{name}/{part}"] for part in VIEW}
    return tuple(map(read_predicate, json.loads(str(PREDICATES[f"{name}/goal"])))), view, PREDICATES[f"{name}/truth"]


def judge(goal: tuple[Predicate, ...], view: dict[str, np.ndarray]) -> np.ndarray:
    """Return whether each predicate holds, and all of them, bool [N, predicates + 1]."""
    put = partial(wp.array, device="cpu")
    with wp.ScopedDevice("cpu"):
        kernels = GoalKernels(goal, len(view["bodies"]), num_geoms=1000)
        *scene, pairs, worlds = (put(view[name], dtype=getattr(wp, dtype)) for name, dtype in VIEW.items())
        kernels.evaluate(scene, pairs, worlds, put([len(view["worlds"])], dtype=int))
        held = kernels.held.numpy()
    return np.concatenate([held, held.all(1, keepdims=True)], axis=1)


@pytest.mark.parametrize("name", CASES)
def test_predicates_judge_as_liberos(name: str) -> None:
    goal, view, truth = read_case(name)
    assert (judge(goal, view) == truth).all()
    assert truth.any(0).all() and not truth.all(0).any(), "each is seen to hold and not to hold"


def test_all_suites_and_kinds_of_predicates_are_recorded() -> None:
    kinds = {predicate.kind for name in CASES for predicate in read_case(name)[0]}
    assert kinds >= {"on object", "on site", "in site"} and kinds & {"<", ">", ">="}
    assert {name.split("/")[0] for name in CASES} == {
        f"libero_{suite}" for suite in ("spatial", "object", "goal", "10", "90")
    }


def test_contacts_belong_to_their_world() -> None:
    goal, view, truth = read_case("libero_spatial/0")
    held = int(truth[:, 0].nonzero()[0][0])
    elsewhere = np.where(view["worlds"] == held, -1, view["worlds"])
    expected = truth[:, 0].copy()
    expected[held] = False
    assert (judge(goal, view | {"worlds": elsewhere})[:, 0] == expected).all()


def test_contacts_of_two_predicates_do_not_mix() -> None:
    """The bowl touches the plate in each world where it is on it; nothing touches the plate there with the first geom of
    the other predicate."""
    goal, view, truth = read_case("libero_spatial/0")
    (on,) = goal
    unseen = GeomContacts(one=(998,), other=on.contact.one)
    other = evolve(on, contact=unseen)
    judged = judge((other, on), view)
    assert not judged[:, 0].any() and (judged[:, 1] == truth[:, 0]).all()
    assert (judge((on, other, on), view)[:, [0, 2]] == truth[:, :1]).all()
