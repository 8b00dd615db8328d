"""The data that crosses plugin borders. Importing this module imports neither torch nor a simulator.

Dimensions: T chunk steps of a rollout, N rows or trajectories, C actions in a chunk, A action dimensions,
M log-probs of an action (action tokens, or 1), B samples of a batch, S state dimensions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import attrs
from attrs import field, frozen

if TYPE_CHECKING:
    import numpy as np
    import torch

Array: TypeAlias = "np.ndarray[Any, Any]"
"""A NumPy array of any shape and dtype; docstrings and comments give both. A string, so that this module is light."""
ArrayOrTensor: TypeAlias = "np.ndarray[Any, Any] | torch.Tensor"
"""What crosses plugin borders in either form; `to_numpy` and `pick` take both."""
ValueGranularity = Literal["none", "chunk", "action"]


def to_numpy(array: Any) -> Any:
    """A NumPy view (or copy, when it lies on a device) of a tensor or array."""
    return array.detach().cpu().numpy() if hasattr(array, "detach") else array


def pick(array: Any, indices: Any) -> Any:
    """Rows of a tensor or array at these positions (int64 NumPy array), in this order."""
    if hasattr(array, "detach"):
        import torch

        return array[torch.tensor(indices, device=array.device)]
    return array[indices]


def contiguous(array: Any) -> Any:
    """The same tensor or array; one that is a view with strides of its own is copied."""
    if hasattr(array, "detach"):
        return array.contiguous()
    import numpy as np

    return np.ascontiguousarray(array)


def concat(parts: Sequence[Any]) -> Any:
    """Concatenate arrays of one kind (NumPy or torch) along the first dimension."""
    if hasattr(parts[0], "detach"):
        import torch

        return torch.cat(list(parts))
    import numpy as np

    return np.concatenate(list(parts))


def at_last_action(flags: Any, executed: Any) -> Any:
    """Of NumPy flags [N, C] those of each row's last executed action, [N]; of its first where there is none."""
    import numpy as np

    last = np.maximum(executed.sum(1) - 1, 0)
    return flags[np.arange(len(flags)), last]


# ------------------------------------------------------------------------------------------------- plugins


@frozen(kw_only=True)
class Context:
    """What core tells a builder about the place of the component in the run."""

    seed: int = 0
    device: str = "cpu"
    chunk: int = 1
    """C, actions in a chunk."""
    num_envs: int = 1
    """Simulators: rows of this component (a run may hold several components)."""
    first_row: int = 0
    """Simulators: number of the first of these rows within the run."""
    env: EnvInfo | None = None
    """Models: the simulator they act in; demonstrations: the one that they are for."""
    temperature: float = 1.0
    """Models: sampling temperature, in rollout and training alike."""
    values: ValueGranularity = "none"
    """Models: critic output the algorithm needs: none, [B] or [B, C]."""
    scaling: Mapping[str, Mapping[str, Sequence[float]]] | None = None
    """Models: scale actions and state by these (`Demonstrations.data_statistics`), not by the checkpoint's own, which
    need not be there. In `Plugin.check`, where data are not read yet: empty."""


@frozen(kw_only=True)
class Plugin:
    """What an entry point names. Light to import: `build` imports torch, simulators and the rest when it is called."""

    config: type
    """attrs class (frozen, kw_only) of the plugin's keys in a spec."""
    build: Callable[[Any, Context], Any] = field(validator=attrs.validators.is_callable())
    """(config, context) -> component; for hooks: an object with `RunEvents` methods or wrappers."""
    summary: str
    extra: str | None = None
    """Extra of the distribution that installs what `build` imports."""
    presets: Mapping[str, Mapping[str, Any]] = field(factory=dict)
    """Keys under a name: `preset: NAME` in a spec stands for them, and keys beside it win; no key is named `preset`."""
    row_memory: int = 0
    """Simulators: host memory of one row in bytes, when it is not negligible."""
    preflight: Callable[[Any], None] | None = None
    """config -> None, before any process starts: raises UserError for what this machine lacks (drivers, assets)."""
    check: Callable[[Any, Context], None] | None = None
    """(config, context without `env`) -> None, for `vla-rl check` and before every run, within a second: raises
    UserError for what shows without building, such as files that are missing or cut off, names that nobody has, a chunk
    that a checkpoint was not trained for. `vla_rl.at(key)` says which key is to blame. No downloads."""
    lacks: Callable[[], str | None] | None = None
    """-> what this interpreter lacks beyond the packages of `extra`, for `vla-rl plugins`; None: nothing."""
    action_dim: Callable[[Any], int | None] | None = None
    """config -> numbers of an action, where known without building (else None): env and model must agree."""
    files: Callable[[Any], Iterable[str]] | None = None
    """Hooks: config -> names of the files and folders that it writes in the run folder; no other hook writes them, and
    the run does not."""
    no_rl: Callable[[Any], str | None] | None = None
    """Models: config -> why reinforcement learning is impossible with it (None: it is possible), asked before a run."""


