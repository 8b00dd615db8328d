"""What the tests of the OpenVLA plugin share."""

from __future__ import annotations

import json
from typing import Any

import attrs
import numpy as np
import torch
from safetensors.torch import load_file

from reference_files import reference
from vla_rl.core.contexts import ModelContext
from vla_rl.core.types import EnvInfo, Observation
from vla_rl.plugins.models.openvla.architecture import OpenVLAConfig, dinov2_spec, siglip_spec
from vla_rl.plugins.models.openvla.builder import build_policy
from vla_rl.plugins.models.openvla.config import OpenVLAOFTConfig
from vla_rl.plugins.models.openvla.modeling import OpenVLAForActionPrediction, hollow_model
from vla_rl.plugins.models.openvla.policy import OFTPolicy
from vla_rl.testing import synthetic
from vla_rl.toolkit.models.networks import allocate_network, load_weights

ENV = synthetic.env_info(bounds=((-1.0, 1.0),))
CHUNK = 4


def policy(env: EnvInfo = ENV, context: dict[str, Any] | None = None, **config: Any) -> OFTPolicy:
    if "checkpoint" not in config:
        config.setdefault("preset", "fast")
    return build_policy(OpenVLAOFTConfig(**config), ModelContext(**{"env": env, "chunk": CHUNK, **(context or {})}))


def observation(rows: int, env: EnvInfo = ENV) -> Observation:
    return synthetic.observation(env, rows)


def expert(rows: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).uniform(-1, 1, (rows, CHUNK, ENV.action_dim)).astype(np.float32)


def tiny_config(**changes: Any) -> OpenVLAConfig:
    raw = json.loads(reference("openvla", "config.json").read_text())
    sizes = json.loads(reference("openvla", "tiny_overrides.json").read_text())
    specs = []
    for make, name in ((dinov2_spec, "featurizer"), (siglip_spec, "fused_featurizer")):
        spec = {key: sizes[name][key] for key in ("embed_dim", "depth", "num_heads", "mlp_hidden")}
        specs.append(attrs.asdict(make(**spec, patch_size=sizes["patch_size"])))
    return OpenVLAConfig.from_dict(raw | {"vision_specs": specs} | changes)


def empty(config: OpenVLAConfig) -> OpenVLAForActionPrediction:
    """A network of zeros."""
    model = hollow_model(config)
    allocate_network(model, torch.device("cpu"), torch.float32, "test")
    return model


def network() -> OpenVLAForActionPrediction:
    """The tiny network of the original code's numbers."""
    model = empty(tiny_config())
    path = reference("openvla", "model.safetensors")
    load_weights(model, load_file(path), path)
    return model.eval()
