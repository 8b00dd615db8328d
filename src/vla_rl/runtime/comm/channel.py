"""Channels between two workers on one machine: messages of bytes through a Unix socket."""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Callable, Iterable
from contextlib import suppress
from threading import Lock
from typing import Any

LENGTH = struct.Struct("!Q")
"""Length of a message, which precedes it."""


class Channel:
    """One end of a stream socket between two workers: messages of bytes, in order. Any thread may send."""

    def __init__(self, connection: socket.socket):
        self.connection = connection
        self._sending = Lock()

    def fileno(self) -> int:
        return self.connection.fileno()

    def send(self, message: bytes, while_full: Callable[[], None] | None = None) -> None:
        """Send the whole message. `while_full` receives what the other end sends meanwhile, else two would deadlock."""
        rest = memoryview(LENGTH.pack(len(message)) + message)  # one piece: the length alone would wake the receiver
        with self._sending:
            if while_full is None:
                self.connection.sendall(rest)
                return
            while rest:
                try:
                    rest = rest[self.connection.send(rest, socket.MSG_DONTWAIT) :]
                except BlockingIOError:
                    # Nothing tells when there is room: the wait for messages is short, then sending is tried again.
                    if wait_for_readable([self], 0.01):
                        while_full()

    def receive(self) -> bytearray:
        """Wait for the next message. Raises EOFError when the other end is gone."""
        return self._receive_exactly(LENGTH.unpack(self._receive_exactly(LENGTH.size))[0])

    def close(self) -> None:
        self.connection.close()

    def end_connection(self) -> None:
        """Shut the connection down: both ends read EOF from now on."""
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def _receive_exactly(self, count: int) -> bytearray:
        data = bytearray(count)
        view = memoryview(data)
        got = 0
        while got < count:
            read = self.connection.recv_into(view[got:])
            if not read:
                raise EOFError("the other worker is gone")
            got += read
        return data


def wait_for_readable(channels: Iterable[Any], seconds: float | None) -> list[Any]:
    """Wait at most `seconds`. Return those of the channels (or of objects with a `fileno`) with something to read."""
    by_file = {channel.fileno(): channel for channel in channels}
    polling = select.poll()  # select() does not work for file numbers above 1023
    for file in by_file:
        polling.register(file, select.POLLIN)
    return [by_file[file] for file, _ in polling.poll(None if seconds is None else 1e3 * seconds)]
