"""DSRL: soft actor-critic over the initial noise of a frozen flow policy.

Wagenmaker et al. 2025, "Steering Your Diffusion Policy with Latent Space Reinforcement Learning" (arXiv 2506.15799),
section 4: the policy's denoising is a part of the environment, and noise is the action (DSRL-SAC). Features of a frozen
policy never change, so they are computed once for each frame and kept in place of its images.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from vla_rl.core.capabilities import STEERING, Steerable
from vla_rl.core.errors import UserError
from vla_rl.core.trainers import Transitions
from vla_rl.core.types import ActionSource
from vla_rl.plugins.trainers.off_policy.config import DsrlConfig
from vla_rl.plugins.trainers.off_policy.impl import OffPolicy
from vla_rl.toolkit.trainers.context import TrainerContext
from vla_rl.toolkit.trainers.trained_model import TrainedModel


class Dsrl(OffPolicy):
    """Trainer of the steering head, of critics of its noise and of a temperature."""

    name = "dsrl"

    def __init__(self, config: DsrlConfig, context: TrainerContext) -> None:
        """Create critics and an empty buffer. Raises UserError for a model that is not steered."""
        vectors, numbers = _steering_shape(context.trained)
        super().__init__(config.of_noise(vectors * numbers), context)

    def _check_model(self) -> None:
        _steering_shape(self._trained)

    def _action_shape(self) -> tuple[int, int]:
        return _steering_shape(self._trained)

    def _action_bounds(self) -> tuple[Sequence[float], Sequence[float]]:
        numbers = self._action_shape()[1]
        return (-1.0,) * numbers, (1.0,) * numbers

    def _select_kept(self, transitions: Transitions) -> Transitions | None:
        """Return the transitions with noise, scaled to [-1, 1], in place of actions. Chunks with a takeover are left
        out: their noise did not lead to what was executed."""
        own = np.arange(len(transitions))
        if transitions.source is not None:
            taken_over = (transitions.source != ActionSource.POLICY) & transitions.valid
            own = np.flatnonzero(~taken_over.any(1))
        if not len(own):
            return None
        return Transitions(
            frames=transitions.frames,
            first=transitions.first[own],
            following=transitions.following[own],
            actions=np.tanh(transitions.extras[STEERING][own], dtype=np.float32),
            rewards=transitions.rewards[own],
            valid=transitions.valid[own],
            terminated=transitions.terminated[own],
        )

    def _sample_actions(self, features: Tensor, normals: Tensor) -> tuple[Tensor, Tensor]:
        return self._trained.steering_noise(features, normals)


def _steering_shape(trained: TrainedModel) -> tuple[int, int]:
    """Return the vectors and numbers of the noise that the policy's head chooses. Raises UserError without a head."""
    model = trained.model
    if not isinstance(model, Steerable):
        raise UserError(
            f"trainer 'dsrl' trains a head that chooses the initial noise of a flow policy, and model {trained.name!r} "
            f"has none; set model.steering: {{}} (pi0, pi05, smolvla and gr00t take it)"
        )
    return model.steering_shape
