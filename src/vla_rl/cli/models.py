"""`vla-rl models`: the table of known checkpoints."""

from __future__ import annotations

import json
import sys
from typing import Any

from vla_rl.core.errors import UserError, did_you_mean
from vla_rl.core.spec.known_checkpoints import FACTS, KnownCheckpoint, KnownValue, known_checkpoints
from vla_rl.core.spec.yaml import dump_yaml


def checkpoint_entries() -> list[dict[str, Any]]:
    """Return one entry for each known checkpoint: name, types, keys, env_keys, tell, required and facts,
    with their sources."""
    return [_row_to_plain(row) for row in known_checkpoints().rows.values()]


def main(name: str | None, as_json: bool) -> None:
    """Print all known checkpoints, or one with all that is known of it. Raise UserError for one that is not known."""
    if name is None:
        print(json.dumps(checkpoint_entries(), indent=1)) if as_json else _print_table()
        return
    table = known_checkpoints()
    row = table.find_row(name)
    if row is None:
        near = [one.name for one in table.find_namesakes(name)]
        hint = f"; did you mean {near[0]!r}?" if near else did_you_mean(name, table.rows)
        raise UserError(f"no known checkpoint is called {name!r}{hint}\n  `vla-rl models` lists them")
    print(json.dumps(_row_to_plain(row), indent=1) if as_json else _describe_row(row))


# ------------------------------------------------------------------------------------------------ internal


def _print_table() -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("checkpoint", no_wrap=True)
    table.add_column("type", no_wrap=True)
    for heading in ("trained on", "reaches (as its authors report)", "licence"):
        table.add_column(heading, overflow="fold")
    for row in known_checkpoints().rows.values():
        facts = [Text(_format_value(row.facts[fact].value) if fact in row.facts else "") for fact in _COLUMNS]
        table.add_row(row.name, " ".join(row.model_types), *facts)
    Console(width=None if sys.stdout.isatty() else 180).print(table)
    print("`vla-rl models NAME` prints the keys that go with one, and who says so. None of them was run by us.")


_COLUMNS = ("trained_on", "reaches", "licence")


def _describe_row(row: KnownCheckpoint) -> str:
    """Return all that is known of a checkpoint, as text."""
    lines = [f"{row.name}   (model plugin {' or '.join(row.model_types)}; {row.location})", ""]
    sections = {"keys, which a spec takes by itself": row.keys}
    sections |= {f"keys with env.type: {env}": keys for env, keys in row.env_keys.items()}
    sections["what else is known"] = {fact: row.facts[fact] for fact in FACTS if fact in row.facts}
    for heading, values in sections.items():
        if values:
            lines += [heading, *(line for key, known in values.items() for line in _key_lines(key, known)), ""]
    if row.required:
        lines += ["what it lacks, and you give", *(f"  {key}: {text}" for key, text in row.required.items()), ""]
    if row.tell:
        lines += ["what no source gives, and you tell", *(f"  {key}: {text}" for key, text in row.tell.items()), ""]
    spec = {"model": {"type": row.model_types[0], "checkpoint": row.name}}
    return "\n".join([*lines, "in a spec", *(f"  {line}" for line in dump_yaml(spec).splitlines())])


def _key_lines(key: str, known: KnownValue) -> list[str]:
    return [f"  {key}: {_format_value(known.value)}", f"      {known.source}"]


def _format_value(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    if isinstance(value, list):
        return f"[{', '.join(map(str, value))}]"
    return value if isinstance(value, str) else json.dumps(value)


def _row_to_plain(row: KnownCheckpoint) -> dict[str, Any]:
    def plain_values(known: Any) -> dict[str, Any]:
        return {key: {"value": item.value, "source": item.source} for key, item in known.items()}

    return {
        "name": row.name,
        "types": list(row.model_types),
        "type_source": row.type.source,
        "keys": plain_values(row.keys),
        "env_keys": {env: plain_values(keys) for env, keys in row.env_keys.items()},
        "tell": dict(row.tell),
        "required": dict(row.required),
        "facts": plain_values(row.facts),
        "table": row.location,
    }
