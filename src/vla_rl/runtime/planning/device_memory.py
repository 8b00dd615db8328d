"""Device memory of a run, predicted from its plan and refused where it does not fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import Any

from attrs import evolve, frozen

from vla_rl.core.errors import UserError
from vla_rl.core.plan import DoesNotFit, Plan
from vla_rl.core.spec.spec import Spec
from vla_rl.runtime.placement.assignments import Assignment
from vla_rl.toolkit.models.adapters import LoRAConfig, merge_mode

GIB = 2**30
CONTEXT = GIB // 2
"""Typical bytes of a process on a GPU that PyTorch does not count: CUDA's context, kernels, libraries' workspaces."""
GATHERED_BLOCKS = 2
"""Blocks that FSDP holds gathered at once: the one that computes, and the next."""
ACT, LEARN = "rollout", "learner step"
Measure = Callable[[Spec], "ModelMemory"]
"""Function that counts the memory of a spec's model (`runtime/gpu_memory/model_memory.py`)."""


@frozen(kw_only=True)
class Line:
    """Bytes that grow with a number of samples: `fixed + each * count`."""

    fixed: float
    each: float

    def bytes_at(self, count: int) -> float:
        return self.fixed + self.each * count


@frozen(kw_only=True)
class ModelMemory:
    """Bytes of a model on one device."""

    frozen_weights: float
    trained_weights: float
    other: float
    """Buffers, and modules that are kept as they were before training."""
    masters: float
    """float32 copies of the trained weights that act in a narrower type. Shards are float32 and need none."""
    gradients: float
    """Gradients of the trained weights, float32."""
    optimizer_state: float
    adapted_weights: float
    """Frozen weights of the layers that have adapters, in full precision."""
    acting: Line
    """Most that an inference needs in addition to the weights, by rows."""
    activations: float
    """What the forward pass of a micro-batch keeps for its backward pass."""
    learning: float
    """Most that a pass of a micro-batch needs in addition to weights and gradients; includes the activations."""
    largest_block: float
    """Weights of the largest block that FSDP gathers at a time."""
    outside_blocks: float
    """Weights outside of blocks, which stay gathered during a pass."""

    @property
    def total_weights(self) -> float:
        return self.frozen_weights + self.trained_weights + self.other


@frozen(kw_only=True)
class MemoryPart:
    """Item of a worker's device memory."""

    name: str
    size: float
    """Bytes."""


@frozen(kw_only=True)
class WorkerMemory:
    """Most device memory of a worker in each phase."""

    worker: int
    roles: tuple[str, ...]
    device: Hashable
    """Device that workers may share."""
    phases: dict[str, tuple[MemoryPart, ...]]
    """Phase -> parts of the memory at its peak."""

    def bytes_in(self, phase: str) -> float:
        return sum(part.size for part in self.phases[phase])


@frozen(kw_only=True)
class DeviceMemory:
    """Most memory that the workers on one device need at once."""

    workers: tuple[WorkerMemory, ...]
    moved: frozenset[str]
    """Roles that leave the device between phases."""

    @property
    def peak(self) -> tuple[float, dict[int, str]]:
        """Bytes, and the phase of each worker that counts. PyTorch's allocator keeps what it once took, so that every
        process counts with its own peak, also in a phase in which another one works. Only offload gives memory back."""
        choices = [{worker.worker: max(worker.phases, key=worker.bytes_in) for worker in self.workers}]
        if self.moved:
            choices = [dict.fromkeys((worker.worker for worker in self.workers), phase) for phase in (ACT, LEARN)]
        return max(
            ((sum(w.bytes_in(phases[w.worker]) for w in self.workers), phases) for phases in choices),
            key=lambda pair: pair[0],
        )


def device_memory(plan: Plan, assignments: Sequence[Assignment], memory: ModelMemory, spec: Spec) -> list[DeviceMemory]:
    """Return what each GPU of the plan needs, fullest first. Simulators and world models do not count."""
    devices: dict[Hashable, list[WorkerMemory]] = {}
    for assignment in assignments:
        if assignment.slot.device.startswith("cuda") and (assignment.served or assignment.rank >= 0):
            worker = _worker_memory(plan, assignment, memory, spec)
            devices.setdefault(worker.device, []).append(worker)
    memories = [DeviceMemory(workers=tuple(workers), moved=plan.offload) for workers in devices.values()]
    return sorted(memories, key=lambda device: -device.peak[0])


