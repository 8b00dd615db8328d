"""Policy of SmolVLA, built from a spec's config and a worker's context; what does not fit is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers.models.smolvlm.modeling_smolvlm import SmolVLMEncoderLayer

from vla_rl.core.contexts import ModelContext
from vla_rl.plugins.models.smolvla.config import SmolVLAConfig
from vla_rl.plugins.models.smolvla.folder import PUBLIC, SmolVLASizes, mlp_width, read_config
from vla_rl.plugins.models.smolvla.network import (
    CrossAttentionLayer,
    ExpertLayer,
    SmolVLAModule,
    SmolVLANetwork,
    TextLayer,
    empty_network,
    stays_float32,
)
from vla_rl.toolkit.json_files import Record
from vla_rl.toolkit.models.checkpoints.files import read_sizes
from vla_rl.toolkit.models.checkpoints.lerobot import LEROBOT, check_actions, read_statistics
from vla_rl.toolkit.models.flow.build import TINY, FlowBuilder, TrainedParts
from vla_rl.toolkit.models.flow.checkpoint import ARCHITECTURE, FlowCheckpoint, FlowShape, open_folder
from vla_rl.toolkit.models.flow.fit import FlowIOAdapter
from vla_rl.toolkit.models.flow.network import Heads, initialise_flow
from vla_rl.toolkit.models.flow.policy import FlowPolicy
from vla_rl.toolkit.models.images import CornerImages
from vla_rl.toolkit.models.prompts import PaddedPrompts


def prompt_text(instruction: str) -> str:
    """Return lerobot's prompt: the instruction, ending in a newline."""
    return instruction if instruction.endswith("\n") else f"{instruction}\n"


class SmolVLAPrompts(PaddedPrompts):
    """Prompts by SmolVLM2's tokenizer: the instruction and a newline."""

    def prompt_ids(self, instruction: str) -> list[int]:
        return list(self.tokenizer.encode(prompt_text(instruction)).ids)


class SmolVLAPolicy(FlowPolicy):
    """SmolVLA's policy; `builder.build_policy` creates it."""

    module: SmolVLAModule
    name = "smolvla"
    blocks = (SmolVLMEncoderLayer, TextLayer, ExpertLayer, CrossAttentionLayer)
    exact_time = True

    def save(self, folder: Path) -> None:
        """Save in lerobot's layout, with adapters merged into the weights."""
        sizes = self.checkpoint.sizes
        self.save_lerobot(
            Path(folder),
            self.checkpoint,
            "smolvla",
            _public_keys(sizes),
            prompt=("smolvla_new_line_processor",),
            tokenizer=PUBLIC,
            pad_language_to="longest",
            resize_imgs_with_padding=[sizes.image_size, sizes.image_size],
        )


def _public_keys(sizes: SmolVLASizes) -> dict[str, Any]:
    """Return lerobot's keys for these sizes; empty where the vision-language model is not the public one."""
    keys = {
        "vlm_model_name": PUBLIC,
        "num_vlm_layers": sizes.depth,
        "expert_width_multiplier": sizes.expert_width / sizes.text_width,
        "self_attn_every_n_layers": sizes.alternate,
    }
    return (
        keys
        if sizes.expert_mlp == mlp_width(sizes.expert_width)
        and SmolVLASizes.of_config(Record(source="config.json", data=keys)) == sizes
        else {}
    )


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
