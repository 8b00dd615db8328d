"""GIPO (AcceRL, arXiv:2603.18464): an actor-critic that damps off-policy samples with Gaussian trust weights instead of
clipping them."""

from __future__ import annotations

from vla_rl.core.declarations import AlgorithmPlugin

PAPER = {  # AcceRL 3.3, eq. 3-10
    "log_prob": "token",
    "advantage": "chunk",
    "gamma": 0.99,
    "lam": 0.95,
    "normalize_advantages": "population",
    "sigma": 0.5,
    "behaviour_kl_coef": 0.0,
    "recompute_values": True,
    "value_clip": None,
    "huber_delta": None,
    "time_limit": "bootstrap",
    "aggregation": "step-mean",
}
CODE = {**PAPER, "time_limit": "terminal", "value_coef": 1.0, "recompute_values": False}
PRESETS = {
    "paper": PAPER,
    "accerl-minimal": {**CODE, "entropy_coef": 0.01},  # its code, stand-alone version
    "accerl-full": {**CODE, "sigma": 1.0, "behaviour_kl_coef": 0.1, "entropy_coef": 0.0},  # its code, full version
}

plugin = AlgorithmPlugin(
    config="vla_rl.plugins.algorithms.gipo.config:GIPOConfig",
    build="vla_rl.plugins.algorithms.gipo.impl:GIPO",
    summary="Gaussian-trust policy optimisation for old samples",
    presets=PRESETS,
)
