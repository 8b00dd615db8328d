"""YAML files that come with a package under short names, and files like them of users."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import TypeVar

from vla_rl.core.errors import UserError, did_you_mean
from vla_rl.core.paths import read_text
from vla_rl.core.spec.structure import Problems, Structurer
from vla_rl.core.spec.yaml import Document, dotted_path, parse_yaml
from vla_rl.core.spec.yaml import Path as KeyPath

T = TypeVar("T")


def names_in(package: str) -> list[str]:
    """Return the names of a package's YAML files."""
    folder = resources.files(package)
    return sorted(item.name.removesuffix(".yaml") for item in folder.iterdir() if item.name.endswith(".yaml"))


def read_named(kind: str, name: str, package: str, example: str) -> str:
    """Return the text of a package's file by name, or of another by path. Raise UserError for none or another type.

    Args:
        kind: what the file holds, for messages.
        example: file of the package that shows how to write one.
    """
    names = names_in(package)
    folder = resources.files(package)
    if name in names:
        return folder.joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    try:
        return read_text(Path(name))
    except UnicodeDecodeError as exc:
        raise UserError(f"{name}: is not UTF-8 text ({exc.reason} at byte {exc.start})") from None
    except (OSError, ValueError):
        raise UserError(
            f"no {kind} {name!r}{did_you_mean(name, names)}\n  there are: {', '.join(names)}; or the path of a YAML "
            f"file like {folder.joinpath(example)}"
        ) from None


def parse_file(text: str, where: str, cls: type[T], error: type[UserError] = UserError) -> tuple[T, Document]:
    """Return what a YAML file holds as an attrs class, and the document with the lines of its keys. Raise `error` with
    all problems, a line each.

    Args:
        where: file, for messages.
    """
    document = parse_yaml(text)
    if document.errors:
        raise error("\n".join(f"{where}:{problem.line}: {problem.message}" for problem in document.errors))
    try:
        content: T = Structurer().read_class({} if document.data is None else document.data, cls)
    except Problems as exc:
        raise error("\n".join(place_message(where, document, path, text) for path, text in exc.items)) from exc
    return content, document


def find_line(document: Document, path: KeyPath) -> int:
    """Return the line of a value, or of the nearest key above it."""
    prefixes = (path[:length] for length in range(len(path), -1, -1))
    return next((document.lines[prefix] for prefix in prefixes if prefix in document.lines), 1)


def place_message(where: str, document: Document, path: KeyPath, text: str) -> str:
    """Return a message about a value with its file, line and key in front."""
    return f"{where}:{find_line(document, path)}: {f'{dotted_path(path)}: ' if path else ''}{text}"
