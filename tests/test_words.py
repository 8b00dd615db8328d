"""The language of the code: what a docstring opens with, that a class name is unique, and what names are made of."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path

from vla_rl.core.catalogue import KINDS

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
FILES = sorted((SOURCE / "vla_rl").rglob("*.py"))
OTHER_FILES = [file for folder in ("tests", "benchmarks", "tools") for file in sorted((ROOT / folder).rglob("*.py"))]
DANGLING = {"Of", "That", "Those", "As", "Its", "These", "They", "So", "Whose", "Which"}
"""First words that leave out what they are about; a docstring opens with a verb or with the thing itself."""


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text("utf-8"))


@cache
def nodes_of(file: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree_of(file)))


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and text of every docstring, those of attributes and constants included."""
    for node in ast.walk(tree):
        body = getattr(node, "body", [])
        for statement in body if isinstance(body, list) else []:
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield statement.lineno, value.value.strip()


QUOTED = re.compile(rf"""["']\s*(?:{"|".join(sorted(DANGLING))})\b""")
"""A string that opens with such a word. Files without one, which are most, need not be parsed."""


def test_docstrings_open_with_their_subject():
    wrong = [
        f"{file.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for file in [*FILES, *OTHER_FILES]
        if QUOTED.search(file.read_text("utf-8"))
        for line, text in docstrings(tree_of(file))
        if text and text.split()[0].rstrip(",.:;") in DANGLING
    ]
    assert not wrong, "\n".join(wrong)


EMPTY_NAMES = {"asked", "found", "made", "said", "there", "told", "whole"}
"""Names that say nothing of a variable's content; `matches`, `result`, `requested`, `available` do."""


def local_names(file: Path) -> Iterator[tuple[int, str]]:
    """Yield line and name of the arguments and the variables of every function and lambda."""
    for node in nodes_of(file):
        if isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            for inner in ast.walk(node):
                if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                    yield inner.lineno, inner.id
                elif isinstance(inner, ast.ExceptHandler) and inner.name is not None:
                    yield inner.lineno, inner.name


@cache
def empty_names() -> dict[str, list[str]]:
    """Return the empty names of every file that has some: file -> `file:line: name`."""
    occurrences: dict[str, list[str]] = {}
    for file in FILES:
        name_of_file = file.relative_to(SOURCE / "vla_rl").as_posix()
        for line, name in sorted(set(local_names(file))):
            if name in EMPTY_NAMES:
                occurrences.setdefault(name_of_file, []).append(f"{name_of_file}:{line}: {name}")
    return occurrences


def test_variables_are_named_after_their_content():
    wrong = [where for places in empty_names().values() for where in places]
    assert not wrong, "\n".join(wrong)


def test_a_public_class_name_is_used_once():
    places: dict[str, list[str]] = {}
    for file in FILES:
        for node in tree_of(file).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(str(file.relative_to(SOURCE)))
    twice = {name: files for name, files in places.items() if len(files) > 1}
    assert not twice


GLOSSARY = next((ROOT / "docs").rglob("glossary.md"))
TERMS = ROOT / "tests" / "field_terms.txt"
"""Further words of the field and plain English that names are made of, grouped by where they come from, without
inflections of a word that is known."""
ENDINGS = ("s", "es", "d", "ed", "ing", "ings", "er", "ers", "ly", "al")

PRIVATE = {
    "accounts": "statistics",
    "beat": "heartbeat",
    "beside": "concurrent",
    "blank": "dummy",
    "dealt": "shard, round_robin",
    "doings": "activity",
    "door": "socket, concurrency group",
    "feed": "streaming update",
    "feeding": "streaming update",
    "filler": "dummy",
    "films": "videos",
    "fresh": "recomputed",
    "gates": "thresholds",
    "heavy": "model inputs",
    "holding": "parallel strategy",
    "home": "run store",
    "imagining": "training in imagination",
    "inbox": "shared-memory reader",
    "inflation": "over-estimation",
    "introduce": "connect",
    "judge": "score groups",
    "judged": "scored",
    "lap": "epoch",
    "light": "trajectory record",
    "meet": "connect",
    "meeting": "rendezvous",
    "outbox": "shared-memory writer",
    "paid": "reward, return so far",
    "pays": "reward",
    "places": "sample ids",
    "play": "collect, roll out",
    "played": "collected",
    "plays": "collects",
    "practice": "training in imagination",
    "practise": "train in imagination",
    "practises": "trains in imagination",
    "practising": "training in imagination",
    "regularised": "add_regularisers",
    "said": "formatted",
    "shut": "not met",
    "standing": "cursor",
    "standings": "stream cursors",
    "strip": "comparison image",
    "strips": "comparison images",
    "supply": "sample router",
    "tally": "metric accumulator",
    "tap": "observer",
    "told": "formatted, progress",
    "undivided": "gradient accumulator",
    "void": "discarded",
    "wire": "shared memory",
    "worded": "formatted",
}
"""Private word -> the field's. No identifier contains the first: no name of a module, class, function, parameter or variable."""

PRIVATE_IN_PUBLIC_NAMES = {
    "apart": "in its own process",
    "place": "sample id",
    "row": "env",
    "rows": "envs",
}
"""Words that mean something else inside a function (a row of an array) and not in the name of a class, module or key."""

