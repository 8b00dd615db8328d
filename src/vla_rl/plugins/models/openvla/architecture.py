"""Sizes of OpenVLA: its config.json, the two vision transformers by their timm names, and the random presets."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
from attrs import frozen
from transformers import LlamaConfig, PreTrainedConfig
from transformers.activations import ACT2FN

from vla_rl.core.errors import CheckpointError, did_you_mean
from vla_rl.core.spec.structure import Structurer
from vla_rl.toolkit.json_files import Record
from vla_rl.toolkit.models.checkpoints.files import check_sizes

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
BRIGHTEST = 1.0
"""Largest value of RGB in [0, 1], and so of its mean and deviation."""
HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


@frozen(kw_only=True)
class ViTSpec:
    """Sizes of one vision transformer, with timm's names."""

    embed_dim: int
    depth: int
    """Number of blocks in the file; the last one is never computed."""
    num_heads: int
    mlp_hidden: int
    patch_size: int = 14
    class_token: bool = False
    reg_tokens: int = 0
    layer_scale: bool = False
    attention_pool: bool = False
    """The file holds SigLIP's pooling head, which OpenVLA does not use."""
    mean: tuple[float, float, float] = HALF[0]
    std: tuple[float, float, float] = HALF[1]
    """Normalisation of RGB in [0, 1]."""


def dinov2_spec(**sizes: Any) -> ViTSpec:
    """Return the sizes of a DINOv2 with registers (Darcet et al. 2023)."""
    return ViTSpec(**sizes, class_token=True, reg_tokens=4, layer_scale=True, mean=IMAGENET[0], std=IMAGENET[1])


def siglip_spec(**sizes: Any) -> ViTSpec:
    """Return the sizes of a SigLIP image tower (Zhai et al. 2023)."""
    return ViTSpec(**sizes, attention_pool=True)


BACKBONES = {
    "vit_large_patch14_reg4_dinov2.lvd142m": dinov2_spec(embed_dim=1024, depth=24, num_heads=16, mlp_hidden=4096),
    "vit_so400m_patch14_siglip_224": siglip_spec(embed_dim=1152, depth=27, num_heads=16, mlp_hidden=4304),
}


class OpenVLAConfig(PreTrainedConfig):
    """Contents of OpenVLA's config.json. Two keys are additions: `vision_specs` gives the vision transformers' sizes
    where they are not those of `timm_model_ids`, `policy_setup` records how a policy was trained (cameras, chunk,
    state)."""

    model_type = "openvla"
    sub_configs: ClassVar[dict[str, Any]] = {"text_config": LlamaConfig}

    def __init__(
        self,
        *,
        text_config: dict[str, Any] | LlamaConfig | None = None,
        norm_stats: dict[str, Any] | None = None,
        vision_specs: list[dict[str, Any]] | None = None,
        policy_setup: dict[str, Any] | None = None,
        n_action_bins: int = 256,
        timm_model_ids: list[str] | None = None,
        image_sizes: list[int] | None = None,
        image_resize_strategy: str = "resize-naive",
        use_fused_vision_backbone: bool = True,
        pad_token_id: int = 32000,
        pad_to_multiple_of: int = 64,
        **other: Any,
    ) -> None:
        self.text_config = text_config if isinstance(text_config, LlamaConfig) else LlamaConfig(**(text_config or {}))
        self.norm_stats = norm_stats or {}
        self.vision_specs = vision_specs
        self.policy_setup = policy_setup or {}
        self.n_action_bins = n_action_bins
        self.timm_model_ids = timm_model_ids or list(BACKBONES)
        self.image_sizes = image_sizes or [224, 224]
        self.image_resize_strategy = image_resize_strategy
        self.use_fused_vision_backbone = use_fused_vision_backbone
        self.pad_to_multiple_of = pad_to_multiple_of
        other["tie_word_embeddings"] = False  # the files say True for the wrapper; the Llama inside is untied
        super().__init__(pad_token_id=pad_token_id, **other)  # type: ignore[call-arg]  # takes any, types fields only

    @property
    def action_vocab_end(self) -> int:
        """End V of the action tokens, whose ids are V - bins ... V - 1; higher ids pad the embedding matrix."""
        return int(self.text_config.vocab_size - self.pad_to_multiple_of)

    def find_backbones(self) -> tuple[ViTSpec, ViTSpec]:
        """Return the two vision transformers' sizes. Raise ValueError for an unknown backbone."""
        if self.vision_specs is not None:
            if not isinstance(self.vision_specs, list) or len(self.vision_specs) != 2:
                raise ValueError("'vision_specs' is to be a list of two JSON objects")
            first, second = (Structurer().read_class(spec, ViTSpec) for spec in self.vision_specs)
            return first, second
        unknown = [name for name in self.timm_model_ids if name not in BACKBONES]
        if unknown or len(self.timm_model_ids) != 2:
            raise ValueError(
                f"vision backbones {self.timm_model_ids} are not supported; OpenVLA's fused pair is {list(BACKBONES)}"
            )
        first, second = (BACKBONES[name] for name in self.timm_model_ids)
        return first, second


