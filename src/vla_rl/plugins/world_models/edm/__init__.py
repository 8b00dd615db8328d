"""`edm`: a world model that denoises the next frames. Light part; see docs/world-models.md."""

from __future__ import annotations

from typing import Any

from attrs import field, frozen, validators

from vla_rl.core.types import Context, Plugin
from vla_rl.plugins.world_models.edm.presets import PRESETS

RATE: Any = validators.and_(validators.gt(0.0), validators.le(10.0))
DECAY: Any = validators.and_(validators.ge(0.0), validators.le(100.0))
"""Bounds as `train` has them: beyond, nothing is learnt."""
LEVELS: Any = validators.deep_iterable(validators.ge(1), validators.min_len(1))


@frozen(kw_only=True)
class EDMConfig:
    history: int = field(default=4, validator=validators.ge(1))
    """K, frames and chunks that a prediction looks back on."""
    fold: int = field(default=1, validator=validators.ge(1))
    """Squares of so many pixels a side become channels."""
    channels: tuple[int, ...] = field(default=(64, 64, 64, 64), validator=LEVELS)
    depths: tuple[int, ...] = field(default=(2, 2, 2, 2), validator=LEVELS)
    """Channels and blocks of each level of the UNet, the finest first."""
    condition: int = field(default=256, validator=validators.ge(8))
    """Size of the vector that noise level, actions and state are embedded in; a multiple of `history` and of 2."""
    evaluations: int = field(default=3, validator=validators.ge(1))
    """Of the network, for one prediction: 1 will do where what follows is certain."""
    residual: bool = False
    """Predict of which layers frames are made (scene, robot, mean frame), and what is to be added."""
    sigma_loc: float = field(default=-0.4, validator=validators.and_(validators.ge(-20.0), validators.le(20.0)))
    sigma_scale: float = field(default=1.2, validator=RATE)
    """Mean and deviation of the logarithm of noise levels in training."""
    changed_weight: float = field(default=0.0, validator=validators.and_(validators.ge(0.0), validators.le(1e6)))
    """By how much more pixels that changed count."""
    heads: int = field(default=16, validator=validators.ge(8))
    """Channels of the network that tells state and outcome."""
    precision: str = field(default="float32", validator=validators.in_(("float32", "bfloat16")))
    """What the denoiser multiplies in. bfloat16 is faster where the hardware has it: GPUs, CPUs with AMX."""
    lr: float = field(default=1e-4, validator=RATE)
    heads_lr: float = field(default=1e-4, validator=RATE)
    weight_decay: float = field(default=1e-2, validator=DECAY)
    heads_weight_decay: float = field(default=0.1, validator=DECAY)
    warm_up: int = field(default=100, validator=validators.and_(validators.ge(0), validators.le(1_000_000)))
    """Rates and decays of the denoiser and of the heads; and optimiser steps over which both rates rise."""

    def __attrs_post_init__(self) -> None:
        if len(self.channels) != len(self.depths):
            raise ValueError(f"{len(self.channels)} channels and {len(self.depths)} depths; give one of each a level")
        if self.condition % self.history or self.condition % 2:
            raise ValueError(f"condition {self.condition} must be a multiple of history {self.history}, and of 2")


def build(config: EDMConfig, context: Context) -> Any:
    from vla_rl.plugins.world_models.edm.model import EDM

    return EDM(config, context)


plugin = Plugin(config=EDMConfig, build=build, summary="Experimental: frames by diffusion (DIAMOND)", presets=PRESETS)
