"""The spec of a run: one file, read strictly, with every error reported at once as `file:line: path: message`. Core's
sections are the classes of `core/spec/sections.py`. A `type:` names a plugin, whose own attrs class takes the other
keys. Reading a spec imports only the plugins' declarations, not what their `build` imports."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, cast, get_args

import attrs
from attrs import field, frozen

from vla_rl.core import catalogue as plugins
from vla_rl.core.declarations import TrainingData
from vla_rl.core.errors import PluginError, SpecError, did_you_mean
from vla_rl.core.manager import check_module
from vla_rl.core.paths import expand_tilde, open_text
from vla_rl.core.requirements import install_command, missing_requirements
from vla_rl.core.spec.known_checkpoints import KnownCheckpoint, known_checkpoints, with_known_keys
from vla_rl.core.spec.sections import (
    AsynchronySpec,
    BCWarmupSpec,
    Component,
    ConventionsSpec,
    EnvSpec,
    EvalSpec,
    ImaginationSpec,
    ImitationSpec,
    PlacementSpec,
    RewardsSpec,
    RolloutSpec,
    RuntimeSpec,
    TrainSpec,
    default_trainer,
    number_between,
)
from vla_rl.core.spec.source import LAST, Item, Source, apply_override, placed_text
from vla_rl.core.spec.structure import Problems, Structurer, format_value, keys_of, make_problem, to_plain
from vla_rl.core.spec.yaml import LONGEST_TEXT, Document, dump_yaml, parse_yaml, value_at
from vla_rl.core.spec.yaml import Path as KeyPath

__all__ = [
    "BCWarmupSpec",
    "Component",
    "EnvSpec",
    "EvalSpec",
    "ImaginationSpec",
    "ImitationSpec",
    "PlacementSpec",
    "RewardsSpec",
    "RolloutSpec",
    "RuntimeSpec",
    "Spec",
    "TrainSpec",
    "find_missing_packages",
    "load_spec",
    "make_component",
    "parse_spec",
]


MOST_HOOKS = 100
LONGEST_NAME = 200
"""Characters; file systems take 255 bytes."""


def make_component(kind: str, type: str, modules: Sequence[str] = (), **config: Any) -> Component:  # noqa: A002
    """Return a component built in Python: `component("algorithm", "grpo", clip_high=0.3)`. Raise Problems."""
    section = PlacementSpec if kind == "placement" else Component
    return _Reader(modules).read_component({"type": type, **config}, kind, section)  # type: ignore[no-any-return]


def read_env(type: str, overrides: Sequence[str], modules: Sequence[str] = ()) -> EnvSpec:  # noqa: A002
    """Read a simulator's section of a spec from `path=value` overrides, as on the command line. Raise SpecError."""
    data: dict[str, Any] = {"env": {"type": type, "num_envs": 1}}
    errors: list[str] = []
    for override in overrides:
        try:
            apply_override(data, f"env.{override}")
        except Problems as exc:
            errors += [text for _, text in exc.items]
    env: EnvSpec | None = None
    try:
        env = _Reader(modules).read_component(data["env"], "env", EnvSpec)
    except Problems as exc:
        errors += [placed_text(*item) for item in exc.items]
    if errors or env is None:
        raise SpecError(errors)
    return env