def _worker_memory(plan: Plan, assignment: Assignment, memory: ModelMemory, spec: Spec) -> WorkerMemory:
    slot = assignment.slot
    acts, learns = bool(assignment.served), assignment.rank >= 0
    world = assignment.world if spec.train.sharding == "full" and assignment.world > 1 else 1
    weights = (
        MemoryPart(name="frozen weights", size=(memory.frozen_weights + memory.other) / world),
        MemoryPart(name="trained weights", size=memory.trained_weights if world == 1 else memory.gradients / world),
    )
    gathered = MemoryPart(name="gathered weights", size=memory.total_weights if world > 1 else 0.0)
    kept = (
        MemoryPart(name="gradients", size=memory.gradients / world),
        MemoryPart(name="optimiser state", size=memory.optimizer_state / world),
        MemoryPart(name="float32 masters", size=memory.masters if world == 1 else 0.0),
    )
    rows = assignment.batching.max_batch or sum(lane.num_envs for lane in assignment.served)
    act: list[MemoryPart] = []
    learn: list[MemoryPart] = []
    if acts and not learns:
        unsharded = (
            MemoryPart(name="frozen weights", size=memory.frozen_weights + memory.other + memory.trained_weights),
            MemoryPart(name=f"inference of {rows} rows", size=memory.acting.bytes_at(rows)),
        )
        act += unsharded
        learn += [] if "policy" in plan.offload else unsharded[:1]
    if learns:
        learn += [*weights, *kept, *_pass_parts(memory, spec.train.micro_batch, world, assignment.world)]
        if acts or "learner" not in plan.offload:
            act += weights
        act += [] if "learner" in plan.offload else kept
        if acts:
            act += [gathered, MemoryPart(name=f"inference of {rows} rows", size=memory.acting.bytes_at(rows))]
    if acts and merge_mode(spec.model.config) == "copy":
        second = MemoryPart(name="merged weights", size=memory.adapted_weights)
        act.append(second)
        learn.append(second)
    context = MemoryPart(name="CUDA context", size=CONTEXT)
    return WorkerMemory(
        worker=assignment.index,
        roles=slot.roles,
        device=assignment.index if slot.index is None else (slot.node, slot.index),
        phases={ACT: (*act, context), LEARN: (*learn, context)},
    )


def _pass_parts(memory: ModelMemory, samples: int, world: int, ranks: int) -> list[MemoryPart]:
    """Return what a learner step needs in addition to weights, gradients and the optimiser's state: for a pass of this
    many samples, or to reduce gradients if that is more. A fused optimiser needs nothing."""
    gathered = 0.0
    if world > 1:
        gathered = min(memory.total_weights, memory.outside_blocks + GATHERED_BLOCKS * memory.largest_block)
    reduced = memory.gradients if ranks > 1 and world == 1 else 0.0
    if reduced > memory.learning:
        return [MemoryPart(name="gradients of all ranks in one buffer", size=reduced)]
    return [
        MemoryPart(name=f"activations of {samples} samples", size=memory.activations),
        MemoryPart(name="working memory of a pass", size=max(0.0, memory.learning - memory.activations)),
        *([MemoryPart(name="gathered weights", size=gathered)] if gathered else []),
    ]


# ------------------------------------------------------------------------------------------------------- refusal


def check_capacity(devices: Sequence[DeviceMemory], capacity: int | None) -> None:
    """Raise DoesNotFit where a GPU needs more bytes than it has."""
    need, phases = devices[0].peak
    if capacity is not None and need > capacity:
        phase = " and ".join(dict.fromkeys(phases.values()))
        parts = sorted(
            (part for worker in devices[0].workers for part in worker.phases[phases[worker.worker]]),
            key=lambda part: -part.size,
        )
        largest = ", ".join(f"{_format_gib(part.size)} of {part.name}" for part in parts[:2])
        raise DoesNotFit(
            f"a GPU needs {_format_gib(need)} GiB in its {phase} ({largest}), and it has {_format_gib(capacity)} GiB; "
            "`vla-rl check` names the keys that help"
        )


