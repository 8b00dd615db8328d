"""Configurations of other projects, read into one flat table: key -> value, with the file and line that set it."""

from __future__ import annotations

import json
import operator
import os
import re
import shlex
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from attrs import evolve, field, frozen

from vla_rl.core.errors import UserError, first_line
from vla_rl.core.installation import OWN_DIST
from vla_rl.core.paths import read_commit
from vla_rl.core.requirements import install_command
from vla_rl.core.spec.yaml import parse_yaml
from vla_rl.toolkit.hooks.tracking import flatten_spec

_ASSIGNMENT = re.compile(r"^([A-Za-z_]\w*)=(.*)$", re.DOTALL)
_OVERRIDE = re.compile(r"^\+{0,2}([A-Za-z_]\w*(?:\.\w+)+)=(.*)$", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::-?([^{}]*))?\}|(\w+))")


_Leaf = tuple[str, Any, str]
"""Key, value, and why it could not be computed."""


class _Part(NamedTuple):
    """A file of a composed configuration."""

    file: Path
    package: str
    """Where Hydra puts its keys; empty for the top."""
    lines: Mapping[Any, int]


@frozen
class SourceValue:
    """A value of the source, or what keeps it from being known."""

    value: Any
    place: str
    """file:line that sets it; the file is relative to the checkout."""
    unresolved: str = ""
    """Why the value could not be computed; empty where it was."""


@frozen(kw_only=True)
class SourceKeys:
    """A configuration of another project."""

    project: str
    """Name of its mapping: rlinf, simplevla, siirl or lerobot."""
    file: Path
    checkout: Path | None = None
    commit: str = ""
    values: Mapping[str, SourceValue] = field(factory=dict)
    strays: tuple[str, ...] = ()
    """What stands in the file and is no setting, with its place."""

    def plain(self) -> dict[str, Any]:
        """Return key -> value, without those that could not be computed."""
        return {key: value.value for key, value in self.values.items() if not value.unresolved}


def read_source(file: Path, checkout: Path | None = None) -> SourceKeys:
    """Read a configuration of RLinf (YAML), SimpleVLA-RL or siiRL (shell script) or lerobot (train_config.json).

    Args:
        file: the configuration.   checkout: folder of the project's repository; None: the one that holds the file.

    Raises UserError for a file of no known project, and for one that cannot be composed."""
    if not file.is_file():
        raise UserError(f"{file}: no such file")
    if checkout is not None and not checkout.is_dir():
        raise UserError(f"--checkout: {checkout} is not a folder")
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as exc:
        raise UserError(f"{file}: not text: {first_line(exc)}") from exc
    if file.suffix == ".json":
        return _read_lerobot(file, text)
    if file.suffix == ".sh":
        return _read_script(file, text, checkout)
    if file.suffix in (".yaml", ".yml"):
        return _read_rlinf(file, text, checkout)
    raise _unknown_project(file)


# ------------------------------------------------------------------------------------------------ internal


def _unknown_project(file: Path) -> UserError:
    return UserError(
        f"{file}: no configuration of a project that can be converted\n  these can: a YAML of RLinf, a script of "
        "SimpleVLA-RL or siiRL (python -m verl.trainer.main_ppo, siirl.main_dag), train_config.json of lerobot"
    )


def _find_checkout(file: Path, package: str, given: Path | None) -> Path | None:
    """Return the folder that holds the project's package, above the file or as given."""
    if given is not None:
        if not (given / package).is_dir():
            raise UserError(f"--checkout: {given} is no checkout of the project: it has no folder {package}")
        return given.resolve()
    return next((folder for folder in file.resolve().parents if (folder / package).is_dir()), None)


def _read_commit(checkout: Path | None) -> str:
    """Return the commit of a checkout; empty where the folder is none: Git would answer for one around it."""
    return read_commit(checkout, "--short=9") if checkout is not None and (checkout / ".git").exists() else ""


def name_file(file: Path, checkout: Path | None) -> str:
    """Return a file's path within the checkout, or its name where it is not there."""
    resolved = file.resolve()
    return str(resolved.relative_to(checkout)) if checkout and resolved.is_relative_to(checkout) else file.name


# ------------------------------------------------------------------------------------------------ RLinf


