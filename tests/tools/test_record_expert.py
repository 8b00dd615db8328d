"""Demonstrations of an expert as a data set, here of the built-in simulator."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vla_rl.core.catalogue import load
from vla_rl.core.contexts import DataContext, EnvContext
from vla_rl.core.errors import UserError
from vla_rl.plugins.envs.tabletop.simulator import Tabletop

SCRIPT = Path(__file__).parents[2] / "tools" / "record_expert.py"
CHUNK = 4
SPEC = f"""
name: recorded
model: {{type: film_resnet}}
env: {{type: tabletop, num_envs: 3, image_size: 16}}
rollout: {{chunk: {CHUNK}, episodes: 4, group_size: 1, max_steps: 48}}
algorithm: {{type: grpo}}
train: {{steps: 0, lr: 1.0e-4, micro_batch: 4}}
"""


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("pyarrow")
    loaded = importlib.util.spec_from_file_location("record_expert", SCRIPT)
    assert loaded is not None and loaded.loader is not None
    module = importlib.util.module_from_spec(loaded)
    monkeypatch.setitem(sys.modules, "record_expert", module)
    loaded.loader.exec_module(module)
    (tmp_path / "spec.yaml").write_text(SPEC)

    def call(*arguments: object) -> None:
        monkeypatch.setattr(sys, "argv", ["record_expert", str(tmp_path / "spec.yaml"), *map(str, arguments)])
        module.main()

    return call


def test_demonstrations_are_read_by_cloning(record: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import pyarrow.parquet as pq

    record(tmp_path / "set", "--episodes", 4, "--noise", 0.1, "env.num_envs=2")
    assert "4 of 4 episodes" in capsys.readouterr().err
    tables = [pq.read_table(file).to_pylist() for file in sorted((tmp_path / "set" / "data").rglob("*.parquet"))]
    assert len(tables) == 4 and all(table[-1]["next.success"] for table in tables)
    for table in tables:
        assert all(row["action.executed"] == CHUNK for row in table[:-1])
        assert 1 <= table[-1]["action.executed"] <= CHUNK and sum(row["next.reward"] for row in table) == 1
    plugin, tabletop = load("data", "lerobot"), load("env", "tabletop")
    info = tabletop.build(tabletop.config(image_size=16), EnvContext(num_envs=1, chunk=CHUNK)).info
    data = plugin.build(plugin.config(folder=tmp_path / "set"), DataContext(env=info, chunk=CHUNK))
    assert data.num_samples() == sum(len(table) for table in tables)
    record(tmp_path / "set", "--episodes", 4, "--noise", 0.0, "env.num_envs=2")
    again = [pq.read_table(file).to_pylist() for file in sorted((tmp_path / "set" / "data").rglob("*.parquet"))]
    first, clean = np.array(again[0][0]["action"]), np.array(again[4][0]["action"])
    assert len(again) == 8 and np.array_equal(first, clean), "noise is on what is executed, not on the recorded action"


def test_an_expert_that_is_lacking_is_said(record: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(self: Any) -> None:
        raise UserError("it has no scripted expert")

    monkeypatch.setattr(Tabletop, "expert_chunk", lacking)
    with pytest.raises(SystemExit, match="it has no scripted expert"):
        record(tmp_path / "set")
