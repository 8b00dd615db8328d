"""The tests that run a line: a pytest plugin that records them, and the map that it makes.

    python -m pytest -p line_coverage --record-lines FILE      with tools/ on PYTHONPATH, as `mutate.py record` does

Each process that runs tests measures them with the package `coverage`, one context per test and phase, and saves its
part as FILE.*; `combine_parts` adds the parts to FILE, a data file of `coverage`. How long each test took is in
FILE-seconds. Processes that tests start (workers of Ray, envs) are not measured.

The plugin also runs a list of tests in the order of the list (`--only-tests FILE`), and says while pytest runs which
test begins and which fails (`--progress FILE`), which is known then even if pytest is stopped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SETUP = "|setup"
"""End of the context of a test's setup: fixtures that several tests of a file share run in the first one's."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("lines")
    group.addoption("--record-lines", metavar="FILE", help="record which lines of src each test runs")
    group.addoption("--only-tests", metavar="FILE", help="run the tests of this list alone, in its order")
    group.addoption("--progress", metavar="FILE", help="append each test that begins and each that fails to this file")


def pytest_configure(config: pytest.Config) -> None:
    has_workers = bool(config.getoption("numprocesses", None)) and not hasattr(config, "workerinput")
    if config.getoption("record_lines") and not has_workers:
        config.pluginmanager.register(LineRecorder(config.rootpath, Path(config.getoption("record_lines"))))
    if config.getoption("only_tests"):
        config.pluginmanager.register(TestOrder(Path(config.getoption("only_tests")).read_text("utf-8").splitlines()))
    if config.getoption("progress"):
        config.pluginmanager.register(ProgressWriter(Path(config.getoption("progress"))))


class LineRecorder:
    """Measures the lines of src/ that each test runs, in this process and its threads."""

    def __init__(self, root: Path, file: Path) -> None:
        self._coverage = measure_lines(root, file, part=True)
        self._seconds_file = seconds_file(file)
        self._seconds: Counter[str] = Counter()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self) -> Iterator[Any]:
        self._coverage.start()
        result = yield
        self._coverage.stop()
        self._coverage.save()
        lines = [f"{test}\t{seconds:.3f}\n" for test, seconds in self._seconds.items()]
        with self._seconds_file.open("a", encoding="utf-8") as stream:
            stream.write("".join(lines))
        return result

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._coverage.switch_context(item.nodeid + SETUP)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> None:
        self._coverage.switch_context(item.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration


class TestOrder:
    """Keeps the tests of a list (node ids, or files for all of theirs), in the order of the list."""

    __test__ = False

    def __init__(self, tests: list[str]) -> None:
        self._position = {test: position for position, test in enumerate(tests)}

    def _find_position(self, item: pytest.Item) -> int | None:
        return self._position.get(item.nodeid, self._position.get(item.nodeid.partition("::")[0]))

    @pytest.hookimpl(trylast=True)  # after tests/conftest.py has sorted them
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        positions = {item: position for item in items if (position := self._find_position(item)) is not None}
        config.hook.pytest_deselected(items=[item for item in items if item not in positions])
        items[:] = sorted(positions, key=lambda item: positions[item])


class ProgressWriter:
    """Appends `run TEST` and `fail TEST` to a file; a test file that cannot be imported fails under its name."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def _append_line(self, line: str) -> None:
        with self._file.open("a", encoding="utf-8") as stream:
            stream.write(f"{line}\n")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._append_line(f"run {nodeid}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._append_line(f"fail {report.nodeid}")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._append_line(f"fail {report.nodeid}")


def measure_lines(root: Path, file: Path, part: bool) -> Any:
    """Return a `coverage.Coverage` of src/ with the data file `file`, or with a part of it for this process."""
    import coverage

    measured = coverage.Coverage(str(file), data_suffix=part, config_file=False, include=[f"{root / 'src'}/*"])
    measured.set_option("run:relative_files", True)  # so that the map holds for a copy of the tree
    return measured


def seconds_file(file: Path) -> Path:
    return file.with_name(f"{file.name}-seconds")  # FILE.* are parts of the map


def combine_parts(root: Path, file: Path) -> None:
    """Merge the parts that processes have saved into `file`, and delete them."""
    if not any(file.parent.glob(f"{file.name}.*")):
        return  # no test ran
    measured = measure_lines(root, file, part=False)
    if file.exists():
        measured.load()
    measured.combine([str(file.parent)])
    measured.save()


class LineMap:
    """The tests that run the lines of a file, and how long they take."""

    def __init__(self, file: Path) -> None:
        from coverage import CoverageData

        self._data = CoverageData(str(file))
        self._data.read()
        self.seconds: dict[str, float] = {}
        """Test -> seconds, setup and teardown included; of several recordings the last."""
        for line in seconds_file(file).read_text("utf-8").splitlines():
            test, _, seconds = line.rpartition("\t")
            self.seconds[test] = float(seconds)

    def find_tests(self, file: str, first: int, last: int) -> list[str]:
        """Return the tests that run one of the lines from `first` to `last`, quickest first.

        What the setup of one test runs may be a fixture that later tests of the same file share: these come last.
        """
        contexts = self._data.contexts_by_lineno(file)
        names = {name for line in range(first, last + 1) for name in contexts.get(line, ()) if name}
        executing = {name.removesuffix(SETUP) for name in names}
        files = {name.partition("::")[0] for name in names if name.endswith(SETUP)}
        sharing = {test for test in self.seconds if test.partition("::")[0] in files}
        return sorted(executing | sharing, key=lambda test: (test not in executing, self.seconds.get(test, 0.0), test))
