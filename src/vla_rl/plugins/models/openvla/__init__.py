"""OpenVLA (Kim et al. 2024, arXiv 2406.09246) and OpenVLA-OFT (Kim et al. 2025, arXiv 2502.19645)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vla_rl.core.types import Context, Plugin
from vla_rl.plugins.models.openvla.checks import check
from vla_rl.plugins.models.openvla.config import OpenVLAARConfig, OpenVLAOFTConfig, OpenVLAValueHeadConfig, no_rl
from vla_rl.plugins.models.openvla.statistics import action_dim
from vla_rl.toolkit.models.adapters import LoRAConfig

if TYPE_CHECKING:
    from vla_rl.plugins.models.openvla.autoregressive import ARPolicy
    from vla_rl.plugins.models.openvla.policy import OFTPolicy
    from vla_rl.plugins.models.openvla.regression import L1Policy


__all__ = [
    "LoRAConfig",
    "OpenVLAARConfig",
    "OpenVLAOFTConfig",
    "OpenVLAValueHeadConfig",
    "build",
    "openvla",
    "openvla_oft",
]


def build(config: OpenVLAOFTConfig, context: Context) -> OFTPolicy | L1Policy:
    """The OFT policy of this spec on the device of this place in the run."""
    from vla_rl.plugins.models.openvla.builder import build_policy

    return build_policy(config, context)


def build_autoregressive(config: OpenVLAARConfig, context: Context) -> ARPolicy:
    """The plain OpenVLA policy of this spec on the device of this place in the run."""
    from vla_rl.plugins.models.openvla.builder import build_autoregressive

    return build_autoregressive(config, context)


openvla = Plugin(
    config=OpenVLAARConfig,
    build=build_autoregressive,
    summary="OpenVLA: DINOv2 + SigLIP + Llama, action tokens decoded one after another",
    extra="openvla",
    action_dim=action_dim,
    check=check,
)

openvla_oft = Plugin(
    config=OpenVLAOFTConfig,
    build=build,
    summary="OpenVLA-OFT: DINOv2 + SigLIP + Llama, parallel decoding into 256 action bins",
    extra="openvla",
    action_dim=action_dim,
    check=check,
    no_rl=no_rl,
)
