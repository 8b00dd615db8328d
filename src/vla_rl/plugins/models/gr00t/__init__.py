"""`gr00t`: GR00T N1.5 and N1.7 (NVIDIA 2025, arXiv 2503.14734), trained as in pi_RL (Chen et al. 2025, arXiv
2510.25889)."""

from __future__ import annotations

from vla_rl.core.declarations import ModelPlugin

plugin = ModelPlugin(
    config="vla_rl.plugins.models.gr00t.config:GrootConfig",
    build="vla_rl.plugins.models.gr00t.builder:build_policy",
    summary="GR00T N1.5 (2.4B) and N1.7 (3.1B): Qwen + diffusion transformer, sampled by Flow-SDE or Flow-Noise",
    extra="gr00t",
    action_dim="vla_rl.plugins.models.gr00t.folder:action_dim",
    relative_actions="vla_rl.plugins.models.gr00t.folder:relative_actions",
    check="vla_rl.plugins.models.gr00t.folder:check_checkpoint",
)
