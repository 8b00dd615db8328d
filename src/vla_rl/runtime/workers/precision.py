"""Mixed precision (Micikevicius et al. 2018): networks compute in bfloat16; weights and gradients keep their type."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
from attrs import evolve

from vla_rl.core.manager import hookimpl
from vla_rl.core.types import Chunk, Scores
from vla_rl.toolkit.models.meta_device import device_autocast


class Autocast:
    """Wrapper around a model's calls: bfloat16 inside, float32 results. Acting and learning use the same wrapper, so
    that recomputed log-probs equal the recorded ones."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device).type

    @hookimpl(wraps="model")
    def sample_chunk(self) -> Generator[None, Chunk, Chunk]:
        with device_autocast(self.device):
            chunk = yield
        return evolve(chunk, log_probs=_to_float(chunk.log_probs), values=_to_float(chunk.values))

    @hookimpl(wraps="model")
    def chunk_log_probs(self) -> Generator[None, Scores, Scores]:
        with device_autocast(self.device):
            scores = yield
        return Scores(
            log_probs=_to_float(scores.log_probs), entropy=_to_float(scores.entropy), values=_to_float(scores.values)
        )

    @hookimpl(wraps="model")
    def values(self) -> Generator[None, torch.Tensor, torch.Tensor]:
        with device_autocast(self.device):
            result = yield
        return result.float()

    reference_log_probs = imitation_loss = imitation_losses = imitation_terms = policy_features = values


def _to_float(tensor: Any) -> Any:
    return None if tensor is None else tensor.float()
