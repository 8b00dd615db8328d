"""What `libero_warp` launches on a GPU, without one: Warp's CPU device calls itself CUDA, and launches compute nothing.

    python tools/libero_warp_kernels.py launches
    python tools/libero_warp_kernels.py compile [--tasks libero_spatial/0 ...] [--jobs 16] [--arch 90]

`launches` prints how often an action launches something and waits for the device. `compile` fills Warp's cache of
compiled kernels with those of tasks, in as many processes as there are cores, and skips what is there already: without
it the first action of the first process compiles them one after another, for minutes. The sizes of a task's model are
written into some kernels, so name each task that will be played. `--arch` is the GPU's compute capability, by default
that of the GPU of this machine. Runs where the extra `libero-warp` is installed.
"""

# ruff: noqa: SLF001 - Warp offers no public way

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Self
from unittest.mock import patch

import numpy as np
import torch
import warp as wp
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from warp._src import context as warp_context

from vla_rl.core.contexts import EnvContext
from vla_rl.plugins.envs.libero.single_env import suite_numbers
from vla_rl.plugins.envs.libero.warp.batch import WorldBatch
from vla_rl.plugins.envs.libero.warp.config import LiberoWarpConfig
from vla_rl.plugins.envs.libero.warp.env import LiberoWarpEnv, make_env

CUDA_BLOCK = 256
"""Threads of a block, where a launch names none."""
HOST_READS = {"item", "tolist", "__bool__", "__int__", "__float__", "nonzero", "cpu"}
"""Functions of a tensor that wait for the device."""
COMPILED, CACHED, FAILED = range(3)
"""Exit codes of a process that compiles a module."""
RESULTS = ("compiled", "in the cache", "failed")


class Pretended:
    """Warp's CPU device, which calls itself CUDA."""

    is_cuda, is_cpu, sm_count, arch = True, False, 132, 90

    def __init__(self, device: Any) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)


class TorchOnCuda(TorchFunctionMode):
    """Puts what is asked for "cuda" on the CPU, and counts what would wait for a device."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self._counts = counts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.device:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        on_device = any(map(_is_cuda, [*args, *kwargs.values()]))
        uploads = on_device and name in {"to", "as_tensor", "tensor"}
        lists = name in {"__getitem__", "__setitem__"} and _has_list(args[1])
        blocking = lists or (uploads and not kwargs.get("non_blocking", False))
        self._counts["waits"] += int(name in HOST_READS or blocking)
        self._counts["launches"] += int(name == "cpu" or uploads or lists)  # copies, which are none on the CPU
        args = [torch.device("cpu") if _is_cuda(each) else each for each in args]
        kwargs = {key: torch.device("cpu") if _is_cuda(each) else each for key, each in kwargs.items()}
        return func(*args, **kwargs)


def _is_cuda(value: Any) -> bool:
    return (isinstance(value, torch.device) and value.type == "cuda") or (
        isinstance(value, str) and value.startswith("cuda")
    )


def _has_list(index: Any) -> bool:
    """Return whether an index is copied to the device before it is used."""
    return any(isinstance(each, list | np.ndarray) for each in (index if isinstance(index, tuple) else (index,)))


class TorchLaunches(TorchDispatchMode):
    """Counts torch's operators, except those that only look at a tensor in another way."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        views = [each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns]
        self._counts["launches"] += int(not any(views) and "_unsafe_view" not in str(func))
        return func(*args, **(kwargs or {}))


class Capture:
    """A graph that is captured: what is launched meanwhile counts as its own."""

    counts: Counter[str]
    fails: str | None = None
    """What the driver says instead."""

    def __enter__(self) -> Self:
        self.graph = Counter[str]()
        self._before = self.counts.copy()
        return self

    def __exit__(self, *_: object) -> None:
        self.graph.update(self.counts - self._before)
        self.counts.clear()
        self.counts.update(self._before)
        if self.fails:
            raise RuntimeError(self.fails)


