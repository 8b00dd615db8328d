"""env.json of other versions: fields that were added since are read as their defaults, unknown ones are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vla_rl.core.errors import CheckpointError
from vla_rl.runtime.run_folder.env_info import NAME, read_env_info, write_env_info
from vla_rl.testing import synthetic


def test_a_file_without_later_fields_has_their_defaults(tmp_path: Path) -> None:
    info = synthetic.env_info()
    write_env_info(tmp_path, info)
    written = json.loads((tmp_path / NAME).read_text())
    later = ("notes", "deterministic", "fixed_states", "control_hz", "action_names", "state_names")
    (tmp_path / NAME).write_text(json.dumps({key: value for key, value in written.items() if key not in later}))
    assert read_env_info(tmp_path) == info


@pytest.mark.parametrize("change", [{"action_low": None}, {"gravity": 9.81}])
def test_a_file_that_lacks_a_required_field_or_has_an_unknown_one_is_refused(tmp_path: Path, change: dict) -> None:
    write_env_info(tmp_path, synthetic.env_info())
    values = json.loads((tmp_path / NAME).read_text()) | change
    (tmp_path / NAME).write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    with pytest.raises(CheckpointError, match=f"does not describe a simulator: .*{next(iter(change))}"):
        read_env_info(tmp_path)
