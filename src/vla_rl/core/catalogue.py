"""The catalogue of plugins: list them from package metadata alone, load one, and build its component.

Each kind of plugin has one entry-point group. Names, versions and name collisions are therefore known without importing
anything, and only the plugins that a spec names are loaded. A module listed under `plugins:` in a spec adds its own:

    vla_rl_plugins = {"env": {"toy": EnvPlugin(...)}}     # kind -> name -> plugin; kinds are the keys of KINDS

The `@hookimpl` functions in such a module wrap components or listen to the run (see `core/manager.py`).

Environment: `VLA_RL_PLUGINS=acme,other` loads third-party plugins from these distributions only.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, overload

from vla_rl.core import declarations
from vla_rl.core.declarations import (
    AlgorithmPlugin,
    DataPlugin,
    Declaration,
    EnginePlugin,
    EnvPlugin,
    HookPlugin,
    ModelPlugin,
    PlacementPlugin,
    RewardModelPlugin,
    TrainerPlugin,
    WorldModelPlugin,
    resolve_target,
)
from vla_rl.core.errors import PluginError, UserError, did_you_mean
from vla_rl.core.installation import OWN_DIST, pip_command
from vla_rl.core.paths import error_reason, expand_tilde, format_path, resolve_path
from vla_rl.core.requirements import install_command, normalise_name

if TYPE_CHECKING:
    from vla_rl.core.contexts import (
        Context,
    )

MODULE_PLUGINS = "vla_rl_plugins"
"""Name of the mapping in which a module listed in `spec.plugins` offers its plugins."""


@dataclass(frozen=True)
class Kind:
    """One kind of plugin: its entry-point group, and the classes of its declarations and components."""

    name: str
    group: str
    declaration: type[Declaration]
    contract: str
    """Name of the contract, `module:class`. Its import takes longer than that of all declarations."""
    capabilities: tuple[str, ...] = ()
    """Names of classes in `core/capabilities.py` that components may inherit too; an heir comes before."""

    @property
    def contract_class(self) -> type:
        """Contract (abstract class) that all components of the kind inherit."""
        base: type = resolve_target(self.contract, f"contract of kind {self.name}")
        return base

    @property
    def capability_classes(self) -> tuple[type, ...]:
        """Capabilities of the kind."""
        modules = (f"vla_rl.core.capabilities:{name}" for name in self.capabilities)
        return tuple(resolve_target(name, f"capability of kind {self.name}") for name in modules)


KINDS = {
    kind.name: kind
    for kind in (
        Kind(
            "model",
            "vla_rl.models",
            ModelPlugin,
            "vla_rl.core.hookspecs:VLAModel",
            (
                "HasCritic",
                "HasReference",
                "ActionTokens",
                "Reparameterised",
                "Steerable",
                "HasFeatures",
                "ContinuesChunks",
                "Capturable",
                "Compilable",
            ),
        ),
        Kind("engine", "vla_rl.engines", EnginePlugin, "vla_rl.core.hookspecs:PolicyEngine", ("ContinuesChunks",)),
        Kind("env", "vla_rl.envs", EnvPlugin, "vla_rl.core.hookspecs:SimEnv", ("Offloadable",)),
        Kind("algorithm", "vla_rl.algorithms", AlgorithmPlugin, "vla_rl.core.hookspecs:Algorithm"),
        Kind("trainer", "vla_rl.trainers", TrainerPlugin, "vla_rl.core.trainers:Trainer", ("TrainsInParts",)),
        Kind("placement", "vla_rl.placement", PlacementPlugin, "vla_rl.core.hookspecs:Placement"),
        Kind("data", "vla_rl.data", DataPlugin, "vla_rl.core.hookspecs:Demonstrations"),
        Kind("world_model", "vla_rl.world_models", WorldModelPlugin, "vla_rl.core.world_models:WorldModel"),
        Kind("reward_model", "vla_rl.reward_models", RewardModelPlugin, "vla_rl.core.reward_models:RewardModel"),
        Kind("hook", "vla_rl.hooks", HookPlugin, "vla_rl.core.hookspecs:RunEvents"),
    )
}


@dataclass(frozen=True)
class Installed:
    """An available plugin, described by metadata; its code has not been imported."""

    name: str
    dist: str
    """Distribution that offers the plugin, or the module of `spec.plugins`."""
    version: str
    """Version of the distribution; empty for a module."""
    target: str
    """Import target, `module:attribute`."""
    entry: metadata.EntryPoint | None = field(default=None, repr=False, compare=False)
    plugin: object = field(default=None, repr=False, compare=False)
    """The plugin object itself, if a module offers it; None for an entry point."""

    @property
    def origin(self) -> str:
        """Source of the plugin, for messages: `acme-env 0.1`, or `module toy_envs`."""
        return f"{self.dist} {self.version}" if self.version else f"module {self.dist}"


def installed_plugins(kind: str, extra_modules: Sequence[str] = ()) -> dict[str, list[Installed]]:
    """Return the available plugins of a kind by name, sorted, without importing any except `extra_modules`. Several
    plugins under one name are a collision, which is an error only for a caller that asks for that name."""
    plugins: dict[str, list[Installed]] = {}
    for item in (*_from_entry_points(_find_kind(kind).group), *_from_modules(kind, extra_modules)):
        plugins.setdefault(item.name, []).append(item)
    return dict(sorted(plugins.items()))


@overload
def load(kind: Literal["model"], name: str, extra_modules: Sequence[str] = ()) -> ModelPlugin: ...
@overload
def load(kind: Literal["engine"], name: str, extra_modules: Sequence[str] = ()) -> EnginePlugin: ...
@overload
def load(kind: Literal["env"], name: str, extra_modules: Sequence[str] = ()) -> EnvPlugin: ...
@overload
def load(kind: Literal["algorithm"], name: str, extra_modules: Sequence[str] = ()) -> AlgorithmPlugin: ...
@overload
def load(kind: Literal["trainer"], name: str, extra_modules: Sequence[str] = ()) -> TrainerPlugin: ...
@overload
def load(kind: Literal["placement"], name: str, extra_modules: Sequence[str] = ()) -> PlacementPlugin: ...
@overload
def load(kind: Literal["data"], name: str, extra_modules: Sequence[str] = ()) -> DataPlugin: ...
@overload
def load(kind: Literal["world_model"], name: str, extra_modules: Sequence[str] = ()) -> WorldModelPlugin: ...
@overload
def load(kind: Literal["reward_model"], name: str, extra_modules: Sequence[str] = ()) -> RewardModelPlugin: ...
@overload
def load(kind: Literal["hook"], name: str, extra_modules: Sequence[str] = ()) -> HookPlugin: ...
@overload
def load(kind: str, name: str, extra_modules: Sequence[str] = ()) -> Any: ...
def load(kind: str, name: str, extra_modules: Sequence[str] = ()) -> Any:
    """Import the plugin of that name (not what it builds) and return its declaration. Raise PluginError if the name is
    unknown or ambiguous, the import fails, a dependency is missing, or the target is no declaration of the kind."""
    item, who = _find_plugin(kind, name, extra_modules)
    plugin = _import_declaration(kind, item, who)
    try:
        config = plugin.config
    except (UserError, KeyboardInterrupt) as exc:
        exc.add_note(f"in {who}")
        raise
    except BaseException as exc:
        raise _import_failure(who, item, exc, extra=plugin.extra) from exc
    import attrs  # late: `vla-rl plugins` reads no settings

    if not attrs.has(config):
        raise PluginError(f"{who}: config is {config!r}, not an attrs class; decorate it with @attrs.frozen")
    return plugin


def load_declaration(kind: str, name: str) -> Declaration:
    """Return the declaration of an installed plugin alone. Raise PluginError as `load` does, but for its settings."""
    return _import_declaration(kind, *_find_plugin(kind, name, ()))


def build(
    kind: str, name: str, config: object, context: Context | None = None, extra_modules: Sequence[str] = ()
) -> Any:
    """Build the component for (kind, name, config) in this process. Raise PluginError in the cases of `load`, and for a
    missing dependency or a component that is not of the kind. Other errors of the builder pass through with a note.

    Args:
        context: what the component gets of the run; None for hooks and placements, which get nothing.
    """
    item, who = _find_plugin(kind, name, extra_modules)
    plugin: Any = _import_declaration(kind, item, who)
    try:
        component = plugin.build(config) if context is None else plugin.build(config, context)
    except ModuleNotFoundError as exc:
        raise _import_failure(who, item, exc, extra=plugin.extra) from exc
    except (Exception, KeyboardInterrupt) as exc:
        exc.add_note(f"in plugin {name!r}, building the {kind}")
        raise
    except BaseException as exc:
        raise PluginError(f"{who}: building it ended the process: {_describe_exception(exc)}") from exc
    base = KINDS[kind].contract_class
    if kind != "hook" and not isinstance(component, base):
        raise PluginError(f"{who}: build returned {type(component).__name__}, which does not subclass {base.__name__}")
    if component is None:
        raise PluginError(f"{who}: build returned None; return an object with methods of {base.__name__}")
    return component


def missing_package(kind: str, name: str, exc: ModuleNotFoundError, extra_modules: Sequence[str] = ()) -> PluginError:
    """Return the error for a package that a component needs and did not find, with the command that installs it."""
    item, who = _find_plugin(kind, name, extra_modules)
    return _import_failure(who, item, exc, extra=_import_declaration(kind, item, who).extra)


def hook_modules(modules: Sequence[str]) -> tuple[tuple[str, ModuleType], ...]:
    """Import the modules of `spec.plugins` ; return (name, module) pairs, whose `@hookimpl` functions act."""
    return tuple((module, import_module(module)) for module in modules)


def import_module(name: str) -> ModuleType:
    """Import a module of `spec.plugins`: a dotted name, or the path of a .py file (imported once per process). Raise
    PluginError with the file and line of the failure inside the module."""
    try:
        path = resolve_path(expand_tilde(name)) if name.endswith(".py") and "\0" not in name else None
    except OSError as exc:
        raise PluginError(f"plugins: {format_path(name)} cannot be used: {error_reason(exc)}") from exc
    if path is None and not all(part.isidentifier() for part in name.split(".")):
        raise PluginError(f"plugins: {name!r} is neither a dotted module name nor the path of a .py file")
    dtype = _default_dtype()
    try:
        module = importlib.import_module(name) if path is None else _import_file(path)
        if dtype != (changed := _default_dtype()):
            sys.modules["torch"].set_default_dtype(dtype or sys.modules["torch"].float32)
            raise PluginError(
                f"plugins: module {name!r} sets torch's default dtype to {changed}, for simulators and models of "
                "others, too; give its own tensors a dtype instead"
            )
        return module
    except UserError:
        raise
    except ModuleNotFoundError as exc:
        if exc.name is not None and (name == exc.name or name.startswith(exc.name + ".")):
            raise PluginError(
                f"plugins: no module named {name!r}; give the path of its .py file, or put its folder on PYTHONPATH"
            ) from exc
        raise PluginError(f"plugins: module {name!r} needs {exc.name!r}, which is not installed") from exc
    except KeyboardInterrupt:
        raise
    except BaseException as exc:
        raise PluginError(f"plugins: module {name!r} cannot be imported: {_describe_exception(exc, path)}") from exc


# ------------------------------------------------------------------------------------------------ internal


def _default_dtype() -> Any:
    """Return torch's default dtype; None where that is float32, or torch is not imported."""
    torch = sys.modules.get("torch")
    return None if torch is None or torch.get_default_dtype() == torch.float32 else torch.get_default_dtype()


