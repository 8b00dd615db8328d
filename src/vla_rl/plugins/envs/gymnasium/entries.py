"""Entries of nested observations, action spaces and infos by path: `pixels.front` is `front` in `pixels`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gymnasium import spaces

from vla_rl.core.errors import UserError, did_you_mean


class NoEntry(UserError):
    """A path that leads to no entry. The message lists the paths that exist."""


def find_entry(container: Any, path: str) -> Any:
    """Return the entry at a path of nested mappings and lists. A key that contains dots itself is found as well: the
    longest key that fits is taken. Raise NoEntry."""
    value = _descend_path(container, path.split("."))
    if value is None:
        paths = sorted(known_paths(container))
        raise NoEntry(f"no entry {path!r}{did_you_mean(path, paths)}\n  entries: {', '.join(paths) or 'none'}")
    return value[0]


def known_paths(container: Any) -> list[str]:
    """Return the paths of all entries that are not containers themselves."""
    return [".".join(map(str, keys)) for keys, _ in walk_leaves(container)]


def walk_leaves(container: Any, keys: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield (keys that lead to it, entry) of all entries that are not containers themselves."""
    if isinstance(container, spaces.Dict | Mapping):
        children = list(container.items())
    elif isinstance(container, spaces.Tuple | list | tuple):
        children = list(enumerate(container))
    else:
        yield keys, container
        return
    for key, child in children:
        yield from walk_leaves(child, (*keys, key))


def _descend_path(value: Any, parts: Sequence[str]) -> tuple[Any] | None:
    """Return the entry in a tuple, or None if it does not exist."""
    if not parts:
        return (value,)
    children = _list_children(value) or {}
    for length in range(len(parts), 0, -1):
        key = ".".join(parts[:length])
        if key in children:
            result = _descend_path(children[key], parts[length:])
            if result is not None:
                return result
    return None


def _list_children(value: Any) -> dict[str, Any] | None:
    """Return the entries of a container by the text of their key; None for anything else."""
    if isinstance(value, spaces.Dict | Mapping):
        return {str(key): child for key, child in value.items()}
    if isinstance(value, spaces.Tuple | list | tuple):
        return {str(number): child for number, child in enumerate(value)}
    return None
