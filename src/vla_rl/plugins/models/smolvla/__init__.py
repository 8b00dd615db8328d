"""`smolvla`: SmolVLA (Shukor et al. 2025, arXiv 2506.01844), trained as in pi_RL (Chen et al. 2025, arXiv
2510.25889)."""

from __future__ import annotations

from vla_rl.core.declarations import ModelPlugin

plugin = ModelPlugin(
    config="vla_rl.plugins.models.smolvla.config:SmolVLAConfig",
    build="vla_rl.plugins.models.smolvla.builder:build_policy",
    summary="SmolVLA: half of SmolVLM2 + flow-matching action expert (450M), sampled by Flow-SDE or Flow-Noise",
    extra="smolvla",
    action_dim="vla_rl.plugins.models.smolvla.folder:action_dim",
    default_chunk="vla_rl.plugins.models.smolvla.folder:default_chunk",
    relative_actions="vla_rl.plugins.models.smolvla.folder:relative_actions",
    check="vla_rl.plugins.models.smolvla.folder:check_checkpoint",
)
