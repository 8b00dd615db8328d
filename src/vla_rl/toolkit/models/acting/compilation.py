"""Regional compilation: a model's repeated layers (blocks) are compiled, once for each kind of them.

A transformer of 32 equal layers is compiled as one layer, so the first call costs seconds and not minutes. What is
between two matrix products becomes one kernel. Parameters, their names and `state_dict` do not change. The compiled
code sits under `Module.__call__`, so hooks stay. Adapters and gradient checkpointing are compiled with it.

What is between the blocks (embeddings, masks, heads, sampling) is compiled in regions: methods that a model names.
A region that calls blocks contains their code.

A compiler that fails never stops a run: the blocks then run in eager mode, and `CompiledBlocks.notes` says why.
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
from torch.utils import _python_dispatch

from vla_rl.toolkit.models.blocks import find_blocks

logger = logging.getLogger(__name__)

MAX_RECOMPILATIONS = 8
"""Recompilations of one kind of blocks after which a warning names the input that changed. Two or three are normal: a
second batch size and a second prompt length make these dimensions dynamic, and a batch of one is a separate case."""
GRAPH_LIMIT = 64
"""Graphs of one kind of blocks; PyTorch's own limit of 8 is too low for blocks that act and learn."""
Shapes = Mapping[str, tuple[int, ...]]


@frozen(kw_only=True)
class CompilationReport:
    """What the compiler did since the last report."""

    graphs: int = 0
    """Graphs that were compiled, recompilations included."""
    seconds: float = 0.0
    """Seconds of the calls that compiled something."""
    recompilations: int = 0
    """Graphs of a kind of blocks beyond its first one in each mode: without gradients, with them, and with them in its
    inputs too, each for every set of inputs that are given."""
    notes: tuple[str, ...] = ()
    """Remarks for results.json and the console: the compiler failed, or compiles too often."""

    def to_metrics(self) -> dict[str, float]:
        return {"compile/seconds": self.seconds, "compile/recompilations": float(self.recompilations)}

    @classmethod
    def merge_reports(cls, reports: Iterable[CompilationReport]) -> CompilationReport:
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
        self,
        module: nn.Module,
        classes: Sequence[type[nn.Module]],
        *,
        regions: Sequence[Callable[..., Any]] = (),
        policy: object | None = None,
        backend: str | Callable[..., Any] = "inductor",
    ) -> None:
        """Let all blocks of these classes in the module be compiled at their first call.

        Args:
            regions: methods to compile besides, as their classes hold them: of the policy, or of parts of the module.
            policy: the object that acts and learns with the module.
            backend: a backend of `torch.compile`.
        """
        from torch import _dynamo as dynamo  # takes a second to import
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

        self._backend = dynamo.lookup_backend(backend)
        modes = _python_dispatch
        self.watched: Callable[[], bool] = getattr(
            modes, "is_in_any_mode_without_ignore_compile_internals", modes.is_in_torch_dispatch_mode
        )
        """Return whether something counts operators (`TorchDispatchMode`): it shall see all; the compiler refuses."""
        self.errors = TorchDynamoException, FailOnRecompileLimitHit
        """Errors of the compiler, as opposed to those of the code that it compiles."""
        self.failure: str | None = None
        """Why the blocks are computed in eager mode; None: they are compiled."""
        self.graphs = 0
        self.seconds = 0.0
        self.recompilations = 0
        self.notes: list[str] = []
        self._reported = CompilationReport()
        config = dynamo.config
        config.recompile_limit = max(config.recompile_limit, GRAPH_LIMIT)
        self.blocks = find_blocks(module, classes)
        self.kinds: dict[Any, _CompiledKind] = {}
        """Compiled functions: what equal blocks or owners of a region have in common -> their function."""
        for block in self.blocks:
            self._compile_method(block, type(block).forward, type(block).__name__)
        in_blocks = {id(part) for block in self.blocks for part in block.modules()}
        owners = (policy, *(part for part in module.modules() if id(part) not in in_blocks))
        for region in regions:
            for owner in owners:
                if getattr(type(owner), region.__name__, None) is region:
                    self._compile_method(owner, region, region.__qualname__)

    def _compile_method(self, owner: Any, method: Callable[..., Any], name: str) -> None:
        key = method, *_kind_of(owner)
        if key not in self.kinds:
            self.kinds[key] = _CompiledKind(self, method, name)
        setattr(owner, method.__name__, _CompiledMethod(owner, self.kinds[key]))

    def take_report(self) -> CompilationReport:
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

    def record_failure(self, name: str, error: Exception) -> None:
        """Compute all blocks in eager mode from now on, because of an error of the compiler."""
        if self.failure is not None:
            return
        cause = getattr(error, "inner_exception", None) or error
        reason = next((line.strip() for line in str(cause).splitlines() if line.strip()), type(cause).__name__)
        self.failure = f"{name} could not be compiled and runs in eager mode: {reason}"
        self._add_note(self.failure)
        logger.debug("the compiler's error", exc_info=error)

    def compile_graph(self, graph: Any, inputs: Any) -> Any:
        """Compile a graph and count it. A backend of `torch.compile`."""
        self.graphs += 1
        return self._backend(graph, inputs)

    def _add_note(self, text: str) -> None:
        self.notes.append(text)
        logger.warning("%s", text)

    def add_recompilation(self, name: str, count: int, before: Shapes, now: Shapes) -> None:
        """Count a recompilation of a kind, its `count`th."""
        self.recompilations += 1
        if count == MAX_RECOMPILATIONS + 1:
            self._add_note(
                f"{name} was compiled again more than {MAX_RECOMPILATIONS} times, last because of "
                f"{_describe_change(before, now)}; keep that shape fixed (batch sizes, prompt lengths), or set "
                f"compile: off"
            )


