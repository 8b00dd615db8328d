"""Rows of what crosses the borders of plugins."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vla_rl.core.types import pick_rows

CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=CUDA)])
def test_rows_of_a_tensor_stay_on_its_device(device: str) -> None:
    table = torch.arange(12.0).reshape(4, 3)
    rows = pick_rows(table.to(device), np.array([2, 0, 2]))
    assert rows.device.type == device
    torch.testing.assert_close(rows.cpu(), table[[2, 0, 2]])


def test_rows_of_an_array() -> None:
    table = np.arange(12).reshape(4, 3)
    assert pick_rows(table, np.array([3, 1])).tolist() == table[[3, 1]].tolist()
