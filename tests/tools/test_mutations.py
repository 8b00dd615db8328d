"""Faults that are planted in the source."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import yaml

from mutations import MutationFinder, draw_mutations, place_given

ROOT = Path(__file__).parents[2]


def changed_lines(text: str) -> set[tuple[str, str]]:
    """Return kind and mutated lines of every mutation."""
    found = MutationFinder("one.py", text).find_mutations()
    return {(mutation.kind, mutation.show_lines(text)[1]) for mutation in found}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a = b == c", {("compare", "a = b != c")}),
        ("a = (b) < (c)", {("compare", "a = (b) >= (c)")}),
        ("é = b not in c", {("compare", "é = b in c")}),
        ("a = b <= c < d", {("compare", "a = (not (b <= c < d))")}),
        ("a = 7", {("off by one", "a = 8"), ("off by one", "a = 6")}),
        ("a = 0", {("off by one", "a = 1"), ("off by one", "a = (-1)")}),
        ("a = b[c:]", {("off by one", "a = b[(c) + 1:]"), ("off by one", "a = b[(c) - 1:]")}),
        ("a = range(b)", {("off by one", "a = range((b) + 1)"), ("off by one", "a = range((b) - 1)")}),
        ("def f(a):\n    a.clear()", {("drop", "pass")}),
        ("def f(a):\n    a = a or []", {("drop", "pass")}),
        ("def f(a):\n    a.b = a", {("drop", "pass")}),
        ("def f(a):\n    raise ValueError(f'{a == 1}', a == 2)", {("drop", "pass")}),
    ],
)
def test_a_line_is_mutated(text: str, expected: set[tuple[str, str]]) -> None:
    assert changed_lines(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "import a",
        "if TYPE_CHECKING:\n    a = 1",
        "def f(a: 'Literal[1]') -> g[2]:\n    '''Return 3.'''",
        "def __repr__(self):\n    return self.a == 1",
        "def f(a):\n    logger.info('%s', a == 1)",
        "def f(a):\n    return f'{a == 1}'",
        "def f(a):\n    assert a, a == 1",
        "def f(a):\n    b = a.c\n    return b",  # without it the name would be missing, which any test would notice
        "class A:\n    b = field(default=True)",
    ],
)
def test_a_line_is_left_alone(text: str) -> None:
    assert changed_lines(text) == set()


def test_every_mutation_of_a_file_compiles_and_differs() -> None:
    text = (ROOT / "src/vla_rl/toolkit/algorithms/functional.py").read_text("utf-8")
    before = ast.dump(ast.parse(text))
    found = MutationFinder("functional.py", text).find_mutations()
    assert {mutation.kind for mutation in found} == {"compare", "drop", "off by one"}
    assert all(ast.dump(ast.parse(mutation.apply_to(text))) != before for mutation in found)


def test_a_span_holds_the_lines_that_run_with_a_mutation() -> None:
    text = "def f(a):\n    if (\n        a == 1\n    ):\n        return g(\n            2\n        )\n"
    spans = {mutation.line: mutation.span for mutation in MutationFinder("one.py", text).find_mutations()}
    assert spans == {3: (2, 4), 6: (5, 7)}


def test_draws_depend_on_the_seed_alone_and_take_a_line_once() -> None:
    texts = {f"{name}.py": "def f(a):\n    a.g(1)\n    return a == a\n" for name in "abc"}
    drawn = draw_mutations(texts, 6, seed=1)
    assert drawn == draw_mutations(dict(reversed(texts.items())), 6, seed=1)
    assert len({(mutation.file, mutation.line) for mutation in drawn}) == 6
    assert len({tuple(draw_mutations(texts, 3, seed)) for seed in range(10)}) > 1
    assert {mutation.kind for mutation in draw_mutations(texts, 3, seed=0)} == {"compare", "drop", "off by one"}
    assert len(draw_mutations(texts, 100, seed=0)) == 6


def test_a_diff_shows_the_fault() -> None:
    text = "a = 1\nb = a < 2\n"
    (compared,) = [one for one in MutationFinder("one.py", text).find_mutations() if one.kind == "compare"]
    assert compared.show_diff(text).splitlines()[-2:] == ["-b = a < 2", "+b = a >= 2"]


def test_a_given_fault_replaces_text_that_stands_once() -> None:
    entry = {"file": "a.py", "before": "b - c", "after": "c - b", "tests": ["tests/test_a.py"]}
    [mutation] = place_given([entry], {"a.py": "# é\na = b - c\n"})
    assert mutation.apply_to("# é\na = b - c\n") == "# é\na = c - b\n"
    assert (mutation.line, mutation.tests) == (2, ("tests/test_a.py",))
    with pytest.raises(ValueError, match=r"a.py has 2 places with 'b - c'; a fault needs one"):
        place_given([entry], {"a.py": "b - c\nb - c\n"})


def test_swapped_conventions_can_be_planted_and_have_tests() -> None:
    """The list keeps up with the source: `python tools/mutate.py --given tools/convention_faults.yaml` runs it."""
    entries = yaml.safe_load((ROOT / "tools" / "convention_faults.yaml").read_text("utf-8"))
    texts = {entry["file"]: (ROOT / entry["file"]).read_text("utf-8") for entry in entries}
    mutations = place_given(entries, texts)
    assert len(mutations) == 45
    for mutation in mutations:
        ast.parse(mutation.apply_to(texts[mutation.file]))
        for test in mutation.tests:
            file, _, name = test.partition("::")
            text = (ROOT / file).read_text("utf-8")
            assert f"def {name.partition('[')[0] or 'test_'}" in text, test