def check_fit(raw: Record, config: OpenVLAConfig) -> None:
    """Raises CheckpointError for unknown vision transformers and activations, and for sizes that do not go together."""
    activation = config.text_config.hidden_act
    if activation not in ACT2FN:
        raise CheckpointError(
            f"{raw.source}: 'hidden_act' {activation!r} is not known{did_you_mean(activation, ACT2FN)}"
        )
    try:
        specs = config.find_backbones()
    except ValueError as exc:
        raise CheckpointError(f"{raw.source}: {exc}") from exc
    for i, (spec, pixels) in enumerate(zip(specs, config.image_sizes, strict=True)):
        source = f"{raw.source}: vision_specs[{i}]"
        check_sizes(source, spec)
        if pixels % spec.patch_size:
            raise CheckpointError(f"{source}: 'patch_size' is {spec.patch_size}, a divisor of {pixels} is expected")
        if spec.embed_dim % spec.num_heads:
            raise CheckpointError(
                f"{source}: 'num_heads' is {spec.num_heads}, a divisor of {spec.embed_dim} is expected"
            )
        if not all(0 < number <= BRIGHTEST for number in spec.std):
            raise CheckpointError(f"{source}: 'std' is {list(spec.std)}, numbers above 0 are expected")
        if not all(0 <= number <= BRIGHTEST for number in spec.mean):
            raise CheckpointError(f"{source}: 'mean' is {list(spec.mean)}, numbers from 0 to 1 are expected")


def preset_config(name: str) -> OpenVLAConfig:
    """Return a preset's sizes, laid out as in the real model: the highest ids are action tokens, then 64 of padding."""
    if name == "full":
        return OpenVLAConfig(text_config=LlamaConfig(vocab_size=32064, pad_token_id=32000))
    vit, depth, vit_heads, width, layers, heads, text_tokens, pixels, patch = {
        "tiny": (48, 3, 4, 64, 3, 4, 512, 64, 16),
        "fast": (32, 2, 2, 64, 2, 2, 512, 64, 16),
        "small": (384, 8, 6, 640, 8, 10, 31744, 224, 14),
    }[name]
    sizes = {
        "embed_dim": vit,
        "depth": depth,
        "num_heads": vit_heads,
        "mlp_hidden": 4 * vit,
        "patch_size": patch,
    }
    bins, padding = 256, 64
    return OpenVLAConfig(
        text_config=LlamaConfig(
            vocab_size=text_tokens + bins + padding,
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            pad_token_id=text_tokens + bins,
        ),
        vision_specs=[attrs.asdict(dinov2_spec(**sizes)), attrs.asdict(siglip_spec(**sizes))],
        n_action_bins=bins,
        image_sizes=[pixels, pixels],
        pad_token_id=text_tokens + bins,
        pad_to_multiple_of=padding,
    )
