"""The conversion of one configuration by the rules of a YAML file beside this one: the spec, and what became of every
key of the source."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from attrs import asdict, evolve, field, frozen

from vla_rl.cli.convert import conversions
from vla_rl.cli.convert.sources import SourceKeys, SourceValue, name_file, read_source
from vla_rl.core.errors import UserError
from vla_rl.core.paths import explain_path_errors
from vla_rl.core.spec.yaml import dump_yaml, parse_yaml

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
    """Return what becomes of every key of the source, and of what its code does. Raises UserError for an experiment
    that cannot run here, and for two sources of one of our keys."""
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


SECTIONS = (
    "name",
    "seed",
    "model",
    "env",
    "rollout",
    "asynchrony",
    "algorithm",
    "trainer",
    "placement",
    "runtime",
    "train",
    "eval",
    "imitation",
)


@frozen(kw_only=True)
class Conversion:
    """A configuration of another project as a spec."""

    source: SourceKeys
    mapping: KeyMapping
    spec: Mapping[str, Any]
    """Plain data of the spec; `parse_spec` reads it, `text` is the file with its head."""
    keys: Sequence[ConvertedKey]
    """What became of each key of the source, and what its code does whatever its keys say."""
    differs: Sequence[str]
    """What the source's code does otherwise."""

    def of_kind(self, kind: str) -> list[ConvertedKey]:
        """Return the keys of the source of one kind (`mapping.KINDS`)."""
        return [one for one in self.keys if one.key and one.kind == kind]

    @property
    def text(self) -> str:
        """The spec's file: its head names the source and what differs here."""
        revision = f" at {self.source.commit}" if self.source.commit else ""
        name = name_file(self.source.file, self.source.checkout)
        read_as_of = f"its keys are read as of {self.mapping.commit}."
        lines = _wrap("", f"{self.mapping.title}'s {name}{revision}, converted by vla-rl convert; {read_as_of}")
        lines += _wrap("Differs here: ", " ".join(f"{sentence}." for sentence in self.sentences()))
        return "\n".join([*lines, dump_yaml(_ordered(self.spec))])

    def sentences(self) -> list[str]:
        """Return what differs here: in code, and by keys that are not carried over."""
        sentences = [
            f"`{one.key}: {_shown(one.value)}` has no counterpart: {one.note}" for one in self.of_kind("no counterpart")
        ]
        sentences += [
            f"`{one.key}: {_shown(one.value)}` ({one.place}) is left out: the mapping does not know this key"
            for one in self.of_kind("unknown")
        ]
        sentences += [f"{stray} is left out: it is not a setting" for stray in self.source.strays]
        dead = ", ".join(f"`{one.key}`" for one in self.of_kind("dead"))
        return [*self.differs, *sentences, *([f"Ignored by the source itself, and left out: {dead}"] if dead else [])]

    def lines(self) -> list[str]:
        """Return the account as text: a heading with a count for each kind, then its keys."""
        lines = []
        for kind, heading in KINDS.items():
            keys = self.of_kind(kind)
            lines.append(f"{heading}: {len(keys)}")
            if kind == "no effect":
                continue
            for one in keys:
                ours = "".join(f" -> {key}: {_shown(value)}" for key, value in one.ours.items())
                note = f"  ({one.note})" if one.note and kind != "default" else ""
                lines.append(f"  {one.key}: {_shown(one.value)}{ours}{note}")
        return lines + [f"not a setting: {stray}" for stray in self.source.strays]

    def write(self, file: Path) -> None:
        """Write `text` to a new file. Raises UserError if it exists."""
        if file.exists():
            raise UserError(f"{file} exists; name another file with --to")
        with explain_path_errors("--to", file):
            file.write_text(self.text, encoding="utf-8")

    def to_plain(self) -> dict[str, Any]:
        """Return all of it as plain data: project, commit, spec, keys, differs and strays."""
        return {
            "project": self.mapping.title,
            "commit": self.source.commit,
            "spec": dict(self.spec),
            "keys": [asdict(one) for one in self.keys],
            "differs": list(self.differs),
            "strays": list(self.source.strays),
        }


def convert_file(file: Path, checkout: Path | None = None) -> Conversion:
    """Convert a file (`vla_rl.convert`)."""
    return convert_source(read_source(file, checkout))


def convert_source(source: SourceKeys) -> Conversion:
    """Convert a configuration that was read. Raises UserError as `convert`."""
    mapping = load_mapping(source.project)
    keys = convert_keys(source, mapping)
    spec: dict[str, Any] = {section: {} for section in SECTIONS}
    spec["name"] = source.file.stem.replace("_", "-")
    for one in keys:
        for key, value in one.ours.items():
            _set(spec, key.split("."), value)
    spec = {section: value for section, value in spec.items() if value not in ({}, None)}
    return Conversion(source=source, mapping=mapping, spec=spec, keys=keys, differs=differences_of(source, mapping))


def print_conversion(converted: Conversion, given: Any) -> None:
    """Print what became of each key, and write the spec where `to` did not name its file."""
    if given.json:
        print(json.dumps(converted.to_plain(), indent=1, default=str))
        return
    target = given.to or Path(f"{converted.source.file.stem}.yaml")
    if given.to is None:
        converted.write(target)
    print("\n".join(converted.lines()))
    print(f"wrote {target}; now: vla-rl check {target}")


# ------------------------------------------------------------------------------------------------ internal


def _set(spec: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Set a value at a path; mappings are merged."""
    *parents, last = path
    for key in parents:
        inner = spec.get(key)
        if not isinstance(inner, dict):
            inner = spec[key] = {}
        spec = inner
    if isinstance(value, Mapping) and isinstance(spec.get(last), dict):
        spec[last] |= value
    else:
        spec[last] = dict(value) if isinstance(value, Mapping) else value


def _shown(value: Any) -> str:
    """Format a value as it stands in YAML, on one line."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _wrap(label: str, text: str) -> list[str]:
    return textwrap.wrap(
        f"{label}{text}",
        118,
        initial_indent="# ",
        subsequent_indent="#   " if label else "# ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _ordered(value: Any) -> Any:
    """Return plain data with `type` before the other keys, in which no list stands twice (YAML would refer to it)."""
    if not isinstance(value, Mapping):
        return list(value) if isinstance(value, list) else value
    return {key: _ordered(value[key]) for key in sorted(value, key=lambda key: key != "type")}
