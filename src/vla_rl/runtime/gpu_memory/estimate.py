"""Latencies on a GPU not yet run on: operators counted on the meta device, and rates (planning/hardware.yaml)."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping

from attrs import frozen

from vla_rl.core.errors import UserError
from vla_rl.core.plan import Cluster, DoesNotFit, MeasureFirst
from vla_rl.core.run.shape import RunShape
from vla_rl.core.spec.spec import Spec, has_own_policy
from vla_rl.core.types import EnvInfo
from vla_rl.runtime.gpu_memory.checks import Prediction
from vla_rl.runtime.gpu_memory.model_memory import ModelCosts, measure_costs, without_adapters
from vla_rl.runtime.placement.assignments import assign_workers
from vla_rl.runtime.placement.components import build_algorithm
from vla_rl.runtime.planning.device_time import (
    CALIBRATED_MODELS,
    CallSeconds,
    Compiled,
    call_seconds,
    optimizer_seconds,
)
from vla_rl.runtime.planning.hardware import GpuRates, read_hardware
from vla_rl.runtime.planning.known_sizes import known_info, of_public_size
from vla_rl.runtime.planning.plan import plan_for
from vla_rl.runtime.planning.profile import Cost, Profile
from vla_rl.toolkit.models.adapters import MERGE_PROBLEMS, MERGES, frozen_storage, merge_mode
from vla_rl.toolkit.models.frozen_weights import WITHOUT_FP8

logger = logging.getLogger(__name__)

FORWARD = 1 / 3
"""Share of a learner's pass that a forward pass alone takes."""
PINNED = 52e9
"""Bytes a second from pinned host memory to a device (docs/results.md)."""
WORTHWHILE = 0.95
"""A change is named if it leaves at most this share of a call's time."""


@frozen(kw_only=True)
class Speedup:
    """A change of the spec that takes less time."""

    change: str
    call: str
    """The call that it shortens."""
    before: float
    after: float
    """Seconds of that call."""


@frozen(kw_only=True)
class Estimate:
    """Expected latencies of a job, and how they are known."""

    profile: Profile
    prediction: Prediction
    parameters: int
    calibrated: bool
    """The card and the model are among those that were measured."""
    inference: CallSeconds
    rows: int
    """Observations of that inference."""
    learner_pass: CallSeconds
    """Seconds of a forward and backward pass of a micro-batch."""
    simulation_s: float | None
    """Seconds of a chunk step of an env; None: no rate is known, and simulation is not counted."""
    faster: tuple[Speedup, ...]
    guesses: tuple[str, ...]
    """What is assumed, in words."""