def _find_kind(kind: str) -> Kind:
    if kind not in KINDS:
        raise PluginError(f"no kind of plugin {kind!r}{did_you_mean(kind, KINDS)}; kinds: {', '.join(KINDS)}")
    return KINDS[kind]


def _find_plugin(kind: str, name: str, extra_modules: Sequence[str]) -> tuple[Installed, str]:
    """Return the plugin of that name, and how messages name it."""
    known = installed_plugins(kind, extra_modules)
    if name not in known:
        names = ", ".join(known) or "none"
        hint = _of_another_kind(kind, name) or did_you_mean(name, known)
        raise PluginError(f"no {kind} named {name!r}{hint}\n  installed {kind}s: {names}")
    first, *others = known[name]
    if others:
        offers = ", ".join(f"{item.origin} ({item.target})" for item in known[name])
        raise PluginError(f"{kind} {name!r} is offered by {offers}; uninstall or rename all but one")
    return first, f"{kind} {name!r} from {first.origin}"


def _of_another_kind(kind: str, name: str) -> str:
    """Return a hint for a name that a plugin of another kind has."""
    others = [other for other in KINDS if other != kind and name in installed_plugins(other)]
    return f"; {name!r} is a plugin of kind {others[0]}" if others else ""


def _import_declaration(kind: str, item: Installed, who: str) -> Declaration:
    plugin = item.plugin
    if item.entry is not None:
        try:
            plugin = item.entry.load()
        except (UserError, KeyboardInterrupt):
            raise
        except BaseException as exc:
            raise _import_failure(who, item, exc, extra=None) from exc
    expected = KINDS[kind].declaration
    if not isinstance(plugin, expected):
        raise PluginError(f"{who}: {item.target} is {_other_declaration(plugin, expected)}")
    return plugin


