"""YAML as specs mean it: line numbers for every key, duplicate keys refused, and YAML 1.2 scalars.

PyYAML follows YAML 1.1, where `1e-6` is text, `off` is False, `010` is 8 and the last of two equal keys wins. Here
`1e-6` is a float, only `true` and `false` are booleans, `010` is 10 and a second equal key is an error.
"""

from __future__ import annotations

import re
from typing import Any

import yaml
from attrs import field, frozen

Path = tuple[str | int, ...]
"""Keys and list positions from the top of a document."""

_SCALARS = {
    "null": re.compile(r"^(?:~|null|Null|NULL|)$"),
    "bool": re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"),
    "int": re.compile(r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$"),
    "float": re.compile(
        r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$|^[-+]?\.(?:inf|Inf|INF)$|^\.nan$"
    ),
}


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[Any, Any] = {}  # noqa: RUF012 (PyYAML's own interface)


for _name, _pattern in _SCALARS.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", _pattern, None)


class _Dumper(yaml.SafeDumper):
    """Quotes what YAML 1.1 *or* our reading would not take for text."""


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _SCALARS["float"], None)


@frozen
class Document:
    """Plain data with the line of every key and item."""

    data: Any
    lines: dict[Path, int] = field(factory=dict)
    """Path -> line, counted from 1."""
    errors: tuple[tuple[int, str], ...] = ()
    """(line, message); `data` is what could be read."""


def parse(text: str) -> Document:
    """Read one document. Problems are returned, not raised, so that others can be reported beside them."""
    try:
        root = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark or exc.context_mark
        return Document(None, errors=((mark.line + 1 if mark else 1, f"not valid YAML: {exc.problem or exc.context}"),))
    except yaml.YAMLError as exc:
        return Document(None, errors=((1, f"not valid YAML: {exc}"),))
    reader = _Reader()
    data = None if root is None else reader.read(root, ())
    return Document(data, reader.lines, tuple(reader.errors))


def dump(data: Any) -> str:
    """Plain data as YAML that `parse` reads back to the same data."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def dotted(path: Path) -> str:
    """`hooks.1.every`."""
    return ".".join(map(str, path))


class _Reader:
    def __init__(self) -> None:
        self.lines: dict[Path, int] = {}
        self.errors: list[tuple[int, str]] = []
        self._open: list[yaml.Node] = []

    def read(self, node: yaml.Node, path: Path) -> Any:
        self.lines.setdefault(path, node.start_mark.line + 1)
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        if any(node is parent for parent in self._open):
            return self._error(node, path, "an alias may not contain itself")
        self._open.append(node)
        try:
            if isinstance(node, yaml.SequenceNode):
                return [self.read(item, (*path, i)) for i, item in enumerate(node.value)]
            return self._mapping(node, path)
        finally:
            self._open.pop()

    def _mapping(self, node: yaml.Node, path: Path) -> dict[Any, Any]:
        data: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self._error(key_node, path, "a key must be a word")
                continue
            key = self._scalar(key_node, path)
            here = (*path, key)
            if key in data:
                self._error(key_node, here, f"duplicate key, already given in line {self.lines[here]}")
                continue
            self.lines[here] = key_node.start_mark.line + 1
            data[key] = self.read(value_node, here)
        return data

    def _scalar(self, node: yaml.ScalarNode, path: Path) -> Any:
        kind, text = node.tag.removeprefix("tag:yaml.org,2002:"), node.value
        try:
            if kind == "str":
                return text
            if kind == "null":
                return None
            if kind == "bool":
                return {"true": True, "false": False}[text.lower()]
            if kind == "int":
                return int(text, 0) if text[:2] in ("0x", "0o") else int(text)
            if kind == "float":
                return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
        except (ValueError, KeyError):
            return self._error(node, path, f"{text!r} is no {kind}")
        return self._error(node, path, f"tag {node.tag} is not supported")

    def _error(self, node: yaml.Node, path: Path, message: str) -> None:
        self.errors.append((node.start_mark.line + 1, f"{dotted(path)}: {message}" if path else message))
