"""Statistics of actions relative to the state: openpi's and lerobot's numbers, and actions that are relative already."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from reference_files import reference
from vla_rl.core.errors import UserError
from vla_rl.core.types import Array
from vla_rl.toolkit.data.samples import compute_relative_statistics, compute_statistics

TENSORS = load_file(reference("relative", "relative.safetensors"))
CASES = json.loads(reference("relative", "relative.json").read_text())["statistics"]
BINS = 5000
"""Bins of both originals' histograms, whose quantiles are off by some of them."""


def episodes_of(name: str) -> dict[int, tuple[Array, Array]]:
    episode = TENSORS[f"{name}.episode"]
    rows = [episode == number for number in np.unique(episode)]
    return {n: (TENSORS[f"{name}.actions"][row], TENSORS[f"{name}.state"][row]) for n, row in enumerate(rows)}


def measured(case: dict[str, Any], ends: str) -> dict[str, dict[str, Array]]:
    references = [place if relative else None for place, relative in enumerate(case["mask"])]
    found = compute_relative_statistics("set", episodes_of("set" + case["set"]), references, case["chunk"], ends)
    return {part: {name: np.array(values) for name, values in rows.items()} for part, rows in found.items()}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
@pytest.mark.parametrize(("who", "ends"), [("openpi.one", "repeat"), ("lerobot", "drop")])
def test_the_originals_statistics(case: dict[str, Any], who: str, ends: str) -> None:
    """openpi counts every frame and repeats the last action, lerobot whole chunks: the data's key `ends` says which."""
    found = measured(case, ends)["action"]
    theirs = {name: TENSORS[f"{case['name']}.{who}.{name}"] for name in found}
    assert {name: len(row) for name, row in found.items()} == dict.fromkeys(found, len(case["mask"]))
    for name, tolerance in (("min", 2e-6), ("max", 2e-6), ("mean", 3e-5), ("std", 3e-5)):
        np.testing.assert_allclose(found[name], theirs[name], rtol=tolerance, atol=tolerance, err_msg=name)
    for name, share in (("q01", 0.01), ("q99", 0.99)):
        between = quantile_bounds(case, ends, share)
        width = (found["max"] - found["min"]) / BINS
        low, high = between[0] - 3 * width - 1e-6, between[1] + width + 1e-6
        for numbers in (found[name], theirs[name]):  # ours is exact, and theirs within some of their bins
            assert ((low <= numbers) & (numbers <= high)).all(), name
        assert ((between[0] - 1e-6 <= found[name]) & (found[name] <= between[1] + 1e-6)).all(), name


def quantile_bounds(case: dict[str, Any], ends: str, share: float) -> tuple[Array, Array]:
    """The two numbers of the data between which the quantile is, by NumPy's definitions."""
    chunks = []
    for actions, state in episodes_of("set" + case["set"]).values():
        count = len(actions) if ends == "repeat" else max(len(actions) - case["chunk"] + 1, 0)
        for start in range(count):
            rows = [min(start + step, len(actions) - 1) for step in range(case["chunk"])]
            chunks.append(actions[rows] - np.where(case["mask"], state[start], 0))
    numbers = np.concatenate(chunks).astype(np.float64)
    low, high = (np.quantile(numbers, share, axis=0, method=method) for method in ("lower", "higher"))
    return low, high


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_groots_statistics_of_each_step(case: dict[str, Any]) -> None:
    found = measured(case, "drop")["action_steps"]
    for name, ours in found.items():
        theirs = TENSORS[f"{case['name']}.lerobot_groot.{name}"]
        assert theirs.shape == (case["chunk"], len(case["mask"]))
        tolerance = 2e-6 if name in ("min", "max") else 3e-5
        np.testing.assert_allclose(ours.reshape(theirs.shape), theirs, rtol=tolerance, atol=tolerance, err_msg=name)


def test_the_states_own_statistics_and_recorded_chunks() -> None:
    """A row that holds a whole chunk counts as one sample, also at the end of an episode."""
    case = CASES[0]
    found = measured(case, "drop")
    state = compute_statistics({"state": TENSORS["setA.state"]})["state"]
    assert {name: tuple(values) for name, values in found["state"].items()} == state
    chunked = {}
    for number, (actions, states) in episodes_of("setA").items():
        count = max(len(actions) - case["chunk"] + 1, 0)
        chunks = np.stack([actions[i : i + case["chunk"]] for i in range(count)]) if count else actions[:0, None]
        chunked[number] = (chunks, states[:count])
    references = [place if relative else None for place, relative in enumerate(case["mask"])]
    whole = {number: pair for number, pair in chunked.items() if len(pair[0])}
    again = compute_relative_statistics("set", whole, references, case["chunk"], "drop")
    for name, values in again["action"].items():
        np.testing.assert_array_equal(values, found["action"][name])


def test_no_episode_is_as_long_as_a_chunk() -> None:
    with pytest.raises(UserError, match="none of the 5 episodes of set holds a chunk of 500 actions"):
        compute_relative_statistics("set", episodes_of("setA"), [0], 500, "drop")
    assert compute_relative_statistics("set", episodes_of("setA"), [0, *[None] * 6], 500, "repeat")


def joints(rng: np.random.Generator, relative: bool) -> tuple[Array, Array]:
    """An episode of a robot at joint angles from 0.5 to 1.5 whose actions are targets, or differences of such."""
    state = rng.uniform(0.5, 1.5, (30, 3)).astype(np.float32)
    moves = rng.normal(0, 0.05, (30, 3)).astype(np.float32)
    return (moves if relative else state + moves), state


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        ([False, True, False, True], r"those in episodes 1, 3 .* leave those out: `episodes: \{exclude: \[1, 3\]\}`"),
        ([True, True], "those in all episodes .* set model.actions: absolute"),
    ],
)
def test_recorded_differences_are_refused(kinds: list[bool], message: str) -> None:
    rng = np.random.default_rng(0)
    episodes = {number: joints(rng, relative) for number, relative in enumerate(kinds)}
    with pytest.raises(UserError, match=message):
        compute_relative_statistics("set", episodes, [0, 1, None], 4, "drop")


def test_targets_are_not_taken_for_differences() -> None:
    """Also around 0, where the two look alike; of a robot that rests at 0; and where the state never moves."""
    rng = np.random.default_rng(0)
    episodes = {number: joints(rng, relative=False) for number in range(4)}
    centred = {number: (actions - 1, state - 1) for number, (actions, state) in episodes.items()}
    resting = centred | {0: (np.zeros((9, 3), np.float32), np.full((9, 3), 0.05, np.float32))}
    still = {0: (np.zeros((9, 3), np.float32), np.ones((9, 3), np.float32))}
    for given in (episodes, centred, resting):
        found = compute_relative_statistics("set", given, [0, 1, None], 4, "drop")
        assert np.abs(found["action"]["mean"][:2]).max() < 0.1
    assert compute_relative_statistics("set", still, [0, 1, None], 4, "drop")["action"]["mean"] == (-1.0, -1.0, 0.0)
