"""Connected clients: places, statistics, limits on what strangers may hold of this machine; and the batches of their
requests, one after another through one thread, with the dynamic batching of rollouts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from ipaddress import IPv6Address, ip_address
from time import monotonic, perf_counter

import numpy as np
from attrs import define, field, frozen
from websockets.asyncio.server import ServerConnection

from vla_rl.core.plan import Batching
from vla_rl.core.types import Array, Observation, UnexecutedActions
from vla_rl.serving.policy import Key, Policy

logger = logging.getLogger(__name__)
NEW_S, IDLE_S = 5.0, 300.0
"""Seconds that a client keeps its place, if places are scarce, before its first answer and without another request."""
GONE_S = 5.0
"""Seconds that a disconnected client may take for its closing handshake."""
MAX_OPENING = 256
"""Limit of connections without a request; above it the oldest is closed. Each has ten seconds."""
MAX_HELD = 1 << 30
"""Limit of unfinished and waiting frames of all clients, in bytes; above it the largest holder is disconnected."""
MAX_UNREAD = 4 << 20
"""Limit of bytes that a client has not read, above which it is disconnected; answers are a few kilobytes."""


@define(eq=False)
class Client:
    connection: ServerConnection
    came: float = field(factory=monotonic)
    asked_at: float = field(factory=monotonic)
    """Time of its last request or answer."""
    busy: bool = False
    """Whether one of its requests is in progress."""
    answered: int = 0
    refused: int = 0
    clipped: int = 0
    """Answers with numbers outside of the bounds."""
    seconds: float = 0.0
    """Total time from requests to their answers."""
    slowest: float = 0.0

    @property
    def name(self) -> str:
        return name_of(self.connection)

    @property
    def address(self) -> str:
        """All connections of one machine have the same: of IPv6, which gives each machine many, a network."""
        return address_of(self.connection)

    def count_answer(self, seconds: float) -> None:
        """Count an answer that took so long."""
        self.answered += 1
        self.seconds += seconds
        self.slowest = max(self.slowest, seconds)

    def idle_for(self) -> float:
        return 0.0 if self.busy else monotonic() - self.asked_at

    def describe_answers(self) -> str:
        here = f"after {monotonic() - self.came:.1f} s"
        refused = f", refused {self.refused}" if self.refused else ""
        if not self.answered:
            return f"{here}: answered no request{refused}"
        requests = "1 request" if self.answered == 1 else f"{self.answered} requests"
        mean, slowest = 1e3 * self.seconds / self.answered, 1e3 * self.slowest
        return (
            f"{here}: answered {requests} in {mean:.1f} ms on average, {slowest:.1f} at most; {self.clipped} clipped"
            f"{refused}"
        )


def name_of(connection: ServerConnection) -> str:
    """Return a client's name in logs."""
    host, port, *_ = connection.remote_address or ("a client that is gone", 0)
    return f"{host}:{port}"


def printable_text(text: str) -> str:
    """Return a client's text as one line of a log."""
    return "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in text)


def address_of(connection: ServerConnection) -> str:
    host = str((connection.remote_address or ("",))[0])
    try:
        address = ip_address(host)
    except ValueError:
        return host
    if not isinstance(address, IPv6Address) or address.is_loopback:
        return host
    return str(address.ipv4_mapped or IPv6Address(int(address) >> 64 << 64))


def whose_place(clients: Iterable[Client]) -> Client | None:
    """The client idle for longest, if long enough to make room for another. Those that got nothing yet go first."""
    idle = [client for client in clients if client.idle_for() > (IDLE_S if client.answered else NEW_S)]
    return max(idle, key=lambda client: (not client.answered, client.idle_for()), default=None)


@define(eq=False)
class Traffic:
    """The memory and connections that clients hold of this machine, and their limits."""

    opening: dict[ServerConnection, None] = field(factory=dict, init=False)
    held: dict[ServerConnection, int] = field(factory=dict, init=False)
    """Bytes that came and were not answered yet."""
    total: int = field(default=0, init=False)

    def add_connection(self, connection: ServerConnection) -> None:
        self.opening[connection] = None
        self.held[connection] = 0
        if len(self.opening) > MAX_OPENING:
            oldest = next(iter(self.opening))
            del self.opening[oldest]
            oldest.transport.abort()

    def remove_connection(self, connection: ServerConnection) -> None:
        self.opening.pop(connection, None)
        self.total -= self.held.pop(connection, 0)

    def add_bytes(self, connection: ServerConnection, size: int) -> None:
        if connection not in self.held:
            return
        self.held[connection] += size
        self.total += size
        if connection.transport.get_write_buffer_size() > MAX_UNREAD:
            self._abort_connection(connection, "does not read what it is answered")
        elif self.total > MAX_HELD:
            largest = max(self.held, key=self.held.__getitem__)
            self._abort_connection(largest, f"sent most of {self.total >> 20} MB that wait here")

    def subtract_bytes(self, connection: ServerConnection, size: int) -> None:
        """Subtract a processed frame of this many bytes."""
        if connection in self.held:
            freed = min(self.held[connection], size)
            self.held[connection] -= freed
            self.total -= freed

    def _abort_connection(self, connection: ServerConnection, why: str) -> None:
        logger.warning("%s is sent away: it %s", name_of(connection), why)
        self.remove_connection(connection)
        connection.transport.abort()


