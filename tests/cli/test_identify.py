"""`vla-rl identify` finds the conventions that a policy was trained with, and says what it cannot tell."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attrs import field, frozen

import vla_rl
from vla_rl import UserError
from vla_rl.cli.identify.identify import describe_findings
from vla_rl.cli.identify.keys import declared_conventions
from vla_rl.core.spec.sections import ConventionsSpec
from vla_rl.plugins.envs.tabletop.config import TabletopConfig, describe_env
from vla_rl.toolkit.models.conventions import Converter

SPEC: dict[str, Any] = {
    "name": "policy",
    "model": {"type": "openvla_oft", "checkpoint": "builtin:tabletop"},
    "env": {"type": "tabletop", "num_envs": 16},
    "imitation": {"expert": {"episodes": 128, "noise": 0.2}, "steps": 15, "lr": 5e-4, "batch": 64},
    "rollout": {"chunk": 4, "episodes": 16, "group_size": 8},
    "algorithm": {"type": "grpo"},
    "train": {"steps": 1, "lr": 1e-4, "micro_batch": 64},
    "eval": {"before": False, "episodes_per_task": 1},
    "runtime": {"backend": "local"},
    "hooks": [],
}


SMALL = {"frames": 32, "passes": 900}


def test_broken_conventions_are_found():
    lines: list[str] = []
    broken = ["conventions.channels=bgr", "conventions.action_order=[1,0,2]"]
    result = vla_rl.identify(SPEC, env=True, **SMALL, overrides=broken, say=lines.append)
    assert result["changed"] == {"conventions.channels": "rgb", "conventions.action_order": []}
    assert result["passes"] <= 900 and "at most 900 forward passes of a frame" in lines[0]
    assert "conventions:\n" in describe_findings(result)


def test_conventions_of_a_training_are_found(tmp_path):
    vla_rl.clone(SPEC, tmp_path, overrides=["conventions.images=flipped"])
    broken = ["conventions.images=as_is", "conventions.channels=bgr", "conventions.action_order=[1,0,2]"]
    result = vla_rl.identify(tmp_path, env=True, overrides=broken)
    worlds = [result["changed"], *({**result["changed"], **change} for change in result["open"])]
    found = {"conventions.channels": "rgb", "conventions.action_order": []}
    assert result["changed"].items() >= found.items()
    assert any(world.get("conventions.images") == "flipped" for world in worlds)


def test_a_sound_spec_stays_as_it_is():
    result = vla_rl.identify(SPEC, env=True, **SMALL)
    assert result["changed"] == {} and result["better_than_random"]
    assert result["keys"]["conventions.channels"]["status"] == "confirmed"
    assert "the spec's own values are confirmed" in describe_findings(result)
    mirrored = result["keys"]["conventions.images"]
    assert mirrored["others"] and "text or gravity" in mirrored["evidence"]  # a mirrored table is a table


def test_demonstrations_come_from_a_data_set_and_episodes_confirm(tmp_path):
    vla_rl.evaluate(SPEC, overrides=["eval.episodes_per_task=4"], record=tmp_path / "data")
    result = vla_rl.identify(SPEC, data=tmp_path / "data", **SMALL, episodes=8)
    assert result["changed"] == {} and result["better_than_random"]
    episodes = result["episodes"]
    assert episodes["first"]["n"] == episodes["second"]["n"] == 8 and not episodes["second_is_better"]
    assert episodes["second_differs"] and "in the simulator, on the same 8 states" in describe_findings(result)


def test_an_untrained_policy_is_said_to_know_nothing():
    spec = {**SPEC, "model": {"type": "film_resnet"}}
    result = vla_rl.identify(spec, env=True, frames=32, passes=400)
    assert not result["better_than_random"] and result["changed"] == {} and result["confidence"] == 0
    assert "nothing can be said" in describe_findings(result)


def test_what_cannot_be_compared_is_refused(tmp_path):
    with pytest.raises(UserError, match="--data FOLDER, or --env"):
        vla_rl.identify({**SPEC, "imitation": None})
    with pytest.raises(UserError, match="give one of them"):
        vla_rl.identify(SPEC, data=tmp_path, env=True)
    with pytest.raises(UserError, match=str(tmp_path)):
        vla_rl.identify(SPEC, data=tmp_path)


def test_a_plugin_declares_its_own_conventions():
    @frozen(kw_only=True)
    class Settings:
        hand: str = field(default="left", metadata=vla_rl.convention(("left", "right"), evidence="a look at the robot"))
        width: int = 3

    (key,) = declared_conventions(Settings, "model")
    assert key.path == "model.hand" and key.convention.evidence == "a look at the robot"
    assert key.convention.list_values(Settings(), None) == ["left", "right"]


def test_conversions_are_undone():
    info = describe_env(TabletopConfig(image_size=16))
    spec = ConventionsSpec(
        images="rotated", channels="bgr", state_order=(1, 0, 3, 2), state_negated=(0,), action_order=(2, 0, 1),
        action_negated=(1,), action_scale=2.0, instruction="sentence",
    )  # fmt: skip
    converter = Converter(spec)
    actions = np.random.default_rng(0).uniform(-1, 1, (2, 4, 3)).astype(np.float32)
    given = converter.convert_actions(actions)
    np.testing.assert_allclose(given[..., 2], -2 * actions[..., 1])
    np.testing.assert_allclose(converter.restore_actions(given), actions)
    frame = np.arange(16 * 16 * 3, dtype=np.uint8).reshape(1, 16, 16, 3)
    obs = vla_rl.Observation(
        images={"overhead": frame}, instructions=("pick it",), state=np.array([[1, 2, 3, 4]], np.float32)
    )
    seen = converter.convert_observation(obs)
    np.testing.assert_array_equal(seen.images["overhead"][0, 0, 0], frame[0, -1, -1, ::-1])
    assert seen.state.tolist() == [[2, -1, 4, 3]] and seen.instructions == ("Pick it.",)
    assert converter.convert_info(info).action_high == (2.0, 2.0, 2.0)
    with pytest.raises(UserError, match="state_order"):
        Converter(ConventionsSpec(state_order=(0, 0))).convert_info(info)