@frozen(kw_only=True)
class Spec:
    """The specification of a whole run."""

    name: str = field()
    """Name of the run and its folder: letters, digits and `_ . + -`."""
    seed: int = field(default=0, validator=number_between(0, 2**63 - 1))
    """Seed that determines all random numbers of the run."""
    plugins: tuple[str, ...] = ()
    """Modules (dotted names, or paths of .py files relative to the spec; on the command line to the working directory)
    that offer plugins or hooks without installation."""
    model: Component = field(metadata={"kind": "model"})
    env: EnvSpec = field(metadata={"kind": "env"})
    conventions: ConventionsSpec = field(factory=ConventionsSpec)
    rewards: RewardsSpec | None = field(default=None, metadata={"kind": "reward_model"})
    rollout: RolloutSpec = field()
    asynchrony: AsynchronySpec = field(factory=AsynchronySpec)
    algorithm: Component = field(metadata={"kind": "algorithm"})
    trainer: Component = field(factory=default_trainer, metadata={"kind": "trainer"})
    """How learners train on what is collected: a trainer of trajectories, such as policy_gradient, which takes the
    loss of `algorithm`, or one of transitions, such as off_policy, which needs no `algorithm`."""
    placement: PlacementSpec = field(
        factory=lambda: cast(PlacementSpec, make_component("placement", "collocated")), metadata={"kind": "placement"}
    )
    runtime: RuntimeSpec = field(factory=RuntimeSpec)
    train: TrainSpec
    eval: EvalSpec = field(factory=EvalSpec)
    bc_warmup: BCWarmupSpec | None = None
    world_model: Component | None = field(default=None, metadata={"kind": "world_model"})
    """World model, trained on the run's own episodes. Experimental; with `imagination`."""
    imagination: ImaginationSpec | None = field(default=None)
    imitation: ImitationSpec | None = None
    """Settings of `vla-rl sft`, which reads them with the rest. `run` ignores them, except `data` with a trainer of
    transitions, which may draw demonstrations from it."""
    hooks: tuple[Component, ...] = field(
        factory=lambda: tuple(make_component("hook", name) for name in ("console", "jsonl", "tensorboard")),
        metadata={"kind": "hook"},
    )
    source: Source | None = field(default=None, init=False, eq=False, repr=False)
    """File the spec was read from, for messages; None: built in Python, or changed since."""

    @hooks.validator
    def _check_hooks(self, attribute: Any, value: tuple[Component, ...]) -> None:
        if len(value) > MOST_HOOKS:
            raise ValueError(f"has {len(value)} hooks; there may be {MOST_HOOKS}")
        for i, hook in enumerate(value):
            if hook in value[:i]:
                raise make_problem(
                    f"{hook.type!r} is listed twice with the same settings; it would do everything twice", i
                )

    @name.validator
    def _check_name(self, attribute: Any, value: str) -> None:
        if re.fullmatch(r"\w[\w.+-]*", value) is None:
            raise ValueError(f"{value!r:.100} must be letters, digits and any of _ . + - after the first")
        if len(value) > LONGEST_NAME:
            raise ValueError(f"has {len(value)} characters, and names a folder; there may be {LONGEST_NAME}")

    @rollout.validator
    def _check_rollout(self, attribute: Any, value: RolloutSpec) -> None:
        size, key = value.group_size, "env.num_envs" if value.episodes is None else "rollout.episodes"
        count = value.episodes or self.env.num_envs
        if count % size:
            raise make_problem(
                f"{size} does not divide {key} {count}; {_suggested_sizes(size, count, key)}", "group_size"
            )

    @asynchrony.validator
    def _check_asynchrony(self, attribute: Any, value: AsynchronySpec) -> None:
        if value.max_lag and self.rollout.lag:
            raise make_problem("rollout.lag simulates old weights in a synchronous run; give one of the two", "max_lag")
        if value.pinned_lag and self.rollout.resample is not None:
            raise make_problem(
                "pinned: with rollout.resample no ticket has a step before it is collected; give a number", "max_lag"
            )

    @imagination.validator
    def _check_imagination(self, attribute: Any, value: ImaginationSpec | None) -> None:
        if value is not None and self.world_model is None:
            raise ValueError("there is nothing to imagine with; give world_model, such as {type: edm, preset: tiny}")
        if value is None and self.world_model is not None:
            raise ValueError("world_model does nothing without it; give imagination, or remove world_model")

    def added_groups(self, groups: int) -> int:
        """Return the groups that a step imagines after a rollout of this many groups."""
        return 0 if self.imagination is None else self.imagination.per_real * groups

    def to_dict(self) -> dict[str, Any]:
        """Return plain data with all defaults, which `parse_spec` reads back to an equal spec."""
        return {key: _section_to_plain(getattr(self, key)) for key in keys_of(Spec)}

    def dump(self, path: str | Path) -> None:
        """Write `to_dict` as YAML."""
        Path(path).write_text(dump_yaml(self.to_dict()), encoding="utf-8")

    def __reduce__(self) -> Any:
        """Pickle the spec as data, so that another process imports the plugins itself, those of `plugins:` included."""
        return restored_spec, (self.to_dict(),)


