"""Plant faults in the source, one at a time, and see which test notices each.

    python tools/mutate.py --list                                what would be planted; --seed draws other faults
    python tools/mutate.py record build/lines -n 2               run the tests, map each line to the tests that run it
    python tools/mutate.py --coverage build/lines --number 40    a table of the faults and the tests that caught them
    python tools/mutate.py --select "not exhaustive"             the same with the tests of one tier (pytest's -m)
    python tools/mutate.py --given tools/convention_faults.yaml  faults of a list, with the tests that it names

The faults (`mutations.py`) are drawn from core, the runtime, the algorithms of the toolkit and the models. Each is
planted in a copy of the tree; tests run until the first one fails, and that one has to pass without the fault, or it
does not count.

With a map these are the tests that run the line: first those of the file that mirrors the module, then the quickest.
Without one, and for a line that runs at import, they are whole test files by the import graph, nearest first. A line
that no test of the map runs may still run in a process that a test starts: then only files that start processes are
tried. What follows `record FILE` goes to pytest; a further recording of the same tree adds to the map.
"""

from __future__ import annotations

import argparse
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import psutil
import yaml

from import_graph import ImportGraph
from line_coverage import LineMap, combine_parts, seconds_file
from mutations import Mutation, draw_mutations, place_given

ROOT = Path(__file__).parents[1]
FOLDERS = tuple(f"src/vla_rl/{name}" for name in ("core", "runtime", "toolkit/algorithms", "plugins/models"))
QUICK_S = 30.0
"""Tests that follow those of the mirroring file run in a separate process while they last no longer than this: the
files of the others need not be imported for a fault that these catch."""
BATCH_FILES = 8
"""Test files per process, where whole files are run."""
PROCESS_STARTERS = ("mark.ray", "subprocess", "multiprocessing", "processes", "whole_runs")
"""Words that identify a test file that starts processes."""
PASSED, NONE_SELECTED = 0, 5
"""Exit codes of pytest."""


@dataclass(frozen=True)
class Outcome:
    """What the tests said to a fault."""

    kind: str
    """caught, survived, not executed or out of time."""
    test: str = ""
    """The test that caught it, or that ran when the time was over."""
    tests_run: int = 0

    def describe(self) -> str:
        """Return the cell of the table."""
        if self.kind == "caught":
            return f"caught by `{escape_cell(self.test)}`"
        if self.kind == "survived":
            return f"**survived** {self.tests_run} tests"
        if self.kind == "not executed":
            return f"**no test is known to execute it**; {self.tests_run} that start processes pass"
        return f"**out of time** after {self.tests_run} tests, in `{escape_cell(self.test)}`"


@dataclass(frozen=True)
class TestRun:
    """Result of one pytest process."""

    __test__ = False

    failed: str
    """First test that failed, or file that could not be imported; "" if none."""
    started: tuple[str, ...]
    timed_out: bool


