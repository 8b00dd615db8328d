"""How much runs between a reset and an optimiser step does not grow unnoticed, and is as a page says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES, FUNCTIONS, LINES = 76, 585, 3800
"""What a step may enter: lower it where the step gets shorter."""


BEGINS_EARLIER = "runtime/driver/training/update.py"
"""`begin` comes before a rollout is whole, for updates that stream; the update itself where the page names it."""
PAGE = (ROOT / "docs" / "explanation" / "architecture.md").read_text()


def test_a_training_step_enters_no_more_than_it_did_and_in_the_order_of_the_page():
    script = [sys.executable, ROOT / "tools" / "traced_step.py", "--list"]
    printed = subprocess.run(script, capture_output=True, text=True, check=True).stdout
    print(printed)
    figures = re.search(r"(\d+) files, (\d+) functions .*, (\d+) lines of functions", printed)
    assert figures is not None, printed
    assert all(int(figure) <= bar for figure, bar in zip(figures.groups(), (FILES, FUNCTIONS, LINES), strict=True))
    described = re.findall(
        r"^\| [a-z]* ?\| `([\w/]+\.py)` \| ", PAGE.partition("## How a sample travels")[2], flags=re.MULTILINE
    )
    described.remove(BEGINS_EARLIER)
    entered = re.findall(r"^ +\d+ ([\w/]+\.py): ", printed, flags=re.MULTILINE)
    assert len(described) > 15 and described == [file for file in entered if file in described]
