"""Names that a new plugin cannot have: its package would shadow, or its installation replace, an existing one."""

from __future__ import annotations

import ast
import builtins
import importlib.util
import keyword
import re
import sys
from collections.abc import Iterable
from importlib import metadata

from vla_rl.core.catalogue import KINDS, installed_plugins
from vla_rl.core.errors import UserError
from vla_rl.core.installation import OWN_DIST
from vla_rl.core.spec.yaml import parse_yaml


def check_name(name: str) -> str:
    """Return the package's name. Raises UserError with the owner of a taken name and a free one."""
    package = name.replace("-", "_")
    if not re.fullmatch(r"[a-z]([a-z0-9_]*[a-z0-9])?", package):
        raise UserError(f"{name!r} cannot name a plugin: use lower-case letters, digits and dashes, a letter first")
    owner = _owner_of(package)
    if owner:
        raise UserError(f"{name!r} cannot name a plugin: it is {owner}; take another name, such as my_{package}")
    return package


def check_classes(name: str, class_name: str, sources: Iterable[str]) -> None:
    """Raise UserError where the plugin's class or config would have a name that its own files import."""
    trees = [node for source in sources for node in ast.walk(ast.parse(source))]
    from_imports = [node for node in trees if isinstance(node, ast.ImportFrom)]
    imported = {
        (alias.asname or alias.name): node.module
        for node in from_imports
        if not (node.module or "").startswith(name)
        for alias in node.names
    }
    for new_class in (class_name, f"{class_name}Config"):
        if new_class in imported:
            raise UserError(
                f"{name!r} cannot name a plugin: its class would be {new_class}, as one of {imported[new_class]} that "
                f"it uses; take another name, such as my_{name}"
            )


def _owner_of(package: str) -> str | None:
    """Return the owner of the name; None if it is free."""
    from packaging.requirements import Requirement

    if keyword.iskeyword(package) or keyword.issoftkeyword(package):
        return "a word of Python"
    if not isinstance(parse_yaml(package).data, str):
        return "a word of YAML, which a spec does not read as a name"
    if package in sys.stdlib_module_names:
        return "a module of Python's standard library"
    for dist in metadata.distributions():
        if _normalise_name(dist.name) == _normalise_name(package):
            return f"the installed distribution {dist.name} {dist.version}, which `pip install` would replace"
    for kind in KINDS:
        for item in installed_plugins(kind).get(package, ()):
            return f"the {kind} plugin of {item.origin}"
    required = {_normalise_name(Requirement(text).name) for text in metadata.requires(OWN_DIST) or ()}
    if _normalise_name(package) in required | {OWN_DIST}:
        return f"a package that {OWN_DIST} or one of its extras installs"
    module_spec = importlib.util.find_spec(package)
    if module_spec is not None and module_spec.origin is not None:
        return f"a module that is there already ({module_spec.origin})"
    return "a name of Python's own" if hasattr(builtins, package) else None


def _normalise_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
