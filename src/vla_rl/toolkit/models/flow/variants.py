"""What settings add to a flow policy: a reference policy with `lora`, a steering head with `steering`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from vla_rl.core.capabilities import STEERING, Steerable
from vla_rl.core.errors import UserError
from vla_rl.core.randomness import Noise
from vla_rl.core.types import ArrayOrTensor, Chunk, Observation, Scores
from vla_rl.toolkit.models.combined_classes import AdaptedPolicy, combine_classes
from vla_rl.toolkit.models.flow.config import FlowConfig
from vla_rl.toolkit.models.flow.inputs import FlowParts
from vla_rl.toolkit.models.flow.network import FlowModule
from vla_rl.toolkit.models.flow.policy import FlowPolicy
from vla_rl.toolkit.models.flow.steering import SteeringHead
from vla_rl.toolkit.models.networks import as_tensor

P = TypeVar("P", bound=FlowPolicy)


def choose_class(policy: type[P], config: FlowConfig, module: FlowModule) -> type[P]:
    """Return the class of a policy with these settings and this network."""
    adapted = () if config.lora is None else (AdaptedPolicy,)
    steered = () if module.steering is None else (SteeredFlow,)
    return combine_classes(policy, *adapted, *steered)


class SteeredFlow(FlowPolicy, Steerable):
    """A frozen policy, denoised by the ODE from noise that a trained head chooses (DSRL), whose score it has."""

    extra_names = (STEERING,)

    def __init__(self, parts: FlowParts) -> None:
        super().__init__(parts)
        self.steering_shape = self._head.shape

    @property
    def _head(self) -> SteeringHead:
        assert self.module.steering is not None
        return self.module.steering

    def _draw_noise(self, rows: int, noise: Noise, greedy: bool) -> dict[str, Tensor]:
        return {} if greedy else {"normals": as_tensor(noise.normals(*self.steering_shape), self._device)}

    def decide(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Denoise chunks. Without "normals" among the inputs the head takes its mode."""
        state = inputs["state"]
        prefix = self.module.build_prefix(self._encode_inputs(inputs), state)
        distribution = self._head(self._compute_features(prefix, state), self._spread)
        unsquashed = distribution.sample(inputs.get("normals"))
        x = self._head.initial_noise(unsquashed)
        step, log_probs = self._begin_denoising(x, None)
        for i in range(self._schedule.steps):
            x, _ = self._denoise_step(prefix, state, x, self._schedule.indices[i].expand(len(x)), step, None, log_probs)
        decided = {
            "actions": self._restore_actions(x, inputs.get("offset")),
            "log_probs": self._by_action(distribution.log_prob(unsquashed)),
            STEERING: unsquashed,
        }
        values = self.module.estimate_values(prefix, state)
        return decided if values is None else {**decided, "values": values}

    def chunk_log_probs(self, obs: Observation, chunk: Chunk) -> Scores:
        prefix, state = self._encode_observation(obs)
        distribution = self._head(self._compute_features(prefix, state), self._spread)
        unsquashed = as_tensor(chunk.extras[STEERING], self._device)
        return Scores(
            log_probs=self._by_action(distribution.log_prob(unsquashed)),
            entropy=self._by_action(distribution.entropy()),
            values=self.module.estimate_values(prefix, state),
        )

    def steering_noise(self, features: Tensor, normals: Tensor) -> tuple[Tensor, Tensor]:
        distribution = self._head(features, self._spread)
        unsquashed = distribution.sample(normals)
        return torch.tanh(unsquashed), distribution.log_prob(unsquashed)

    def imitation_loss(self, obs: Observation, actions: ArrayOrTensor) -> Tensor:
        """Raise UserError, since the policy is frozen."""
        raise UserError(
            f"this {self.name} is steered, and its weights are frozen: it cannot clone; clone first, and set "
            f"model.steering for the run with trainer 'dsrl'"
        )

    def _unscored_start(self, prefix: Any, state: Tensor, noise: Noise, greedy: bool) -> Tensor:
        normals = self._draw_noise(len(state), noise, greedy).get("normals")
        return self._head.initial_noise(self._head(self._compute_features(prefix, state), self._spread).sample(normals))

    def _compute_features(self, prefix: Any, state: Tensor) -> Tensor:
        with torch.no_grad():
            return super()._compute_features(prefix, state)

    def _by_action(self, elements: Tensor) -> Tensor:
        """Return the sum of numbers of the noise [B, R, W] in equal parts for each action, [B, C, 1]."""
        parts = elements.sum((1, 2)) / self._chunk
        return parts[:, None, None].expand(-1, self._chunk, 1)
