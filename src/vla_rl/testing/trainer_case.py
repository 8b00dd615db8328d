"""Parts of `check_trainer`: a trainer with a small policy, as a learner hosts it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attrs import define, evolve, frozen
from torch import nn

from vla_rl.core.capabilities import Reparameterised, Steerable
from vla_rl.core.declarations import TrainerPlugin, TrainingData
from vla_rl.core.hookspecs import Algorithm
from vla_rl.core.spec.sections import TrainSpec
from vla_rl.core.trainers import Trainer
from vla_rl.core.types import Advantages, Batch, EnvInfo, Loss, Observation, Rollout, Scores
from vla_rl.testing import synthetic
from vla_rl.testing.common.comparison import copy_weights
from vla_rl.testing.common.findings import build_component
from vla_rl.testing.linear import LinearModel
from vla_rl.toolkit.models.instructions import with_suffix
from vla_rl.toolkit.models.squashed_gaussian import SquashedGaussian
from vla_rl.toolkit.trainers.context import TrainerContext
from vla_rl.toolkit.trainers.parallel import ParallelStrategy
from vla_rl.toolkit.trainers.trained_model import TrainedModel
from vla_rl.toolkit.trainers.trainer_state import POLICY

CHUNK = 2
SAMPLES = 8


class SurrogateAlgorithm(Algorithm):
    """The spec's algorithm: PPO's surrogate without clipping, and a critic on returns."""

    def __init__(self) -> None:
        self.calls = 0
        """Calls of `loss`."""

    def advantages(self, rollout: Rollout) -> Advantages:
        raise AssertionError("trainers take the advantages that they are given")

    def loss(self, scores: Scores, batch: Batch) -> Loss:
        self.calls += 1
        ratio = (scores.log_probs - batch.log_probs).sum(-1).exp()
        policy = -(ratio * batch.valid * (batch.advantages * batch.weights)[:, None]).sum()
        total = policy
        if scores.values is not None and batch.returns is not None and batch.value_weights is not None:
            total = total + (batch.value_weights * (scores.values - batch.returns).square()).sum() / 2
        return Loss(total=total, metrics={"loss/policy": policy.detach()})


class Rank(ParallelStrategy):
    """A rank that keeps its gradients instead of adding them up: an optimiser such as Adam hides their scale."""

    world = 2

    def __init__(self) -> None:
        self.reductions: list[list[torch.Tensor]] = []
        """Gradients of each reduction; zeros for a parameter without one."""

    def reduce(self, parameters: Sequence[nn.Parameter]) -> None:
        self.reductions.append([torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters])


class BinPolicy(LinearModel):
    """The small policy over bins. It tells instructions with the suffix of the trainer's plugin from those without."""

    def __init__(self, info: EnvInfo, suffix: str, *, critic: bool) -> None:
        self._suffix = suffix
        seen = evolve(info, state_dim=2 * info.state_dim) if suffix else info  # features twice: with the suffix, or 0
        super().__init__(seen, CHUNK, values="chunk" if critic else "none")

    def _compute_features(self, obs: Observation) -> torch.Tensor:
        features = super()._compute_features(obs)
        if not self._suffix or not self._has_state:
            return features
        has_suffix = torch.tensor([[float(text.endswith(self._suffix))] for text in obs.instructions])
        return torch.cat([features, has_suffix * features], dim=1)

    @torch.no_grad()
    def mean_leaning(self, obs: Observation) -> torch.Tensor:
        """Return how high the policy's mean actions are, [B] from -1 to 1."""
        shares = torch.linspace(-1, 1, self._bins)
        log_probs = self._log_softmax(self._compute_features(with_suffix(obs, self._suffix)))
        return (log_probs.exp() * shares).sum(-1).mean((1, 2))


