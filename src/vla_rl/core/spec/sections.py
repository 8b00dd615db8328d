"""The sections of a spec: their keys, units, ranges and defaults. `core/spec/spec.py` puts them together."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

from attrs import field, frozen
from attrs import validators as v

ENVS, EPISODES, STEPS, UPDATES, LAG = 100_000, 1_000_000, 10_000_000, 1_000_000_000, 1_000
"""The most that a spec may ask for of simulator rows, of episodes at once, of environment steps, of steps of training,
and of versions between acting and learning: beyond what any run has, so that a slip of the finger is refused."""
SECONDS = 30.0 * 24 * 3600
"""The longest wait."""


def between(low: float, high: float) -> Any:
    """Validator of a number within these bounds, both included."""
    return v.and_(v.ge(low), v.le(high))


def positive(low: float, high: float) -> Any:
    """Validator of a number above 0, and within these bounds."""
    return v.and_(v.gt(0), between(low, high))


@frozen(kw_only=True)
class Component:
    """A plugin and its settings: `{type: grpo, clip_high: 0.28}`."""

    type: str
    """Name of an installed plugin of the kind, or of one from `plugins:`."""
    config: Any
    """Instance of the plugin's attrs class, made of the other keys."""


@frozen(kw_only=True)
class EnvSpec(Component):
    """The simulator."""

    num_envs: int = field(validator=between(1, ENVS))
    """Simulator rows that step together, over all workers."""
    python: Path | None = None
    """Another Python interpreter for the simulators (`.../bin/python` of a virtual environment that holds vla-rl and
    the simulator), where their packages do not go with those of the model; none: this one. Ray only."""


@frozen(kw_only=True)
class TaskSampling:
    """How often a task comes up in rollouts."""

    type: Literal["uniform", "weighted"] = "uniform"
    """As often as it has train states (uniform), or the more often the more it fails (weighted, AcceRL eq. 11):
    with probability w / sum of all w, where w = failures among the task's last `window` episodes + `smoothing`."""
    window: int = field(default=100, validator=between(1, EPISODES))
    """Episodes of a task that are remembered, over all workers."""
    smoothing: float = field(default=1.0, validator=positive(1e-9, 1e9))
    """Weight of a task that never fails."""

    @window.validator
    @smoothing.validator
    def _used(self, attribute: Any, value: float) -> None:
        if self.type == "uniform" and value != attribute.default:
            raise ValueError("has no effect with type: uniform; use type: weighted")


@frozen(kw_only=True)
class ResampleSpec:
    """Dynamic sampling (DAPO, Yu et al. 2025): until as many groups survive the filters as a training step has."""

    max_rounds: int = field(validator=between(1, 10_000))
    """So many times env.num_envs further episodes a training step, at most."""


@frozen(kw_only=True)
class RolloutSpec:
    """What is collected in each training step."""

    chunk: int = field(validator=between(1, 10_000))
    """C: actions of one inference, executed before the next."""
    episodes: int | None = field(default=None, validator=v.optional(between(1, EPISODES)))
    """Episodes a training step, over all rows; with `auto_reset: off` only, and a multiple of group_size."""
    steps: int | None = field(default=None, validator=v.optional(between(1, STEPS)))
    """Environment steps (single actions) of each of env.num_envs tickets a training step; with `auto_reset: immediate`
    or `deferred` only, and a multiple of chunk."""
    auto_reset: Literal["off", "immediate", "deferred"] = "off"
    """What follows the end of an episode: the row plays another ticket (off), or its ticket goes on with a new episode,
    at once (immediate) or at the next chunk (deferred)."""
    ignore_terminations: bool = False
    """Let episodes run on to the step limit after the task ended."""
    group_size: int = field(default=1, validator=between(1, ENVS))
    """Trajectories that start from the same state (GRPO's groups)."""
    max_steps: int | None = field(default=None, validator=v.optional(between(1, STEPS)))
    """Step limit of an episode in environment steps; none: the task's own."""
    temperature: float = field(default=1.0, validator=positive(1e-3, 1e3))
    """Of action sampling, in rollout and training alike."""
    reward: Literal["raw", "relative"] = "raw"
    """The simulator's reward, or its change since the previous step (so that a success counts once)."""
    reward_coef: float = field(default=1.0)
    """Factor on rewards; not 0, which would leave nothing to learn from."""
    resample: ResampleSpec | None = field(default=None)
    """Play further episodes in place of groups that the algorithm's filters drop (DAPO's dynamic sampling); null: train
    on what is left. With `auto_reset: off` only."""
    lag: int = field(default=0, validator=between(0, LAG))
    """Act with the weights of this many versions ago, to see how an algorithm stands old data; 0: the newest."""
    task_sampling: TaskSampling = field(factory=TaskSampling)
    """Which tasks episodes are of; evaluation is not touched."""

    @reward_coef.validator
    def _reward_coef(self, attribute: Any, value: float) -> None:
        if value == 0:
            raise ValueError("0 makes every reward 0, and there is nothing to learn; leave it out, or give a factor")
        if not 1e-30 <= abs(value) <= 1e38:
            raise ValueError(f"{value} is not within what float32 holds, 1e-30 to 1e38 of either sign")

    @episodes.validator
    def _episodes(self, attribute: Any, value: int | None) -> None:
        if self.auto_reset == "off" and value is None:
            raise ValueError("required with auto_reset: off")
        if self.auto_reset != "off" and value is not None:
            raise ValueError(f"has no effect with auto_reset: {self.auto_reset}; give steps")

    @steps.validator
    def _steps(self, attribute: Any, value: int | None) -> None:
        if self.auto_reset != "off" and value is None:
            raise ValueError(f"required with auto_reset: {self.auto_reset}")
        if self.auto_reset == "off" and value is not None:
            raise ValueError("has no effect with auto_reset: off; give episodes")
        if value is not None and value % self.chunk:
            raise ValueError(f"{value} is not a multiple of chunk {self.chunk}")

    @resample.validator
    def _resample(self, attribute: Any, value: ResampleSpec | None) -> None:
        if value is not None and self.auto_reset != "off":
            raise ValueError(f"has no effect with auto_reset: {self.auto_reset}, where there are no groups")


