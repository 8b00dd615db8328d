"""Python programs in processes that are forked from one that has imported torch and vla_rl already.

A test that starts `python -m vla_rl.cli.main ...` spends most of its time on imports. `ForkServer` starts one
interpreter, which imports them once (`PRELOADED`) and then forks for every program; this file is also the script that
this interpreter runs. A program has its own arguments, environment, folder, streams, `sys.path` and `__main__`, default
signal handlers, and ends as any interpreter does: with `atexit`, a traceback, or by a signal.

Two differences from a separate interpreter: modules that are imported already do not read the environment again, and
all programs hash texts alike. Tests of imports, of hashes and of the start of an interpreter start a real one.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, Self

PRELOADED = (
    "packaging.requirements",
    "pydantic.type_adapter",
    "safetensors.torch",
    "torch._dynamo",
    "typer.main",
    "vla_rl.cli.inputs",
    "vla_rl.plugins.algorithms.grpo.impl",
    "vla_rl.plugins.engines.torch.engine",
    "vla_rl.plugins.hooks.console.screen",
    "vla_rl.plugins.hooks.jsonl.writer",
    "vla_rl.plugins.placement.fixed.impl",
    "vla_rl.plugins.trainers.behaviour_cloning.impl",
    "vla_rl.plugins.trainers.policy_gradient.impl",
    "vla_rl.runtime.gpu_memory.checks",
    "vla_rl.runtime.start",
    "vla_rl.testing.linear",
    "vla_rl.testing.scripted",
    "vla_rl.testing.slot_placement",
    "vla_rl.toolkit.envs.env_process",
)
"""Modules that the server imports: what a short run with the test doubles imports. Not those that read, when they are
imported, what a test sets in the environment: `huggingface_hub` and what imports it, `mujoco`. Nor `ray`, which starts a
thread, nor what `-m` runs, `vla_rl.cli.main`: `runpy` would warn of it."""

ENDED = "the fork server of the tests has ended; its error output says why"

Stream = int | IO[Any] | None
"""A standard stream, as `subprocess.Popen` takes it: None is the caller's."""


class ForkServer:
    """The interpreter that forks. It ends when it is closed, or when this process ends in any way; the processes that it
    has forked then continue, as with `subprocess`."""

    def __init__(self, preloaded: Sequence[str] = PRELOADED) -> None:
        self._requests, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), *preloaded],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=os.environ | {"OMP_NUM_THREADS": "1"},  # with more, importing NumPy starts threads
            )

    def start_python(
        self,
        *arguments: str | Path,
        stdin: Stream = None,
        stdout: Stream = None,
        stderr: Stream = None,
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
        start_new_session: bool = False,
    ) -> ForkedProcess:
        """Start `python ARGUMENTS`, where the first of these is `-m`, `-c` or the path of a script. The other parameters
        are those of `subprocess.Popen`. Pipes are of text."""
        environment = dict(os.environ if env is None else env)
        connection, theirs = Pipe()
        try:
            with ExitStack() as given, theirs:
                ends, inherited = open_streams((stdin, stdout, stderr), given)
                socket.send_fds(self._requests, [b"."], [theirs.fileno(), *inherited])
            words = [os.fspath(argument) for argument in arguments]
            connection.send((words, str(cwd or Path.cwd()), environment, start_new_session))
        except OSError as exc:
            raise RuntimeError(ENDED) from exc
        return ForkedProcess(connection, arguments, ends)

    def run_python(
        self,
        *arguments: str | Path,
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        check: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Run `python ARGUMENTS` and return its status and its output, as `subprocess.run` does."""
        pipe = subprocess.PIPE
        with self.start_python(*arguments, stdout=pipe, stderr=pipe, cwd=cwd, env=env) as process:
            try:
                output, errors = process.communicate(timeout)
            except BaseException:
                process.kill()
                raise
        done = subprocess.CompletedProcess(process.args, process.wait(), output, errors)
        if check:
            done.check_returncode()
        return done

    def close(self) -> None:
        self._requests.close()
        self._process.wait()


class ForkedProcess:
    """A process that the server has forked, with the part of `subprocess.Popen`'s interface that tests use. Its parent is
    the server, which reaps it at once: `psutil` knows no zombie of it."""

    def __init__(self, connection: Connection, arguments: Sequence[Any], ends: Sequence[IO[str] | None]) -> None:
        self.args = ["python", *arguments]
        self.stdin, self.stdout, self.stderr = ends
        self.returncode: int | None = None
        self._connection = connection
        self.pid = self._receive("pid")

    def _receive(self, what: str) -> int:
        try:
            kind, number = self._connection.recv()
        except (EOFError, ConnectionError) as exc:
            raise RuntimeError(ENDED) from exc
        assert kind == what, f"the process ended with {number} before its program began"
        return number

    def poll(self) -> int | None:
        """Return the exit status, -N after signal N; None while the process runs."""
        if self.returncode is None and self._connection.poll():
            self.returncode = self._receive("status")
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit status; `subprocess.TimeoutExpired` after this many seconds."""
        if self.returncode is None and not self._connection.poll(timeout):
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        status = self.poll()
        assert status is not None
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has ended, and the status is on its way
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str | None, str | None]:
        """Read stdout and stderr to their ends, wait for the process, and return both texts."""
        if self.stdin is not None:
            self.stdin.close()
        texts: dict[IO[str], str] = {}
        streams = [stream for stream in (self.stdout, self.stderr) if stream is not None]

        def read_stream(stream: IO[str]) -> None:
            texts[stream] = stream.read()

        readers = [threading.Thread(target=read_stream, args=(stream,), daemon=True) for stream in streams]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(timeout)
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        self.wait(timeout)
        return texts.get(self.stdout), texts.get(self.stderr)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                stream.close()
        self.wait()


