"""A policy over websockets, for every client that speaks openpi's protocol or one of its dialects."""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from errno import EADDRINUSE
from http import HTTPStatus
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from attrs import define, field, frozen
from websockets.asyncio.server import Server as Listening
from websockets.asyncio.server import ServerConnection, serve
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from vla_rl.core.catalogue import OWN_DIST, install_command
from vla_rl.core.errors import UserError
from vla_rl.core.plan import Window
from vla_rl.core.types import Observation
from vla_rl.serving.batching import Batcher
from vla_rl.serving.dialects import DIALECTS, Dialect, Frame
from vla_rl.serving.policy import Array, Key, Policy
from vla_rl.toolkit.models.key_maps import KeyMap, read_request
from vla_rl.toolkit.models.openpi import MAX_FRAME, FrameError

if TYPE_CHECKING:
    from vla_rl.serving.recording import SessionRecorder

logger = logging.getLogger(__name__)
OWN_MACHINE = ("127.0.0.1", "localhost", "::1")
MAX_CLIENTS = 64
PREVIOUS, DELAY = "previous_actions", "delay"
"""Keys of a request for real-time chunking."""
FAILED = "the policy failed; its server's log says why"
Seen = tuple[Observation, Array]
"""A row, and the actions that were answered."""


@frozen(kw_only=True)
class Settings:
    host: str = "127.0.0.1"
    port: int = 8000
    """0: a free one."""
    dialect: str = "openpi"
    keys: KeyMap | None = None
    """None: the dialect's own."""
    prompt: str | None = None
    """Of requests that have none."""
    api_key: str | None = field(default=None, repr=False)
    """What clients have to give; None: nothing."""
    window: Window = field(factory=lambda: Window(max_batch=16, max_wait=0.002))
    record: Path | None = None
    """Folder of the data set that sessions are appended to; None: nothing is kept."""


def read_api_key(file: Path) -> str:
    """The key in a file. Raises UserError."""
    try:
        key = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as exc:
        raise UserError(f"the key in {file} cannot be read: {exc}") from exc
    if not key.isascii() or not key.isprintable() or not key:
        raise UserError(f"{file} holds no key: one line of ASCII, such as `openssl rand -hex 32` prints")
    return key


