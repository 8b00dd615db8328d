"""Sections of a spec: their keys, units, ranges and defaults. `core/spec/spec.py` combines them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from attrs import field, frozen
from attrs import validators as v

from vla_rl.core import catalogue
from vla_rl.core.augmentation import AugmentSpec
from vla_rl.core.conventions import convention, negate_numbers, reorder_numbers
from vla_rl.core.spec.structure import make_problem

ENVS, EPISODES, STEPS, UPDATES, LAG = 100_000, 1_000_000, 10_000_000, 1_000_000_000, 1_000
"""Upper limits of a spec for envs, simultaneous episodes, environment steps, training steps, and policy lag in
versions. They exceed any real run, so that typing errors are refused."""
SECONDS = 30.0 * 24 * 3600
"""Longest wait in seconds."""


def number_between(low: float, high: float) -> Any:
    """Return a validator of numbers within these bounds, both inclusive."""
    return v.and_(v.ge(low), v.le(high))


def positive_between(low: float, high: float) -> Any:
    """Return a validator of numbers above 0 and within these bounds."""
    return v.and_(v.gt(0), number_between(low, high))


@frozen
class ValueRange:
    """Validator of a key that takes a number or a table: applies another validator to the number."""

    validator: Any

    def __call__(self, instance: Any, attribute: Any, value: Any) -> None:
        if isinstance(value, float | int):
            self.validator(instance, attribute, value)


@frozen(kw_only=True)
class Component:
    """A plugin and its settings: `{type: grpo, clip_high: 0.28}`."""

    type: str
    """Name of an installed plugin of the kind, or of one from `plugins:`."""
    config: Any
    """Instance of the plugin's attrs class, made from the other keys."""


@frozen(kw_only=True)
class EnvSpec(Component):
    """The simulator."""

    num_envs: int = field(validator=number_between(1, ENVS))
    """Envs (simulator instances) that step together, over all workers."""
    python: Path | None = None
    """Another Python interpreter for the simulators (`.../bin/python` of a virtual environment with vla-rl and the
    simulator), if their packages conflict with the model's; none: this one. Ray only."""
    exclude_states: tuple[int, ...] = ()
    """Ids of reset states from which no episode starts, in training or in evaluation: such as one that always breaks
    the simulator. A fault and results.json name the id of their state."""


@frozen(kw_only=True)
class RewardsSpec(Component):
    """The reward model that judges success at the end of each chunk, instead of the simulator. Success ends the
    episode, and its last action has the reward 1; all other rewards are 0."""

    threshold: float = field(default=0.5, validator=positive_between(0.0, 1.0))
    """Probability from which an observation counts as success, above 0 and at most 1."""
    evaluation: bool = False
    """Let it judge success in evaluations and in demonstrations of the simulator's expert too; false: there the
    simulator judges success."""


@frozen(kw_only=True)
class ConventionsSpec:
    """What a policy was trained with, where that differs from what the simulator and `imitation.data` give: converted
    on the way into the model, and its actions on the way back. `vla-rl identify` finds these keys."""

    images: Literal["as_is", "rotated", "flipped", "mirrored"] = field(
        default="as_is",
        metadata=convention(
            ("as_is", "rotated", "flipped", "mirrored"),
            trades_with=("conventions.state_negated",),
            evidence="text or gravity in a frame, the state, or episodes (--episodes)",
        ),
    )
    """The policy's frames: as the simulator draws them, turned by 180 degrees (rotated), top to bottom (flipped), or
    left to right (mirrored)."""
    channels: Literal["rgb", "bgr"] = field(
        default="rgb", metadata=convention(("rgb", "bgr"), evidence="tasks that name colours")
    )
    """Order of the colours in the policy's frames."""
    instruction: Literal["as_is", "lower_case", "sentence", "underscores", "none"] = field(
        default="as_is",
        metadata=convention(
            ("as_is", "lower_case", "sentence", "underscores"), evidence="several tasks in one scene, and their names"
        ),
    )
    """Instructions that the policy reads: as the simulator gives them, in lower case, as a sentence (a capital letter
    and a full stop), with underscores for blanks, or none."""
    state_order: tuple[int, ...] = field(default=(), metadata=convention(reorder_numbers("state")))
    """The simulator's numbers of the state in the policy's order, such as [1, 0, 2]; empty: the same order."""
    state_negated: tuple[int, ...] = field(
        default=(),
        metadata=convention(negate_numbers("state"), evidence="demonstrations far from the middle of its range"),
    )
    """Numbers of the simulator's state whose sign the policy has turned."""
    action_order: tuple[int, ...] = field(
        default=(),
        metadata=convention(
            reorder_numbers("action"),
            trades_with=("conventions.action_negated",),
            of_actions=True,
            evidence="demonstrations that move along one axis at a time",
        ),
    )
    """The simulator's numbers of an action in the policy's order; empty: the same order."""
    action_negated: tuple[int, ...] = field(
        default=(),
        metadata=convention(
            negate_numbers("action"), evidence="demonstrations in which these numbers move", of_actions=True
        ),
    )
    """Numbers of the simulator's actions whose sign the policy has turned, such as a gripper's."""
    action_scale: float = field(
        default=1.0,
        validator=positive_between(1e-3, 1e3),
        metadata=convention((0.5, 1.0, 2.0), of_actions=True),
    )
    """The policy's actions are this many times the simulator's."""


