"""`pi0` and `pi05`: pi0 (Black et al. 2024, arXiv 2410.24164) and pi0.5 (Black et al. 2025, arXiv 2504.16054), trained
as in pi_RL (Chen et al. 2025, arXiv 2510.25889)."""

from __future__ import annotations

from vla_rl.core.declarations import ModelPlugin

plugin = ModelPlugin(
    config="vla_rl.plugins.models.pi0.config:Pi0Config",
    build="vla_rl.plugins.models.pi0.builder:build_policy",
    summary="pi0: PaliGemma + flow-matching action expert, sampled by Flow-SDE or Flow-Noise",
    extra="pi0",
    action_dim="vla_rl.plugins.models.pi0.statistics:action_dim",
    default_chunk="vla_rl.plugins.models.pi0.statistics:default_chunk",
    relative_actions="vla_rl.plugins.models.pi0.statistics:relative_actions",
    check="vla_rl.plugins.models.pi0.statistics:check_checkpoint",
)
pi05 = ModelPlugin(
    config="vla_rl.plugins.models.pi0.config:Pi05Config",
    build="vla_rl.plugins.models.pi0.builder:build_policy",
    summary="pi0.5: pi0 with the state in the prompt and norms that the time steers",
    extra="pi0",
    action_dim="vla_rl.plugins.models.pi0.statistics:action_dim",
    default_chunk="vla_rl.plugins.models.pi0.statistics:default_chunk",
    relative_actions="vla_rl.plugins.models.pi0.statistics:relative_actions",
    check="vla_rl.plugins.models.pi0.statistics:check_checkpoint",
)
