"""A policy over websockets, for every client that speaks openpi's protocol or one of its dialects."""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from errno import EADDRINUSE, EADDRNOTAVAIL
from http import HTTPStatus
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any

from attrs import define, field, frozen
from websockets.asyncio.server import Server as Listening
from websockets.asyncio.server import ServerConnection, serve
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.protocol import State

from vla_rl.core.errors import UserError
from vla_rl.core.installation import OWN_DIST
from vla_rl.core.paths import error_reason, read_text
from vla_rl.core.plan import Batching
from vla_rl.core.requirements import install_command
from vla_rl.core.types import Array, Observation, UnexecutedActions
from vla_rl.serving.access import Access
from vla_rl.serving.clients import (
    GONE_S,
    IDLE_S,
    NEW_S,
    Batcher,
    Client,
    ClientGone,
    Traffic,
    address_of,
    make_connection_class,
    name_of,
    printable_text,
    send_away,
    whose_place,
)
from vla_rl.serving.dialects import DIALECTS, ClientRequest, Dialect, Frame
from vla_rl.serving.policy import Key, Policy
from vla_rl.toolkit.models.acting.key_maps import KeyMap, has_encoded, read_request
from vla_rl.toolkit.models.acting.openpi import MAX_FRAME, FrameError

if TYPE_CHECKING:
    from vla_rl.serving.recording import SessionRecorder

logger = logging.getLogger(__name__)
MAX_CLIENTS = 128
MAX_OF_ADDRESS = 64
"""Clients that one machine may have: it cannot take all places."""
READERS = min(4, os.cpu_count() or 1)
"""Threads that decode requests."""
QUICK = 1 << 20
"""Bytes of a frame that is read at once. Two raw images of 224 px take 0.02 ms, a thread 0.2 ms."""
SEND_S = 60.0
"""A client that does not take its answer within this time is given up."""
FRAME_HEADER = 14
"""Largest overhead of a websocket frame, in bytes."""
PREVIOUS, DELAY = "previous_actions", "delay"
"""Keys of a request for real-time chunking."""
FAILED = "the policy failed; its server's log says why"
Seen = tuple[Observation, Array]
"""A row, and the actions that were answered."""


@frozen
class _Request:
    """A frame that was read in full: the row to infer, or a reply that needs none."""

    asked: ClientRequest
    obs: Observation | None = None
    unexecuted: UnexecutedActions | None = None


@frozen(kw_only=True)
class Settings:
    host: str = "127.0.0.1"
    port: int = 8000
    """0: a free one."""
    dialect: str = "openpi"
    keys: KeyMap | None = None
    """Keys of a request; None: the dialect's own."""
    prompt: str | None = None
    """Instruction for requests without one."""
    api_key: str | None = field(default=None, repr=False)
    """Key that clients have to send; None: no key is needed."""
    batching: Batching = field(factory=lambda: Batching(max_batch=16, max_wait_s=0.002))
    record: Path | None = None
    """Folder of the data set that sessions are appended to; None: nothing is kept."""
    allow_hosts: Sequence[str] = ()
    """Host names that clients may use, besides those of the machine."""
    allow_origins: Sequence[str] = ()
    """Web pages that may use it: what browsers send as `Origin`."""
    idle_s: float = 3600.0
    """Seconds without a request after which a client is sent away."""


def read_api_key(file: Path) -> str:
    """The key in a file. Raises UserError."""
    try:
        key = read_text(file).strip()
    except (OSError, ValueError) as exc:
        raise UserError(f"the key in {file} cannot be read: {error_reason(exc)}") from exc
    if not key.isascii() or not key.isprintable() or not key:
        raise UserError(f"{file} holds no key: one line of ASCII, such as `openssl rand -hex 32` prints")
    return key