def _from_entry_points(group: str) -> list[Installed]:
    allowed = os.environ.get("VLA_RL_PLUGINS")
    dists = None if allowed is None else {normalise_name(dist) for dist in allowed.split(",")} | {OWN_DIST}
    items = [item for item in _entry_points(tuple(sys.path)) if item.entry and item.entry.group == group]
    return [item for item in items if dists is None or normalise_name(item.dist) in dists]


@functools.lru_cache(maxsize=4)
def _entry_points(path: tuple[str, ...]) -> tuple[Installed, ...]:
    """Return the entry points of all kinds. Cached per `sys.path`, since reading opens a file of each distribution."""
    groups = {kind.group for kind in KINDS.values()}
    plugins: list[Installed] = []
    seen: set[str] = set()
    for dist in metadata.distributions(path=list(path)):
        if "[vla_rl." not in (dist.read_text("entry_points.txt") or ""):
            continue  # most have none of ours, and parsing is slower than reading
        name, version = dist.name, dist.version
        if normalise_name(name) not in seen:  # of two copies on the path, the first is imported
            entries = [entry for entry in dist.entry_points if entry.group in groups]
            seen |= {normalise_name(name)} if entries else set()
            plugins += [Installed(entry.name, name, version, entry.value, entry) for entry in entries]
    return tuple(plugins)


