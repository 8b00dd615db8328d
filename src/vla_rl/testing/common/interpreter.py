"""A second interpreter, whose strings have other hashes. It imports torch once, and answers each call in a fork."""

from __future__ import annotations

import atexit
import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any


@cache
def start_interpreter() -> Connection:
    """Start the interpreter where there is none yet. It imports what it needs meanwhile, and ends with this one."""
    hashes = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    environment = {**os.environ, "PYTHONHASHSEED": hashes, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ours, theirs = Pipe()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    atexit.register(process.wait)
    atexit.register(ours.close)  # called first
    return ours


def call_elsewhere(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function returns in the other interpreter. Raises RuntimeError with what it raises there."""
    import cloudpickle

    connection = start_interpreter()
    try:
        connection.send((sys.path, cloudpickle.dumps((function, arguments))))
        worked, answer = connection.recv()
    except (OSError, EOFError) as exc:
        start_interpreter.cache_clear()
        raise RuntimeError("the other interpreter has ended") from exc
    if not worked:
        raise RuntimeError(answer)
    return answer


def _answer_calls(connection: Connection) -> None:
    """Answer calls until the other end closes, each in a fork: code that has changed is imported as it is then."""
    import cloudpickle

    importlib.import_module("vla_rl.testing.trainers")
    while True:
        try:
            path, call = connection.recv()
        except EOFError:
            return
        if pid := os.fork():
            if os.waitpid(pid, 0)[1]:
                connection.send((False, "the process has ended"))
            continue
        sys.path[:] = path
        try:
            function, arguments = cloudpickle.loads(call)
            connection.send((True, function(*arguments)))
        except Exception as exc:
            connection.send((False, f"{type(exc).__name__}: {exc}"))
        os._exit(0)


if __name__ == "__main__":
    _answer_calls(Connection(int(sys.argv[1])))
