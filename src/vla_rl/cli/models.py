"""`vla-rl models`: the table of known checkpoints."""

from __future__ import annotations

import json
import sys
from typing import Any

from vla_rl.cli.identify.keys import list_conventions
from vla_rl.core.catalogue import load
from vla_rl.core.errors import UserError, did_you_mean
from vla_rl.core.spec.known_checkpoints import FACTS, KnownCheckpoint, known_checkpoints
from vla_rl.core.spec.yaml import dump_yaml


def checkpoint_entries() -> list[dict[str, Any]]:
    """Return an entry of each known checkpoint: name, types, keys, env_keys, tell, required, facts, with sources."""
    return [_row_to_plain(row) for row in known_checkpoints().rows.values()]


def checkpoint_entry(name: str) -> dict[str, Any]:
    """Return the entry of one. Raise UserError for one that is not known."""
    table = known_checkpoints()
    row = table.find_row(name)
    if row is None:
        near = [one.name for one in table.find_namesakes(name)]
        hint = f"; did you mean {near[0]!r}?" if near else did_you_mean(name, table.rows)
        raise UserError(f"no known checkpoint is called {name!r}{hint}\n  `vla-rl models` lists them")
    return _row_to_plain(row)


def print_checkpoints(known: list[dict[str, Any]] | dict[str, Any], given: Any) -> None:
    """Print a table of all, or all that is known of one; or JSON."""
    if given.json:
        print(json.dumps(known, indent=1))
    elif isinstance(known, list):
        _print_table(known)
    else:
        print(_describe_entry(known))


# ------------------------------------------------------------------------------------------------ internal


def _print_table(entries: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("checkpoint", no_wrap=True)
    table.add_column("type", no_wrap=True)
    columns = {"trained_on": "trained on", "reaches": "reaches (as its authors report)", "licence": "licence"}
    for heading in columns.values():
        table.add_column(heading, overflow="fold")
    for entry in entries:
        known = entry["facts"]
        facts = [Text(_format_value(known[fact]["value"]) if fact in known else "") for fact in columns]
        table.add_row(entry["name"], " ".join(entry["types"]), *facts)
    Console(width=None if sys.stdout.isatty() else 180).print(table)
    print("`vla-rl models NAME` prints the keys that go with one, and who says so. None of them was run by us.")


def _describe_entry(entry: dict[str, Any]) -> str:
    """Return all that is known of a checkpoint, as text."""
    lines = [f"{entry['name']}   (model plugin {' or '.join(entry['types'])}; {entry['table']})", ""]
    sections = {"keys, which a spec takes by itself": entry["keys"]}
    sections |= {f"keys with env.type: {env}": keys for env, keys in entry["env_keys"].items()}
    sections["what else is known"] = {fact: entry["facts"][fact] for fact in FACTS if fact in entry["facts"]}
    for heading, values in sections.items():
        if values:
            lines.append(heading)
            for key, known in values.items():
                lines += [f"  {key}: {_format_value(known['value'])}", f"      {known['source']}"]
            lines.append("")
    for heading, key in (("what it lacks, and you give", "required"), ("what no source gives, and you tell", "tell")):
        if entry[key]:
            lines += [heading, *(f"  {name}: {text}" for name, text in entry[key].items()), ""]
    if entry["identify"]:
        lines += [
            "what `vla-rl identify` could confirm, with weights and demonstrations",
            f"  {', '.join(entry['identify'])}",
            "",
        ]
    spec = {"model": {"type": entry["types"][0], "checkpoint": entry["name"]}}
    return "\n".join([*lines, "in a spec", *(f"  {line}" for line in dump_yaml(spec).splitlines())])


def _format_value(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    if isinstance(value, list):
        return f"[{', '.join(map(str, value))}]"
    return value if isinstance(value, str) else json.dumps(value)


def _list_identifiable(row: KnownCheckpoint) -> list[str]:
    """Return the keys of a row that `vla-rl identify` could confirm with the weights at hand."""
    declared = {key.path for name in row.model_types for key in list_conventions(load("model", name).config)}
    return sorted(declared & {*row.keys, *(key for keys in row.env_keys.values() for key in keys)})


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
        "identify": _list_identifiable(row),
        "table": row.location,
    }
