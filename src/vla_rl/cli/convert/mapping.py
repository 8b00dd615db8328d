"""What each key of a project means here: rules that a YAML file beside this one lists, and how they are applied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from attrs import evolve, field, frozen

from vla_rl.cli.convert import conversions
from vla_rl.cli.convert.sources import SourceKeys, SourceValue
from vla_rl.core.errors import UserError
from vla_rl.core.spec.yaml import parse_yaml

KINDS = {
    "carried": "carried over",
    "default": "the same here by default",
    "no counterpart": "no counterpart, and changes results",
    "dead": "ignored by the source itself",
    "no effect": "no effect on results",
    "unknown": "unknown to the mapping",
}
"""What becomes of a key of the source -> its heading in an account. No effect: logging, paths, processes."""
_MISSING = object()


@frozen(kw_only=True)
class Rule:
    """What a key of the source means here, in one case of it."""

    to: str = ""
    """Our key, with `*` for what a pattern's `*` stands for; empty where there is none."""
    by: str = ""
    """Function of `conversions` that computes our value; empty: as `values` says, or unchanged."""
    values: Mapping[Any, Any] | None = None
    """Source value -> ours."""
    value: Any = _MISSING
    """Our value, whatever the source's is where the rule holds."""
    kind: str = "carried"
    default: Any = _MISSING
    """Value of the source that is ours by default; another one has no counterpart."""
    when: Mapping[str, Any] = field(factory=dict)
    """Values of keys for which it holds: one, a list of them, {not: ...}, or {same: KEY} as another key's. A key that
    is not there is null."""
    note: str = ""
    at: str = ""
    """file:line of the source that says so."""
    refuse: str = ""
    """What is missing here where `values` has no entry; empty: such a value has no counterpart."""


@frozen(kw_only=True)
class ConvertedKey:
    """What became of one key of the source."""

    key: str = ""
    """Key of the source; empty for what its code does whatever its keys say."""
    value: Any = None
    place: str = ""
    kind: str
    ours: Mapping[str, Any] = field(factory=dict)
    note: str = ""
    at: str = ""


@frozen(kw_only=True)
class KeyMapping:
    """A project's mapping."""

    title: str
    commit: str
    keys: Mapping[str, Sequence[Rule]]
    """Key, or the beginning of keys with `*` after it, -> its cases; the first that holds counts."""
    code: Sequence[Mapping[str, Any]]
    """What the source's code does whatever its keys say: `set` or `differs`, `when`, `note`, `at`."""
    refuse: Sequence[Mapping[str, Any]]
    """Experiments that cannot run here: `when`, and what is `missing`."""

    def rules_of(self, key: str) -> tuple[Sequence[Rule], str]:
        """Return the cases of a key, its own or those of the first pattern that fits, and what `*` stands for there; no
        cases if it is unknown."""
        if key in self.keys:
            return self.keys[key], ""
        for pattern, rules in self.keys.items():
            if pattern.endswith("*") and key.startswith(pattern[:-1]):
                return rules, key.removeprefix(pattern[:-1])
        return (), ""


@cache
def load_mapping(project: str) -> KeyMapping:
    """Return the mapping of a project. Raises ValueError where the YAML file is not one."""
    text = files(__package__).joinpath(f"{project}.yaml").read_text(encoding="utf-8")
    document = parse_yaml(text)
    if document.errors:
        raise ValueError(f"{project}.yaml:{document.errors[0].line}: {document.errors[0].message}")
    data = document.data
    keys = {key: tuple(_read_rule(one) for one in _listed(rules)) for key, rules in data["keys"].items()}
    return KeyMapping(title=data["title"], commit=data["commit"], keys=keys, code=data["code"], refuse=data["refuse"])


