"""Calls from a policy's worker to the workers of the simulators that it acts for. Workers of one machine talk through a
Unix socket during a rollout, which takes a tenth of the time of a Ray call. Ray carries the calls to other machines,
and says which worker died."""

from __future__ import annotations

import pickle
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

from attrs import define

from vla_rl.runtime.comm.channel import Channel, wait_for_readable
from vla_rl.runtime.comm.remote import OWN_ROLES
from vla_rl.runtime.comm.rpc_server import END, FAILED, NUMBER
from vla_rl.runtime.comm.shared_memory import host_key

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
        """Create a client. `check(wait)` raises the error that ended the other's `serve`, whose end it may await."""
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


MIXED_POLL_S = 0.001
"""Seconds between two polls of Ray where some simulators are on this machine and some are not."""


class RayPeers:
    """Other workers (Ray actors) as a policy's worker calls them. The driver watches how long calls take."""

    def __init__(self, own: int, actors: Mapping[int, Any], concurrent_lanes: bool):
        """Create the peers of worker `own`. `concurrent_lanes`: lanes of the other workers run concurrently."""
        import ray

        self.ray = ray
        self.own = own
        self.actors = actors
        self.concurrent_lanes = concurrent_lanes
        self.channels: dict[int, Channel] = {}
        self.clients: dict[int, RpcClient] = {}

    def open_channels(self, lanes: Mapping[int, Sequence[int]]) -> None:
        """Open channels to the workers on this machine. `lanes`: worker -> lanes that this policy acts for."""
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
                    self.channels[worker] = Channel(listener.accept()[0])

    def close(self) -> None:
        """Close the channels; the workers that serve them read EOF."""
        channels = self.channels
        self.channels = {}
        for channel in channels.values():
            channel.close()

    @contextmanager
    def through_channels(self) -> Iterator[None]:
        """Context in which calls go through the channels. An error closes all channels, without waiting for the answers
        that are still to come: a later rollout counts its calls from 0 again, and would take them for its own."""
        self.clients = {worker: self._make_client(worker, channel) for worker, channel in self.channels.items()}
        try:
            yield
            for client in self.clients.values():
                client.end_rollout()
        except BaseException:
            self.close()
            raise
        finally:
            self.clients = {}

    def call(self, worker: int, role: str, method: str, *arguments: Any) -> Any:
        """Call a method of another worker. Return a reference. Added envs have their own concurrency group
        ("background"), since a rollout may run at the same time."""
        if role not in OWN_ROLES:
            options = {"concurrency_group": "background"}
        elif worker in self.clients:
            return self.clients[worker].call(role, method, *arguments)
        else:
            options = {"concurrency_group": "lane"} if self.concurrent_lanes and role == "sim" else {}
        return self.actors[worker].call.options(**options).remote(pickle.dumps((role, method, arguments)))

    def value_of(self, reference: Any) -> Any:
        """Wait for a result. Raises what the call raised, or Ray's error for a worker that died."""
        if isinstance(reference, PendingCall):
            while not reference.done:
                reference.client.receive()
            return reference.value
        try:
            return self.ray.get(reference)
        except self.ray.exceptions.RayTaskError as exc:
            if isinstance(exc.cause, Exception):
                raise exc.cause from exc
            raise

    def wait_for_any(self, references: Sequence[Any], timeout: float | None) -> list[Any]:
        """Wait until at least one result is there, or the timeout (seconds). Return the references of these."""
        end = None if timeout is None else monotonic() + timeout
        pending = [reference for reference in references if isinstance(reference, PendingCall)]
        calls = [reference for reference in references if not isinstance(reference, PendingCall)]
        patience: float | None = 0.0
        while True:
            clients = {call.client for call in pending if not call.done}
            for client in wait_for_readable(clients, patience) if clients else ():
                while not all(call.done for call in pending if call.client is client) and wait_for_readable(
                    [client], 0
                ):
                    client.receive()
            ready: list[Any] = [call for call in pending if call.done]
            if calls:
                wait = patience if not clients else 0.0
                count = 1 if wait is None or wait else len(calls)
                ready.extend(self.ray.wait(calls, num_returns=count, timeout=wait)[0])
            left = None if end is None else max(0.0, end - monotonic())
            if ready or left == 0.0:
                return ready
            limits = [MIXED_POLL_S] if calls and clients else [LOOK_S] if clients else []
            patience = min([*limits, *([] if left is None else [left])], default=None)
            if clients and patience == LOOK_S:
                for client in clients:
                    client.check(False)

    def _make_client(self, worker: int, channel: Channel) -> RpcClient:
        serving = self.call(worker, "worker", "serve", self.own)

        def check_server(wait: bool) -> None:
            if wait or self.ray.wait([serving], timeout=0)[0]:
                self.value_of(serving)

        return RpcClient(channel, check_server)
