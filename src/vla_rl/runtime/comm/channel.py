"""Calls from a policy's worker to the simulators that it acts for.

Workers of one machine talk through a Unix socket during a rollout, which takes a tenth of the time of a Ray call. Ray
carries the calls to other machines, and says which worker died.
"""

from __future__ import annotations

import pickle
import select
import socket
import struct
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from time import monotonic
from typing import Any

from attrs import define

from vla_rl.runtime.comm.remote import IMAGINED, ConcurrencyGroup
from vla_rl.runtime.comm.shared_memory import host_key

LENGTH = NUMBER = struct.Struct("!Q")
END, GOOD, FAILED = b"e", b"g", b"f"
"""First byte of an answer, before its NUMBER. A request begins with its NUMBER, unless it is END."""
LOOK_S = 1.0
"""Seconds between two checks with Ray of whether the other worker still serves, while a caller waits for an answer."""
MIXED_POLL_S = 0.001
"""Seconds between two polls of Ray where some simulators are on this machine and some are not."""


class RemoteTraceback(Exception):
    """Traceback of an exception in the other worker, attached as its cause."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class Channel:
    """One end of a stream socket between two workers: messages of bytes, in order. Any thread may send."""

    def __init__(self, connection: socket.socket):
        self.connection = connection
        self._sending = Lock()

    def fileno(self) -> int:
        return self.connection.fileno()

    def send(self, message: bytes, while_full: Callable[[], None] | None = None) -> None:
        """Send the whole message.

        `while_full` receives what the other end sends meanwhile, so that two ends that send to each other do not
        deadlock.
        """
        rest = memoryview(LENGTH.pack(len(message)) + message)  # one piece: the length alone would wake the receiver
        with self._sending:
            if while_full is None:
                self.connection.sendall(rest)
                return
            while rest:
                try:
                    rest = rest[self.connection.send(rest, socket.MSG_DONTWAIT) :]
                except BlockingIOError:
                    if readable([self], 0.01):
                        while_full()

    def receive(self) -> bytearray:
        """Wait for the next message. Raises EOFError when the other end is gone."""
        return self._exactly(LENGTH.unpack(self._exactly(LENGTH.size))[0])

    def close(self) -> None:
        self.connection.close()

    def hang_up(self) -> None:
        """Shut the connection down: both ends read EOF from now on."""
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def _exactly(self, count: int) -> bytearray:
        data = bytearray(count)
        view, got = memoryview(data), 0
        while got < count:
            read = self.connection.recv_into(view[got:])
            if not read:
                raise EOFError("the other worker is gone")
            got += read
        return data


def readable(lines: Iterable[Any], seconds: float | None) -> list[Any]:
    """Wait at most `seconds`. Return those of the channels (or of objects with a `fileno`) that have something to
    read.
    """
    of_file = {line.fileno(): line for line in lines}
    polling = select.poll()  # select() does not work for file numbers above 1023
    for file in of_file:
        polling.register(file, select.POLLIN)
    return [of_file[file] for file, _ in polling.poll(None if seconds is None else 1e3 * seconds)]


class RpcServer:
    """The simulators' end of the channels: it answers calls of the policies that act for them. Policies are known by
    the index of their worker.
    """

    def __init__(self, threads: int = 0) -> None:
        """Create a server that runs `threads` calls concurrently; 0: one after another, in the thread that serves."""
        self.lines: dict[int, Channel] = {}
        self.ended: set[int] = set()
        """Policies whose rollout ended before their call of `serve` began."""
        self.pool = ThreadPoolExecutor(threads, "lane") if threads else None
        self.going: dict[int, list[Future[None]]] = {}
        """Policy -> its calls that run in threads."""
        self.broken: BaseException | None = None
        """Error of a thread that could not be sent to any policy; `serve` raises it."""

    def connect(self, policy: int, reader: Any, address: str) -> bool:
        """Connect to a policy's worker on the machine `reader` (its `host_key()`). Return False where that is not
        possible.
        """
        if reader is None or reader != host_key():
            return False
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(address)
        except OSError:  # for example another file system
            connection.close()
            return False
        if policy in self.lines:
            self.lines[policy].close()
        self.lines[policy] = Channel(connection)
        self.ended.discard(policy)
        return True

    def serve(self, policy: int, call: Callable[..., Any]) -> None:
        """Answer calls of all policies until this policy's rollout ends or its worker is gone."""
        try:
            while policy not in self.ended:
                open_lines = {line: other for other, line in self.lines.items() if other not in self.ended}
                for line in readable(open_lines, None):
                    self._answer(open_lines[line], line, call)
        except BaseException:
            for line in self.lines.values():  # otherwise the policies would wait for answers forever
                line.close()
            raise
        self.ended.discard(policy)
        if self.broken is not None:
            broken, self.broken = self.broken, None
            raise broken

    def _answer(self, policy: int, line: Channel, call: Callable[..., Any]) -> None:
        try:
            order = line.receive()
            if order != END and self.pool is None:
                line.send(_result(order, call))
                return
            going = [future for future in self.going.get(policy, ()) if not future.done()]
            if order != END and self.pool is not None:
                self.going[policy] = [*going, self.pool.submit(self._beside, line, order, call)]
                return
            wait(going)  # answers that are no longer needed are sent before END, too
            line.send(END)
        except (EOFError, OSError):
            line.close()
            del self.lines[policy]
        self.ended.add(policy)

    def _beside(self, line: Channel, order: bytearray, call: Callable[..., Any]) -> None:
        """Answer one call in a thread of the pool."""
        try:
            line.send(_result(order, call))
        except OSError:
            pass  # the policy is gone; the thread in `serve` reads EOF
        except BaseException as exc:
            self.broken = exc
            for other in tuple(self.lines.values()):
                other.hang_up()


