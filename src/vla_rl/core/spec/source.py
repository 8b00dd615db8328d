"""Source lines of a spec's keys, for messages, and overrides from the command line."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from attrs import field, frozen

from vla_rl.core.errors import did_you_mean
from vla_rl.core.spec.structure import format_value, make_problem
from vla_rl.core.spec.yaml import DEEPEST, Path, dotted_path, parse_yaml

Item = tuple[Path, str]
"""A problem: the path of the key to blame, and what is wrong."""
_INDEX = re.compile("[0-9]{1,9}")
LAST = 10**9
"""Pseudo line number of overrides, which sorts their problems after the file's."""


@frozen(kw_only=True)
class Source:
    """Origin of a spec: its file and the line of each key."""

    name: str
    lines: Mapping[Path, int] = field(factory=dict, repr=False)
    """Path -> line, counted from 1."""
    overridden: frozenset[Path] = frozenset()

    def place_problem(self, path: Path, message: str) -> tuple[int, str]:
        """Return (line, `file:line: path: message`) of a problem."""
        text = placed_text(path, message)
        prefixes = [path[:length] for length in range(len(path), -1, -1)]
        if self.overridden.intersection(prefixes):
            return LAST, f"override: {text}"
        line = next((self.lines[prefix] for prefix in prefixes if prefix in self.lines), None)
        return (0, f"{self.name}: {text}") if line is None else (line, f"{self.name}:{line}: {text}")


def placed_text(path: Path, message: str) -> str:
    """Return `path: message`. Further lines of the message, such as commands to paste, are indented below it."""
    text = message.replace("\n", "\n  ")
    return f"{dotted_path(path)}: {text}" if path else text


def format_problems(items: Iterable[Item], source: Source | None) -> list[str]:
    """Format problems for the user, in the order of their lines."""
    if source is None:
        return [placed_text(*item) for item in items]
    return [text for _, text in sorted((source.place_problem(*item) for item in items), key=lambda placed: placed[0])]


def apply_override(data: dict[str, Any], override: str, known_keys: Collection[str] = ()) -> set[Path]:
    """Apply the override `a.b.0.c=value` to the data, and return the paths that are new or changed. Raise Problems.

    Args:
        known_keys: keys that the data may have at the top; none: any.
    """
    text, equals, value = override.partition("=")
    steps = text.strip().split(".")
    if not equals or not text.strip():
        raise make_problem(f"{override!r} is not of the form path=value")
    if not all(steps):
        raise make_problem(f"{text!r} has a dot without a key before and after it")
    if len(steps) > DEEPEST:
        raise make_problem(f"{text:.60}... has {len(steps)} keys; a spec is nested at most {DEEPEST} deep")
    document = parse_yaml(value)
    if document.errors:
        raise make_problem(f"{text}: {document.errors[0].message}")
    node: Any = data
    path: list[str | int] = []
    changed: set[Path] = set()
    for i, step in enumerate(steps):
        last = i == len(steps) - 1
        if isinstance(node, list):
            if not _INDEX.fullmatch(step) or int(step) >= len(node):
                raise make_problem(
                    f"{text}: {dotted_path(tuple(path))} has {len(node)} items; {step!r} is none of 0, 1, ..."
                )
            key: str | int = int(step)
        elif isinstance(node, dict):
            key = step
        else:
            raise make_problem(f"{text}: {dotted_path(tuple(path))} is {format_value(node)}, which has no {step!r}")
        path.append(key)
        if last:
            node[key] = document.data
        elif isinstance(node, dict) and node.get(key) is None:
            if not path[:-1] and known_keys and key not in known_keys:
                raise make_problem(f"{text}: unknown key {key!r}{did_you_mean(str(key), known_keys)}")
            if _INDEX.fullmatch(steps[i + 1]):
                raise make_problem(
                    f"{text}: the spec lists no {dotted_path(tuple(path))}; give the whole list, "
                    f"{dotted_path(tuple(path))}=[...]"
                )
            node[key] = {}
            changed.add(tuple(path))
        node = node[key]
    return changed | {tuple(path)}
