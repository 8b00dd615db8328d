"""Recipes are their source's: the conversion of its keys, which recipes/sources has with file and line, but for what the
recipe's head names."""

from __future__ import annotations

from pathlib import Path

import pytest

import recipe_sources
from vla_rl.cli.convert.convert import convert_source
from vla_rl.core.spec.spec import load_spec
from vla_rl.core.spec.yaml import value_at

RECIPES = Path(__file__).parents[2] / "recipes"
NAMES = sorted(recipe_sources.SOURCES)
WITHOUT = ("accerl_oft_libero_10_gipo", "accerl_oft_libero_10_world_model")
"""Recipes of a paper that published no configuration."""


def test_every_recipe_has_its_sources_keys() -> None:
    files = {file.stem for file in (RECIPES / "sources").glob("*.yaml")}
    assert files == set(NAMES) == {file.stem for file in RECIPES.glob("*.yaml")} - set(WITHOUT)


@pytest.mark.parametrize("name", NAMES)
def test_values_are_those_of_the_source(name: str) -> None:
    """All but those in which the recipe departs on purpose, each with its reason, in the file and in the head."""
    source, reasons = recipe_sources.read_kept(name)
    found = recipe_sources.differences(name, source)
    assert {recipe_sources.owner_of(key, reasons) for key in found} == set(reasons), found
    assert all(reasons.values())
    text = (RECIPES / f"{name}.yaml").read_text(encoding="utf-8")
    assert recipe_sources.with_departures(text, reasons) == text


@pytest.mark.parametrize("name", NAMES)
def test_every_key_names_file_and_line(name: str) -> None:
    source, _ = recipe_sources.read_kept(name)
    assert not convert_source(source).of_kind("unknown")
    for key, value in source.values.items():
        assert value.place.rpartition(":")[2].isdecimal(), key


def test_what_no_key_of_a_source_says() -> None:
    """Read in the code: RLinf a3816b5, models/embodiment/openpi/openpi_action_model.py:62."""
    plain = load_spec(RECIPES / "pirl_pi0_libero_spatial_flow_noise_ppo.yaml").to_dict()
    assert value_at(plain, ["model", "noise", "std_range"]) == [0.08, 0.16]