@frozen(kw_only=True)
class ReplaySpec:
    """Training on trajectories more than once (AcceRL). They lie with the learners."""

    uses: int = field(default=1, validator=between(1, LAG))
    """How often a group is trained on, in the mean: once when it is played, then out of a buffer."""
    capacity: int | None = field(default=None, validator=v.optional(between(1, EPISODES)))
    """Groups that the buffer keeps, the newest; none: as many as `oldest` needs, uses - 1 times those of a step."""
    sampling: Literal["oldest", "uniform"] = field(default="oldest")
    """Which earlier groups a step trains on: those of the last uses - 1 steps, so that each is used exactly `uses`
    times (oldest); or uses - 1 times as many as are new, drawn from all that are kept (uniform)."""
    max_age: int | None = field(default=None, validator=v.optional(between(1, UPDATES)))
    """Training steps that a chunk may be old when it is trained on again; none: any number. Older groups leave."""

    @capacity.validator
    @sampling.validator
    @max_age.validator
    def _used(self, attribute: Any, value: Any) -> None:
        if self.uses == 1 and value != attribute.default:
            raise ValueError("has no effect with uses: 1, where nothing is trained on again")


@frozen(kw_only=True)
class AsynchronySpec:
    """How far rollouts run ahead of training. One loop: 0 is synchronous."""

    max_lag: int = field(default=0, validator=between(0, LAG))
    """Training steps that a chunk may be old when it is trained on, a promise; rollouts go on meanwhile. Above 0
    learners need workers of their own."""
    swap: Literal["request", "pinned"] = field(default="request")
    """Which weights act: at each chunk the newest (request), or in a whole ticket those of max_lag steps before its own
    (pinned: the run is reproducible, and policies keep max_lag versions more in host memory)."""
    replay: ReplaySpec = field(factory=ReplaySpec)
    """How often what was played is trained on."""

    stream: bool = False
    """Learners begin with groups that are played while the rest of the step is; the optimiser still steps once all are
    there, with the same gradient. For algorithms whose `scope` is "group"; learners need workers of their own."""

    @swap.validator
    def _swap(self, attribute: Any, value: str) -> None:
        if value == "pinned" and not self.max_lag:
            raise ValueError("has no effect with max_lag: 0, where the newest weights act in every ticket")


