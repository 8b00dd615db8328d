"""Faults to plant in source code: a negated comparison, a dropped statement, a number that is off by one.

Left alone is what no test can be expected to notice or what never runs: imports, docstrings, annotations, code for type
checkers, `__repr__`, and the text of errors and of what is logged or printed.
"""

from __future__ import annotations

import ast
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import unified_diff
from typing import Any

from import_graph import is_for_type_checkers

NEGATED: dict[type[ast.cmpop], str] = {
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Lt: ">=",
    ast.GtE: "<",
    ast.Gt: "<=",
    ast.LtE: ">",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
LOGGERS = ("logger", "log", "logging", "warnings")


@dataclass(frozen=True)
class Mutation:
    """One change of one file, and the lines of the statement that it is in."""

    file: str
    line: int
    kind: str
    """compare, drop or off by one; swap for one that a list gives."""
    start: int
    """First byte that is replaced."""
    end: int
    replacement: str
    span: tuple[int, int]
    """First and last line of the statement, or of the head of an `if` or a loop: running it runs one of these lines."""
    in_function: bool
    """Whether it runs in a call; what stands outside of functions runs at import."""
    tests: tuple[str, ...] = ()
    """Tests to run for it, in this order; empty: chosen by the import graph and the map."""

    def apply_to(self, text: str) -> str:
        """Return the mutated text of the file."""
        content = text.encode()
        return (content[: self.start] + self.replacement.encode() + content[self.end :]).decode()

    def show_lines(self, text: str) -> tuple[str, str]:
        """Return the lines that change, before and after, each as one line of text."""
        content = text.encode()
        start = content.rfind(b"\n", 0, self.start) + 1
        end = len(content) if (newline := content.find(b"\n", self.end)) < 0 else newline
        after = content[start : self.start] + self.replacement.encode() + content[self.end : end]
        return " ".join(content[start:end].decode().split()), " ".join(after.decode().split())

    def show_diff(self, text: str) -> str:
        lines = text.splitlines(keepends=True), self.apply_to(text).splitlines(keepends=True)
        return "".join(unified_diff(*lines, f"a/{self.file}", f"b/{self.file}", n=2))


class MutationFinder:
    """Finds every mutation of one file."""

    def __init__(self, file: str, text: str) -> None:
        self.file = file
        self.text = text
        self.content = text.encode()
        self.line_starts = [0]
        for line in self.content.splitlines(keepends=True):
            self.line_starts.append(self.line_starts[-1] + len(line))

    def find_mutations(self) -> list[Mutation]:
        """Return the mutations in the order of their lines; each gives a file that compiles."""
        mutations = self._visit_node(ast.parse(self.text), span=(1, 1), local_names=None)
        return sorted(mutations, key=lambda one: (one.line, one.start, one.kind, one.replacement))

    def _visit_node(self, node: ast.AST, span: tuple[int, int], local_names: Counter[str] | None) -> Iterator[Mutation]:
        """Yield the mutations of a node and of those below it.

        Args:
            span: lines of the statement that the node is in.
            local_names: how often the function around it assigns each name; None outside of functions.
        """
        if isinstance(node, ast.stmt):
            span = statement_span(node)
        replacements: list[tuple[ast.expr | ast.stmt, str, str]] = []
        if isinstance(node, ast.stmt) and local_names is not None and can_be_dropped(node, local_names):
            replacements.append((node, "drop", "pass"))
        if isinstance(node, ast.Compare):
            replacements.append((node, "compare", self._negate_comparison(node)))
        for number in number_nodes(node):
            replacements += [(number, "off by one", text) for text in self._shift_number(number)]
        for replaced, kind, text in replacements:
            start, end = self._offsets_of(replaced)
            line = replaced.lineno
            yield Mutation(self.file, line, kind, start, end, text, span, in_function=local_names is not None)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            local_names = count_assignments(node)
        for child in running_children(node):
            yield from self._visit_node(child, span, local_names)

    def _offsets_of(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        end_line, end_column = node.end_lineno, node.end_col_offset
        assert end_line is not None and end_column is not None, "nodes of a parsed file have an end"
        return self.line_starts[node.lineno - 1] + node.col_offset, self.line_starts[end_line - 1] + end_column

    def _text_of(self, node: ast.expr) -> str:
        start, end = self._offsets_of(node)
        return self.content[start:end].decode()

    def _negate_comparison(self, node: ast.Compare) -> str:
        if len(node.ops) > 1:
            return f"(not ({self._text_of(node)}))"
        # Between the operands stand the operator and the brackets around each of them.
        (_, left_end), (right_start, _) = self._offsets_of(node.left), self._offsets_of(node.comparators[0])
        between = self.content[left_end:right_start].decode()
        closing, opening = between.count(")"), between.count("(")
        operator = f"{')' * closing} {NEGATED[type(node.ops[0])]} {'(' * opening}"
        start, end = self._offsets_of(node)
        return self.content[start:left_end].decode() + operator + self.content[right_start:end].decode()

    def _shift_number(self, node: ast.expr) -> list[str]:
        if isinstance(node, ast.Constant):
            return [str(node.value + 1), str(node.value - 1) if node.value else "(-1)"]
        text = self._text_of(node)
        return [f"({text}) + 1", f"({text}) - 1"]


def statement_span(node: ast.stmt) -> tuple[int, int]:
    """Return first and last line of a statement; of one with a body, those of its head."""
    body = getattr(node, "body", None)
    last = max(body[0].lineno - 1, node.lineno) if isinstance(body, list) and body else node.end_lineno
    return node.lineno, last or node.lineno


def can_be_dropped(node: ast.stmt, local_names: Mapping[str, int]) -> bool:
    """Return whether the file without this statement says something else, and not only that a name is missing."""
    if isinstance(node, ast.Assign):
        names = [name for target in node.targets for name in assigned_names(target)]
        return not names or any(local_names[name] > 1 for name in names)
    return isinstance(node, ast.Expr | ast.AugAssign | ast.Raise) and not is_message(node)


def assigned_names(target: ast.AST) -> list[str]:
    """Return the names that are assigned, arguments included; those of attributes and items are none."""
    nodes = list(ast.walk(target))
    arguments = [node.arg for node in nodes if isinstance(node, ast.arg)]
    return [*arguments, *(node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))]


def count_assignments(function: ast.AST) -> Counter[str]:
    return Counter(assigned_names(function))


def is_message(node: ast.stmt) -> bool:
    """Return whether a statement is a docstring or only logs, warns or prints."""
    if not isinstance(node, ast.Expr):
        return False
    if isinstance(node.value, ast.Constant):
        return True
    function = node.value.func if isinstance(node.value, ast.Call) else None
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        return function.value.id in LOGGERS
    return isinstance(function, ast.Name) and function.id == "print"


def number_nodes(node: ast.AST) -> Iterator[ast.expr]:
    """Yield `node` if it is a whole number, and the bounds of `range` and of slices that are not numbers themselves."""
    bounds: list[ast.expr | None] = []
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield node
    elif isinstance(node, ast.Slice):
        bounds = [node.lower, node.upper]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range":
        bounds = list(node.args[:2])
    for bound in bounds:
        if bound is not None and not isinstance(bound, ast.Constant | ast.UnaryOp | ast.Starred):
            yield bound


def running_children(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below one that run and that tests can be asked to notice."""
    if isinstance(node, ast.Import | ast.ImportFrom | ast.Raise | ast.JoinedStr):
        return
    if isinstance(node, ast.stmt) and is_message(node):
        return
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "msg", "bases", "type_params", "format_spec"):
            continue
        if name == "body" and isinstance(node, ast.If) and is_for_type_checkers(node):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and getattr(child, "name", "") != "__repr__":
                yield child


def draw_mutations(texts: Mapping[str, str], number: int, seed: int) -> list[Mutation]:
    """Return at most `number` mutations of the files `texts`, in the order of files and lines.

    Each kind is drawn as often as another, of its lines each is as likely, and none is drawn twice.
    """
    lines: dict[str, dict[tuple[str, int], list[Mutation]]] = defaultdict(lambda: defaultdict(list))
    for file, text in sorted(texts.items()):
        for mutation in MutationFinder(file, text).find_mutations():
            lines[mutation.kind][file, mutation.line].append(mutation)
    draws = random.Random(seed)
    drawn: dict[tuple[str, int], Mutation] = {}
    kinds = sorted(lines)
    while kinds and len(drawn) < number:
        kind = kinds[len(drawn) % len(kinds)]
        rest = sorted(lines[kind].keys() - drawn.keys())
        if rest:
            line = draws.choice(rest)
            drawn[line] = draws.choice(lines[kind][line])
        else:
            kinds.remove(kind)
    return [drawn[line] for line in sorted(drawn)]


def place_given(entries: Iterable[Mapping[str, Any]], texts: Mapping[str, str]) -> list[Mutation]:
    """Return the mutations of a list: each replaces text that stands once in its file.

    Args:
        entries: maps with `file`, `before`, `after` and `tests`.
        texts: file -> its text.
    """
    mutations = []
    for entry in entries:
        content, before = texts[entry["file"]].encode(), entry["before"].encode()
        if content.count(before) != 1:
            raise ValueError(
                f"{entry['file']} has {content.count(before)} places with {entry['before']!r}; a fault needs one"
            )
        start = content.index(before)
        line = content.count(b"\n", 0, start) + 1
        end_line = line + before.count(b"\n")
        mutations.append(
            Mutation(
                entry["file"],
                line,
                "swap",
                start,
                start + len(before),
                entry["after"],
                (line, end_line),
                in_function=True,
                tests=tuple(entry["tests"]),
            )
        )
    return mutations