def make_connection_class(traffic: Traffic) -> type[ServerConnection]:
    """Connections whose traffic is counted."""

    class Connection(ServerConnection):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            traffic.add_connection(self)

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            traffic.remove_connection(self)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            traffic.add_bytes(self, len(data))

    return Connection


async def send_away(connection: ServerConnection, code: int, why: str) -> None:
    """Close a connection, whatever its client does."""
    try:
        async with asyncio.timeout(GONE_S):
            await connection.close(code, why)
    except TimeoutError:
        connection.transport.abort()


class ClientGone(Exception):
    """No client waits for the answer."""


@frozen
class Answer:
    actions: Array
    """float32 [C, A]"""
    clipped: bool
    seconds: float
    """Duration of the inference, which others may share."""


@frozen(eq=False)
class _PendingRequest:
    obs: Observation
    key: Key
    unexecuted: UnexecutedActions | None
    waits: Callable[[], bool]
    arrived: float
    answer: asyncio.Future[Answer]


@define(eq=False)
class Batcher:
    """Inference as soon as `max_batch` requests wait, one has waited `max_wait_s` seconds, or all clients wait."""

    policy: Policy
    batching: Batching
    clients: Callable[[], int]
    """Number of clients that may send requests."""
    _waiting: asyncio.Queue[_PendingRequest] = field(factory=asyncio.Queue, init=False)
    _thread: ThreadPoolExecutor = field(factory=lambda: ThreadPoolExecutor(1, "inference"), init=False)

    async def answer_request(
        self,
        obs: Observation,
        key: Key,
        unexecuted: UnexecutedActions | None,
        waits: Callable[[], bool] = lambda: True,
    ) -> Answer:
        """The answer for one row. Raises what the policy raised for it, and ClientGone.

        Args:
            waits: whether a client still waits for the answer; called before the inference.
        """
        loop = asyncio.get_running_loop()
        pending = _PendingRequest(obs, key, unexecuted, waits, loop.time(), loop.create_future())
        self._waiting.put_nowait(pending)
        return await pending.answer

    async def run_batches(self) -> None:
        """Answer until it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            batch = await self._next_batch()
            awaited = [pending for pending in batch if pending.waits()]
            for pending in batch:
                if pending not in awaited:
                    pending.answer.set_exception(ClientGone())
            if not awaited:
                continue
            before = perf_counter()
            results = await loop.run_in_executor(self._thread, self._act_on_batch, awaited)
            seconds = perf_counter() - before
            for pending, result in zip(awaited, results, strict=True):
                if pending.answer.done():
                    continue
                if isinstance(result, Exception):
                    pending.answer.set_exception(result)
                else:
                    pending.answer.set_result(Answer(*result, seconds))

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _next_batch(self) -> list[_PendingRequest]:
        batch = [await self._waiting.get()]
        clock = asyncio.get_running_loop().time
        until = batch[0].arrived + (self.batching.max_wait_s or 0.0)
        while self.batching.max_batch is None or len(batch) < self.batching.max_batch:
            left = until - clock()
            if not self._waiting.empty():
                batch.append(self._waiting.get_nowait())
            elif left <= 0 or len(batch) >= self.clients():
                break
            else:
                with suppress(TimeoutError):
                    batch.append(await asyncio.wait_for(self._waiting.get(), left))
        return batch

    def _act_on_batch(self, batch: Sequence[_PendingRequest]) -> list[tuple[Array, bool] | Exception]:
        """Return each request's (actions, whether clipped) or exception: after a failure each is tried alone."""
        clipped = np.zeros(len(batch), bool)
        try:
            obs = Observation.concat([pending.obs for pending in batch])
            keys = [pending.key for pending in batch]
            previous = [pending.unexecuted for pending in batch]
            actions = self.policy.act_on(obs, keys, previous, clipped)
            return list(zip(actions, clipped.tolist(), strict=True))
        except Exception as exc:
            if len(batch) == 1:
                logger.debug("a request failed", exc_info=True)
                return [exc]
            return [result for pending in batch for result in self._act_on_batch([pending])]
