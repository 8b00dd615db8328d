"""The contracts of vla-rl: one abstract class per kind of plugin.

Each method is also a pluggy hook specification. An author only subclasses the contract, and `@hookimpl(wraps=KIND)`
functions of the same name wrap every component of that kind. Specifications and implementations take no default
arguments (pluggy drops them). An implementation may leave out arguments that it does not use. Methods here are duties,
or optional with a default that is right for those who leave them out. What only some components of a kind can do is a
class in `capabilities.py`, which they inherit in addition.

Shapes: N envs (simulator instances), B samples, C actions in a chunk, A action dimensions, M log-probs per action.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pluggy

from vla_rl.core.errors import UserError
from vla_rl.core.types import AdvantageScope, DataProperties, Requirements, pick_rows

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from vla_rl.core.events import Evaluation, Run
    from vla_rl.core.plan import Cluster, Job, Plan
    from vla_rl.core.randomness import Noise
    from vla_rl.core.types import (
        Advantages,
        Array,
        ArrayOrTensor,
        Batch,
        Chunk,
        ChunkResult,
        EnvInfo,
        Loss,
        Observation,
        RecordedRewards,
        ResetState,
        Rollout,
        Scores,
    )

hookspec = pluggy.HookspecMarker("vla_rl")


class VLAModel(ABC):
    """A policy over action chunks that is trained; owns an `nn.Module`. It inherits the capabilities that it has in
    addition: `HasCritic`, `HasReference`, `ActionTokens`, `HasFeatures`, `Reparameterised`, `Steerable`,
    `ContinuesChunks`, `Compilable`, `Capturable`. Entry-point group `vla_rl.models`."""

    module: torch.nn.Module
    """All parameters; those with `requires_grad` are trained."""
    tokens_per_action: int
    """M, log-probs per action: its action tokens, or 1."""
    cameras_read: tuple[str, ...] | None = None
    """Cameras that the model reads; None: all cameras of the simulator."""
    statistics_name: str | None = None
    """Name of the checkpoint's normalisation statistics that the spec chose; None: it chose none. Servers report it."""
    extras: Mapping[str, str] = MappingProxyType({})
    """Names in `Chunk.extras` whose numbers algorithms may read: name -> dimensions after the samples, such as
    {"uncertainty": "C"}. `Rollout.extras` and `Batch.extras` hold them, float32."""
    instruction_suffix: str = ""
    """Text that follows every instruction, such as the condition of an advantage-conditioned policy. Core sets it,
    appends it to the observations that the methods get, and keeps it in checkpoints."""

    @abstractmethod
    @hookspec(firstresult=True)
    def sample_chunk(self, obs: Observation, noise: Noise, greedy: bool) -> Chunk:
        """Choose an action chunk for each observation, without gradient. `noise` provides keyed uniform and normal
        numbers per sample (tokens are drawn by inverse CDF). `greedy` takes the mode, or the model's equivalent.
        `log_probs` are those of the distribution that was sampled."""

    @abstractmethod
    @hookspec(firstresult=True)
    def chunk_log_probs(self, obs: Observation, chunk: Chunk) -> Scores:
        """Score recorded chunks, with gradient: log_probs and entropy [B, C, M], values [B], [B, C] or None. With the
        weights that sampled the chunks, log_probs equal the recorded ones."""

    @abstractmethod
    @hookspec(firstresult=True)
    def imitation_loss(self, obs: Observation, actions: ArrayOrTensor) -> torch.Tensor:
        """Return the cloning loss of actions float [B, C, A], with gradient: a scalar, the mean over the batch."""

    @hookspec(firstresult=True)
    def imitation_losses(self, obs: Observation, actions: ArrayOrTensor) -> torch.Tensor:
        """Return the behaviour-cloning loss of each sample, [B] with gradient, for trainers that weigh samples. Their
        mean is an `imitation_loss`. Default: `imitation_loss` of one sample after the other."""
        import numpy as np
        import torch

        rows = [np.array([i]) for i in range(len(obs))]
        return torch.stack([self.imitation_loss(obs.take(row), pick_rows(actions, row)) for row in rows])

    @hookspec(firstresult=True)
    def imitation_terms(self, obs: Observation, actions: ArrayOrTensor) -> torch.Tensor:
        """Return the behaviour-cloning loss of each action, [B, C] with gradient, whose mean is an `imitation_loss`.
        Optional, for data that leave actions out of the loss (`ends: mask`). Raise UserError for a model without."""
        raise UserError(
            f"{type(self).__name__} has no loss for each action (imitation_terms), which the data's `ends: mask` "
            "needs; set `ends: repeat` to learn the repeated actions too, or `ends: drop`"
        )

    @hookspec(firstresult=True)
    def weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Return the trainable (name, tensor) pairs in publishing order."""
        return [(name, p.detach()) for name, p in self.module.named_parameters() if p.requires_grad]

    @hookspec(firstresult=True)
    def load_weights(self, pairs: Iterable[tuple[str, ArrayOrTensor]]) -> None:
        """Copy published pairs into the module. Raise KeyError for an unknown name."""
        import torch

        own = dict(self.module.named_parameters())
        with torch.no_grad():
            for name, tensor in pairs:
                own[name].copy_(torch.as_tensor(tensor))

    @abstractmethod
    @hookspec(firstresult=True)
    def save(self, folder: Path) -> None:
        """Write the model in its own public format, statistics included, so that `checkpoint:` can load it."""


class PolicyEngine(ABC):
    """The code that runs a policy in policy workers, `vla-rl eval` and `vla-rl serve` (elsewhere: inference engine,
    rollout engine). `torch` runs the model itself. An engine is built from its settings and an `EngineContext`:
    its `make_model` returns the run's model in this process, and an engine that never calls it needs none. Its
    plugin declares `EnginePlugin(own_policy=True)` where it acts with another policy than the spec's model; nothing can
    train that one. Core calls an engine from one thread at a time. An engine that can, inherits `ContinuesChunks` in
    addition. Entry-point group `vla_rl.engines`."""

    model: VLAModel | None = None
    """Model in this process whose parameters act; None: none. The runtime moves and verifies them."""
    statistics_name: str | None = None
    """`VLAModel.statistics_name` of the policy that acts."""

    @abstractmethod
    @hookspec(firstresult=True)
    def act(self, obs: Observation, noise: Noise, greedy: bool) -> Chunk:
        """Choose an action chunk for each observation, as `VLAModel.sample_chunk`. Only an engine with its own policy
        may leave out `log_probs`; `extras` are those that the model's `chunk_log_probs` takes."""

    @hookspec(firstresult=True)
    def values(self, obs: Observation) -> torch.Tensor:
        """Return the critic's values, [B] or [B, C], as `HasCritic.values`. Optional; called with a critic, for the
        observations after truncated episodes."""
        raise UserError(f"{type(self).__name__} gives no values; write its method `values`")

    @hookspec(firstresult=True)
    def load(self, pairs: Iterable[tuple[str, ArrayOrTensor]]) -> None:
        """Act with these weights from the next call on. Names are those of the model's `weights`; an engine whose own
        parameters have other names maps them itself. Called for every published version, between two requests. Pairs
        can be gone through once, and tensors are valid until the call returns. Every engine that does not act with its
        own policy has it."""
        raise UserError(f"{type(self).__name__} takes no weights; write its method `load`")

    @hookspec(firstresult=True)  # noqa: B027 - optional
    def wake_up(self) -> None:
        """Prepare to act, before a rollout or an evaluation of a policy worker (elsewhere: vLLM's wake_up). Optional. A
        learner in the same process has changed the model's weights since."""

    @hookspec(firstresult=True)  # noqa: B027 - optional
    def sleep(self) -> None:
        """Give back what learning needs, after a rollout or an evaluation of a policy worker, also of one that failed.
        Optional. A learner in the same process uses the model from now on."""

    @hookspec(firstresult=True)  # noqa: B027 - optional
    def warm_up(self, batch_sizes: Sequence[int]) -> None:
        """Do one-time work for batches of these sizes (compile, capture graphs) before the first request. Optional."""

    @hookspec(firstresult=True)  # noqa: B027 - optional
    def close(self) -> None:
        """Free processes and connections. May be called twice, or never in a killed worker: children must end too."""