@define(eq=False)
class PolicyServer:
    policy: Policy
    settings: Settings
    answered: int = field(default=0, init=False)
    """Requests that were answered."""
    refused: int = field(default=0, init=False)
    _batcher: Batcher = field(init=False)
    recorder: SessionRecorder | None = field(default=None, init=False)
    _access: Access = field(init=False)
    _clients: dict[ServerConnection, Client] = field(factory=dict, init=False)
    _traffic: Traffic = field(factory=Traffic, init=False)
    _leaving: set[asyncio.Task[None]] = field(factory=set, init=False)
    _readers: ThreadPoolExecutor = field(factory=lambda: ThreadPoolExecutor(READERS, "reading"), init=False)
    _numbers: Any = field(factory=count, init=False)
    _speaks: type[Dialect] = field(init=False)
    _keys: KeyMap = field(init=False)
    _about: dict[str, Any] = field(init=False)

    def __attrs_post_init__(self) -> None:
        policy, settings = self.policy, self.settings
        self._speaks = DIALECTS[settings.dialect]
        self._keys = settings.keys or self._speaks.default_keys(policy.info)
        self._access = Access.for_server(settings.host, settings.allow_hosts, settings.allow_origins)
        if settings.record is not None:
            self.recorder = recorder_of(settings.record, policy)
        self._batcher = Batcher(policy, settings.batching, lambda: len(self._clients))
        self._about = policy.about() | {
            "keys": {
                "images": self._keys.camera_keys(policy.info),
                "state": list(self._keys.state),
                "state_sizes": list(self._keys.state_sizes),
                "instruction": self._keys.instruction,
            }
        }

    async def serve_clients(self, stop: asyncio.Event, listening: Callable[[int], None]) -> None:
        """Serve until `stop`; `listening` is called with the port once clients may. Raises UserError if it is taken."""
        settings = self.settings
        self.policy.warm_up(settings.batching.max_batch or 1)
        quiet = logging.getLogger(f"{__name__}.websockets")
        quiet.setLevel(logging.CRITICAL)  # it shows a traceback for each port scan
        alive = 20.0 if self._speaks.keeps_alive else None
        try:
            server: Listening = await serve(
                self._handle_connection,
                settings.host,
                settings.port,
                process_request=self._process_request,
                compression=None,
                max_size=MAX_FRAME,
                max_queue=1,
                ping_interval=alive,
                ping_timeout=alive,
                close_timeout=GONE_S,
                create_connection=make_connection_class(self._traffic),
                logger=quiet,
            )
        except (OSError, ValueError) as exc:
            raise _listen_error(settings.host, settings.port, exc) from exc
        answering = asyncio.create_task(self._batcher.run_batches())
        try:
            async with server:
                listening(next(iter(server.sockets)).getsockname()[1])
                await stop.wait()
                for connection in list(self._traffic.opening):  # without a request
                    connection.transport.abort()
        finally:
            answering.cancel()
            self._batcher.close()
            self._readers.shutdown(wait=False, cancel_futures=True)
            if self.recorder is not None:
                self.recorder.close()

    def _process_request(self, connection: ServerConnection, request: Request) -> Response | None:
        """Before a websocket is opened: whether this server is meant, pages of health, the key, and a place."""
        headers = request.headers
        if refusal := self._access.find_refusal(headers.get_all("Host"), headers.get_all("Origin")):
            logger.warning("%s was refused: %s", name_of(connection), refusal)
            return connection.respond(HTTPStatus.FORBIDDEN, refusal + "\n")
        path = request.path.partition("?")[0]
        if path == "/healthz":
            return connection.respond(HTTPStatus.OK, "OK\n")
        if path in self._speaks.pages:
            text = self._speaks.pages[path] + "\n"
            kind = Headers({"Content-Type": "application/json", "Content-Length": str(len(text))})
            return Response(HTTPStatus.OK, "OK", kind, text.encode())
        if self.settings.api_key is not None:
            given = headers.get_all("Authorization")
            wanted = f"Api-Key {self.settings.api_key}".encode()
            if len(given) != 1 or not hmac.compare_digest(given[0].encode(errors="replace"), wanted):
                return connection.respond(HTTPStatus.UNAUTHORIZED, "give the key: Authorization: Api-Key KEY\n")
        if refusal := self._no_place(address_of(connection)):
            logger.warning("%s was refused: %s", name_of(connection), refusal)
            return connection.respond(HTTPStatus.SERVICE_UNAVAILABLE, refusal + "\n")
        return None

    def _no_place(self, address: str) -> str | None:
        """Find a place for a client, if need be that of an idle one. Return the reason if none is free."""
        clients: dict[str, list[Client]] = {}
        for client in self._clients.values():
            clients.setdefault(client.address, []).append(client)
        rivals = clients.get(address, [])
        if len(rivals) >= min(MAX_OF_ADDRESS, MAX_CLIENTS):
            full = f"{len(rivals)} clients of {address} are connected, as many as one machine may have"
        elif len(self._clients) >= MAX_CLIENTS:
            rivals = max(clients.values(), key=len)
            full = f"{len(self._clients)} clients are connected, and there are no more places"
        else:
            return None
        idle = whose_place(rivals)
        if idle is None:
            return (
                f"{full}; try again later: a client gives way that is idle for {NEW_S:g} s and got no answer yet, or "
                f"for {IDLE_S:g} s"
            )
        why = f"another client needs the place, and this one was idle for {idle.idle_for():.0f} s"
        logger.warning("%s is sent away: %s", idle.name, why)
        del self._clients[idle.connection]  # the place is free at once
        leaving = asyncio.create_task(send_away(idle.connection, 1013, why))
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)
        return None

    async def _handle_connection(self, connection: ServerConnection) -> None:
        client, number = Client(connection), next(self._numbers)
        self._traffic.opening.pop(connection, None)
        self._clients[connection] = client
        logger.info("%s connected", client.name)
        try:
            with suppress(ConnectionClosed, ClientGone):
                await self._answer_frames(client, number)
        finally:
            if self.recorder is not None:
                await self.recorder.end_episode(number)
            self._clients.pop(connection, None)
            logger.info("%s left %s", client.name, client.describe_answers())

    async def _answer_frames(self, client: Client, number: int) -> None:
        connection = client.connection
        dialect = self._speaks(self._about, self._keys, self.policy.info)
        greeting = dialect.make_greeting()
        if greeting is not None:
            await self._send_frame(connection, greeting)
        episode, chunk, total = 0, 0, None
        while True:
            try:
                async with asyncio.timeout(self.settings.idle_s):
                    frame = await connection.recv()
            except TimeoutError:
                why = f"it asked for nothing within {self.settings.idle_s:g} s"
                logger.warning("%s is sent away: %s", client.name, why)
                await send_away(connection, 1001, why)
                return
            before, client.busy = perf_counter(), True
            try:
                request = await self._read_request(dialect, frame)
                if request.asked.begins:
                    episode, chunk = episode + 1, 0
                    if self.recorder is not None:
                        await self.recorder.end_episode(number)
                reply: Frame | None = request.asked.reply
                seen: Seen | None = None
                if request.obs is not None:
                    reply, seen = await self._infer_answer(client, dialect, request, (number, episode, chunk), total)
                    chunk += 1
            except ClientGone:
                raise
            except Exception as exc:
                if await self._send_refusal(client, dialect, exc):
                    return
                continue
            finally:
                self._traffic.subtract_bytes(connection, len(frame) + FRAME_HEADER)
                client.busy, client.asked_at = False, monotonic()
            if reply is not None:
                await self._send_frame(connection, reply)
            took = perf_counter() - before
            total = 1e3 * took
            if seen is not None:
                client.count_answer(took)
                if self.recorder is not None:
                    await self.recorder.add_request(number, *seen)

    async def _read_request(self, dialect: Dialect, frame: Frame) -> _Request:
        """Raises FrameError and UserError. What takes longer than handing it to a thread is done there, while others
        are answered: large frames, PNG and JPEG, scaling. Of other arrays only views are made."""
        loop = asyncio.get_running_loop()
        quick = len(frame) <= QUICK
        client_request = (
            dialect.read_frame(frame) if quick else await loop.run_in_executor(self._readers, dialect.read_frame, frame)
        )
        if client_request.request is None:
            return _Request(client_request)
        if quick and not self._keys.resize and not has_encoded(self._keys, self.policy.info, client_request.request):
            return self._decode_request(client_request, client_request.request)
        return await loop.run_in_executor(self._readers, self._decode_request, client_request, client_request.request)

    def _decode_request(self, client_request: ClientRequest, request: Mapping[Any, Any]) -> _Request:
        images, state, instruction = read_request(self._keys, self.policy.info, request)
        instruction = self.settings.prompt if instruction is None else instruction
        previous = request.get(PREVIOUS)
        unexecuted = None if previous is None else self.policy.unexecuted(previous, request.get(DELAY, 0))
        return _Request(client_request, self.policy.observation(images, state, instruction), unexecuted)

    async def _infer_answer(
        self, client: Client, dialect: Dialect, request: _Request, key: Key, total: float | None
    ) -> tuple[Frame, Seen]:
        assert request.obs is not None
        answer = await self._batcher.answer_request(
            request.obs, key, request.unexecuted, lambda: client.connection.state is State.OPEN
        )
        self.answered += 1
        client.clipped += answer.clipped
        timing = {"infer_ms": 1e3 * answer.seconds}
        reply = dialect.encode_answer(answer.actions, timing if total is None else {**timing, "prev_total_ms": total})
        return reply, (request.obs, answer.actions)

    async def _send_frame(self, connection: ServerConnection, frame: Frame) -> None:
        """Raises ConnectionClosed, also where a client does not read for long."""
        try:
            async with asyncio.timeout(SEND_S):
                await connection.send(frame)
        except TimeoutError:
            logger.warning("%s is sent away: it did not take its answer within %g s", name_of(connection), SEND_S)
            connection.transport.abort()
            raise ClientGone from None

    async def _send_refusal(self, client: Client, dialect: Dialect, error: Exception) -> bool:
        """Send an error. Return whether the connection is closed."""
        self.refused += 1
        client.refused += 1
        known = isinstance(error, UserError | FrameError)
        if not known:
            logger.error("a request failed", exc_info=error)
        text = str(error) if known else FAILED
        logger.warning("%s was refused: %s", client.name, printable_text(text))
        frame, closes = dialect.encode_refusal(text)
        await self._send_frame(client.connection, frame)
        if closes:
            await send_away(client.connection, 1011, "refused")
        return closes


