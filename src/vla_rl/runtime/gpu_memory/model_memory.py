"""Device memory and operators of a spec's model, acting and learning, counted without a device.

The model is built on the meta device, acts there and makes a learner's pass, by the rules of CUDA
(`toolkit/models/meta_device.py`), while `LiveMemory` counts the bytes that are alive. So activations, casts, masks,
caches and logits are those of the code that a run executes, at the sizes of the run.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from attrs import evolve, frozen
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from vla_rl.core.capabilities import HasReference, require_capability
from vla_rl.core.catalogue import hook_modules
from vla_rl.core.contexts import Role
from vla_rl.core.hookspecs import Algorithm, VLAModel
from vla_rl.core.randomness import Noise
from vla_rl.core.spec.spec import Spec
from vla_rl.core.types import Chunk, EnvInfo, Observation
from vla_rl.runtime.placement.components import build_algorithm
from vla_rl.runtime.planning.device_memory import Line, ModelMemory
from vla_rl.runtime.workers.models import build_model
from vla_rl.toolkit.models.adapters import adapted_layers, merged_bytes
from vla_rl.toolkit.models.frozen_weights import count_weights
from vla_rl.toolkit.models.meta_device import META, CudaSemantics
from vla_rl.toolkit.models.operation_counter import OperationCounter, OperationCounts
from vla_rl.toolkit.trainers.master_weights import MasterWeights

ROWS = 8
"""Observations of the larger inference that is counted; memory is a line through it and the one of a single row."""
MOMENTS = 2
"""float32 copies of the trained weights that AdamW keeps."""


@frozen(kw_only=True)
class ModelCosts:
    """What a model costs on one device."""

    memory: ModelMemory
    acting: Mapping[int, OperationCounts]
    """Rows -> operators of an inference; empty where they were not counted."""
    learning: OperationCounts | None
    """Operators of a pass of a micro-batch, forward and backward; None: not counted."""
    parameters: int
    adapted_layers: int
    """Layers that have adapters."""


def measure_model(spec: Spec, info: EnvInfo, *, learns: bool = True) -> ModelMemory:
    """Count the device memory of the spec's model.

    Args:
        info: description of the simulator.
        learns: count learning too.

    Raises what building raises, and RuntimeError or NotImplementedError for what the meta device cannot run.
    """
    return measure_costs(spec, info, learns=learns, counts_operators=False).memory


def measure_costs(
    spec: Spec,
    info: EnvInfo,
    *,
    learns: bool = True,
    rows: Sequence[int] = (1, ROWS),
    counts_operators: bool = True,
) -> ModelCosts:
    """Count the device memory of the spec's model, and its operators.

    Args:
        info: description of the simulator.
        learns: count learning too.
        rows: observations of the inferences that are counted, two numbers or more.
        counts_operators: count operators too.

    Raises as `measure_model`.
    """
    from vla_rl.runtime.workers.learner.parallel.fsdp import collect_called_blocks

    algorithm = build_algorithm(spec)
    counter = OperationCounter()
    acting: dict[int, OperationCounts] = {}
    needs: dict[int, float] = {}
    with CudaSemantics(), LiveMemory() as memory, counter if counts_operators else nullcontext():
        role: Role = "both" if learns else "act"
        model = build_model(spec, info, META, None, algorithm, hook_modules(spec.plugins), role)
        gc.collect()
        base = memory.now
        chunk: Chunk | None = None
        with collect_called_blocks(model) as blocks:
            for count in rows:
                counter.restart_counts()
                needs[count], sampled = _measure_acting(model, info, memory, count)
                chunk = chunk or sampled
                acting[count] = counter.operation_counts
        assert chunk is not None
        module = model.module
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad and learns}
        trained_bytes = float(sum(p.nbytes for p in trained.values()))
        masters = MasterWeights(trained).masters
        optimized = list((trained | masters).values())
        gradients = float(sum(p.nbytes for p in optimized))
        counter.restart_counts()
        saved, peak = 0.0, 0.0
        if learns:
            for parameter in optimized:  # gradients of an earlier micro-batch, as in most passes of an optimiser step
                parameter.grad = torch.zeros_like(parameter)
            saved, peak = _measure_learning(model, info, memory, spec.train.micro_batch, chunk, algorithm)
        in_blocks = [_module_bytes(block) for block in blocks]
        everything = _module_bytes(module)
    (first, low), *_, (last, high) = sorted(needs.items())
    each = (high - low) / (last - first)
    return ModelCosts(
        memory=ModelMemory(
            frozen_weights=everything - trained_bytes,
            trained_weights=trained_bytes,
            other=max(0.0, base - everything),
            masters=float(sum(master.nbytes for master in masters.values())),
            gradients=gradients,
            optimizer_state=MOMENTS * gradients,
            adapted_weights=float(merged_bytes(module)),
            acting=Line(fixed=low - each * first, each=each),
            activations=saved,
            learning=peak,
            largest_block=max(in_blocks, default=0.0),
            outside_blocks=everything - sum(in_blocks),
        ),
        acting=acting if counts_operators else {},
        learning=counter.operation_counts if counts_operators and learns else None,
        parameters=count_weights(module),
        adapted_layers=len(adapted_layers(module)),
    )


def without_adapters(spec: Spec) -> Spec:
    """Return the spec of the model whose adapters are merged: the same layers, in full precision, and nothing else."""
    config = spec.model.config
    changes: dict[str, Any] = {"lora": None}
    if getattr(config, "autocast", False) and getattr(config, "dtype", "float32") != "float32":
        changes["autocast"] = False
    if hasattr(config, "frozen_weights"):
        changes["frozen_weights"] = "bf16"
    config = evolve(config, **changes)
    return evolve(spec, model=evolve(spec.model, config=config))


def _measure_acting(model: VLAModel, info: EnvInfo, memory: LiveMemory, rows: int) -> tuple[float, Chunk]:
    """Return the most that an inference needs in addition to the weights, and its chunk."""
    before = memory.now
    memory.restart_peak()
    noise = Noise(0, "memory", range(rows), [0] * rows, [0] * rows)
    chunk = model.sample_chunk(meta_observation(info, rows), noise, False)
    return memory.peak - before, chunk


def _measure_learning(
    model: VLAModel, info: EnvInfo, memory: LiveMemory, samples: int, sampled: Chunk, algorithm: Algorithm
) -> tuple[float, float]:
    """Run a pass of a micro-batch. Return bytes that its forward keeps, and its peak beside weights and gradients.

    Args:
        sampled: chunk of one sample, for the shapes.
    """
    before = memory.now
    obs = meta_observation(info, samples)
    chunk = Chunk(
        actions=_repeat_samples(sampled.actions, samples),
        log_probs=_repeat_samples(sampled.log_probs, samples),
        extras={name: _repeat_samples(tensor, samples) for name, tensor in sampled.extras.items()},
    )
    inputs = memory.now - before
    before = memory.now
    memory.restart_peak()
    if algorithm.needs.reference:
        require_capability(model, HasReference, "the algorithm").reference_log_probs(obs, chunk)
    scores = model.chunk_log_probs(obs, chunk)
    saved = memory.now - before
    loss = scores.log_probs.sum() + scores.entropy.sum()
    if scores.values is not None:
        loss = loss + scores.values.sum()
    del scores
    loss.backward()
    return saved, inputs + memory.peak - before


def _repeat_samples(tensor: Any, count: int) -> Any:
    """Return a tensor like that of one sample for `count` samples, on the meta device."""
    return torch.empty(count, *tensor.shape[1:], dtype=tensor.dtype, device=META)


def meta_observation(info: EnvInfo, rows: int) -> Observation:
    """Return an observation with images on the meta device, and a state of zeros in host memory, for prompts."""
    return Observation(
        images={
            name: torch.empty(rows, *size, 3, dtype=torch.uint8, device=META) for name, size in info.cameras.items()
        },
        instructions=tuple(info.tasks[row % len(info.tasks)].instruction for row in range(rows)),
        state=np.zeros((rows, info.state_dim), np.float32) if info.state_dim else None,
    )


def _module_bytes(module: torch.nn.Module) -> float:
    return float(sum(p.nbytes for p in module.parameters()))


BLOCK = 512
"""Bytes to which CUDA's allocator rounds up what a tensor needs."""


