"""The contracts of vla-rl: one abstract class a kind of plugin.

Each method is also a pluggy hook specification: subclassing is all an author does, and `@hookimpl(wraps=KIND)`
functions of the same name wrap every component of that kind. Specifications and implementations take no default
arguments (pluggy drops them); an implementation may leave out arguments that it does not use. An optional method that a
plugin does not have, or not as it was built, raises `NotOffered`; any other exception is a bug and shown as one.
Shapes: N simulator rows, B samples, C actions in a chunk, A action dimensions, M log-probs an action.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pluggy

from vla_rl.core.errors import NotOffered

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
        ResetState,
        Rollout,
        Scores,
    )

hookspec = pluggy.HookspecMarker("vla_rl")


class VLAModel(ABC):
    """A policy over action chunks; owns an `nn.Module`. Entry-point group `vla_rl.models`."""

    module: torch.nn.Module
    """All parameters; those with `requires_grad` are trained."""
    critic: torch.nn.Module | None = None
    """The part of `module` that only `values` come from: it has a learning rate and a warm-up of its own."""
    tokens_per_action: int
    """M."""
    cameras_read: tuple[str, ...] | None = None
    """Cameras that it looks at; None: all of the simulator's."""

    @hookspec(firstresult=True)
    def encode_actions(self, actions: ArrayOrTensor) -> torch.Tensor:
        """float [B, C, A] in the simulator's units -> int64 [B, C, M]. Optional: of models with tokens."""
        raise NotOffered(f"{type(self).__name__} has no action tokens")

    @hookspec(firstresult=True)
    def decode_actions(self, tokens: ArrayOrTensor) -> torch.Tensor:
        """int64 [B, C, M] -> float32 [B, C, A], un-normalised with the checkpoint's statistics. Optional as well."""
        raise NotOffered(f"{type(self).__name__} has no action tokens")

    @abstractmethod
    @hookspec(firstresult=True)
    def sample_chunk(self, obs: Observation, noise: Noise, greedy: bool) -> Chunk:
        """Choose a chunk for each row, without gradient. `noise` hands out keyed uniforms and normals a row (tokens
        are drawn by inverse CDF); `greedy` takes the mode, or the like. `log_probs`: of the distribution sampled."""

    @abstractmethod
    @hookspec(firstresult=True)
    def chunk_log_probs(self, obs: Observation, chunk: Chunk) -> Scores:
        """Score recorded chunks with gradient: log_probs and entropy [B, C, M], values [B] | [B, C] | None.
        With the weights that sampled them, log_probs equal the recorded ones."""

    @hookspec(firstresult=True)
    def values(self, obs: Observation) -> torch.Tensor:
        """Optional: the critic alone, without gradient, without actions. -> [B] or [B, C]."""
        raise NotOffered(f"{type(self).__name__} has no value head")

    @hookspec(firstresult=True)
    def reference_log_probs(self, obs: Observation, chunk: Chunk) -> torch.Tensor:
        """Optional: the log_probs [B, C, M] under the policy before training, without gradient."""
        raise NotOffered(f"{type(self).__name__} has no reference policy")

    @abstractmethod
    @hookspec(firstresult=True)
    def imitation_loss(self, obs: Observation, actions: ArrayOrTensor) -> torch.Tensor:
        """Behaviour cloning of float [B, C, A], with gradient: a scalar, mean over the batch."""

    @hookspec(firstresult=True)
    def weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Trainable (name, tensor) pairs in publishing order."""
        return [(name, p.detach()) for name, p in self.module.named_parameters() if p.requires_grad]

    @hookspec(firstresult=True)
    def load_weights(self, pairs: Iterable[tuple[str, ArrayOrTensor]]) -> None:
        """Copy published pairs into the module. Raises KeyError for a name that is not there."""
        import torch

        own = dict(self.module.named_parameters())
        with torch.no_grad():
            for name, tensor in pairs:
                own[name].copy_(torch.as_tensor(tensor))

    @abstractmethod
    @hookspec(firstresult=True)
    def save(self, folder: Path) -> None:
        """Write the model's own public format, statistics included, loadable as `checkpoint:`."""


