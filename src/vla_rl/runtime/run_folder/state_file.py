"""The file state.json of a checkpoint: the run's `State`, checked before anything starts from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs

from vla_rl.core.errors import CheckpointError, did_you_mean
from vla_rl.core.run.flow import Ledger
from vla_rl.core.run.state import State
from vla_rl.toolkit.json_files import Record, read_record

COUNTS = {"step": 0, "env_steps": 0, "faults": 0, "evaluated": -1, "reused": 0, "refilled": 0}
"""Keys of whole numbers -> smallest valid value."""
OBJECTS = ("before", "last", "scaling", "parts", "tickets")
OPTIONAL = ("before", "last", "scaling")
"""Keys that may be null."""
RATES = ("before", "last")


def write_state(file: Path, state: State) -> None:
    """Write the state as JSON."""
    file.write_text(json.dumps(attrs.asdict(state), indent=1), encoding="utf-8")


def read_state_file(file: Path) -> State:
    """Return what `write_state` wrote. Raises CheckpointError, which names the key."""
    record = read_record(file, CheckpointError)
    state_fields = attrs.fields_dict(State)
    for inside, names in ((record.data, state_fields), (record.data.get("tickets"), attrs.fields_dict(Ledger))):
        unknown = [key for key in inside if key not in names] if isinstance(inside, dict) else []
        if unknown:
            near = did_you_mean(unknown[0], names)
            raise CheckpointError(f"{file}: {unknown[0]!r} is not known{near}; another version may have written it")
    return State(**{key: _read_value(record, key) for key in record.data})


def _read_value(record: Record, key: str) -> Any:
    if key in COUNTS:
        return record.get_integer(key, low=COUNTS[key])
    if key == "wall_seconds":
        return record.get_number(key, low=0)
    if key == "bc_warmup_done":
        return record.get_boolean(key)
    if key == "mode":
        return record.get_text(key)
    if key in OPTIONAL and record.data[key] is None:
        return None
    inside = record.get_record(key)
    if key == "tickets":
        return {name: inside.get_integer(name) for name in inside.data}
    if key in RATES:
        check_rate(inside.get_record("success"))
        for rate in inside.get_records("tasks").values():
            check_rate(rate)
    return dict(inside.data)


def check_rate(rate: Record) -> None:
    """Raise the record's error unless it is a success rate of `n` episodes with its interval."""
    for key in ("rate", "low", "high"):
        rate.get_number(key)
    rate.get_integer("n")
