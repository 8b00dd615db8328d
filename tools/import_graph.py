"""The import graph of the repository: which test files reach a file, and over how many imports.

Nodes are files: Python files of src, tests, tools, benchmarks and examples, specs (YAML) of examples and recipes.
A file depends on

- what it imports, inside of functions too; imports under `if TYPE_CHECKING` are left out, since they never run,
- modules that it names in text: "vla_rl.testing.scripted", "vla_rl.plugins.envs.libero.env:make_envs",
  f"{__package__}.devices",
- plugins that it names as specs do: the names of the entry points in pyproject.toml,
- the modules with the fixtures that its tests ask for,
- files and folders that it names: `ROOT / "examples" / "tabletop_ppo.yaml"`, `ROOT.glob("docs/**/*.md")`.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator
from fnmatch import fnmatch
from functools import cache, cached_property
from pathlib import Path, PurePosixPath

PYTHON = ("src", "tests", "tools", "benchmarks", "examples")
SPECS = ("examples", "recipes")
FIXTURES = "src/vla_rl/testing/fixtures.py"
"""Fixtures that every test can ask for, without an import."""
MODULE_NAME = re.compile(r"\bvla_rl(?:\.\w+)+")
SPEC_NAME = re.compile(r"\b\w+: *[\"']?([\w-]+)")
"""A value of a spec, which names a plugin if an entry point is called so."""


class SourceFile:
    """What one Python file imports, names and defines."""

    def __init__(self, text: str) -> None:
        self.imports: list[tuple[str, str]] = []
        """Module and name of `from module import name`; the name is "" for `import module`."""
        self.typing_imports: list[tuple[str, str]] = []
        """The same, under `if TYPE_CHECKING`."""
        self.texts: set[str] = set()
        """String constants, docstrings left out; constants that are joined with `/` count as the path they make."""
        self.arguments: set[str] = set()
        """Arguments of functions, which in tests are the names of fixtures."""
        self.fixtures: set[str] = set()
        """Functions that are fixtures."""
        self.test_count = 0
        todo: list[tuple[ast.AST, bool]] = [(ast.parse(text), False)]
        while todo:
            node, typing = todo.pop()
            todo.extend(self._visit_node(node, typing))
        self.patterns = {text for text in self.texts if "*" in text}

    def _visit_node(self, node: ast.AST, typing: bool) -> Iterator[tuple[ast.AST, bool]]:
        """Note what a node says; yield the nodes below it, and whether each is for type checkers only."""
        imports = self.typing_imports if typing else self.imports
        children = ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            imports.extend((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            imports.extend((node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "vla_rl":
            imports.append(("vla_rl", node.attr))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            self.texts.add(node.value)
        elif isinstance(node, ast.JoinedStr):
            self.texts.add(ast.unparse(node))
        elif isinstance(node, ast.BinOp):
            path, start = split_path(node)
            if path:
                self.texts.add(path)
                children = iter([start])
        elif isinstance(node, ast.FunctionDef):
            self.arguments |= {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)}
            self.test_count += node.name.startswith("test_")
            if any("fixture" in ast.unparse(decorator) for decorator in node.decorator_list):
                self.fixtures.add(node.name)
        elif isinstance(node, ast.If) and is_for_type_checkers(node):
            yield from ((child, True) for child in node.body)
            children = iter(node.orelse)
        for child in children:
            if not (isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)):  # docstrings
                yield child, typing


def is_for_type_checkers(node: ast.If) -> bool:
    """Return whether an `if` asks for TYPE_CHECKING, or typing.TYPE_CHECKING."""
    return "TYPE_CHECKING" in (getattr(node.test, "id", ""), getattr(node.test, "attr", ""))


def split_path(node: ast.expr) -> tuple[str, ast.expr]:
    """Split `ROOT / "docs" / "models"` into its constant end, docs/models, and the node of its start."""
    parts: list[str] = []
    while (
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Div)
        and isinstance(node.right, ast.Constant)
        and isinstance(node.right.value, str)
    ):
        parts.insert(0, node.right.value)
        node = node.left
    return "/".join(parts), node


class ImportGraph:
    """Files of the repository at `root` and what each depends on.

    `deleted` names files that are gone, as paths from the root: what still imports them reaches them.
    """

    def __init__(self, root: Path, deleted: Collection[str] = ()) -> None:
        self.root = root
        found = [file for folder in PYTHON for file in sorted((root / folder).rglob("*.py"))]
        self.sources = {self._path_of(file): SourceFile(file.read_text("utf-8")) for file in found}
        self.specs = [self._path_of(file) for folder in SPECS for file in sorted((root / folder).glob("*.yaml"))]
        self.files_of_modules = {name_module(file): file for file in (*self.sources, *deleted) if file.endswith(".py")}
        self.tests = [file for file in self.sources if is_test(file)]

    def _path_of(self, file: Path) -> str:
        return file.relative_to(self.root).as_posix()

    @cached_property
    def plugins(self) -> dict[str, set[str]]:
        """Name of an entry point or a script -> the modules that it leads to."""
        file = self.root / "pyproject.toml"
        project = tomllib.loads(file.read_text("utf-8"))["project"] if file.is_file() else {}
        modules: dict[str, set[str]] = defaultdict(set)
        for group in (*project.get("entry-points", {}).values(), project.get("scripts", {})):
            for name, target in group.items():
                modules[name].add(target.partition(":")[0])
        return modules

    @cached_property
    def scripts(self) -> list[str]:
        """Python files that tests run by their path."""
        return [file for file in self.sources if file.startswith(("tools/", "benchmarks/", "examples/"))]

    @cached_property
    def edges(self) -> dict[str, set[str]]:
        """File -> the files that it depends on."""
        edges = {file: set(self._named_files(file)) - {file} for file in self.sources}
        for spec in self.specs:
            names = SPEC_NAME.findall((self.root / spec).read_text("utf-8"))
            edges[spec] = {file for name in names for file in self._plugin_files(name)}
        return edges

    def _named_files(self, file: str) -> Iterator[str]:
        source = self.sources[file]
        for module, name in source.imports:
            yield from self.imported_files(module, name)
        package = name_module(file).rpartition(".")[0]
        for text in source.texts:
            for module in MODULE_NAME.findall(text.replace("{__package__}", package)):
                yield from self._module_file(module)
            for name in [text] if re.fullmatch(r"[\w-]+", text) else SPEC_NAME.findall(text):
                yield from self._plugin_files(name)
        if file.startswith("tests/"):
            yield from (script for script in self.scripts if not source.texts.isdisjoint(names_of_file(script)))
            yield from (spec for spec in self.specs if self.reads_file(file, spec))
            folders = PurePosixPath(file).parents
            for other in (FIXTURES, *(f"{folder}/conftest.py" for folder in folders)):
                if other in self.sources and source.arguments & self.sources[other].fixtures:
                    yield other

    def _plugin_files(self, name: str) -> Iterator[str]:
        for module in self.plugins.get(name, ()):
            yield from self._module_file(module)

    def _module_file(self, module: str) -> Iterator[str]:
        """Yield the file of a module or, since the name may end in an attribute, of the longest part that is one."""
        while module and module not in self.files_of_modules:
            module = module.rpartition(".")[0]
        if module:
            yield self.files_of_modules[module]

    def imported_files(self, module: str, name: str) -> Iterator[str]:
        """Yield the files that an import loads; a name that a package hands on leads to the module that defines it."""
        if f"{module}.{name}" in self.files_of_modules:
            yield self.files_of_modules[f"{module}.{name}"]
            return
        yield from self._module_file(module)
        package = self.sources.get(self.files_of_modules.get(module, ""))
        if package is not None and name:
            # The package `vla_rl` lists its lazily loaded names for type checkers.
            for origin, handed_on in (*package.imports, *package.typing_imports):
                if handed_on == name and origin != module:
                    yield from self.imported_files(origin, name)

    @cached_property
    def dependents(self) -> dict[str, set[str]]:
        """File -> the files that depend on it."""
        dependents: dict[str, set[str]] = defaultdict(set)
        for file, others in self.edges.items():
            for other in others:
                dependents[other].add(file)
        return dependents

    def reads_file(self, reader: str, file: str) -> bool:
        """Return whether a Python file names `file`, or a folder that it is in, as something to read.

        Python files count as read only where the reader looks for them by `*.py`: tests of names, words and layers.
        """
        source = self.sources[reader]
        if file.endswith(".py") and not any(pattern.endswith("*.py") for pattern in source.patterns):
            return False
        names = names_of_file(file) | names_of_folders(file)
        return not source.texts.isdisjoint(names) or any(matches_pattern(file, one) for one in source.patterns)

    def readers(self, file: str) -> list[str]:
        """Return the tests, and the modules that are packed with a data file, which read `file`."""
        readers = [test for test in self.sources if test.startswith("tests/") and self.reads_file(test, file)]
        if PurePosixPath(file).name == "conftest.py":
            readers += [test for test in self.tests if test.startswith(file.removesuffix("conftest.py"))]
        if file.startswith("src/") and not file.endswith((".py", ".md")):
            folder = file.rpartition("/")[0]
            modules = [module for module in self.sources if module.startswith(f"{folder}/")]
            readers += [module for module in modules if self.reads_file(module, file)] or modules
        return readers

    def reach_tests(self, changed: Iterable[str], reading: bool = True) -> dict[str, int]:
        """Return the test files that reach one of the changed files, nearest first: file -> number of steps.

        A changed test is 0 steps away, and what imports a changed module 1. Tests that mirror a changed module come
        before the others. `reading` says whether tests that read a file as text count.
        """
        changed = list(changed)
        distance = dict.fromkeys(changed, 0)
        if reading:
            distance |= {reader: 1 for file in changed for reader in self.readers(file) if reader not in distance}
        todo = deque(distance)
        while todo:
            file = todo.popleft()
            for dependent in sorted(self.dependents.get(file, ())):
                if dependent not in distance:
                    distance[dependent] = distance[file] + 1
                    todo.append(dependent)
        mirrors = {mirror for file in changed for mirror in self.find_mirrors(file)}
        tests = [test for test in self.tests if test in distance]
        tests.sort(key=lambda test: (distance[test] > 0, test not in mirrors, distance[test], test))
        return {test: distance[test] for test in tests}

    def find_nearest(self, file: str) -> list[str]:
        """Return the tests that read a file, those that mirror it, and those that reach it in the fewest steps."""
        readers = [reader for reader in self.readers(file) if is_test(reader)]
        steps = self.reach_tests([file], reading=False)
        fewest = min(steps.values(), default=0)
        return [*self.find_mirrors(file), *readers, *(test for test, distance in steps.items() if distance == fewest)]

    def find_mirrors(self, file: str) -> list[str]:
        """Return the test files named after a module, in the folder of tests that mirrors its own or above that one.

        src/vla_rl/runtime/driver/samples/replay.py has tests/runtime/driver/samples/test_replay.py; the files of a
        plugin's folder have the tests with the name of the folder, too.
        """
        path = PurePosixPath(file.removeprefix("src/vla_rl/"))
        names = [path.parent.name] if path.stem == "__init__" else [path.stem, path.parent.name]
        folders = {f"tests/{folder}" if str(folder) != "." else "tests" for folder in path.parents}
        return [
            test
            for name in names
            for test in self.tests
            if test.rpartition("/")[0] in folders and PurePosixPath(test).stem == f"test_{name}"
        ]


def find_circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of nodes that lead to each other, and nodes that lead to themselves (Tarjan's algorithm)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    circles = []

    def visit(node: str) -> None:
        order[node] = lowest[node] = len(order)
        stack.append(node)
        for other in sorted(edges.get(node, ())):
            if other not in order:
                visit(other)
                lowest[node] = min(lowest[node], lowest[other])
            elif other in stack:
                lowest[node] = min(lowest[node], order[other])
        if lowest[node] == order[node]:
            component = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(component) > 1 or node in edges.get(node, ()):
                circles.append(sorted(component))

    for node in sorted(edges):
        if node not in order:
            visit(node)
    return circles


def name_module(file: str) -> str:
    """Return the name under which a file is imported: tests, tools and benchmarks go by the file's name alone."""
    path = PurePosixPath(file)
    if path.parts[0] != "src":
        return path.stem
    return ".".join(path.with_suffix("").parts[1:]).removesuffix(".__init__")


def is_test(file: str) -> bool:
    return file.startswith("tests/") and PurePosixPath(file).name.startswith("test_")


@cache
def names_of_file(file: str) -> frozenset[str]:
    """Return what programs call a file: docs/models/pi0.md, models/pi0.md, pi0.md; a spec also by its stem."""
    path = PurePosixPath(file)
    names = {"/".join(path.parts[start:]) for start in range(len(path.parts))}
    if path.suffix == ".yaml":
        names.add(path.stem)  # the command line's name of a spec
    if file != "README.md":
        names.discard("README.md")  # there are too many of them
    return frozenset(names)


@cache
def names_of_folders(file: str) -> frozenset[str]:
    """Return what programs call the folders that a file is in: docs, docs/, docs/models."""
    folders = [str(folder) for folder in PurePosixPath(file).parents if str(folder) != "."]
    return frozenset([*folders, *(f"{folder}/" for folder in folders)])


def matches_pattern(file: str, pattern: str) -> bool:
    """Return whether a file matches a pattern such as docs/**/*.md; one without a folder is for files at the root."""
    if "/" not in pattern:
        return "/" not in file and fnmatch(file, pattern)
    return fnmatch(file, pattern.replace("**/", "*"))