@define(eq=False)
class PolicyServer:
    policy: Policy
    settings: Settings
    asked: int = field(default=0, init=False)
    """Requests that were answered."""
    refused: int = field(default=0, init=False)
    _batcher: Batcher = field(init=False)
    recorder: SessionRecorder | None = field(default=None, init=False)
    _clients: set[ServerConnection] = field(factory=set, init=False)
    _numbers: Any = field(factory=count, init=False)
    _speaks: type[Dialect] = field(init=False)
    _keys: KeyMap = field(init=False)
    _about: dict[str, Any] = field(init=False)

    def __attrs_post_init__(self) -> None:
        policy, settings = self.policy, self.settings
        self._speaks = DIALECTS[settings.dialect]
        self._keys = settings.keys or self._speaks.default_keys(policy.info)
        if settings.record is not None:
            self.recorder = recorder_of(settings.record, policy)
        self._batcher = Batcher(policy, settings.window, lambda: len(self._clients))
        self._about = policy.about() | {
            "keys": {
                "images": self._keys.keys_of(policy.info),
                "state": list(self._keys.state),
                "state_sizes": list(self._keys.state_sizes),
                "instruction": self._keys.instruction,
            }
        }

    async def run(self, stop: asyncio.Event, listening: Callable[[int], None]) -> None:
        """Serve until `stop`; `listening` is told the port once clients may come. Raises UserError where that is
        taken."""
        settings = self.settings
        self.policy.warm_up(settings.window.max_batch or 1)
        quiet = logging.getLogger(f"{__name__}.websockets")
        quiet.setLevel(logging.CRITICAL)  # it shows a traceback for each port scan
        alive = 20.0 if self._speaks.keeps_alive else None
        try:
            server: Listening = await serve(
                self._connection,
                settings.host,
                settings.port,
                process_request=self._page,
                compression=None,
                max_size=MAX_FRAME,
                max_queue=1,
                ping_interval=alive,
                ping_timeout=alive,
                logger=quiet,
            )
        except OSError as exc:
            raise _nobody_can_listen(settings.host, settings.port, exc) from exc
        answering = asyncio.create_task(self._batcher.run())
        try:
            async with server:
                listening(next(iter(server.sockets)).getsockname()[1])
                await stop.wait()
        finally:
            answering.cancel()
            self._batcher.close()
            if self.recorder is not None:
                self.recorder.close()

    def _page(self, connection: ServerConnection, request: Request) -> Response | None:
        """Before a websocket is opened: pages of health, the key, and how many there are."""
        path = request.path.partition("?")[0]
        if path == "/healthz":
            return connection.respond(HTTPStatus.OK, "OK\n")
        if path in self._speaks.pages:
            text = self._speaks.pages[path] + "\n"
            headers = Headers({"Content-Type": "application/json", "Content-Length": str(len(text))})
            return Response(HTTPStatus.OK, "OK", headers, text.encode())
        if self.settings.api_key is not None:
            given = request.headers.get_all("Authorization")
            wanted = f"Api-Key {self.settings.api_key}".encode()
            if len(given) != 1 or not hmac.compare_digest(given[0].encode(errors="replace"), wanted):
                return connection.respond(HTTPStatus.UNAUTHORIZED, "give the key: Authorization: Api-Key KEY\n")
        if len(self._clients) >= MAX_CLIENTS:
            return connection.respond(HTTPStatus.SERVICE_UNAVAILABLE, f"{MAX_CLIENTS} clients are connected\n")
        return None

    async def _connection(self, connection: ServerConnection) -> None:
        who, number = _name(connection), next(self._numbers)
        self._clients.add(connection)
        logger.info("%s connected", who)
        try:
            with suppress(ConnectionClosed):
                await self._converse(connection, number)
        finally:
            if self.recorder is not None:
                await self.recorder.end(number)
            self._clients.discard(connection)
            answers, clipped = self.policy.acted, self.policy.clipped
            logger.info("%s left; answered %d requests of all clients, %d clipped", who, answers, clipped)

    async def _converse(self, connection: ServerConnection, number: int) -> None:
        dialect = self._speaks(self._about, self._keys, self.policy.info)
        greeting = dialect.greeting()
        if greeting is not None:
            await connection.send(greeting)
        episode, chunk, total = 0, 0, None
        async for frame in connection:
            before = perf_counter()
            try:
                asked = dialect.read(frame)
                if asked.begins:
                    episode, chunk = episode + 1, 0
                    if self.recorder is not None:
                        await self.recorder.end(number)
                reply: Frame | None = asked.reply
                seen: Seen | None = None
                if asked.request is not None:
                    reply, seen = await self._answer(dialect, asked.request, (number, episode, chunk), total)
                    chunk += 1
            except Exception as exc:
                if await self._refuse(connection, dialect, exc):
                    return
                continue
            if reply is not None:
                await connection.send(reply)
            total = 1e3 * (perf_counter() - before)
            if self.recorder is not None and seen is not None:
                await self.recorder.add(number, *seen)

    async def _answer(
        self, dialect: Dialect, request: Mapping[Any, Any], key: Key, total: float | None
    ) -> tuple[Frame, Seen]:
        images, state, instruction = read_request(self._keys, self.policy.info, request)
        instruction = self.settings.prompt if instruction is None else instruction
        previous = request.get(PREVIOUS)
        rest = None if previous is None else self.policy.unexecuted(previous, request.get(DELAY, 0))
        obs = self.policy.observation(images, state, instruction)
        actions = await self._batcher.act(obs, key, rest)
        self.asked += 1
        timing = {"infer_ms": 1e3 * self._batcher.seconds}
        return dialect.answer(actions, timing if total is None else {**timing, "prev_total_ms": total}), (obs, actions)

    async def _refuse(self, connection: ServerConnection, dialect: Dialect, error: Exception) -> bool:
        """Say what was wrong; -> whether the connection is closed."""
        self.refused += 1
        known = isinstance(error, UserError | FrameError)
        if not known:
            logger.error("a request failed", exc_info=error)
        text = str(error) if known else FAILED
        logger.warning("%s was refused: %s", _name(connection), text)
        frame, closes = dialect.refusal(text)
        await connection.send(frame)
        if closes:
            await connection.close(1011, "refused")
        return closes


def check_address(host: str, port: int) -> None:
    """Raises UserError where nobody can listen; so that it is known before a model is loaded."""

    async def listen() -> None:
        server = await asyncio.get_running_loop().create_server(asyncio.Protocol, host, port)
        server.close()
        await server.wait_closed()

    try:
        asyncio.run(listen())
    except OSError as exc:
        raise _nobody_can_listen(host, port, exc) from exc


def _nobody_can_listen(host: str, port: int, error: OSError) -> UserError:
    if error.errno == EADDRINUSE:
        return UserError(
            f"cannot listen on {host}:{port}: another program does, perhaps another `vla-rl serve`; stop that one, or "
            f"choose another --port (0: a free one)"
        )
    why = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or error
    return UserError(
        f"cannot listen on {host}:{port}: {why}; --host is an address of this machine (127.0.0.1; 0.0.0.0: all), "
        f"--port one that you may use (1024 and above)"
    )


def _name(connection: ServerConnection) -> str:
    """Of a client, in logs."""
    host, port, *_ = connection.remote_address or ("a client that is gone", 0)
    return f"{host}:{port}"


def recorder_of(folder: Path, policy: Policy) -> SessionRecorder:
    """Raises UserError where nothing can be recorded there, or packages for it are missing."""
    if find_spec("pyarrow") is None:
        raise UserError(f"recording needs pyarrow; try: {install_command(OWN_DIST, 'data')}")
    from vla_rl.serving.recording import SessionRecorder

    return SessionRecorder(folder, policy)


def serve_policy(policy: Policy, settings: Settings, listening: Callable[[int], None]) -> PolicyServer:
    """Serve until Ctrl-C or SIGTERM. -> the server, which counted."""
    server = PolicyServer(policy, settings)

    async def run() -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        for name in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(name, stop.set)
        await server.run(stop, listening)

    asyncio.run(run())
    return server
