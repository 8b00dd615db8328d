"""The tests that a revision had and the tree has not."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from lost_tests import find_lost_tests, list_revision, list_tree


def write_tests(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        file = root / "tests" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def run_git(root: Path, *arguments: str) -> None:
    author = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    subprocess.run(("git", "-C", str(root), *author, *arguments), check=True, capture_output=True)


def test_removed_and_renamed_tests_are_lost_and_moved_ones_are_not(tmp_path: Path):
    run_git(tmp_path, "init")
    of_class = "class TestIt:\n    def test_kept(self): ...\n    def test_removed(self): ...\n"
    write_tests(
        tmp_path, {"test_a.py": "def test_moved(): ...\ndef test_old_name(): ...\n", "core/test_b.py": of_class}
    )
    write_tests(tmp_path, {"helper.py": "def test_of_no_test_file(): ...\n"})
    run_git(tmp_path, "add", ".")
    run_git(tmp_path, "commit", "-m", "before")
    (tmp_path / "tests" / "helper.py").unlink()
    write_tests(tmp_path, {"test_a.py": "def test_new_name(): ...\n", "test_c.py": "def test_moved(): ...\n"})
    write_tests(tmp_path, {"core/test_b.py": "class TestIt:\n    def test_kept(self): ...\n"})
    lost = find_lost_tests(list_revision(tmp_path, "HEAD"), list_tree(tmp_path))
    assert lost == ["tests/core/test_b.py::TestIt::test_removed", "tests/test_a.py::test_old_name"]


def test_an_unknown_revision_is_an_error(tmp_path: Path):
    run_git(tmp_path, "init")
    with pytest.raises(SystemExit, match="no_such_revision"):
        list_revision(tmp_path, "no_such_revision")
