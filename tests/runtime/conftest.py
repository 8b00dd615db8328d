from __future__ import annotations

import pytest
from scripted_runs import read_metrics, scripted_spec

from vla_rl.core.spec.spec import parse_spec
from vla_rl.runtime.start import run


@pytest.fixture
def train(tmp_path):
    """Run the scripted spec; -> (results, metrics without times)."""

    def start(folder="run", resume=False, **changes):
        results = run(parse_spec(scripted_spec(**changes)), tmp_path / folder, resume)
        return results, read_metrics(tmp_path / folder)

    return start