def check_address(host: str, port: int) -> None:
    """Raise UserError if the address cannot be bound; so the error comes before a model is loaded."""

    async def try_listening() -> None:
        server = await asyncio.get_running_loop().create_server(asyncio.Protocol, host, port)
        server.close()
        await server.wait_closed()

    try:
        asyncio.run(try_listening())
    except (OSError, ValueError) as exc:  # ValueError: an invalid host name, such as a..b
        raise _listen_error(host, port, exc) from exc


def _listen_error(host: str, port: int, error: OSError | ValueError) -> UserError:
    if isinstance(error, ValueError):
        return UserError(f"cannot listen on {host!r}: {error}; --host is an address of this machine")
    if error.errno == EADDRINUSE:
        return UserError(
            f"cannot listen on {host}:{port}: another program does, perhaps another `vla-rl serve`; stop that one, or "
            f"choose another --port (0: a free one)"
        )
    number = error.errno or EADDRNOTAVAIL  # asyncio of Python 3.13 gives no number where no address is this machine's
    why = os.strerror(number) if number > 0 else error.strerror or error
    return UserError(
        f"cannot listen on {host}:{port}: {why}; --host is an address of this machine (127.0.0.1; 0.0.0.0: all), "
        f"--port one that you may use (1024 and above)"
    )


def recorder_of(folder: Path, policy: Policy) -> SessionRecorder:
    """Raises UserError where nothing can be recorded there, or packages for it are missing."""
    if find_spec("pyarrow") is None:
        raise UserError(f"recording needs pyarrow; try: {install_command(OWN_DIST, 'data')}")
    from vla_rl.serving.recording import SessionRecorder

    return SessionRecorder(folder, policy)