def _from_modules(kind: str, modules: Iterable[str]) -> list[Installed]:
    plugins = []
    for name in modules:
        offers = _read_offers(name, import_module(name))
        target = f"{name}:{MODULE_PLUGINS}[{kind!r}]"
        plugins += [Installed(key, name, "", target, plugin=value) for key, value in offers.get(kind, {}).items()]
    return plugins


def _read_offers(name: str, module: ModuleType) -> Mapping[str, Mapping[str, Any]]:
    """Return a module's plugins: kind -> name -> plugin. Raise PluginError if any entry, used or not, is wrong."""
    offers = getattr(module, MODULE_PLUGINS, {})
    where = f"{MODULE_PLUGINS} of module {name}"
    if not isinstance(offers, Mapping):
        raise PluginError(f"{where} is {offers!r:.80}; it must be a dict: {{kind: {{name: EnvPlugin(...)}}}}")
    for kind, named in offers.items():
        if kind not in KINDS:
            near = did_you_mean(str(kind), KINDS)
            raise PluginError(f"{where} has {kind!r}{near}; kinds are {', '.join(KINDS)}")
        expected = KINDS[kind].declaration
        if not isinstance(named, Mapping):
            form = f"{{name: {expected.__name__}(...)}}"
            raise PluginError(f"{where}, {kind!r}: is {named!r:.80}; it must be a dict: {form}")
        for key, plugin in named.items():
            if not isinstance(key, str):
                raise PluginError(f"{where}, {kind!r}: {key!r:.80} is not a plugin name; names are strings")
            if not isinstance(plugin, expected):
                raise PluginError(f"{where}, {kind!r}: {key!r} is {_other_declaration(plugin, expected)}")
    return offers


