"""Resources of a machine, and a description of the devices that the roles of a run use."""

from __future__ import annotations

import ctypes
import os
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch

from vla_rl.core.errors import UserError
from vla_rl.core.plan import Cluster
from vla_rl.toolkit.placement.devices import ROLES
from vla_rl.toolkit.process_limits import count_cpus, read_memory

if TYPE_CHECKING:
    from vla_rl.runtime.placement.assignments import Assignment


class WorkerDevice(NamedTuple):
    """Device of one worker."""

    number: int | None = None
    """Number of the GPU, as `nvidia-smi` counts where that is known; None: CPUs."""
    model: str = ""
    """Model of the GPU, such as "NVIDIA H200"."""


def own_device(kind: str) -> WorkerDevice:
    """Return the device of this process, for a worker whose slot is on "cuda" or "cpu"."""
    if kind == "cpu":
        return WorkerDevice()
    number = torch.cuda.current_device()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    # torch counts the visible devices alone, from 0; others know a GPU by the machine's number.
    outside = visible[number] if number < len(visible) else ""
    return WorkerDevice(int(outside) if outside.isdigit() else number, torch.cuda.get_device_name(number))


def torch_threads(cpus: float) -> int:
    """Return torch's threads in a worker with this many cores: one each, and at most OMP_NUM_THREADS where set."""
    cores, omp_threads = max(1, int(cpus)), os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return min(cores, int(omp_threads)) if omp_threads.isdigit() and int(omp_threads) else cores


def check_device(name: str | None) -> str:
    """Return the device's name, or the default for None. Raises UserError where torch has no such device."""
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    gpus = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    known = ["cpu", *gpus]
    if name not in known and not (name == "cuda" and gpus):
        raise UserError(f"there is no device {name!r}; torch sees: {', '.join(known)}")
    return name


def machine_resources() -> Cluster:
    """Return the resources of this machine."""
    gpus = torch.cuda.device_count()
    return Cluster(
        cpus=float(count_cpus()),
        gpus=gpus,
        memory=read_memory()[1],
        gpu_memory=smallest_gpu_memory() if gpus else None,
    )


class _NvmlMemory(ctypes.Structure):
    """Memory of a GPU as NVML reports it, in bytes (`nvmlMemory_t`)."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def smallest_gpu_memory() -> int | None:
    """Return the bytes of this machine's smallest GPU; None without NVIDIA's driver. No CUDA context is created."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    count, sizes = ctypes.c_uint(), []
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return None
    for index in range(count.value):
        handle, memory = ctypes.c_void_p(), _NvmlMemory()
        unreadable = nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
        if not unreadable and not nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)):
            sizes.append(int(memory.total))
    return min(sizes, default=None)


def describe_placement(assignments: Sequence[Assignment], devices: Sequence[WorkerDevice]) -> str:
    """Return a description such as `sim cpu x2, policy cuda:0, learner cuda:0-3 (NVIDIA H200)`."""
    workers = [(assignment.slot, device.number) for assignment, device in zip(assignments, devices, strict=True)]
    parts = [
        f"{role} {_devices_text([(s.node, number) for s, number in workers if role in s.roles])}" for role in ROLES
    ]
    models = ", ".join(dict.fromkeys(device.model for device in devices if device.model))
    slots = any(assignment.slot.device == "cpu" and assignment.slot.index is not None for assignment in assignments)
    note = models or ("no GPU was found: devices are CPU slots" if slots else "")
    return ", ".join(parts) + (f" ({note})" if note else "")


def _devices_text(workers: Sequence[tuple[str | None, int | None]]) -> str:
    descriptions = []
    for node in dict.fromkeys(node for node, _ in workers):
        numbers = [number for of, number in workers if of == node]
        cpus, gpus = numbers.count(None), Counter(number for number in numbers if number is not None)
        where = "" if node is None else f"{node}:"
        if cpus:
            descriptions.append(f"{where}cpu{_times_text(cpus)}")
        descriptions += [
            f"{where}cuda:{_ranges_text([n for n in gpus if gpus[n] == count])}{_times_text(count)}"
            for count in sorted(set(gpus.values()))
        ]
    return " + ".join(descriptions)


def _times_text(count: int) -> str:
    return f" x{count}" if count > 1 else ""


def _ranges_text(numbers: Sequence[int]) -> str:
    """Return ranges of numbers as text: [0, 1, 2, 4] -> "0-2,4"."""
    ordered = sorted(numbers)
    cuts = [0, *(i + 1 for i, (a, b) in enumerate(pairwise(ordered)) if b != a + 1), len(ordered)]
    runs = [ordered[a:b] for a, b in pairwise(cuts)]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