WeightStrategy = Literal["shared", "ipc", "nccl", "host"]
"""How weights reach policies, as `PlacementSpec.weight_transfer` describes it."""


@frozen(kw_only=True)
class PlacementSpec(Component):
    """The placement of the roles."""

    weight_transfer: Literal["auto", "shared", "ipc", "nccl", "host"] = "auto"
    """How new weights reach policies: they share the learner's (shared, one worker); through CUDA IPC
    (ipc, processes of one GPU); by a collective broadcast from device to device (nccl; between CPUs gloo takes its
    place); through host memory (host, works everywhere). auto: shared where policy and learner are one worker, ipc on
    one GPU, nccl where each role has its own GPUs, else host."""


def _default_engine() -> Component:
    return Component(type="torch", config=catalogue.load("engine", "torch").config())


def default_trainer() -> Component:
    return Component(type="policy_gradient", config=catalogue.load("trainer", "policy_gradient").config())


def default_imitation_trainer() -> Component:
    return Component(type="behaviour_cloning", config=catalogue.load("trainer", "behaviour_cloning").config())


@frozen(kw_only=True)
class UniformTasks:
    """Sample a task by its number of train states."""

    type: Literal["uniform"] = "uniform"


@frozen(kw_only=True)
class WeightedTasks:
    """Sample a task more often the more it fails (AcceRL eq. 11): with probability w / sum of all w, where w = failures
    among the task's last `window` episodes + `smoothing`."""

    type: Literal["weighted"] = "weighted"
    window: int = field(default=100, validator=number_between(1, EPISODES))
    """Latest episodes of a task that count, over all workers."""
    smoothing: float = field(default=1.0, validator=positive_between(1e-9, 1e9))
    """Weight of a task that never fails."""


@frozen(kw_only=True)
class AutoReset:
    """Tickets of a fixed length: at the end of an episode the ticket continues with a new one."""

    steps: int = field(validator=number_between(1, STEPS))
    """Environment steps (single actions) of each of env.num_envs tickets in a training step; a multiple of chunk."""
    mode: Literal["immediate", "deferred"] = "immediate"
    """When the new episode begins: at once (immediate), or at the next chunk (deferred)."""


@frozen(kw_only=True)
class ResampleSpec:
    """Dynamic sampling (DAPO, Yu et al. 2025): roll out further episodes until as many groups pass the filters as a
    training step wants."""

    max_rounds: int = field(validator=number_between(1, 10_000))
    """Most further episodes of a training step, in multiples of env.num_envs."""


