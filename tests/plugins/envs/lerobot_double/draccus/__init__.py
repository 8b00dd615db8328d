"""The part of draccus 0.11 that lerobot's devices need: registries of dataclasses, and decoding."""

from __future__ import annotations

import dataclasses
import functools
import typing


class ChoiceRegistry:
    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if not hasattr(cls, "_choice_registry"):
            cls._choice_registry = {}

    @classmethod
    def register_subclass(cls, name, choice_type=None):
        if choice_type is None:
            return functools.partial(cls.register_subclass, name)
        cls._choice_registry[name] = choice_type
        return choice_type

    @classmethod
    def get_choice_class(cls, name):
        return cls._choice_registry[name]

    @classmethod
    def get_known_choices(cls):
        return cls._choice_registry

    @classmethod
    def get_choice_name(cls, subcls):
        return next(name for name, choice in cls._choice_registry.items() if choice == subcls)


def decode(cls, raw_value):
    """Return a dataclass of plain data, with the choice types and mappings of them within."""
    if isinstance(cls, type) and issubclass(cls, ChoiceRegistry):
        settings = dict(raw_value)
        choice = cls.get_choice_class(settings.pop("type"))
        hints = typing.get_type_hints(choice)
        unknown = set(settings) - {field.name for field in dataclasses.fields(choice)}
        if unknown:
            raise ValueError(f"The fields {sorted(unknown)} are not valid for {choice.__name__}")
        return choice(**{name: decode(hints[name], value) for name, value in settings.items()})
    if typing.get_origin(cls) is dict:
        _, inner = typing.get_args(cls)
        return {name: decode(inner, value) for name, value in raw_value.items()}
    return raw_value