class SimEnv(ABC):
    """A batch of N envs (simulator instances). Core adds resets, step limits, masks and statistics. A simulator that
    can give its device memory away inherits `Offloadable` in addition. Entry-point group `vla_rl.envs`."""

    num_envs: int
    info: EnvInfo
    waits_s: float = 0.0
    """Longest time that a call waits for a person, in seconds; `runtime.deadline_s` has to exceed it."""
    stop_requested: Callable[[], bool] = staticmethod(lambda: False)
    """Whether the run has to stop (Ctrl-C). Core sets it where `waits_s` is above 0; a call that waits asks it, and
    raises StopRequested."""

    @abstractmethod
    @hookspec(firstresult=True)
    def reset_states(self, split: str) -> tuple[ResetState, ...]:
        """Return the fixed initial states of split "train" or "eval", in a stable order. The splits share neither ids
        nor scenes. Raise UserError for "eval" if the simulator cannot be evaluated."""

    @abstractmethod
    @hookspec(firstresult=True)
    def reset(self, env_ids: ArrayOrTensor, state_ids: ArrayOrTensor, seed: ArrayOrTensor) -> Observation:
        """Reset the envs numbered `env_ids` (int64 [R]) to the states `state_ids` (int64 [R]). `seed` (int64 [R]) keys
        everything else that is random in the episode. Return the Observation of those R envs, in that order; the other
        envs are untouched."""

    @abstractmethod
    @hookspec(firstresult=True)
    def chunk_step(self, actions: ArrayOrTensor, active: ArrayOrTensor, stop_at_end: bool) -> ChunkResult:
        """Apply up to C actions, float [N, C, A], to the envs where `active` (bool [N]) holds. With `stop_at_end` an
        env stops executing after its first terminated or truncated action, else it executes all. Cameras render once,
        at the end. With `EnvInfo.takeovers` another source may choose any of the executed actions instead."""

    @hookspec(firstresult=True)
    def expert_chunk(self) -> ArrayOrTensor:
        """Return the next chunk of a scripted expert from the current states, float32 [N, C, A] with C as in
        `EnvContext.chunk`. Optional. Does not change the envs. Raise UserError for a task without an expert."""
        raise UserError(f"{type(self).__name__} has no scripted expert")

    @hookspec(firstresult=True)
    def faults(self) -> Mapping[int, Sequence[str]]:
        """Return the faults since the last call: env number -> what broke. Optional. A reset repairs the env, and core
        runs its episode again."""
        return {}

    @hookspec(firstresult=True)  # noqa: B027 - optional
    def close(self) -> None:
        """Free processes and GL contexts. May be called twice."""


