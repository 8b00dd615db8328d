"""Weights from a learner's process to a policy's, by each strategy of `placement.weight_transfer`.

    python benchmarks/weight_transfer.py [--strategies host nccl] [--gigabytes 1] [--repeats 9] [--json FILE]

One version of the weights (1 GB in bf16, 256 tensors) goes from the parameters of one process into those of another.
Each round measures the transfer and one copy of the same bytes within a process in turn, so that whatever else the
machine does meets both; medians, and the median ratio of neighbours (bar: 1.5). One pair of processes runs all rounds.

Also the memory that the receiver takes beyond its parameters, at its peak: a second copy of all weights would be as
large as a version. Memory of the sender that it maps is the sender's.

On a GPU: `--device cuda --strategies ipc host`, both processes on one device; `--strategies nccl` needs two. The copy
is one on the device then.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from vla_rl.runtime.comm.process_group import address_of, open_listener
from vla_rl.runtime.comm.weight_transfer.connect import BUCKET_BYTES, open_receiver, open_sender
from vla_rl.runtime.messages.weights import WeightLayout, WeightTransfer

TENSORS = 256
BAR = 1.5
DEADLINE_S = 120.0


def parameters(nbytes: int, device: torch.device, value: int) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors of a version."""
    numbers = nbytes // TENSORS // 2
    full = [torch.full((numbers,), float(value), dtype=torch.bfloat16, device=device) for _ in range(TENSORS)]
    return [(f"layer.{i}", tensor) for i, tensor in enumerate(full)]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


class Memory:
    """Memory that this process has for itself: what the kernel has given it, or torch on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        self.before = self._now()
        self.peak = self.before

    def look(self) -> None:
        self.peak = max(self.peak, torch.cuda.max_memory_allocated() if self.on_gpu else self._now())

    def _now(self) -> int:
        if self.on_gpu:
            return torch.cuda.memory_allocated()
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def device_of(kind: str, rank: int, strategy: str) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", rank if strategy == "nccl" else 0)
    torch.cuda.set_device(device)
    return device


def send(kind: str, strategy: str, nbytes: int, pipe: Any) -> None:
    """Send a version whenever one is wanted."""
    torch.set_num_threads(1)
    device = device_of(kind, 0, strategy)
    pairs = parameters(nbytes, device, 1)
    listener = open_listener("127.0.0.1")
    pipe.send(address_of(listener))
    sender = open_sender(pipe.recv(), device, listener)
    while pipe.recv():
        sender.send_version(pairs, False)


def receive(kind: str, strategy: str, nbytes: int, repeats: int, pipe: Any, wanted: Any) -> None:
    """Receive a version and copy one, in turn; then send back (seconds of both, bytes beyond the parameters)."""
    torch.set_num_threads(1)
    device = device_of(kind, 1, strategy)
    pairs = parameters(nbytes, device, 0)
    source = parameters(nbytes, device, 0)
    held = dict(pairs)
    receiver = open_receiver(pipe.recv(), 0, device)
    transfers, copies = [], []
    memory = Memory(device)
    for repeat in range(repeats + 1):
        started = perf_counter()
        wanted.send(True)
        receiver.wait_for_version(None)
        for name, tensor in receiver.named_tensors():
            held[name].copy_(tensor)
            if repeat == 0:
                memory.look()
        synchronize(device)
        transfers.append(perf_counter() - started)
        assert all(bool((tensor == 1).all()) for tensor in held.values())
        started = perf_counter()
        for (_, tensor), (_, other) in zip(pairs, source, strict=True):
            tensor.copy_(other)
        synchronize(device)
        copies.append(perf_counter() - started)
    wanted.send(False)
    pipe.send((transfers[1:], copies[1:], memory.peak - memory.before))


def measure(kind: str, strategy: str, nbytes: int, repeats: int, bucket_bytes: int) -> dict[str, float]:
    """Return the figures of one strategy."""
    context = multiprocessing.get_context("spawn")
    to_sender, of_sender = context.Pipe()
    to_receiver, of_receiver = context.Pipe()
    asked, wanted = context.Pipe(duplex=False)
    sender = context.Process(target=send, args=(kind, strategy, nbytes, of_sender))
    receiver = context.Process(target=receive, args=(kind, strategy, nbytes, repeats, of_receiver, wanted))
    for process in (sender, receiver):
        process.start()
    try:
        transfer = WeightTransfer(
            strategy=strategy,  # type: ignore[arg-type]
            through_store=False,
            layout=WeightLayout.of_weights(parameters(nbytes, torch.device("meta"), 0), bucket_bytes),
            address=to_sender.recv(),
            learner=1,
            policies=(0,),
            deadline_s=DEADLINE_S,
        )
        to_sender.send(transfer)
        to_receiver.send(transfer)
        goes_on = True
        while goes_on:
            goes_on = asked.recv()
            to_sender.send(goes_on)
        transfers, copies, beyond = to_receiver.recv()
    finally:
        for process in (sender, receiver):
            process.join(timeout=10)
            process.kill()
    ratios = [transfer / copy for transfer, copy in zip(transfers, copies, strict=True)]
    return {
        "transfer_s": statistics.median(transfers),
        "copy_s": statistics.median(copies),
        "ratio": statistics.median(ratios),
        "least_ratio": min(transfers) / min(copies),
        "receiver_extra_mib": beyond / 2**20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", nargs="+", choices=["host", "nccl", "ipc"], default=["host", "nccl"])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--bucket-mib", type=float, help="default: the runtime's")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    nbytes = int(options.gigabytes * 1e9)
    bucket_bytes = int(options.bucket_mib * 2**20) if options.bucket_mib else BUCKET_BYTES[options.device]
    print(f"{options.gigabytes:g} GB of weights between two processes on {options.device} (bar: {BAR} copies)")
    figures: dict[str, dict[str, float]] = {}
    for strategy in options.strategies:
        one = measure(options.device, strategy, nbytes, options.repeats, bucket_bytes)
        figures[strategy] = one
        print(
            f"{strategy:5} {1e3 * one['transfer_s']:7.1f} ms   one copy {1e3 * one['copy_s']:7.1f} ms   ratio "
            f"{one['ratio']:5.2f} (of the fastest {one['least_ratio']:5.2f})   receiver's memory beyond its parameters "
            f"{one['receiver_extra_mib']:6.1f} MiB"
        )
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