def holds(condition: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
    """Return whether a `when` holds for these values of the source."""
    for key, wanted in condition.items():
        negated = isinstance(wanted, Mapping) and "not" in wanted
        allowed = wanted["not"] if negated else wanted
        if isinstance(wanted, Mapping) and not negated:
            allowed = values.get(wanted["same"])
        if any(_is_same(values.get(key), one) for one in _listed(allowed)) == negated:
            return False
    return True


def convert_keys(source: SourceKeys, mapping: KeyMapping) -> list[ConvertedKey]:
    """Return what becomes of every key of the source, and of what its code does.

    Raises UserError for an experiment that cannot run here, and for two sources of one of our keys."""
    plain = source.plain()
    for refusal in mapping.refuse:
        if holds(refusal["when"], plain):
            raise UserError(f"{source.file}: cannot run here: {refusal['missing']}")
    keys = [_convert_key(source, key, value, mapping, plain) for key, value in source.values.items()]
    for fact in mapping.code:
        if "set" in fact and holds(fact.get("when", {}), plain):
            ours = {key: _compute_value(value, plain) for key, value in fact["set"].items()}
            keys.append(ConvertedKey(kind="carried", ours=ours, note=fact.get("note", ""), at=fact["at"]))
    _check_conflicts(source, keys)
    return keys


def differences_of(source: SourceKeys, mapping: KeyMapping) -> list[str]:
    """Return what the source's code does otherwise, in this experiment."""
    plain = source.plain()
    return [
        f"{fact['differs']} ({fact['at']})"
        for fact in mapping.code
        if "differs" in fact and holds(fact.get("when", {}), plain)
    ]


# ------------------------------------------------------------------------------------------------ internal


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else [value]


def _is_same(first: Any, second: Any) -> bool:
    """Compare values of YAML, where True is not 1."""
    return isinstance(first, bool) == isinstance(second, bool) and first == second


def _read_rule(data: Mapping[str, Any]) -> Rule:
    rule = Rule(**{("kind" if key == "is" else key): value for key, value in data.items()})
    if rule.default is not _MISSING:
        rule = evolve(rule, kind="default")
    if rule.kind not in KINDS or not hasattr(conversions, rule.by or "Any"):
        raise ValueError(f"{data}: unknown kind or conversion")
    return rule


def _compute_value(value: Any, plain: Mapping[str, Any]) -> Any:
    """Return a value of `code`, which may name a conversion: `{by: NAME}`."""
    if isinstance(value, Mapping) and set(value) == {"by"}:
        return getattr(conversions, value["by"])(None, plain)
    return value


def _convert_key(
    source: SourceKeys, key: str, given: SourceValue, mapping: KeyMapping, plain: Mapping[str, Any]
) -> ConvertedKey:
    rules, rest = mapping.rules_of(key)
    rule = next((one for one in rules if holds(one.when, plain)), Rule(kind="unknown"))
    result = ConvertedKey(key=key, value=given.value, place=given.place, kind=rule.kind, note=rule.note, at=rule.at)
    if rule.kind == "default":
        same = any(_is_same(given.value, one) for one in (rule.default, *_listed(rule.default)))
        return result if same else evolve(result, kind="no counterpart")
    if rule.kind != "carried":
        return result
    if given.unresolved:
        raise UserError(f"{source.file}: {key} ({given.place}) cannot be resolved: {given.unresolved}")
    ours = given.value if rule.value is _MISSING else rule.value
    if rule.by:
        ours = getattr(conversions, rule.by)(given.value, plain)
    elif rule.values is not None:
        ours = next((value for one, value in rule.values.items() if _is_same(one, given.value)), _MISSING)
    if ours is not _MISSING:
        return evolve(result, ours={rule.to.replace("*", rest): ours})
    if rule.refuse:
        raise UserError(f"{source.file}: cannot run here: {rule.refuse.format(given.value)} ({given.place})")
    return evolve(result, kind="no counterpart", note=f"{given.value} is no value of {rule.to}")


def _check_conflicts(source: SourceKeys, keys: Sequence[ConvertedKey]) -> None:
    seen: dict[str, ConvertedKey] = {}
    for one in keys:
        for key, value in one.ours.items():
            first = seen.setdefault(key, one)
            if first.ours[key] != value:
                raise UserError(
                    f"{source.file}: two sources for {key}: {first.ours[key]!r} of {first.key or first.at} "
                    f"({first.place}), and {value!r} of {one.key or one.at} ({one.place})"
                )
