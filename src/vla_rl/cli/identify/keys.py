"""Conventions of a spec: keys that its sections and plugins declare as such, and specs with other values."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attrs import frozen

from vla_rl.core.conventions import METADATA, Convention
from vla_rl.core.spec.sections import ConventionsSpec
from vla_rl.core.spec.spec import Spec, restored_spec
from vla_rl.core.spec.structure import keys_of, to_plain
from vla_rl.core.types import EnvInfo

Settings = Mapping[str, Any]
"""Key of a convention, with its dots -> plain value. One hypothesis: a value for each key."""


@frozen(kw_only=True)
class ConventionKey:
    """A key of the spec that is a convention."""

    path: str
    convention: Convention

    @property
    def of_model(self) -> bool:
        return self.path.startswith("model.")

    def list_values(self, spec: Spec, info: EnvInfo) -> list[Any]:
        """Return the values to try next to those of this spec, as plain data."""
        config = spec.model.config if self.of_model else spec.conventions
        return [to_plain(value) for value in self.convention.list_values(config, info)]


def declared_conventions(settings: type, section: str) -> Iterator[ConventionKey]:
    """Yield the conventions among the keys of an attrs class, which are those of a section of the spec."""
    for key, attribute in keys_of(settings).items():
        if METADATA in attribute.metadata:
            yield ConventionKey(path=f"{section}.{key}", convention=attribute.metadata[METADATA])


def list_conventions(model_settings: type) -> list[ConventionKey]:
    """Return the conventions of specs with a model of these settings, those of its own last: they take a new model."""
    return [*declared_conventions(ConventionsSpec, "conventions"), *declared_conventions(model_settings, "model")]


def read_settings(spec: Spec, keys: list[ConventionKey]) -> dict[str, Any]:
    """Return the spec's values of these keys."""
    plain = spec.to_dict()
    return {key.path: plain[section][name] for key in keys for section, _, name in [key.path.partition(".")]}


def usual_settings(spec: Spec, keys: Sequence[ConventionKey]) -> dict[str, Any]:
    """Return the default of each key."""
    owners: dict[str, type] = {"conventions": ConventionsSpec, "model": type(spec.model.config)}
    fields = {f"{section}.{name}": f for section, owner in owners.items() for name, f in keys_of(owner).items()}
    return {key.path: to_plain(fields[key.path].default) for key in keys}


def with_settings(spec: Spec, settings: Settings) -> Spec:
    """Return the spec with these values. Raise SpecError."""
    plain = spec.to_dict()
    for path, value in settings.items():
        section, _, name = path.partition(".")
        plain[section][name] = value
    return restored_spec(plain)


def as_key(settings: Settings) -> str:
    """Return a text that equal settings have in common."""
    return json.dumps(settings, sort_keys=True)
