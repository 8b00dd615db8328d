"""What a worker takes of its machine."""

from __future__ import annotations

import pytest

from vla_rl.runtime.placement.hardware import torch_threads


@pytest.mark.parametrize(
    ("cpus", "said", "expected"),
    [(4.0, None, 4), (0.5, None, 1), (4.0, "2", 2), (1.0, "2", 1), (4.0, "3,1", 3), (4.0, "0", 4), (4.0, "all", 4)],
)
def test_threads_are_those_of_its_cores_or_fewer_where_the_user_says_so(monkeypatch, cpus, said, expected):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if said is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", said)
    assert torch_threads(cpus) == expected