@frozen(kw_only=True)
class RolloutSpec:
    """Data collected in each training step."""

    chunk: int = field(validator=number_between(1, 10_000))
    """C, actions per inference, executed before the next one. May be left out where the checkpoint gives it: a known
    one, or a folder in lerobot's layout with `n_action_steps`."""
    episodes: int | None = field(default=None, validator=v.optional(number_between(1, EPISODES)))
    """Episodes per training step, over all envs, each a ticket; a multiple of group_size. Or give `auto_reset`."""
    auto_reset: AutoReset | None = field(default=None)
    """Tickets of a fixed number of steps instead of `episodes`, such as {steps: 64}: the env's next episode begins
    where one ends."""
    ignore_terminations: bool = False
    """Continue episodes to the step limit after the task ended."""
    group_size: int = field(default=1, validator=number_between(1, ENVS))
    """Trajectories that start from the same state (GRPO's groups)."""
    max_steps: int | None = field(default=None, validator=v.optional(number_between(1, STEPS)))
    """Step limit of an episode in environment steps; none: the task's own."""
    temperature: float = field(default=1.0, validator=positive_between(1e-3, 1e3))
    """Temperature of action sampling, in rollout and training alike."""
    compile: Literal["off", "blocks", "graphs"] | None = None
    """Compilation of the model where it acts: not at all (off), its repeated layers (blocks), or these and a CUDA graph
    of a whole decision for batches padded to 1, 2, 4, 8, ... rows (graphs; CUDA only). Null: blocks on CUDA, if the
    model names its layers, else off. In a worker that also learns, null takes what `train.compile` says."""
    engine: Component = field(factory=_default_engine, metadata={"kind": "engine"})
    """Code that runs the policy in rollouts, evaluations and `vla-rl serve`: the model itself (torch), a policy on a
    server (remote, which only acts), or another engine."""
    reward: Literal["raw", "relative"] = "raw"
    """The simulator's reward (raw), or its change since the previous step (relative), so that a success counts once."""
    reward_coef: float = field(default=1.0)
    """Factor on rewards; not 0, which would leave nothing to learn from."""
    resample: ResampleSpec | None = field(default=None)
    """Roll out further episodes in place of groups that the algorithm's filters drop (DAPO's dynamic sampling); null:
    train on what is left. Only with `episodes`."""
    lag: int = field(default=0, validator=number_between(0, LAG))
    """Act with the weights of this many versions ago, to test how an algorithm tolerates stale data; 0: the newest."""
    task_sampling: UniformTasks | WeightedTasks = field(factory=UniformTasks)
    """Task distribution of rollouts; evaluation is not affected."""

    @reward_coef.validator
    def _reward_coef(self, attribute: Any, value: float) -> None:
        if value == 0:
            raise ValueError("0 makes every reward 0, and there is nothing to learn; leave it out, or give a factor")
        if not 1e-30 <= abs(value) <= 1e38:
            raise ValueError(f"{value} is not within what float32 holds, 1e-30 to 1e38 of either sign")

    @episodes.validator
    def _check_episodes(self, attribute: Any, value: int | None) -> None:
        if (value is None) == (self.auto_reset is None):
            raise ValueError("give either episodes, such as 64, or auto_reset, such as {steps: 64}")

    @auto_reset.validator
    def _check_steps(self, attribute: Any, value: AutoReset | None) -> None:
        if value is not None and value.steps % self.chunk:
            raise make_problem(f"{value.steps} is not a multiple of chunk {self.chunk}", "steps")

    @resample.validator
    def _check_resample(self, attribute: Any, value: ResampleSpec | None) -> None:
        if value is not None and self.auto_reset is not None:
            raise ValueError("has no effect with auto_reset, which has no groups")

    @property
    def steps(self) -> int | None:
        """Environment steps of a ticket; None: an episode."""
        return None if self.auto_reset is None else self.auto_reset.steps


@frozen(kw_only=True)
class ReplaySpec:
    """Experience replay: train on trajectories more than once (AcceRL). The learners store them."""

    uses: int = field(validator=number_between(2, LAG))
    """Average number of times a group is trained on: once when collected, then from the replay buffer."""
    capacity: int | None = field(default=None, validator=v.optional(number_between(1, EPISODES)))
    """Newest groups that the buffer keeps, of which a step draws uses - 1 times as many as are new. None: it keeps the
    groups of the last uses - 1 steps, and a step replays all of them, so that each is used exactly `uses` times."""
    max_lag: int | None = field(default=None, validator=v.optional(number_between(1, UPDATES)))
    """Most training steps that a chunk may be old when replayed; none: unlimited. Older groups leave the buffer."""