def check_device_memory(
    spec: Spec,
    plan: Plan,
    assignments: Sequence[Assignment],
    capacity: int | None,
    memory: ModelMemory,
    measure: Measure,
) -> list[DeviceMemory]:
    """Return what each GPU needs. Raises UserError if a GPU has less: what takes it, and which keys would help.

    Args:
        capacity: bytes of a GPU; None: unknown, and nothing is refused.
        memory: memory of the spec's model.
        measure: counts the memory of the model of a spec with other keys.
    """
    devices = device_memory(plan, assignments, memory, spec)
    if capacity is None or not devices or devices[0].peak[0] <= capacity:
        return devices
    need, phases = devices[0].peak
    lines = [f"this run does not fit: a GPU needs {_format_gib(need)} GiB, and it has {_format_gib(capacity)} GiB"]
    for worker in devices[0].workers:
        phase = phases[worker.worker]
        lines.append(
            f"  worker {worker.worker} ({', '.join(worker.roles)}), {phase}: {_format_gib(worker.bytes_in(phase))} GiB"
        )
        lines += [
            f"    {_format_gib(part.size):>8} GiB  {part.name}"
            for part in worker.phases[phase]
            if part.size >= GIB / 100
        ]
    remedies = [
        f"    {key}: {_format_gib(size)} GiB{'' if size <= capacity else ', still too much'}"
        for key, size in _find_remedies(spec, plan, assignments, capacity, memory, measure)
        if size < need - GIB / 20
    ]
    lines += ["  what would help:", *remedies] if remedies else ["  no key helps: use GPUs with more memory"]
    raise UserError("\n".join(lines))


def _find_remedies(
    spec: Spec,
    plan: Plan,
    assignments: Sequence[Assignment],
    capacity: int,
    memory: ModelMemory,
    measure: Measure,
) -> list[tuple[str, float]]:
    """Return changes of the spec, and what a GPU needs with each."""

    def bytes_needed(
        spec: Spec, memory: ModelMemory, plan: Plan = plan, workers: Sequence[Assignment] = assignments
    ) -> float:
        devices = device_memory(plan, workers, memory, spec)
        return devices[0].peak[0] if devices else 0.0

    remedies: list[tuple[str, float]] = []
    train = spec.train
    if train.micro_batch > 1:
        spare = bytes_needed(spec, memory) - memory.learning  # of all that does not grow with the micro-batch
        count = int(train.micro_batch * (capacity - spare) / memory.learning) if capacity > spare else 1
        count = 2 ** int(math.log2(min(max(count, 1), train.micro_batch - 1)))
        smaller = evolve(spec, train=evolve(train, micro_batch=count))
        remedies.append((f"train.micro_batch: {count}", bytes_needed(smaller, measure(smaller))))
    for key, changed in _changed_models(spec):
        remedies.append((key, bytes_needed(changed, measure(changed))))
    learners = len(plan.hosting("learner"))
    if train.sharding != "full" and learners > 1:
        sharded = evolve(spec, train=evolve(train, sharding="full"))
        remedies.append(("train.sharding: full", bytes_needed(sharded, memory)))
    if len({worker.slot.roles for worker in assignments if worker.served or worker.rank >= 0}) > 1 and not plan.offload:
        moved = evolve(plan, offload=frozenset({"policy", "learner"}))
        workers = [evolve(worker, offload=moved.offload) for worker in assignments]
        key = "placement.offload: {policy: true, learner: true}"
        remedies.append((key, bytes_needed(spec, memory, moved, workers)))
    rows = max((worker.batching.max_batch or 0 for worker in assignments), default=0)
    if rows > 1:
        half = [
            evolve(worker, batching=evolve(worker.batching, max_batch=(worker.batching.max_batch or 2) // 2))
            for worker in assignments
        ]
        remedies.append((f"placement.batching.max_batch: {rows // 2}", bytes_needed(spec, memory, workers=half)))
    return remedies


def _changed_models(spec: Spec) -> list[tuple[str, Spec]]:
    """Return the model's keys that save memory and are not set, each with the spec that has it."""
    config = spec.model.config
    changes: tuple[tuple[str, tuple[Any, ...], Any], ...] = (
        ("recompute", ("off",), "selective"),
        ("recompute", ("off", "selective"), "full"),
        ("lora", (None,), LoRAConfig()),
        ("frozen_weights", ("bf16",), "int8"),
        ("frozen_weights", ("bf16", "fp8", "int8"), "nf4"),
        ("dtype", ("float32",), "bfloat16"),
    )
    changed_specs = []
    for key, present, value in changes:
        if hasattr(config, key) and getattr(config, key) in present:
            with suppress(ValueError):  # does not go with another key
                changed = evolve(spec, model=evolve(spec.model, config=evolve(config, **{key: value})))
                changed_specs.append((f"model.{key}: {'{}' if key == 'lora' else value}", changed))
    return changed_specs


def _format_gib(size: float) -> str:
    return f"{size / GIB:,.1f}"
