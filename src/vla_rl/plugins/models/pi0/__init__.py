"""`pi0` and `pi05`: pi0 (Black et al. 2024, arXiv 2410.24164) and pi0.5 (Black et al. 2025, arXiv 2504.16054), trained
as in pi_RL (Chen et al. 2025, arXiv 2510.25889)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vla_rl.core.types import Context, Plugin
from vla_rl.plugins.models.pi0.config import Pi0Config, Pi05Config, Pi05HeadConfig
from vla_rl.plugins.models.pi0.statistics import action_dim, check, default_chunk
from vla_rl.toolkit.models.adapters import LoRAConfig
from vla_rl.toolkit.models.flow_config import NoiseConfig, ValueHeadConfig

if TYPE_CHECKING:
    from vla_rl.toolkit.models.flow_policy import FlowPolicy


__all__ = [
    "LoRAConfig",
    "NoiseConfig",
    "Pi0Config",
    "Pi05Config",
    "Pi05HeadConfig",
    "ValueHeadConfig",
    "build",
    "pi05",
    "plugin",
]


def build(config: Pi0Config | Pi05Config, context: Context) -> FlowPolicy:
    """Return the spec's policy on this worker's device."""
    from vla_rl.plugins.models.pi0.builder import build_policy

    return build_policy(config, context)


plugin = Plugin(
    config=Pi0Config,
    build=build,
    summary="pi0: PaliGemma + flow-matching action expert, sampled by Flow-SDE or Flow-Noise",
    extra="pi0",
    action_dim=action_dim,
    default_chunk=default_chunk,
    check=check,
)
pi05 = Plugin(
    config=Pi05Config,
    build=build,
    summary="pi0.5: pi0 with the state in the prompt and norms that the time steers",
    extra="pi0",
    action_dim=action_dim,
    default_chunk=default_chunk,
    check=check,
)
