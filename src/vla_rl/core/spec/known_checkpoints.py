"""Known checkpoints: public weights, the model plugin that reads them, and the keys of a spec that go with them.

The tables are YAML files called `known_checkpoints.yaml`. Each model plugin that has some keeps one next to it. A
distribution adds its own with an entry point of the group `vla_rl.checkpoints`, whose value is the package that holds
the file. The environment variable `VLA_RL_CHECKPOINTS` names further files, whose rows replace others of the same name:

    sources: {oft: moojink/openvla-oft@213c5ff8}        # short name -> repository@commit, page or paper
    tell:                                               # what a folder of this plugin does not say, and where to look
      openvla_oft: {model.gripper: rlds where the data set stores 0 for closed and 1 for open}
    checkpoints:
      OWNER/NAME:                                       # of the Hugging Face hub
        like: OWNER/OTHER                               # take what is not given here from that row, but for OWN_FACTS
        type: {value: openvla_oft, source: "oft:LIBERO.md:44"}
        keys: {model.head: {value: l1, source: "oft:FILE:LINE"}}     # always
        env_keys: {libero: {model.cameras: {...}}}      # with `env.type: libero`
        tell: {model.unnorm_key: one of norm_stats, such as bridge_orig}   # what no source gives
        required: {model.tokenizer: where to get tokenizer.json}    # without which a run is refused
        unsupported: {value: why, source: "oft:FILE:LINE"}           # of a checkpoint that its plugin cannot run
        facts: {trained_on: {...}, licence: {...}}      # names of FACTS

Each value names its source. A spec takes these keys by itself (`with_known_keys`) and may not contradict them.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from attrs import evolve, field, frozen

from vla_rl.core import catalogue
from vla_rl.core.errors import PluginError, did_you_mean
from vla_rl.core.paths import expand_tilde, read_text
from vla_rl.core.spec.shipped_files import find_line, parse_file, place_message
from vla_rl.core.spec.structure import format_value, to_plain
from vla_rl.core.spec.yaml import Document, value_at
from vla_rl.core.spec.yaml import Path as KeyPath

GROUP = "vla_rl.checkpoints"
"""Entry-point group of packages that hold a table."""
FILES = "VLA_RL_CHECKPOINTS"
"""Environment variable with further tables, separated as in PATH."""
TABLE = "known_checkpoints.yaml"
FACTS = (
    "trained_on",
    "suites",
    "reaches",
    "protocol",
    "licence",
    "layout",
    "image_size",
    "resize",
    "rotation",
    "cameras",
    "chunk",
    "denoise_steps",
    "state",
    "statistics",
    "prompt",
    "actions",
    "limits",
)
"""Names of what a row may say in addition to keys of a spec."""
OWN_FACTS = ("trained_on", "suites", "reaches")
"""Facts that no row takes from the row that it is like."""
_CACHE_FOLDER = "models--"
"""Beginning of a repository's folder in the Hugging Face hub's cache: models--OWNER--NAME."""


@frozen(kw_only=True)
class KnownValue:
    """A value of a table, and who says so."""

    value: Any
    source: str
    """Repository at a commit with file and line, a page, or a paper."""
    also: tuple[Any, ...] = ()
    """Other values that mean the same."""
    location: str = ""
    """`FILE:LINE` of the table."""


@frozen(kw_only=True)
class KnownCheckpoint:
    """One row of a table."""

    name: str
    type: KnownValue
    """Model plugin that reads the checkpoint, or a list of such plugins."""
    keys: Mapping[str, KnownValue] = field(factory=dict)
    """Keys of a spec with their dots -> value."""
    env_keys: Mapping[str, Mapping[str, KnownValue]] = field(factory=dict)
    """Plugin of a simulator -> keys that also hold in it."""
    tell: Mapping[str, str] = field(factory=dict)
    """Keys that no source gives -> what to write there."""
    required: Mapping[str, str] = field(factory=dict)
    """Keys without which a run is refused, since the repository lacks what they name -> how to get it."""
    facts: Mapping[str, KnownValue] = field(factory=dict)
    unsupported: KnownValue | None = None
    """Why its model plugin cannot run it; None: it can, as far as is known."""
    location: str = ""
    """`FILE:LINE` of the row."""

    @property
    def model_types(self) -> tuple[str, ...]:
        """Model plugins that read the checkpoint, the usual one first."""
        value = self.type.value
        return tuple(value) if isinstance(value, list) else (str(value),)

    def keys_with(self, env: str | None) -> dict[str, KnownValue]:
        """Return the keys that hold in a simulator; None: in any."""
        return {**self.keys, **(self.env_keys.get(env, {}) if env is not None else {})}


@frozen(kw_only=True)
class CheckpointTable:
    """All rows, and what folders of each model plugin leave open."""

    rows: Mapping[str, KnownCheckpoint] = field(factory=dict)
    tell: Mapping[str, Mapping[str, str]] = field(factory=dict)
    """Model plugin -> key -> how to find its value in a folder that is not known."""

    def find_row(self, checkpoint: str) -> KnownCheckpoint | None:
        """Return the row of a hub name (`OWNER/NAME[@REVISION]`), of a folder in the hub's cache, or of a folder whose
        path ends with the name, such as `/data/OWNER/NAME`; None for any other."""
        name = checkpoint.partition("@")[0]
        if name in self.rows:
            return self.rows[name]
        parts = Path(checkpoint).parts
        for part in parts:
            if part.startswith(_CACHE_FOLDER):
                return self.rows.get(part.removeprefix(_CACHE_FOLDER).replace("--", "/", 1))
        for length in range(min(len(parts), 4), 1, -1):
            for end in ("/".join(parts[-length:]), f"gs://{'/'.join(parts[-length:])}"):
                if end in self.rows:
                    return self.rows[end]
        return None

    def find_namesakes(self, checkpoint: str) -> list[KnownCheckpoint]:
        """Return the rows whose name without its owner is how the path of a folder ends."""
        parts = Path(checkpoint).parts
        ends = {"/".join(parts[-length:]) for length in range(1, len(parts) + 1)}
        return [row for name, row in self.rows.items() if name.removeprefix("gs://").partition("/")[2] in ends]


def known_checkpoints(mentioning: str | None = None) -> CheckpointTable:
    """Read all tables, or those whose text contains the last part of a checkpoint's name or path, which is quick if no
    table does. Raise PluginError for a table that is wrong, with its file and line."""
    files = tuple(dict.fromkeys(str(file) for file in (*_of_plugins(), *_of_entry_points())))
    own_files = tuple(str(expand_tilde(name)) for name in os.environ.get(FILES, "").split(os.pathsep) if name)
    if mentioning is None:
        return _read_all(files, own_files)
    words = _name_words(mentioning)
    files, own_files = (
        tuple(f for f in some if any(w in _read_table_text(f) for w in words)) for some in (files, own_files)
    )
    return _read_all(files, own_files)


def with_known_keys(data: dict[str, Any]) -> tuple[KnownCheckpoint | None, list[tuple[KeyPath, str]]]:
    """Give a spec the keys that are known of its checkpoint, in place. Return the checkpoint's row, if any, and a
    problem for each key of the spec that contradicts it. A key that is null counts as not given.

    Args:
        data: plain data of a spec, not checked yet.
    """
    model = data.get("model")
    name = model.get("checkpoint") if isinstance(model, dict) else None
    if not isinstance(model, dict) or not isinstance(name, str) or name.startswith("builtin:"):
        return None, []
    row = known_checkpoints(name).find_row(name)
    if row is None:
        return None, []
    if model.get("type") not in row.model_types:
        text = (
            f"{format_value(model.get('type'))}, and {row.name} is a checkpoint of {' or '.join(row.model_types)}"
            f"{_who_says(row.type)}; set model.type: {row.model_types[0]}"
        )
        return row, [(("model", "type"), text)]
    if row.unsupported is not None:
        return row, [(("model", "checkpoint"), f"{row.name}: {row.unsupported.value}{_who_says(row.unsupported)}")]
    env = data.get("env")
    problems: list[tuple[KeyPath, str]] = []
    for key, known in row.keys_with(env.get("type") if isinstance(env, dict) else None).items():
        *sections, last = key.split(".")
        target = value_at(data, sections)
        if not isinstance(target, dict):
            continue  # reported when the section is read
        given = to_plain(target.get(last))
        if given is None:
            target[last] = known.value
        elif given != known.value and given not in known.also:
            text = (
                f"{given!r:.60} contradicts what is known of {row.name}: {known.value!r}{_who_says(known)}; leave the "
                "key out. To go against it on purpose, give a folder of another name as model.checkpoint"
            )
            problems.append((tuple(key.split(".")), text))
    return row, problems


def written_source(source: str, sources: Mapping[str, str]) -> str:
    """Return sources, separated by `;`, with repositories in place of their short names. Raise ValueError for one that
    is neither `SHORT:FILE:LINE`, nor an address, nor an arXiv number.

    Args:
        sources: short name -> repository@commit.
    """
    written = []
    for part in source.split(";"):
        short, _, rest = part.strip().partition(":")
        if not part.strip():
            raise ValueError("is empty; say who gives this value")
        if short not in sources and not part.strip().startswith(("https://", "arXiv:")):
            near = did_you_mean(short, sources)
            raise ValueError(f"{short!r} is none of `sources`{near}, no address and no arXiv number")
        written.append(f"{sources[short]} {rest}".strip() if short in sources else part.strip())
    return "; ".join(written)


# ------------------------------------------------------------------------------------------------ internal


def _who_says(known: KnownValue) -> str:
    return f" (says {known.source}; in the table {known.location})"


def _name_words(checkpoint: str) -> list[str]:
    """Return the words of which a table has one if it has a row of this checkpoint: the last part of its name, or of a
    folder in the hub's cache the repository's name."""
    parts = Path(checkpoint.partition("@")[0]).parts
    cached = [part.rpartition("--")[2] for part in parts if part.startswith(_CACHE_FOLDER)]
    return cached or [part for part in parts[-1:] if part]


def _of_plugins() -> Iterator[Path]:
    """Yield the tables next to installed model plugins."""
    targets = {item.target for items in catalogue.installed_plugins("model").values() for item in items if item.entry}
    for target in sorted(targets):
        yield from _tables_in(target.partition(":")[0])


def _of_entry_points() -> Iterator[Path]:
    """Yield the tables of distributions that name a package. Raise PluginError for a package without a table."""
    for entry in sorted(metadata.entry_points(group=GROUP), key=lambda entry: entry.value):
        files = list(_tables_in(entry.value))
        if not files:
            raise PluginError(f"entry point {entry.name!r} of {GROUP}: package {entry.value!r} has no {TABLE}")
        yield from files


def _tables_in(module: str) -> Iterator[Path]:
    """Yield the table in a package's folder or next to a module, which is not imported."""
    try:
        spec = find_spec(module)
    except (ImportError, ValueError):  # reported when the plugin is used
        return
    if spec is not None and spec.origin is not None:
        file = Path(spec.origin).with_name(TABLE)
        if file.is_file():
            yield file


