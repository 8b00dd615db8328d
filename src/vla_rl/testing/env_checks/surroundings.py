"""Does a simulator change its process: generators, processes, threads, files, settings?"""

from __future__ import annotations

import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import numpy as np
import psutil
from attrs import frozen

from vla_rl.testing.common.findings import Findings, LeftOut
from vla_rl.testing.common.generators import Ran, run_from, seeded_generators
from vla_rl.testing.env_checks.player import KEYED, Player
from vla_rl.testing.env_checks.repeats import pair_up
from vla_rl.testing.env_checks.traces import EnvTrace

RESETS = 6
"""Number of resets after which leftover resources are counted."""
OWN_GENERATOR = "make a separate generator: np.random.default_rng(seed); others draw from the global one too"
PYTHONS_OWN = ("forkserver", "resource_tracker", "semaphore_tracker")
"""Processes that multiprocessing starts once and keeps, by their command lines."""


def check_generators(player: Player) -> None:
    """Neither a reset nor a chunk seeds a generator that belongs to all: others would draw the same each time."""
    state = player.splits["train"][0].id
    script = player.make_script(state, "random", player.chunk)
    active = np.arange(len(player.env_ids)) == 0
    actions = np.tile(player.high, (len(player.env_ids), player.chunk, 1))
    actions[0] = script.actions

    def reset_one() -> Any:
        return player.reset_envs([0], [state], [script.seed])

    calls: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "reset": (lambda: None, reset_one),
        "chunk_step": (reset_one, lambda: player.step_envs(actions, active, True)),
    }
    for where, (before, call) in calls.items():
        runs = []
        for key in (1, 2):
            before()
            runs.append(run_from(key, call))
        _expect_left_alone(player, where, runs, "seeded, so that what others draw next is the same each time")


def _expect_left_alone(player: Player, where: str, runs: list[Ran], got: str) -> None:
    for name in seeded_generators(*runs[:2]):
        player.expect(False, where, f"the global generator of {name} left alone", got, OWN_GENERATOR)


# ------------------------------------------------------------------------------------------------- after `close`


@frozen
class Surroundings:
    """The state of the process around a simulator, before it is built and after it is closed."""

    children: frozenset[int]
    threads: frozenset[threading.Thread]
    settings: Mapping[str, str]

    @classmethod
    def capture_now(cls) -> Surroundings:
        return cls(frozenset(child_processes()), frozenset(threading.enumerate()), _process_settings())


def check_surroundings(f: Findings, before: Surroundings, started: Mapping[int, psutil.Process]) -> None:
    """After a simulator was closed.

    Args:
        started: processes that existed before it was closed.
    """
    new = [process for pid, process in started.items() if pid not in before.children]
    _, alive = psutil.wait_procs(new, timeout=2)
    running = [process for process in alive if _is_running(process)]
    got = ", ".join(f"{process.pid} ({_command_line(process)[:80]})" for process in running[:3])
    f.expect(not running, "close", "no process left", got, "end in `close` what you started")
    until = monotonic() + 1
    while (left := _new_threads(before)) and monotonic() < until:
        sleep(0.02)
    got = ", ".join(f"{thread.name!r}" for thread in left[:3])
    f.expect(not left, "close", "no thread left", got, "stop and join in `close` what you started")
    for name, value in _process_settings().items():
        was = before.settings.get(name, value)
        f.expect(was == value, name, was, value, "put back what you change for the whole process")


def _new_threads(before: Surroundings) -> list[threading.Thread]:
    exempt = ("tqdm", "ray", "IPython", "debugpy")  # which start some for good, when they are first used
    new = [thread for thread in threading.enumerate() if thread not in before.threads]
    return [thread for thread in new if type(thread).__module__.partition(".")[0] not in exempt]


def _process_settings() -> dict[str, str]:
    """Return the settings of the whole process that other code relies on."""
    try:
        folder = str(Path.cwd())
    except FileNotFoundError:
        folder = "one that is gone"
    settings = {"working folder": folder, "np.geterr()": str(np.geterr())}
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        settings["torch.get_default_dtype()"] = str(torch.get_default_dtype())
        settings["torch.is_grad_enabled()"] = str(torch.is_grad_enabled())
    return settings


def child_processes() -> dict[int, psutil.Process]:
    """The processes that this one started, and those that these started; without those that Python keeps."""
    process = psutil.Process()
    return {p.pid: p for p in process.children(recursive=True) if not _is_pythons_own(p, process.pid)}


def _is_pythons_own(process: psutil.Process, parent: int) -> bool:
    try:
        return process.ppid() == parent and any(name in _command_line(process) for name in PYTHONS_OWN)
    except psutil.Error:
        return False


def _command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()) or process.name()
    except psutil.Error:
        return ""


def _is_running(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


# --------------------------------------------------------------------------------------------- what is left behind


def check_left_behind(player: Player) -> None:
    """Check that episodes and closed simulators leave no open files, processes, threads or temporary files; and that a
    simulator that is built again plays the same episode."""
    state, another = player.splits["train"][0].id, player.options.make_env
    if RESETS * player.seconds_per_call("reset") > 0.02 * player.seconds:
        raise LeftOut("for want of time")

    def run_episode() -> dict[int, EnvTrace]:
        return player.roll_out({0: player.make_script(state, "random", player.chunk)})

    with _own_temporary_folder() as folder:
        first = run_episode()
        counts = [_count_resources(folder)]
        for _ in range(2):
            for _ in range(RESETS // 2):
                run_episode()
            counts.append(_count_resources(folder))
        _report_growth(player, counts, "after each episode", "close in `reset` what the last episode opened")
        if another is None or player.started_in > 0.02 * player.seconds:
            return
        counts, builds, rebuilt = [], [], []
        for key in (1, 2, 3):
            builds.append(run_from(key, another))
            with player.other_env(builds[-1].result):
                rebuilt += pair_up(first, run_episode())
            counts.append(_count_resources(folder))
    _report_growth(player, counts, "after each simulator that was closed", "free in `close` what you opened")
    if player.record.repeated:
        expected = "the same episode in a simulator that is built again"
        player.expect_same(rebuilt, expected, f"{KEYED} while it is built")
    _expect_left_alone(player, "build", builds, "seeded when the simulator is built")


def _count_resources(folder: Path) -> dict[str, int]:
    processes = [psutil.Process(), *child_processes().values()]
    files = 0
    for process in processes:
        try:
            files += process.num_fds()
        except (psutil.Error, AttributeError):
            continue
    return {
        "open files": files,
        "processes": len(processes),
        "threads": len(threading.enumerate()),
        "temporary files or folders": len(list(folder.iterdir())),
    }


def _report_growth(player: Player, counts: list[dict[str, int]], when: str, remedy: str) -> None:
    for what in counts[0]:
        rising = [after[what] - before[what] for before, after in pairwise(counts)]
        got = f"{counts[0][what]}, then {', '.join(str(later[what]) for later in counts[1:])}"
        player.expect(not min(rising) > 0, "close", f"as many {what} {when}", got, remedy)


@contextmanager
def _own_temporary_folder() -> Generator[Path]:
    original = tempfile.tempdir
    folder = Path(tempfile.mkdtemp(prefix="check_env_"))
    tempfile.tempdir = str(folder)
    try:
        yield folder
    finally:
        tempfile.tempdir = original
        shutil.rmtree(folder, ignore_errors=True)