def _result(order: bytearray, call: Callable[..., Any]) -> bytes:
    number = bytes(order[: NUMBER.size])
    try:
        asked = pickle.loads(memoryview(order)[NUMBER.size :])  # noqa: S301 - from our own workers
        return b"".join((GOOD, number, pickle.dumps(call(*asked), protocol=5)))
    except Exception as exc:
        where = traceback.format_exc()
        try:
            told = pickle.dumps((exc, where))
            pickle.loads(told)  # noqa: S301 - some classes can be written and not be read
        except Exception:
            told = pickle.dumps((RuntimeError(f"{type(exc).__name__}: {exc}"), where))
        return FAILED + number + told


@define(eq=False)
class _Ticket:
    """Pending call through a channel."""

    caller: Caller
    done: bool = False
    value: Any = None


class Caller:
    """The policy's end of a channel, for one rollout. Answers may come in any order."""

    def __init__(self, line: Channel, check: Callable[[bool], None]):
        """Create a caller. `check(wait)` raises the error that ended the other worker's `serve`; if `wait`, it waits
        for the end of `serve`.
        """
        self.line, self.check = line, check
        self.count = 0
        self.waiting: dict[int, _Ticket] = {}
        """Number of the call -> the pending call."""

    def fileno(self) -> int:
        return self.line.fileno()

    def call(self, *order: Any) -> _Ticket:
        number, self.count = self.count, self.count + 1
        ticket = self.waiting[number] = _Ticket(self)
        message = NUMBER.pack(number) + pickle.dumps(order, protocol=5)
        self._through(lambda: self.line.send(message, self.receive))
        return ticket

    def receive(self) -> None:
        """Wait for the next answer. Raises what its call raised."""
        answer = memoryview(self._next())
        (number,), told = NUMBER.unpack(answer[1 : 1 + NUMBER.size]), answer[1 + NUMBER.size :]
        if answer[:1] == FAILED:
            error, where = pickle.loads(told)  # noqa: S301 - from our own workers
            raise error from RemoteTraceback(where)
        ticket = self.waiting.pop(number)
        ticket.done, ticket.value = True, pickle.loads(told)  # noqa: S301 - from our own workers

    def end(self) -> None:
        """Tell the server that the rollout has ended, and drop the answers that are still to come."""
        self._through(lambda: self.line.send(END))
        while self._next() != END:
            pass

    def _next(self) -> bytearray:
        while not readable([self], LOOK_S):
            self.check(False)
        message: bytearray = self._through(self.line.receive)
        return message

    def _through(self, talk: Callable[[], Any]) -> Any:
        try:
            return talk()
        except (EOFError, ConnectionError):
            self.check(True)  # raises the cause, if the other worker has died or failed
            raise


