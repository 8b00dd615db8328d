"""YAML 1.2 scalars, duplicate keys, line numbers, and a dump that reads back."""

from __future__ import annotations

import math
from time import perf_counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vla_rl.core.spec.yaml import LONGEST_TEXT, MERGE, dump_yaml, parse_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("1.5", 1.5),
        ("-3", -3),
        ("010", 10),
        ("0x10", 16),
        (".inf", math.inf),
        ("off", "off"),
        ("yes", "yes"),
        ("on", "on"),
        ("true", True),
        ("False", False),
        ("1_000", "1_000"),
        ("2026-01-02", "2026-01-02"),
        ("12:30", "12:30"),
        ("'1'", "1"),
        ("~", None),
        ("", None),
        ("!!float 3", 3.0),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text, value):
    read = parse_yaml(f"key: {text}").data["key"]
    assert read == value
    assert type(read) is type(value)


def test_every_key_and_item_has_its_line():
    document = parse_yaml("a: 1\nb:\n  c: [1,\n    2]\n")
    assert document.lines == {(): 1, ("a",): 1, ("b",): 2, ("b", "c"): 3, ("b", "c", 0): 3, ("b", "c", 1): 4}


@pytest.mark.parametrize(
    ("text", "errors"),
    [
        ("a: 1\nb: 2\na: 3", ((3, "a: duplicate key, already given in line 1"),)),
        ("a: {b: 1, b: 2}", ((1, "a.b: duplicate key, already given in line 1"),)),
        ("a: [1", ((1, "not valid YAML: expected ',' or ']', but got '<stream end>'"),)),
        (
            "a: 1\n---\nb: 2",
            ((2, "not valid YAML: expected a single document in the stream, but found another document"),),
        ),
        ("a: !thing 3", ((1, "a: tag !thing is not supported"),)),
        ("a: !thing [3]", ((1, "a: tag !thing is not supported"),)),
        ("a: !!set {3}", ((1, "a: tag tag:yaml.org,2002:set is not supported"),)),
        ("a: &x {b: 1}\nc:\n  <<: *x\n  d: 2", ((3, f"c: {MERGE}"),)),
        ('a: "\\U00110000"', ((1, "not valid YAML: chr() arg not in range(0x110000)"),)),
        ("a: " + 5000 * "[", ((1, "not valid YAML: it is nested too deeply"),)),
        ("a: 1\nb: " + 80 * "[" + 80 * "]", ((2, "not valid YAML: it is nested more than 64 deep"),)),
        ("a: 0x" + 1000 * "f", ((1, "a: 0xffffffffffffffffff... has 4000 bits; use a smaller number"),)),
        ("a: !!int x", ((1, "a: 'x' is not a valid int"),)),
        ("[1]: 3", ((1, "a key must be a word"),)),
        ("a: &x [*x]", ((1, "a.0: an alias may not contain itself"),)),
        ("b: 1\na: \x07", ((2, "not valid YAML: character '\\x07' is not allowed"),)),
    ],
)
def test_problems_are_returned_with_their_line(text, errors):
    found = parse_yaml(text).errors
    assert [(error.line, error.message) for error in found] == list(errors)


def test_aliases_of_aliases_are_not_written_out():
    """9^8 values of 300 characters of text."""
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 8)]
    began = perf_counter()
    (error,) = parse_yaml("\n".join(lines)).errors
    assert (
        error.line <= 8 and "with what its aliases (*name) stand for it has more than 100,000 values" in error.message
    )
    assert perf_counter() - began < 5


def test_a_long_text_is_not_read():
    (error,) = parse_yaml("a: " + "x" * LONGEST_TEXT).errors
    assert error.message == "not valid YAML: it has more than 4,000,000 characters"


def test_a_quoted_key_of_two_angles_is_a_key():
    assert parse_yaml("'<<': {a: 1}").data == {"<<": {"a": 1}}


def test_what_is_next_to_a_problem_is_read():
    assert parse_yaml("a: 1\na: 2\nb: 3").data == {"a": 1, "b": 3}


words = st.text(st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"]))  # PyYAML folds odd line breaks
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.sampled_from(["1e-6", "off"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=8,
)


@given(values)
@example("\x85")
@example("a\u2028b")
def test_a_dump_reads_back_to_the_same_data(data):
    assert parse_yaml(dump_yaml({"key": data})).data == {"key": data}