def _other_declaration(target: object, expected: type[Declaration]) -> str:
    """Say what stands in the place of a declaration, and what belongs there."""
    wanted = f"name an instance of vla_rl.{expected.__name__} there"
    for kind in KINDS.values():
        if isinstance(target, kind.declaration):
            return f"an instance of {kind.declaration.__name__}; {wanted}, or register this one as {kind.name}"
    return f"{target!r:.80}; {wanted}"


def _describe_exception(exc: BaseException, path: Path | None = None) -> str:
    """Describe an exception of an import or a build as `file:line: type: message`. The line is the last one in the file
    at `path` if that file is in the traceback, else the innermost one."""
    if isinstance(exc, SyntaxError) and exc.filename is not None:
        return f"{exc.filename}:{exc.lineno}: {type(exc).__name__}: {exc.msg}"
    frames = [frame for frame in traceback.extract_tb(exc.__traceback__) if not _is_machinery(frame.filename)]
    own = [frame for frame in frames if frame.filename == str(path)] or frames
    where = f"{own[-1].filename}:{own[-1].lineno}: " if own else ""
    leaves = "" if isinstance(exc, Exception) else "; it must not end the process"
    return f"{where}{type(exc).__name__}: {exc}{leaves}"


def _is_machinery(file: str) -> bool:
    """Return whether a traceback's file is Python's import machinery, this module, or that of declarations."""
    own = file in (__file__, declarations.__file__)
    return own or file.startswith("<") or Path(file).parent.name in ("importlib", "metadata")


def _import_file(path: Path) -> ModuleType:
    name = f"vla_rl_spec_plugin_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise PluginError(f"plugins: no file {path}")
    import cloudpickle

    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise PluginError(f"plugins: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    cloudpickle.register_pickle_by_value(module)  # simulator processes cannot import it by that name
    return module


def _import_failure(who: str, item: Installed, exc: BaseException, extra: str | None) -> PluginError:
    package = item.target.partition(":")[0].partition(".")[0]
    missing = exc.name if isinstance(exc, ModuleNotFoundError) else None
    if missing is None or missing.partition(".")[0] == package:
        return PluginError(f"{who} ({item.target}) cannot be imported: {_describe_exception(exc)}")
    if item.entry is None:
        return PluginError(f"{who} needs {missing!r}, which is not installed; try: {pip_command('install')} {missing}")
    command = install_command(item.dist, extra or _guess_extra(item, missing))
    return PluginError(f"{who} needs {missing!r}, which is not installed; try: {command}")


def _guess_extra(item: Installed, missing: str) -> str | None:
    """Guess the extra that a plugin failed to name: the one with the missing module, or with the plugin's name."""
    from packaging.requirements import Requirement

    dist = item.entry.dist if item.entry else None
    extras: list[str] = (dist.metadata.get_all("Provides-Extra") or []) if dist else []
    for requirement in map(Requirement, dist.requires or () if dist else ()):
        if (
            normalise_name(requirement.name) == normalise_name(missing.partition(".")[0])
            and requirement.marker is not None
        ):
            for extra in extras:
                if not requirement.marker.evaluate({"extra": ""}) and requirement.marker.evaluate({"extra": extra}):
                    return extra
    return item.name if item.name in extras else None
