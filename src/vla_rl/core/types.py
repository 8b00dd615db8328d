"""Data types at plugin borders. Importing this module imports neither torch nor a simulator.

Dimensions: T chunk steps of a rollout, N envs or trajectories, C actions in a chunk, A action dimensions, M log-probs
of an action (action tokens, or 1), B samples of a batch, S state dimensions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum, IntEnum
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import attrs
from attrs import field, frozen

from vla_rl.core.fields import check_extras

if TYPE_CHECKING:
    from typing import Self

    import numpy as np
    import torch

Array: TypeAlias = "np.ndarray[Any, Any]"
"""A NumPy array of any shape and dtype; docstrings give both. A string, so that this module stays cheap to import."""
ArrayOrTensor: TypeAlias = "np.ndarray[Any, Any] | torch.Tensor"
"""A NumPy array or a torch tensor. Plugins give and take either; `to_numpy` and `pick_rows` accept both."""
ValueGranularity = Literal["none", "chunk", "action"]


def to_numpy(array: Any) -> Any:
    """Return a tensor or array as a NumPy view (a copy, if it is on a device)."""
    return array.detach().cpu().numpy() if hasattr(array, "detach") else array


def pick_rows(array: Any, indices: Any) -> Any:
    """Return the rows of a tensor or array at these positions (int64 NumPy array), in this order."""
    if hasattr(array, "detach"):
        import torch

        index = torch.tensor(indices)
        if array.is_cuda:
            index = index.pin_memory()  # the host does not wait for a copy from pinned memory
        return array.index_select(0, index.to(array.device, non_blocking=True))  # CPU: 10 times as fast as indexing
    return array[indices]


def make_contiguous(array: Any) -> Any:
    """Return the same tensor or array in contiguous memory; a strided view is copied."""
    if hasattr(array, "detach"):
        return array.contiguous()
    import numpy as np

    return np.ascontiguousarray(array)


def concat_arrays(parts: Sequence[Any]) -> Any:
    """Concatenate arrays of one kind (NumPy or torch) along the first dimension."""
    if hasattr(parts[0], "detach"):
        import torch

        return torch.cat(list(parts))
    import numpy as np

    return np.concatenate(list(parts))


_field_names: Callable[[Any], tuple[str, ...]] = cache(lambda kind: tuple(known.name for known in attrs.fields(kind)))


class SampleRecord:
    """Base of records of B samples: attrs classes whose fields are arrays with a row for each sample, mappings of such
    arrays, further records, tuples with an entry for each sample, or None."""

    __slots__ = ()

    def take(self, rows: Any) -> Self:
        """Return the samples at these positions (int64 NumPy array, or other integers), in this order."""
        positions = rows.tolist() if hasattr(rows, "tolist") else rows
        return self._map_values(
            lambda array: pick_rows(array, rows), lambda entries: tuple(map(entries.__getitem__, positions))
        )

    def numpy(self) -> Self:
        """Return the same samples in host memory, ready to send to another process."""
        return self._map_values(to_numpy)

    def contiguous(self) -> Self:
        """Return the same samples in contiguous memory. Strided views are copied: torch cannot read `[:, ::-1]`."""
        return self._map_values(make_contiguous)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays. Tuples do not count: many envs share one instruction."""
        total = 0

        def add_bytes(array: ArrayOrTensor) -> ArrayOrTensor:
            nonlocal total
            total += int(array.nbytes)
            return array

        self._map_values(add_bytes)
        return total

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:
        """Join records, one after another. An array that one lacks is left out; a record, without rows."""
        return parts[0] if len(parts) == 1 else _join_values(parts)

    def _map_values(
        self,
        map_array: Callable[[Any], Any],
        map_entries: Callable[[tuple[Any, ...]], tuple[Any, ...]] = lambda entries: entries,
    ) -> Self:
        """Return a new record: `map_array` is applied to each array, also in mappings and inner records, `map_entries`
        to each tuple; None stays."""

        def map_value(value: Any) -> Any:
            if value is None:
                return None
            if isinstance(value, tuple):
                return map_entries(value)
            if isinstance(value, Mapping):
                return type(value)({name: map_value(array) for name, array in value.items()})  # type: ignore[call-arg]
            return value._map_values(map_array, map_entries) if isinstance(value, SampleRecord) else map_array(value)  # noqa: SLF001

        return type(self)(**{name: map_value(getattr(self, name)) for name in _field_names(type(self))})


