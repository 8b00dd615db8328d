"""The contract of trainers, what a learner rank hands to them, and what comes back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from attrs import field, frozen

from vla_rl.core.hookspecs import Demonstrations, hookspec
from vla_rl.core.types import Array, ArrayOrTensor, Observation, SampleRecord, Statistic

if TYPE_CHECKING:
    import torch

    from vla_rl.core.augmentation import AugmentSpec
    from vla_rl.core.randomness import Noise
    from vla_rl.core.world_models import Windows


# ------------------------------------------------------------------------------------------------ samples


@frozen(kw_only=True, eq=False)
class ModelInputs(SampleRecord):
    """B samples: observations, chosen actions [B, C, A] and the model's own extras, batch first."""

    obs: Observation
    actions: ArrayOrTensor
    extras: Mapping[str, ArrayOrTensor]

    def __len__(self) -> int:
        return len(self.obs)

    def take(self, rows: Array) -> ModelInputs:
        import numpy as np

        return self if np.array_equal(rows, np.arange(len(self))) else super().take(rows)


class SampleInputs(Protocol):
    """Model inputs of B samples: one batch, or rows of several."""

    def __len__(self) -> int: ...

    def take(self, indices: Array, /) -> ModelInputs:
        """Return the samples at these positions (int64 [b]), in this order."""


SampleFields = Mapping[str, "Array | None"]
"""Fields of `Batch` other than the model inputs, [B, ...] each."""


@frozen(kw_only=True)
class OptimizerStep:
    """One rank's share of one optimiser step. Divisors count all ranks: their gradients' sum is an exact mean."""

    micro_batches: tuple[Array, ...]
    """Indices into the rank's samples, int64 [B] each; empty where the rank only joins the reduction."""
    passes: int
    """Number of micro-batches of the rank that has the most."""
    divisor: float
    """Sum of the policy loss's counts over the whole optimiser step."""
    value_divisor: float
    accumulated: bool = False
    """True where `forward_backward` already ran the passes, on samples that are not sent again (streaming update)."""


UNNORMALISED = OptimizerStep(micro_batches=(), passes=0, divisor=1.0, value_divisor=1.0)
"""Placeholder step for a part of a streaming update, whose divisors are known only when the last part is there."""


@frozen(kw_only=True)
class ImitationStep:
    """One rank's share of one optimiser step of behaviour cloning."""

    number: int
    """Number of the optimiser step, from 1."""
    first: int
    """Number of the rank's first sample within the step, over all ranks."""
    indices: Array
    """Indices into the rank's samples, int64 [B]; empty where the rank only joins the reduction."""
    total: int
    """Number of samples of all ranks."""
    most: int
    """Number of samples of the rank that has the most."""
    lr: float
    augment: AugmentSpec | None = None
    """Random changes to the images, which `read_ahead` makes; None: none."""
    seed: int = 0
    """Seed of these changes."""


# ---------------------------------------------------------------------------------------- what an update gets


@frozen(kw_only=True, eq=False)
class TrajectoryData:
    """One rank's samples of a training step, and its share of the optimiser steps."""

    step: int
    """Training step, from 1."""
    version: int
    """Version of the weights before the update."""
    inputs: SampleInputs | None
    """Model inputs of the rank's samples; None where it has none, or sent them to `accumulate`."""
    fields: SampleFields
    """Fields of the same samples, in the same order."""
    steps: Sequence[OptimizerStep]


@frozen(kw_only=True, eq=False)
class TrajectoryPart:
    """A part of a rank's samples, before the rest of the training step is collected (streaming update)."""

    version: int
    inputs: ModelInputs | None
    fields: SampleFields
    micro_batches: Sequence[Array]
    """Indices into the part's samples, int64 [b] for each micro-batch."""
    passes: int
    """Number of micro-batches of the rank that has the most."""
    first: bool
    """This is the training step's first part."""


@frozen(kw_only=True, eq=False)
class DemonstrationsData:
    """One rank's demonstrations, and its share of optimiser steps on them."""

    demonstrations: Demonstrations | None
    """None: the rank has none, and only joins the reduction of gradients."""
    steps: Sequence[ImitationStep]