class GaussianPolicy(LinearModel, Reparameterised, Steerable):
    """The small policy with squashed Gaussians in place of two bins, for trainers of transitions."""

    def __init__(self, info: EnvInfo) -> None:
        super().__init__(info, CHUNK, bins=2)
        self._layout = (CHUNK, info.action_dim, 2)
        self.steering_shape = (CHUNK, info.action_dim)

    def reparameterised_actions(
        self, features: torch.Tensor, normals: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        squashed, log_probs = self.steering_noise(features, normals)
        return self._low + (squashed + 1) / 2 * (self._high - self._low), log_probs

    def steering_noise(self, features: torch.Tensor, normals: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        distribution = SquashedGaussian.of_outputs(self.module.policy(features).unflatten(1, self._layout))
        unsquashed = distribution.sample(normals)
        return torch.tanh(unsquashed), distribution.log_prob(unsquashed)

    def imitation_losses(self, obs: Observation, actions: Any) -> torch.Tensor:
        goal = (torch.as_tensor(actions) - self._low) / (self._high - self._low) * 2 - 1
        return (self._mean_actions(obs) - goal).square().mean((1, 2))

    def imitation_loss(self, obs: Observation, actions: Any) -> torch.Tensor:
        return self.imitation_losses(obs, actions).mean()

    @torch.no_grad()
    def mean_leaning(self, obs: Observation) -> torch.Tensor:
        """Return how high the policy's mean actions are, [B] from -1 to 1."""
        return self._mean_actions(obs).mean((1, 2))

    def _mean_actions(self, obs: Observation) -> torch.Tensor:
        return torch.tanh(self.module.policy(self._compute_features(obs)).unflatten(1, self._layout)[..., 0])


@frozen(eq=False)
class TrainerCase:
    """A trainer with its policy."""

    trainer: Trainer[Any]
    trained: TrainedModel
    kind: TrainingData
    folder: Path
    """Folder that the trainer may write to."""
    algorithm: SurrogateAlgorithm
    heartbeats: list[None]
    """One for each heartbeat."""

    @property
    def is_cloning(self) -> bool:
        """Whether the trainer learns from demonstrations, or from recordings with rewards."""
        return self.kind in (TrainingData.DEMONSTRATIONS, TrainingData.RECORDINGS)

    def mean_leaning(self, obs: Observation) -> torch.Tensor:
        """Return how high the policy's mean actions are, [B] from -1 to 1."""
        model = self.trained.model
        assert isinstance(model, BinPolicy | GaussianPolicy)
        return model.mean_leaning(obs)

    def copy_weights(self) -> dict[str, torch.Tensor]:
        """Return copies of all weights, targets included."""
        named: dict[str, torch.Tensor] = {}
        for kind, modules in (("modules", self.trainer.modules()), ("targets", self.trainer.targets())):
            for name, module in modules.items():
                named |= {f"{kind}/{name}/{key}": tensor for key, tensor in copy_weights(module).items()}
        policy = copy_weights(self.trained.model.module)
        return named | {f"modules/{POLICY}/{key}": tensor for key, tensor in policy.items()}


@define(eq=False)
class TrainerBuilder:
    """Maker of trainers, all from the same first weights."""

    plugin: TrainerPlugin
    config: Any
    root: str
    """Folder for their files."""

    @property
    def kind(self) -> TrainingData:
        return self.plugin.trains_on

    def make_case(
        self,
        micro_batch: int = SAMPLES,
        *,
        strategy: ParallelStrategy | None = None,
        files: Path | None = None,
        train: Mapping[str, Any] | None = None,
        from_images: bool = False,
    ) -> TrainerCase:
        """Return a new trainer.

        Args:
            strategy: None for a single rank.
            files: folder of an earlier trainer, whose files the new one gets.
            train: further keys of the spec's `train`.
            from_images: the policy sees images instead of a state.
        """
        folder = Path(tempfile.mkdtemp(dir=self.root)) / "files"
        if files is not None and files.exists():
            shutil.copytree(files, folder)
        spec = TrainSpec(**{"steps": 4, "lr": 1e-2, "micro_batch": micro_batch, "max_grad_norm": None, **(train or {})})
        info = evolve(
            synthetic.env_info(cameras=1, pixels=32, state_dim=0 if from_images else 4),
            takeovers=self.kind is TrainingData.TRANSITIONS,
        )
        trained = TrainedModel(self._build_policy(info), spec, name="linear", device="cpu", info=info, acting=True)
        if strategy is not None:
            trained.strategy = strategy
        algorithm = SurrogateAlgorithm()
        heartbeats: list[None] = []
        heartbeat = partial(heartbeats.append, None)
        context = TrainerContext(chunk=CHUNK, trained=trained, algorithm=algorithm, heartbeat=heartbeat, folder=folder)
        trainer, _ = build_component("trainer", self.plugin, self.config, context)
        return TrainerCase(trainer, trained, self.kind, folder, algorithm, heartbeats)

    def _build_policy(self, info: EnvInfo) -> LinearModel:
        if self.kind is TrainingData.TRANSITIONS:
            return GaussianPolicy(info)
        return BinPolicy(info, self.plugin.instruction_suffix, critic=self.kind is TrainingData.TRAJECTORIES)
