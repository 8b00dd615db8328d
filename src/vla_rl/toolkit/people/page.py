"""A web page with the camera image and four buttons, which only this machine can open, and only with its token."""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import sys
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from hmac import compare_digest
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import SHUT_RDWR
from string import Template
from threading import Condition, Thread
from typing import Any
from urllib.parse import parse_qs, urlsplit
from weakref import WeakSet

from vla_rl.core.errors import UserError
from vla_rl.core.types import Array
from vla_rl.toolkit.data.recording import encode_png
from vla_rl.toolkit.people.panel import Answer, Panel

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
HTML = Path(__file__).with_name("page.html")
ADDRESS = re.compile(rf"http://{re.escape(LOOPBACK)}:\d+/\?token=[\w-]+\n?")
"""Content of an address file."""
LONGEST_REQUEST = 1000
"""Most bytes of a request's body."""
IDLE_S = 10.0
"""Seconds after which a silent connection is closed."""
POLL_S = 0.05
"""Seconds after which the server notices that it is closed."""


class PagePanel(Panel):
    """The page, and the thread that serves it."""

    def __init__(self, port: int, address_file: Path | None, path: str) -> None:
        """Serve the page. UserError for a port in use and a file that cannot be written or holds something else.

        Args:
            path: path of the settings in a spec, for messages.
        """
        self.token = secrets.token_urlsafe(24)
        self._changed = Condition()
        self._text = ""
        self._question = 0
        """Number of texts that were shown. A press names the one that it answers."""
        self._answers: tuple[Answer, ...] = ()
        self._answer: Answer | None = None
        """Answer to the question; it has no other one."""
        self._taken = False
        """Whether `take` has returned the answer."""
        self._stopped = False
        self._closed = False
        self._image: Array | None = None
        self._num_images = 0
        """Number of images that were shown; the page recognises a new one by it."""
        panel = self

        class Handler(_PageHandler):
            page = panel

        try:
            self._server = _PageServer((LOOPBACK, port), Handler)
        except OSError as exc:
            raise UserError(f"{path}.port: {port} cannot be used ({exc.strerror}); give another, or 0") from exc
        self.port = int(self._server.server_address[1])
        self.address = f"http://{LOOPBACK}:{self.port}/?token={self.token}"
        self.place = f"the page http://{LOOPBACK}:{self.port}/"
        self._address_file = address_file
        if address_file is not None:
            try:
                _check_address_file(address_file, path)
                self._write_address(address_file, path)
            except UserError:
                self._server.server_close()
                raise
        logger.warning("a person answers at %s", self.address)
        serve = partial(self._server.serve_forever, poll_interval=POLL_S)
        Thread(target=serve, name="person-page", daemon=True).start()

    def _write_address(self, file: Path, path: str) -> None:
        partial = file.with_name(f".{file.name}.partial")
        try:
            partial.unlink(missing_ok=True)
            with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
                opened.write(f"{self.address}\n")
            os.replace(partial, file)
        except OSError as exc:
            raise UserError(f"{path}.address_file: {file} cannot be written ({exc.strerror})") from exc

    def show_text(self, text: str, answers: Sequence[Answer]) -> None:
        with self._changed:
            self._text = text
            self._question += 1
            self._answers = tuple(answers)
            self._answer = None
            self._taken = False

    def show_image(self, image: Array) -> None:
        with self._changed:
            self._image = image.copy()
            self._num_images += 1

    def take_answer(self, wait_s: float) -> Answer | None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._has_answer(), wait_s)
            if self._stopped:
                return "stop"
            if not self._has_answer():
                return None
            self._taken = True
            return self._answer

    def _has_answer(self) -> bool:
        """Return whether an answer waits for `take`."""
        return self._answer is not None and not self._taken

    def request_stop(self) -> bool:
        """Take the stop, which is of no question. Return whether somebody reads it: the page is not closed."""
        with self._changed:
            if not self._closed:
                self._stopped = True
                self._changed.notify_all()
            return not self._closed

    def press_button(self, question: int, answer: str) -> bool:
        """Take a button's answer. Return whether it counts: offered, first to the question shown, page not closed."""
        with self._changed:
            is_asked = question == self._question and answer in self._answers
            counts = is_asked and self._answer is None and not self._closed
            if counts:
                self._answer = answer  # type: ignore[assignment] # one of `_answers`
                self._changed.notify_all()
            return counts

    def page_state(self) -> dict[str, Any]:
        """Return what the page shows."""
        with self._changed:
            return {
                "text": self._text,
                "question": self._question,
                "answers": self._answers,
                "answered": self._answer,
                "stopped": self._stopped,
                "images": self._num_images,
            }

    def image_png(self) -> bytes | None:
        """Return the image as PNG; None: there is none."""
        with self._changed:
            image = self._image
        return None if image is None else encode_png(image)

    def close(self) -> None:
        with self._changed:
            self._closed = True
        self._server.shutdown()
        self._server.server_close()
        if self._address_file is not None:
            with suppress(OSError, UnicodeDecodeError):  # it may be of another page by now, or gone
                if self._address_file.read_text(encoding="utf-8") == f"{self.address}\n":
                    self._address_file.unlink()


