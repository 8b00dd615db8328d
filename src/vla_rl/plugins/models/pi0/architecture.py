"""Sizes of pi0 and its presets, as transformers' configuration."""

from __future__ import annotations

from attrs import frozen
from transformers import PI0Config

from vla_rl.core.errors import CheckpointError
from vla_rl.plugins.models.pi0.statistics import action_width, is_openpi, read_chunk_horizon
from vla_rl.toolkit.json_files import Record
from vla_rl.toolkit.models.checkpoints.files import check_even, check_multiples
from vla_rl.toolkit.models.flow.checkpoint import FlowShape
from vla_rl.toolkit.models.networks import text_sizes, vision_sizes

VARIANTS = {"gemma_300m": (1024, 4096), "gemma_2b": (2048, 16384)}
"""openpi's name of a Gemma tower -> its width and MLP width."""


@frozen(kw_only=True)
class PiSizes:
    """Sizes of the three towers. Defaults are the public model's."""

    text_width: int = 2048
    text_mlp: int = 16384
    expert_width: int = 1024
    expert_mlp: int = 4096
    depth: int = 18
    """Layers of the language model and of the expert, which attend to each other layer by layer."""
    heads: int = 8
    kv_heads: int = 1
    head_dim: int = 256
    vocab: int = 257152
    vision_width: int = 1152
    vision_mlp: int = 4304
    vision_depth: int = 27
    vision_heads: int = 16
    image_size: int = 224
    patch_size: int = 14

    def __attrs_post_init__(self) -> None:
        check_multiples(self, vision_width="vision_heads", heads="kv_heads", image_size="patch_size")
        check_even(self, "head_dim", "expert_width")

    @classmethod
    def from_variants(cls, raw: Record) -> PiSizes:
        """From `paligemma_variant` and `action_expert_variant` of either layout's config.json."""
        text, expert = (
            raw.get_text("paligemma_variant", "gemma_2b"),
            raw.get_text("action_expert_variant", "gemma_300m"),
        )
        for name in (text, expert):
            if name not in VARIANTS:
                raise CheckpointError(f"variant {name!r} of Gemma is not supported; there are: {', '.join(VARIANTS)}")
        (text_width, text_mlp), (expert_width, expert_mlp) = VARIANTS[text], VARIANTS[expert]
        return cls(text_width=text_width, text_mlp=text_mlp, expert_width=expert_width, expert_mlp=expert_mlp)


def name_variants(sizes: PiSizes) -> dict[str, str]:
    """Return the public names of these sizes; empty where they have none."""
    for text in ("gemma_2b", "gemma_300m"):
        names = {"paligemma_variant": text, "action_expert_variant": "gemma_300m"}
        if PiSizes.from_variants(Record(source="", data=names)) == sizes:
            return names
    return {}


PROMPTS = {"pi0": 48, "pi05": 200}
"""Most tokens of a prompt, where config.json does not say."""


def read_shape(raw: Record, model: str) -> FlowShape:
    """From either layout's config.json. Raises CheckpointError."""
    if is_openpi(raw.data):
        width = action_width(raw)
        return FlowShape(
            horizon=read_chunk_horizon(raw), action_dim=width, state_dim=width, tokenizer_max_length=PROMPTS[model]
        )
    return FlowShape.read_lerobot(raw, PROMPTS[model])


def network_config(sizes: PiSizes, shape: FlowShape) -> PI0Config:
    """Return transformers' configuration of a network with these sizes."""
    text = {"model_type": "gemma", **text_sizes(sizes, sizes.depth)}
    return PI0Config(
        vlm_config={
            "model_type": "paligemma",
            "text_config": text,
            "vision_config": {"model_type": "siglip_vision_model", "vision_use_head": False, **vision_sizes(sizes)},
            "projection_dim": sizes.text_width,
            "image_token_id": sizes.vocab,
        },
        dit_config={**text, "hidden_size": sizes.expert_width, "intermediate_size": sizes.expert_mlp},
        chunk_size=shape.horizon,
        max_action_dim=shape.action_dim,
        max_state_dim=shape.state_dim,
        min_period=shape.min_period,
        max_period=shape.max_period,
    )
