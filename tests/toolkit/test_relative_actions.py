"""Actions relative to the state: openpi's and lerobot's numbers, which number belongs to which, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from reference_files import reference
from vla_rl.core.errors import UserError
from vla_rl.core.spec.structure import Problems, Structurer
from vla_rl.testing import synthetic
from vla_rl.toolkit.models.checkpoints.lerobot import mask_by_names
from vla_rl.toolkit.relative_actions import References, RelativeActions, match_state, take_offsets

TENSORS = load_file(reference("relative", "relative.safetensors"))
CASES = json.loads(reference("relative", "relative.json").read_text())
BOUNDS = ((-1.0, 1.0),)


def references_of(case: dict[str, Any]) -> References:
    """By place, as both originals do; numbers beyond the mask are absolute."""
    mask = case["mask"] or []
    return tuple(place if place < len(mask) and mask[place] else None for place in range(case["action"]))


@pytest.mark.parametrize("case", CASES["cases"], ids=lambda case: case["name"])
def test_the_originals_numbers(case: dict[str, Any]) -> None:
    """To the bit. lerobot rounds a float64 state first, and openpi rounds after; a policy's states are float32."""
    part = {key.split(".", 1)[1]: value for key, value in TENSORS.items() if key.startswith(case["name"] + ".")}
    actions, state, references = part["actions"], part["state"], references_of(case)
    too_short = max((place for place in references if place is not None), default=-1) >= state.shape[-1]
    if too_short:  # refused before, also a state of one number, which both originals repeat over all dimensions
        env = synthetic.env_info(action_dim=case["action"], state_dim=state.shape[-1], bounds=BOUNDS)
        relative = tuple(number for number, place in enumerate(references) if place is not None)
        with pytest.raises(UserError, match=f"which has {state.shape[-1]} numbers"):
            match_state(RelativeActions(relative_to="state", dimensions=relative), env)
        assert state.shape[-1] == 1 or {case["openpi"], case["lerobot"]} & {"ValueError", "RuntimeError"}
        return
    compared = 0
    for who, shown in (("openpi", state), ("lerobot", state.astype(np.float32))):
        if case[who] != "ok":
            assert who == "openpi" and case["chunk"] == 0  # an action without a chunk: lerobot takes it, as we do
            continue
        for given in (shown, torch.from_numpy(shown)):
            offsets = np.asarray(take_offsets(given, references))
            offsets = offsets[..., None, :] if case["chunk"] else offsets
            forward = (actions - offsets).astype(np.float32)
            found = {
                "relative": forward,
                "back": (forward + offsets).astype(np.float32),
                "absolute": (part["predicted"] + offsets).astype(np.float32),
            }
            for name, ours in found.items():
                theirs = part[f"{who}.{name}"]
                if case["kind"] == "not finite where the mask is off" and who == "lerobot":
                    lost = np.isnan(theirs)  # of 0 times infinity; the state at an absolute number means nothing here
                    assert lost.any() and not np.isnan(ours).any()
                    theirs = np.where(lost, ours, theirs)
                assert ours.dtype == np.float32 and np.array_equal(ours, theirs), (who, name)
        compared += 1
    assert compared
    assert np.array_equal(actions, part["actions"])  # the input is not changed


def test_every_kind_of_case_is_there() -> None:
    assert len(CASES["cases"]) == 100 and len({case["kind"] for case in CASES["cases"]}) == 18


@pytest.mark.parametrize("case", CASES["masks"])
def test_openpis_masks(case: dict[str, Any]) -> None:
    """`make_bool_mask(6, -1)` is a list of dimensions."""
    mask = case["mask"]
    chosen = tuple(place for place, relative in enumerate(mask) if relative)
    if not chosen:
        with pytest.raises(ValueError, match="leave `actions` out for absolute actions"):
            RelativeActions(relative_to="state", dimensions=chosen)
        return
    env = synthetic.env_info(action_dim=len(mask), state_dim=len(mask) + 1, bounds=BOUNDS)
    matched = match_state(RelativeActions(relative_to="state", dimensions=chosen), env)
    assert matched == tuple(place if relative else None for place, relative in enumerate(mask))


