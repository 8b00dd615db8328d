"""No test gets lost: each name in cases.txt is collected with at least as many cases, or says what became of it.

    pytest --write-cases -k test_no_case_is_lost

writes cases.txt. A test that is no longer collected stays in it, to be completed by hand: with the test that covers it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILE = ROOT / "tests" / "cases.txt"
HEAD = """\
# Every test and the number of its cases, files of the repository not counted. `tests/test_cases.py` looks for each, and says
# how this file is written. New tests need no line. A test that was renamed, merged or removed keeps its line, and one with
# fewer cases gets a second line for those that went; both end with the tests that cover them now, or with what went:
#   tests/old.py::test_name 3  # merged into tests/new.py::test_name
#   tests/old.py::test_other 1  # gone: the key `old` was removed
"""
COVERED = "  # merged into "
GONE = "  # gone: "
UNKNOWN = "?"


def read_cases(text: str) -> list[tuple[str, int, str]]:
    """Return name, number of cases and comment of every line; a test that has to be collected has no comment."""
    cases = []
    for line in text.splitlines():
        if not line.startswith("#"):
            case, mark, comment = line.partition("  # ")
            name, _, number = case.rpartition(" ")
            cases.append((name, int(number), mark + comment))
    return cases


@cache
def defined_functions(file: Path) -> frozenset[str]:
    return frozenset(re.findall(r"^ *def (\w+)\(", file.read_text("utf-8"), re.MULTILINE) if file.is_file() else ())


def is_defined(name: str, root: Path) -> bool:
    """Return whether the file of a test defines it: it is not collected where a package is missing."""
    file, *_, function = name.split("::")
    return function in defined_functions(root / file)


def find_lost_cases(text: str, collected: Mapping[str, int], root: Path) -> list[str]:
    """Return what is wrong, a line each: tests with fewer cases than listed, and covering tests that do not exist.

    Of a file of which nothing was collected it is only asked that it defines its tests.
    """
    files = {name.partition("::")[0] for name in collected}

    def is_kept(name: str, number: int) -> bool:
        is_read = name.partition("::")[0] in files
        return collected.get(name, 0) >= number if is_read else "::" in name and is_defined(name, root)

    lost = []
    for name, number, comment in read_cases(text):
        if not comment and not is_kept(name, number):
            lost.append(f"{name}: {number} in cases.txt, {collected.get(name, 0)} collected")
        elif comment.startswith(COVERED):
            others = comment.removeprefix(COVERED).split(", ")
            lost += [f"{name}: merged into {other}, which is not a test" for other in others if not is_kept(other, 1)]
        elif comment and not comment.startswith(GONE):
            lost.append(f"{name}:{comment} says neither `merged into` nor `gone:`")
    return lost


def update_cases(text: str, collected: Mapping[str, int], root: Path) -> str:
    """Return cases.txt with the collected numbers; what was lost gets a line that asks for the covering test."""
    lines = {f"{name} {number}" for name, number in collected.items()}
    files = {name.partition("::")[0] for name in collected}
    for name, number, comment in read_cases(text):
        missing = number - collected.get(name, 0)
        if comment or (name.partition("::")[0] not in files and is_defined(name, root)):
            lines.add(f"{name} {number}{comment}")
        elif missing > 0:
            lines.add(f"{name} {missing}{COVERED}{UNKNOWN}")
    return HEAD + "".join(f"{line}\n" for line in sorted(lines))


def test_no_case_is_lost(collected_cases: Counter[str], pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("lf", False) or any("::" in argument for argument in pytestconfig.args):
        pytest.skip("only some tests of a file were collected")
    if pytestconfig.getoption("write_cases"):
        FILE.write_text(update_cases(FILE.read_text("utf-8"), collected_cases, ROOT), "utf-8")
    lost = find_lost_cases(FILE.read_text("utf-8"), collected_cases, ROOT)
    advice = "\nput them back, or write in tests/cases.txt what became of them: its first lines say how"
    assert not lost, "\n".join(lost) + advice


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with a test file that is collected and one whose package is missing."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text("def test_one(): ...\n")
    (tmp_path / "tests" / "test_b.py").write_text("class TestIt:\n    def test_two(self): ...\n")
    return tmp_path


LISTED = """\
tests/test_a.py::test_one 3
tests/test_b.py::TestIt::test_two 2
"""


@pytest.mark.parametrize(
    ("text", "collected", "lost"),
    [
        (LISTED, {"tests/test_a.py::test_one": 3}, []),
        (LISTED, {"tests/test_a.py::test_one": 4, "tests/test_a.py::test_new": 1}, []),
        (LISTED, {"tests/test_a.py::test_one": 2}, ["tests/test_a.py::test_one: 3 in cases.txt, 2 collected"]),
        (LISTED, {"tests/test_a.py::test_on": 3}, ["tests/test_a.py::test_one: 3 in cases.txt, 0 collected"]),
        (
            "tests/test_b.py::test_gone 1\n",
            {"tests/test_a.py::test_one": 1},
            ["tests/test_b.py::test_gone: 1 in cases.txt, 0 collected"],
        ),
        ("tests/gone.py::test_old 2  # merged into tests/test_a.py::test_one\n", {"tests/test_a.py::test_one": 1}, []),
        (
            "tests/gone.py::test_old 2  # merged into tests/test_a.py::test_one, ?\n",
            {"tests/test_a.py::test_one": 1},
            ["tests/gone.py::test_old: merged into ?, which is not a test"],
        ),
        ("tests/gone.py::test_old 2  # gone: the key was removed\n", {}, []),
        (
            "tests/gone.py::test_old 2  # slow\n",
            {},
            ["tests/gone.py::test_old:  # slow says neither `merged into` nor `gone:`"],
        ),
    ],
    ids=[
        "as listed",
        "more",
        "fewer",
        "renamed",
        "deleted",
        "merged",
        "covered by an unknown one",
        "gone",
        "another comment",
    ],
)
def test_a_lost_case_is_named(text: str, collected: dict[str, int], lost: list[str], root: Path) -> None:
    assert find_lost_cases(text, collected, root) == lost


def test_an_update_keeps_what_was_lost(root: Path) -> None:
    collected = {"tests/test_a.py::test_one": 1, "tests/test_a.py::test_new": 1}
    listed = f"{LISTED}tests/gone.py::test_old 2  # merged into tests/test_a.py::test_one\n"
    updated = update_cases(listed, collected, root)
    assert updated.removeprefix(HEAD).splitlines() == [
        "tests/gone.py::test_old 2  # merged into tests/test_a.py::test_one",
        "tests/test_a.py::test_new 1",
        "tests/test_a.py::test_one 1",
        "tests/test_a.py::test_one 2  # merged into ?",
        "tests/test_b.py::TestIt::test_two 2",
    ]
    assert find_lost_cases(updated, collected, root) == [
        "tests/test_a.py::test_one: merged into ?, which is not a test"
    ]


def test_a_test_of_every_file_counts_once(collected_cases: Counter[str]) -> None:
    assert collected_cases["tests/test_cases.py::test_a_list_of_tests_has_a_head"] == 1


@pytest.mark.parametrize("file", [FILE, FILE.with_name("exhaustive.txt")], ids=lambda file: file.stem)
def test_a_list_of_tests_has_a_head(file: Path) -> None:
    assert file.read_text("utf-8").startswith("# ")