class Algorithm(ABC):
    """Advantages and a loss; no model, no simulator, no device choice, no logging. Where a person or an expert takes
    over, the episode ends for the algorithm (`core/run/selection.py`). Entry-point group `vla_rl.algorithms`."""

    needs: Requirements = Requirements()
    """Inputs that the algorithm needs. Core provides them, or refuses the run early."""
    off_policy: bool = False
    """The loss corrects for the age of the data (off-policy correction): samples may be trained on more than once."""
    advantage_scope: AdvantageScope = AdvantageScope.STEP
    """What the rewards, filters and advantages of a group depend on: that group alone, or the whole step."""
    scope_reason: str = ""
    """Why `advantage_scope` is STEP, and what to set for GROUP; shown where `streaming_update` is refused."""
    value_granularity: str = "chunk"
    """Shape of the critic's output, with `Requirements.values`: "chunk" ([B]) or "action" ([B, C])."""
    extras: Mapping[str, str] = MappingProxyType({})
    """Further numbers that `advantages` returns for the loss: name -> dimensions, such as {"q_target": "T N"}. The loss
    receives them in `Batch.extras`."""
    camera: str | None = None
    """Camera whose frames `features` gets; None: the first camera."""

    @hookspec(firstresult=True)
    def features(self, frames: tuple[Array, ...]) -> torch.Tensor | None:
        """Return a feature vector per trajectory, float32 [N, D], for `Rollout.features`. Optional, called with
        `Requirements.frames`; runs where the model inputs are stored. `frames` holds N arrays uint8 [frames, H, W, 3]
        of `camera`; an array has no frames if its trajectory was not collected."""
        return None

    @hookspec(firstresult=True)
    def shape_rewards(self, rollout: Rollout) -> Rollout:
        """Return the rollout with rewards rewritten. Default: unchanged."""
        return rollout

    @hookspec(firstresult=True)
    def select(self, rollout: Rollout) -> torch.Tensor:
        """Return the trajectories to keep, bool [N]. Others are not in loss, normalisation or counts. Default: all."""
        import torch

        return torch.ones(rollout.valid.shape[1], dtype=torch.bool)

    @abstractmethod
    @hookspec(firstresult=True)
    def advantages(self, rollout: Rollout) -> Advantages:
        """Compute advantages from the trajectory record of the whole (selected) rollout, without gradient."""

    @abstractmethod
    @hookspec(firstresult=True)
    def loss(self, scores: Scores, batch: Batch) -> Loss:
        """Return the loss of one micro-batch on a learner rank. Totals are summed: `Batch.weights` normalise.

        The metrics must include "loss/policy". The runtime reserves these names, also in `advantages`: "step",
        "loss/total", "loss/imitation", "policy/grad_norm", "policy/recompute_kl", and all that start with "compile/",
        "env/", "eval/", "eval_task/", "faults/", "groups/", "imagination/", "imitation/", "offload/", "replay/",
        "rollout/", "sampling/", "throughput/", "time/", "update/", "bc_warmup/", "world_model/".
        """