class RayPeers:
    """Other workers (Ray actors) as a policy's worker calls them. The driver watches how long calls take."""

    def __init__(self, own: int, actors: Mapping[int, Any], concurrent_lanes: bool):
        """Create the peers of worker `own`. `concurrent_lanes`: lanes of the other workers run concurrently."""
        import ray

        self.ray, self.own, self.actors, self.concurrent_lanes = ray, own, actors, concurrent_lanes
        self.lines: dict[int, Channel] = {}
        self.callers: dict[int, Caller] = {}

    def connect(self, lanes: Mapping[int, Sequence[int]]) -> None:
        """Open a channel to each of the workers that is on this machine. `lanes`: worker -> lanes that this policy acts
        for.
        """
        with (
            tempfile.TemporaryDirectory(prefix="vla-rl-") as folder,
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener,
        ):
            address = str(Path(folder, "socket"))
            try:
                listener.bind(address)
            except OSError:  # the path is longer than a socket's address may be
                return
            listener.listen()
            for worker in [worker for worker in self.actors if worker in lanes]:
                opening = self.call(worker, "worker", "open_channel", self.own, lanes[worker], host_key(), address)
                if self.value_of(opening):
                    self.lines[worker] = Channel(listener.accept()[0])

    def close(self) -> None:
        """Close the channels; the workers that serve them read EOF."""
        lines, self.lines = self.lines, {}
        for line in lines.values():
            line.close()

    @contextmanager
    def talking(self) -> Iterator[None]:
        """Context in which calls go through the channels.

        An error closes all channels, without waiting for the answers that are still to come: a later rollout counts its
        calls from 0 again, and would take them for its own.
        """
        self.callers = {worker: self._caller(worker, line) for worker, line in self.lines.items()}
        try:
            yield
            for caller in self.callers.values():
                caller.end()
        except BaseException:
            self.close()
            raise
        finally:
            self.callers = {}

    def call(self, worker: int, role: str, method: str, *arguments: Any) -> Any:
        """Call a method of another worker. Return a reference.

        Imagined envs have their own concurrency group ("imagination"), since a rollout may run at the same time.
        """
        if role == IMAGINED:
            return self.actors[worker].imagination.remote(pickle.dumps((role, method, arguments)))
        if worker in self.callers:
            return self.callers[worker].call(role, method, *arguments)
        group: ConcurrencyGroup = "lane" if self.concurrent_lanes and role == "sim" else "call"
        return getattr(self.actors[worker], group).remote(pickle.dumps((role, method, arguments)))

    def value_of(self, reference: Any) -> Any:
        """Wait for a result. Raises what the call raised, or Ray's error for a worker that died."""
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
        """Wait until at least one result is there, or the timeout (seconds). Return the references of those that
        are.
        """
        end = None if timeout is None else monotonic() + timeout
        tickets = [reference for reference in references if isinstance(reference, _Ticket)]
        calls = [reference for reference in references if not isinstance(reference, _Ticket)]
        patience: float | None = 0.0
        while True:
            callers = {ticket.caller for ticket in tickets if not ticket.done}
            for caller in readable(callers, patience) if callers else ():
                while not all(ticket.done for ticket in tickets if ticket.caller is caller) and readable([caller], 0):
                    caller.receive()
            there: list[Any] = [ticket for ticket in tickets if ticket.done]
            if calls:
                wait = patience if not callers else 0.0
                count = 1 if wait is None or wait else len(calls)
                there.extend(self.ray.wait(calls, num_returns=count, timeout=wait)[0])
            left = None if end is None else max(0.0, end - monotonic())
            if there or left == 0.0:
                return there
            limits = [MIXED_POLL_S] if calls and callers else [LOOK_S] if callers else []
            patience = min([*limits, *([] if left is None else [left])], default=None)
            if callers and patience == LOOK_S:
                for caller in callers:
                    caller.check(False)

    def _caller(self, worker: int, line: Channel) -> Caller:
        serving = self.call(worker, "worker", "serve", self.own)

        def check(wait: bool) -> None:
            if wait or self.ray.wait([serving], timeout=0)[0]:
                self.value_of(serving)

        return Caller(line, check)