def open_streams(streams: Sequence[Stream], given: ExitStack) -> tuple[list[IO[str] | None], list[int]]:
    """Return our ends of pipes, and the descriptors that the process inherits. `given` closes what was opened for it."""
    ends: list[IO[str] | None] = []
    inherited: list[int] = []
    for number, stream in enumerate(streams):
        end = None
        if stream is None:
            descriptor = number
        elif stream == subprocess.STDOUT:
            descriptor = inherited[1]
        elif stream == subprocess.DEVNULL:
            descriptor = os.open(os.devnull, os.O_RDWR)
            given.callback(os.close, descriptor)
        elif stream == subprocess.PIPE:
            reading, writing = os.pipe()
            descriptor, own = (reading, writing) if number == 0 else (writing, reading)
            given.callback(os.close, descriptor)
            end = os.fdopen(own, "w" if number == 0 else "r", encoding="utf-8")
        else:
            descriptor = stream if isinstance(stream, int) else stream.fileno()
        ends.append(end)
        inherited.append(descriptor)
    return ends, inherited


# -------------------------------------------------------------------------------------------------------- the server


def import_modules(modules: Sequence[str]) -> None:
    """Import modules. Raise RuntimeError where that starts threads, since a fork copies none of them."""
    for name in modules:
        importlib.import_module(name)
    tasks = Path("/proc/self/task")
    threads = len(list(tasks.iterdir())) if tasks.exists() else threading.active_count()
    if threads > 1:
        names = ", ".join(thread.name for thread in threading.enumerate())
        raise RuntimeError(f"importing {', '.join(modules)} starts threads ({threads}; of Python: {names})")
    gc.collect()
    gc.freeze()  # else a collection in a child copies the pages of everything that was imported


def serve_requests(requests: socket.socket) -> tuple[Connection, list[int]]:
    """Fork for every request, and report the exit status of every child. Return in children only: the connection to the
    caller, and the child's standard streams."""
    children: dict[int, Connection] = {}
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)  # a handler, so that the descriptor is written to
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    while True:
        ready, _, _ = select.select([requests, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            report_ends(children)
        if requests in ready:
            request, descriptors, _, _ = socket.recv_fds(requests, 1, 4)
            if not request:
                raise SystemExit  # the tests have ended
            connection = Connection(descriptors[0])
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                for descriptor in (woken, wake):
                    os.close(descriptor)
                for other in children.values():
                    other.close()
                return connection, descriptors[1:]
            for descriptor in descriptors[1:]:
                os.close(descriptor)
            children[pid] = connection


def report_ends(children: dict[int, Connection]) -> None:
    """Tell the callers of children that have ended, and forget these."""
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with children.pop(pid) as connection, suppress(OSError):  # the caller no longer asks
            connection.send(("status", os.waitstatus_to_exitcode(status)))


def become_program(connection: Connection, streams: Sequence[int], installed: Sequence[str]) -> list[str]:
    """Give this child what a new interpreter would have, tell its caller the pid, and return the program's arguments.

    Args:
        streams: descriptors for stdin, stdout and stderr.
        installed: `sys.path` of the server without PYTHONPATH.
    """
    arguments, folder, environment, start_new_session = connection.recv()
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        os.dup2(streams[number], number)
        os.close(streams[number])
        before = getattr(sys, name)
        stream = os.fdopen(number, mode, encoding=before.encoding, errors=before.errors, closefd=False)
        stream.reconfigure(line_buffering=name == "stderr" or stream.isatty())
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGCHLD, signal.SIG_DFL)):
        signal.signal(number, handler)
    for number in IGNORED:
        signal.signal(number, signal.SIG_DFL)
    if start_new_session:
        os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    atexit.register(gc.unfreeze)  # else what triton holds lives to the end, and nanobind prints it as leaked
    tempfile.tempdir = None  # read from the environment when it is needed
    first = {"-m": folder, "-c": ""}.get(arguments[0], str(Path(arguments[0]).parent))
    sys.path[:] = [first, *dict.fromkeys([*python_path(), *installed])]  # `site` drops duplicates, too
    importlib.invalidate_caches()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    connection.send(("pid", os.getpid()))
    connection.close()
    return arguments


def python_path() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def run_program(arguments: list[str]) -> None:
    """Run what `python ARGUMENTS` runs, as `__main__`."""
    kind, *rest = arguments
    if kind == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(sys.modules["__main__"]))
    else:
        sys.argv = arguments
        runpy.run_path(kind, run_name="__main__")


IGNORED = (signal.SIGTERM, signal.SIGHUP)
"""Signals that the server leaves to its children, in addition to Ctrl-C: tests send them to all processes below."""


def main() -> None:
    for number in (signal.SIGINT, *IGNORED):
        signal.signal(number, signal.SIG_IGN)
    given = [str(Path(path).absolute()) for path in python_path()]  # as `sys.path` has them
    installed = [path for path in sys.path[1:] if path not in given]  # the first is the folder of this file
    sys.path[:] = [*given, *installed]
    descriptor, *modules = sys.argv[1:]
    import_modules(modules)
    with socket.socket(fileno=int(descriptor)) as requests:
        connection, streams = serve_requests(requests)
    arguments = become_program(connection, streams, installed)
    run_program(arguments)


if __name__ == "__main__":
    main()
