"""The conversion of one configuration: the spec, and what became of every key of the source."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import asdict, frozen

from vla_rl.cli.convert.mapping import KINDS, ConvertedKey, KeyMapping, convert_keys, differences_of, load_mapping
from vla_rl.cli.convert.sources import SourceKeys, name_file, read_source
from vla_rl.core.errors import UserError
from vla_rl.core.paths import explain_path_errors
from vla_rl.core.spec.yaml import dump_yaml

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