FIELD_NAMES = {
    "feed_forward",
    "_feed_forward",
    # Names in the checkpoints of world models: existing checkpoints could not be read with others.
    "vla_rl/plugins/world_models/edm/heads.py: places",
    "vla_rl/plugins/world_models/edm/heads.py: told",
    "vla_rl/plugins/world_models/edm/motion.py: places",
    # Rows of a data set's table.
    "vla_rl/toolkit/data/recording.py: rows",
}
"""Identifiers, or files with an identifier, that contain a word of `PRIVATE` in the field's sense."""


@cache
def words_of(name: str) -> list[str]:
    """Split `SharedMemoryReader` or `max_lag` into words in lower case; numbers are none."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+", name)]


def public_names(file: Path) -> Iterator[tuple[int, str]]:
    """Yield line and name of the module, of its public classes, and of the keys of its settings."""
    module = file.parent.name if file.stem == "__init__" else file.stem
    if not module.startswith("_"):
        yield 1, module
    for node in nodes_of(file):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield node.lineno, node.name
            if node.name.endswith(("Spec", "Config", "Settings")):
                fields = [f for f in node.body if isinstance(f, ast.AnnAssign) and isinstance(f.target, ast.Name)]
                yield from ((field.lineno, ast.unparse(field.target)) for field in fields)


def identifiers(file: Path) -> Iterator[tuple[int, str]]:
    """Yield line and name of what a file defines: functions, classes, parameters, variables, attributes, itself."""
    yield 1, file.parent.name if file.stem == "__init__" else file.stem
    for node in nodes_of(file):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


@cache
def private_words() -> dict[str, list[str]]:
    """Return the private words that occur, and where: `file:line: name`."""
    occurrences: dict[str, list[str]] = {}
    for words, names in ((PRIVATE, identifiers), (PRIVATE_IN_PUBLIC_NAMES, public_names)):
        for file in FILES:
            path = file.relative_to(SOURCE)
            for line, name in names(file):
                if {name, f"{path}: {name}"} & FIELD_NAMES:
                    continue
                for word in words.keys() & set(words_of(name)):
                    occurrences.setdefault(word, []).append(f"{path}:{line}: {name}")
    return occurrences


def base_forms(word: str) -> set[str]:
    """Return what a word may be an inflection of: `batch` of `batching`, `sample` of `sampled`, `clip` of `clipping`."""
    stems = {word.removesuffix(ending) for ending in ENDINGS if word.endswith(ending) and len(word) > len(ending) + 2}
    doubled = {stem[:-1] for stem in stems if stem[-1] == stem[-2]}
    return stems | doubled | {stem + letter for stem in stems for letter in "ey"}


@cache
def known_words() -> frozenset[str]:
    """Return the words of the glossary and of the names of plugins."""
    plugins = {entry.name for kind in KINDS.values() for entry in entry_points(group=kind.group)}
    return frozenset(words_of(" ".join([GLOSSARY.read_text("utf-8"), *plugins])))


def read_terms() -> list[list[str]]:
    """Return the groups of `field_terms.txt`."""
    return [group.split() for group in re.split(r"^#.*$", TERMS.read_text("utf-8"), flags=re.MULTILINE)]


def test_public_names_are_made_of_the_fields_words():
    """A name is in the glossary, or each of its words, or what it is an inflection of, is in the glossary, the name of
    a plugin or one of `field_terms.txt`."""
    codes = re.findall(r"`([^`\n]+)`", GLOSSARY.read_text("utf-8"))
    names = {name for code in codes for name in re.findall(r"\w+", code)}
    known = known_words().union(*read_terms())
    wrong = [
        f"{file.relative_to(SOURCE)}:{line}: {name}: {' '.join(unknown)}"
        for file in FILES
        for line, name in public_names(file)
        if name not in names and f"{file.relative_to(SOURCE)}: {name}" not in FIELD_NAMES
        if (unknown := [w for w in words_of(name) if known.isdisjoint({w, *base_forms(w)})])
    ]
    advice = f"\nuse the field's word; or add it to {GLOSSARY.relative_to(ROOT)} or {TERMS.relative_to(ROOT)}"
    assert not wrong, "\n".join(wrong) + advice


def test_a_word_that_no_list_has_is_found():
    assert "accounts" not in known_words()
    assert base_forms("sampled") >= {"sample"} and base_forms("clipping") >= {"clip"}
    assert not base_forms("bus") & known_words()


def test_field_terms_are_sorted_and_not_private():
    groups = read_terms()
    assert all(group == sorted(group) for group in groups)
    words = [word for group in groups for word in group]
    assert len(words) == len(set(words))
    assert not set(words) & {*PRIVATE, *PRIVATE_IN_PUBLIC_NAMES}


def test_field_terms_are_not_known_otherwise():
    terms = {word for group in read_terms() for word in group}
    known = sorted(word for word in terms if {word, *base_forms(word)} & (known_words() | terms - {word}))
    assert not known, f"the glossary, a plugin's name or another term covers these; delete them in {TERMS.name}"


def test_private_words_are_not_used():
    wrong = [
        f"{where}: write {(PRIVATE | PRIVATE_IN_PUBLIC_NAMES)[word]!r} for {word!r}"
        for word, occurrences in sorted(private_words().items())
        for where in occurrences
    ]
    assert not wrong, "\n".join(wrong)