def load_spec(
    path: str | Path,
    overrides: Sequence[str] = (),
    recorded: bool = False,
) -> Spec:
    """Read a spec file. Raise SpecError with every problem.

    Args:
        overrides: `dotted.path=value`, with values as in YAML.
        recorded: it is the spec of a run, in which all keys are recorded, and not one as a user writes it.
    """
    path = Path(path)
    try:
        with open_text(path) as file:
            text = file.read(LONGEST_TEXT + 1)
    except FileNotFoundError:
        raise SpecError([f"{path}: no such file"]) from None
    except IsADirectoryError:
        raise SpecError([f"{path}: is a folder, and not that of a run, which has a spec.yaml"]) from None
    except UnicodeDecodeError as exc:
        raise SpecError(
            [f"{path}: is not UTF-8 text ({exc.reason} at byte {exc.start}); save it again as UTF-8"]
        ) from exc
    except OSError as exc:
        raise SpecError([f"{path}: cannot be read: {exc.strerror}"]) from exc
    document = parse_yaml(text)
    recorded = recorded and not any(text.startswith("model") for text in overrides)
    return _parse_document(document, str(path), overrides, path.resolve().parent, recorded)


def parse_spec(data: Mapping[str, Any] | str, source: str = "<dict>", overrides: Sequence[str] = ()) -> Spec:
    """Read a spec from plain data or YAML text. Raise SpecError with every problem."""
    document = parse_yaml(data) if isinstance(data, str) else Document(to_plain(data))
    return _parse_document(document, source, overrides, Path.cwd())


def restored_spec(data: Mapping[str, Any]) -> Spec:
    """Return the spec whose `to_dict` this is, as another process gets it. Raise SpecError."""
    return _parse_document(Document(to_plain(data)), "<dict>", (), Path.cwd(), recorded=True)


def known_checkpoint(spec: Spec) -> KnownCheckpoint | None:
    """Return what is known of the checkpoint that the spec names; None: nothing."""
    name = getattr(spec.model.config, "checkpoint", None)
    return known_checkpoints(name).find_row(name) if isinstance(name, str) and not has_own_policy(spec) else None


def checkpoint_record(spec: Spec) -> dict[str, Any] | None:
    """Return what results.json says about a known checkpoint: its name, its row in a table, and each known key with the
    value that the spec has and the source of the known one. None: the checkpoint is not known."""
    row = known_checkpoint(spec)
    if row is None:
        return None
    plain = spec.to_dict()
    keys: dict[str, Any] = {}
    for key, known in row.keys_with(spec.env.type).items():
        value = value_at(plain, key.split("."))
        differs = {} if value == known.value or value in known.also else {"known": known.value}
        keys[key] = {"value": value, **differs, "source": known.source}
    return {"name": row.name, "table": row.location, "keys": keys}


def find_missing_packages(spec: Spec, imitation: bool = True) -> Iterator[Item]:
    """Yield a problem for each part of the spec whose packages are not installed, by metadata alone.

    Args:
        imitation: check the parts of `imitation:` too.
    """
    kinds = ("env", "algorithm", "placement") if has_own_policy(spec) else ("model", "env", "algorithm", "placement")
    named: list[tuple[KeyPath, str, Component]] = [((kind,), kind, getattr(spec, kind)) for kind in kinds]
    named.append((("rollout", "engine"), "engine", spec.rollout.engine))
    if imitation and spec.imitation is not None and spec.imitation.data is not None:
        named += [(path, "data", part) for path, part in spec.imitation.data_sets()]
    if spec.world_model is not None:
        named.append((("world_model",), "world_model", spec.world_model))
    if spec.rewards is not None:
        named.append((("rewards",), "reward_model", spec.rewards))
    for path, kind, part in (*named, *((("hooks", i), "hook", hook) for i, hook in enumerate(spec.hooks))):
        if kind == "env" and spec.env.python is not None:
            continue  # its packages are installed in the other interpreter
        item = plugins.installed_plugins(kind, spec.plugins)[part.type][0]
        extra = plugins.load(kind, part.type, spec.plugins).extra
        lacking = missing_requirements(item.dist, extra) if item.entry else []
        if lacking:
            command = install_command(item.dist, extra)
            yield path, f"{part.type!r} from {item.origin} needs {', '.join(lacking)}; try: {command}"