def _join_values(values: Sequence[Any]) -> Any:
    """Join the values that parts of a record have in one place."""
    records = [value for value in values if isinstance(value, SampleRecord)]
    if records:
        kind = type(records[0])
        joined = {name: _join_values([getattr(one, name) for one in records]) for name in _field_names(kind)}
        return records[0] if len(records) == 1 else kind(**joined)
    first = values[0]
    if isinstance(first, Mapping):
        return type(first)({name: _join_values([value[name] for value in values]) for name in first})  # type: ignore[call-arg]
    if isinstance(first, tuple):
        return tuple(chain.from_iterable(values))
    return None if any(value is None for value in values) else concat_arrays(values)


def at_last_action(flags: Any, executed: Any) -> Any:
    """Return the flags (NumPy [N, C]) at each env's last executed action, [N]; at its first if none was executed."""
    import numpy as np

    last = np.maximum(executed.sum(1) - 1, 0)
    return flags[np.arange(len(flags)), last]


# ---------------------------------------------------------------------------------------------- simulators


BOUND_TOLERANCE = 1e-4
"""How far rounding may take actions beyond a simulator's bounds."""


class ActionSource(IntEnum):
    """Who chose an executed action. A takeover (elsewhere: intervention) is a run of actions of another source."""

    POLICY = 0
    PERSON = 1
    EXPERT = 2
    """A scripted expert, or another policy."""


@frozen(kw_only=True)
class TaskInfo:
    """One task of a simulator: the instruction for the policy and the step limit."""

    name: str
    instruction: str
    max_steps: int
    """Step limit in environment steps (single actions)."""
    instruction_varies: bool = False
    """The simulator rephrases the instruction in each episode; `instruction` is then an example."""
    categories: tuple[str, ...] = ()
    """Categories to which the task belongs, such as a dimension of a benchmark; evaluations report their success."""


@frozen(kw_only=True)
class EnvInfo:
    """Properties of a simulator. A model is built to fit them, and refused early if it cannot."""

    cameras: Mapping[str, tuple[int, int]]
    """Camera name -> (height, width) in pixels, in the order in which a model sees them."""
    state_dim: int
    """Length of the proprioceptive state; 0 when there is none."""
    action_low: tuple[float, ...]
    action_high: tuple[float, ...]
    """Upper bounds of an action; with `action_low` A numbers each, in the simulator's units."""
    tasks: tuple[TaskInfo, ...]
    notes: tuple[str, ...] = ()
    """Facts about this simulator's settings that a reader of results must know; written to results.json."""
    deterministic: bool = True
    """Equal actions from a reset give equal episodes. If not, env streams (`auto_reset`) cannot be replayed."""
    fixed_states: bool = True
    """A reset state's id always gives the same scene. If not, a person arranges it, as with robots: ids only count."""
    chunk_is_one_motion: bool = False
    """A chunk is executed as one motion through its actions, so that chunks of another length lead elsewhere. Rewards
    and ends are then reported at a chunk's last action."""
    takeovers: bool = False
    """A person or an expert may take over from the policy: `ChunkResult` has `source` and `executed_actions`."""
    control_hz: float | None = None
    """Actions a second in real time: `chunk_step` waits until an action is due, and reports late ones in
    `ChunkResult.late`. None: as fast as the simulator goes."""
    action_names: tuple[str, ...] = ()
    """Names of an action's A numbers, such as joints, in order. Data sets and checkpoints that have these names in
    another order are refused. Empty: not known."""
    state_names: tuple[str, ...] = ()
    """Names of the state's S numbers, in order, as `action_names`."""
    extras: Mapping[str, str] = field(factory=dict, validator=lambda _, __, extras: check_extras(extras, "AC"))
    """Further numbers that `chunk_step` reports in `ChunkResult.extras`: name -> dimensions after the envs, such as
    {"distance": "C"} for one an action, {"force": "C 3"}, or {"energy": ""} for one a chunk. `Rollout.extras` and
    `Batch.extras` hold them, so an algorithm can read them."""

    @property
    def action_dim(self) -> int:
        return len(self.action_low)

    def task(self, name: str) -> TaskInfo:
        """Return the task of that name. Raise KeyError if no task has it."""
        for task in self.tasks:
            if task.name == name:
                return task
        raise KeyError(f"no task {name!r}; tasks: {', '.join(t.name for t in self.tasks)}")