@frozen(kw_only=True)
class ImaginationSpec:
    """Practice in the world model after each real rollout, with the same policy. Experimental."""

    per_real: int = field(default=7, validator=between(1, 10_000))
    """Imagined trajectories for each real one of a training step."""
    start: Literal["any", "first"] = "any"
    """From where a recorded episode stood after any chunk, or from its first frames only."""
    recent: int = field(default=512, validator=between(1, EPISODES))
    """Newest real episodes that it starts from."""
    horizon: int = field(default=4, validator=between(1, STEPS))
    """Chunks after which an imagined trajectory is truncated, if the episode's step limit does not come first."""
    outcome: Literal["sample", "most likely"] = "sample"
    """How an end is taken from the model's probabilities."""
    fit_updates: int = field(default=15, validator=between(0, EPISODES))
    """Optimiser steps of the world model after each real rollout ..."""
    fit_shut: int = field(default=30, validator=between(0, EPISODES))
    """... and so many while a measure says that it is not good enough. Many on few episodes learn those by heart."""
    fit_batch: int = field(default=32, validator=between(1, EPISODES))
    """Recorded windows of each."""
    warm_start: int = field(default=4, validator=between(0, UPDATES))
    """First training steps without imagined trajectories; the model is fitted in them too."""
    buffer: int = field(default=4096, validator=between(2, EPISODES))
    """Newest real episodes that are kept, in files of the run folder."""
    held_out: float = field(default=0.2, validator=(v.gt(0.0), v.lt(1.0)))
    """Share of them that the model is measured by and never fitted to."""
    measured: int = field(default=64, validator=between(16, ENVS))
    """Episodes of them that are imagined again in each training step, half of them successes where there are as many;
    and episodes of the last rollout by which success inflation is measured."""
    gates: bool = True
    """Imagine only while the measures say that the model is good enough; false: whatever they say, for experiments."""
    max_inflation: float = field(default=0.15, validator=between(0, 1))
    """Imagine only while the policy's imagined success is not higher than its real one from the same states by more
    than this, by the lower end of the 95 % interval."""

    @max_inflation.validator
    def _used(self, attribute: Any, value: float) -> None:
        if not self.gates and value != attribute.default:
            raise ValueError("has no effect with gates: false")


@frozen(kw_only=True)
class RuntimeSpec:
    """Where the roles run."""

    backend: Literal["ray", "local"] = "ray"
    """Ray actors, or the same roles in this process."""
    address: str | None = None
    """Of a running Ray cluster; none: a private one on this machine."""
    deadline_s: float = field(default=600.0, validator=positive(0.01, SECONDS))
    """Seconds after which a call is reported as hung."""
    require: Literal["cuda"] | None = None
    """cuda: refuse to run where a policy or a learner would be on CPUs; none: run on what there is."""
    check_weights: bool = False
    """Compare a checksum of every published weight with what each policy then holds; costs time, for debugging."""
    restarts: int = field(default=3, validator=between(0, 10_000))
    """How often a run survives workers that die: sim workers are started again and the rollout is played again; where a
    policy or learner dies, the run goes on from its last checkpoint. Ray only."""
    max_faults: int = field(default=10, validator=between(0, UPDATES))
    """Simulator rows that may break in a run before it stops. A row that broke (died, hung, raised, returned garbage)
    is replaced and plays its episode again."""


@frozen(kw_only=True)
class RateSchedule:
    """A learning rate over the steps of a run."""

    steps: int = field(validator=between(0, UPDATES))
    """Training steps: a rollout and its updates each in `run`, optimiser steps in `sft`."""
    lr: float = field(validator=positive(1e-12, 10))
    """Learning rate."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How rates fall from their value to a twentieth of it at the last step."""
    lr_warmup_steps: int = field(default=0, validator=between(0, UPDATES))
    """First steps over which rates rise linearly."""

    def factor(self, step: int) -> float:
        """On the learning rates at `step` (from 1): linear warm-up, then constant or a decay to a twentieth."""
        if step <= self.lr_warmup_steps:
            return step / (self.lr_warmup_steps + 1)
        share = (step - self.lr_warmup_steps) / max(self.steps - self.lr_warmup_steps, 1)
        left = {"constant": 1.0, "linear": 1 - share, "cosine": (1 + math.cos(math.pi * share)) / 2}
        return 0.05 + 0.95 * left[self.lr_schedule]


