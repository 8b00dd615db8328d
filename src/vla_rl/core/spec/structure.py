"""Structuring of plain data into attrs classes: strict, with every problem reported at once. cattrs chooses the hook
for each type. The hooks are our own, because its defaults coerce (1.7 -> 1, true -> 1), stop at the first failing
validator of a class and lose that validator's text."""

from __future__ import annotations

import enum
import math
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from pathlib import Path as FilePath
from typing import Any, Literal, Union, get_args, get_origin

import attrs
import cattrs

from vla_rl.core.errors import UserError, did_you_mean
from vla_rl.core.paths import expand_tilde
from vla_rl.core.spec.changed_keys import describe_change
from vla_rl.core.spec.yaml import Path, dotted_path

BITS = 63
"""Most bits of an integer, so that everything it is passed to can hold it."""
SUGGESTED = 20
"""Most unknown keys of a mapping that are named with suggestions; the others are only counted."""


class Problems(ValueError):
    """The problems of a value, each as (path below the value, message). Validators may raise it to place a message."""

    def __init__(self, items: Sequence[tuple[Path, str]]) -> None:
        super().__init__("; ".join(f"{dotted_path(path)}: {text}" if path else text for path, text in items))
        self.items = list(items)


def make_problem(message: str, *path: str | int) -> Problems:
    """Return one problem at a path below the value."""
    return Problems([(path, message)])


@contextmanager
def at(*path: str | int) -> Iterator[None]:
    """Turn a UserError or ValueError inside the block into a problem at this path below the value."""
    try:
        yield
    except Problems as exc:
        raise Problems([((*path, *inside), text) for inside, text in exc.items]) from None
    except (UserError, ValueError) as exc:
        raise make_problem(_error_text(exc), *path) from exc


def keys_of(cls: type) -> dict[str, attrs.Attribute[Any]]:
    """Return the spec keys of an attrs class: key -> field."""
    return {f.alias or f.name: f for f in attrs.fields(cls) if f.init}


def to_plain(value: Any) -> Any:
    """Return attrs instances, mappings and sequences as dicts and lists of scalars, with keys as in a spec."""
    if attrs.has(type(value)):
        return {key: to_plain(getattr(value, f.name)) for key, f in keys_of(type(value)).items()}
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, AbstractSet):
        return sorted(map(to_plain, value))
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, enum.Enum):
        return value.value
    return str(value) if isinstance(value, FilePath) else value


def format_value(value: object) -> str:
    """Format a value for messages: `float 1.7`, `a mapping`."""
    if value is None:
        return "nothing"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    return f"{type(value).__name__} {value!r:.60}"