@frozen(kw_only=True)
class ResetState:
    """A fixed initial state: the same id always gives the same scene, task included."""

    id: int
    task: str


@frozen(kw_only=True, eq=False)
class Observation(SampleRecord):
    """Policy input of N envs: the images after the last executed action, the state and the instruction."""

    images: Mapping[str, ArrayOrTensor]
    """Images by camera, uint8 [N, H, W, 3], upright."""
    instructions: tuple[str, ...]
    state: ArrayOrTensor | None = None
    """Proprioceptive state, float32 [N, S]."""
    steps: ArrayOrTensor | None = None
    """Valid actions of each env's episode so far, int64 [N], in rollouts; else None. Core fills it in."""

    def __len__(self) -> int:
        return len(self.instructions)


@frozen(kw_only=True, eq=False)
class ChunkResult(SampleRecord):
    """Result of `SimEnv.chunk_step` for N envs and chunks of C actions."""

    obs: Observation
    """Observation after each env's last executed action; of an ended env the final one, never one after a reset."""
    rewards: ArrayOrTensor
    """Rewards, float32 [N, C]; 0 for actions that were not executed."""
    terminated: ArrayOrTensor
    """The task ended at this action, by success or failure; bool [N, C]."""
    truncated: ArrayOrTensor
    """The simulator ended the episode at this action for its own reason; bool [N, C]. Core adds the step limit."""
    executed: ArrayOrTensor
    """The action was applied; bool [N, C]. Envs that are not active execute nothing."""
    success: ArrayOrTensor
    """The task's success predicate after each env's last executed action; bool [N]."""
    succeeded: ArrayOrTensor | None = None
    """Success after each action, bool [N, C]; optional. It makes success_once exact if episodes go on after ends."""
    source: ArrayOrTensor | None = None
    """`ActionSource` of each action, int8 [N, C]; read where `executed`. Given with `EnvInfo.takeovers`, else None."""
    executed_actions: ArrayOrTensor | None = None
    """Actions that were executed, float32 [N, C, A] in the simulator's units and within its bounds; read where `source`
    is not the policy. Given with `EnvInfo.takeovers`, else None."""
    late: ArrayOrTensor | None = None
    """The action began later than it was due, because the policy or the simulator took too long; bool [N, C], False
    where not executed. Given with `EnvInfo.control_hz`, else None."""
    extras: Mapping[str, ArrayOrTensor] = field(factory=dict)
    """Further numbers of the simulator, float32 [N, ...] each, as `EnvInfo.extras` declares them."""


# -------------------------------------------------------------------------------------------------- models


@frozen(kw_only=True, eq=False)
class Chunk(SampleRecord):
    """A sampled chunk of actions for B samples."""

    actions: ArrayOrTensor
    """Actions, float32 [B, C, A] in the simulator's units."""
    log_probs: ArrayOrTensor | None = None
    """Log-probs under the sampled distribution (with temperature), float32 [B, C, M]; None for an own policy."""
    values: ArrayOrTensor | None = None
    """Values from the same forward pass, float32 [B] or [B, C], if the model has a value head."""
    extras: Mapping[str, ArrayOrTensor] = field(factory=dict)
    """Further inputs of `chunk_log_probs`, batch first: tokens [B, C, M], a denoising chain ..."""
    source: ArrayOrTensor | None = None
    """Who chose the action that was executed instead of each of these, `ActionSource` int8 [B, C]; None: all were the
    policy's own. Core fills it in for batches; `Batch.executed_actions` holds the actions."""