@frozen(kw_only=True)
class PinnedLag:
    """Weights of a fixed age, so that a run is reproducible."""

    pinned: int = field(validator=number_between(1, LAG))
    """A whole ticket acts with the weights of this many training steps before its own. Policies keep as many further
    versions in host memory."""


@frozen(kw_only=True)
class AsynchronySpec:
    """How far rollouts run ahead of training, in one loop for all settings; max_lag 0 is synchronous."""

    lag: int | PinnedLag = field(default=0, alias="max_lag", validator=ValueRange(number_between(0, LAG)))
    """Guaranteed bound on policy lag: training steps that a chunk may be old when it is trained on. Rollouts continue
    meanwhile, with the newest weights at each chunk; or with weights of exactly this age, {pinned: 1}. Above 0 the
    learners need dedicated workers."""
    replay: ReplaySpec | None = None
    """Experience replay: train on collected trajectories more than once; none: once."""

    streaming_update: bool = False
    """Streaming update: learners begin with collected groups while the rest of the step is still being collected. The
    optimiser still steps once all are there, with the same gradient. For algorithms whose `advantage_scope` is GROUP;
    the learners need dedicated workers."""

    @property
    def max_lag(self) -> int:
        """Bound on policy lag in training steps."""
        return self.lag.pinned if isinstance(self.lag, PinnedLag) else self.lag

    @property
    def pinned_lag(self) -> int:
        """Training steps that the acting weights are old in every ticket; 0: the newest act."""
        return self.lag.pinned if isinstance(self.lag, PinnedLag) else 0


@frozen(kw_only=True)
class QualityThresholds:
    """Thresholds of a world model's quality that a run may set."""

    max_over_estimation: float = field(default=0.15, validator=number_between(0, 1))
    """Imagine only while the policy's imagined success exceeds its real success from the same states by no more than
    this, by the lower end of the 95 % interval."""


@frozen(kw_only=True)
class ImaginationSpec:
    """Training in imagination: after each rollout the policy collects trajectories in the world model. Experimental."""

    per_real: int = field(default=7, validator=number_between(1, 10_000))
    """Imagined trajectories for each real one of a training step."""
    start: Literal["any", "first"] = "any"
    """Start from a recorded episode after any of its chunks (any), or from its first frames only (first)."""
    horizon: int = field(default=4, validator=number_between(1, STEPS))
    """Chunks after which an imagined trajectory is truncated, if the episode's step limit does not come first."""
    outcome: Literal["sample", "most likely"] = "sample"
    """How the end of an episode is chosen from the model's probabilities."""
    fit_updates: int = field(default=15, validator=number_between(0, EPISODES))
    """Optimiser steps of the world model after each real rollout ..."""
    fit_updates_below_threshold: int = field(default=30, validator=number_between(0, EPISODES))
    """... and while a quality threshold is not met. Many steps on few episodes overfit them."""
    fit_batch: int = field(default=32, validator=number_between(1, EPISODES))
    """Recorded windows per optimiser step of the world model."""
    warm_start: int = field(default=4, validator=number_between(0, UPDATES))
    """First training steps without imagined trajectories; the world model is trained in them too."""
    buffer: int = field(default=4096, validator=number_between(2, EPISODES))
    """Newest real episodes that are kept, in files of the run folder."""
    held_out: float = field(default=0.2, validator=(v.gt(0.0), v.lt(1.0)))
    """Share of the kept episodes that measures the model and is never trained on."""
    evaluated_episodes: int = field(default=64, validator=number_between(16, ENVS))
    """Held-out episodes that are imagined again in each training step, half of them successes if enough succeeded. Also
    the number of episodes of the last rollout that measure success over-estimation."""
    quality_thresholds: QualityThresholds | None = field(factory=QualityThresholds)
    """Imagine only while the model meets its quality thresholds; null: always, for experiments."""


