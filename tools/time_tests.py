"""Where the time of the tests goes: the slowest files and fixtures, and what starts Ray, interpreters and simulators.

pytest loads this file as a plugin and each of its processes writes a line per test; run as a script, it prints the
tables in Markdown from those lines. `make test-times` does both.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(os.environ.get("TEST_TIMES", "build/test-times"))

HEADER = """# Test times

What `make test` spends its time on, as `make test-times` measured it: the files with the most seconds, then fixtures.
Processor seconds are those of pytest and of processes that it has waited for, so Ray's workers and what the fork server
runs are missing in them. A Ray start is three interpreters and two other processes."""

started: Counter[str] = Counter()
"""What the current test has started, by kind."""


def count_start(event: str, arguments: tuple[Any, ...]) -> None:
    """Count processes as Python's audit events name them."""
    if event == "subprocess.Popen":
        executable, argv = str(arguments[0]), [os.fsdecode(argument) for argument in arguments[1]]
        command = argv[0] if argv else executable
        if command.endswith("gcs_server"):
            started["ray"] += 1
        elif "python" in Path(command).name or command.endswith("vla-rl"):
            started["interpreter"] += 1
        else:
            started["process"] += 1
    elif event == "os.fork":
        started["fork"] += 1


def measure_processor_seconds() -> float:
    """Return user and system time of this process and of the children it has waited for."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def pytest_configure() -> None:
    import multiprocessing.util

    sys.addaudithook(count_start)
    spawn = multiprocessing.util.spawnv_passfds

    def counted(*arguments: Any) -> int:
        started["interpreter"] += 1
        return spawn(*arguments)

    multiprocessing.util.spawnv_passfds = counted


def write_line(**line: Any) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / f"{os.environ.get('PYTEST_XDIST_WORKER', 'main')}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    started.clear()
    wall, processor = time.perf_counter(), measure_processor_seconds()
    result = yield
    write_line(
        test=item.nodeid,
        wall=time.perf_counter() - wall,
        processor=measure_processor_seconds() - processor,
        marks=sorted({mark.name for mark in item.iter_markers()}),
        started=dict(started),
    )
    return result


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any, request: Any) -> Iterator[None]:
    wall = time.perf_counter()
    result = yield
    if (seconds := time.perf_counter() - wall) > 0.05:
        write_line(fixture=f"{fixturedef.baseid}::{fixturedef.argname}", wall=seconds)
    return result


def print_table(head: list[str], rows: list[list[Any]]) -> None:
    print("\n| " + " | ".join(head) + " |\n|" + " --- |" * len(head))
    for row in rows:
        print("| " + " | ".join(str(cell) for cell in row) + " |")


def main(count: int = 40) -> None:
    lines = [json.loads(line) for file in sorted(FOLDER.glob("*.jsonl")) for line in file.read_text().splitlines()]
    tests = [line for line in lines if "test" in line]
    files: dict[str, Counter[str]] = defaultdict(Counter)
    total: Counter[str] = Counter()
    for line in tests:
        numbers = {"cases": 1, "wall": line["wall"], "processor": line["processor"], **line["started"]}
        files[line["test"].partition("::")[0]].update(numbers)
        total.update(numbers)
    fixtures: dict[str, Counter[str]] = defaultdict(Counter)
    for line in lines:
        if "fixture" in line:
            fixtures[line["fixture"]].update({"times": 1, "wall": line["wall"]})
    kinds = ["ray", "interpreter", "fork", "process"]

    def show(numbers: Counter[str]) -> list[Any]:
        return [numbers["cases"], f"{numbers['wall']:.1f}", f"{numbers['processor']:.1f}", *(numbers[k] for k in kinds)]

    print(HEADER)
    head = ["cases", "seconds", "processor seconds", "Ray starts", "interpreters", "forks", "other processes"]
    slowest = sorted(files.items(), key=lambda pair: -pair[1]["wall"])[:count]
    print_table(["file", *head], [["all", *show(total)], *([name, *show(numbers)] for name, numbers in slowest)])
    slowest = sorted(fixtures.items(), key=lambda pair: -pair[1]["wall"])[: count // 2]
    print_table(["fixture", "times", "seconds"], [[name, n["times"], f"{n['wall']:.1f}"] for name, n in slowest])


if __name__ == "__main__":
    main()