@frozen(kw_only=True)
class TrainSpec(RateSchedule):
    """The optimiser (AdamW) and its schedule."""

    value_lr: float | None = field(default=None, validator=v.optional(positive(1e-12, 10)))
    """Learning rate of the value head; none: lr."""
    micro_batch: int = field(validator=between(1, STEPS))
    """Samples (chunks) of one forward and backward pass."""
    global_batch: int | None = field(default=None, validator=v.optional(between(1, UPDATES)))
    """Samples of one optimiser step, over all learners; none: the whole rollout."""
    epochs: int = field(default=1, validator=between(1, 10_000))
    """Passes over a rollout."""
    max_grad_norm: float | None = field(default=1.0, validator=v.optional(positive(1e-9, 1e6)))  # type: ignore[arg-type]
    """Gradients are scaled down to this norm; none: never."""
    weight_decay: float = field(default=0.0, validator=between(0, 100))
    """Of AdamW."""
    max_skipped: int = field(default=10, validator=between(1, UPDATES))
    """Training steps in a row that may be skipped because the algorithm's filters left nothing to train on; then the
    run stops and says how many successes the groups had."""
    critic_warmup_steps: int = field(default=0, validator=between(0, UPDATES))
    """First training steps that update the critic alone."""
    checkpoint_every: int = field(default=10, validator=between(0, UPDATES))
    """Training steps between checkpoints; the last step always has one, with 0 it alone."""
    sharding: Literal["replicated", "full"] = "replicated"
    """Every learner holds the whole model and optimiser (replicated), or its share of weights, gradients and optimiser
    state, gathered a block at a time (full; FSDP2; the same with one learner). A policy in the same worker as a learner
    acts with gathered weights, which then lie whole on its device between updates."""
    precision: Literal["float32", "bf16"] = "float32"
    """In which the network is computed, acting and learning alike; weights, gradients and optimiser keep their own
    (bf16: mixed precision by autocast)."""
    keep_checkpoints: int = field(default=2, validator=between(1, EPISODES))
    """Newest checkpoints kept; older ones are removed."""

    @global_batch.validator
    def _global_batch(self, attribute: Any, value: int | None) -> None:
        if value is not None and value < self.micro_batch:
            raise ValueError(f"{value} is less than micro_batch {self.micro_batch}")


@frozen(kw_only=True)
class EvalSpec:
    """Success on the evaluation states, which training never sees."""

    every: int = field(default=0, validator=between(0, UPDATES))
    """Training steps between evaluations; 0: only before and after training."""
    episodes_per_task: int | None = field(default=None, validator=v.optional(between(1, EPISODES)))
    """Evaluation states of each task; none: all."""
    repeats: int = field(default=1, validator=between(1, 10_000))
    """Runs over every state, each with its own seeds."""
    greedy: bool = True
    """Act without drawing (for most models: the most likely actions), or sample as in training."""
    before: bool = True
    """Evaluate at step 0 too."""


@frozen(kw_only=True)
class ExpertSpec:
    """Demonstrations of the simulator's scripted expert, of which the successful ones are kept."""

    episodes: int = field(validator=between(1, EPISODES))
    """Demonstrations, from training states."""
    noise: float = field(default=0.0, validator=between(0, 1e6))
    """Standard deviation of the Gaussian added to the expert's executed actions, in the simulator's units; labels stay
    clean, so that the clone learns to recover."""


@frozen(kw_only=True)
class WarmupSpec(ExpertSpec):
    """Cloning of the simulator's scripted expert before training."""

    epochs: int = field(validator=between(1, 10_000))
    """Passes over the demonstrations."""
    lr: float = field(validator=positive(1e-12, 10))
    """Learning rate."""
    batch: int = field(default=64, validator=between(1, EPISODES))
    """Samples (chunks) of an optimiser step."""


@frozen(kw_only=True)
class ImitationSpec(RateSchedule):
    """`vla-rl sft`: cloning of demonstrations. The optimiser's other settings are those of `train`."""

    expert: ExpertSpec | None = None
    """Demonstrations of the simulator's scripted expert."""
    data: Component | None = field(default=None, metadata={"kind": "data"})
    """Or recorded ones, such as {type: lerobot, folder: ...}."""
    batch: int = field(default=64, validator=between(1, EPISODES))
    """Samples (chunks) of an optimiser step, over all learners."""
    statistics: Literal["model", "data"] = field(default="model")
    """By which statistics actions and state are scaled: the model's (of its checkpoint or preset), or those of `data`,
    which are saved with the model."""
    eval_every: int = field(default=0, validator=between(0, UPDATES))
    """Optimiser steps between evaluations; 0: only before (`eval.before`) and after training."""
    checkpoint_every: int = field(default=0, validator=between(0, UPDATES))
    """Optimiser steps between checkpoints; the last step always has one, with 0 it alone."""
    report_every: int = field(default=50, validator=between(1, UPDATES))
    """Optimiser steps that one line of metrics stands for."""

    @data.validator
    def _one_source(self, attribute: Any, value: Component | None) -> None:
        if (value is None) == (self.expert is None):
            raise ValueError("give exactly one of `expert` (the simulator's own) and `data` (recorded demonstrations)")

    @statistics.validator
    def _statistics(self, attribute: Any, value: str) -> None:
        if value == "data" and self.data is None:
            raise ValueError("data: needs `data`; an expert's actions are those of the simulator")
