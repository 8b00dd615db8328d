"""Creation of a transfer's ends, by strategy."""

from __future__ import annotations

import socket

import torch

from vla_rl.runtime.comm.weight_transfer.collective import CollectiveReceiver, CollectiveSender
from vla_rl.runtime.comm.weight_transfer.ends import WeightReceiver, WeightSender
from vla_rl.runtime.comm.weight_transfer.host import HostReceiver, HostSender, StoreReceiver, StoreSender
from vla_rl.runtime.comm.weight_transfer.ipc import IpcReceiver, IpcSender
from vla_rl.runtime.comm.weight_transfer.link import TransferLink
from vla_rl.runtime.messages.weights import WeightTransfer

BUCKET_BYTES = {"cuda": 64 * 2**20, "cpu": 4 * 2**20}
"""Kind of the learner's device -> bytes of a bucket. 4 MiB stay in a processor's cache between the two ends; a GPU
needs larger ones to reach the bandwidth of its links."""


def open_sender(transfer: WeightTransfer, device: torch.device, listener: socket.socket | None) -> WeightSender:
    """Create the learner's end, once all receivers are there. `listener`: listening socket at `transfer.address`."""
    if transfer.through_store:
        return StoreSender(transfer.layout)
    link = TransferLink(transfer, 0, listener)
    if transfer.strategy == "nccl":
        return CollectiveSender(link, device)
    return IpcSender(link, device) if transfer.strategy == "ipc" else HostSender(link)


def open_receiver(transfer: WeightTransfer, worker: int, device: torch.device) -> WeightReceiver:
    """Create the end of the policy of this worker."""
    if transfer.through_store:
        return StoreReceiver(transfer.layout)
    link = TransferLink(transfer, 1 + transfer.policies.index(worker), None)
    if transfer.strategy == "nccl":
        return CollectiveReceiver(link, device)
    return IpcReceiver(link, device) if transfer.strategy == "ipc" else HostReceiver(link)
