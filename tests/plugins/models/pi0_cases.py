"""What the tests of the pi0 plugin share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from vla_rl.core.contexts import ModelContext
from vla_rl.core.types import EnvInfo, Observation
from vla_rl.plugins.models.pi0.architecture import PiSizes
from vla_rl.plugins.models.pi0.builder import Pi0Policy, build_policy, prompt_text
from vla_rl.plugins.models.pi0.config import Pi0Config
from vla_rl.testing import synthetic
from vla_rl.toolkit.models.prompts import train_tokenizer

ENV = synthetic.env_info(bounds=((-1.0, 1.0),))
CHUNK = 4
REFERENCE_SIZES = PiSizes(
    text_width=64, text_mlp=128, expert_width=32, expert_mlp=64, depth=3, heads=8, kv_heads=1, head_dim=16, vocab=512,
    vision_width=48, vision_mlp=96, vision_depth=2, vision_heads=4, image_size=28, patch_size=14,
)  # fmt: skip
"""Sizes of the network behind the reference data."""


def policy(env: EnvInfo = ENV, context: dict[str, Any] | None = None, **config: Any) -> Pi0Policy:
    if "checkpoint" not in config:
        config.setdefault("preset", "tiny")
    return build_policy(Pi0Config(**config), ModelContext(**{"env": env, "chunk": CHUNK, **(context or {})}))


def observation(rows: int, env: EnvInfo = ENV) -> Observation:
    return synthetic.observation(env, rows)


def expert(rows: int, seed: int = 0, chunk: int = CHUNK) -> Any:
    return np.random.default_rng(seed).uniform(-1, 1, (rows, chunk, ENV.action_dim)).astype(np.float32)


@torch.no_grad()
def flow_error(model: Pi0Policy, obs: Observation, actions: Any, draws: int = 32) -> float:
    """Mean squared error of the velocity over times and noise that are always the same. What `imitation_loss` draws
    depends on the weights to the last bit, so its values are other ones with other kernels."""
    rng, target = torch.Generator().manual_seed(0), torch.from_numpy(actions)
    prefix, state = model._encode_observation(obs)
    errors = [
        model.module.flow_matching(
            prefix, state, target, torch.randn(target.shape, generator=rng), torch.rand(len(target), generator=rng)
        ).mean()
        for _ in range(draws)
    ]
    return float(torch.stack(errors).mean())


OPENPI_STATS = {
    "actions": {"mean": [0.1, -0.2, 0.3], "std": [0.5, 0.4, 0.2]},
    "state": {"mean": [1.0, 2.0, 3.0, 4.0, *[0.0] * 4], "std": [1.0, 0.5, 0.25, 2.0, *[0.0] * 4]},  # padded to 8
}


def openpi_folder(folder: Path, weights: Path, stats: dict[str, Any] | None = OPENPI_STATS) -> Path:
    """A small checkpoint as openpi writes one, with the two files that ours need for small networks."""
    folder.mkdir()
    save_file(load_file(weights), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"action_dim": 8, "action_horizon": 10}))
    (folder / "architecture.json").write_text(json.dumps(attrs.asdict(REFERENCE_SIZES)))
    train_tokenizer((task.instruction for task in ENV.tasks), prompt_text, REFERENCE_SIZES.vocab).save(
        str(folder / "tokenizer.json")
    )
    if stats is not None:
        assets = folder / "assets" / "physical-intelligence" / "libero"
        assets.mkdir(parents=True)
        (assets / "norm_stats.json").write_text(json.dumps({"norm_stats": stats}))
    return folder