# ---------------------------------------------------------------------------------------------- simulators


@frozen(kw_only=True)
class TaskInfo:
    """One task of a simulator: what the policy is told and how long it may take."""

    name: str
    instruction: str
    max_steps: int
    """Step limit in environment steps (single actions)."""
    instruction_varies: bool = False
    """The simulator words it anew in each episode; `instruction` is an example then."""


@frozen(kw_only=True)
class EnvInfo:
    """What a simulator offers; a model is built to fit it, and refused early when it cannot."""

    cameras: Mapping[str, tuple[int, int]]
    """Camera name -> (height, width) in pixels, in the order in which a model sees them."""
    state_dim: int
    """Length of the proprioceptive state; 0 when there is none."""
    action_low: tuple[float, ...]
    action_high: tuple[float, ...]
    """Bounds of an action, A numbers each, in the simulator's units."""
    tasks: tuple[TaskInfo, ...]
    notes: tuple[str, ...] = ()
    """What a reader of results has to know of this simulator's settings; goes into results.json."""
    deterministic: bool = True
    """An episode comes twice alike. Else streams (`auto_reset`) begin anew where they would be played again."""

    @property
    def action_dim(self) -> int:
        return len(self.action_low)

    def task(self, name: str) -> TaskInfo:
        """The task of that name. Raises KeyError when there is none."""
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
class Observation:
    """What a policy sees of N rows: the images after the last executed action, state and instruction."""

    images: Mapping[str, ArrayOrTensor]
    """Camera -> uint8 [N, H, W, 3], upright."""
    instructions: tuple[str, ...]
    state: ArrayOrTensor | None = None
    """float32 [N, S]."""
    steps: ArrayOrTensor | None = None
    """int64 [N]: valid actions of each row's episode so far, in rollouts; else None. Core fills it in."""

    def __len__(self) -> int:
        return len(self.instructions)

    def take(self, rows: Any) -> Observation:
        """The rows at these positions (int64 NumPy array), in this order."""
        return self._each(lambda array: pick(array, rows), tuple(self.instructions[int(i)] for i in rows))

    def numpy(self) -> Observation:
        """The same observation in host memory, ready to cross processes."""
        return self._each(to_numpy, self.instructions)

    def contiguous(self) -> Observation:
        """The same observation, where views with strides of their own are copied: pictures are turned with `[:, ::-1]`,
        which torch does not read."""
        return self._each(contiguous, self.instructions)

    def _each(self, change: Callable[[ArrayOrTensor], ArrayOrTensor], instructions: tuple[str, ...]) -> Observation:
        state, steps = (None if array is None else change(array) for array in (self.state, self.steps))
        images = {name: change(image) for name, image in self.images.items()}
        return Observation(images=images, instructions=instructions, state=state, steps=steps)

    @staticmethod
    def concat(parts: Sequence[Observation]) -> Observation:
        if len(parts) == 1:
            return parts[0]
        found = {name: [getattr(p, name) for p in parts if getattr(p, name) is not None] for name in ("state", "steps")}
        return Observation(
            images={name: concat([part.images[name] for part in parts]) for name in parts[0].images},
            instructions=tuple(text for part in parts for text in part.instructions),
            **{name: concat(arrays) for name, arrays in found.items() if arrays},
        )


@frozen(kw_only=True, eq=False)
class ChunkResult:
    """What `SimEnv.chunk_step` returns for N rows and chunks of C actions."""

    obs: Observation
    """After the last executed action of each row (of an ended row: its final observation, never a reset one)."""
    rewards: ArrayOrTensor
    """float32 [N, C]; 0 where nothing was executed."""
    terminated: ArrayOrTensor
    """bool [N, C]: the task ended at this action, by success or failure."""
    truncated: ArrayOrTensor
    """bool [N, C]: the simulator gave up at this action for a reason of its own (core adds the step limit)."""
    executed: ArrayOrTensor
    """bool [N, C]: this action was applied. Rows that are not active execute nothing."""
    success: ArrayOrTensor
    """bool [N]: the task's success predicate after the row's last executed action."""
    succeeded: ArrayOrTensor | None = None
    """Optional bool [N, C]: the predicate after each action; makes success_once exact where rows run on."""


