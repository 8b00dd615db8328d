"""pi0 (Black et al. 2024, arXiv 2410.24164), trained as in pi_RL (Chen et al. 2025, arXiv 2510.25889)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vla_rl.core.types import Context, Plugin
from vla_rl.plugins.models.pi0.config import Pi0Config
from vla_rl.plugins.models.pi0.statistics import action_dim, check
from vla_rl.toolkit.models.adapters import LoRAConfig
from vla_rl.toolkit.models.flow_config import NoiseConfig, ValueHeadConfig

if TYPE_CHECKING:
    from vla_rl.plugins.models.pi0.policy import Pi0Policy


__all__ = ["LoRAConfig", "NoiseConfig", "Pi0Config", "ValueHeadConfig", "build", "plugin"]


def build(config: Pi0Config, context: Context) -> Pi0Policy:
    """The policy of this spec on the device of this place in the run."""
    from vla_rl.plugins.models.pi0.builder import build_policy

    return build_policy(config, context)


plugin = Plugin(
    config=Pi0Config,
    build=build,
    summary="pi0: PaliGemma + flow-matching action expert, sampled by Flow-SDE or Flow-Noise",
    extra="pi0",
    action_dim=action_dim,
    check=check,
)
