"""YAML reader of specs: line numbers for every key, duplicate keys refused, and YAML 1.2 scalars. PyYAML follows YAML
1.1, where `1e-6` is text, `off` is False, `010` is 8 and the last of two equal keys wins. Here `1e-6` is a float, only
`true` and `false` are booleans, `010` is 10 and a second equal key is an error."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import yaml
from attrs import field, frozen

LONGEST_TEXT = 4_000_000
"""Most characters of a document."""
MOST_VALUES = 100_000
"""Most values of a document, with aliases expanded."""
DEEPEST = 64
"""Deepest nesting of lists and mappings."""
LONGEST_INT = 1024
"""Most bits of an integer."""
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


_SEQUENCE, _MAPPING = "tag:yaml.org,2002:seq", "tag:yaml.org,2002:map"
MERGE = (
    "merge keys (`<<:`) are not part of YAML 1.2 and not supported; write the keys out, or use an alias for the whole "
    "value (`env: *name`)"
)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[Any, Any] = {}  # noqa: RUF012 (PyYAML's own interface)


for _name, _pattern in _SCALARS.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", _pattern, None)


class _Dumper(yaml.SafeDumper):
    """A dumper that quotes text which YAML 1.1 *or* our reader would not read as text."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    """Represent text; line breaks other than the usual one are escaped, since unescaped ones are read as blanks."""
    style = '"' if re.search("[\x85\u2028\u2029]", text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _SCALARS["float"], None)
_Dumper.add_representer(str, _represent_text)


class Error(NamedTuple):
    """A problem in a document."""

    line: int
    message: str
    unread: Path | None = None
    """Path of the value that is incomplete because of the problem; other problems there may follow from it."""


@frozen
class Document:
    """Plain data with the line of every key and item."""

    data: Any
    lines: dict[Path, int] = field(factory=dict)
    """Path -> line, counted from 1."""
    errors: tuple[Error, ...] = ()
    """Problems of the document; `data` is then the readable part."""


def parse_yaml(text: str) -> Document:
    """Read one document. Problems are returned, not raised, so that others can be reported with them."""
    if len(text) > LONGEST_TEXT:
        return _unreadable_document(1, f"it has more than {LONGEST_TEXT:,} characters")
    reader = _Reader()
    try:
        root = yaml.compose(text, Loader=_Loader)
        data = None if root is None else reader.read_node(root, ())
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark or exc.context_mark
        detail = exc.problem or exc.context or ""
        detail = f"{exc.context}, {detail}" if exc.context and detail.startswith("but ") else detail
        return _unreadable_document(mark.line + 1 if mark else 1, detail)
    except yaml.reader.ReaderError as exc:
        return _unreadable_document(
            text.count("\n", 0, exc.position) + 1, f"character {text[exc.position]!r} is not allowed"
        )
    except yaml.YAMLError as exc:
        return _unreadable_document(1, str(exc))
    except (ValueError, OverflowError) as exc:  # an escape or a version number that no character or integer can be
        return _unreadable_document(1, str(exc))
    except RecursionError:
        return _unreadable_document(1, "it is nested too deeply")
    except _TooMuch as exc:
        return _unreadable_document(exc.line, exc.message)
    return Document(data, reader.lines, tuple(reader.errors))


def _unreadable_document(line: int, why: str) -> Document:
    return Document(None, errors=(Error(line, f"not valid YAML: {why}"),))


def dump_yaml(data: Any) -> str:
    """Return plain data as YAML that `parse_yaml` reads back to the same data."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def dotted_path(path: Path) -> str:
    """Format a path with dots: `hooks.1.every`."""
    return ".".join(map(str, path))


def value_at(data: Any, keys: Iterable[str]) -> Any:
    """Return the value under these keys, each inside the one before; None if the keys do not exist."""
    for key in keys:
        data = data.get(key) if isinstance(data, Mapping) else None
    return data


class _TooMuch(Exception):
    """Reading further would take too long or too much memory."""

    def __init__(self, node: yaml.Node, message: str) -> None:
        super().__init__(message)
        self.line = node.start_mark.line + 1
        self.message = message


class _Reader:
    def __init__(self) -> None:
        self.lines: dict[Path, int] = {}
        self.errors: list[Error] = []
        self._open: list[yaml.Node] = []
        self._values = 0

    def read_node(self, node: yaml.Node, path: Path) -> Any:
        self._values += 1
        if self._values > MOST_VALUES:
            raise _TooMuch(node, f"with what its aliases (*name) stand for it has more than {MOST_VALUES:,} values")
        if len(path) > DEEPEST:
            raise _TooMuch(node, f"it is nested more than {DEEPEST} deep")
        self.lines.setdefault(path, node.start_mark.line + 1)
        if isinstance(node, yaml.ScalarNode):
            return self._read_scalar_node(node, path)
        if node.tag not in (_SEQUENCE, _MAPPING):
            return self._add_error(node, path, f"tag {node.tag} is not supported")
        if any(node is parent for parent in self._open):
            return self._add_error(node, path, "an alias may not contain itself")
        self._open.append(node)
        try:
            if isinstance(node, yaml.SequenceNode):
                return [self.read_node(item, (*path, i)) for i, item in enumerate(node.value)]
            return self._read_mapping_node(node, path)
        finally:
            self._open.pop()

    def _read_mapping_node(self, node: yaml.Node, path: Path) -> dict[Any, Any]:
        data: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self._add_error(key_node, path, "a key must be a word", unread=False)
                continue
            key = self._read_scalar_node(key_node, path)
            key_path = (*path, key)
            if key == "<<" and key_node.style is None:
                self._add_error(key_node, path, MERGE)
                continue
            if key in data:
                self._add_error(
                    key_node, key_path, f"duplicate key, already given in line {self.lines[key_path]}", unread=False
                )
                continue
            self.lines[key_path] = key_node.start_mark.line + 1
            data[key] = self.read_node(value_node, key_path)
        return data

    def _read_scalar_node(self, node: yaml.ScalarNode, path: Path) -> Any:
        kind, text = node.tag.removeprefix("tag:yaml.org,2002:"), node.value
        try:
            if kind == "str":
                return text
            if kind == "null":
                return None
            if kind == "bool":
                return {"true": True, "false": False}[text.lower()]
            if kind == "int":
                number = int(text, 0) if text[:2] in ("0x", "0o") else int(text)
                if number.bit_length() > LONGEST_INT:
                    return self._add_error(
                        node, path, f"{text:.20}... has {number.bit_length()} bits; use a smaller number"
                    )
                return number
            if kind == "float":
                return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
        except (ValueError, KeyError):
            return self._add_error(node, path, f"{text!r:.60} is not a valid {kind}")
        return self._add_error(node, path, f"tag {node.tag} is not supported")

    def _add_error(self, node: yaml.Node, path: Path, message: str, unread: bool = True) -> None:
        text = f"{dotted_path(path)}: {message}" if path else message
        self.errors.append(Error(node.start_mark.line + 1, text, path if unread else None))
