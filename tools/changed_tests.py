"""Print the test files to run for what differs from a git reference, nearest first; `make test-changed` runs them.

    python tools/changed_tests.py                          against origin/main, or main, or else the commit before
    python tools/changed_tests.py --since v0.1.0 --depth 3

For each changed file these are the tests that reach it in the fewest steps of the import graph (`import_graph.py` says
what counts as one), those that mirror it, and those that read it: of a page the tests that name it or its folder.
With `--depth N` they are all tests that reach a changed file in at most N steps: 1 are the tests that import a changed
module or name its plugin, 2 those that import something which does. Changed tests are always picked. A change of
pyproject.toml, constraints.txt or tests/conftest.py picks all tests.

Names of files go to stdout, one line on what is picked and what is left out to stderr.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections import Counter
from pathlib import Path

from import_graph import ImportGraph

ROOT = Path(__file__).parents[1]
EVERYTHING = ("pyproject.toml", "constraints.txt", "tests/conftest.py")
"""Files on which every test depends."""


def run_git(root: Path, *arguments: str) -> str:
    """Return the output of a git command; "" if it fails, as for a reference that does not exist."""
    result = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    return result.stdout.strip() if result.returncode == 0 else ""


def list_changes(root: Path, since: str) -> list[str]:
    """Return the files that differ from a commit, uncommitted and untracked ones included, as paths from the root."""
    changed = run_git(root, "diff", "--name-only", "--no-renames", "--relative", since)
    untracked = run_git(root, "ls-files", "--others", "--exclude-standard")
    return sorted({*changed.splitlines(), *untracked.splitlines()})


def find_base(root: Path) -> str:
    """Return the newest commit that HEAD shares with origin/main, or with main if that has a difference to show.

    On main itself, with nothing uncommitted, this is the commit before the last one.
    """
    for branch in ("origin/main", "main"):
        commit = run_git(root, "merge-base", branch, "HEAD")
        if commit and list_changes(root, commit):
            return commit
    return "HEAD~1"


def pick_tests(graph: ImportGraph, changed: list[str], depth: int | None) -> tuple[list[str], str]:
    """Return what to give to pytest and a line that says why; without a depth the nearest tests of each file."""
    decisive = [file for file in changed if file in EVERYTHING]
    if decisive:
        return ["tests"], f"all tests, because of {', '.join(decisive)}"
    steps = graph.reach_tests(changed)
    nearest = {test for file in changed for test in graph.find_nearest(file)} if depth is None else set()
    picked = [test for test in steps if test in nearest or steps[test] <= (depth or 0)]
    if depth is None:
        line = f"{count_tests(graph, picked)} are nearest to what changed"
    else:
        line = f"{count_tests(graph, picked)} reach what changed in at most {depth} steps"
    left_out = [test for test in steps if test not in picked]
    if left_out:
        line += f"; left out are {count_tests(graph, left_out)} in more steps: --depth {max(steps.values())}"
    return picked, f"{line} ({name_some(changed)})"


def count_tests(graph: ImportGraph, files: list[str]) -> str:
    """Return `44 tests in 4 files`; a test with parameters counts once."""
    number = sum(graph.sources[file].test_count for file in files)
    return f"{number} test{'s' * (number != 1)} in {len(files)} file{'s' * (len(files) != 1)}"


def name_some(files: list[str], number: int = 3) -> str:
    """Return the first names of a list, and how many further ones there are per folder."""
    further = Counter(file.partition("/")[0] for file in files[number:])
    return ", ".join([*files[:number], *(f"{count} more in {folder}" for folder, count in further.items())])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--since", metavar="REF", help="git reference; default: where HEAD left origin/main or main")
    parser.add_argument("--depth", type=int, metavar="N", help="largest number of steps (default: the nearest tests)")
    options = parser.parse_args()
    since = options.since or find_base(ROOT)
    if not run_git(ROOT, "rev-parse", "--verify", "--quiet", f"{since}^{{commit}}"):
        sys.exit(f"changed_tests: git knows no commit {since!r}; name another with --since, as in --since main")
    changed = list_changes(ROOT, since)
    if not changed:
        print(f"changed_tests: nothing differs from {since}", file=sys.stderr)
        return
    graph = ImportGraph(ROOT, deleted=[file for file in changed if not (ROOT / file).exists()])
    picked, line = pick_tests(graph, changed, options.depth)
    print(f"changed_tests: {line}", file=sys.stderr)
    print("\n".join(picked))


if __name__ == "__main__":
    main()
