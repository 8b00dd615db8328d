"""`openvla` and `openvla_oft`: OpenVLA (Kim et al. 2024, arXiv 2406.09246) and OpenVLA-OFT (Kim et al. 2025, arXiv
2502.19645)."""

from __future__ import annotations

from vla_rl.core.declarations import ModelPlugin

openvla = ModelPlugin(
    config="vla_rl.plugins.models.openvla.config:OpenVLAARConfig",
    build="vla_rl.plugins.models.openvla.builder:build_autoregressive",
    summary="OpenVLA: DINOv2 + SigLIP + Llama, action tokens decoded one after another",
    extra="openvla",
    action_dim="vla_rl.plugins.models.openvla.statistics:action_dim",
    check="vla_rl.plugins.models.openvla.checks:check_checkpoint",
)
openvla_oft = ModelPlugin(
    config="vla_rl.plugins.models.openvla.config:OpenVLAOFTConfig",
    build="vla_rl.plugins.models.openvla.builder:build_policy",
    summary="OpenVLA-OFT: DINOv2 + SigLIP + Llama, parallel decoding into 256 action bins",
    extra="openvla",
    action_dim="vla_rl.plugins.models.openvla.statistics:action_dim",
    check="vla_rl.plugins.models.openvla.checks:check_checkpoint",
    no_rl="vla_rl.plugins.models.openvla.config:no_rl",
)
