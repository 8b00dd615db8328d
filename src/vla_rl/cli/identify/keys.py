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
from vla_rl.core.spec.yaml import value_at

Settings = Mapping[str, Any]
"""Key of a convention, with its dots -> plain value. One hypothesis: a value for each key."""


@frozen(kw_only=True)
class ConventionKey:
    """A key of the spec that is a convention."""

    path: str
    default: Any
    convention: Convention


def declared_conventions(settings: type, section: str) -> Iterator[ConventionKey]:
    """Yield the conventions among the keys of an attrs class, which are those of a section of the spec."""
    for name, attribute in keys_of(settings).items():
        about = attribute.metadata.get(METADATA)
        if about is not None:
            yield ConventionKey(path=f"{section}.{name}", default=to_plain(attribute.default), convention=about)


def list_conventions(model_settings: type) -> list[ConventionKey]:
    """Return the conventions of specs with a model of these settings, those of its own last: they take a new model."""
    return [*declared_conventions(ConventionsSpec, "conventions"), *declared_conventions(model_settings, "model")]


def read_settings(spec: Spec, keys: Sequence[ConventionKey]) -> dict[str, Any]:
    """Return the spec's values of these keys."""
    plain = spec.to_dict()
    return {key.path: value_at(plain, key.path.split(".")) for key in keys}


def with_settings(spec: Spec, settings: Settings) -> Spec:
    """Return the spec with these values. Raise SpecError."""
    plain = spec.to_dict()
    return restored_spec(plain | {name: plain[name] | keys for name, keys in nest_keys(settings).items()})


def nest_keys(settings: Settings) -> dict[str, dict[str, Any]]:
    """Return the values by section and key, as a spec has them."""
    nested: dict[str, dict[str, Any]] = {}
    for path, value in settings.items():
        section, _, name = path.partition(".")
        nested.setdefault(section, {})[name] = value
    return nested


def as_key(settings: Settings) -> str:
    """Return a text that equal settings have in common."""
    return json.dumps(settings, sort_keys=True)
