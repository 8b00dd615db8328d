"""Keys of `srpo` and of its hook `srpo_report`. Light: specs are read with them."""

from __future__ import annotations

from typing import Literal

from attrs import field, frozen
from attrs import validators as v

from vla_rl.toolkit.algorithms.settings import ClipSettings, CorrectionSettings, GroupSettings, SuccessFilter


@frozen(kw_only=True, slots=False)
class EncoderSettings:
    """Of the video encoder."""

    encoder: str = field(validator=v.min_len(1))
    """V-JEPA 2 checkpoint: a folder (config.json, *.safetensors), a name of the Hugging Face hub such as
    facebook/vjepa2-vitg-fpc64-384, "builtin:tabletop" (small, taught on the wrist camera of the built-in simulator), or
    "tiny" (small and random, for tests)."""
    frames: int = field(default=64, validator=v.ge(2))
    """Frames seen of each trajectory, evenly from first to last; a multiple of the encoder's tubelet (2)."""
    image_size: int | None = field(default=None, validator=v.optional(v.ge(16)))
    """Side of the crop in pixels, a multiple of the encoder's patch (16); none: as the checkpoint was trained."""
    camera: str | None = None
    """Whose frames are embedded; none: the simulator's first camera."""
    encoder_batch: int = field(default=8, validator=v.ge(1))
    """Trajectories of one forward pass."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of the encoder's matrix products (autocast); weights and embeddings are float32 in any case."""
    device: str | None = None
    """Of the encoder, such as cuda:1; none: that of the policy's worker."""


@frozen(kw_only=True, slots=False)
class RewardSettings:
    """Of a failure's reward: reward_scale * sigmoid(steepness * (midpoint - d)), d in [0, 1] its relative distance."""

    cluster_eps: float = field(default=0.5, validator=v.gt(0))
    """DBSCAN: distance within which two successes are neighbours, each dimension scaled to unit variance."""
    cluster_min_samples: int = field(default=2, validator=v.ge(1))
    """DBSCAN: successes in a neighbourhood, its centre included, that make a cluster."""
    reward_scale: float = field(default=0.6, validator=[v.gt(0), v.le(1)])
    """Bound of a failure's reward; a success has 1."""
    steepness: float = field(default=10.0, validator=v.gt(0))
    """How sharply near and far failures are told apart."""
    midpoint: float = field(default=0.5, validator=[v.ge(0), v.le(1)])
    """Relative distance that earns half the bound."""


@frozen(kw_only=True)
class SRPOConfig(EncoderSettings, RewardSettings, GroupSettings, ClipSettings, CorrectionSettings):
    filter: SuccessFilter | None = field(factory=SuccessFilter)
    """Success-rate filter of groups, applied before rewards are shaped; null: off."""
    correction: Literal["none", "decoupled", "truncated"] = "none"
    """How data of older versions count, as in ppo; v-trace corrects values, and there are none here."""


SIIRL = {
    "frames": 64,
    "image_size": 384,
    "dtype": "float16",
    "cluster_eps": 0.5,
    "cluster_min_samples": 2,
    "reward_scale": 0.6,
    "steepness": 10.0,
    "midpoint": 0.5,
    "log_prob": "token",
    "clip_low": 0.2,
    "clip_high": 0.28,
    "dual_clip": 3.0,
    "entropy_coef": 0.0,
    "kl_coef": 0.0,
    "aggregation": "step-mean",
    "baseline": "mean",
    "normalize_by_std": True,
    "filter": {"lower": 0.1, "upper": 0.9},
    "filter_truncated": False,
}
"""siiRL's recipe for LIBERO, but for the encoder's place; the rest of it is in rollout and train (see the README)."""


@frozen(kw_only=True)
class ReportConfig:
    every: int = field(default=1, validator=v.ge(1))
    """Training steps between files."""
    plot: bool = True
    """Draw reward against distance beside the numbers."""
