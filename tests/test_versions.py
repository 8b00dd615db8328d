"""The lower bounds that pyproject.toml promises are those that `make test-lowest` installs."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from vla_rl.cli import doctor
from vla_rl.core import requirements

ROOT = Path(__file__).parents[1]


@pytest.fixture
def extras() -> dict[str, list[str]]:
    """Name of an extra -> its requirements."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    found: dict[str, list[str]] = project["optional-dependencies"]
    return found


def test_transformers_is_bounded_below_the_version_that_drops_names(extras) -> None:
    """Layers take `past_key_values` until 5.40; `toolkit/models/decoder.py` passes the name that they have."""
    bounds = [r.specifier for lines in extras.values() for r in map(Requirement, lines) if r.name == "transformers"]
    assert len(bounds) >= 5
    for bound in bounds:
        assert bound.contains("5.24.0") and bound.contains("5.39.9") and not bound.contains("5.40.0")


def test_python_3_13_gets_all_but_maniskill(extras, monkeypatch: pytest.MonkeyPatch) -> None:
    """mani-skill has no build for it, and whoever asks for it learns which Python it has one for."""
    marked = [line for line in extras["all"] if ";" in line]
    assert [line.partition(";")[0] for line in marked] == extras["maniskill"]
    for version, wanted in (("3.11", True), ("3.12", True), ("3.13", False)):
        markers = [Requirement(line).marker for line in marked]
        assert [m.evaluate({"python_version": version}) for m in markers if m] == [wanted] * len(marked)

    def read_requirements(dist: str, path: tuple[str, ...]) -> tuple[Requirement, ...]:
        """Return the metadata that an installation of this tree has."""
        split = [(*line.partition(";")[::2], extra) for extra, lines in extras.items() for line in lines]
        return tuple(
            Requirement(f"{line}; {f'({marker.strip()}) and ' if marker else ''}extra == '{extra}'")
            for line, marker, extra in split
        )

    monkeypatch.setattr(requirements, "_all_requirements", read_requirements)
    monkeypatch.setattr(requirements, "_installed_version", lambda name, path: None)
    requirements._requirements_with_extra.cache_clear()
    try:
        for version, remedy in (("3.12", "pip install "), ("3.13", "Python 3.11 or 3.12 in place of 3.13, for which ")):
            monkeypatch.setattr(requirements, "_python_version", lambda version=version: version)
            fixes = {finding.what: finding.fix for finding in doctor._check_extras()}
            assert fixes["maniskill"].startswith(remedy) and fixes["libero"].startswith("pip install ")
    finally:
        requirements._requirements_with_extra.cache_clear()


def test_the_lowest_versions_are_the_lower_bounds():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    needed = [Requirement(line) for line in lines]
    lowest = dict(line.split("==") for line in (ROOT / "lowest.txt").read_text("utf-8").splitlines() if "==" in line)
    assert set(lowest) == {"torch", "transformers"}
    for name, version in lowest.items():
        bounds = {
            bound.version
            for requirement in needed
            if requirement.name == name
            for bound in requirement.specifier
            if bound.operator == ">="
        }
        assert {(*map(int, bound.split(".")), 0)[:3] for bound in bounds} == {tuple(map(int, version.split(".")))}