@frozen(kw_only=True, eq=False)
class UnexecutedActions:
    """Remainder of the last chunk of one robot at the time of an observation, for real-time chunking."""

    actions: Array
    """Remaining actions, float32 [R, A] in the simulator's units, R from 1 to C; the first one is executed next."""
    delay: int
    """Number of them that will have been executed when the new chunk arrives; at most R."""


@frozen(kw_only=True, eq=False)
class Scores(SampleRecord):
    """A model's scores of recorded chunks, with gradient."""

    log_probs: torch.Tensor
    """Log-probabilities, [B, C, M]."""
    entropy: torch.Tensor
    """Entropies in nats, [B, C, M]."""
    values: torch.Tensor | None = None
    """Values, [B] or [B, C]; None without a critic."""


# ---------------------------------------------------------------------------------- rollouts and algorithms


@frozen(kw_only=True)
class Episode:
    """One finished episode, as the statistics count it."""

    number: int
    episode: int
    """Index of the episode within `number`. In rollouts `number` is the ticket, or with auto_reset the env's persistent
    stream; in an evaluation it is the state, and the index is the repeat."""
    task: str
    state: int
    """Id of the reset state."""
    steps: int
    """Valid environment steps."""
    total_reward: float
    success_once: bool
    success_at_end: bool
    truncated: bool
    """The episode ended by the step limit, or by the simulator's own truncation."""
    interventions: int | None = None
    """Valid environment steps whose action another source than the policy chose; None: no one can take over."""
    late_actions: int | None = None
    """Valid environment steps that began late; None: not in real time."""

    @property
    def unaided_success(self) -> bool:
        """The episode succeeded, and no one intervened in it."""
        return self.success_once and not self.interventions


@frozen(kw_only=True)
class Requirements:
    """What an algorithm needs beside rewards, ends and recorded log-probs (`Algorithm.needs`). `|` unites two."""

    values: bool = False
    """A critic: `Rollout.values` and `next_values` in `advantages`; `Batch.values` and `Scores.values` in `loss`."""
    recomputed_values: bool = False
    """The rollout's `values` and `next_values` are recomputed with the newest weights; needs `values` too."""
    proximal_log_probs: bool = False
    """Log-probs of the step's first weights (the proximal policy): `proximal_log_probs` of `Rollout`, `Batch`."""
    groups: bool = False
    """At least two trajectories in each group of `Rollout.groups`."""
    reference: bool = False
    """Log-probs of the policy before training: `Batch.reference_log_probs`. The model has to offer them."""
    final_observations: bool = False
    """Observations after truncated episodes and trajectories' last chunks, kept; with `values` only if recomputed."""
    takeovers: bool = False
    """Rollouts with what others than the policy did, instead of ones that end there (`Rollout.source`)."""
    frames: bool = False
    """Frames of whole trajectories: the argument of `Algorithm.features`, whose result is `Rollout.features`."""
    terminal_values: bool = False
    """`Rollout.next_values` after terminations too; needs `values`."""

    def __or__(self, other: Requirements) -> Requirements:
        if not isinstance(other, Requirements):
            return NotImplemented
        names = [known.name for known in attrs.fields(Requirements)]
        return Requirements(**{name: getattr(self, name) or getattr(other, name) for name in names})


class AdvantageScope(Enum):
    """What rewards, filters, advantages and weights of a group depend on (`Algorithm.advantage_scope`)."""

    GROUP = "group"
    """On that group alone, so `asynchrony.streaming_update` may train on it before the step is whole."""
    STEP = "step"
    """On other groups of the step too."""


