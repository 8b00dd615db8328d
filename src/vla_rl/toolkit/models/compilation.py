"""Regional compilation: a model's repeated layers (blocks) are compiled, once for each class of them.

A transformer of 32 equal layers is compiled as one layer, so the first call costs seconds and not minutes, and all that
is between two matrix products becomes one kernel. Parameters, their names and `state_dict` do not change. The compiled
code sits under `Module.__call__`, so hooks (FSDP gathers weights in them) and adapters inside the block stay as they
are. Gradient checkpointing of the block is compiled with it.

A compiler that fails never stops a run: the blocks are then computed in eager mode, and `CompiledBlocks.notes` says why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from time import perf_counter
from types import FunctionType
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor, nn
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

logger = logging.getLogger(__name__)

MAX_RECOMPILATIONS = 8
"""Recompilations of one class of blocks after which a warning names the input that changed. Two or three are normal: a
second batch size and a second prompt length make these dimensions dynamic, and a batch of one is a case of its own."""
GRAPH_LIMIT = 64
"""Graphs of one class of blocks; PyTorch's own limit of 8 is too low for blocks that act and learn."""
Shapes = Mapping[str, tuple[int, ...]]


@frozen(kw_only=True)
class CompilationReport:
    """What the compiler did since the last report."""

    graphs: int = 0
    """Graphs that were compiled, recompilations included."""
    seconds: float = 0.0
    """Seconds of the calls that compiled something."""
    recompilations: int = 0
    """Graphs of a class of blocks beyond its first one with, and its first one without gradient."""
    notes: tuple[str, ...] = ()
    """Remarks for results.json and the console: the compiler failed, or compiles too often."""

    def metrics(self) -> dict[str, float]:
        return {"compile/seconds": self.seconds, "compile/recompilations": float(self.recompilations)}

    @classmethod
    def merged(cls, reports: Iterable[CompilationReport]) -> CompilationReport:
        """Return the report of several workers: they compile at the same time, so the longest counts."""
        reports = list(reports)
        return cls(
            graphs=sum(report.graphs for report in reports),
            seconds=max((report.seconds for report in reports), default=0.0),
            recompilations=sum(report.recompilations for report in reports),
            notes=tuple(dict.fromkeys(note for report in reports for note in report.notes)),
        )


class CompiledBlocks:
    """The compiled blocks of one module."""

    def __init__(
        self, module: nn.Module, classes: Sequence[type[nn.Module]], *, backend: str | Callable[..., Any] = "inductor"
    ) -> None:
        """Let all blocks of these classes in the module be compiled at their first call.

        Args:
            backend: a backend of `torch.compile`.
        """
        self._backend = backend
        self.failure: str | None = None
        """Why the blocks are computed in eager mode; None: they are compiled."""
        self.graphs = 0
        self.seconds = 0.0
        self.recompilations = 0
        self.notes: list[str] = []
        self._reported = CompilationReport()
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, GRAPH_LIMIT)
        compiled_classes = {cls: _CompiledClass(self, cls) for cls in classes}
        self.blocks = [part for part in module.modules() if type(part) in compiled_classes]
        for block in self.blocks:
            block.forward = _CompiledForward(block, compiled_classes[type(block)])  # type: ignore[method-assign]

    def report(self) -> CompilationReport:
        """Return what happened since the last call."""
        before = self._reported
        now = CompilationReport(
            graphs=self.graphs, seconds=self.seconds, recompilations=self.recompilations, notes=tuple(self.notes)
        )
        self._reported = now
        return CompilationReport(
            graphs=now.graphs - before.graphs,
            seconds=now.seconds - before.seconds,
            recompilations=now.recompilations - before.recompilations,
            notes=now.notes[len(before.notes) :],
        )

    def fail(self, name: str, error: Exception) -> None:
        """Compute all blocks in eager mode from now on, because of an error of the compiler."""
        if self.failure is not None:
            return
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        self.failure = f"{name} could not be compiled and runs in eager mode: {reason}"
        self._note(self.failure)
        logger.debug("the compiler's error", exc_info=error)

    def backend(self, graph: Any, inputs: Any) -> Any:
        """Compile a graph and count it. A backend of `torch.compile`."""
        self.graphs += 1
        return torch._dynamo.lookup_backend(self._backend)(graph, inputs)

    def _note(self, text: str) -> None:
        self.notes.append(text)
        logger.warning("%s", text)

    def add_recompilation(self, name: str, count: int, before: Shapes, now: Shapes) -> None:
        """Count a recompilation of a class, its `count`th."""
        self.recompilations += 1
        if count == MAX_RECOMPILATIONS + 1:
            self._note(
                f"{name} was compiled again more than {MAX_RECOMPILATIONS} times, last because of {_changes(before, now)}; "
                f"keep that shape fixed (batch sizes, prompt lengths), or set compile: off"
            )