# ------------------------------------------------------------------------------------------------ internal


class _Reader(Structurer):
    """Reads components with the plugins of `modules`."""

    def __init__(self, modules: Sequence[str]) -> None:
        super().__init__(special=self.read_component)
        self._modules = modules

    def read_component(self, data: Any, kind: str, as_type: Any) -> Any:
        """Read `{type: name, ...}` as a component, a tuple of components, or None where that is allowed."""
        if isinstance(as_type, UnionType):
            if data is None:
                return None
            as_type = next(member for member in get_args(as_type) if member is not NoneType)
        if not (isinstance(as_type, type) and issubclass(as_type, Component)):
            if not isinstance(data, list | tuple):
                raise make_problem(f"expected a list such as [{{type: ...}}], got {format_value(data)}")
            item_type = get_args(as_type)[0]
            return tuple(self._read_each((i, i, item, (kind, item_type)) for i, item in enumerate(data)).values())
        if not isinstance(data, Mapping):
            raise make_problem(f"expected a mapping such as {{type: ...}}, got {format_value(data)}")
        component_keys = keys_of(as_type)
        core_keys = [key for key in component_keys if key != "config"]
        fields: dict[str, Any] = {key: data[key] for key in core_keys if key in data}
        settings = {key: value for key, value in data.items() if key not in core_keys}
        problems: list[tuple[KeyPath, str]] = []
        try:
            fields["config"] = self._read_config(data.get("type"), kind, settings, core_keys)
        except Problems as exc:
            problems = exc.items
            fields["config"] = None
        try:
            result = self.read_class(fields, as_type)
        except Problems as exc:
            raise Problems([*exc.items, *problems]) from None
        if problems:
            raise Problems(problems)
        return result

    def read_value(self, data: Any, as_type: Any) -> Any:
        """Read a value as in the base class; the pair (kind, class) stands for a component."""
        return self.read_component(data, *as_type) if isinstance(as_type, tuple) else super().read_value(data, as_type)

    def _read_config(self, name: Any, kind: str, data: Mapping[Any, Any], core: Sequence[str]) -> Any:
        if not isinstance(name, str):
            return None  # reported with the other keys of core
        try:
            plugin = plugins.load(kind, name, self._modules)
        except PluginError as exc:
            raise make_problem(str(exc), "type") from exc
        clashes = sorted(set(core) & keys_of(plugin.config).keys())
        if clashes:
            raise make_problem(
                f"plugin {name!r} has a setting named {clashes[0]!r}, which is core's; rename it", "type"
            )
        try:
            if not plugin.presets:
                return self.read_class(data, plugin.config, extra_keys=core)
            return self.read_class(
                _with_preset(data, plugin.presets, name), plugin.config, extra_keys=[*core, "preset"]
            )
        except Problems as exc:
            raise Problems(
                [(path, text + self._suggest_plugins(kind, path, text)) for path, text in exc.items]
            ) from exc

    def _suggest_plugins(self, kind: str, path: tuple[str | int, ...], text: str) -> str:
        """Name the other plugins of the kind that have this key, if the chosen one does not know it."""
        if len(path) != 1 or text != "unknown key":
            return ""
        having = []
        for name in plugins.installed_plugins(kind, self._modules):
            with suppress(PluginError):
                having += [name] * (path[0] in keys_of(plugins.load(kind, name, self._modules).config))
        return f"; it is a key of {', '.join(having)}" if having else ""


