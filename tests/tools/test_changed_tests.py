"""The test files to run for a change."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from changed_tests import find_base, list_changes, name_some, pick_tests
from import_graph import ImportGraph


def git(root: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=A", "-c", "user.email=a@example.com")
    subprocess.run(["git", *identity, *arguments], cwd=root, check=True, capture_output=True)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with two commits on main."""
    git(tmp_path, "init", "--initial-branch=main")
    files = {
        "src/vla_rl/a.py": "",
        "src/vla_rl/b.py": "import vla_rl.a",
        "src/vla_rl/c.py": "import vla_rl.b",
        "tests/test_a.py": "import vla_rl.a\ndef test_one(): ...\ndef test_two(): ...",
        "tests/test_c.py": "import vla_rl.c\ndef test_three(): ...",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--message", "one")
    (tmp_path / "src/vla_rl/a.py").write_text("a = 1")
    git(tmp_path, "commit", "--all", "--message", "two")
    return tmp_path


def test_on_main_the_last_commit_is_what_changed(root: Path) -> None:
    assert find_base(root) == "HEAD~1"
    assert list_changes(root, "HEAD~1") == ["src/vla_rl/a.py"]


def test_on_a_branch_everything_since_main_is_what_changed(root: Path) -> None:
    git(root, "switch", "--create", "branch")
    (root / "src/vla_rl/b.py").unlink()
    git(root, "commit", "--all", "--message", "committed")
    (root / "tests/test_a.py").write_text("uncommitted = 1")
    (root / "untracked.md").write_text("")
    assert list_changes(root, find_base(root)) == ["src/vla_rl/b.py", "tests/test_a.py", "untracked.md"]


def test_the_nearest_tests_are_picked_and_what_is_left_out_is_said(root: Path) -> None:
    graph = ImportGraph(root)
    picked, line = pick_tests(graph, ["src/vla_rl/a.py"], depth=None)
    assert picked == ["tests/test_a.py"]
    left_out = "left out are 1 test in 1 file in more steps: --depth 3"
    assert line == f"2 tests in 1 file are nearest to what changed; {left_out} (src/vla_rl/a.py)"
    assert pick_tests(graph, ["src/vla_rl/b.py"], depth=None) == (
        ["tests/test_c.py"],
        "1 test in 1 file are nearest to what changed (src/vla_rl/b.py)",
    )


def test_a_depth_picks_all_tests_within_it(root: Path) -> None:
    graph = ImportGraph(root)
    assert pick_tests(graph, ["src/vla_rl/a.py"], depth=2)[0] == ["tests/test_a.py"]
    assert pick_tests(graph, ["src/vla_rl/a.py"], depth=3) == (
        ["tests/test_a.py", "tests/test_c.py"],
        "3 tests in 2 files reach what changed in at most 3 steps (src/vla_rl/a.py)",
    )


@pytest.mark.parametrize("file", ["pyproject.toml", "constraints.txt", "tests/conftest.py"])
def test_some_files_reach_every_test(root: Path, file: str) -> None:
    picked, line = pick_tests(ImportGraph(root), ["src/vla_rl/c.py", file], depth=None)
    assert picked == ["tests"]
    assert line == f"all tests, because of {file}"


def test_many_files_are_counted_per_folder() -> None:
    assert name_some(["a/1", "a/2", "b/1", "b/2", "c/1", "b/3"]) == "a/1, a/2, b/1, 2 more in b, 1 more in c"
