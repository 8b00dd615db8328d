"""Print how much there is to know in the source: files of one update, pass-through functions, names, checks, words.

    python tools/house.py [--root FOLDER] [--list FIGURE]

Everything is read from the syntax trees of `src/vla_rl` and from the text of pages and tests; nothing is imported.
`--list` prints what a figure counts: update, pass-through, circles, one-word, turns, loop-words.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from import_graph import ImportGraph, find_circles

TURNS = {
    "picture": r"\bpictures?\b",
    "somebody, nobody": r"\b(?:somebody|nobody)\b",
    "beside": r"\bbeside\b",
    "is no X": r"(?<!there )\b(?:is|are) no (?!longer\b|more\b|one\b)\w+",
    "of its own": r"\bof (?:its|their|our|your|his|her|my) own\b",
    "goes on": r"\b(?:go|goes|going|went) on\b",
    "is told": r"\b(?:is|are|was|were|be|been) told\b|\btells? success",
    "anew": r"\banew\b",
    "so many": r"\bso many\b",
    "lies": r"\b(?:lies|lie|lay)\b",
    "where there is": r"\b(?:where|if|that|what) there (?:is|are|was|were)\b",
    "with which": r"\b(?:with|by) which\b",
}
"""Turns of phrase that native speakers do not write, as patterns."""
TURN_FOLDERS = ("src", "docs", "tests", "examples")
TEXT_FILES = {".py", ".md", ".yaml", ".html", ".js"}
LOOP_FOLDERS = ("core/run", "runtime/driver", "runtime/workers/host.py", "runtime/comm")
"""Files of the training loop, which know nothing of the parts that a run can do without."""
LOOP_WORDS = r"imagine|imagination|world.?model"
UPDATE_PAGE = "docs/explanation/architecture.md"
UPDATE_HEADING = "## How a sample travels"


class House:
    """The source of the repository at `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.package = root / "src" / "vla_rl"
        self.files = sorted(self.package.rglob("*.py"))

    @cache  # noqa: B019
    def read_text(self, file: Path) -> str:
        return file.read_text("utf-8")

    @cache  # noqa: B019
    def parse_file(self, file: Path) -> ast.Module:
        return ast.parse(self.read_text(file))

    def walk_functions(self) -> Iterator[tuple[Path, ast.FunctionDef | ast.AsyncFunctionDef]]:
        """Yield file and node of every function and method but those of Python's protocols (`__init__`)."""
        for file in self.files:
            for node in ast.walk(self.parse_file(file)):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("__"):
                    yield file, node

    def place(self, file: Path, line: int, text: str) -> str:
        return f"{file.relative_to(self.root)}:{line}: {text}"

    def list_update(self) -> list[str]:
        """Return the files that the page on the architecture names for one PPO update, with their numbers of lines."""
        page = self.root / UPDATE_PAGE
        section = page.read_text("utf-8").partition(UPDATE_HEADING)[2].partition("\n## ")[0]
        files = dict.fromkeys(re.findall(r"`([\w/]+\.py)`", section))
        return [f"{file}: {len(self.read_text(self.package / file).splitlines())}" for file in files]

    def list_pass_through(self) -> list[str]:
        """Return the functions that do nothing but call another with their own arguments in the same order."""
        return [
            self.place(file, node.lineno, f"{node.name} -> {called}")
            for file, node in self.walk_functions()
            if (called := passed_on_to(node)) is not None
        ]

    def list_circles(self) -> list[str]:
        """Return the circles of files that import each other, inside functions too."""
        edges = {
            file: {other for other in others if other.startswith("src/")}
            for file, others in imports_of(self.root).items()
            if file.startswith("src/")
        }
        return [" ".join(circle) for circle in find_circles(edges)]

    def list_one_word(self) -> list[str]:
        """Return the functions whose name has one word."""
        return [
            self.place(file, node.lineno, node.name)
            for file, node in self.walk_functions()
            if "_" not in node.name.strip("_")
        ]

    def count_functions(self) -> int:
        return sum(1 for _ in self.walk_functions())

    def count_lines(self) -> tuple[int, int]:
        """Return (lines that refuse or check, all lines) outside `testing/`. Files called checks count as a whole."""
        refusing = lines = 0
        for file in self.files:
            if file.is_relative_to(self.package / "testing"):
                continue
            length = len(self.read_text(file).splitlines())
            lines += length
            only_checks = re.search(r"checks|preflight", file.relative_to(self.package).as_posix())
            refusing += length if only_checks else len(refusing_lines(self.parse_file(file)))
        return refusing, lines

    def list_turns(self) -> list[str]:
        """Return the sentences with a turn of phrase that native speakers do not write."""
        found = []
        files = [file for folder in TURN_FOLDERS for file in sorted((self.root / folder).rglob("*"))]
        for file in files:
            if file.suffix not in TEXT_FILES:
                continue
            for number, line in enumerate(self.read_text(file).splitlines(), 1):
                for turn, pattern in TURNS.items():
                    times = len(re.findall(pattern, line, re.IGNORECASE))
                    found += [self.place(file, number, f"{turn}: {line.strip()}")] * times
        return found

    def list_loop_words(self) -> list[str]:
        """Return the lines of the training loop, driver, host and comm that speak of imagination or world models."""
        return [
            self.place(file, number, line.strip())
            for file in self.files
            if file.relative_to(self.package).as_posix().startswith(LOOP_FOLDERS)
            for number, line in enumerate(self.read_text(file).splitlines(), 1)
            if re.search(LOOP_WORDS, line, re.IGNORECASE)
        ]


def passed_on_to(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str | None:
    """Return what a function calls if that call, with the function's own arguments in order, is all that it does."""
    body = [one for one in node.body if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))]
    if len(body) != 1 or not isinstance(body[0], ast.Return | ast.Expr):
        return None
    value = body[0].value
    value = value.value if isinstance(value, ast.Await) else value
    if not isinstance(value, ast.Call):
        return None
    parameters = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    if parameters[:1] in (["self"], ["cls"]):
        del parameters[0]
    parameters += [f"*{node.args.vararg.arg}"] if node.args.vararg else []
    parameters += [f"**{node.args.kwarg.arg}"] if node.args.kwarg else []
    arguments = [ast.unparse(argument) for argument in value.args]
    arguments += [("**" if one.arg is None else "") + ast.unparse(one.value) for one in value.keywords]
    return ast.unparse(value.func) if arguments == parameters else None


def refusing_lines(tree: ast.Module) -> set[int]:
    """Return the lines that refuse or check: `raise` with the `if` around it, validators, functions called check_x."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            validates = any("validator" in ast.unparse(decorator) for decorator in node.decorator_list)
            if validates or re.match(r"_?(check|validate|refuse|require)", node.name):
                lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        elif isinstance(node, ast.Raise):
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        elif isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise):
            lines.update(range(node.lineno, (node.body[-1].end_lineno or node.lineno) + 1))
    return lines


def imports_of(root: Path) -> dict[str, set[str]]:
    """Return file -> the files that it imports, inside functions too; imports for type checkers are left out."""
    graph = ImportGraph(root)
    return {
        file: {other for module, name in source.imports for other in graph.imported_files(module, name)} - {file}
        for file, source in graph.sources.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1])
    lists = ("update", "pass-through", "circles", "one-word", "turns", "loop-words")
    parser.add_argument("--list", choices=lists)
    arguments = parser.parse_args()
    house = House(arguments.root.resolve())
    if arguments.list:
        print("\n".join(getattr(house, f"list_{arguments.list.replace('-', '_')}")()))
        return
    update = house.list_update()
    functions = house.count_functions()
    refusing, lines = house.count_lines()
    rows = [
        ("files of one PPO update, reset to optimiser step", len(update)),
        ("lines of those files", sum(int(one.rpartition(" ")[2]) for one in update)),
        ("functions that only pass their arguments on", len(house.list_pass_through())),
        ("circles of files, late imports included", len(house.list_circles())),
        ("functions", functions),
        ("one-word function names", f"{len(house.list_one_word()) / functions:.1%}"),
        ("lines of Python outside testing/", lines),
        ("lines that refuse or check, of those", f"{refusing / lines:.1%}"),
        ("lines on imagination and world models in the loop, driver, host and comm", len(house.list_loop_words())),
        ("turns that no native speaker writes, in src, docs, tests and examples", len(house.list_turns())),
    ]
    for name, figure in rows:
        print(f"{name:76}{figure:>10}")


if __name__ == "__main__":
    main()
