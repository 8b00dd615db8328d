"""Builds the policy from a spec's config and a worker's context; refuses what does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vla_rl.core.contexts import ModelContext
from vla_rl.plugins.models.smolvla.config import SmolVLAConfig
from vla_rl.plugins.models.smolvla.folder import SmolVLASizes, read_config
from vla_rl.plugins.models.smolvla.network import SmolVLAModule, SmolVLANetwork, empty_network, stays_float32
from vla_rl.plugins.models.smolvla.policy import SmolVLAPolicy, SmolVLAPrompts, prompt_text
from vla_rl.toolkit.models.checkpoints.files import read_sizes
from vla_rl.toolkit.models.checkpoints.lerobot import LEROBOT, check_actions, read_statistics
from vla_rl.toolkit.models.flow.build import TINY, FlowBuilder, TrainedParts
from vla_rl.toolkit.models.flow.checkpoint import ARCHITECTURE, FlowCheckpoint, FlowShape, open_folder
from vla_rl.toolkit.models.flow.fit import FlowIOAdapter
from vla_rl.toolkit.models.flow.network import Heads, initialise_flow
from vla_rl.toolkit.models.images import CornerImages


def build_policy(config: SmolVLAConfig, context: ModelContext) -> SmolVLAPolicy:
    """Build the policy. Raise CheckpointError or MismatchError when checkpoint, spec and simulator do not fit."""
    policy: SmolVLAPolicy = SmolVLABuilder(config, context).build()
    return policy


class SmolVLABuilder(FlowBuilder):
    """Builds SmolVLA's policy."""

    policy = SmolVLAPolicy
    prompts = SmolVLAPrompts
    images = CornerImages
    presets = {
        "tiny": SmolVLASizes(**TINY, expert_width=64, expert_mlp=128, depth=2, kv_heads=2, patch_size=8, shuffle=2),
        "full": SmolVLASizes(),
    }
    stays_float32 = staticmethod(stays_float32)
    prompt_text = staticmethod(prompt_text)

    def open_checkpoint(self, folder: Path) -> FlowCheckpoint:
        raw = read_config(folder)
        architecture = folder / ARCHITECTURE
        check_actions(folder, raw.data)
        return open_folder(
            folder,
            raw.data,
            sizes=read_sizes(architecture, SmolVLASizes) if architecture.is_file() else SmolVLASizes.of_config(raw),
            shape=FlowShape.read_lerobot(raw),
            statistics=self.measured or read_statistics(folder, raw.data),
            tokenizer=self.config.tokenizer,
            slots=self.slots,
            open_names=lambda names: {name: name.removeprefix(LEROBOT) for name in names},
        )

    def empty_network(self, checkpoint: FlowCheckpoint) -> SmolVLANetwork:
        return empty_network(checkpoint.sizes, checkpoint.shape)

    def initialise_network(self, network: Any, seed: int) -> None:
        initialise_flow(network, seed, rms=1.0)

    def find_parts(self, network: SmolVLANetwork) -> TrainedParts:
        vlm = network.vlm_with_expert.vlm
        return TrainedParts(vlm=vlm, language=vlm.model.text_model, state=network.state_proj.weight)

    def make_module(self, network: Any, fit: FlowIOAdapter, prompts: Any, heads: Heads) -> SmolVLAModule:
        shape = fit.checkpoint.shape
        return SmolVLAModule(network, (shape.horizon, shape.action_dim), *heads)
