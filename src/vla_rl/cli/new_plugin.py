"""`vla-rl new-plugin`: a third-party project with an entry point, a plugin that works and its passing test."""

from __future__ import annotations

from pathlib import Path
from string import Template
from typing import Any

from vla_rl.cli.plugin_names import check_classes, check_name
from vla_rl.core.catalogue import KINDS
from vla_rl.core.errors import UserError, did_you_mean
from vla_rl.core.installation import pip_command

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
    a folder with something in it.
    """
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