class Structurer:
    """Converts plain data to instances; `special` reads fields whose metadata has the key "kind"."""

    def __init__(self, special: Callable[[Any, str, Any], Any] | None = None) -> None:
        self._special = special
        self._converter = cattrs.Converter()
        hook = self._converter.register_structure_hook_func
        hook(
            lambda t: (_type_origin(t) or t) in (list, tuple, set, frozenset, Sequence, AbstractSet),
            self._read_sequence,
        )
        hook(lambda t: (_type_origin(t) or t) in (dict, Mapping), self._read_mapping)
        hook(lambda t: _type_origin(t) in (Union, types.UnionType), self._read_union)
        hook(lambda t: _type_origin(t) is Literal, lambda data, t: _read_option(data, get_args(t)))
        hook(lambda t: isinstance(t, type) and issubclass(t, enum.Enum), _read_enum)
        hook(attrs.has, self.read_class)
        for scalar in (bool, int, float, str):
            self._converter.register_structure_hook(scalar, _read_scalar)
        self._converter.register_structure_hook(FilePath, lambda data, _: expand_tilde(_read_scalar(data, str)))

    def read_value(self, data: Any, as_type: Any) -> Any:
        """Return `data` as a value of the type. Raise Problems."""
        try:
            return data if as_type in (Any, object, None) else self._converter.structure(data, as_type)
        except Problems:
            raise
        except (UserError, ValueError, TypeError) as exc:
            raise make_problem(_error_text(exc)) from exc
        except cattrs.errors.StructureHandlerNotFoundError as exc:
            raise make_problem(f"a spec cannot hold values of type {as_type}") from exc

    def read_class(self, data: Any, cls: type, extra_keys: Sequence[str] = ()) -> Any:
        """Read an attrs class from a mapping. `extra_keys` are handled by the caller and named in suggestions."""
        keys = keys_of(cls)
        if not isinstance(data, Mapping):
            raise make_problem(
                f"expected a mapping with keys of ({', '.join([*extra_keys, *keys])}), got {format_value(data)}"
            )
        try:
            attrs.resolve_types(cls)
        except NameError as exc:
            raise make_problem(f"{cls.__module__}.{cls.__name__}: {exc}; import annotated types at run time") from exc
        keys = keys_of(cls)
        known_keys = [*extra_keys, *keys]
        unknown = [key for key in data if key not in keys]
        problems: list[tuple[Path, str]] = [
            ((key,), f"unknown key{describe_change(key, known_keys) or did_you_mean(str(key), known_keys)}")
            for key in unknown[:SUGGESTED]
        ]
        if len(unknown) > SUGGESTED:
            problems.append(((unknown[SUGGESTED],), f"unknown key, as are {len(unknown) - SUGGESTED - 1} others"))
        values: dict[str, Any] = {}
        for key, attribute in keys.items():
            try:
                if key in data:
                    values[key] = self._read_field(data[key], attribute)
                elif attribute.default is attrs.NOTHING:
                    problems.append(((key,), "required, but missing"))
            except Problems as exc:
                problems += [((key, *path), text) for path, text in exc.items]
        invalid = {key for key in keys if key not in values and (key in data or keys[key].default is attrs.NOTHING)}
        problems += _failing_validators(cls, values, invalid)
        if not problems:
            try:
                return cls(**values)
            except Problems as exc:
                problems = exc.items
            except (ValueError, TypeError) as exc:
                problems = [((), _error_text(exc))]
        raise Problems(problems)

    def _read_field(self, data: Any, attribute: attrs.Attribute[Any]) -> Any:
        if self._special is not None and "kind" in attribute.metadata:
            return self._special(data, attribute.metadata["kind"], attribute.type)
        return self.read_value(data, attribute.type)

    def _read_sequence(self, data: Any, as_type: Any) -> Any:
        if not isinstance(data, list | tuple):
            raise make_problem(f"expected a list, got {format_value(data)}")
        origin, arguments = get_origin(as_type) or as_type, get_args(as_type) or (Any,)
        if origin is tuple and arguments[-1:] != (Ellipsis,) and get_args(as_type):
            if len(data) != len(arguments):
                raise make_problem(f"expected {len(arguments)} items, got {len(data)}")
            item_types = list(arguments)
        else:
            item_types = [arguments[0]] * len(data)
        items = self._read_each((i, i, item, t) for i, (item, t) in enumerate(zip(data, item_types, strict=True)))
        build = {Sequence: tuple, AbstractSet: frozenset}.get(origin, origin)
        return build(items.values())

    def _read_mapping(self, data: Any, as_type: Any) -> dict[Any, Any]:
        if not isinstance(data, Mapping):
            raise make_problem(f"expected a mapping, got {format_value(data)}")
        key_type, value_type = get_args(as_type) or (Any, Any)
        return self._read_each((self.read_value(key, key_type), key, item, value_type) for key, item in data.items())

    def _read_each(self, items: Any) -> dict[Any, Any]:
        values, problems = {}, []
        for key, step, data, as_type in items:
            try:
                values[key] = self.read_value(data, as_type)
            except Problems as exc:
                problems += [((step, *path), text) for path, text in exc.items]
        if problems:
            raise Problems(problems)
        return values

    def _read_union(self, data: Any, as_type: Any) -> Any:
        """Return the value as the first union member that fits; null first."""
        members = [member for member in get_args(as_type) if member is not types.NoneType]
        if data is None and len(members) < len(get_args(as_type)):
            return None
        if len(members) == 1 and get_origin(members[0]) is Literal:
            return _read_option(data, (*get_args(members[0]), None))
        if isinstance(data, Mapping) and any(map(tags_of, members)):
            return self.read_class(data, _tagged_member(data, members))
        if type(data) in (int, float) and (numbers := [member for member in members if member in (int, float)]):
            members = numbers  # a number out of range says so, and does not ask for a table
        failures: list[Problems] = []
        for member in members:
            try:
                return self.read_value(data, member)
            except Problems as exc:
                failures.append(exc)
        # problems below the value: this class or container was meant
        inside = [exc for exc in failures if any(path for path, _ in exc.items)]
        if len(members) == 1 or len(inside) == 1:
            raise (inside or failures)[0]
        names = " or ".join(map(_name_member, members))
        raise make_problem(f"expected {names}, got {format_value(data)}")


def tags_of(cls: Any) -> tuple[str, ...]:
    """Return the values of `type` that select a class in a union: those that its field of this name may have. Empty:
    the class has no such field, or takes any text there, as a plugin's section does."""
    if not (isinstance(cls, type) and attrs.has(cls) and "type" in attrs.fields_dict(cls)):
        return ()
    return get_args(attrs.fields_dict(attrs.resolve_types(cls))["type"].type)


