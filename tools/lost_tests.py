"""Print the tests that a revision had and the working tree has not.

    python tools/lost_tests.py main

Tests are read from the syntax trees of the test files, nothing is collected: `FILE::Class::test_name`, without the
number of their cases. A test that moved to another file, with its name, is not lost and is left out.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path


def list_tests(file: str, text: str) -> Iterator[str]:
    """Yield the names of the tests that a file defines, as pytest writes them."""
    module = ast.parse(text)
    classes = {node.name: node.body for node in module.body if isinstance(node, ast.ClassDef)}
    for class_name, body in {"": module.body, **classes}.items():
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
                yield "::".join(filter(None, (file, class_name, node.name)))


def is_test_file(file: str) -> bool:
    name = file.rpartition("/")[2]
    return file.startswith("tests/") and name.startswith("test_") and name.endswith(".py")


def read_git(root: Path, *arguments: str) -> str:
    """Return what a git command prints. Raise SystemExit with git's message if it fails."""
    done = subprocess.run(("git", "-C", str(root), *arguments), check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr.strip())
    return done.stdout


def list_revision(root: Path, revision: str) -> list[str]:
    """Return the names of all tests of a revision."""
    files = read_git(root, "ls-tree", "-r", "--name-only", "--full-tree", revision).splitlines()
    return [
        name
        for file in filter(is_test_file, files)
        for name in list_tests(file, read_git(root, "show", f"{revision}:{file}"))
    ]


def list_tree(root: Path) -> list[str]:
    """Return the names of all tests in the files of the working tree."""
    files = sorted((root / "tests").rglob("test_*.py"))
    return [name for file in files for name in list_tests(file.relative_to(root).as_posix(), file.read_text("utf-8"))]


def find_lost_tests(before: list[str], now: list[str]) -> list[str]:
    """Return the tests of `before` that are in no file now. Tests of one name in several files count one each."""
    appeared = Counter(name.partition("::")[2] for name in set(now).difference(before))
    lost = []
    for name in sorted(set(before).difference(now)):
        function = name.partition("::")[2]
        if appeared[function]:
            appeared[function] -= 1  # it moved
        else:
            lost.append(name)
    return lost


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("revision", help="commit, branch or tag to compare the working tree with")
    arguments = parser.parse_args()
    root = Path(__file__).parents[1]
    lost = find_lost_tests(list_revision(root, arguments.revision), list_tree(root))
    print("\n".join([*lost, f"{len(lost)} tests of {arguments.revision} have no test of their name here"]))


if __name__ == "__main__":
    main()
