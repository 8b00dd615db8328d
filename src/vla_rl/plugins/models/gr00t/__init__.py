"""`gr00t`: GR00T N1.5 and N1.7 (NVIDIA 2025, arXiv 2503.14734), trained as in pi_RL (Chen et al. 2025, arXiv
2510.25889)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vla_rl.core.types import Context, Plugin
from vla_rl.plugins.models.gr00t.config import GrootConfig
from vla_rl.plugins.models.gr00t.opening import action_dim, check
from vla_rl.toolkit.models.adapters import LoRAConfig
from vla_rl.toolkit.models.flow_config import NoiseConfig, PrefixHeadConfig

if TYPE_CHECKING:
    from vla_rl.plugins.models.gr00t.policy import GrootPolicy


__all__ = ["GrootConfig", "LoRAConfig", "NoiseConfig", "PrefixHeadConfig", "build", "plugin"]


def build(config: GrootConfig, context: Context) -> GrootPolicy:
    """Return the spec's policy on this worker's device."""
    from vla_rl.plugins.models.gr00t.builder import build_policy

    return build_policy(config, context)


plugin = Plugin(
    config=GrootConfig,
    build=build,
    summary="GR00T N1.5 (2.4B) and N1.7 (3.1B): Qwen + diffusion transformer, sampled by Flow-SDE or Flow-Noise",
    extra="gr00t",
    action_dim=action_dim,
    check=check,
)