@contextmanager
def pretend_cuda(note: Callable[[Any, int], None] = lambda *_: None) -> Iterator[Counter[str]]:  # noqa: C901
    """Let `libero_warp` run as on a GPU, on the CPU, without computing anything. Worlds report that nothing happened.

    Args:
        note: called with each module of kernels that would be loaded, and its threads of a block.

    Returns:
        counts: "launches" of kernels, of torch's operators, of copies and of graphs, which count as one; "graphs" among
            them; "waits" of the host for the device.
    """
    counts = Counter[str]()
    real_device, cpu = wp.get_device, wp.get_device("cpu")

    def count(function: Callable[..., Any], key: str = "launches") -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            counts[key] += 1
            return function(*args, **kwargs)

        return counted

    def load(module: Any, device: Any, block_dim: int | None = None, *_: Any, **__: Any) -> None:
        note(module, int(module.options["block_dim"] if block_dim is None else block_dim))

    def get_device(name: Any = None) -> Any:
        from_physics = sys._getframe(1).f_globals.get("__name__", "").startswith("mujoco_warp.")
        return Pretended(real_device(name)) if from_physics else real_device(name)

    def find_device(device: Any) -> Any:
        if isinstance(device, torch.device) and device.index is None:
            raise TypeError("list indices must be integers or slices, not NoneType")  # as Warp
        return cpu

    def suggest_block(kernel: Any, device: Any = None) -> tuple[int, int]:
        kernel.module.load(device)
        return CUDA_BLOCK, 2 * Pretended.sm_count

    def run_body(condition: Any, while_body: Callable[..., None], stream: Any = None, **arguments: Any) -> None:
        while_body(**arguments)

    def run_branches(
        condition: Any, on_true: Any = None, on_false: Any = None, stream: Any = None, **arguments: Any
    ) -> None:
        for branch in (on_true, on_false):
            if branch is not None:
                branch(**arguments)

    def launch_graph(graph: Any) -> None:
        counts.update(launches=1, graphs=1)

    allocate = WorldBatch._allocate_results

    def allocate_results(batch: WorldBatch) -> None:
        allocate(batch)
        report_worlds(batch)

    import mujoco_warp._src.collision_convex as convex

    def choose_grid(kernel: Any, size: int, device: Any) -> int:
        kernel.module.load(device)
        return size

    in_warp = {
        "get_device": get_device,
        "get_suggested_block_size": suggest_block,
        "capture_while": run_body,
        "capture_if": run_branches,
        "device_from_torch": find_device,
        "stream_from_torch": lambda stream: stream,
        "ScopedStream": lambda stream: wp.ScopedDevice("cpu"),
        "ScopedCapture": type("Capture", (Capture,), {"counts": counts}),
        "capture_launch": launch_graph,
        "synchronize_device": count(lambda: None, "waits"),
        "is_cuda_available": lambda: True,
    }
    with ExitStack() as stack:
        stack.enter_context(patch.multiple(wp, **in_warp))
        stack.enter_context(patch.multiple(warp_context.Module, load=load))
        stack.enter_context(patch.object(WorldBatch, "_allocate_results", allocate_results))
        for holder, name in ((wp.array, "zero_"), (wp.array, "fill_")):
            stack.enter_context(patch.object(holder, name, _count_method(getattr(holder, name), counts)))
        for name in ("launch", "copy"):
            counted = count(getattr(warp_context, name))
            stack.enter_context(patch.object(warp_context, name, counted))
            stack.enter_context(patch.object(wp, name, counted))
        stack.enter_context(patch.object(warp_context, "_resolve_launch_block_dim", _choose_block))
        stack.enter_context(patch.object(convex, "_ccd_grid_size", choose_grid))
        stack.enter_context(patch.object(torch.cuda, "current_stream", lambda device: device))
        stack.enter_context(patch.object(torch.cuda, "mem_get_info", lambda device: (2**37, 2**37)))
        stack.enter_context(TorchOnCuda(counts))
        stack.enter_context(TorchLaunches(counts))
        yield counts


def _count_method(method: Callable[..., Any], counts: Counter[str]) -> Callable[..., Any]:
    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        counts["launches"] += 1
        return method(self, *args, **kwargs)

    return counted


def _choose_block(device: Any, block_dim: int | None) -> int:
    return CUDA_BLOCK if block_dim is None or block_dim <= 0 else int(block_dim)


def start_env(suite: str, task: int, **settings: Any) -> LiberoWarpEnv:
    """Return two envs of a task on the pretended GPU."""
    config = LiberoWarpConfig(suite=suite, tasks=(task,), **settings)
    env = make_env(config, EnvContext(num_envs=2, chunk=1, device="cuda"))
    first = suite_numbers(config.official())[suite] * 1_000_000 + task * 1000
    env.reset(np.arange(2), np.array([first, first + 1]), np.zeros(2, np.int64))
    return env


