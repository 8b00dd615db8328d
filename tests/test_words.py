"""The language of the code: what a docstring opens with, and that a class has a name of its own."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"
FILES = sorted((SOURCE / "vla_rl").rglob("*.py"))
DANGLING = {"Of", "That", "Those", "As", "Its", "These", "They", "So", "Whose", "Which"}
"""First words that leave out what they are about; a docstring opens with a verb or with the thing itself."""


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and text of every docstring, those of attributes and constants included."""
    for node in ast.walk(tree):
        body = getattr(node, "body", [])
        for statement in body if isinstance(body, list) else []:
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield statement.lineno, value.value.strip()


def test_docstrings_open_with_their_subject():
    wrong = [
        f"{file.relative_to(SOURCE)}:{line}: {text.splitlines()[0]}"
        for file in FILES
        for line, text in docstrings(ast.parse(file.read_text("utf-8")))
        if text and text.split()[0].rstrip(",.:;") in DANGLING
    ]
    assert not wrong, "\n".join(wrong)


def test_a_public_class_name_is_used_once():
    places: dict[str, list[str]] = {}
    for file in FILES:
        for node in ast.parse(file.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(str(file.relative_to(SOURCE)))
    twice = {name: files for name, files in places.items() if len(files) > 1}
    assert not twice
