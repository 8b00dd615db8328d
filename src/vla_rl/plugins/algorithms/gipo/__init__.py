"""GIPO (AcceRL, arXiv:2603.18464): an actor-critic that damps off-policy samples with Gaussian trust weights instead of
clipping them."""

from __future__ import annotations

from pathlib import Path

import yaml

from vla_rl.core.declarations import AlgorithmPlugin

plugin = AlgorithmPlugin(
    config="vla_rl.plugins.algorithms.gipo.config:GIPOConfig",
    build="vla_rl.plugins.algorithms.gipo.impl:GIPO",
    summary="Gaussian-trust policy optimisation for old samples",
    presets=yaml.safe_load(Path(__file__).with_name("presets.yaml").read_text("utf-8")),
)