def _with_preset(data: Mapping[Any, Any], presets: Mapping[str, Mapping[str, Any]], name: str) -> dict[Any, Any]:
    """Return the data's keys over those of the preset that it names, if any."""
    settings = dict(data)
    chosen = settings.pop("preset", None)
    if chosen is None:
        return settings
    if not isinstance(chosen, str) or chosen not in presets:
        near = did_you_mean(chosen, presets) if isinstance(chosen, str) else ""
        available = ", ".join(map(repr, presets))
        raise make_problem(f"{name!r} has no preset {chosen!r}{near}; there are: {available}", "preset")
    return {**presets[chosen], **settings}


def _parse_document(
    document: Document, name: str, overrides: Sequence[str], folder: Path, recorded: bool = False
) -> Spec:
    """Read a spec. `recorded`: its keys stood in a spec that was read before, so that a table of known checkpoints that
    has changed since neither adds keys nor refuses any."""
    errors = [(error.line, f"{name}:{error.line}: {error.message}") for error in document.errors]
    data = document.data
    if data is None and not errors:
        errors = [(1, f"{name}: is empty; a spec has the keys {', '.join(keys_of(Spec))}")]
    if data is not None and not isinstance(data, dict):
        errors.append((1, f"{name}: expected a mapping with the keys of a spec, got {format_value(data)}"))
    if not isinstance(data, dict):
        raise SpecError([message for _, message in errors])
    overridden: set[KeyPath] = set()
    for override in overrides:
        try:
            overridden |= apply_override(data, override, keys_of(Spec))
        except Problems as exc:
            errors += [(LAST, f"override: {text}") for _, text in exc.items]
    source = Source(name=name, lines=document.lines, overridden=frozenset(overridden))
    modules, problems = _import_plugins(data, folder, overridden)
    if not recorded:
        problems += with_known_keys(data)[1]
        _add_chunk(data, modules)
    _add_transitions(data, modules)
    spec = None
    try:
        spec = _Reader(modules).read_class(data, Spec)
    except Problems as exc:
        problems += [item for item in exc.items if item not in problems]
    problems += _find_action_size_mismatch(spec, modules) if spec is not None else []
    unread = [error.unread for error in document.errors if error.unread is not None]
    errors += [
        source.place_problem(*item) for item in problems if not any(item[0][: len(path)] == path for path in unread)
    ]
    if errors or spec is None:
        raise SpecError([message for _, message in sorted(errors, key=lambda error: error[0])])
    object.__setattr__(spec, "source", source)
    return spec  # type: ignore[no-any-return]


def _add_chunk(data: dict[Any, Any], modules: Sequence[str]) -> None:
    """Add the `rollout.chunk` that the model's checkpoint says, where the spec has none."""
    rollout = data.get("rollout")
    if not isinstance(rollout, dict) or rollout.get("chunk") is not None:
        return
    with suppress(PluginError, Problems, LookupError):  # reported where the model is read
        model = _Reader(modules).read_component(data["model"], "model", Component)
        plugin = plugins.load("model", model.type, modules)
        chunk = plugin.default_chunk and plugin.default_chunk(model.config)
        if chunk is not None:
            rollout["chunk"] = chunk


def _add_transitions(data: dict[Any, Any], modules: Sequence[str]) -> None:
    """Add the algorithm of a trainer of transitions, where the spec names none."""
    trainer = data.get("trainer")
    name = trainer.get("type") if isinstance(trainer, dict) else None
    if "algorithm" in data or not isinstance(name, str):
        return
    with suppress(PluginError):  # reported where the trainer is read
        if plugins.load("trainer", name, modules).trains_on is TrainingData.TRANSITIONS:
            data["algorithm"] = {"type": "transitions"}


def takes_data_statistics(spec: Spec) -> bool:
    """Return whether `vla-rl sft` normalises by the data's statistics. The model's own may then be missing."""
    return spec.imitation is not None and spec.imitation.statistics == "data"


