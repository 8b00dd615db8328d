"""Advantage-conditioned cloning of recorded episodes (RECAP: Amin et al. 2025, arXiv:2511.14759).

1. A separate distributional value function V(s) regresses on recorded returns: the cross-entropy with the atom that
   is nearest to the return.
2. Each sample is labelled once: positive if its advantage reaches the threshold of its task, or if a person chose its
   action.
3. The policy clones all samples, with the label as text after the instruction. A share of them has no label.

The policy acts with the label "positive" (`TrainerPlugin.instruction_suffix`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from attrs import evolve
from torch import Tensor, nn

from vla_rl.core.errors import UserError
from vla_rl.core.randomness import derived_seed, generator
from vla_rl.core.trainers import ImitationStep
from vla_rl.core.types import Array, Observation
from vla_rl.plugins.trainers.recap.config import RecapConfig
from vla_rl.plugins.trainers.recap.label import NEGATIVE, POSITIVE
from vla_rl.toolkit.algorithms.statistics import MetricAccumulator
from vla_rl.toolkit.models.bag_of_words import BagOfWords
from vla_rl.toolkit.models.instructions import without_suffix
from vla_rl.toolkit.models.networks import Normal, as_tensor, construct_module, initialise_network
from vla_rl.toolkit.reward_models.success_classifier import CHANNELS, GRID, image_encoder
from vla_rl.toolkit.trainers.context import TrainerContext
from vla_rl.toolkit.trainers.imitation import make_policy_step
from vla_rl.toolkit.trainers.recorded_returns import RecordedReturns
from vla_rl.toolkit.trainers.recording_trainer import RecordingBatch, RecordingTrainer


class Recap(RecordingTrainer):
    """Trainer of a value function, and then of the policy conditioned on advantages."""

    name = "recap"
    optimizer_name = "value"
    unsharded = "does not shard the model"

    def __init__(self, config: RecapConfig, context: TrainerContext) -> None:
        info = context.trained.info
        self._config = config
        self._seed = context.seed
        self._value = build_value_network(
            tuple(info.cameras),
            info.state_dim,
            config.atoms,
            derived_seed(context.seed, "recap/value"),
            torch.device(context.trained.device),
        )
        super().__init__(config, context, {"value": self._value}, guarded="value function")
        self._labels: Array | None = None
        """Whether each sample is positive, bool [n]; None: the value function has not labelled them yet."""

    def state(self) -> Mapping[str, Any]:
        """Return the number of optimiser steps, and the labels, bool [n], or [0] before there are any."""
        labels = torch.zeros(0, dtype=torch.bool) if self._labels is None else torch.from_numpy(self._labels.copy())
        return {**super().state(), "labels": labels}

    def load(self, state: Mapping[str, Any]) -> None:
        super().load(state)
        self._labels = state["labels"].numpy() if len(state["labels"]) else None

    def make_steps(self, recorded: RecordedReturns, steps: Sequence[ImitationStep], metrics: MetricAccumulator) -> None:
        """Train the value function, label the samples, clone. Raise UserError for labels of another recording."""
        count = recorded.recording.num_samples()
        if self._labels is not None and len(self._labels) != count:
            raise UserError(
                f"the recording had {len(self._labels)} samples when trainer 'recap' labelled them, and has {count} "
                f"now; begin a new run"
            )
        low, high = float(recorded.returns.min()), float(recorded.returns.max())
        self._atoms = torch.linspace(low, high, self._config.atoms, device=self._device)
        """Returns of the value function's distribution, float32 [N]."""
        critic_steps = steps[: max(0, self._config.critic_steps - self._updates)]
        policy_steps = steps[len(critic_steps) :]
        samples = self.read_steps(recorded, critic_steps)
        for step in critic_steps:
            self._value_step(step, samples, recorded, metrics)
        if policy_steps and self._labels is None:
            self._labels = self._label_samples(recorded)
        samples = self.read_steps(recorded, policy_steps)
        with without_suffix(self._trained.model):
            for step in policy_steps:
                self._policy_step(step, samples, metrics)

    # ------------------------------------------------------------------------------------------ value function

    def _value_step(
        self,
        step: ImitationStep,
        samples: Iterator[RecordingBatch],
        recorded: RecordedReturns,
        metrics: MetricAccumulator,
    ) -> None:
        """Make one optimiser step of the value function on the next samples."""
        self._optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self._device)
        for _ in range(0, len(step.indices), self._trained.train.micro_batch):
            self._heartbeat()
            batch = next(samples)
            returns = as_tensor(recorded.returns[batch.indices], self._device)
            logits = self._value(batch.obs)
            losses = F.cross_entropy(logits, categorical_targets(returns, self._atoms), reduction="sum")
            (losses / step.total).backward()
            total = total + losses.detach()
            values = expected_values(logits.detach(), self._atoms)
            metrics.add_sums({"loss/value": losses.detach(), "recap/value": values.sum()})
        self.step_networks(total)
        self._updates += 1

    @torch.no_grad()
    def _label_samples(self, recorded: RecordedReturns) -> Array:
        """Return whether each sample is positive, bool [n]. Raises UserError where none is."""
        size = self._trained.train.micro_batch
        count = recorded.recording.num_samples()
        values = []
        tasks: list[str] = []
        for start in range(0, count, size):
            self._heartbeat()
            obs, _ = recorded.recording.read_samples(np.arange(start, min(start + size, count)))
            values.append(expected_values(self._value(obs), self._atoms))
            tasks += obs.instructions
        advantages = recorded.compute_advantages(torch.cat(values).cpu().numpy(), self._config.horizon)
        labels = positive_labels(advantages, tasks, self._config.positive_share, recorded.interventions)
        if not labels.any():
            raise UserError(
                f"none of {count} recorded samples has a larger advantage than the others of its task: nothing tells "
                f"good actions from bad ones; record more, or use behaviour_cloning"
            )
        return labels

    # -------------------------------------------------------------------------------------------------- policy

    def _policy_step(self, step: ImitationStep, samples: Iterator[RecordingBatch], metrics: MetricAccumulator) -> None:
        """Make one optimiser step of the policy on the next samples."""
        assert self._labels is not None
        positive = self._labels
        dropped = generator(self._seed, "recap/dropout", step.number).random(step.total) < self._config.dropout

        def compute_loss(batch: RecordingBatch) -> torch.Tensor:
            labels = positive[batch.indices]
            without = dropped[batch.first : batch.first + len(batch.indices)]
            obs = condition_on_labels(batch.obs, labels, without)
            loss = self._trained.imitation_loss(obs, batch.actions) * len(batch.indices)
            count = torch.tensor(float(labels.sum()), device=self._device)
            metrics.add_sums({"loss/imitation": loss.detach(), "recap/positive": count})
            return loss

        make_policy_step(self._trained, step, samples, compute_loss, self._heartbeat)
        self._updates += 1