@frozen(kw_only=True, eq=False)
class Transitions:
    """K transitions of chunks. Observations before and after chunks are rows of F frames: none is kept twice."""

    frames: Observation
    """Observations of F frames, in host memory."""
    first: Array
    """Frame before each chunk, int64 [K]."""
    following: Array
    """Frame after the last valid action of each chunk, int64 [K]."""
    actions: Array
    """Actions as executed, whoever chose them, float32 [K, C, A] in the simulator's units; the others as chosen."""
    rewards: Array
    """Rewards, float32 [K, C]; 0 where not valid."""
    valid: Array
    """Executed actions, bool [K, C]: the first ones of each chunk, at least one."""
    terminated: Array
    """The task ended within the chunk, bool [K]. A truncation does not count: the value of what follows is not 0."""
    source: Array | None = None
    """`ActionSource` of each action, int8 [K, C]; read where `valid`. None: the policy chose all of them."""
    expert_actions: Array | None = None
    """Labels: the simulator's expert's chunks, float32 [K, C, A]. None: not asked (`TrainerPlugin.expert_share`)."""
    extras: Mapping[str, Array] = field(factory=dict)
    """`Chunk.extras` of each chunk, [K, ...]."""

    def __len__(self) -> int:
        return len(self.first)


@frozen(kw_only=True, eq=False)
class TransitionsData:
    """New transitions of one rank, which the trainer adds to those that it keeps."""

    step: int
    """Training step, from 1."""
    version: int
    """Version of the weights before the update."""
    transitions: Transitions | None
    """None: nothing new was collected."""
    demonstrations: Demonstrations | None = None
    """Recordings with rewards (`read_rewards`), where the spec has some."""


@frozen(kw_only=True, eq=False)
class WindowData:
    """Windows of recorded episodes for one optimiser step of a world model."""

    windows: Windows
    noise: Noise
    """Random numbers, keyed by the number of the update."""


@frozen(kw_only=True)
class UpdateMetrics:
    """Metrics of one rank's update. The driver merges those of all ranks.

    Metrics of all writers share one table, so the names that `Algorithm.loss` lists as the runtime's are refused here,
    too, except those that trainers report for it: "loss/total", "loss/imitation", "policy/grad_norm" and
    "policy/recompute_kl". A number that is not finite is warned of.
    """

    sums: Mapping[str, float] = field(factory=dict)
    """Metrics that are added over ranks."""
    maxima: Mapping[str, float] = field(factory=dict)
    """Metrics of which the largest counts."""
    statistics: Mapping[str, Statistic] = field(factory=dict)
    """Statistics that are added over ranks, then read."""
    warnings: tuple[str, ...] = ()
    """Texts that the driver logs."""
    seconds: float = 0.0
    """Seconds that the update took."""


D = TypeVar("D", TrajectoryData, DemonstrationsData, TransitionsData, WindowData)
"""What a trainer learns from."""


class Trainer(ABC, Generic[D]):
    """How a learner rank learns: its networks, optimisers and targets, and their updates. The policy is the
    `TrainedModel` of its context, which all trainers of a rank share. One of trajectories that can begin with a
    part of a training step inherits `TrainsInParts` in addition. Entry-point group `vla_rl.trainers`."""

    @abstractmethod
    @hookspec(firstresult=True)
    def modules(self) -> Mapping[str, torch.nn.Module]:
        """Return all networks that are trained, by name; "policy" is that. Checkpoints hold the weights of all."""

    @abstractmethod
    @hookspec(firstresult=True)
    def optimizers(self) -> Mapping[str, torch.optim.Optimizer]:
        """Return optimisers by name; "policy" is that. Checkpoints hold their state. Empty if a network has its own."""

    @hookspec(firstresult=True)
    def targets(self) -> Mapping[str, torch.nn.Module]:
        """Return networks that follow trained ones (targets), by name. Checkpoints hold their weights. Optional."""
        return {}

    @abstractmethod
    @hookspec(firstresult=True)
    def update(self, data: D) -> UpdateMetrics:
        """Train on these data. Their class D belongs to `TrainerPlugin.trains_on`: `Trainer[TrajectoryData]`. All ranks
        call it together. Gradients are summed over ranks, so a loss carries the divisors of all of them; the driver
        merges the metrics of all ranks."""

    @hookspec(firstresult=True)
    def restart(self) -> None:
        """Forget a begun step's samples and gradients, after a strategy replaced the policy's parameters. Optional."""

    @hookspec(firstresult=True)
    def state(self) -> Mapping[str, Any]:
        """Return what `load` needs besides modules, optimisers and targets to resume exactly: tensors in host memory,
        numbers, texts, lists and dicts; checkpoints are read with torch's `weights_only`. Optional."""
        return {}

    @hookspec(firstresult=True)
    def load(self, state: Mapping[str, Any]) -> None:
        """Resume from what `state` returned. Optional."""
