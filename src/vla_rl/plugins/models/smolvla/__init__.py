"""`smolvla`: SmolVLA (Shukor et al. 2025, arXiv 2506.01844), trained as in pi_RL (Chen et al. 2025, arXiv
2510.25889)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vla_rl.core.types import Context, Plugin
from vla_rl.plugins.models.smolvla.config import SmolVLAConfig
from vla_rl.plugins.models.smolvla.folder import action_dim, check, default_chunk
from vla_rl.toolkit.models.adapters import LoRAConfig
from vla_rl.toolkit.models.flow_config import NoiseConfig, PrefixHeadConfig

if TYPE_CHECKING:
    from vla_rl.plugins.models.smolvla.policy import SmolVLAPolicy


__all__ = ["LoRAConfig", "NoiseConfig", "PrefixHeadConfig", "SmolVLAConfig", "build", "plugin"]


def build(config: SmolVLAConfig, context: Context) -> SmolVLAPolicy:
    """Return the spec's policy on this worker's device."""
    from vla_rl.plugins.models.smolvla.builder import build_policy

    return build_policy(config, context)


plugin = Plugin(
    config=SmolVLAConfig,
    build=build,
    summary="SmolVLA: half of SmolVLM2 + flow-matching action expert (450M), sampled by Flow-SDE or Flow-Noise",
    extra="smolvla",
    action_dim=action_dim,
    default_chunk=default_chunk,
    check=check,
)
