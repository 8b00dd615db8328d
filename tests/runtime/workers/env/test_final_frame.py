"""Recordings have the frame after the last action where they are asked to, and nothing else changes."""

from __future__ import annotations

import numpy as np
import pyarrow.parquet as pq
import pytest
from tabletop_data import tabletop_data

from vla_rl.toolkit.data.recording import RecordSettings


def table_of(folder, episode: int):
    return pq.read_table(folder / "data" / "chunk-000" / f"file-{episode:03d}.parquet").to_pydict()


def test_the_last_row_is_what_was_seen_after_the_last_action(tmp_path):
    tabletop_data(tmp_path / "with", 20, ("pick_red",), pixels=16)
    tabletop_data(tmp_path / "without", 20, ("pick_red",), pixels=16, final_frame=False)
    solved = 0
    for episode in range(20):
        table, plain = table_of(tmp_path / "with", episode), table_of(tmp_path / "without", episode)
        last = len(plain["action"])
        assert len(table["action"]) == last + 1
        for name in ("action", "observation.state", "observation.images.wrist", "next.reward"):
            assert table[name][:last] == plain[name], name
        assert table["action"][last] == table["action"][last - 1]
        assert table["next.reward"][last] == 0
        assert table["next.done"] == [False] * last + [True]
        assert table["next.success"][last] == plain["next.success"][last - 1]
        if table["next.success"][last]:
            solved += 1
            # Success is a block in the closed gripper, which the state tells after the action and not before it.
            assert not np.array_equal(table["observation.state"][last], table["observation.state"][last - 1])
    assert 0 < solved < 20


def test_rows_of_chunks_have_no_final_frame():
    with pytest.raises(ValueError, match="needs rows: steps"):
        RecordSettings(rows="chunks", final_frame=True)