class LiveMemory(TorchDispatchMode):
    """Mode that counts the storages which operators allocate inside it until they are freed; not earlier tensors. The
    count is what `torch.cuda.memory_allocated` shows for the same tensors. What a kernel allocates for itself, and what
    the allocator keeps beyond that, is not in it."""

    def __init__(self, device: str | None = "meta", block: int = BLOCK) -> None:
        """Create the mode.

        Args:
            device: type of device whose tensors count; None: all.
            block: bytes to which the size of a storage is rounded up.
        """
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self.device = device
        self.block = block
        self.now = 0
        """Bytes that are alive."""
        self.peak = 0
        """Most bytes that were alive at once since `restart_peak`."""
        self._alive: set[int] = set()

    def restart_peak(self) -> None:
        """Forget the peak."""
        self.peak = self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tree_iter((args, kwargs)):
            self._track_storage(value, is_new=False)
        result = func(*args, **(kwargs or {}))
        for value in tree_iter(result):
            self._track_storage(value, is_new=True)
        return result

    def _track_storage(self, value: Any, is_new: bool) -> None:
        """Count the storage of a tensor unless it is known; one that is not new counts nothing."""
        if not isinstance(value, Tensor) or self.device not in (None, value.device.type):
            return
        storage = value.untyped_storage()
        address = storage._cdata  # noqa: SLF001 - identifies a storage, as in torch.multiprocessing
        if address in self._alive:
            return
        size = -(-storage.nbytes() // self.block) * self.block if is_new else 0
        self._alive.add(address)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free_storage, address, size)

    def _free_storage(self, address: int, size: int) -> None:
        self._alive.discard(address)
        self.now -= size
