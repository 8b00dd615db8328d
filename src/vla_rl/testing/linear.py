"""A public test double: the smallest policy that implements every method of `VLAModel`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from vla_rl.core.capabilities import ActionTokens, HasCritic, HasFeatures
from vla_rl.core.hookspecs import VLAModel
from vla_rl.core.randomness import Noise, generator
from vla_rl.core.types import Chunk, EnvInfo, Observation, Scores, ValueGranularity
from vla_rl.testing.latency import Latency

POOL = 4


class _Layers(nn.Module):
    def __init__(self, inputs: int, outputs: int, critic: int) -> None:
        super().__init__()
        self.policy = nn.Linear(inputs, outputs)
        self.value_head = nn.Linear(inputs, critic) if critic else None


class LinearModel(VLAModel, HasCritic, ActionTokens, HasFeatures):
    """One linear layer from the state to C x A categorical distributions over `bins` evenly spaced actions (M = A).

    An environment without a state is seen through its cameras, averaged to 4 x 4 pixels. `values` adds a linear
    critic [B] ("chunk") or [B, C] ("action"). Weights start near zero, so that every bin is about equally likely.
    `latency`: of each `sample_chunk`; `learn_latency`: of each `chunk_log_probs`, `sample_latency`: of its rows.
    """

    def __init__(
        self,
        env: EnvInfo,
        chunk: int,
        *,
        bins: int = 8,
        seed: int = 0,
        values: ValueGranularity = "none",
        device: str = "cpu",
        temperature: float = 1.0,
        checkpoint: str | Path | None = None,
        latency: Latency | None = None,
        learn_latency: Latency | None = None,
        sample_latency: Latency | None = None,
    ) -> None:
        if not 2 <= bins <= 256:
            raise ValueError(f"bins is {bins}; it must be from 2 to 256")
        self._chunk = chunk
        self._bins = bins
        self._values = values
        self._temperature = temperature
        self._latency = latency or Latency(0.0)
        self._learn_latency = learn_latency or Latency(0.0)
        self._sample_latency = sample_latency or Latency(0.0)
        self.tokens_per_action = env.action_dim
        self._cameras = tuple(env.cameras)
        self._has_state = env.state_dim > 0
        self.cameras_read = () if self._has_state else self._cameras
        inputs = env.state_dim or 3 * POOL * POOL * len(env.cameras)
        self._shape = {"inputs": inputs, "chunk": chunk, "action_dim": env.action_dim, "bins": bins}
        critic = {"none": 0, "chunk": 1, "action": chunk}[values]
        self.module: _Layers = _Layers(inputs, chunk * env.action_dim * bins, critic)
        self.critic = self.module.value_head
        for name, parameter in self.module.named_parameters():
            draws = generator(seed, f"linear/{name}").standard_normal(tuple(parameter.shape), dtype=np.float32)
            parameter.data.copy_(torch.from_numpy(0.01 * draws))
        if checkpoint is not None:
            self._load_checkpoint(Path(checkpoint))
        self.module.to(device)
        self._device = torch.device(device)
        self._low = torch.tensor(env.action_low, device=device)
        self._high = torch.tensor(env.action_high, device=device)

    def encode_actions(self, actions: Any) -> torch.Tensor:
        actions = torch.as_tensor(actions, device=self._device)
        scaled = (actions - self._low) / (self._high - self._low) * (self._bins - 1)
        tokens: torch.Tensor = scaled.round().long().clamp(0, self._bins - 1)
        return tokens

    def decode_actions(self, tokens: Any) -> torch.Tensor:
        share = torch.as_tensor(tokens, device=self._device) / (self._bins - 1)
        actions: torch.Tensor = self._low + share.float() * (self._high - self._low)
        return actions

    @torch.no_grad()
    def sample_chunk(self, obs: Observation, noise: Noise, greedy: bool) -> Chunk:
        self._latency.simulate_latency(rows=len(obs))
        features = self._compute_features(obs)
        log_probs = self._log_softmax(features)
        if greedy:
            tokens = log_probs.argmax(-1)
        else:
            draws = torch.as_tensor(noise.uniforms(self._chunk, self.tokens_per_action), device=self._device)
            below = log_probs.exp().cumsum(-1) <= draws[..., None]
            tokens = below.sum(-1).clamp(max=self._bins - 1)
        return Chunk(
            actions=self.decode_actions(tokens),
            log_probs=log_probs.gather(-1, tokens[..., None]).squeeze(-1),
            values=self._compute_values(features),
            extras={"tokens": tokens},
        )

    def chunk_log_probs(self, obs: Observation, chunk: Chunk) -> Scores:
        self._learn_latency.simulate_latency()
        self._sample_latency.simulate_latency(times=len(obs))
        features = self._compute_features(obs)
        log_probs = self._log_softmax(features)
        tokens = torch.as_tensor(chunk.extras["tokens"], device=self._device)
        return Scores(
            log_probs=log_probs.gather(-1, tokens[..., None]).squeeze(-1),
            entropy=-(log_probs.exp() * log_probs).sum(-1),
            values=self._compute_values(features),
        )

    @torch.no_grad()
    def values(self, obs: Observation) -> torch.Tensor:
        values = self._compute_values(self._compute_features(obs))
        assert values is not None
        return values

    def imitation_loss(self, obs: Observation, actions: Any) -> torch.Tensor:
        return self.imitation_terms(obs, actions).mean()

    def imitation_losses(self, obs: Observation, actions: Any) -> torch.Tensor:
        return self.imitation_terms(obs, actions).mean(1)

    def imitation_terms(self, obs: Observation, actions: Any) -> torch.Tensor:
        log_probs = self._log_softmax(self._compute_features(obs))
        return -log_probs.gather(-1, self.encode_actions(actions)[..., None]).mean((2, 3))

    def policy_features(self, obs: Observation) -> torch.Tensor:
        return self._compute_features(obs)

    def save(self, folder: Path) -> None:
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: p.detach().cpu().contiguous() for name, p in self.module.state_dict().items()}, folder / FILE)
        (folder / "config.json").write_text(json.dumps(self._shape) + "\n", encoding="utf-8")

    def _load_checkpoint(self, folder: Path) -> None:
        from safetensors.torch import load_file

        if not (folder / "config.json").is_file():
            raise FileNotFoundError(f"no linear model in {folder}: config.json is missing; `save` writes it")
        shape = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if shape != self._shape:
            raise ValueError(f"the linear model in {folder} has {shape}, this run needs {self._shape}")
        missing = self.module.load_state_dict(load_file(folder / FILE), strict=False).missing_keys
        if any(name.startswith("policy") for name in missing):
            raise ValueError(f"{folder / FILE} lacks {', '.join(missing)}")

    def _compute_features(self, obs: Observation) -> torch.Tensor:
        if self._has_state:
            return torch.as_tensor(obs.state, device=self._device)
        images = [torch.as_tensor(obs.images[name], device=self._device) for name in self._cameras]
        pooled = [nn.functional.adaptive_avg_pool2d(i.permute(0, 3, 1, 2).float() / 255 - 0.5, POOL) for i in images]
        return torch.cat([p.flatten(1) for p in pooled], -1)

    def _log_softmax(self, features: torch.Tensor) -> torch.Tensor:
        logits = self.module.policy(features).view(-1, self._chunk, self.tokens_per_action, self._bins)
        return torch.log_softmax(logits / self._temperature, -1)

    def _compute_values(self, features: torch.Tensor) -> torch.Tensor | None:
        if self.module.value_head is None:
            return None
        values: torch.Tensor = self.module.value_head(features)
        return values.squeeze(-1) if self._values == "chunk" else values


FILE = "model.safetensors"
