"""Faults in a small repository, and what its tests say to them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from time import monotonic, sleep

import pytest

from import_graph import ImportGraph
from line_coverage import LineMap, combine_parts
from mutate import FaultJudge, Outcome, TreeCopy, judge_all, read_sources, run_command, write_table
from mutations import MutationFinder

TOOLS = Path(__file__).parents[2] / "tools"
SOURCE = """\
def add(a, b):
    total = a
    total += b
    return total


def is_large(a):
    return a > 9


def never():
    return 5
"""
TESTS = """\
import pytest
import vla_rl.sums

@pytest.fixture(scope="module")
def total():
    return vla_rl.sums.add(1, 2)

def test_first():
    assert vla_rl.sums.is_large(20) in (True, False)

def test_total(total):
    assert total > 0

def test_total_is_three(total):
    assert total == 3
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one module, its tests, and the plugin that runs them."""
    root = tmp_path / "repository"
    plugin = (TOOLS / "line_coverage.py").read_text("utf-8")
    files = {
        "src/vla_rl/sums.py": SOURCE,
        "src/vla_rl/__init__.py": "",
        "tests/test_sums.py": TESTS,
        "tools/line_coverage.py": plugin,
        "pyproject.toml": "[project]\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, "utf-8")
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    return root


def faults(*lines: int) -> list:
    """Return the first fault of each of these lines of the module."""
    found = MutationFinder("src/vla_rl/sums.py", SOURCE).find_mutations()
    return [next(mutation for mutation in found if mutation.line == line) for line in lines]


def test_a_fault_is_caught(root: Path) -> None:
    judge = FaultJudge(ImportGraph(root), None, select="", timeout_s=60)
    mutations = faults(3)
    outcomes = judge_all(root, mutations, judge, jobs=1)
    assert outcomes == [Outcome("caught", "tests/test_sums.py::test_total_is_three", tests_run=3)]
    assert (root / "src/vla_rl/sums.py").read_text() == SOURCE
    table = write_table({"src/vla_rl/sums.py": SOURCE}, mutations, outcomes)
    assert "| sums.py:3 | drop | `total += b` | `pass` | caught by `tests/test_sums.py::test_total_is_three` |" in table
    assert table.endswith("\nFaults: 1, of which 1 caught")


def test_a_fault_is_not_caught_by_a_test_that_fails_without_it(root: Path) -> None:
    (root / "tests/test_sums.py").write_text("import vla_rl.sums\ndef test_broken(): assert 0\ndef test_two(): ...\n")
    judge = FaultJudge(ImportGraph(root), None, select="", timeout_s=60)
    mutations = faults(8)
    outcomes = judge_all(root, mutations, judge, jobs=1)
    assert outcomes == [Outcome("survived", tests_run=2)]
    table = write_table({"src/vla_rl/sums.py": SOURCE}, mutations, outcomes)
    assert "**survived** 2 tests:\n\n```diff\n--- a/src/vla_rl/sums.py\n" in table
    assert "-    return a > 9\n+    return a <= 9\n" in table


def test_a_map_leads_to_the_tests_that_execute_a_line(root: Path) -> None:
    pytest.importorskip("coverage", reason="pip install -e '.[dev]'")
    file = root / "lines"
    command = [sys.executable, "-m", "pytest", "-p", "line_coverage", "--record-lines", str(file), "-q"]
    for further in (["-k", "first"], ["-k", "total"]):
        assert run_command([*command, *further], root, timeout_s=60) == 0
        combine_parts(root, file)
    line_map = LineMap(file)
    assert line_map.find_tests("src/vla_rl/sums.py", 8, 8) == ["tests/test_sums.py::test_first"]
    executing = line_map.find_tests("src/vla_rl/sums.py", 3, 3)
    assert executing[0] == "tests/test_sums.py::test_total"
    assert "tests/test_sums.py::test_total_is_three" in executing[1:]  # it shares the fixture that runs the line
    judge = FaultJudge(ImportGraph(root), line_map, select="", timeout_s=60)
    executed, not_executed = faults(3, 12)
    assert judge.choose_tests(executed) == ([executing], True)
    assert judge.choose_tests(not_executed) == ([], False)


def test_a_line_that_runs_at_import_leads_to_the_files_that_import_it(root: Path) -> None:
    (mutation,) = MutationFinder("src/vla_rl/sums.py", "LIMIT = 9 < 10\n").find_mutations()[:1]
    (root / "tests/test_nearest.py").write_text("import vla_rl.sums\n")
    (root / "tests/test_far.py").write_text("")
    judge = FaultJudge(ImportGraph(root), None, select="", timeout_s=60)
    assert judge.choose_tests(mutation) == ([["tests/test_sums.py"], ["tests/test_nearest.py"]], True)


def test_a_process_that_takes_too_long_is_killed_with_its_children(root: Path) -> None:
    pid = root / "pid"
    assert run_command(["sh", "-c", f"sleep 60 & echo $! > {pid}; wait"], root, timeout_s=0.3) is None
    state = Path("/proc", pid.read_text().strip(), "stat")
    end = monotonic() + 30
    while state.exists() and state.read_text().split()[2] != "Z":  # a busy machine takes a moment to end it
        assert monotonic() < end
        sleep(0.05)


def test_a_copy_has_what_is_not_committed_and_not_what_is_ignored(root: Path, tmp_path: Path) -> None:
    (root / ".gitignore").write_text("build/\n")
    (root / "build").mkdir()
    (root / "build" / "lines").write_text("")
    tree = TreeCopy(root, tmp_path / "copy")
    assert (tree.folder / "src/vla_rl/sums.py").read_text() == SOURCE
    assert not (tree.folder / "build").exists()


def test_sources_are_files_or_what_is_under_a_folder(root: Path) -> None:
    assert list(read_sources(root, ["src"])) == ["src/vla_rl/__init__.py", "src/vla_rl/sums.py"]
    assert read_sources(root, ["src/vla_rl/sums.py"]) == {"src/vla_rl/sums.py": SOURCE}
    with pytest.raises(SystemExit, match="no Python file under src/vla_rl/none"):
        read_sources(root, ["src/vla_rl/none"])
