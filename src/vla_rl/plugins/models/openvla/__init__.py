"""OpenVLA-OFT with the discrete action head (Kim et al. 2025, arXiv 2502.19645; SimpleVLA-RL, arXiv 2509.09674)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vla_rl.core.types import Context, Plugin
from vla_rl.plugins.models.openvla.config import LoRAConfig, OpenVLAOFTConfig, ValueHeadConfig
from vla_rl.plugins.models.openvla.statistics import action_dim

if TYPE_CHECKING:
    from vla_rl.plugins.models.openvla.policy import OFTPolicy


__all__ = ["LoRAConfig", "OpenVLAOFTConfig", "ValueHeadConfig", "build", "openvla_oft"]


def build(config: OpenVLAOFTConfig, context: Context) -> OFTPolicy:
    """The policy of this spec on the device of this place in the run."""
    from vla_rl.plugins.models.openvla.builder import build_policy

    return build_policy(config, context)


openvla_oft = Plugin(
    config=OpenVLAOFTConfig,
    build=build,
    summary="OpenVLA-OFT: DINOv2 + SigLIP + Llama, parallel decoding into 256 action bins",
    extra="openvla",
    action_dim=action_dim,
)