def _read_all(files: tuple[str, ...], own_files: tuple[str, ...]) -> CheckpointTable:
    rows: dict[str, KnownCheckpoint] = {}
    tell: dict[str, dict[str, str]] = {}
    for name in (*files, *own_files):
        table = _parse_table(name, _read_table_text(name))
        for row in table.rows.values():
            if row.name in rows and name not in own_files:
                other = rows[row.name].location
                raise PluginError(f"{row.location}: {row.name} is in {other} too; leave one of the two out")
            rows[row.name] = row
        for plugin, keys in table.tell.items():
            tell.setdefault(plugin, {}).update(keys)
    return CheckpointTable(rows=rows, tell=tell)


def _read_table_text(name: str) -> str:
    try:
        return read_text(Path(name))
    except (OSError, ValueError) as exc:
        raise PluginError(f"table of known checkpoints {name} cannot be read: {exc}") from exc


@frozen(kw_only=True)
class _Row:
    """A row as it stands in a file."""

    like: str | None = None
    type: KnownValue | None = None
    keys: dict[str, KnownValue] = field(factory=dict)
    env_keys: dict[str, dict[str, KnownValue]] = field(factory=dict)
    tell: dict[str, str] = field(factory=dict)
    required: dict[str, str] = field(factory=dict)
    facts: dict[str, KnownValue] = field(factory=dict)
    unsupported: KnownValue | None = None


