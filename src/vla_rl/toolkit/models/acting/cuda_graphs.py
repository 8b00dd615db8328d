"""CUDA graphs for acting: a decision's kernels are launched by one call instead of thousands.

A graph has fixed shapes and addresses. So a batch is padded to the next of a few sizes and copied into buffers that
never move, random numbers included (they are drawn before), and the results are copied out. Weights may change in
place. Nothing inside may look at values on the host.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol

import torch
from attrs import frozen
from torch import Tensor

logger = logging.getLogger(__name__)

Tensors = Mapping[str, Tensor]
"""Name -> tensor whose first dimension is the batch."""
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Batch sizes that are captured when they are first needed; larger batches are padded to a multiple of the largest."""
MAX_LAYOUTS = 8
"""Most layouts of inputs that are captured (sampled, greedy, prompt widths): each costs memory for every batch size."""
WARM_UP = 3
"""Runs before the capture, in which kernels are compiled and chosen, as PyTorch asks for."""


_Layout = tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
"""Name, shape without the batch, and type of each input."""


class Recorder(Protocol):
    """Turns a function without arguments into one that repeats it on the same memory."""

    def record_function(self, run: Callable[[], None]) -> Callable[[], None]:
        """Run the function a few times, and return the function that repeats it."""


class CudaGraphRecorder:
    """Captures CUDA graphs. All of them share one memory pool, since results are copied out before another one runs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def record_function(self, run: Callable[[], None]) -> Callable[[], None]:
        with torch.cuda.device(self._device):
            return self._record_graph(run)

    def _record_graph(self, run: Callable[[], None]) -> Callable[[], None]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        # Autocast keeps narrow copies of weights until it ends; a graph that read such a copy would read freed memory.
        torch.clear_autocast_cache()
        graph = torch.cuda.CUDAGraph()
        # another thread of the process may train meanwhile
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            run()
        torch.clear_autocast_cache()
        self._pool = graph.pool()
        return graph.replay


@frozen(eq=False)
class _Capture:
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    replay: Callable[[], None]


class CapturedFunction:
    """A function from tensors to tensors, captured once for each padded batch size. Rows of a batch must not depend on
    each other. A padded row repeats the batch's last one."""

    def __init__(
        self,
        function: Callable[[Tensors], Tensors],
        recorder: Recorder,
        sizes: Sequence[int] = SIZES,
        state: Callable[[], Hashable] = lambda: None,
    ) -> None:
        """Create the function.

        Args:
            sizes: padded batch sizes.
            state: returns what decides the function's kernels besides its inputs; each state has its own graphs.
        """
        self._function = function
        self._state = state
        self._recorder = recorder
        self._sizes = tuple(sorted(sizes))
        self._captures: dict[tuple[Any, ...], _Capture] = {}
        self._layouts: dict[_Layout, None] = {}
        """Captured layouts of the inputs."""
        self._warned = False

    @property
    def capture_count(self) -> int:
        """Number of graphs."""
        return len(self._captures)

    def __call__(self, inputs: Tensors) -> dict[str, Tensor]:
        """Return the function's results for a batch. They are copies, which the next call leaves as they are. Each of
        the first `MAX_LAYOUTS` layouts of the inputs (shapes without the batch, and types) has its own graphs, such as
        prompts of a few widths. Later ones are computed without a graph, and a warning names what changed."""
        rows = len(next(iter(inputs.values())))
        layout = tuple((name, tuple(tensor.shape[1:]), tensor.dtype) for name, tensor in sorted(inputs.items()))
        if layout not in self._layouts:
            if len(self._layouts) == MAX_LAYOUTS:
                self._warn_uncaptured(layout)
                return dict(self._function(inputs))
            self._layouts[layout] = None
        size = padded_size(rows, self._sizes)
        key = (size, layout, self._state())
        if key not in self._captures:
            self._captures[key] = self._capture_graph(inputs, size)
        return self._run_capture(self._captures[key], inputs, rows)

    def _run_capture(self, capture: _Capture, inputs: Tensors, rows: int) -> dict[str, Tensor]:
        for name, tensor in inputs.items():
            buffer = capture.inputs[name]
            buffer[:rows].copy_(tensor, non_blocking=True)
            if rows < len(buffer):
                buffer[rows:].copy_(tensor[-1:].expand(len(buffer) - rows, *tensor.shape[1:]), non_blocking=True)
        capture.replay()
        return {name: tensor[:rows].clone() for name, tensor in capture.outputs.items()}

    def _capture_graph(self, inputs: Tensors, size: int) -> _Capture:
        buffers = {name: tensor.new_empty(size, *tensor.shape[1:]) for name, tensor in inputs.items()}
        for name, tensor in inputs.items():  # warm-up runs on values that the function may meet
            buffers[name].copy_(tensor[-1:].expand(size, *tensor.shape[1:]))
        outputs: dict[str, Tensor] = {}

        def compute_outputs() -> None:
            outputs.update(self._function(buffers))

        replay = self._recorder.record_function(compute_outputs)
        return _Capture(buffers, outputs, replay)

    def _warn_uncaptured(self, layout: _Layout) -> None:
        if self._warned:
            return
        self._warned = True
        captured = {entry for known in self._layouts for entry in known}
        name, shape = next((entry[:2] for entry in layout if entry not in captured), layout[0][:2])
        logger.warning(
            "inputs of %d shapes were captured, and %s now has another one (%s), so this batch acts without a CUDA "
            "graph; keep its shape fixed, or set rollout.compile: blocks",
            MAX_LAYOUTS,
            name,
            list(shape),
        )


def padded_size(rows: int, sizes: Sequence[int] = SIZES) -> int:
    """Return the smallest of the ascending sizes that holds this many rows; beyond them, a multiple of the largest."""
    largest = sizes[-1]
    return next((size for size in sizes if size >= rows), -(-rows // largest) * largest)