class SimEnv(ABC):
    """A batch of N simulator rows. Core adds resets, limits, masks and statistics. Entry-point group `vla_rl.envs`."""

    num_envs: int
    info: EnvInfo

    @abstractmethod
    @hookspec(firstresult=True)
    def reset_states(self, split: str) -> tuple[ResetState, ...]:
        """Fixed initial states of "train" or "eval", in a stable order. The two share neither id nor scene.
        Where nothing can be evaluated, "eval" is `NotOffered`."""

    @abstractmethod
    @hookspec(firstresult=True)
    def reset(self, rows: ArrayOrTensor, state_ids: ArrayOrTensor, seed: ArrayOrTensor) -> Observation:
        """Put rows (int64 [R]) into states (int64 [R]); `seed` (int64 [R]) keys whatever else is random in the
        episode. -> Observation of those R rows, in that order; the other rows are untouched."""

    @abstractmethod
    @hookspec(firstresult=True)
    def chunk_step(self, actions: ArrayOrTensor, active: ArrayOrTensor, stop_at_end: bool) -> ChunkResult:
        """Apply up to C actions, float [N, C, A], to the rows where `active` (bool [N]). `stop_at_end`: a row stops
        executing at its first terminated or truncated action; else it executes all. Cameras render once, at the end."""

    @hookspec(firstresult=True)
    def expert_chunk(self) -> ArrayOrTensor:
        """Optional: a scripted demonstrator's next chunk from the current states, float32 [N, C, A] with C as in
        `Context.chunk`. Has no effect on the rows."""
        raise NotOffered(f"{type(self).__name__} has no scripted expert")

    @hookspec(firstresult=True)
    def faults(self) -> Mapping[int, Sequence[str]]:
        """Optional: row -> what broke there since the last call. A reset mends it; core plays its episode anew."""
        return {}

    @hookspec(firstresult=True)
    def snapshot(self) -> Any:
        """Optional, for offload: all that `restore` of a newly built simulator needs to go on; tensors on the host."""
        raise NotOffered(f"{type(self).__name__} cannot be offloaded")

    @hookspec(firstresult=True)
    def restore(self, snapshot: Any) -> None:
        """Optional, for offload: go on from what another's `snapshot` gave."""
        raise NotOffered(f"{type(self).__name__} cannot be offloaded")

    @hookspec(firstresult=True)  # noqa: B027 - optional
    def close(self) -> None:
        """Free processes and GL contexts; may be called twice."""


class Algorithm(ABC):
    """Advantages and a loss; no model, no simulator, no device choice, no logging. Group `vla_rl.algorithms`."""

    needs: frozenset[str] = frozenset()
    """Of "values", "fresh-values", "fresh-log-probs", "groups", "reference", "frames": provided, or refused early."""
    off_policy: bool = False
    """Data count by how old they are, and so may be trained on more than once."""
    scope: str = "step"
    """"group": rewards, filters and advantages of a group need no other. Else "step", or why and what to set."""
    value_granularity: str = "chunk"
    """"chunk" or "action": shape of the critic's output, for algorithms that need "values"."""
    extras: Mapping[str, str] = MappingProxyType({})
    """Further numbers that `advantages` returns for the loss: name -> dimensions, such as {"q_target": "T N"}. They
    come back in `Batch.extras`."""
    camera: str | None = None
    """Whose frames `features` gets; none: those of the first camera."""

    @hookspec(firstresult=True)
    def features(self, frames: tuple[Array, ...]) -> torch.Tensor | None:
        """Optional, for algorithms that need "frames"; runs where the heavy part is. Frames of `camera`, N arrays uint8
        [frames, H, W, 3] (none of a trajectory that was not played) -> float32 [N, D], `Rollout.features`."""
        return None

    @hookspec(firstresult=True)
    def shape_rewards(self, rollout: Rollout) -> Rollout:
        """The rollout with rewards rewritten. Default: unchanged."""
        return rollout

    @hookspec(firstresult=True)
    def select(self, rollout: Rollout) -> torch.Tensor:
        """bool [N]: trajectories to keep. What is dropped leaves loss, normalisers and counts. Default: all."""
        import torch

        return torch.ones(rollout.valid.shape[1], dtype=torch.bool)

    @abstractmethod
    @hookspec(firstresult=True)
    def advantages(self, rollout: Rollout) -> Advantages:
        """From the light part of the whole (selected) rollout, without gradient."""

    @abstractmethod
    @hookspec(firstresult=True)
    def loss(self, scores: Scores, batch: Batch) -> Loss:
        """The loss of one micro-batch on a learner rank; totals are summed, so weights carry the normalisation.
        Its metrics hold "loss/policy". The runtime's own, refused in `advantages` too: "step", "loss/total",
        "loss/imitation", "policy/grad_norm", all with "env/", "eval/", "eval_task/", "faults/", "groups/" in front,
        "imagination/", "imitation/", "offload/", "replay/", "rollout/", "sampling/", "throughput/", "time/", "update/",
        "warmup/", "world_model/"."""


