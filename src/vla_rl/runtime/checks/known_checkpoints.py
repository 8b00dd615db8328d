"""Messages about the checkpoint that a spec names: what is known of it, or what the spec has to tell."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from vla_rl.core.catalogue import load
from vla_rl.core.paths import expand_tilde
from vla_rl.core.spec.known_checkpoints import KnownCheckpoint, known_checkpoints
from vla_rl.core.spec.source import Item
from vla_rl.core.spec.spec import Spec, has_own_policy, known_checkpoint, suites_of
from vla_rl.core.spec.structure import keys_of, to_plain
from vla_rl.core.spec.yaml import value_at

PATH = ("model", "checkpoint")


def checkpoint_lines(spec: Spec) -> Iterator[str]:
    """Yield what a run says at its start about a checkpoint: a chunk that its files give, and what is known of it."""
    chunk = spec.rollout.chunk
    if chunk == _default_chunk(spec) and not _is_given(spec, "rollout.chunk"):
        yield f"rollout.chunk is {chunk}, as the checkpoint's config.json says (n_action_steps)"
    row = known_checkpoint(spec)
    if row is None:
        return
    keys = row.keys_with(spec.env.type)
    listed = ", ".join(f"{key}={_format_value(known.value)}" for key, known in keys.items()) or "no key"
    yield f"checkpoint {row.name} is known, and goes with {listed} (vla-rl models {row.name}: who says so)"
    if "limits" in row.facts:
        yield f"checkpoint {row.name}: {row.facts['limits'].value}"


def checkpoint_problems(spec: Spec) -> Iterator[Item]:
    """Yield what a known checkpoint of the hub lacks and the spec does not name. A folder is the plugin's to check."""
    row = known_checkpoint(spec)
    if row is None or expand_tilde(spec.model.config.checkpoint).is_dir():
        return
    for key, text in row.required.items():
        if value_at(spec.to_dict(), key.split(".")) is None:
            yield PATH, f"{row.name} comes without what {key} names: {text}"


def _chunk_warnings(spec: Spec) -> Iterator[Item]:
    """Yield that other chunks are executed than the checkpoint's files say."""
    executed = _default_chunk(spec)
    if executed is not None and executed != spec.rollout.chunk:
        text = (
            f"{spec.rollout.chunk} actions of a chunk are executed, and {executed} by the checkpoint's config.json "
            f"(n_action_steps), which success may depend on; leave the key out to act as it says"
        )
        yield ("rollout", "chunk"), text


def checkpoint_warnings(spec: Spec) -> Iterator[Item]:
    """Yield what a spec should tell of a checkpoint that is not known, or of which something is not."""
    yield from _chunk_warnings(spec)
    name = getattr(spec.model.config, "checkpoint", None)
    if not isinstance(name, str) or name.startswith("builtin:") or has_own_policy(spec):
        return
    row = known_checkpoint(spec)
    if row is not None:
        for key, text in row.tell.items():
            if not _is_given(spec, key):
                yield PATH, f"no source settles {key} of {row.name}; set it: {text}"
        yield from _suite_warnings(spec, row)
        return
    if Path(name).exists():
        path = str(Path(name).absolute())
        for namesake in known_checkpoints(path).find_namesakes(path):
            yield from _namesake_warnings(spec, namesake)
        return
    tell = known_checkpoints().tell.get(spec.model.type, {})
    missing = {key: text for key, text in tell.items() if not _is_given(spec, key)}
    if missing:
        listed = "; ".join(f"{key} ({text})" for key, text in missing.items())
        yield PATH, f"{name} is none of the known checkpoints (vla-rl models); the spec does not tell {listed}"


# ------------------------------------------------------------------------------------------------ internal


def _suite_warnings(spec: Spec, row: KnownCheckpoint) -> Iterator[Item]:
    """Yield the suites of the simulator that a known checkpoint was not trained on."""
    known = row.facts.get("suites")
    others = [suite for suite in suites_of(spec) if known is not None and suite not in known.value]
    if known is not None and others:
        trained = f"{row.name} was trained on {', '.join(known.value)} (says {known.source})"
        yield ("env",), f"{trained}, not on {', '.join(others)}; success there may be 0"


def _namesake_warnings(spec: Spec, row: KnownCheckpoint) -> Iterator[Item]:
    """Yield the keys in which a spec differs from the known checkpoint that its folder is called after."""
    plain = spec.to_dict()
    different = []
    for key, known in row.keys_with(spec.env.type).items():
        section, _, rest = key.partition(".")
        value = plain.get(section, {}).get(rest)
        if value != known.value and value not in known.also:
            different.append(f"{key}={_format_value(known.value)} (here {_format_value(value)})")
    if spec.model.type not in row.model_types:
        different.insert(0, f"model.type={row.model_types[0]} (here {spec.model.type})")
    if different:
        text = f"a folder of this name is known as {row.name}, which goes with {', '.join(different)}"
        yield PATH, f"{text}; set them if it is that one"


def _default_chunk(spec: Spec) -> int | None:
    """Return how many actions of a chunk the checkpoint's files say are executed; None: they do not say."""
    default = load("model", spec.model.type, spec.plugins).default_chunk
    return None if default is None or has_own_policy(spec) else default(spec.model.config)


def _is_given(spec: Spec, key: str) -> bool:
    """Return whether the spec's author wrote a key; of a spec built in Python: whether it is not the default."""
    path = tuple(key.split("."))
    if spec.source is not None and (spec.source.lines or spec.source.overridden):
        return path in spec.source.lines or any(path[: len(other)] == other for other in spec.source.overridden)
    part = spec.model.config if path[0] == "model" else getattr(spec, path[0])
    attribute = keys_of(type(part)).get(path[1])
    return attribute is None or to_plain(getattr(part, attribute.name)) != to_plain(attribute.default)


def _format_value(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
