"""`make test-times`: what tests start and how long they take."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools" / "time_tests.py"
TESTS = """
import subprocess, sys, time, pytest

@pytest.fixture
def slow():
    time.sleep(0.1)

def test_two_interpreters(slow):
    for _ in range(2):
        subprocess.run([sys.executable, "-S", "-c", ""], check=True)

def test_another_process():
    subprocess.run(["true"], check=True)
"""


def test_it_counts_what_tests_start(tmp_path: Path) -> None:
    (tmp_path / "test_starts.py").write_text(TESTS)
    environment = os.environ | {"PYTHONPATH": str(TOOL.parent), "TEST_TIMES": str(tmp_path / "times")}
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "time_tests", "-p", "no:vla_rl", "test_starts.py"]
    subprocess.run(pytest, cwd=tmp_path, env=environment, capture_output=True, check=True)
    table = subprocess.run([sys.executable, TOOL], env=environment, capture_output=True, text=True, check=True).stdout
    cells = {
        row.split("|")[1].strip(): [cell.strip() for cell in row.split("|")[2:-1]]
        for row in table.splitlines()[6:]
        if row
    }
    assert cells["all"][0] == "2" and cells["all"][3:] == ["0", "2", "0", "1"]
    assert cells["test_starts.py"] == cells["all"]
    assert cells["test_starts.py::slow"][0] == "1" and float(cells["test_starts.py::slow"][1]) >= 0.1