def report_worlds(batch: WorldBatch, overflow: Any = 0, contacts: Any = 0, sound: Any = 1, success: Any = 0) -> None:
    """Let the worlds report numbers after each action, which no kernel overwrites: of one world or of each."""
    report = wp.to_torch(batch._report)
    for column, values in enumerate((overflow, contacts, sound, success)):
        report[:, column] = torch.as_tensor(values, dtype=torch.int32)


def count_action(env: LiberoWarpEnv, counts: Counter[str]) -> Counter[str]:
    """Return what an action adds: a chunk of nine less a chunk of one, after a first one."""
    found = []
    for size in (1, 1, 9):
        counts.clear()
        env.chunk_step(np.zeros((2, size, 7), np.float32), np.ones(2, bool), False)
        found.append(counts.copy())
    assert not env.faults()
    return Counter({key: (found[2][key] - found[1][key]) / 8 for key in found[2]})


def print_launches() -> None:
    for graphs in (True, False):
        with pretend_cuda() as counts:
            env = start_env("libero_spatial", 0, cameras={"agentview": 64, "wrist": 64}, graphs=graphs)
            action = count_action(env, counts)
            counts.clear()
            env.chunk_step(np.zeros((2, 1, 7), np.float32), np.ones(2, bool), False)
            chunk = {key: counts[key] - action[key] for key in ("launches", "waits")}
            env.close()
        print(f"graphs: {graphs}: an action {dict(action)}; besides, a chunk with its observation {chunk}", flush=True)


class Compiler:
    """Fills Warp's cache of kernels, a forked process for each module that it does not have."""

    def __init__(self, jobs: int, arch: int, use_ptx: bool = False) -> None:
        self.results = Counter[str]()
        """How many modules were compiled, were in the cache, and failed."""
        self._jobs, self._arch, self._use_ptx = jobs, arch, use_ptx
        self._seen = set[str]()
        self._running: dict[int, tuple[str, float]] = {}

    def add(self, module: Any, block: int) -> None:
        """Compile a module for threads of a block, when a process is free; once, however often it is added."""
        module.get_module_hash(block)
        name = module.get_module_identifier(block)
        if name in self._seen:
            return
        self._seen.add(name)
        self._wait(self._jobs - 1)
        pid = os.fork()
        if pid:
            self._running[pid] = module.name, time.time()
            return
        code = FAILED
        try:
            options = module.resolved_options[block]
            made = module._compile(output_arch=self._arch, use_ptx=self._use_ptx, options=options)
            code = COMPILED if made else CACHED
        except BaseException:
            traceback.print_exc()
        os._exit(code)

    def finish(self) -> None:
        """Wait for the processes."""
        self._wait(0)

    def _wait(self, most: int) -> None:
        while len(self._running) > most:
            pid, status = os.wait()
            if pid not in self._running:
                continue  # somebody else's
            name, began = self._running.pop(pid)
            code = os.waitstatus_to_exitcode(status)
            result = RESULTS[code] if code in (COMPILED, CACHED) else RESULTS[FAILED]
            self.results[result] += 1
            if code != CACHED:
                print(f"{name}: {result}, {time.time() - began:.0f} s", flush=True)


def compile_kernels(tasks: Sequence[str], jobs: int, arch: int | None) -> Counter[str]:
    """Compile the modules of tasks. Return how many were compiled, were in the cache, and failed."""
    began, gpus = time.time(), wp.get_cuda_devices()
    if arch is None and not gpus:
        raise SystemExit("there is no GPU here: give --arch, such as 90 for an H100 or H200")
    use_ptx = bool(gpus) and gpus[0].get_cuda_output_format() == "ptx"
    compiler = Compiler(jobs, gpus[0].get_cuda_compile_arch() if arch is None else arch, use_ptx)
    for name in tasks:
        suite, _, task = name.partition("/")
        with pretend_cuda(compiler.add):
            env = start_env(suite, int(task), cameras={"agentview": 64, "wrist": 64}, graphs=False)
            env.chunk_step(np.zeros((2, 1, 7), np.float32), np.ones(2, bool), False)
            env.close()
    compiler.finish()
    results = compiler.results
    counts = ", ".join(f"{results[result]} {result}" for result in RESULTS)
    print(f"{results.total()} modules: {counts}; {time.time() - began:.0f} s, in {wp.config.kernel_cache_dir}")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("launches", "compile"))
    parser.add_argument("--tasks", nargs="+", default=["libero_spatial/0"])
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--arch", type=int)
    args = parser.parse_args()
    wp.init()
    if args.what == "launches":
        print_launches()
    elif compile_kernels(args.tasks, args.jobs, args.arch)[RESULTS[FAILED]]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
