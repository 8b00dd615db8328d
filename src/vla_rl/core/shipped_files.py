"""YAML files that come with a package under short names, and files like them of users."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from vla_rl.core.errors import UserError, did_you_mean
from vla_rl.core.paths import read_text


def names_in(package: str) -> list[str]:
    """Return the names of a package's YAML files."""
    folder = resources.files(package)
    return sorted(item.name.removesuffix(".yaml") for item in folder.iterdir() if item.name.endswith(".yaml"))


def read_named(kind: str, name: str, package: str, example: str) -> str:
    """Return the text of a package's file by its name, or of another file by its path. Raise UserError if it does not
    exist or is not text.

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
