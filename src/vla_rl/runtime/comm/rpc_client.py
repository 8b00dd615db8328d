"""The policy's end of a channel: calls to the simulators of another worker, for one rollout."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

from attrs import define

from vla_rl.runtime.comm.channel import Channel, wait_for_readable
from vla_rl.runtime.comm.rpc_server import END, FAILED, NUMBER

LOOK_S = 1.0
"""Seconds between two checks with Ray of whether the other worker still serves, while a caller waits for an answer."""


class RemoteTraceback(Exception):
    """Traceback of an exception in the other worker, attached as its cause."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@define(eq=False)
class PendingCall:
    """Pending call through a channel."""

    client: RpcClient
    done: bool = False
    value: Any = None


class RpcClient:
    """The policy's end of a channel, for one rollout. Answers may come in any order."""

    def __init__(self, channel: Channel, check: Callable[[bool], None]):
        """Create a client. `check(wait)` raises the error that ended the other worker's `serve`; if `wait`, it waits
        for the end of `serve`."""
        self.channel = channel
        self.check = check
        self.count = 0
        self.waiting: dict[int, PendingCall] = {}
        """Number of the call -> the pending call."""

    def fileno(self) -> int:
        return self.channel.fileno()

    def call(self, *request: Any) -> PendingCall:
        number = self.count
        self.count += 1
        pending = PendingCall(self)
        self.waiting[number] = pending
        message = NUMBER.pack(number) + pickle.dumps(request, protocol=5)
        self._run_checked(lambda: self.channel.send(message, self.receive))
        return pending

    def receive(self) -> None:
        """Wait for the next answer. Raises what its call raised."""
        answer = memoryview(self._next_message())
        (number,) = NUMBER.unpack(answer[1 : 1 + NUMBER.size])
        content = answer[1 + NUMBER.size :]
        if answer[:1] == FAILED:
            error, trace = pickle.loads(content)  # noqa: S301 - from our own workers
            raise error from RemoteTraceback(trace)
        pending = self.waiting.pop(number)
        pending.done = True
        pending.value = pickle.loads(content)  # noqa: S301 - from our own workers

    def end_rollout(self) -> None:
        """Tell the server that the rollout has ended, and drop the answers that are still to come."""
        self._run_checked(lambda: self.channel.send(END))
        while self._next_message() != END:
            pass

    def _next_message(self) -> bytearray:
        while not wait_for_readable([self], LOOK_S):
            self.check(False)
        message: bytearray = self._run_checked(self.channel.receive)
        return message

    def _run_checked(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except (EOFError, ConnectionError):
            self.check(True)  # raises the cause, if the other worker has died or failed
            raise