@frozen(kw_only=True, eq=False)
class Rollout:
    """The record of a whole rollout: torch tensors on the CPU, time-major. A column is a ticket, in their order."""

    step: int
    rewards: torch.Tensor
    """Rewards, float32 [T, N, C]; 0 where not valid."""
    terminated: torch.Tensor
    truncated: torch.Tensor
    """Ends of episodes: with `terminated` bool [T, N, C], set at valid steps only. Either ends an episode."""
    valid: torch.Tensor
    """The action counts; bool [T, N, C]. False from the step after an end."""
    log_probs: torch.Tensor
    """Log-probs at sampling time, float32 [T, N, C, M]."""
    values: torch.Tensor | None
    """Values at sampling time, float32 [T, N] or [T, N, C]; None without a critic."""
    next_values: torch.Tensor | None
    """Bootstrap value after a truncation in this chunk (with `Requirements.terminal_values` after a termination too),
    or after the last chunk, float32 [T, N]; 0 where none is needed."""
    groups: torch.Tensor
    """Group of each trajectory, int64 [N]. Trajectories of one group started from one state (and share the task)."""
    success: torch.Tensor
    """success_once of each column's first episode, bool [N]."""
    versions: torch.Tensor
    """Version of the weights that chose the chunk, int64 [T, N]."""
    episodes: tuple[Episode, ...]
    features: torch.Tensor | None = None
    """Features from `Algorithm.features`, float32 [N, D]."""
    tasks: tuple[str, ...] = ()
    """Task of each column's first episode; empty if one of them did not end."""
    proximal_log_probs: torch.Tensor | None = None
    """Log-probs of the step's first weights, float32 [T, N, C, M]; in `advantages`, if `Requirements` ask for them."""
    source: torch.Tensor | None = None
    """`ActionSource` of each action, int8 [T, N, C]; None: the policy chose every valid one. An `Algorithm` always sees
    None, because its rollout ends where another source takes over."""
    executed_actions: torch.Tensor | None = None
    """Actions that were executed, float32 [T, N, C, A]; given with `source`."""
    extras: Mapping[str, torch.Tensor] = field(factory=dict)
    """Further fields of `fields.ROLLOUT`, and the numbers that simulator and model declare (`EnvInfo.extras`,
    `VLAModel.extras`), [T, N, ...] each; 0 where not valid."""
    findings: Mapping[str, torch.Tensor] = field(factory=dict)
    """Per-trajectory results of `Algorithm.shape_rewards`, [N] each; for its metrics and for listeners."""
    recordings: Iterable[Any] = ()
    """Episodes that a hook with `RecordSettings` records (vla_rl.toolkit.data.recording), fetched while iterating."""

    @property
    def samples(self) -> torch.Tensor:
        """Chunk steps with at least one valid action, bool [T, N]; these can be trained on."""
        return self.valid.any(-1)

    def evolve(self, **changes: Any) -> Rollout:
        return attrs.evolve(self, **changes)


@frozen(kw_only=True, eq=False)
class RecordedRewards:
    """Rewards that followed B samples of recorded episodes."""

    rewards: Array
    """Sums of discounted rewards, float32 [B]: from the sample to the `following` one, or to the episode's end."""
    following: Array
    """Indices of the samples that begin where its chunk ends, int64 [B]; -1 if the episode ends before one does."""
    interventions: Array | None = None
    """Whether a person or an expert chose the sample's first action instead of the policy, bool [B]; None: unknown."""


@frozen(kw_only=True)
class DataProperties:
    """Properties of demonstrations, compared with the simulator, the checkpoint and further data sets."""

    fps: float | None = None
    """Actions per second. None: not known."""
    action_names: tuple[str, ...] = ()
    """Names of an action's numbers, in order; empty: not known."""
    state_names: tuple[str, ...] = ()
    """Names of the state's numbers, in order; empty: not known."""
    gripper_signs: Mapping[str, int] = field(factory=dict)
    """Name of a gripper's number in the state -> 1: it rises with the gripper's command; -1: it falls."""


