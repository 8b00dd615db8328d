"""Calls from a policy's worker to the simulators that it acts for.

Workers of one machine talk through a socket while a rollout is played, which takes a tenth of the time of a Ray call;
Ray carries the rest: calls to other machines, and the ends of those that fail.
"""

from __future__ import annotations

import os
import pickle
import select
import socket
import struct
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import Any

from attrs import define

from vla_rl.core.runtime.wire import here

LENGTH = struct.Struct("!Q")
END, FAILED = b"end", b"failed"
MIXED_POLL_S = 0.001
"""Between two looks at Ray where some simulators are on this machine and some are not."""


class Line:
    """One end of a stream socket between two workers; messages of bytes, in order."""

    def __init__(self, connection: socket.socket):
        self.connection = connection

    def fileno(self) -> int:
        return self.connection.fileno()

    def send(self, message: bytes) -> None:
        self.connection.sendall(LENGTH.pack(len(message)) + message)

    def receive(self) -> bytes:
        """Wait for the next message. Raises EOFError when the other end is gone."""
        return bytes(self._exactly(LENGTH.unpack(self._exactly(LENGTH.size))[0]))

    def close(self) -> None:
        self.connection.close()

    def _exactly(self, count: int) -> bytearray:
        data = bytearray(count)
        view, got = memoryview(data), 0
        while got < count:
            read = self.connection.recv_into(view[got:])
            if not read:
                raise EOFError("the other worker is gone")
            got += read
        return data


@define(eq=False)
class _Open:
    """A line that simulators answer."""

    line: Line
    ended: bool = False
    error: Exception | None = None

    def fileno(self) -> int:
        return self.line.fileno()


class Answering:
    """The simulators' end of the lines to the policies that act for them, by their workers."""

    def __init__(self) -> None:
        self.lines: dict[int, _Open] = {}

    def connect(self, policy: int, reader: Any, address: str) -> bool:
        """Open a line to a policy's worker, which is `here()` as `reader` says. -> False: on another machine."""
        if reader is None or reader != here():
            return False
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(address)
        self.lines[policy] = _Open(Line(connection))
        return True

    def serve(self, policy: int, call: Callable[..., Any]) -> None:
        """Answer what comes through any line until this policy orders the end of its own. What one of its calls raised
        is raised then; the policy has heard at once that it failed."""
        own = self.lines[policy]
        while not own.ended:
            for asking in select.select([o for o in self.lines.values() if not o.ended], [], [])[0]:
                self._answer(asking, call)
        own.ended = False
        error, own.error = own.error, None
        if error is not None:
            raise error

    def _answer(self, asking: _Open, call: Callable[..., Any]) -> None:
        try:
            order = asking.line.receive()
            if order == END:
                asking.ended = True
                asking.line.send(END)
            elif asking.error is None:
                asking.line.send(self._result(asking, order, call))
        except (EOFError, OSError) as gone:
            asking.ended, asking.error = True, gone

    def _result(self, asking: _Open, order: bytes, call: Callable[..., Any]) -> bytes:
        try:
            return pickle.dumps(call(*pickle.loads(order)), protocol=5)  # noqa: S301 - from our own workers
        except Exception as exc:
            asking.error = exc
            return FAILED


@define(eq=False)
class _Ticket:
    """A call through a line."""

    caller: Caller
    done: bool = False
    value: Any = None