def _check_address_file(file: Path, path: str) -> None:
    """Raise UserError for what the address must not replace. What an ended run left there may be replaced."""
    if not os.path.lexists(file):
        return
    text = ""
    with suppress(OSError):
        if file.is_file() and file.stat().st_size <= LONGEST_REQUEST:
            text = file.read_text(encoding="utf-8", errors="replace")
    if not ADDRESS.fullmatch(text):
        raise UserError(f"{path}.address_file: {file} is there and holds no page's address; name a new file")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with suppress(OSError, HTTPException), opener.open(text.strip(), timeout=IDLE_S):
        raise UserError(f"{path}.address_file: {file} has the address of a page that is still open; name another file")


class _PageServer(ThreadingHTTPServer):
    """Says nothing of a browser that left, or was silent, in a request. Connections of browsers end with the server."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._connections: WeakSet[Any] = WeakSet()
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connections.add(request)
        super().process_request(request, client_address)

    def server_close(self) -> None:
        super().server_close()
        for connection in list(self._connections):
            with suppress(OSError):
                connection.shutdown(SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _PageHandler(BaseHTTPRequestHandler):
    """Answers requests of this machine that have the token. The page itself has the token in its address, all others in
    a header, which pages of other sites cannot send."""

    page: PagePanel
    timeout = IDLE_S
    server_version = "vla-rl"
    sys_version = ""

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        if parts.path == "/":
            if self._is_allowed(parse_qs(parts.query).get("token", [""])[0]):
                nonce = secrets.token_urlsafe(16)
                text = Template(HTML.read_text(encoding="utf-8")).substitute(token=self.page.token, nonce=nonce)
                self._send_reply(200, text.encode(), "text/html; charset=utf-8", nonce)
        elif not self._is_allowed(self.headers.get("X-Token", "")):
            return
        elif parts.path == "/state":
            self._send_reply(200, json.dumps(self.page.page_state()).encode(), "application/json")
        elif parts.path == "/image.png" and (image := self.page.image_png()) is not None:
            self._send_reply(200, image, "image/png")
        else:
            self._send_reply(404, b"nothing here", "text/plain")

    def do_POST(self) -> None:
        if not self._is_allowed(self.headers.get("X-Token", "")):
            return
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > LONGEST_REQUEST or self.path != "/press":
            self._send_reply(400, b"expected at /press: stop, or QUESTION ANSWER, such as 3 success", "text/plain")
            return
        question, _, answer = self.rfile.read(int(length)).decode(errors="replace").partition(" ")
        if question == "stop":
            counts = self.page.request_stop()
        else:
            counts = question.isdecimal() and self.page.press_button(int(question), answer)
        self._send_reply(200 if counts else 409, json.dumps(self.page.page_state()).encode(), "application/json")

    def _is_allowed(self, token: str) -> bool:
        """Return whether a request has the token, and is for this machine by name; else refuse it."""
        hosts = {f"{name}:{self.page.port}" for name in (LOOPBACK, "localhost")}
        if self.headers.get("Host") in hosts and compare_digest(token.encode(), self.page.token.encode()):
            return True
        self._send_reply(403, b"open the address that the run has logged, token included", "text/plain")
        return False

    def _send_reply(self, status: int, body: bytes, kind: str, nonce: str = "") -> None:
        self.send_response(status)
        sources = f"script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; " if nonce else ""
        policy = f"default-src 'none'; {sources}img-src blob:; connect-src 'self'; frame-ancestors 'none'"
        for name, value in {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Content-Security-Policy": policy,
            "Cache-Control": "no-store",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002 - the name of the standard library
        """Log nothing: requests have the token in their address."""