@frozen(kw_only=True)
class _File:
    """The content of a file."""

    sources: dict[str, str] = field(factory=dict)
    tell: dict[str, dict[str, str]] = field(factory=dict)
    checkpoints: dict[str, _Row] = field(factory=dict)


@functools.lru_cache(maxsize=32)
def _parse_table(name: str, text: str) -> CheckpointTable:
    content, document = parse_file(text, name, _File, PluginError)
    rows: dict[str, KnownCheckpoint] = {}
    for checkpoint, row in content.checkpoints.items():
        rows[checkpoint] = _complete_row(name, document, content, checkpoint, row, rows)
    return CheckpointTable(rows=rows, tell=content.tell)


def _complete_row(
    name: str, document: Document, content: _File, checkpoint: str, row: _Row, rows: Mapping[str, KnownCheckpoint]
) -> KnownCheckpoint:
    """Return a row with the values of the row that it is like, and with its sources written out. Raise PluginError."""
    path: KeyPath = ("checkpoints", checkpoint)

    def with_source(where: KeyPath, known: KnownValue) -> KnownValue:
        try:
            written = written_source(known.source, content.sources)
        except ValueError as exc:
            raise PluginError(place_message(name, document, (*where, "source"), str(exc))) from None
        return evolve(known, source=written, location=f"{name}:{find_line(document, where)}")

    for fact in row.facts:
        if fact not in FACTS:
            text = f"unknown fact{did_you_mean(fact, FACTS)}; facts are {', '.join(FACTS)}"
            raise PluginError(place_message(name, document, (*path, "facts", fact), text))
    like = None
    if row.like is not None:
        like = rows.get(row.like)
        if like is None:
            raise PluginError(
                place_message(name, document, (*path, "like"), f"no row {row.like!r} stands before this one")
            )
    if row.type is None and like is None:
        raise PluginError(place_message(name, document, path, "has neither `type` nor `like`"))
    assert row.type is not None or like is not None
    return KnownCheckpoint(
        name=checkpoint,
        type=with_source((*path, "type"), row.type) if row.type is not None else like.type,  # type: ignore[union-attr]
        keys={
            **(like.keys if like else {}),
            **{key: with_source((*path, "keys", key), v) for key, v in row.keys.items()},
        },
        env_keys={
            env: {
                **(like.env_keys.get(env, {}) if like else {}),
                **{k: with_source((*path, "env_keys", env, k), v) for k, v in row.env_keys.get(env, {}).items()},
            }
            for env in {**(like.env_keys if like else {}), **row.env_keys}
        },
        tell={**(like.tell if like else {}), **row.tell},
        required={**(like.required if like else {}), **row.required},
        facts={
            **{fact: known for fact, known in (like.facts if like else {}).items() if fact not in OWN_FACTS},
            **{fact: with_source((*path, "facts", fact), v) for fact, v in row.facts.items()},
        },
        unsupported=with_source((*path, "unsupported"), row.unsupported) if row.unsupported is not None else None,
        location=f"{name}:{find_line(document, path)}",
    )