def _tagged_member(data: Mapping[Any, Any], members: Sequence[Any]) -> type:
    """Return the class that the mapping's `type` names. Raise Problems."""
    tagged: dict[str, type] = {tag: member for member in members for tag in tags_of(member)}
    if "type" not in data:
        raise make_problem(f"required, but missing; one of {', '.join(map(repr, tagged))}", "type")
    with at("type"):
        tag: str = _read_option(data["type"], list(tagged))
    return tagged[tag]


def _name_member(member: Any) -> str:
    """Return a member of a union as a user writes it."""
    if tags := tags_of(member):
        return " or ".join(f"{{type: {tag}}}" for tag in tags)
    if attrs.has(member):
        return f"a mapping with keys of ({', '.join(keys_of(member))})"
    if get_origin(member) is Literal:
        return " or ".join(map(repr, get_args(member)))
    return getattr(member, "__name__", str(member))


def _type_origin(as_type: Any) -> Any:
    return get_origin(as_type)


def _read_scalar(data: Any, as_type: type) -> Any:
    if isinstance(data, float) and not math.isfinite(data):
        raise make_problem(f"expected a finite number, got {data}; where none means off, use null")
    if type(data) is int and data.bit_length() > BITS:
        raise make_problem(f"expected a number of {BITS} bits at most, got one of {data.bit_length()}")
    if type(data) is str and as_type is str and "\0" in data:
        raise make_problem(f"expected text, got {format_value(data)}, which has a NUL byte in it")
    if type(data) is as_type:
        return data
    if as_type is float and type(data) is int:
        return float(data)
    hint = " (true or false)" if as_type is bool else ""
    quote = "; put it in quotes" if as_type is str and isinstance(data, bool | int | float) else ""
    raise make_problem(f"expected {as_type.__name__}{hint}, got {format_value(data)}{quote}")


def _read_option(data: Any, options: Sequence[Any]) -> Any:
    for option in options:
        if type(option) is type(data) and option == data:
            return data
    near = did_you_mean(data, map(str, options)) if isinstance(data, str) else ""
    names = ["null" if option is None else repr(option) for option in options]
    raise make_problem(f"expected one of {', '.join(names)}, got {format_value(data)}{near}")


def _read_enum(data: Any, as_type: type[enum.Enum]) -> Any:
    for member in as_type:
        if type(member.value) is type(data) and member.value == data:
            return member
    raise make_problem(
        f"expected one of {', '.join(repr(member.value) for member in as_type)}, got {format_value(data)}"
    )


def _failing_validators(cls: type, values: Mapping[str, Any], invalid: AbstractSet[str]) -> list[tuple[Path, str]]:
    """Run the validators of all readable fields, on an instance without the `invalid` ones, and return the problems."""
    instance: Any = object.__new__(cls)
    keys = keys_of(cls)
    problems: list[tuple[Path, str]] = []
    unexpected: Exception | None = None
    for key in keys:
        try:
            if key not in invalid:
                value = _field_value(instance, keys[key], values.get(key, attrs.NOTHING))
                object.__setattr__(instance, keys[key].name, value)
        except (AttributeError, ArithmeticError, LookupError):  # a default computed from a field that is wrong
            continue
        except (ValueError, TypeError, UserError) as exc:
            problems.append(((key,), _error_text(exc)))
    for key, attribute in keys.items():
        if attribute.validator is None or not hasattr(instance, attribute.name):
            continue
        try:
            attribute.validator(instance, attribute, getattr(instance, attribute.name))
        except Problems as exc:
            problems += [((key, *path), text) for path, text in exc.items]
        except (ValueError, TypeError, UserError) as exc:
            problems.append(((key,), _error_text(exc)))
        except (
            AttributeError,
            ArithmeticError,
            LookupError,
        ) as exc:  # of a wrong field, as a divisor of 0
            unexpected = unexpected or exc
    if unexpected is not None and not invalid and not problems:
        raise unexpected
    return problems


def _field_value(instance: Any, attribute: attrs.Attribute[Any], given: Any) -> Any:
    """Return the value a field will have: the given value converted, or its default."""
    value, default = given, attribute.default
    if given is attrs.NOTHING and isinstance(default, attrs.Factory):  # type: ignore[arg-type]
        value = default.factory(instance) if default.takes_self else default.factory()  # type: ignore[union-attr]
    elif given is attrs.NOTHING:
        value = default
    converter = attribute.converter
    return value if converter is None or isinstance(converter, attrs.Converter) else converter(value)


def _error_text(exc: BaseException) -> str:
    """Return a validator's message; attrs appends its objects to `args`."""
    return exc.args[0] if exc.args and isinstance(exc.args[0], str) else str(exc) or type(exc).__name__