class TreeCopy:
    """A copy of the repository's files, as they are now, in which one fault at a time is planted."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.folder = folder
        self._times = count(int(time.time()))
        listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        files = subprocess.run(listing, cwd=root, capture_output=True, text=True, check=True).stdout
        for name in filter(None, files.split("\0")):
            if (root / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, folder / name)

    @contextmanager
    def plant_fault(self, mutation: Mutation) -> Iterator[None]:
        """Mutate a file inside of the context."""
        file = self.folder / mutation.file
        text = file.read_text("utf-8")
        self._write_source(file, mutation.apply_to(text))
        try:
            yield
        finally:
            self._write_source(file, text)

    def _write_source(self, file: Path, text: str) -> None:
        file.write_text(text, "utf-8")
        seconds = next(self._times)  # Python tells by size and second of change whether compiled code is up to date
        os.utime(file, (seconds, seconds))

    def run_tests(self, tests: Sequence[str], arguments: Sequence[str], timeout_s: float) -> TestRun:
        """Run tests (node ids, or files for all of theirs) in this order, until one fails or the time is over."""
        files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
        with tempfile.TemporaryDirectory() as folder:
            progress, order = Path(folder, "progress"), Path(folder, "order")
            order.write_text("\n".join(tests), "utf-8")
            plugin = ["-p", "line_coverage", "--only-tests", str(order), "--progress", str(progress)]
            command = [
                sys.executable,
                "-m",
                "pytest",
                "-x",
                "-q",
                "-p",
                "no:cacheprovider",
                *plugin,
                *arguments,
                *files,
            ]
            exit_code = run_command(command, self.folder, timeout_s)
            lines = progress.read_text("utf-8").splitlines() if progress.exists() else []
        started = tuple(line.removeprefix("run ") for line in lines if line.startswith("run "))
        failed = [line.removeprefix("fail ") for line in lines if line.startswith("fail ")]
        if not failed and exit_code not in (
            None,
            PASSED,
            NONE_SELECTED,
        ):  # the interpreter died, or pytest did not start
            failed = [*started[-1:], files[0]]
        return TestRun(failed[0] if failed else "", started, timed_out=exit_code is None)


def set_environment(tree: Path) -> dict[str, str]:
    """Return the environment in which Python takes the packages and tools of a tree."""
    paths = filter(None, [f"{tree}/src", f"{tree}/tools", os.environ.get("PYTHONPATH", "")])
    return {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def run_command(command: Sequence[str], tree: Path, timeout_s: float) -> int | None:
    """Run a command in a tree; return its exit code, or None if it took too long and was killed with its children."""
    process = subprocess.Popen(
        command, cwd=tree, env=set_environment(tree), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        return process.wait(max(timeout_s, 0.0))
    except subprocess.TimeoutExpired:
        parent = psutil.Process(process.pid)
        for running in (*parent.children(recursive=True), parent):
            with suppress(psutil.NoSuchProcess):
                running.kill()
        process.wait()
        return None


class FaultJudge:
    """Chooses the tests for a fault and runs them."""

    def __init__(self, graph: ImportGraph, line_map: LineMap | None, select: str, timeout_s: float) -> None:
        self._graph = graph
        self._map = line_map
        self._arguments = ["-m", select] if select else []
        self._timeout_s = timeout_s
        self._passes_alone: dict[str, bool] = {}
        self._lock = threading.Lock()

    def choose_tests(self, mutation: Mutation) -> tuple[list[list[str]], bool]:
        """Return batches of tests, each for one pytest process, and whether any is known to execute the line.

        The first ones are the likeliest to notice.
        """
        if mutation.tests:
            return [list(mutation.tests)], True
        mirrors = self._graph.find_mirrors(mutation.file)
        is_measured = self._map is not None and mutation.in_function
        if is_measured:
            tests = self._map.find_tests(mutation.file, *mutation.span)
            if tests:
                return self._split_tests(tests, mirrors), True
        files = list(self._graph.reach_tests([mutation.file], reading=False))
        if is_measured:
            files = [file for file in files if self._starts_processes(file)]
        nearest = [file for file in files if file in mirrors]
        further = [file for file in files if file not in mirrors]
        batches = [further[start : start + BATCH_FILES] for start in range(0, len(further), BATCH_FILES)]
        return [nearest, *batches] if nearest else batches, not is_measured

    def _split_tests(self, tests: Sequence[str], mirrors: Sequence[str]) -> list[list[str]]:
        mirroring = [test for test in tests if test.partition("::")[0] in mirrors]
        quick: list[str] = []
        slow: list[str] = []
        seconds = 0.0
        for test in tests:
            if test not in mirroring:
                seconds += self._map.seconds.get(test, 0.0)
                (quick if seconds <= QUICK_S else slow).append(test)
        return [batch for batch in (mirroring, quick, slow) if batch]

    def _starts_processes(self, file: str) -> bool:
        text = file + (self._graph.root / file).read_text("utf-8")
        return any(word in text for word in PROCESS_STARTERS)

    def judge_fault(self, tree: TreeCopy, mutation: Mutation) -> Outcome:
        """Run the tests for a fault until one fails with it and passes without it."""
        deadline = time.monotonic() + self._timeout_s
        tests_run: set[str] = set()
        batches, is_executed = self.choose_tests(mutation)
        for batch in batches:
            rest = list(batch)
            while rest:
                deselected = [f"--deselect={test}" for test, passes in self._passes_alone.items() if not passes]
                with tree.plant_fault(mutation):
                    run = tree.run_tests(rest, [*self._arguments, *deselected], deadline - time.monotonic())
                tests_run.update(run.started)
                if run.timed_out:
                    return Outcome("out of time", run.started[-1] if run.started else rest[0], len(tests_run))
                if not run.failed:
                    break
                if self._passes_without(tree, run.failed):
                    return Outcome("caught", run.failed, len(tests_run))
                rest = [test for test in rest if test not in (*run.started, run.failed)]
        return Outcome("survived" if is_executed else "not executed", tests_run=len(tests_run))

    def _passes_without(self, tree: TreeCopy, test: str) -> bool:
        """Return whether a test passes in the tree as it is; each is tried once."""
        with self._lock:
            known = self._passes_alone.get(test)
        if known is None:
            run = tree.run_tests([test], self._arguments, self._timeout_s)
            known = not run.failed and not run.timed_out
            with self._lock:
                self._passes_alone = {**self._passes_alone, test: known}
        return known


def judge_all(root: Path, mutations: Sequence[Mutation], judge: FaultJudge, jobs: int) -> list[Outcome]:
    """Judge faults in `jobs` copies of the tree at a time; say on stderr how each turned out."""
    with tempfile.TemporaryDirectory(prefix="mutate-") as made:
        trees: queue.SimpleQueue[TreeCopy] = queue.SimpleQueue()
        for job in range(jobs):
            folder = Path(made, str(job))
            folder.mkdir()
            trees.put(TreeCopy(root, folder))

        def judge_one(mutation: Mutation) -> Outcome:
            tree = trees.get()
            begin = time.monotonic()
            try:
                outcome = judge.judge_fault(tree, mutation)
            finally:
                trees.put(tree)
            place = f"{mutation.file}:{mutation.line}"
            print(f"{place}: {outcome.describe()} ({time.monotonic() - begin:.0f} s)", file=sys.stderr, flush=True)
            return outcome

        with ThreadPoolExecutor(jobs) as pool:
            return list(pool.map(judge_one, mutations))


def escape_cell(text: str) -> str:
    """Return text that can stand in a cell of a Markdown table."""
    return text.replace("|", "\\|").replace("`", "'")


def write_table(texts: dict[str, str], mutations: Sequence[Mutation], outcomes: Sequence[Outcome]) -> str:
    """Return the report in Markdown: a row per fault, totals, and the diff of each fault that was not caught."""
    lines = ["| line | kind | before | after | outcome |", "| --- | --- | --- | --- | --- |"]
    for mutation, outcome in zip(mutations, outcomes, strict=True):
        before, after = (f"`{escape_cell(line)}`" for line in mutation.show_lines(texts[mutation.file]))
        place = f"{mutation.file.removeprefix('src/vla_rl/')}:{mutation.line}"
        lines.append(f"| {place} | {mutation.kind} | {before} | {after} | {outcome.describe()} |")
    totals = Counter(outcome.kind for outcome in outcomes)
    counts = ", ".join(f"{number} {kind}" for kind, number in totals.most_common())
    lines += ["", f"Faults: {len(mutations)}, of which {counts}"]
    for mutation, outcome in zip(mutations, outcomes, strict=True):
        if outcome.kind != "caught":
            lines += [
                "",
                f"{outcome.describe()}:",
                "",
                "```diff",
                mutation.show_diff(texts[mutation.file]).rstrip(),
                "```",
            ]
    return "\n".join(lines)


def list_mutations(texts: dict[str, str], mutations: Sequence[Mutation]) -> str:
    lines = []
    for mutation in mutations:
        before, after = mutation.show_lines(texts[mutation.file])
        lines.append(f"{mutation.file}:{mutation.line}: {mutation.kind}\n  - {before}\n  + {after}")
    return "\n".join(lines)


def record_lines(file: Path, arguments: Sequence[str]) -> int:
    """Run pytest and add to the map in `file`; return pytest's exit code."""
    file.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pytest", "-p", "line_coverage", "--record-lines", str(file.resolve()), *arguments]
    result = subprocess.run(command, cwd=ROOT, env=set_environment(ROOT), check=False)
    combine_parts(ROOT, file.resolve())
    return result.returncode


