"""A server in a thread, and the smallest client of each dialect."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any

import numpy as np
import pytest
from websockets.sync.client import ClientConnection, connect

from vla_rl.serving.policy import Policy
from vla_rl.serving.server import PolicyServer, Settings
from vla_rl.toolkit.models.acting.openpi import pack_frame, unpack_frame

WAIT = 60.0
"""Seconds after which an answer is missing."""


def interpreter_with(home: Path, *packages: str) -> Path:
    """Install packages into a new environment, and return its interpreter; skip the test where pip cannot."""
    subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    pip = [str(home / "bin" / "pip"), "install", "-q", "--disable-pip-version-check", *packages]
    apart = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(pip, capture_output=True, text=True, check=False, timeout=240, env=apart)
    if done.returncode:
        pytest.skip(f"pip cannot install {packages[0]} here: {done.stderr.strip().splitlines()[-1]}")
    return home / "bin" / "python"


@contextmanager
def served(policy: Policy, **settings: Any) -> Iterator[PolicyServer]:
    """`server.port` is where."""
    server, ready = PolicyServer(policy, Settings(port=0, **settings)), Queue[Any]()

    async def run() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        try:
            await server.serve_clients(
                stop, lambda port: ready.put((port, lambda: loop.call_soon_threadsafe(stop.set)))
            )
        except BaseException as exc:
            ready.put(exc)
            raise

    thread = Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    found = ready.get(timeout=WAIT)
    if isinstance(found, BaseException):
        raise found
    server.settings = Settings(**{**settings, "port": found[0]})
    try:
        yield server
    finally:
        found[1]()
        thread.join(WAIT)
    assert not thread.is_alive()


def opened(server: PolicyServer, **given: Any) -> ClientConnection:
    return connect(
        f"ws://127.0.0.1:{server.settings.port}", compression=None, max_size=None, proxy=None, **given
    ).__enter__()


class Client:
    """openpi's, without its packages."""

    def __init__(self, server: PolicyServer, **given: Any) -> None:
        self.socket = opened(server, **given)
        self.metadata = unpack_frame(self.socket.recv(timeout=WAIT))

    def infer(self, request: Mapping[str, Any]) -> Any:
        """The reply; RuntimeError with the text of an error."""
        self.socket.send(pack_frame(request))
        reply = self.socket.recv(timeout=WAIT)
        if isinstance(reply, str):
            raise RuntimeError(reply)  # noqa: TRY004 - as openpi's client
        return unpack_frame(reply)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


def request_of(seen: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request for these arguments of `Policy.act`, with the keys of any robot."""
    return {
        **{f"observation/{camera}": image for camera, image in seen["images"].items()},
        "observation/state": np.asarray(seen["state"]),
        "prompt": seen["instruction"],
    }
