"""The policy that vla-rl trains: OpenVLA-OFT's discrete head, sampled token by token with a temperature.

Log-probabilities are those of the 256 action tokens at that temperature (SimpleVLA-RL, section 3); tokens of a chunk
are independent given the observation.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_rl.core.hookspecs import VLAModel
from vla_rl.core.randomness import Noise
from vla_rl.core.types import Chunk, Observation, Scores
from vla_rl.plugins.models.openvla.architecture import OpenVLAConfig
from vla_rl.plugins.models.openvla.checkpoint import save_checkpoint
from vla_rl.plugins.models.openvla.codec import ActionCodec, Scaler
from vla_rl.plugins.models.openvla.heads import OFTModule
from vla_rl.plugins.models.openvla.images import ImageProcessor, as_tensor
from vla_rl.plugins.models.openvla.prompts import Prompts

if TYPE_CHECKING:
    from vla_rl.core.types import Array


class OFTPolicy(VLAModel):
    """Made by `builder.build_policy`."""

    module: OFTModule

    def __init__(
        self,
        *,
        module: OFTModule,
        config: OpenVLAConfig,
        codec: ActionCodec,
        prompts: Prompts,
        images: ImageProcessor,
        state_scaler: Scaler | None,
        cameras: tuple[str, ...],
        chunk: int,
        temperature: float,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.module, self.config, self.codec, self.prompts, self.images = module, config, codec, prompts, images
        self.tokens_per_action = codec.action_dim
        self._state_scaler, self._cameras = state_scaler, cameras
        self._chunk, self._temperature, self._device, self._dtype = chunk, temperature, device, dtype
        self._dropouts = [part for part in module.modules() if isinstance(part, nn.Dropout) and part.p > 0]
        module.train()  # gradient checkpointing works in this mode only; dropout is switched in `_forward`

    def encode_actions(self, actions: Array) -> Tensor:
        return self.codec.encode(as_tensor(actions, self._device))

    def decode_actions(self, tokens: Array) -> Tensor:
        return self.codec.decode(as_tensor(tokens, self._device))

    @torch.no_grad()
    def sample_chunk(self, obs: Observation, noise: Noise, greedy: bool) -> Chunk:
        logits, values = self._act(obs)
        log_probs = torch.log_softmax(logits / self._temperature, dim=-1)
        if greedy:
            index = log_probs.argmax(-1)
        else:
            uniforms = as_tensor(noise.uniforms(self._chunk, self.tokens_per_action), self._device)
            index = inverse_cdf(log_probs, uniforms)
        chosen = log_probs.gather(-1, index.unsqueeze(-1)).squeeze(-1)
        tokens = index + self.codec.first
        return Chunk(actions=self.codec.decode(tokens), log_probs=chosen, values=values, trace={"tokens": tokens})

    def chunk_log_probs(self, obs: Observation, chunk: Chunk) -> Scores:
        logits, values = self._act(obs)
        log_probs = torch.log_softmax(logits / self._temperature, dim=-1)
        index = as_tensor(chunk.trace["tokens"], self._device) - self.codec.first
        chosen = log_probs.gather(-1, index.unsqueeze(-1)).squeeze(-1)
        return Scores(log_probs=chosen, entropy=-(log_probs.exp() * log_probs).sum(-1), values=values)

    @torch.no_grad()
    def values(self, obs: Observation) -> Tensor:
        if self.module.value_head is None:
            raise TypeError("this openvla_oft has no value head; it is built for algorithms that need values")
        return self._forward(obs, reads=0)[1]

    def imitation_loss(self, obs: Observation, actions: Array) -> Tensor:
        """Cross-entropy over the action tokens (temperature 1), mean over the batch and the chunk."""
        logits, _ = self._act(obs, dropout=True)
        target = self.encode_actions(actions) - self.codec.first
        return F.cross_entropy(logits.flatten(0, 2), target.flatten())

    def save(self, folder: Path) -> bool:
        save_checkpoint(self.module, self.config, self.prompts.tokenizer, Path(folder))
        return True

    def _act(self, obs: Observation, dropout: bool = False) -> tuple[Tensor, Tensor | None]:
        """float32 logits [B, C, M, bins] and values."""
        logits, values = self._forward(obs, self._chunk * self.tokens_per_action, dropout)
        return logits.unflatten(1, (self._chunk, self.tokens_per_action)), values

    def _forward(self, obs: Observation, reads: int, dropout: bool = False) -> Any:
        for part in self._dropouts:
            part.train(dropout)
        prompt = self.prompts.rows(obs.instructions)
        pixels = self.images([obs.images[name] for name in self._cameras])
        return self.module(pixels, self._state(obs), prompt.ids, prompt.mask, prompt.blank, prompt.start, reads)

    def _state(self, obs: Observation) -> Tensor | None:
        if self._state_scaler is None:
            return None
        if obs.state is None:
            raise ValueError("openvla_oft was built with `use_proprio`, but the observation has no state")
        return self._state_scaler.normalise(as_tensor(obs.state, self._device), clip=True).to(self._dtype)


def inverse_cdf(log_probs: Tensor, uniforms: Tensor) -> Tensor:
    """The bin whose stretch of the cumulative distribution holds the uniform. [..., bins], [...] -> int64 [...].

    A bin of probability 0 is never chosen.
    """
    cdf = log_probs.double().exp().cumsum(-1)
    total = cdf[..., -1]
    point = torch.minimum(uniforms.double() * total, torch.nextafter(total, torch.zeros_like(total)))
    return (cdf <= point.unsqueeze(-1)).sum(-1)