def _read_rlinf(file: Path, text: str, given: Path | None) -> SourceKeys:
    document = parse_yaml(text)
    if not isinstance(document.data, dict):
        raise (
            UserError(f"{file}:{document.errors[0].line}: {document.errors[0].message}")
            if (document.errors)
            else _unknown_project(file)
        )
    if "runner" not in document.data:
        named = [key for key in ("env_type", "model_type", "simulator_type", "strategy") if key in document.data]
        if not named and "defaults" not in document.data and not file.resolve().parent.parent.name == "config":
            raise _unknown_project(file)
        raise UserError(
            f"{file}: a part of RLinf's configurations, not an experiment: it has no `runner`\n  give a file that "
            "names it in its `defaults`"
        )
    checkout = _find_checkout(file, "rlinf", given)
    if checkout is None:
        raise UserError(f"{file}: its groups are in a checkout of RLinf: name the folder with --checkout")
    leaves, parts = _compose(file, checkout)
    values = {key: SourceValue(value, _place_of(key, parts, checkout, file), why) for key, value, why in leaves}
    return SourceKeys(project="rlinf", file=file, checkout=checkout, commit=_read_commit(checkout), values=values)


def _place_of(key: str, parts: Sequence[_Part], checkout: Path, file: Path) -> str:
    """Return file:line of the strongest part that sets a key."""
    for part in parts:
        path = tuple(key.removeprefix(f"{part.package}.").split(".")) if part.package else tuple(key.split("."))
        if path in part.lines and (not part.package or key.startswith(f"{part.package}.")):
            return f"{name_file(part.file, checkout)}:{part.lines[path]}"
    return name_file(file, checkout)


def _compose(file: Path, checkout: Path) -> tuple[list[_Leaf], list[_Part]]:
    """Compose a configuration with Hydra. -> its leaves, and the files that make it, the strongest first."""
    with _errors_of_missing_extra():
        from hydra import compose, initialize_config_dir
        from hydra.core.global_hydra import GlobalHydra
        from hydra.errors import HydraException
        from hydra.types import RunMode
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException
    resolvers: dict[str, Any] = {
        "multiply": operator.mul,
        "int_div": operator.floordiv,
        "subtract": operator.sub,
        "not": operator.not_,
    }
    for name, function in resolvers.items():
        OmegaConf.register_new_resolver(name, function, replace=True)
    OmegaConf.register_new_resolver("torch.dtype", str, replace=True)
    examples = checkout / "examples"
    folders = {"EMBODIED_PATH": "embodiment", "DIFFUSION_PATH": "diffusion", "REWARD_PATH": "reward"}
    variables = {name: str(examples / folder) for name, folder in folders.items()} | {"REPO_PATH": str(checkout)}
    with warnings.catch_warnings(), _environment(variables):
        warnings.simplefilter("ignore", UserWarning)  # lists of defaults without `_self_`
        try:
            with initialize_config_dir(str(file.resolve().parent), version_base="1.1"):  # as RLinf's programs do
                config = compose(file.stem)
                loader = GlobalHydra.instance().config_loader()
                defaults = loader.compute_defaults_list(file.stem, [], RunMode.RUN).defaults
                leaves = list(_iterate_leaves(config))
        except (HydraException, OmegaConfBaseException, ValueError) as exc:
            raise UserError(f"{file}: cannot be composed: {first_line(exc.__cause__ or exc)}") from exc
    parts = []
    for default in reversed(defaults):
        for folder in (file.resolve().parent, examples / "embodiment" / "config"):
            part = folder / f"{default.config_path}.yaml"
            if part.is_file():
                lines = parse_yaml(part.read_text(encoding="utf-8")).lines
                parts.append(_Part(part, default.package or "", lines))
                break
    return leaves, parts


@contextmanager
def _errors_of_missing_extra() -> Iterator[None]:
    try:
        yield
    except ImportError as exc:
        raise UserError(
            "Hydra, which composes these configurations, is not installed; extra convert: "
            f"{install_command(OWN_DIST, 'convert')}"
        ) from exc


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _iterate_leaves(config: Any, prefix: str = "") -> Iterator[_Leaf]:
    """Iterate an OmegaConf mapping as key, value, why not; each is resolved by itself, so that one that cannot be
    resolved hides no other."""
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    for name in config:
        key = f"{prefix}.{name}" if prefix else str(name)
        try:
            value = config[name]
            if isinstance(value, DictConfig) and len(value):
                yield from _iterate_leaves(value, key)
            else:
                yield key, OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value, ""
        except OmegaConfBaseException as exc:
            yield key, None, first_line(exc)