class Placement(ABC):
    """Resources in, plan out; pure, Ray never appears here. Entry-point group `vla_rl.placement`."""

    @abstractmethod
    @hookspec(firstresult=True)
    def plan(self, cluster: Cluster, job: Job) -> Plan:
        """Slots of each role, stages, window, offload. Raises `DoesNotFit` with the numbers, or
        `MeasureFirst` to be asked again with `Job.measured`."""


class Demonstrations(ABC):
    """Recorded demonstrations as samples: what was seen and the chunk of actions that followed. Group `vla_rl.data`."""

    @abstractmethod
    @hookspec(firstresult=True)
    def num_samples(self) -> int:
        """How many there are: steps of episodes that a whole chunk follows. At least 1."""

    @abstractmethod
    @hookspec(firstresult=True)
    def read_samples(self, indices: ArrayOrTensor) -> tuple[Observation, ArrayOrTensor]:
        """Samples int64 [B], each in 0 ... num_samples - 1. -> (their Observation, with the cameras, state and
        instructions of the simulator; float32 [B, C, A] in its units). Called from one thread at a time."""

    @hookspec(firstresult=True)
    def data_statistics(self) -> Mapping[str, Mapping[str, Sequence[float]]]:
        """Optional: {"action": {"mean", "std", "min", "max", "q01", "q99"}, "state": ...} over all steps, as many
        numbers each as the feature has. Lets a model scale by the data instead of by its checkpoint."""
        raise NotOffered(f"{type(self).__name__} has no statistics")


class RunEvents:
    """Listeners, called on the driver; every one hears every event. Entry-point group `vla_rl.hooks`."""

    @hookspec
    def on_run_start(self, run: Run) -> None:
        """Before the first evaluation or rollout, in a fresh or a resumed run."""

    @hookspec
    def frames_wanted(self, step: int) -> int:
        """Before the evaluation at `step`: of how many episodes frames shall be recorded; the largest answer wins."""
        return 0

    @hookspec
    def on_rollout_end(self, run: Run, step: int, rollout: Rollout, metrics: dict[str, float]) -> None:
        """After the rollout of `step`, before its update."""

    @hookspec
    def on_update_end(self, run: Run, step: int, metrics: dict[str, float]) -> None:
        """After the optimiser steps of `step`; `metrics` holds everything measured in the whole iteration."""

    @hookspec
    def on_weights_published(self, run: Run, step: int, version: int) -> None:
        """After policies hold `version`."""

    @hookspec
    def on_eval_end(self, run: Run, step: int, evaluation: Evaluation) -> None:
        """After an evaluation (step 0: before training)."""

    @hookspec
    def on_checkpoint(self, run: Run, step: int, folder: Path) -> None:
        """After a checkpoint was renamed to its final place."""

    @hookspec
    def on_progress(self, run: Run, phase: str, done: int, total: int) -> None:
        """When a phase (demonstrations, warmup, rollout, update, eval) begins, and about every second while it goes on,
        `done` of `total` (chunk steps, episodes; 0: not known); or what it waits for, as "loading the model" (MB)."""

    @hookspec
    def on_fault(self, run: Run, step: int, message: str) -> None:
        """After something broke that the run survives."""

    @hookspec
    def on_run_end(self, run: Run, results: dict[str, Any]) -> None:
        """Last, unless the run was stopped or failed; `results` is the content of results.json."""
