"""Two ends of a weight transfer, in two processes or in one, for tests."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import Any

import torch

from vla_rl.runtime.comm.process_group import address_of, open_listener
from vla_rl.runtime.comm.weight_transfer.connect import open_receiver, open_sender
from vla_rl.runtime.comm.weight_transfer.host import StoreReceiver, StoreSender
from vla_rl.runtime.messages.weights import WeightLayout, WeightTransfer

CPU = torch.device("cpu")


def weights(scale: int, count: int = 24, size: int = 50_000) -> list[tuple[str, torch.Tensor]]:
    """Tensors of several types and shapes; one is larger than a bucket of the tests, one is a scalar."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    pairs = [
        (f"layer.{i}", (torch.arange(size + 7 * i) % 251 * scale).to(dtypes[i % 3]).reshape(-1, 1))
        for i in range(count)
    ]
    return [*pairs, ("large", torch.full((3, 200_000), float(scale))), ("scalar", torch.tensor(1.5 * scale))]


def layout_of(pairs, bucket_bytes: int = 2**19) -> WeightLayout:
    return WeightLayout.of_weights(pairs, bucket_bytes)


def stored(layout: WeightLayout) -> WeightTransfer:
    """A transfer through the object store, whose ends need no connection."""
    return WeightTransfer(
        strategy="host", through_store=True, layout=layout, address="", learner=1, policies=(0,), deadline_s=10.0
    )


def pass_on(sender: StoreSender, receiver: StoreReceiver, pairs, check: bool = False):
    """Send a version through memory, as Ray passes it on. -> (pairs that arrive, checksums)."""
    memory, checksums = sender.send_version(pairs, check)
    receiver.wait_for_version(memory)
    return receiver.named_tensors(), checksums


def listening(strategy: str, layout: WeightLayout, policies: int, deadline_s: float) -> tuple[Any, WeightTransfer]:
    listener = open_listener("127.0.0.1")
    transfer = WeightTransfer(
        strategy=strategy,
        through_store=False,
        layout=layout,
        address=address_of(listener),
        learner=9,
        policies=tuple(range(policies)),
        deadline_s=deadline_s,
    )
    return listener, transfer


def send_versions(transfer: WeightTransfer, fd: int, reports: Any, go: Any, versions: int, stop_in: int) -> None:
    """Send versions. In the last one, after bucket `stop_in`, wait to be killed."""
    torch.set_num_threads(1)
    sender = open_sender(transfer, CPU, _listener(fd))
    try:
        for version in range(1, versions + 1):
            go.acquire()
            pairs = weights(version)
            if version == versions and stop_in >= 0:
                pairs = _stopping(pairs, reports, stop_in)
            _, checksums = sender.send_version(pairs, True)
            reports.send(("sent", version, checksums))
    except Exception as exc:
        reports.send(("sender failed", type(exc).__name__, str(exc)))
    time.sleep(1000)  # ends with the test


def receive_versions(transfer: WeightTransfer, worker: int, reports: Any, versions: int, stop_in: int) -> None:
    """Receive versions. In the last one, after `stop_in` tensors, wait to be killed."""
    torch.set_num_threads(1)
    receiver = open_receiver(transfer, worker, CPU)
    own = dict(weights(0))
    addresses = {name: tensor.data_ptr() for name, tensor in own.items()}
    try:
        for version in range(1, versions + 1):
            receiver.wait_for_version(None)
            for number, (name, tensor) in enumerate(receiver.named_tensors()):
                if version == versions and number == stop_in:
                    reports.send(("stopped", os.getpid(), ""))
                    time.sleep(1000)
                own[name].copy_(tensor)
            equal = all(torch.equal(own[name], tensor) for name, tensor in weights(version))
            reports.send(("received", version, equal and all(own[n].data_ptr() == a for n, a in addresses.items())))
    except Exception as exc:
        reports.send(("receiver failed", type(exc).__name__, str(exc)))
    time.sleep(1000)  # ends with the test


class Reports:
    """What the processes report. Each has a separate pipe: a shared queue's lock would stay locked by one that is
    killed."""

    def __init__(self, pipes: list[Any]) -> None:
        self.pipes = pipes

    def get(self, timeout: float) -> Any:
        ready = wait(self.pipes, timeout)
        assert ready, f"nothing was reported within {timeout:g} s"
        try:
            return ready[0].recv()
        except EOFError:
            self.pipes.remove(ready[0])
            return self.get(timeout)


@contextmanager
def two_ends(strategy: str, versions: int, policies: int = 1, deadline_s: float = 60.0, sender=-1, receiver=-1):
    """Run a sender and receivers in processes. -> (what they report, semaphore of versions, processes)."""
    context = multiprocessing.get_context("fork")
    listener, transfer = listening(strategy, layout_of(weights(0)), policies, deadline_s)
    pipes = [context.Pipe(duplex=False) for _ in range(1 + policies)]
    go = context.Semaphore(0)
    sending = context.Process(
        target=send_versions, args=(transfer, listener.fileno(), pipes[0][1], go, versions, sender), daemon=True
    )
    receiving = [
        context.Process(target=receive_versions, args=(transfer, i, pipes[1 + i][1], versions, receiver), daemon=True)
        for i in range(policies)
    ]
    for process in (sending, *receiving):
        process.start()
    listener.close()
    for _, end in pipes:
        end.close()
    try:
        yield Reports([end for end, _ in pipes]), go, (sending, *receiving)
    finally:
        for process in (sending, *receiving):
            process.kill()
            process.join()


def _listener(fd: int):
    return socket.socket(fileno=os.dup(fd))


def _stopping(pairs, reports, stop_in):
    for number, pair in enumerate(pairs):
        if number == stop_in:
            reports.send(("stopped", os.getpid(), ""))
            time.sleep(1000)
        yield pair
