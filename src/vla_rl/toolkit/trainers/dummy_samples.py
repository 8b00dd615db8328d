"""Dummy samples: inputs without content that probe a model, and let a rank keep step with others."""

from __future__ import annotations

import numpy as np

from vla_rl.core.hookspecs import VLAModel
from vla_rl.core.randomness import Noise
from vla_rl.core.types import Chunk, EnvInfo, Observation


def dummy_observation(info: EnvInfo) -> Observation:
    """Return one observation with black images."""
    return Observation(
        images={name: np.zeros((1, *size, 3), np.uint8) for name, size in info.cameras.items()},
        instructions=(info.tasks[0].instruction,),
        state=np.zeros((1, info.state_dim), np.float32) if info.state_dim else None,
    )


def dummy_sample(model: VLAModel, info: EnvInfo) -> tuple[Observation, Chunk]:
    """Return one sample with black images, and a chunk that the model samples for it, for dummy batches. The chunk has
    the same fields as in a rollout, such as features, so that scoring runs the same code and `nbytes` is that of a real
    sample."""
    obs = dummy_observation(info)
    return obs, model.sample_chunk(obs, Noise(0, "blank", [0], [0], [0]), greedy=False)