# -------------------------------------------------------------------------------------------------- models


@frozen(kw_only=True, eq=False)
class Chunk:
    """A sampled chunk of actions for B rows."""

    actions: ArrayOrTensor
    """float32 [B, C, A] in the simulator's units."""
    log_probs: ArrayOrTensor
    """float32 [B, C, M]: log-probability under the distribution that was sampled (temperature included)."""
    values: ArrayOrTensor | None = None
    """float32 [B] or [B, C] from the same forward pass, when the model has a value head."""
    extras: Mapping[str, ArrayOrTensor] = field(factory=dict)
    """What `chunk_log_probs` needs again, batch first: tokens [B, C, M], a denoising chain ..."""


@frozen(kw_only=True, eq=False)
class Scores:
    """What a model says of recorded chunks, with gradient."""

    log_probs: torch.Tensor
    """[B, C, M]."""
    entropy: torch.Tensor
    """[B, C, M], nats."""
    values: torch.Tensor | None = None
    """[B] or [B, C]."""


# ---------------------------------------------------------------------------------- rollouts and algorithms


@frozen(kw_only=True)
class Episode:
    """One finished episode, as the statistics count it."""

    number: int
    episode: int
    """Its ticket's, or with auto_reset its row's, and its place there; in an evaluation its state's, and the repeat."""
    task: str
    state: int
    """Id of the reset state."""
    steps: int
    """Valid environment steps."""
    total_reward: float
    success_once: bool
    success_at_end: bool
    truncated: bool
    """Ended by the step limit, or the simulator's own truncation."""


@frozen(kw_only=True)
class Requirements:
    """What an algorithm needs beside rewards, ends and recorded log-probs (`Algorithm.needs`). `|` unites two."""

    values: bool = False
    """A critic: `Rollout.values` and `next_values` in `advantages`; `Batch.values` and `Scores.values` in `loss`."""
    recomputed_values: bool = False
    """The rollout's `values` and `next_values` are recomputed with the newest weights; beside `values`."""
    proximal_log_probs: bool = False
    """Log-probs of the weights that the training step began with (the proximal policy): `Rollout.proximal_log_probs`
    and `Batch.proximal_log_probs`."""
    groups: bool = False
    """At least two trajectories in each group of `Rollout.groups`."""
    reference: bool = False
    """Log-probs of the policy before training: `Batch.reference_log_probs`. The model has to offer them."""
    frames: bool = False
    """Frames of whole trajectories: the argument of `Algorithm.features`, whose result is `Rollout.features`."""

    def __or__(self, other: Requirements) -> Requirements:
        if not isinstance(other, Requirements):
            return NotImplemented
        names = [known.name for known in attrs.fields(Requirements)]
        return Requirements(**{name: getattr(self, name) or getattr(other, name) for name in names})


class AdvantageScope(Enum):
    """What rewards, filters, advantages and weights of a group depend on (`Algorithm.advantage_scope`)."""

    GROUP = "group"
    """On that group alone, so `asynchrony.stream` may train on it before the step is whole."""
    STEP = "step"
    """On other groups of the step too."""


@frozen(kw_only=True, eq=False)
class Rollout:
    """The light part of a whole rollout: torch tensors on the CPU, time-major. A column is a ticket, in their order."""

    step: int
    rewards: torch.Tensor
    """float32 [T, N, C]; 0 where not valid."""
    terminated: torch.Tensor
    truncated: torch.Tensor
    """bool [T, N, C], at valid steps only. An episode ended where either holds."""
    valid: torch.Tensor
    """bool [T, N, C]: the action counts. False from the step after an end."""
    log_probs: torch.Tensor
    """float32 [T, N, C, M] of sampling time."""
    values: torch.Tensor | None
    """float32 [T, N] or [T, N, C] of sampling time; None without a critic."""
    next_values: torch.Tensor | None
    """float32 [T, N]: value of what follows a truncation in this chunk, or the last chunk; 0 where none is needed."""
    groups: torch.Tensor
    """int64 [N]: trajectories with one number started from one state (and share the task)."""
    success: torch.Tensor
    """bool [N]: success_once of the column's first episode."""
    versions: torch.Tensor
    """int64 [T, N]: version of the weights that chose the chunk."""
    episodes: tuple[Episode, ...]
    features: torch.Tensor | None = None
    """float32 [N, D] from `Algorithm.features`."""
    tasks: tuple[str, ...] = ()
    """Task of each column's first episode; empty where one did not end."""
    proximal_log_probs: torch.Tensor | None = None
    """float32 [T, N, C, M] of the newest weights, with `Requirements.proximal_log_probs`."""
    extras: Mapping[str, torch.Tensor] = field(factory=dict)
    """Further numbers of `fields.ROLLOUT`, by name."""
    findings: Mapping[str, torch.Tensor] = field(factory=dict)
    """What `Algorithm.shape_rewards` found of each trajectory, [N] each; for its metrics and for listeners."""
    recordings: Iterable[Any] = ()
    """Episodes that a hook with `RecordSettings` records (vla_rl.toolkit.data.recording), fetched as it iterates."""

    @property
    def samples(self) -> torch.Tensor:
        """bool [T, N]: chunk steps with at least one valid action; these can be trained on."""
        return self.valid.any(-1)

    def evolve(self, **changes: Any) -> Rollout:
        return attrs.evolve(self, **changes)