def positive_labels(advantages: Array, tasks: Sequence[str], share: float, interventions: Array) -> Array:
    """Return whether each sample is positive, bool [n]: its advantage reaches the threshold of its task, which a share
    of the samples that the policy chose does, or it is an intervention. Equal advantages have equal labels, and the
    lowest one of a task is never positive.

    Args:
        advantages: float32 [n].
        tasks: instruction of each sample.
        share: share of each task's samples that is positive.
        interventions: bool [n].
    """
    labels = interventions.copy()
    names = np.array(tasks)
    for task in np.unique(names):
        rows = np.flatnonzero((names == task) & ~interventions)
        if len(rows):
            of_task = advantages[rows]
            labels[rows] = (of_task >= np.quantile(of_task, 1 - share)) & (of_task > of_task.min())
    return labels


def condition_on_labels(obs: Observation, labels: Array, dropped: Array) -> Observation:
    """Return the observation with a label (bool [B]) after each instruction, except where it is dropped (bool [B])."""
    texts = (
        text if without else text + (POSITIVE if label else NEGATIVE)
        for text, label, without in zip(obs.instructions, labels.tolist(), dropped.tolist(), strict=True)
    )
    return evolve(obs, instructions=tuple(texts))


PIXELS = 64
"""Side of the network's images."""
WORDS = 1024
WIDTH = 256


class ValueNetwork(nn.Module):
    """Convolutions over each camera's image, joined with the state, and scaled by features of the instruction: logits
    of a categorical distribution of returns, float32 [B, atoms]."""

    def __init__(self, cameras: Sequence[str], state_dim: int, atoms: int) -> None:
        super().__init__()
        self.cameras = tuple(cameras)
        self.state_dim = state_dim
        self.encoders = nn.ModuleList(image_encoder() for _ in self.cameras)
        self.joined = nn.Linear(len(self.cameras) * CHANNELS[-1] * GRID**2 + state_dim, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.words = nn.Embedding(WORDS, 2 * WIDTH)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, atoms)
        self._bags: BagOfWords | None = None

    def forward(self, obs: Observation) -> Tensor:
        device = self.head.weight.device
        if self._bags is None:
            self._bags = BagOfWords(WORDS, device)
        parts = [
            encoder(_scale_images(as_tensor(obs.images[camera], device)))
            for camera, encoder in zip(self.cameras, self.encoders, strict=True)
        ]
        if self.state_dim:
            parts.append(as_tensor(obs.state, device).float())
        scale, shift = (self._bags(obs.instructions) @ self.words.weight).chunk(2, 1)
        x = F.silu(self.norm(self.joined(torch.cat(parts, 1))) * (1 + scale) + shift)
        logits: Tensor = self.head(F.silu(self.hidden(x)))
        return logits


def build_value_network(
    cameras: Sequence[str], state_dim: int, atoms: int, seed: int, device: torch.device
) -> ValueNetwork:
    """Return the network with random weights that depend on the seed alone."""
    network = construct_module(lambda: ValueNetwork(cameras, state_dim, atoms), torch.device("cpu"))
    with torch.no_grad():
        initialise_network(network, seed, "head", _initialise_other)
    return network.to(device)


def _initialise_other(name: str, module: nn.Module, normal: Normal) -> None:
    if isinstance(module, nn.Embedding):
        normal(module.weight, 0.5)
    elif isinstance(module, nn.GroupNorm | nn.LayerNorm):
        module.weight.fill_(1.0)


def _scale_images(images: Tensor) -> Tensor:
    """Return images uint8 [B, H, W, 3] as float32 [B, 3, PIXELS, PIXELS] in [-1, 1]."""
    x = images.permute(0, 3, 1, 2).float()
    if x.shape[2:] != (PIXELS, PIXELS):
        x = F.interpolate(x, (PIXELS, PIXELS), mode="area")
    return x / 127.5 - 1


def categorical_targets(returns: Tensor, atoms: Tensor) -> Tensor:
    """Return the atom nearest to each return, int64 [B], for evenly spaced atoms float32 [N]."""
    spacing = atoms[1] - atoms[0]
    return ((returns - atoms[0]) / spacing).round().long().clamp(0, len(atoms) - 1)


def expected_values(logits: Tensor, atoms: Tensor) -> Tensor:
    """Return the means float32 [B] of distributions over atoms float32 [N], of logits [B, N]."""
    return torch.softmax(logits, dim=1) @ atoms