def _kind_of(block: Any) -> tuple[Any, ...]:
    """Return what equal blocks have in common. Two towers with layers of one class and other widths are two kinds:
    compiled together, their widths would be dynamic, which makes slower kernels."""
    if not isinstance(block, nn.Module):
        return (id(block),)
    parts = tuple((name, type(part)) for name, part in block.named_modules())
    return type(block), parts, tuple((name, tuple(p.shape), p.dtype) for name, p in block.named_parameters())


class _CompiledKind:
    """The compiled function of one kind of blocks (those of one class, with equal parts and sizes) or of a region."""

    def __init__(self, blocks: CompiledBlocks, method: Callable[..., Any], name: str) -> None:
        self.blocks = blocks
        self.method = method
        self.name = name
        self.call = torch.compile(_with_own_code(method, name), backend=blocks.compile_graph, fullgraph=True)
        self._counts: dict[Any, int] = {}
        """Mode -> number of graphs. Mode: are gradients recorded, has an input one, and which inputs are given."""
        self._shapes: dict[Any, Shapes] = {}
        """Mode -> shapes of the last call that compiled a graph."""

    def __deepcopy__(self, memo: Any) -> _CompiledKind:
        return self

    def run_compiled(self, owner: Any, args: Any, kwargs: Any) -> Any:
        blocks = self.blocks
        if blocks.failure is not None or blocks.watched():
            return self.method(owner, *args, **kwargs)
        graphs = blocks.graphs
        start = perf_counter()
        try:
            result = self.call(owner, *args, **kwargs)
        except blocks.errors as error:
            blocks.record_failure(self.name, error)
            return self.method(owner, *args, **kwargs)
        if blocks.graphs != graphs:
            blocks.seconds += perf_counter() - start
            self._count_graph(args, kwargs)
        return result

    def _count_graph(self, args: Any, kwargs: Any) -> None:
        tensors = _collect_tensors(args, kwargs)
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        mode = torch.is_grad_enabled(), any(tensor.requires_grad for tensor in tensors.values()), frozenset(tensors)
        count = self._counts.get(mode, 0)
        if count:
            self.blocks.add_recompilation(self.name, count, self._shapes[mode], shapes)
        self._counts[mode] = count + 1
        self._shapes[mode] = shapes


@frozen(eq=False)
class _CompiledMethod:
    """A compiled method of one object. A copy of the object has a copy of this one, which belongs to the copy."""

    owner: Any
    compiled: _CompiledKind = field(repr=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # a region contains the code of what it calls
            return self.compiled.method(self.owner, *args, **kwargs)
        return self.compiled.run_compiled(self.owner, args, kwargs)


def _with_own_code(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a function that calls the method, with separate code. The compiler stores graphs with a function's code:
    shared, the guards of all kinds would be tried in turn, and count towards one limit."""

    def call_method(owner: Any, *args: Any, **kwargs: Any) -> Any:
        return method(owner, *args, **kwargs)

    label = "".join(letter if letter.isalnum() else "_" for letter in name)
    return FunctionType(
        call_method.__code__.replace(co_name=f"call_of_{label}"),
        call_method.__globals__,
        closure=call_method.__closure__,
    )


def _collect_tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return all tensors among the arguments, by name."""
    tensors: dict[str, Tensor] = {}

    def add_tensors(name: str, value: Any) -> None:
        if isinstance(value, Tensor):
            tensors[name] = value
        elif isinstance(value, tuple | list):
            for i, part in enumerate(value):
                add_tensors(f"{name}[{i}]", part)

    for i, value in enumerate(args):
        add_tensors(f"argument {i}", value)
    for name, value in kwargs.items():
        add_tensors(name, value)
    return tensors


def _describe_change(before: Shapes, now: Shapes) -> str:
    """Describe the first input whose shape differs."""
    for name in dict.fromkeys((*now, *before)):
        old, new = before.get(name), now.get(name)
        if old != new:
            return f"{name}: {_format_shape(old)} -> {_format_shape(new)}"
    return "a setting of the block, since no shape changed"


def _format_shape(shape: tuple[int, ...] | None) -> str:
    return "none" if shape is None else str(list(shape))