@pytest.mark.parametrize("case", CASES["names"])
def test_lerobots_names(case: dict[str, Any]) -> None:
    assert mask_by_names(case["action_names"], case["exclude_joints"], case["action"]) == case["mask"]


def test_names_and_places_of_lerobot_without_a_mask() -> None:
    assert mask_by_names(None, ("gripper",), 2) == [True, True]
    assert mask_by_names(("Left_Gripper", "x"), ("gripper",), 3) == [False, True, True]


def matched(dimensions: Any = None, action: str = "", state: str = "", **sizes: int) -> References:
    names = {"action_names": tuple(action.split()), "state_names": tuple(state.split())}
    sizes = {"action_dim": len(names["action_names"]), "state_dim": len(names["state_names"])} | sizes
    env = synthetic.env_info(bounds=BOUNDS, **sizes)
    return match_state(RelativeActions(relative_to="state", dimensions=dimensions), attrs.evolve(env, **names))


def test_numbers_are_matched_by_name_else_by_place() -> None:
    assert matched(action="a b gripper", state="a b gripper") == (0, 1, None)
    assert matched(action="a b left_Gripper", state="vel B gripper A") == (3, 1, None)  # another order, and more
    assert matched((0, 2), action="a b c", state_dim=5) == (0, None, 2)  # the state has no names
    assert matched((0, 2), state="a b c", action_dim=3) == (0, None, 2)
    assert matched(("C", 0), action="a b c", state="c b a") == (2, None, 0)
    assert matched({"a": "tcp_a", 1: 3}, action="a b", state="x tcp_a y z") == (1, 3)
    assert matched(action="gripper_1 gripper_2", state="a b") == ()  # nothing is left to be relative


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dimensions": (0,), "action_dim": 2, "state_dim": 0}, "needs a state, and this simulator has none"),
        ({"action_dim": 3, "state_dim": 3}, r"neither the simulator nor the data names the 3 numbers .* \[0, 1, 2\]"),
        ({"dimensions": (1, 4), "action_dim": 3, "state_dim": 3}, "an action has no number 4; it has 3"),
        ({"dimensions": ("x",), "action_dim": 3, "state_dim": 3}, "no number 'x'; its names are not known"),
        ({"dimensions": ("elbw",), "action": "elbow wrist", "state": "elbow wrist"}, "'elbw'; did you mean 'elbow'"),
        ({"action": "x y", "state": "x tcp_y"}, "'y' of an action is relative to the state, which has no number of t"),
        ({"dimensions": (0, 3), "action_dim": 4, "state_dim": 2}, r"number 3 of the state, which has 2 numbers \(an"),
        ({"dimensions": (0, "a"), "action": "a b", "state": "a b"}, "names number 0 of an action twice"),
        ({"dimensions": {0: "c"}, "action": "a b", "state": "a b"}, "the state has no number 'c'"),
    ],
)  # fmt: skip
def test_what_cannot_be_matched(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        matched(**arguments)


def test_a_table_of_a_spec() -> None:
    reader = Structurer()
    read = reader.read_value({"relative_to": "state", "dimensions": [0, "wrist"]}, RelativeActions)
    assert read == RelativeActions(relative_to="state", dimensions=(0, "wrist"))
    read = reader.read_value({"relative_to": "state", "dimensions": {"x": "tcp_x", 1: 4}}, RelativeActions)
    assert read.dimensions == {"x": "tcp_x", 1: 4}
    for table, message in (
        ({}, "relative_to: required"),
        ({"relative_to": "action"}, "expected one of 'state'"),
        ({"relative_to": "state", "dimensions": []}, "is empty"),
        ({"relative_to": "state", "dimensions": [-1]}, "-1 is not a place"),
        ({"relative_to": "state", "dimensions": [1, 1]}, "names 1 twice"),
    ):
        with pytest.raises(Problems, match=message):
            reader.read_value(table, RelativeActions)
