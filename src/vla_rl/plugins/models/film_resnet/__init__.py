"""`film_resnet`: a small policy for debugging a simulator and for training on a CPU, one FiLM-conditioned residual
network per camera."""

from __future__ import annotations

from vla_rl.core.declarations import ModelPlugin

plugin = ModelPlugin(
    config="vla_rl.plugins.models.film_resnet.config:FilmResnetConfig",
    build="vla_rl.plugins.models.film_resnet.builder:build_policy",
    summary="small residual networks, FiLM by the instruction, action bins; trained from random weights on a CPU",
    action_dim="vla_rl.plugins.models.film_resnet.checkpoint:action_dim",
    check="vla_rl.plugins.models.film_resnet.checkpoint:check_checkpoint",
)
