"""PPO with a critic on the VLA's hidden state, at chunk or action level."""

from __future__ import annotations

from vla_rl.core.declarations import AlgorithmPlugin

PAPER = {  # RLinf-VLA 4.3.2 and Table 3: values of single actions, where a chunk has several
    "log_prob": "token",
    "advantage": "action",
    "gamma": 0.99,
    "lam": 0.95,
    "normalize_advantages": "unbiased",
    "clip_low": 0.2,
    "clip_high": 0.28,
    "value_clip": 0.2,
    "huber_delta": 10.0,
    "aggregation": "step-mean",
    "entropy_coef": 0.0,
}
RLINF = {**PAPER, "value_coef": 1.0}
ASYNC = {  # its maniskill_async_ppo_openvla
    **RLINF,
    "log_prob": "action",
    "clip_low": 0.3,
    "clip_high": 0.3,
    "dual_clip": 3.0,
    "correction": {"type": "decoupled", "proximal": "interpolate", "threshold": 2.0},
}
PRESETS = {"paper": PAPER, "rlinf": RLINF, "rlinf-async": ASYNC}  # rlinf: its code

plugin = AlgorithmPlugin(
    config="vla_rl.plugins.algorithms.ppo.config:PPOConfig",
    build="vla_rl.plugins.algorithms.ppo.impl:PPO",
    summary="proximal policy optimisation with a critic",
    presets=PRESETS,
)