@frozen(kw_only=True)
class RuntimeSpec:
    """Execution of the workers."""

    backend: Literal["ray", "local"] = "ray"
    """Ray actors, or the same roles in this process."""
    address: str | None = None
    """Address of a running Ray cluster; none: a private one on this machine."""
    deadline_s: float = field(default=600.0, validator=positive_between(0.01, SECONDS))
    """Seconds after which a call is reported as hung."""
    require: Literal["cuda"] | None = None
    """cuda: refuse to run if a policy or a learner would be on CPUs; none: run on what is available."""
    check_weights: bool = False
    """Compare a checksum of every published weight with what each policy then holds; slow, for debugging."""
    restarts: int = field(default=3, validator=number_between(0, 10_000))
    """Number of times a run survives the death of workers: sim workers are restarted and the rollout is collected
    again; if a policy or learner dies, the run resumes from its last checkpoint, or starts over. Ray only."""
    max_faults: int = field(default=10, validator=number_between(0, UPDATES))
    """Env faults in a run before it is saved and ends. An env that broke (died, hung, raised, returned garbage) is
    replaced, and its episode is run again."""


@frozen(kw_only=True)
class RateSchedule:
    """A learning rate over the steps of a run."""

    steps: int = field(validator=number_between(0, UPDATES))
    """Training steps: in `run` a rollout with its updates each, in `sft` optimiser steps."""
    lr: float = field(validator=positive_between(1e-12, 10))
    """Learning rate."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay of rates from their value to `lr_end` of it at the last step."""
    lr_end: float = field(default=0.05, validator=number_between(0, 1))
    """Share of the rates that is left at the last step of a decay."""
    lr_warmup_steps: int = field(default=0, validator=number_between(0, UPDATES))
    """First steps, over which rates rise linearly."""

    def factor(self, step: int) -> float:
        """Return the factor on learning rates at `step` (from 1): linear warm-up, then constant or down to `lr_end`."""
        if step <= self.lr_warmup_steps:
            return step / (self.lr_warmup_steps + 1)
        share = (step - self.lr_warmup_steps) / max(self.steps - self.lr_warmup_steps, 1)
        left = {"constant": 1.0, "linear": 1 - share, "cosine": (1 + math.cos(math.pi * share)) / 2}
        return self.lr_end + (1 - self.lr_end) * left[self.lr_schedule]


def _check_betas(spec: TrainSpec, attribute: Any, value: tuple[float, float]) -> None:
    if not all(0 <= beta < 1 for beta in value):
        raise ValueError(f"adam_betas must be 0 or more and below 1, not {list(value)}")


