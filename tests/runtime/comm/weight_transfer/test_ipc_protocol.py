"""The signals of the strategy `ipc`, with host memory in place of a GPU's: a bucket is not overwritten before all policies
have copied it. Memory of a GPU, and its handles, need one.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing import reductions
from transfer_ends import CPU, layout_of, listening, weights

from vla_rl.core.errors import UserError
from vla_rl.runtime.comm.weight_transfer import ipc
from vla_rl.runtime.comm.weight_transfer.connect import open_receiver, open_sender

SHARED: list[torch.Tensor] = []


def shared_at(index: int) -> torch.Tensor:
    return SHARED[index]


@pytest.fixture
def one_memory(monkeypatch):
    """Threads of this process are the ends."""

    def share(tensor):
        SHARED.append(tensor)
        return shared_at, (len(SHARED) - 1,)

    SHARED.clear()
    monkeypatch.setattr(reductions, "reduce_tensor", share)
    monkeypatch.setattr(ipc, "_open_mapped_tensor", lambda rebuild, arguments, device: rebuild(*arguments))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))


@pytest.mark.usefixtures("one_memory")
def test_buckets_are_used_in_turn():
    layout = layout_of(weights(1))
    assert len(layout.buckets) > 2 * ipc.BUCKETS
    listener, transfer = listening("ipc", layout, 2, 30.0)
    received: dict[tuple[int, int], dict[str, torch.Tensor]] = {}

    def receive(worker):
        receiver = open_receiver(transfer, worker, CPU)
        for version in (1, 2, 3):
            receiver.wait_for_version(None)
            received[worker, version] = dict(receiver.named_tensors())  # kept until the version is complete

    threads = [threading.Thread(target=receive, args=(worker,), daemon=True) for worker in (0, 1)]
    for thread in threads:
        thread.start()
    sender = open_sender(transfer, CPU, listener)
    for version in (1, 2, 3):
        sender.send_version(weights(version), False)
    for thread in threads:
        thread.join(30)
    assert sum(memory.nbytes for memory in SHARED) == ipc.BUCKETS * layout.largest_bytes < layout.nbytes
    assert received.keys() == {(worker, version) for worker in (0, 1) for version in (1, 2, 3)}
    for (_, version), tensors in received.items():
        assert all(torch.equal(tensors[name], tensor) for name, tensor in weights(version))


@pytest.mark.usefixtures("one_memory")
def test_a_gpu_that_cannot_share_its_memory_says_what_to_do(monkeypatch):
    def refuse(tensor):
        raise RuntimeError("CUDA error: operation not supported")

    monkeypatch.setattr(reductions, "reduce_tensor", refuse)
    listener, transfer = listening("ipc", layout_of(weights(1)), 1, 30.0)
    with pytest.raises(
        UserError, match=r"CUDA cannot share .* operation not supported; set placement.weight_transfer to"
    ):
        open_sender(transfer, CPU, listener)