# ------------------------------------------------------------------------------------------------ scripts


def _read_script(file: Path, text: str, given: Path | None) -> SourceKeys:
    """Read a shell script whose command has Hydra's overrides, over the repository's YAML of defaults."""
    if "siirl.main_dag" in text:
        project, package = "siirl", "siirl"
    elif "verl.trainer.main_ppo" in text:
        project, package = "simplevla", "verl"
    else:
        raise _unknown_project(file)
    checkout = _find_checkout(file, package, given)
    name = name_file(file, checkout)
    values, variables, strays = _parse_script(text, name)
    for variable in ("ROBOT_PLATFORM", "ALG"):  # environment variables that the programs read
        if variable in variables:
            values[variable] = SourceValue(*variables[variable])
    source = SourceKeys(project=project, file=file, checkout=checkout, commit=_read_commit(checkout), values=values)
    return evolve(source, values=_script_defaults(source), strays=tuple(strays))


def _parse_script(text: str, name: str) -> tuple[dict[str, SourceValue], dict[str, tuple[str, str]], list[str]]:
    """Return the overrides of a script's command, its variables with their places, and words that are neither."""
    variables: dict[str, tuple[str, str]] = {}
    values: dict[str, SourceValue] = {}
    strays = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            words = shlex.split(line.removesuffix("\\"), comments=True)
        except ValueError:  # a quotation of several lines, as of the script's messages
            continue
        words = words[1:] if words[:1] in (["export"], ["local"]) else words
        assigned = _ASSIGNMENT.match(words[0]) if len(words) == 1 else None
        if assigned:
            variables.setdefault(assigned[1], (_expand(assigned[2], variables), f"{name}:{number}"))
            continue
        for word in words:
            override = _OVERRIDE.match(word)
            if override:
                value_text = _expand(override[2], variables)
                unset = _VARIABLE.search(value_text)
                why = f"${unset[1] or unset[3]} is not set in the script" if unset else ""
                place = f"{name}:{number}"
                values[override[1]] = SourceValue(parse_yaml(value_text).data if value_text else "", place, why)
            elif values and len(words) == 1 and re.fullmatch(r"\w+", word) and not _command_ended(text, number):
                strays.append(f"{name}:{number}: {word!r}")
    return values, variables, strays


def _command_ended(text: str, number: int) -> bool:
    """Whether no further override follows after this line."""
    return not any(_OVERRIDE.match(line.strip()) for line in text.splitlines()[number:])


def _expand(text: str, variables: Mapping[str, tuple[str, str]]) -> str:
    """Replace the shell variables that the script sets, or that have a default; others stay as they are."""

    def expand(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        if name in variables:
            return variables[name][0]
        return match[2] if match[2] is not None else match[0]

    return _VARIABLE.sub(expand, text)


def _script_defaults(source: SourceKeys) -> dict[str, SourceValue]:
    """Return the script's values over those of the repository's YAML, where the checkout has it."""
    file = None if source.checkout is None else source.checkout / "verl" / "trainer" / "config" / "ppo_trainer.yaml"
    if file is None or not file.is_file():
        return dict(source.values)
    with _errors_of_missing_extra():
        from omegaconf import OmegaConf
    document = parse_yaml(file.read_text(encoding="utf-8"))
    config = OmegaConf.create(document.data)
    for key, value in source.values.items():
        OmegaConf.update(config, key, value.value)
    name = name_file(file, source.checkout)
    values = {
        key: SourceValue(value, f"{name}:{document.lines.get(tuple(key.split('.')), 1)}", why)
        for key, value, why in _iterate_leaves(config)
    }
    return values | dict(source.values)


# ------------------------------------------------------------------------------------------------ lerobot


def _read_lerobot(file: Path, text: str) -> SourceKeys:
    try:
        data = json.loads(text)
    except ValueError as exc:
        raise UserError(f"{file}: not JSON: {exc}") from exc
    if not isinstance(data, dict) or "policy" not in data or "dataset" not in data:
        raise _unknown_project(file)
    values = {key: SourceValue(value, file.name) for key, value in flatten_spec(data).items()}
    return SourceKeys(project="lerobot", file=file, values=values)
