"""PPO with a critic on the VLA's hidden state, at chunk or action level."""

from __future__ import annotations

from vla_rl.core.declarations import AlgorithmPlugin

plugin = AlgorithmPlugin(
    config="vla_rl.plugins.algorithms.ppo.config:PPOConfig",
    build="vla_rl.plugins.algorithms.ppo.impl:PPO",
    summary="proximal policy optimisation with a critic",
    presets="vla_rl.plugins.algorithms.ppo.config:PRESETS",
)