class _CompiledClass:
    """The compiled function of a class of blocks."""

    def __init__(self, blocks: CompiledBlocks, cls: type[nn.Module]) -> None:
        self.blocks = blocks
        self.name = cls.__name__
        # The compiler stores graphs with a function's code, so each class needs code of its own: else the guards of all
        # classes are tried in turn, and the graphs of one count towards the limit of another.
        code = _forward.__code__.replace(co_name=f"forward_of_{self.name}")
        function = FunctionType(code, _forward.__globals__)
        self.call = torch.compile(function, backend=blocks.backend, fullgraph=True)
        self._counts: dict[bool, int] = {}
        """Whether gradients are recorded -> number of graphs."""
        self._shapes: dict[bool, Shapes] = {}
        """Whether gradients are recorded -> shapes of the last call that compiled a graph."""

    def __deepcopy__(self, memo: Any) -> _CompiledClass:
        return self

    def run(self, block: nn.Module, args: Any, kwargs: Any) -> Any:
        blocks = self.blocks
        if blocks.failure is not None:
            return _forward(block, *args, **kwargs)
        graphs = blocks.graphs
        start = perf_counter()
        try:
            result = self.call(block, *args, **kwargs)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            blocks.fail(self.name, error)
            return _forward(block, *args, **kwargs)
        if blocks.graphs != graphs:
            blocks.seconds += perf_counter() - start
            self._count(_shapes(args, kwargs))
        return result

    def _count(self, shapes: Shapes) -> None:
        mode = torch.is_grad_enabled()
        count = self._counts.get(mode, 0)
        if count:
            self.blocks.add_recompilation(self.name, count, self._shapes[mode], shapes)
        self._counts[mode] = count + 1
        self._shapes[mode] = shapes


@frozen(eq=False)
class _CompiledForward:
    """Forward pass of one block. A copy of the block has a copy of this one, which belongs to the copy."""

    block: nn.Module
    compiled: _CompiledClass = field(repr=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.compiled.run(self.block, args, kwargs)


def _forward(block: Any, *args: Any, **kwargs: Any) -> Any:
    return type(block).forward(block, *args, **kwargs)


def _shapes(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Shapes:
    """Return the shapes of all tensors among the arguments, by name."""
    shapes: dict[str, tuple[int, ...]] = {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, Tensor):
            shapes[name] = tuple(value.shape)
        elif isinstance(value, tuple | list):
            for i, part in enumerate(value):
                add(f"{name}[{i}]", part)

    for i, value in enumerate(args):
        add(f"argument {i}", value)
    for name, value in kwargs.items():
        add(name, value)
    return shapes


def _changes(before: Shapes, now: Shapes) -> str:
    """Describe the first input whose shape differs."""
    for name in dict.fromkeys((*now, *before)):
        old, new = before.get(name), now.get(name)
        if old != new:
            return f"{name}: {_shape(old)} -> {_shape(new)}"
    return "a setting of the block, since no shape changed"


def _shape(shape: tuple[int, ...] | None) -> str:
    return "none" if shape is None else str(list(shape))