def estimate_job(spec: Spec, cluster: Cluster, gpu: GpuRates) -> Estimate:
    """Estimate latencies of a spec on a GPU with these rates. Raises UserError if the model cannot be counted."""
    if has_own_policy(spec):
        raise UserError(f"engine {spec.rollout.engine.type!r} acts with its own policy, whose time is not known")
    frozen_weights = frozen_storage(spec.model.config)
    if frozen_weights == "fp8" and not gpu.fp8:
        raise UserError(f"model.frozen_weights: {WITHOUT_FP8.format('the planned one')}")
    guesses: list[str] = []
    sized = of_public_size(spec, guesses)
    info = known_info(sized, guesses)
    rows, ranks = _largest_inference(sized, cluster)
    try:
        calls = ModelCalls.count_operators(sized, info, (max(1, rows // 4), rows) if rows > 1 else (1, 2), gpu)
    except Exception as exc:  # of any plugin
        logger.debug("operators of model %r", spec.model.type, exc_info=True)
        raise UserError(f"the operators of model {spec.model.type!r} cannot be counted: {exc}") from exc
    acting, learning = _compile_modes(spec)
    merges = merge_mode(spec.model.config) != "off"
    inferences = {count: calls.inference_seconds(count, acting, merges) for count in calls.costs.acting}
    pass_seconds = calls.learner_pass(learning)
    simulation = _simulation_cost(spec, info, guesses)
    return Estimate(
        profile=_build_profile(spec, info, calls.costs, gpu, ranks, inferences, pass_seconds, simulation, guesses),
        prediction=Prediction(memory=calls.costs.memory, info=info),
        parameters=calls.costs.parameters,
        calibrated=gpu.measured and spec.model.type in CALIBRATED_MODELS,
        inference=inferences[rows],
        rows=rows,
        learner_pass=pass_seconds,
        simulation_s=None if simulation is None else simulation.mean / simulation.num_envs,
        faster=tuple(_faster_settings(spec, calls, rows, acting, learning, merges)),
        guesses=tuple(guesses),
    )


# ------------------------------------------------------------------------------------------ the model and its inputs


def _largest_inference(spec: Spec, cluster: Cluster) -> tuple[int, int]:
    """Return the rows of the largest inference under the spec's placement, and the number of its learners; for one that
    does not fit, an even share, and a learner on each GPU."""
    gpus = max(cluster.gpus, 1)
    try:
        plan = plan_for(spec, cluster)
        workers = assign_workers(plan, spec.env.num_envs, one_process=False)
    except (DoesNotFit, MeasureFirst, UserError):
        return max(1, spec.env.num_envs // gpus), gpus
    served = [w.batching.max_batch or sum(lane.num_envs for lane in w.served) for w in workers if w.served]
    return max(served, default=1), max(len(plan.hosting("learner")), 1)


# ---------------------------------------------------------------------------------------------------- seconds of calls


def _compile_modes(spec: Spec) -> tuple[Compiled, Compiled]:
    """Return how acting and learning are compiled on a GPU."""
    sharded = spec.train.sharding == "full"
    learning: Compiled = spec.train.compile or ("off" if sharded else "blocks")
    acting: Compiled = spec.rollout.compile or ("off" if sharded or spec.train.compile == "off" else "blocks")
    return acting, learning


@frozen(kw_only=True)
class ModelCalls:
    """Seconds of a model's calls on a GPU."""

    spec: Spec
    costs: ModelCosts
    merged: ModelCosts | None
    """Costs of acting with merged adapters; None for a model without adapters."""
    gpu: GpuRates

    @classmethod
    def count_operators(cls, spec: Spec, info: EnvInfo, rows: tuple[int, ...], gpu: GpuRates) -> ModelCalls:
        """Count the operators of the spec's model, for inferences of this many rows."""
        costs = measure_costs(spec, info, rows=rows)
        merged = None
        if getattr(spec.model.config, "lora", None) is not None:
            merged = measure_costs(without_adapters(spec), info, rows=rows, learns=False)
        return cls(spec=spec, costs=costs, merged=merged, gpu=gpu)

    def inference_seconds(self, rows: int, compiled: Compiled, merges: bool) -> CallSeconds:
        """Return the seconds of an inference; `merges`: adapters are merged."""
        if merges and self.merged is not None:
            counts = self.merged.acting[rows]
            return call_seconds(counts, self.gpu, compiled, adapted_layers=self.costs.adapted_layers)
        return call_seconds(self.costs.acting[rows], self.gpu, compiled)

    def learner_pass(self, compiled: Compiled) -> CallSeconds:
        """Return the seconds of a pass of a micro-batch, forward and backward."""
        assert self.costs.learning is not None
        selective = getattr(self.spec.model.config, "recompute", "off") == "selective"
        return call_seconds(self.costs.learning, self.gpu, compiled, learns=True, selective=selective)


def _simulation_cost(spec: Spec, info: EnvInfo, guesses: list[str]) -> Cost | None:
    """Return the seconds of a chunk step; None where no rate is known."""
    chunk, name = spec.rollout.chunk, spec.env.type
    rates = read_hardware().simulators.get(name)
    pixels = sum(height * width for height, width in info.cameras.values())
    if rates is not None and rates.gpu is not None:
        fixed = chunk * rates.gpu.fixed_s
        each = chunk * rates.gpu.pixel_s * pixels
        envs = spec.env.num_envs
        return Cost(seconds=fixed + each * envs, num_envs=envs, fixed=fixed / (fixed + each * envs))
    backend = getattr(spec.env.config, "backend", None)
    if rates is None or rates.cpu is None or backend in ("gpu", "auto"):
        guesses.append(f"no rate of {name} is known{' on a GPU' * (backend is not None)}: simulation counts as no time")
        return None
    image_s = rates.cpu.image_s if rates.cpu.gpu_image_s is None else rates.cpu.gpu_image_s
    guesses.append(f"an image of {name} takes {image_s:g} s where a GPU draws it (a CPU: {rates.cpu.image_s:g})")
    seconds = chunk * rates.cpu.step_s + len(info.cameras) * image_s
    return Cost(seconds=seconds, num_envs=1, cpus=1.0)


def _build_profile(
    spec: Spec,
    info: EnvInfo,
    costs: ModelCosts,
    gpu: GpuRates,
    ranks: int,
    inferences: Mapping[int, CallSeconds],
    pass_seconds: CallSeconds,
    simulation: Cost | None,
    guesses: list[str],
) -> Profile:
    """Put the seconds of all calls together."""
    (first, low), *_, (last, high) = sorted((rows, call.total) for rows, call in inferences.items())
    slope = (high - low) / (last - first) if last > first else high / last
    limit = spec.rollout.steps or spec.rollout.max_steps or max(task.max_steps for task in info.tasks)
    chunk_steps = math.ceil(limit / spec.rollout.chunk)
    guesses.append(f"episodes run to their limit of {limit} actions; no group is filtered")
    memory = costs.memory
    weights = memory.total_weights
    guesses.append("resets, messages between workers and the driver's own work take no time")
    return Profile(
        chunk_steps=chunk_steps,
        sim=simulation or Cost(seconds=0.0),
        policy=Cost(seconds=high, num_envs=last, fixed=min(max(1 - slope * last / high, 0.0), 1.0)),
        learner=Cost(
            seconds=_update_seconds(spec, costs, gpu, pass_seconds, chunk_steps, ranks, guesses), num_envs=ranks
        ),
        publish=weights / gpu.link_bytes_per_s,
        offload={
            # Twice: to the host after a phase, and back before the next one.
            "policy": 2 * weights / PINNED,
            "learner": 2 * (weights + memory.masters + memory.optimizer_state) / PINNED,
        },
        parameters=costs.parameters,
        trainable=memory.gradients / 4,
        masters=memory.masters / 4,
        weight_bytes=weights / costs.parameters,
    )


def _update_seconds(
    spec: Spec,
    costs: ModelCosts,
    gpu: GpuRates,
    pass_seconds: CallSeconds,
    chunk_steps: int,
    ranks: int,
    guesses: list[str],
) -> float:
    """Return the seconds of all optimiser steps of an iteration on this many learners."""
    shape, train, memory = RunShape.from_spec(spec), spec.train, costs.memory
    samples = shape.tickets_per_step * chunk_steps * shape.uses
    share = samples / ranks
    seconds = pass_seconds.total
    if train.sharding == "full" and ranks > 1:
        # Weights are gathered in the forward pass and again in the backward pass, gradients are reduced once.
        gathered = (2 * memory.total_weights + memory.gradients) / gpu.link_bytes_per_s
        seconds = max(seconds, gathered)
        guesses.append(f"weights of sharded layers travel at {gpu.link_gb_per_s:g} GB/s while others compute")
    passes = train.epochs * math.ceil(share / train.micro_batch)
    optimizer_steps = train.epochs * train.optimizer_steps(math.ceil(samples))
    each = optimizer_seconds(memory.gradients / (ranks if train.sharding == "full" else 1), gpu)
    if ranks > 1 and train.sharding != "full":
        # An all-reduce sums the parts and then distributes the sums: each gradient travels twice.
        each += 2 * memory.gradients / gpu.link_bytes_per_s
    total = passes * seconds + optimizer_steps * each
    needs = build_algorithm(spec).needs
    if needs.recomputed_values or needs.proximal_log_probs or needs.reference:
        total += math.ceil(share / train.micro_batch) * FORWARD * pass_seconds.total
        guesses.append("a forward pass takes a third of a learner's pass")
    if needs.frames:
        guesses.append("the encoder of frames takes no time")
    return total


# ------------------------------------------------------------------------------------------------- what would be faster


def _faster_settings(
    spec: Spec, calls: ModelCalls, rows: int, acting: Compiled, learning: Compiled, merges: bool
) -> Iterator[Speedup]:
    """Yield the keys that would shorten a call by at least a twentieth."""
    sharded = spec.train.sharding == "full"
    now = calls.inference_seconds(rows, acting, merges).total
    changes: list[tuple[str, str, float, float]] = []
    frozen_weights = frozen_storage(spec.model.config)
    modes = [mode for mode in MERGES if mode != "off" and (frozen_weights, mode) not in MERGE_PROBLEMS]
    if not merges and calls.merged is not None and modes:
        after = calls.inference_seconds(rows, acting, True).total
        changes.append((f"model.lora.merge_for_acting: {modes[0]}", "inference", now, after))
    if acting != "graphs" and not sharded:
        after = calls.inference_seconds(rows, "graphs", merges).total
        changes.append(("rollout.compile: graphs", "inference", now, after))
    if learning == "off":
        change = "train.compile: blocks" + ", train.sharding: replicated" * sharded
        changes.append((change, "pass", calls.learner_pass("off").total, calls.learner_pass("blocks").total))
    for change, call, before, after in changes:
        if after < WORTHWHILE * before:
            yield Speedup(change=change, call=call, before=before, after=after)