def trains_on_transitions(spec: Spec) -> bool:
    """Return whether the spec's trainer keeps transitions (off-policy), so that it has no policy gradient."""
    return plugins.load("trainer", spec.trainer.type, spec.plugins).trains_on is TrainingData.TRANSITIONS


def suites_of(spec: Spec) -> tuple[str, ...]:
    """Return the task suites that the simulator's settings name in `suite` or `suites`, directly or under `plus`."""
    config = spec.env.config
    suites = getattr(getattr(config, "plus", None) or config, "suites", None) or [getattr(config, "suite", None)]
    return tuple(suite for suite in suites if isinstance(suite, str))


def asks_expert(spec: Spec) -> bool:
    """Return whether the spec's trainer learns from the labels of the simulator's expert."""
    return plugins.load("trainer", spec.trainer.type, spec.plugins).expert_share is not None


def has_own_policy(spec: Spec) -> bool:
    """Return whether the spec's engine acts with its own policy. The spec's `model` is then not built."""
    return plugins.load("engine", spec.rollout.engine.type, spec.plugins).own_policy


def _find_action_size_mismatch(spec: Spec, modules: Sequence[str]) -> list[tuple[KeyPath, str]]:
    """Return (key, problem) if model and simulator have actions of different size. Not asked where statistics of data
    or an engine of its own policy decide the model's."""
    if takes_data_statistics(spec) or plugins.load("engine", spec.rollout.engine.type, modules).own_policy:
        return []
    takes, gives = (
        plugin.action_dim and plugin.action_dim(part.config)
        for kind, part in (("env", spec.env), ("model", spec.model))
        for plugin in (plugins.load(kind, part.type, modules),)
    )
    if takes is None or gives is None or takes == gives:
        return []
    text = f"its actions have {gives} numbers, and those of env {spec.env.type!r} have {takes}"
    return [(("model",), f"{spec.model.type!r}: {text}; choose a checkpoint that was trained for this robot")]


def _import_plugins(
    data: dict[str, Any], folder: Path, overridden: Collection[KeyPath]
) -> tuple[list[str], list[tuple[KeyPath, str]]]:
    """Import `plugins:`, with paths made absolute in place: those of the spec from its folder, those of overrides from
    the working directory. Return (importable modules, problems)."""
    names = data.get("plugins", [])
    modules: list[str] = []
    problems: list[tuple[KeyPath, str]] = []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return [], []  # reported when it is structured
    for i, name in enumerate(names):
        if name.endswith(".py"):
            base = Path.cwd() if {("plugins",), ("plugins", i)} & set(overridden) else folder
            names[i] = str(base / expand_tilde(name))
    for i, name in enumerate(names):
        try:
            if name in modules:
                raise PluginError(f"{name!r} is listed twice")
            check_module(name, plugins.import_module(name))
            plugins.installed_plugins("hook", [name])
            modules.append(name)
        except PluginError as exc:
            problems.append((("plugins", i), str(exc).removeprefix("plugins: ")))
    return modules, problems


def _suggested_sizes(size: int, count: int, key: str) -> str:
    """Suggest group sizes and counts that divide evenly, near those given."""
    below = next(other for other in range(min(size - 1, count), 0, -1) if count % other == 0)
    above = [other for other in range(size + 1, count + 1) if count % other == 0][:1]
    fitting = [count // size * size] * (count > size) + [-(-count // size) * size]
    sizes, counts = (" or ".join(map(str, numbers)) for numbers in ([below, *above], fitting))
    return f"use {sizes}, or {key} {counts}"


def _section_to_plain(value: Any) -> Any:
    if isinstance(value, Component):
        core_fields = {key: to_plain(getattr(value, key)) for key in keys_of(type(value)) if key != "config"}
        return {**core_fields, **to_plain(value.config)}
    if isinstance(value, tuple) and value and isinstance(value[0], Component):
        return [_section_to_plain(item) for item in value]
    if attrs.has(type(value)):
        return {key: _section_to_plain(getattr(value, f.name)) for key, f in keys_of(type(value)).items()}
    return to_plain(value)
