"""The simulators' end of the channels: it answers calls of the policies that act for them."""

from __future__ import annotations

import pickle
import socket
import struct
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from vla_rl.runtime.comm.channel import Channel, wait_for_readable
from vla_rl.runtime.comm.shared_memory import host_key

NUMBER = struct.Struct("!Q")
"""Number of a call, which its answer carries too."""
END, GOOD, FAILED = b"e", b"g", b"f"
"""First byte of an answer, before its NUMBER. A request begins with its NUMBER, unless it is END."""


class RpcServer:
    """The simulators' end of the channels: it answers calls of policies, which are known by their workers' indices."""

    def __init__(self, threads: int = 0) -> None:
        """Create a server that runs `threads` calls concurrently; 0: one after another, in the thread that serves."""
        self.channels: dict[int, Channel] = {}
        self.ended: set[int] = set()
        """Policies whose rollout ended before their call of `answer_calls` began."""
        self.pool = ThreadPoolExecutor(threads, "lane") if threads else None
        self.running: dict[int, list[Future[None]]] = {}
        """Policy -> its calls that run in threads."""
        self.broken: BaseException | None = None
        """Error of a thread that could not be sent to any policy; `answer_calls` raises it."""

    def connect_policy(self, policy: int, reader: Any, address: str) -> bool:
        """Connect to a policy's worker on the machine `reader` (its `host_key()`). Return False where that fails."""
        if reader is None or reader != host_key():
            return False
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(address)
        except OSError:  # for example another file system
            connection.close()
            return False
        if policy in self.channels:
            self.channels[policy].close()
        self.channels[policy] = Channel(connection)
        self.ended.discard(policy)
        return True

    def answer_calls(self, policy: int, call: Callable[..., Any]) -> None:
        """Answer calls of all policies until this policy's rollout ends or its worker is gone."""
        try:
            while policy not in self.ended:
                open_channels = {channel: other for other, channel in self.channels.items() if other not in self.ended}
                for channel in wait_for_readable(open_channels, None):
                    self._answer_message(open_channels[channel], channel, call)
        except BaseException:
            for channel in self.channels.values():  # otherwise the policies would wait for answers forever
                channel.close()
            raise
        self.ended.discard(policy)
        if self.broken is not None:
            error = self.broken
            self.broken = None
            raise error

    def _answer_message(self, policy: int, channel: Channel, call: Callable[..., Any]) -> None:
        try:
            request = channel.receive()
            if request != END and self.pool is None:
                channel.send(_answer_to(request, call))
                return
            running = [future for future in self.running.get(policy, ()) if not future.done()]
            if request != END and self.pool is not None:
                self.running[policy] = [*running, self.pool.submit(self._answer_in_thread, channel, request, call)]
                return
            wait(running)  # answers that are no longer needed are sent before END, too
            channel.send(END)
        except (EOFError, OSError):
            channel.close()
            del self.channels[policy]
        self.ended.add(policy)

    def _answer_in_thread(self, channel: Channel, request: bytearray, call: Callable[..., Any]) -> None:
        """Answer one call in a thread of the pool."""
        try:
            channel.send(_answer_to(request, call))
        except OSError:
            pass  # the policy is gone; the thread in `answer_calls` reads EOF
        except BaseException as exc:
            self.broken = exc
            for other in tuple(self.channels.values()):
                other.end_connection()


def _answer_to(request: bytearray, call: Callable[..., Any]) -> bytes:
    number = bytes(request[: NUMBER.size])
    try:
        arguments = pickle.loads(memoryview(request)[NUMBER.size :])  # noqa: S301 - from our own workers
        return b"".join((GOOD, number, pickle.dumps(call(*arguments), protocol=5)))
    except Exception as exc:
        trace = traceback.format_exc()
        try:
            content = pickle.dumps((exc, trace))
            pickle.loads(content)  # noqa: S301 - some classes can be written and not be read
        except Exception:
            content = pickle.dumps((RuntimeError(f"{type(exc).__name__}: {exc}"), trace))
        return FAILED + number + content