class Placement(ABC):
    """A strategy that maps resources to a plan; pure, without Ray. Entry-point group `vla_rl.placement`."""

    @abstractmethod
    @hookspec(firstresult=True)
    def plan(self, cluster: Cluster, job: Job) -> Plan:
        """Return the plan: slots of each role, pipeline stages, dynamic batching and offload. Raise `DoesNotFit` with
        the numbers, or `MeasureFirst` to be called again with a `Job.forecast`."""


class Demonstrations(ABC):
    """Demonstrations as samples: an observation and the chunk that followed it. Entry-point group `vla_rl.data`."""

    @abstractmethod
    @hookspec(firstresult=True)
    def num_samples(self) -> int:
        """Return the number of samples, at least 1: the episode steps that a whole chunk follows."""

    @abstractmethod
    @hookspec(firstresult=True)
    def read_samples(self, indices: ArrayOrTensor) -> tuple[Observation, ArrayOrTensor]:
        """Read samples by index, int64 [B] in 0 ... num_samples - 1. Return (Observation with the simulator's cameras,
        state and instructions; actions float32 [B, C, A] in its units). Core calls it from one thread at a time."""

    @hookspec(firstresult=True)
    def recorded_actions(self, indices: ArrayOrTensor) -> Array | None:
        """Return how many actions of each sample's chunk were recorded, int64 [B]; the others fill it up and are left
        out of the loss. Default: None, all count."""
        return None

    @hookspec(firstresult=True)
    def read_rewards(self, indices: ArrayOrTensor, discount: float) -> RecordedRewards:
        """Return the rewards that followed samples, int64 [B], discounted by `discount` per step. Optional, for
        recordings with rewards. Raise UserError for a recording without."""
        raise UserError(f"{type(self).__name__} has no rewards")

    @hookspec(firstresult=True)
    def data_statistics(self) -> Mapping[str, Mapping[str, Sequence[float]]]:
        """Return {"action": {"mean", "std", "min", "max", "q01", "q99"}, "state": ...} over all steps; each list has
        one number per dimension of the feature. Optional. Lets a model normalise by the data instead of by its
        checkpoint. Raise UserError for a data set without."""
        raise UserError(f"{type(self).__name__} has no statistics")

    @hookspec(firstresult=True)
    def relative_statistics(self, references: Sequence[int | None]) -> Mapping[str, Mapping[str, Sequence[float]]]:
        """Return `data_statistics` for actions relative to the state: "action" is of the differences of samples'
        actions to their state, "action_steps" the same for each of the C steps (C times A numbers a list), "state" as
        before. Optional, as `data_statistics`. Raise UserError for recorded actions that are differences already.

        Args:
            references: for each of an action's A numbers the place of the state's number that is subtracted; None:
                the number stays absolute.
        """
        raise UserError(
            f"{type(self).__name__} has no statistics of actions relative to the state, as the model's actions are; "
            "implement relative_statistics (vla_rl.toolkit.data.samples.compute_relative_statistics), or set "
            "model.actions: absolute"
        )

    @hookspec(firstresult=True)
    def data_properties(self) -> DataProperties:
        """Return actions per second, the names of the numbers of actions and states in order, and the grippers' signs.
        Optional. Data sets of different rates are not mixed, and names in another order than those of the simulator or
        the checkpoint are refused. Default: nothing is known."""
        return DataProperties()


