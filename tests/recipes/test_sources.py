"""Recipes are their source's: the conversion of its keys, which recipes/sources has with file and line, but for what the
recipe's head names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import recipe_sources
from vla_rl.core.spec.spec import load_spec
from vla_rl.core.spec.yaml import parse_yaml, value_at
from vla_rl.toolkit.hooks.tracking import flatten_spec

RECIPES = Path(__file__).parents[2] / "recipes"
NAMES = recipe_sources.all_names()
ACCERL = {
    "model.lora.rank": 32,
    "model.value_head.steps": 66,
    "env.num_envs": 64,
    "env.cameras.agentview": 224,
    "rollout.chunk": 8,
    "rollout.episodes": 64,
    "rollout.max_steps": 520,
    "rollout.task_sampling.window": 100,
    "rollout.task_sampling.smoothing": 1,
    "train.steps": 400,
    "train.lr": 1e-5,
    "train.value_lr": 1e-4,
    "train.checkpoint_every": 20,
    "eval.every": 20,
}
"""What AcceRL (arXiv:2603.18464), sections 3 and 4, and its public code have, in our keys."""
WITHOUT = {
    "accerl_oft_libero_10_gipo": {
        **ACCERL,
        "asynchrony.max_lag": 1,
        "asynchrony.replay.uses": 2,
        "asynchrony.replay.capacity": 1000,
        "placement.policy": 0,
        "placement.learner": "1-7",
        "placement.sim_workers": 8,
        "placement.batching.max_batch": 8,
        "placement.batching.max_wait_s": 0.3,
        "train.micro_batch": 18,
        "train.global_batch": 252,
    },
    "accerl_oft_libero_10_world_model": {
        **ACCERL,
        "imagination.per_real": 7,
        "imagination.horizon": 8,
        "train.micro_batch": 16,
        "train.global_batch": 256,
    },
}
"""Recipes of a paper that published no configuration, and the numbers of each."""
FORECAST = "rlinf_oft_libero_10_grpo"


def test_every_recipe_has_its_sources_keys() -> None:
    recipes = {file.stem for file in RECIPES.glob("*.yaml")}
    assert set(NAMES) == recipes - set(WITHOUT)
    assert {file.stem for file in recipe_sources.PACKAGED.glob("*.yaml")} == recipes, "a link each in the package"


@pytest.mark.parametrize("name", NAMES)
def test_values_are_those_of_the_source(name: str) -> None:
    """All but those in which the recipe departs on purpose, each with its value and reason; the head names them."""
    kept = recipe_sources.read_kept(name)
    found = recipe_sources.differences(name, kept.keys)
    assert {recipe_sources.owner_of(key, kept.differs) for key in found} == set(kept.differs), found
    assert all(kept.reasons.values())
    text = (RECIPES / f"{name}.yaml").read_text(encoding="utf-8")
    if kept.head:
        expected = recipe_sources.expected_of(text)
        assert text == recipe_sources.format_recipe(name, kept, expected), "run tools/recipe_sources.py"
        return
    plain = load_spec(RECIPES / f"{name}.yaml").to_dict()
    for key, (value, _) in kept.differs.items():
        assert recipe_sources.is_same(value, value_at(plain, key.split("."))), key
    assert recipe_sources.with_departures(text, kept.reasons) == text


@pytest.mark.parametrize("name", WITHOUT)
def test_values_are_those_of_the_paper(name: str) -> None:
    data = parse_yaml((RECIPES / f"{name}.yaml").read_text(encoding="utf-8")).data
    numbers = {
        key: value
        for key, value in flatten_spec({**data, "hooks": [], "seed": None}).items()
        if re.search(r"^\d", str(value)) and not isinstance(value, bool)
    }
    assert numbers == WITHOUT[name]


@pytest.mark.parametrize("name", NAMES)
def test_every_key_names_file_and_line_and_is_accounted_for(name: str) -> None:
    kept = recipe_sources.read_kept(name)
    keys = kept.keys
    assert kept.kinds == recipe_sources.kinds_of(keys) and "unknown" not in kept.kinds.values()
    for key, value in keys.values.items():
        assert value.place.rpartition(":")[2].isdecimal(), key


def assert_plan_says_what_the_head_does(file: Path) -> None:
    assert recipe_sources.expected_of(file.read_text(encoding="utf-8")) == recipe_sources.forecast(file.stem)


def test_what_a_head_expects_is_what_plan_forecasts() -> None:
    assert_plan_says_what_the_head_does(RECIPES / f"{FORECAST}.yaml")


@pytest.mark.exhaustive
@pytest.mark.parametrize("file", sorted(RECIPES.glob("*.yaml")), ids=lambda file: file.stem)
def test_what_each_head_expects_is_what_plan_forecasts(file: Path) -> None:
    assert_plan_says_what_the_head_does(file)


def test_what_no_key_of_a_source_says() -> None:
    """Read in the code: RLinf a3816b5, models/embodiment/openpi/openpi_action_model.py:62."""
    plain = load_spec(RECIPES / "pirl_pi0_libero_spatial_flow_noise_ppo.yaml").to_dict()
    assert value_at(plain, ["model", "noise", "std_range"]) == [0.08, 0.16]
