"""How much runs between a reset and an optimiser step does not grow unnoticed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "tools" / "traced_step.py"
FILES, FUNCTIONS, LINES = 87, 605, 4250
"""What a step may enter: lower it where the step gets shorter."""


def test_a_training_step_enters_no_more_than_it_did():
    printed = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=True).stdout
    print(printed)
    figures = re.search(r"(\d+) files, (\d+) functions .*, (\d+) lines of functions", printed)
    assert figures is not None, printed
    assert all(int(figure) <= bar for figure, bar in zip(figures.groups(), (FILES, FUNCTIONS, LINES), strict=True))
