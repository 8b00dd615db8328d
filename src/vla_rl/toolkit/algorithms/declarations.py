"""What an algorithm declares about itself. The runtime and `check_algorithm` refuse the same declarations."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import attrs
from attrs import frozen

from vla_rl.core.errors import PluginError, did_you_mean
from vla_rl.core.hookspecs import Algorithm
from vla_rl.core.types import AdvantageScope, Requirements

REQUIREMENTS = tuple(field.name for field in attrs.fields(Requirements))


@frozen
class WrongDeclaration:
    """An attribute of an algorithm with a value that the contract does not allow."""

    attribute: str
    expected: str
    got: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.attribute}: expected {self.expected}, got {self.got}; {self.remedy}"


def check_declarations(algorithm: Algorithm, name: str) -> None:
    """Raise PluginError with every wrong declaration of this plugin's algorithm."""
    errors = wrong_declarations(algorithm)
    if errors:
        raise PluginError(f"algorithm {name!r}{_locate_class(type(algorithm))}: " + "\n  ".join(map(str, errors)))


def wrong_declarations(algorithm: Algorithm) -> list[WrongDeclaration]:
    """Return what is wrong with `needs` and `advantage_scope`."""
    needs: Any = algorithm.needs
    scope: Any = algorithm.advantage_scope
    errors = []
    if not isinstance(needs, Requirements):
        errors.append(WrongDeclaration("needs", "a Requirements", *_describe_needs(needs)))
    elif needs.recomputed_values and not needs.values:
        remedy = _format_requirements(needs | Requirements(values=True))
        errors.append(WrongDeclaration("needs", "values with recomputed_values", "no values", remedy))
    if not isinstance(scope, AdvantageScope):
        chosen = "GROUP" if str(scope).lower() == "group" else "STEP"
        remedy = f"write `advantage_scope = AdvantageScope.{chosen}` (from vla_rl import AdvantageScope)"
        expected = "AdvantageScope.GROUP or AdvantageScope.STEP"
        errors.append(WrongDeclaration("advantage_scope", expected, repr(scope), remedy))
    return errors


# ------------------------------------------------------------------------------------------------ internal


def _describe_needs(needs: Any) -> tuple[str, str]:
    """Return what an author's `needs` is that is no Requirements, and what to write."""
    names = _list_names(needs)
    if names is None:
        got = f"the class {needs.__name__}" if isinstance(needs, type) else f"a {type(needs).__name__}"
        return got, f"{_format_requirements(Requirements(groups=True))}, for instance"
    return f"{type(needs).__name__} of {', '.join(map(repr, names)) or 'nothing'}", _as_requirements(names)


def _list_names(needs: Any) -> list[str] | None:
    """The strings in an author's `needs`, sorted; None where it holds anything else."""
    if isinstance(needs, str):
        return [needs]
    if isinstance(needs, type) or not isinstance(needs, Iterable):
        return None
    names = list(needs)
    return sorted(names) if all(isinstance(name, str) for name in names) else None


def _as_requirements(names: Iterable[str]) -> str:
    """The line that says the same as these strings."""
    fields = {name: name.replace("-", "_") for name in names}
    chosen = {field: True for field in fields.values() if field in REQUIREMENTS}
    parts = [_format_requirements(Requirements(**chosen))]
    for name, field in fields.items():
        if field not in REQUIREMENTS:
            suggestion = did_you_mean(field, REQUIREMENTS)
            parts.append(f"there is no requirement {name!r}{suggestion}; there are: {', '.join(REQUIREMENTS)}")
    return "; ".join(parts)


def _format_requirements(requirements: Requirements) -> str:
    chosen = ", ".join(f"{name}=True" for name in REQUIREMENTS if getattr(requirements, name))
    return f"write `needs = Requirements({chosen})` (from vla_rl import Requirements)"


def _locate_class(kind: type) -> str:
    """The file and line of a class, " (FILE:LINE)"; nothing where that is not known."""
    try:
        return f" ({inspect.getsourcefile(kind)}:{inspect.getsourcelines(kind)[1]})"
    except (OSError, TypeError):
        return ""