@frozen(kw_only=True)
class TrainSpec(RateSchedule):
    """The optimiser (AdamW) and its schedule."""

    value_lr: float | None = field(default=None, validator=v.optional(positive_between(1e-12, 10)))
    """Learning rate of the value head; none: lr."""
    micro_batch: int = field(validator=number_between(1, STEPS))
    """Samples (chunks) of one forward and backward pass."""
    global_batch: int | None = field(default=None, validator=v.optional(number_between(1, UPDATES)))
    """Samples of one optimiser step, over all learners; none: the whole rollout."""
    mini_batches: int | None = field(default=None, validator=v.optional(number_between(1, UPDATES)))
    """Optimiser steps of an epoch, which share its samples evenly, in place of global_batch: shorter episodes make
    steps smaller, not fewer."""
    epochs: int = field(default=1, validator=number_between(1, 10_000))
    """Passes over a rollout."""
    max_grad_norm: float | None = field(default=1.0, validator=v.optional(positive_between(1e-9, 1e6)))  # type: ignore[arg-type]
    """Gradient clipping: gradients are scaled down to this norm; none: no clipping."""
    weight_decay: float = field(default=0.0, validator=number_between(0, 100))
    """Weight decay of AdamW."""
    adam_betas: tuple[float, float] = field(default=(0.9, 0.999), validator=_check_betas)
    """Decay of AdamW's means of gradients and of squared gradients."""
    adam_eps: float = field(default=1e-8, validator=positive_between(1e-15, 1))
    """Number that AdamW adds to the root of the mean squared gradient."""
    max_skipped: int = field(default=10, validator=number_between(1, UPDATES))
    """Training steps in succession that may be skipped because the algorithm's filters left nothing to train on. Then
    the run stops and reports how many successes the groups had."""
    critic_warmup_steps: int = field(default=0, validator=number_between(0, UPDATES))
    """First training steps that update the critic alone."""
    checkpoint_every: int = field(default=10, validator=number_between(0, UPDATES))
    """Training steps between checkpoints; the last step always has one, and with 0 only that one."""
    sharding: Literal["replicated", "full"] = "replicated"
    """Each learner holds the whole model and optimiser (replicated), or its shard of weights, gradients and optimiser
    state, gathered one block at a time (full: FSDP2; the same with one learner). A policy in a learner's worker acts
    with gathered weights, which then stay whole on its device between updates."""
    precision: Literal["float32", "bf16"] = "float32"
    """Precision of the network's computation, acting and learning alike (bf16: mixed precision by autocast). What is
    trained, its gradients and its optimiser are float32 either way."""
    compile: Literal["off", "blocks"] | None = None
    """Compilation of the model where it learns: not at all (off), or its repeated layers (blocks), once for each kind
    of them, and the operations between them. Null: blocks on CUDA, if the model names its layers and `sharding` is
    replicated, else off. In a worker that also acts there is one model: null takes what `rollout.compile` says, and
    different settings are refused."""
    keep_checkpoints: int = field(default=2, validator=number_between(1, EPISODES))
    """Newest checkpoints that are kept; older ones are removed."""

    @global_batch.validator
    def _global_batch(self, attribute: Any, value: int | None) -> None:
        if value is not None and value < self.micro_batch:
            raise ValueError(f"{value} is less than micro_batch {self.micro_batch}")

    @mini_batches.validator
    def _mini_batches(self, attribute: Any, value: int | None) -> None:
        if value is not None and self.global_batch is not None:
            raise ValueError(f"{value} is given besides global_batch; give one of them")

    def optimizer_steps(self, samples: int) -> int:
        """Return how many optimiser steps an epoch over these samples, 1 or more, has."""
        steps = self.mini_batches or -(-samples // (self.global_batch or samples))
        return min(steps, samples)


@frozen(kw_only=True)
class AblationSpec:
    """What evaluations take from the policy, to see what its success depends on."""

    instructions: Mapping[str, str] = field(factory=dict)
    """Instruction -> the one that the policy reads instead; "*": any other."""
    black: tuple[str, ...] = ()
    """Cameras whose frames are black."""
    zero_state: bool = False
    """The state is zeros."""
    open_loop: bool = False
    """The first chunk of an episode is executed again and again."""


@frozen(kw_only=True)
class EvalSpec:
    """Success on the evaluation states, which training never sees."""

    every: int = field(default=0, validator=number_between(0, UPDATES))
    """Training steps between evaluations; 0: only before and after training."""
    episodes_per_task: int | None = field(default=None, validator=v.optional(number_between(1, EPISODES)))
    """Evaluation states of each task; none: all."""
    repeats: int = field(default=1, validator=number_between(1, 10_000))
    """Runs over every state, each with its own seeds."""
    greedy: bool = True
    """Act without sampling (for most models: the most likely actions), or sample as in training."""
    before: bool = True
    """Evaluate at step 0 too."""
    split: Literal["eval", "train"] = "eval"
    """Reset states that are evaluated: those that training never sees (eval), or those of training, to compare."""
    ablate: AblationSpec | None = None
    """What is taken from the policy in evaluations, as `vla-rl eval --refute` does; null: nothing."""


@frozen(kw_only=True)
class ExpertSpec:
    """Demonstrations by the simulator's scripted expert; only successful ones are kept."""

    episodes: int = field(validator=number_between(1, EPISODES))
    """Demonstrations, from training states."""
    noise: float = field(default=0.0, validator=number_between(0, 1e6))
    """Standard deviation of the Gaussian noise on the expert's executed actions, in the simulator's units. Labels stay
    clean, so that the cloned policy learns to recover (as in DART)."""


@frozen(kw_only=True)
class BCWarmupSpec(ExpertSpec):
    """Behaviour cloning of the simulator's scripted expert before RL."""

    epochs: int = field(validator=number_between(1, 10_000))
    """Passes over the demonstrations."""
    lr: float = field(validator=positive_between(1e-12, 10))
    """Learning rate."""
    batch: int = field(default=64, validator=number_between(1, EPISODES))
    """Samples (chunks) of an optimiser step."""


WEIGHT_PARTS = 10_000
"""Parts of which a data set's weight is a whole number."""


@frozen(kw_only=True)
class CoTrainingSpec(Component):
    """A further data set of `vla-rl sft`, with its share of the samples."""

    weight: float = field(validator=[v.gt(0), v.lt(1)])
    """Share of the samples of training that are of this data set, above 0 and below 1; a multiple of 0.0001. `data` has
    the rest."""

    @weight.validator
    def _check_weight(self, attribute: Any, value: float) -> None:
        if abs(value * WEIGHT_PARTS - round(value * WEIGHT_PARTS)) > 1e-6:
            raise ValueError(f"{value} is not a multiple of 0.0001")


@frozen(kw_only=True)
class ImitationSpec(RateSchedule):
    """Behaviour cloning with `vla-rl sft`, and recorded demonstrations for trainers of transitions. The optimiser's
    other settings are those of `train`."""

    steps: int | None = field(default=None, validator=v.optional(number_between(0, UPDATES)))  # type: ignore[assignment]
    """Optimiser steps of `vla-rl sft`, which needs them; with `data` for a trainer of transitions, leave it out."""
    lr: float | None = field(default=None, validator=v.optional(positive_between(1e-12, 10)))  # type: ignore[assignment]
    """Learning rate of `vla-rl sft`, which needs it."""
    expert: ExpertSpec | None = field(default=None)
    """Demonstrations by the simulator's scripted expert."""
    data: Component | None = field(default=None, metadata={"kind": "data"})
    """Recorded demonstrations instead, such as {type: lerobot, folder: ...}."""
    co_training: tuple[CoTrainingSpec, ...] = field(default=(), metadata={"kind": "data"})
    """Data sets in addition to `data`, such as [{type: lerobot, folder: ..., weight: 0.3}]. `weight` is the data set's
    share of the samples of training, above 0 and below 1, a multiple of 0.0001; `data` has the rest."""
    augment: AugmentSpec | None = None
    """Random changes to the images; null: none."""
    trainer: Component = field(factory=default_imitation_trainer, metadata={"kind": "trainer"})
    """How learners train on the demonstrations: a trainer of demonstrations."""
    batch: int = field(default=64, validator=number_between(1, EPISODES))
    """Samples (chunks) of an optimiser step, over all learners."""
    statistics: Literal["model", "data"] = field(default="model")
    """Statistics that normalise actions and state: the model's (from its checkpoint or preset), or those of `data`,
    which are saved with the model and scale the samples of `co_training` too."""
    eval_every: int = field(default=0, validator=number_between(0, UPDATES))
    """Optimiser steps between evaluations; 0: only before (`eval.before`) and after training."""
    checkpoint_every: int = field(default=0, validator=number_between(0, UPDATES))
    """Optimiser steps between checkpoints; the last step always has one, and with 0 only that one."""
    report_every: int = field(default=50, validator=number_between(1, UPDATES))
    """Optimiser steps per line of metrics."""

    def data_sets(self) -> list[tuple[tuple[str | int, ...], Component]]:
        """Return the path in the spec and the component of each data set, `data` first; empty with `expert`."""
        if self.data is None:
            return []
        further = [(("imitation", "co_training", i), part) for i, part in enumerate(self.co_training)]
        return [(("imitation", "data"), self.data), *further]

    @data.validator
    def _one_source(self, attribute: Any, value: Component | None) -> None:
        if (value is None) == (self.expert is None):
            raise ValueError("give exactly one of `expert` (the simulator's own) and `data` (recorded demonstrations)")

    @expert.validator
    def _check_expert(self, attribute: Any, value: ExpertSpec | None) -> None:
        missing = [key for key in ("steps", "lr") if getattr(self, key) is None]
        if value is not None and missing:
            raise ValueError(f"is cloned by vla-rl sft, which also needs {' and '.join(missing)}")

    @co_training.validator
    def _co_training(self, attribute: Any, value: tuple[CoTrainingSpec, ...]) -> None:
        if value and self.data is None:
            raise ValueError("mixes recorded demonstrations: needs `data`, of which the other samples are")
        total = sum(item.weight for item in value)
        if total > 1 - 1 / WEIGHT_PARTS:
            raise ValueError(f"the weights sum to {total:g}, which leaves nothing to `data`; their sum must be below 1")

    @statistics.validator
    def _check_statistics(self, attribute: Any, value: str) -> None:
        if value == "data" and self.data is None:
            raise ValueError("data: needs `data`; an expert's actions are those of the simulator")