@frozen(kw_only=True, eq=False)
class Advantages:
    """Advantages and loss weights that an algorithm computes from a rollout's trajectory record. The policy loss is the
    sum of `weight * loss term`, divided by the sum of `counts` over *all* samples of one optimiser step, however they
    are split over micro-batches and ranks."""

    advantages: torch.Tensor
    """Advantages, float32 [T, N] or [T, N, C]; 0 where not valid."""
    weights: torch.Tensor
    """Weight of each term of the policy loss, float32 [T, N] (chunk-level ratio) or [T, N, C]; 0 where not valid."""
    counts: torch.Tensor | None = None
    """Contribution of each loss term to the divisor; None: its weight."""
    returns: torch.Tensor | None = None
    """Target of the critic, float32, shape of the values."""
    value_weights: torch.Tensor | None = None
    """Weight of each term of the value loss, float32, shape of the values; 0 where not valid."""
    value_counts: torch.Tensor | None = None
    """Contribution of each term to the value loss's divisor; None: its weight."""
    extras: Mapping[str, torch.Tensor] = field(factory=dict)
    """Further numbers for the loss, as `Algorithm.extras` declares them; the loss receives them in `Batch.extras`."""
    metrics: Mapping[str, float] = field(factory=dict)
    """Metrics by name; `Algorithm.loss` lists the reserved names."""

    @property
    def divisors(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Divisors (counts, value_counts); the weights where none are given."""
        counts = self.weights if self.counts is None else self.counts
        return counts, self.value_weights if self.value_counts is None else self.value_counts


@frozen(kw_only=True, eq=False)
class Batch(SampleRecord):
    """One micro-batch on a learner rank, flattened to B samples, on the learner's device."""

    obs: Observation
    chunk: Chunk
    valid: torch.Tensor
    """Valid actions, bool [B, C]."""
    log_probs: torch.Tensor
    """Log-probs at sampling time, float32 [B, C, M]."""
    values: torch.Tensor | None
    advantages: torch.Tensor
    """Advantages, float32 [B] or [B, C]."""
    weights: torch.Tensor
    """Weights of the policy-loss terms, float32 [B] or [B, C], already divided by the optimiser step's counts."""
    returns: torch.Tensor | None
    value_weights: torch.Tensor | None
    lag: torch.Tensor
    """Policy lag, int64 [B]: learner version minus the version that sampled."""
    reference_log_probs: torch.Tensor | None = None
    """Log-probs of the reference policy, float32 [B, C, M], with `Requirements.reference`."""
    proximal_log_probs: torch.Tensor | None = None
    """Log-probs of the weights at the step's start, float32 [B, C, M], with `Requirements.proximal_log_probs`."""
    executed_actions: torch.Tensor | None = None
    """Actions that were executed instead of `chunk.actions`, float32 [B, C, A]; given with `chunk.source`."""
    extras: Mapping[str, torch.Tensor] = field(factory=dict)
    """Further numbers of these samples, [B, ...] each: `Advantages.extras`, and those of `Rollout.extras`."""


@frozen(kw_only=True, eq=False)
class Loss:
    """The loss of one micro-batch. `total` is summed over micro-batches and ranks before the optimiser steps."""

    total: torch.Tensor
    metrics: Mapping[str, torch.Tensor] = field(factory=dict)
    """Partial sums over micro-batches and ranks of the step's means. `Algorithm.loss` lists the reserved names."""
    maxima: Mapping[str, torch.Tensor] = field(factory=dict)
    """Metrics that are reduced by maximum."""
    statistics: Mapping[str, Statistic] = field(factory=dict)
    """Statistics, added over micro-batches, ranks and optimiser steps, then read: means over loss terms, quantiles."""


@frozen(eq=False)
class Statistic(ABC):
    """A mergeable statistic. `sums` is float64 and has the same length in all instances of a class."""

    sums: torch.Tensor

    def __add__(self, other: Statistic) -> Statistic:
        return type(self)(self.sums + other.sums.to(self.sums.device))

    def cpu(self) -> Statistic:
        return type(self)(self.sums.cpu())

    @abstractmethod
    def read(self, name: str) -> dict[str, float]:
        """Return the metrics, whose names begin with `name`; none if nothing was counted."""