class Caller:
    """The policy's end of a line: answers come in the order of the calls."""

    def __init__(self, line: Line, serving: Any, result_of: Callable[[Any], Any]):
        """`serving`: the reference to the other worker's `serve`."""
        self.line, self.serving, self.result_of = line, serving, result_of
        self.waiting: deque[_Ticket] = deque()
        self.over = False

    def fileno(self) -> int:
        return self.line.fileno()

    def call(self, *order: Any) -> _Ticket:
        ticket = _Ticket(self)
        try:
            self.line.send(pickle.dumps(order, protocol=5))
        except OSError:
            self.end()
            raise
        self.waiting.append(ticket)
        return ticket

    def receive(self) -> None:
        """Wait for the oldest answer. Raises what the call raised."""
        try:
            answer = self.line.receive()
        except (EOFError, OSError):
            self.end()
            raise
        if answer == FAILED:
            self.end()
        ticket = self.waiting.popleft()
        ticket.done, ticket.value = True, pickle.loads(answer)  # noqa: S301 - from our own workers

    def end(self) -> None:
        """Take leave, once. Answers that nobody waits for any more are dropped; raises what ended the other end."""
        if self.over:
            return
        self.over = True
        with suppress(EOFError, OSError):
            self.line.send(END)
            while self.line.receive() != END:
                pass
        self.result_of(self.serving)


class RayPeers:
    """Ray actors as another actor calls them; how long that takes is watched by the driver."""

    def __init__(self, own: int, actors: Mapping[int, Any]):
        """`own`: the worker that calls."""
        import ray

        self.ray, self.own, self.actors = ray, own, actors
        self.lines: dict[int, Line] = {}
        self.callers: dict[int, Caller] = {}

    def connect(self, lanes: Mapping[int, Sequence[int]]) -> None:
        """Open a line to each of them that is on this machine; `lanes`: those of each that the policy acts for."""
        with tempfile.TemporaryDirectory(prefix="vla-rl-") as folder:
            address = str(Path(folder, str(os.getpid())))
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
                door.bind(address)
                door.listen()
                for worker in self.actors:
                    if self.value_of(
                        self.call(worker, "worker", "open_line", self.own, lanes[worker], here(), address)
                    ):
                        self.lines[worker] = Line(door.accept()[0])

    @contextmanager
    def talking(self) -> Iterator[None]:
        """Calls go through the lines meanwhile."""
        self.callers = {
            worker: Caller(line, self.call(worker, "worker", "serve", self.own), self.value_of)
            for worker, line in self.lines.items()
        }
        callers = list(self.callers.values())
        try:
            yield
        except BaseException:
            for caller in callers:
                with suppress(Exception):  # the first error is the one to tell of
                    caller.end()
            raise
        finally:
            self.callers = {}
        for caller in callers:
            caller.end()

    def call(self, worker: int, role: str, method: str, *arguments: Any) -> Any:
        """-> a reference."""
        if worker in self.callers:
            return self.callers[worker].call(role, method, *arguments)
        return self.actors[worker].call.remote(pickle.dumps((role, method, arguments)))

    def value_of(self, reference: Any) -> Any:
        """Wait for a result; raises what the call raised, or what Ray says of a worker that died."""
        if isinstance(reference, _Ticket):
            while not reference.done:
                reference.caller.receive()
            return reference.value
        try:
            return self.ray.get(reference)
        except self.ray.exceptions.RayTaskError as exc:
            if isinstance(exc.cause, Exception):
                raise exc.cause from exc
            raise

    def ready(self, references: Sequence[Any], timeout: float | None) -> list[Any]:
        """Wait until at least one is there (or the timeout), -> those that are."""
        end = None if timeout is None else monotonic() + timeout
        calls = [reference for reference in references if not isinstance(reference, _Ticket)]
        while True:
            open_ones = {r.caller for r in references if isinstance(r, _Ticket) and not r.done}
            there: list[Any] = [r for r in references if isinstance(r, _Ticket) and r.done]
            if calls:
                there.extend(self.ray.wait(calls, num_returns=len(calls), timeout=0)[0])
            left = None if end is None else max(0.0, end - monotonic())
            if there or left == 0.0:
                return there
            if not open_ones:
                self.ray.wait(calls, num_returns=1, timeout=left)
                continue
            patience = min(MIXED_POLL_S, left or MIXED_POLL_S) if calls else left
            for caller in select.select(list(open_ones), [], [], patience)[0]:
                caller.receive()
