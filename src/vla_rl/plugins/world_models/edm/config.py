"""Settings of `edm`."""

from __future__ import annotations

from typing import Any

from attrs import field, frozen, validators

from vla_rl.core.paths import read_table

PRESETS = read_table(__file__, "presets.yaml")
"""Preset -> its keys, with their sources."""
RATE: Any = validators.and_(validators.gt(0.0), validators.le(10.0))
DECAY: Any = validators.and_(validators.ge(0.0), validators.le(100.0))
"""Bounds as `train` has them: beyond, nothing is learnt."""
LEVELS: Any = validators.deep_iterable(validators.ge(1), validators.min_len(1))


@frozen(kw_only=True)
class EDMConfig:
    """Spec keys of the world model `edm`."""

    history: int = field(default=4, validator=validators.ge(1))
    """K, 1 or more: number of past frames and action chunks that a prediction is conditioned on."""
    fold: int = field(default=1, validator=validators.ge(1))
    """Pixel-unshuffle factor, 1 or more: squares of fold x fold pixels become channels, which makes the UNet cheaper.
    Both sides of an image must be multiples of it; 1: off."""
    channels: tuple[int, ...] = field(default=(64, 64, 64, 64), validator=LEVELS)
    depths: tuple[int, ...] = field(default=(2, 2, 2, 2), validator=LEVELS)
    """Channels and residual blocks of each level of the UNet, finest level first; one of each per level."""
    condition: int = field(default=256, validator=validators.ge(8))
    """Size of the conditioning vector that embeds noise level, actions and state, 8 or more; a multiple of `history`
    and of 2."""
    evaluations: int = field(default=3, validator=validators.ge(1))
    """Denoiser evaluations (sampler steps) per predicted frame, 1 or more; 1 is enough where the next frame is
    deterministic."""
    residual: bool = False
    """Predict mixing weights of three layers (shifted scene, shifted robot, mean frame) and a residual, instead of the
    frame itself."""
    sigma_loc: float = field(default=-0.4, validator=validators.and_(validators.ge(-20.0), validators.le(20.0)))
    sigma_scale: float = field(default=1.2, validator=RATE)
    """Mean and standard deviation of log sigma, the logarithm of the noise level, in training."""
    changed_weight: float = field(default=0.0, validator=validators.and_(validators.ge(0.0), validators.le(1e6)))
    """Additional loss weight, 0 or more, of pixels that change in the chunk: they count 1 + changed_weight times."""
    heads: int = field(default=16, validator=validators.ge(8))
    """Channels, 8 or more, of the network that predicts the next state and the outcome of a chunk."""
    precision: str = field(default="float32", validator=validators.in_(("float32", "bfloat16")))
    """Precision of the denoiser's matrix products. bfloat16 is faster where the hardware supports it: GPUs, CPUs with
    AMX."""
    lr: float = field(default=1e-4, validator=RATE)
    heads_lr: float = field(default=1e-4, validator=RATE)
    weight_decay: float = field(default=1e-2, validator=DECAY)
    heads_weight_decay: float = field(default=0.1, validator=DECAY)
    warm_up: int = field(default=100, validator=validators.and_(validators.ge(0), validators.le(1_000_000)))
    """Learning rates and weight decays (AdamW) of the denoiser and of the heads; `warm_up` is the number of updates
    over which both rates rise linearly."""

    def __attrs_post_init__(self) -> None:
        if len(self.channels) != len(self.depths):
            raise ValueError(f"{len(self.channels)} channels and {len(self.depths)} depths; give one of each a level")
        if self.condition % self.history or self.condition % 2:
            raise ValueError(f"condition {self.condition} must be a multiple of history {self.history}, and of 2")
