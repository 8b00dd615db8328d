"""The lower bounds that pyproject.toml promises are those that `make test-lowest` installs."""

from __future__ import annotations

import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]


def test_the_lowest_versions_are_the_lower_bounds():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    requirements = [Requirement(line) for line in lines]
    lowest = dict(line.split("==") for line in (ROOT / "lowest.txt").read_text("utf-8").splitlines() if "==" in line)
    assert set(lowest) == {"torch", "transformers"}
    for name, version in lowest.items():
        bounds = {
            bound.version
            for requirement in requirements
            if requirement.name == name
            for bound in requirement.specifier
            if bound.operator == ">="
        }
        assert {(*map(int, bound.split(".")), 0)[:3] for bound in bounds} == {tuple(map(int, version.split(".")))}
