"""`vla-rl new-plugin`: a third-party project with an entry point, a plugin that works and its passing test. A name is
refused whose package would shadow, or whose installation would replace, an existing one."""

from __future__ import annotations

import ast
import builtins
import importlib.util
import keyword
import re
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from string import Template
from typing import Any

from vla_rl.core.catalogue import KINDS, installed_plugins
from vla_rl.core.errors import UserError, did_you_mean
from vla_rl.core.installation import OWN_DIST, pip_command
from vla_rl.core.spec.yaml import parse_yaml

TEMPLATES = Path(__file__).with_name("templates")
SUFFIX = ".txt"

IN_A_SPEC = {
    "model": "model: {type: $name}",
    "engine": "rollout: {chunk: 4, episodes: 64, engine: {type: $name}}",
    "env": "env: {type: $name, num_envs: 16}",
    "algorithm": "algorithm: {type: $name}",
    "trainer": "trainer: {type: $name}",
    "placement": "placement: {type: $name}",
    "data": "imitation: {data: {type: $name, file: demonstrations.npz}, steps: 1000, lr: 1e-4}",
    "world_model": "world_model: {type: $name}\nimagination: {}     # its keys: docs/reference/world-models.md",
    "reward_model": "rewards: {type: $name}",
    "hook": "hooks: [{type: console}, {type: $name}]",
}

VARIANTS = {"single_env": "env"}
"""Variants of a kind's project: an env as one scene, which vla-rl vectorises."""


def new_plugin(kind: str, name: str, folder: Path) -> Path:
    """Write the project of a plugin `name` of a kind (a key of `KINDS` or `VARIANTS`) into `folder`. -> `folder`.
    Raises UserError: unknown kind, a name that is not an identifier (dashes are allowed) or that something has already,
    a folder with something in it."""
    begun, kind = kind, VARIANTS.get(kind, kind)
    if kind not in KINDS:
        kinds = [*KINDS, *VARIANTS]
        raise UserError(f"no kind of plugin {kind!r}{did_you_mean(kind, kinds)}; kinds: {', '.join(kinds)}")
    package = check_name(name)
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not empty; give the name of a new folder")
    words = {
        "kind": kind,
        "group": KINDS[kind].group,
        "name": package,
        "package": package,
        "dist": package.replace("_", "-"),
        "Class": "".join(word.capitalize() for word in package.split("_")),
    }
    words["spec"] = Template(IN_A_SPEC[kind]).substitute(words)
    texts = {
        path: Template(template.read_text(encoding="utf-8")).substitute(words)
        for template, path in _template_files(begun, package)
    }
    check_classes(package, words["Class"], [text for path, text in texts.items() if path.endswith(".py")])
    for path, text in texts.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    return folder


def print_project(project: Path, given: Any) -> None:
    """Print where the project is, and how to install it."""
    print(f"made {project}; now: {pip_command('install')} -e '{project}[test]' && pytest {project}")


def _template_files(kind: str, package: str) -> list[tuple[Path, str]]:
    """(template, path within the project) of every file of a kind."""
    files = {"test": f"tests/test_{package}", "plugin": f"src/{package}/__init__"}
    files |= {part: f"src/{package}/{part}" for part in ("impl", "record")}
    templates = []
    for template in sorted((*TEMPLATES.glob(f"*{SUFFIX}"), *(TEMPLATES / kind).glob(f"*{SUFFIX}"))):
        stem, dot, ending = template.name.removesuffix(SUFFIX).partition(".")
        templates.append((template, files.get(stem, stem) + dot + ending))
    return templates


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
