"""OpenVLA's network: two vision transformers, a projector, a Llama. Parameter names are those of its public files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from vla_rl.plugins.models.openvla.architecture import OpenVLAConfig
from vla_rl.plugins.models.openvla.vit import LayerScale, VisionTransformer
from vla_rl.toolkit.models import networks
from vla_rl.toolkit.models.decoder import PreallocatedLayer, Rotation, causal_mask, run_layers
from vla_rl.toolkit.models.meta_device import on_host
from vla_rl.toolkit.models.networks import Normal, sine_cosine_positions


class VisionBackbone(nn.Module):
    """DINOv2 and SigLIP in parallel, with their features concatenated on the channel axis."""

    def __init__(self, config: OpenVLAConfig) -> None:
        super().__init__()
        first, second = config.find_backbones()
        self.featurizer = VisionTransformer(first, config.image_sizes[0])
        self.fused_featurizer = VisionTransformer(second, config.image_sizes[1])
        self.embed_dim = first.embed_dim + second.embed_dim

    def forward(self, pixels: Tensor) -> Tensor:
        """Return features [B, images * patches, D] of [B, 6 * images, H, W] (an image: DINOv2's, SigLIP's)."""
        images = pixels.shape[1] // 6
        pixels = pixels.reshape(-1, 6, *pixels.shape[2:])
        features = torch.cat([self.featurizer(pixels[:, :3]), self.fused_featurizer(pixels[:, 3:])], dim=2)
        return features.reshape(-1, images * features.shape[1], self.embed_dim)


class Projector(nn.Module):
    """Projects the vision transformers' features to the Llama's embeddings."""

    def __init__(self, vision_dim: int, llm_dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(vision_dim, 4 * vision_dim)
        self.fc2 = nn.Linear(4 * vision_dim, llm_dim)
        self.fc3 = nn.Linear(llm_dim, llm_dim)

    def forward(self, features: Tensor) -> Tensor:
        result: Tensor = self.fc3(F.gelu(self.fc2(F.gelu(self.fc1(features)))))
        return result


class OpenVLAForActionPrediction(PreTrainedModel):
    """OpenVLA's network up to the hidden states and the logits of action tokens."""

    config_class = OpenVLAConfig
    config: OpenVLAConfig
    base_model_prefix = "language_model"
    main_input_name = "pixel_values"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _no_split_modules = ["LlamaDecoderLayer", "Block"]
    text_rows: tuple[Tensor, Tensor] | None = None
    """Rows of the head before and after those of the action tokens, on the host; None unless `slim_head` was called."""

    def __init__(self, config: OpenVLAConfig) -> None:
        super().__init__(config)
        self.vision_backbone = VisionBackbone(config)
        self.projector = Projector(self.vision_backbone.embed_dim, config.text_config.hidden_size)
        self.language_model = LlamaForCausalLM(config.text_config)
        self.post_init()  # type: ignore[no-untyped-call]  # transformers does not annotate it
        for vit in (self.vision_backbone.featurizer, self.vision_backbone.fused_featurizer):
            for part in vit.unused():
                part.requires_grad_(False)

    @property
    def is_gradient_checkpointing(self) -> bool:
        """Whether layers recompute their activations: the name that peft reads, of which transformers warns."""
        return self.is_activation_checkpointing

    def get_input_embeddings(self) -> nn.Module:
        return self.language_model.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module:
        head: nn.Module = self.language_model.get_output_embeddings()
        return head

    def forward(
        self,
        pixel_values: Tensor | None,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        placeholder: Tensor | None = None,
        extra: Tensor | None = None,
        causal: bool = False,
        caches: Sequence[PreallocatedLayer] | None = None,
        past: int = 0,
        features: Tensor | None = None,
    ) -> Tensor:
        """Return the last hidden states [B, S, D] of the sequence BOS, image patches, `extra`, rest of `input_ids`.

        Args:
            pixel_values: [B, 6 * images, H, W]; None where `features` are given, or where `input_ids` continue what
                `caches` hold.
            input_ids: int64 [B, L], BOS first.
            attention_mask: bool [B, L], False at padding; None without padding. With filled `caches` it covers the
                whole sequence, patches and cached part included.
            placeholder: bool [B, L], True where the embedding is zero: the placeholders of parallel decoding.
            extra: [B, K, D] embeddings after the patches, such as the proprioceptive token.
            causal: attend to the past only (plain OpenVLA) instead of to everything (OpenVLA-OFT).
            caches: keys and values of the past, one of each layer, for causal decoding; extended in place.
            past: number of tokens in `caches`.
            features: output of `vision_backbone` for the images.
        """
        if features is None and pixel_values is not None:
            features = self.vision_backbone(pixel_values)
        patches = None if features is None else self.projector(features)
        sequence, mask, rotation = self.lay_out(input_ids, attention_mask, placeholder, patches, extra, causal, past)
        return run_layers(self.language_model.model, sequence, mask, rotation, caches, is_causal=causal)

    def lay_out(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        placeholder: Tensor | None,
        patches: Tensor | None,
        extra: Tensor | None,
        causal: bool,
        past: int,
    ) -> tuple[Tensor, Tensor | None, Rotation]:
        """Return the Llama's embeddings [B, S, D], mask, rotary embedding; `patches`: [B, P, D]; else as `forward`."""
        sequence = self.get_input_embeddings()(input_ids)
        if patches is not None:
            inserted = patches if extra is None else torch.cat([patches, extra], dim=1)
            if placeholder is not None:
                sequence = sequence * ~placeholder.unsqueeze(2)
            sequence = torch.cat([sequence[:, :1], inserted, sequence[:, 1:]], dim=1)
            if attention_mask is not None:
                attention_mask = insert_columns(attention_mask, inserted.shape[1])
        length = sequence.shape[1]
        if attention_mask is None:
            mask = None
            positions = torch.arange(past, past + length, device=sequence.device).unsqueeze(0)
        elif causal:
            mask = causal_mask(attention_mask, length)
            positions = (attention_mask.long().cumsum(1) - 1).clamp(min=0)[:, -length:]
        else:
            mask = attention_mask[:, None, None, :].expand(-1, 1, length, length)
            positions = torch.arange(length, device=sequence.device).unsqueeze(0)
        return sequence, mask, self.language_model.model.rotary_emb(sequence, position_ids=positions)

    def action_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., bins] of the action tokens, lowest id first, for hidden states [..., D]."""
        head = self.get_output_embeddings()
        if self.text_rows is not None:
            logits: Tensor = head(hidden)
            return logits
        return F.linear(hidden, cast("Tensor", head.weight)[self._action_rows])

    @property
    def _action_rows(self) -> slice:
        end = self.config.action_vocab_end
        return slice(end - self.config.n_action_bins, end)

    def slim_head(self) -> None:
        """Keep only the rows of the action tokens in the head (AcceRL, section 5.1): the others never change, and now
        need no gradient, optimiser state, device memory or traffic. `whole_head` restores them."""
        weight, rows = cast("Tensor", self.get_output_embeddings().weight), self._action_rows
        before, behind = (on_host(part.detach()).clone() for part in (weight[: rows.start], weight[rows.stop :]))
        head = nn.Linear(weight.shape[1], self.config.n_action_bins, bias=False, device="meta")
        head.weight = nn.Parameter(weight[rows].detach().clone(), requires_grad=weight.requires_grad)
        self.language_model.set_output_embeddings(head)
        self.text_rows = before, behind

    def whole_head(self) -> Tensor:
        """Return the head [vocabulary, D] as in the public files, on the host."""
        weight = cast("Tensor", self.get_output_embeddings().weight).detach().cpu()
        if self.text_rows is None:
            return weight
        before, behind = self.text_rows
        return torch.cat([before, weight, behind])


REGIONS = (
    VisionTransformer.embed_images,
    Projector.forward,
    OpenVLAForActionPrediction.lay_out,
    LlamaRMSNorm.forward,
)
"""Methods to compile besides the blocks."""


def insert_columns(mask: Tensor, count: int) -> Tensor:
    """Return a mask bool [B, L] as [B, L + count], with visible columns inserted after the first, where patches go."""
    return torch.cat([mask[:, :1], mask.new_ones(len(mask), count), mask[:, 1:]], dim=1)


def hollow_model(config: OpenVLAConfig) -> OpenVLAForActionPrediction:
    """Return the network on the meta device, for `fill_network` or `allocate_network`; rotary frequencies are real."""
    with torch.device("meta"):
        network = OpenVLAForActionPrediction(config)
    network.language_model.model.rotary_emb = LlamaRotaryEmbedding(config=config.text_config)
    return network


def initialise_weights(model: nn.Module, seed: int) -> None:
    """Initialise random weights with `networks.initialise_network`: sine-cosine patch positions that are not negligible
    compared with the patches, and a head that starts near the uniform distribution."""

    def initialise_other(name: str, module: nn.Module, normal: Normal) -> None:
        if isinstance(module, nn.Embedding):
            normal(module.weight, 0.5)
        elif isinstance(module, VisionTransformer):
            module.pos_embed.copy_(0.5 * sine_cosine_positions(module.patches, module.spec.embed_dim))
            for token in (module.cls_token, module.reg_token):
                if token is not None:
                    normal(token, 0.02)
        elif isinstance(module, LayerScale):
            module.scale_factor.fill_(1.0)
        elif isinstance(module, nn.LayerNorm | LlamaRMSNorm):
            module.weight.fill_(1.0)

    networks.initialise_network(model, seed, "lm_head", initialise_other)