class RunEvents:
    """Listeners, called on the driver. Every listener receives every event. Entry-point group `vla_rl.hooks`."""

    @hookspec
    def on_run_start(self, run: Run) -> None:
        """Called before the first evaluation or rollout, in a fresh or a resumed run."""

    @hookspec
    def frames_wanted(self, step: int) -> int:
        """Called before the evaluation at `step`. Return of how many episodes to record frames; the largest counts."""
        return 0

    @hookspec
    def on_rollout_end(self, run: Run, step: int, rollout: Rollout, metrics: dict[str, float]) -> None:
        """Called after the rollout of `step`, before its update."""

    @hookspec
    def on_update_end(self, run: Run, step: int, metrics: dict[str, float]) -> None:
        """Called after the optimiser steps of `step`. `metrics` holds everything measured in the whole iteration."""

    @hookspec
    def on_weights_published(self, run: Run, step: int, version: int) -> None:
        """Called after the policies have loaded the weights of `version`."""

    @hookspec
    def on_eval_end(self, run: Run, step: int, evaluation: Evaluation) -> None:
        """Called after an evaluation (step 0: before training)."""

    @hookspec
    def on_checkpoint(self, run: Run, step: int, folder: Path) -> None:
        """Called after a checkpoint was renamed to its final path."""

    @hookspec
    def on_progress(self, run: Run, phase: str, done: int, total: int) -> None:
        """Called when a phase (demonstrations, bc_warmup, rollout, update, eval) begins, and then about every second.
        Progress is `done` of `total` chunk steps or episodes (0: unknown). If the run waits for something else, `phase`
        says for what, such as "loading the model" (in MB)."""

    @hookspec
    def on_fault(self, run: Run, step: int, message: str) -> None:
        """Called after something broke and the run survived it."""

    @hookspec
    def on_run_end(self, run: Run, results: dict[str, Any]) -> None:
        """Called after the last step, unless it was stopped or failed. `results` is the content of results.json."""

    @hookspec
    def on_close(self, run: Run, error: BaseException | None) -> None:
        """Called last, however the run ended: close files, displays and connections. `error` is the exception that
        ended it early, None after `on_run_end`. An attempt that `runtime.restarts` follows is closed, too."""