def read_sources(root: Path, paths: Sequence[str]) -> dict[str, str]:
    """Return the text of the Python files that are, or are under, these paths from the root."""
    files: list[Path] = []
    for path in paths:
        matching = [root / path] if path.endswith(".py") else sorted((root / path).rglob("*.py"))
        if not matching or not matching[0].is_file():
            sys.exit(f"mutate: there is no Python file under {path}; paths are given from {root}")
        files += matching
    return {file.relative_to(root).as_posix(): file.read_text("utf-8") for file in files}


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=40, help="faults to draw (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="what they are drawn with (default: %(default)s)")
    parser.add_argument("--given", type=Path, metavar="FILE", help="a list of faults to plant instead (YAML)")
    parser.add_argument("--under", nargs="+", default=FOLDERS, metavar="PATH", help="files and folders to draw from")
    parser.add_argument("--list", action="store_true", help="print the faults, run nothing")
    parser.add_argument("--coverage", type=Path, metavar="FILE", help="the map that `record` made of this tree")
    parser.add_argument("--select", default="", metavar="MARKS", help="pytest's -m, as in 'not exhaustive'")
    parser.add_argument("--jobs", type=int, default=1, help="copies of the tree at a time (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for each fault (default: %(default)s)")
    return parser.parse_args()


def main() -> None:
    if sys.argv[1:2] == ["record"]:
        if len(sys.argv) < 3 or sys.argv[2].startswith("-"):
            sys.exit("mutate: record needs the file of the map, as in: python tools/mutate.py record build/lines -n 2")
        sys.exit(record_lines(Path(sys.argv[2]), sys.argv[3:]))
    options = read_options()
    if options.coverage is not None and not seconds_file(options.coverage).is_file():
        sys.exit(
            f"mutate: {options.coverage} is not a map; make it with: python tools/mutate.py record {options.coverage}"
        )
    if options.given is None:
        texts = read_sources(ROOT, options.under)
        mutations = draw_mutations(texts, options.number, options.seed)
    else:
        entries = yaml.safe_load(options.given.read_text("utf-8"))
        texts = read_sources(ROOT, sorted({entry["file"] for entry in entries}))
        mutations = place_given(entries, texts)
    if options.list:
        print(list_mutations(texts, mutations))
        return
    line_map = None if options.coverage is None else LineMap(options.coverage)
    judge = FaultJudge(ImportGraph(ROOT), line_map, options.select, options.timeout)
    print(write_table(texts, mutations, judge_all(ROOT, mutations, judge, options.jobs)))


if __name__ == "__main__":
    main()
