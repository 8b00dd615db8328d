"""Policy of SmolVLA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers.models.smolvlm.modeling_smolvlm import SmolVLMEncoderLayer

from vla_rl.plugins.models.smolvla.folder import PUBLIC, SmolVLASizes, mlp_width
from vla_rl.plugins.models.smolvla.network import (
    CrossAttentionLayer,
    ExpertLayer,
    SmolVLAModule,
    TextLayer,
)
from vla_rl.toolkit.json_files import Record
from vla_rl.toolkit.models.flow.policy import FlowPolicy
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
