"""The script that chooses seeds of RoboTwin's stack_blocks_two."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    import robotwin_seeds

    return robotwin_seeds


@pytest.mark.parametrize(
    ("seed", "red", "green"),
    [
        (200_000, (0.2535, 0.0319), (0.1889, -0.0548)),
        (200_003, (-0.2380, -0.0443), (0.2192, -0.0455)),
        (100_001, (-0.2304, 0.0019), (0.2392, -0.0794)),
    ],
)
def test_blocks_lie_where_robotwin_places_them(script, seed, red, green):
    """Positions in the scenes of the runtime wheel 0.1.3, to a tenth of a millimetre."""
    assert np.allclose([pose[:2] for pose in script.blocks(seed)], [red, green], atol=1e-4)


@pytest.mark.parametrize("split", ["train", "eval"])
def test_the_example_has_its_seeds(script, split):
    seeds = json.loads((ROOT / "examples/robotwin_seeds" / f"{split}.json").read_text())[script.TASK]["success_seeds"]
    assert seeds[:3] == script.seeds(split, 3)
    assert len(seeds) == script.NUMBER[split]
