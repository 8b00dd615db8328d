"""The lower bounds that pyproject.toml promises are those that `make test-lowest` installs."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from vla_rl.cli import doctor
from vla_rl.core import catalogue

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
    wanted = {
        version: {
            extra
            for requirement in map(Requirement, extras["all"])
            if requirement.marker is None or requirement.marker.evaluate({"python_version": version})
            for extra in requirement.extras
        }
        for version in ("3.11", "3.12", "3.13")
    }
    assert wanted["3.11"] == wanted["3.12"] == wanted["3.13"] | {"maniskill"}
    assert "maniskill" not in wanted["3.13"] and "libero" in wanted["3.13"]

    def requirements(dist: str, path: tuple[str, ...]) -> tuple[Requirement, ...]:
        """As an installation of this tree would have them."""
        lines = [(line, extra) for extra, lines in extras.items() for line in lines]
        marked = [(line.partition(";")[0], line.partition(";")[2].strip(), extra) for line, extra in lines]
        return tuple(
            Requirement(f"{line}; {f'({marker}) and ' if marker else ''}extra == '{extra}'")
            for line, marker, extra in marked
        )

    monkeypatch.setattr(catalogue, "_all_requirements", requirements)
    monkeypatch.setattr(catalogue, "_python", lambda: "3.13")
    remedy = "Python 3.11 or 3.12 in place of 3.13, for which these packages have no build"
    assert catalogue.install_command("vla-rl", "maniskill") == remedy
    assert catalogue.install_command("vla-rl", "libero").startswith("pip install ")
    monkeypatch.setattr(catalogue, "_version", lambda name, path: None)
    catalogue._requirements.cache_clear()
    fixes = {finding.what: finding.fix for finding in doctor._extras()}
    catalogue._requirements.cache_clear()
    assert fixes["maniskill"] == remedy
    monkeypatch.setattr(catalogue, "_python", lambda: "3.12")
    assert catalogue.install_command("vla-rl", "maniskill").startswith("pip install ")


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
