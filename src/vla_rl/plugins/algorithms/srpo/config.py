"""Settings of `srpo` and of its hook `srpo_report`."""

from __future__ import annotations

from typing import Literal

from attrs import field, frozen
from attrs import validators as v

from vla_rl.core.paths import read_table
from vla_rl.core.types import Requirements
from vla_rl.toolkit.algorithms.policy_gradient import (
    ClipSettings,
    CorrectionSettings,
    Decoupled,
    GroupSettings,
    SuccessFilter,
    Truncated,
)

PRESETS = read_table(__file__, "presets.yaml")
"""Preset -> its keys, with their sources."""


@frozen(kw_only=True, slots=False)
class EncoderSettings:
    """Keys of the video encoder."""

    encoder: str = field(validator=v.min_len(1))
    """V-JEPA 2 checkpoint: a folder (config.json, *.safetensors), a name of the Hugging Face hub such as
    facebook/vjepa2-vitg-fpc64-384, "builtin:tabletop" (small, trained on the wrist camera of the built-in simulator),
    or "tiny" (small and random, for tests)."""
    frames: int = field(default=64, validator=v.ge(2))
    """Frames per trajectory that are embedded, evenly spaced from first to last, 2 or more; a multiple of the encoder's
    tubelet size (2)."""
    image_size: int | None = field(default=None, validator=v.optional(v.ge(16)))
    """Side of the crop in pixels, 16 or more, a multiple of the encoder's patch size (16); null: the checkpoint's."""
    camera: str | None = None
    """Camera whose frames are embedded; null: the simulator's first camera."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of the encoder's matrix products (autocast); weights and embeddings are float32 in any case."""
    device: str | None = None
    """Device of the encoder, such as cuda:1; null: the device of the policy worker."""


@frozen(kw_only=True, slots=False)
class RewardSettings:
    """Keys of a failure's reward: reward_scale * sigmoid(10 * (0.5 - d)), d in [0, 1] its relative distance."""

    cluster_eps: float = field(default=0.5, validator=v.gt(0))
    """DBSCAN's eps, above 0: distance within which two successes are neighbours, each dimension scaled to unit
    variance."""
    reward_scale: float = field(default=0.6, validator=[v.gt(0), v.le(1)])
    """Upper bound of a failure's reward, above 0 and at most 1; a success has 1."""


@frozen(kw_only=True)
class SRPOConfig(EncoderSettings, RewardSettings, GroupSettings, ClipSettings, CorrectionSettings):
    """Spec keys of `srpo`, with those of its five base classes."""

    filter: SuccessFilter | None = field(factory=SuccessFilter)
    """Success-rate filter of groups, applied before rewards are shaped; null: off."""
    correction: Decoupled | Truncated | None = None
    """Off-policy correction for samples of older policy versions, as in `ppo`; null: none. There is no v-trace: it
    corrects values, and SRPO has no critic."""

    @property
    def needs(self) -> Requirements:
        """Groups, and frames for the encoder."""
        return super().needs | Requirements(frames=True)

    @property
    def scope_reason(self) -> str:
        """Rewards that depend on the whole step, whatever the keys say."""
        return "failures are compared with all successes of the step; choose grpo"


@frozen(kw_only=True)
class ReportConfig:
    """Spec keys of the hook `srpo_report`."""

    every: int = field(default=1, validator=v.ge(1))
    """Training steps between two files, 1 or more."""
    plot: bool = True
    """Also plot reward against distance."""