@frozen(kw_only=True, eq=False)
class Advantages:
    """What an algorithm makes of a rollout's light part. A loss is a sum of `weight * entry's loss`, divided by the
    sum of `counts` over *all* samples of one optimiser step, whatever micro-batches and ranks they are split over."""

    advantages: torch.Tensor
    """float32 [T, N] or [T, N, C]; 0 where not valid."""
    weights: torch.Tensor
    """float32 [T, N] (chunk-level ratio) or [T, N, C]: weight of each entry of the policy loss; 0 where not valid."""
    counts: torch.Tensor | None = None
    """What each entry adds to the divisor; None: its weight."""
    returns: torch.Tensor | None = None
    """float32, shape of the values: target of the critic."""
    value_weights: torch.Tensor | None = None
    """float32, shape of the values: weight of each entry of the value loss; 0 where not valid."""
    value_counts: torch.Tensor | None = None
    """What each entry adds to the value loss's divisor; None: its weight."""
    extras: Mapping[str, torch.Tensor] = field(factory=dict)
    """Further numbers for the loss, as `Algorithm.extras` declares them; they come back in `Batch.extras`."""
    metrics: Mapping[str, float] = field(factory=dict)
    """Names: see `Algorithm.loss`."""

    @property
    def divisors(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(counts, value_counts), the weights where none are given."""
        counts = self.weights if self.counts is None else self.counts
        return counts, self.value_weights if self.value_counts is None else self.value_counts


@frozen(kw_only=True, eq=False)
class Batch:
    """One micro-batch on a learner rank, flattened to B samples, on the learner's device."""

    obs: Observation
    chunk: Chunk
    valid: torch.Tensor
    """bool [B, C]."""
    log_probs: torch.Tensor
    """float32 [B, C, M] of sampling time."""
    values: torch.Tensor | None
    advantages: torch.Tensor
    """float32 [B] or [B, C]."""
    weights: torch.Tensor
    """float32 [B] or [B, C]; already divided by the counts of the whole optimiser step."""
    returns: torch.Tensor | None
    value_weights: torch.Tensor | None
    lag: torch.Tensor
    """int64 [B]: learner version - version that sampled."""
    reference_log_probs: torch.Tensor | None = None
    """float32 [B, C, M] of the reference policy, with `Requirements.reference`."""
    proximal_log_probs: torch.Tensor | None = None
    """float32 [B, C, M] of the weights that the training step began with, with `Requirements.proximal_log_probs`."""
    extras: Mapping[str, torch.Tensor] = field(factory=dict)
    """[B, ...] each: `Advantages.extras` of these samples, and further numbers of the rollout."""


@frozen(kw_only=True, eq=False)
class Loss:
    """`total` is summed over micro-batches and ranks before the optimiser steps."""

    total: torch.Tensor
    metrics: Mapping[str, torch.Tensor] = field(factory=dict)
    """Partial sums: added over micro-batches and ranks, the mean over the optimiser step. Names: `Algorithm.loss`."""
    maxima: Mapping[str, torch.Tensor] = field(factory=dict)
    """Reduced by maximum."""
    statistics: Mapping[str, Statistic] = field(factory=dict)
    """Added over micro-batches, ranks and optimiser steps, then read: means over entries, quantiles."""


@frozen(eq=False)
class Statistic(ABC):
    """`sums`: float64, of one length for all instances of a class."""

    sums: torch.Tensor

    def __add__(self, other: Statistic) -> Statistic:
        return type(self)(self.sums + other.sums.to(self.sums.device))

    def cpu(self) -> Statistic:
        return type(self)(self.sums.cpu())

    @abstractmethod
    def read(self, name: str) -> dict[str, float]:
        """Metrics, whose names begin with `name`. Nothing when no entry was counted."""
