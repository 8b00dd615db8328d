"""What benchmarks share: their command line, seconds side by side, a listener of runs, and memory."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from vla_rl import hookimpl

Figures = dict[str, float]
_listeners: list[Callable[[Any, int, Figures], None]] = []


def command_line(description: str | None, parts: Sequence[str], metavar: str) -> argparse.ArgumentParser:
    """Return the parser of a benchmark whose parts (stages, cases, sections) can be chosen, with `only` and `json`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(parts), default=list(parts), metavar=metavar)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser


def write_json(figures: Any, file: Path | None) -> None:
    """Write the figures to the file of `--json`, if any."""
    if file is not None:
        file.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


@hookimpl
def on_update_end(run: Any, step: int, metrics: dict[str, float]) -> None:
    for listener in _listeners:
        listener(run, step, metrics)


@contextmanager
def listen(listener: Callable[[Any, int, Figures], None]) -> Iterator[None]:
    """Context in which a run in this process reports its steps, where its spec has `plugins: [measuring]`."""
    _listeners.append(listener)
    yield
    _listeners.clear()


def seconds(work: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def apart(work: Callable[..., Any], *given: Any) -> Any:
    """In a process that has nothing else in its memory."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *given).result()


def interleaved(works: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each, in turn, so that whatever else the machine does meets all of them."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            times[name].append(seconds(work))
    return times


def ratio(times: dict[str, list[float]], slow: str, fast: str) -> float:
    """How many times as fast: median over rounds."""
    return median(a / b for a, b in zip(times[slow], times[fast], strict=True))


def proportional_mib(pids: Iterable[int]) -> float:
    """Memory of processes; what several of them share counts once."""
    return sum(psutil.Process(pid).memory_full_info().pss for pid in set(pids)) / 2**20


def all_pids() -> list[int]:
    """This process, the fork server and the envs."""
    return [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]
