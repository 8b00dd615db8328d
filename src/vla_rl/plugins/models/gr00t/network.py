"""GR00T N1.5's network: SigLIP2, one linear layer and the first layers of Qwen3 from transformers, and its action head.

The language model reads images and prompt. The head refines what comes of it, then a diffusion transformer denoises
actions beside it: even blocks attend to images and prompt, odd ones to state, future and action tokens. Layers on state
and actions have weights for each robot ("embodiment"); a policy uses one row of them. The original's head attends to
padding; here it is masked, on the right of the prompt, so that a row gets what it gets alone.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Qwen3Config, Qwen3Model, SiglipVisionConfig, SiglipVisionModel
from transformers.initialization import no_init_weights

from vla_rl.plugins.models.gr00t.folder import Sizes
from vla_rl.toolkit.models import flow_network
from vla_rl.toolkit.models.flow_checkpoint import Shape
from vla_rl.toolkit.models.flow_network import FlowModule, mean_over
from vla_rl.toolkit.models.heads import HorizonValueHead, NoiseHead, PrefixValueHead

Pair = tuple[Tensor, Tensor]
"""Keys and values, [B, heads, T, D]."""
BUCKETS = 1000
CLOCK = 256
"""Numbers that tell the transformer the time."""
EMBEDDINGS = "backbone.eagle_model.language_model.model.embed_tokens.weight"
UNEMBEDDINGS = "backbone.eagle_model.language_model.lm_head.weight"
"""The same tensor; files have one of them or both."""


@frozen(eq=False)
class Prefix:
    """What the diffusion transformer needs."""

    pairs: list[Pair]
    """Of images and prompt, for each even block."""
    mask: Tensor
    """bool [B, 1, 1, P], False at padding."""
    state: Tensor
    """float32 [B, 1, D]"""
    summary: Tensor | None
    """float32 [B, P's width + D], for a critic that reads it."""


class CategoryLinear(nn.Module):
    """A linear layer with weights for each embodiment."""

    def __init__(self, count: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.empty(count, inputs, outputs))
        self.b = nn.Parameter(torch.empty(count, outputs))

    def forward(self, x: Tensor, row: int) -> Tensor:
        return F.linear(x, self.W[row].T, self.b[row])


class CategoryMLP(nn.Module):
    def __init__(self, count: int, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.layer1 = CategoryLinear(count, inputs, hidden)
        self.layer2 = CategoryLinear(count, hidden, outputs)

    def forward(self, x: Tensor, row: int) -> Any:
        return self.layer2(F.relu(self.layer1(x, row)), row)


class ActionEncoder(nn.Module):
    def __init__(self, count: int, inputs: int, width: int) -> None:
        super().__init__()
        self.W1 = CategoryLinear(count, inputs, width)
        self.W2 = CategoryLinear(count, 2 * width, width)
        self.W3 = CategoryLinear(count, width, width)

    def forward(self, x: Tensor, bucket: Tensor, row: int) -> Any:
        """[B, H, A] and [B] -> [B, H, D]."""
        embed = self.W1(x, row)
        half = embed.shape[2] // 2
        sine, cosine = waves(bucket, half, half)
        both = torch.cat([embed, torch.cat([sine, cosine], dim=1)[:, None].expand_as(embed)], dim=2)
        return self.W3(F.silu(self.W2(both, row)), row)


def waves(bucket: Tensor, count: int, divisor: int) -> Pair:
    """Sines and cosines float32 [B, count], of wavelengths up to 10,000."""
    index = torch.arange(count, dtype=torch.float32, device=bucket.device)
    angle = bucket[:, None] * torch.exp(-index * (math.log(10_000.0) / divisor))
    return angle.sin(), angle.cos()


def bucket_of(time: Tensor) -> Tensor:
    """The original counts from noise (0) to actions, in whole thousandths. Float32 is off by less than is added."""
    return ((1 - time.float()) * BUCKETS + 1e-3).floor()


def normed(x: Tensor, norm: nn.LayerNorm | None = None, eps: float = 1e-5) -> Tensor:
    """In float32, which it stays."""
    weight, bias = (None, None) if norm is None else (norm.weight, norm.bias)
    return F.layer_norm(x.float(), x.shape[-1:], weight, bias, eps)


class Attention(nn.Module):
    """As diffusers names it."""

    def __init__(self, width: int, source: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_q, self.to_k, self.to_v = nn.Linear(width, width), nn.Linear(source, width), nn.Linear(source, width)
        self.to_out = nn.ModuleList([nn.Linear(width, width)])

    def pair(self, source: Tensor) -> Pair:
        return self._split(self.to_k(source)), self._split(self.to_v(source))

    def forward(self, x: Tensor, pair: Pair, mask: Tensor | None) -> Any:
        found = F.scaled_dot_product_attention(self._split(self.to_q(x)), *pair, attn_mask=mask)
        return self.to_out[0](found.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Any:
        return x.unflatten(2, (self.heads, -1)).transpose(1, 2)


class Projection(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.proj = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.proj(x), approximate="tanh")


def feed_forward(width: int) -> nn.ModuleDict:
    wide = 4 * width
    return nn.ModuleDict({"net": nn.Sequential(Projection(width, wide), nn.Identity(), nn.Linear(wide, width))})


class Block(nn.Module):
    """Attention and an MLP behind layer norms."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm3 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn1, self.ff = Attention(width, width, heads), feed_forward(width)

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        base = normed(x, self.norm1).to(x.dtype)
        x = x + self.attn1(base, self.attn1.pair(base), mask)
        return x + self.ff["net"](normed(x, self.norm3).to(x.dtype))


class Modulation(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 2 * width)

    def forward(self, x: Tensor, clock: Tensor) -> Any:
        scale, shift = self.linear(clock)[:, None].chunk(2, dim=2)
        return (normed(x) * (1 + scale) + shift).to(x.dtype)


class TimedBlock(nn.Module):
    """The same, its first norm told the time, its second without weights."""

    def __init__(self, width: int, source: int, heads: int) -> None:
        super().__init__()
        self.norm1 = Modulation(width)
        self.attn1, self.ff = Attention(width, source, heads), feed_forward(width)

    def forward(self, x: Tensor, clock: Tensor, pair: Pair | None, mask: Tensor) -> Any:
        """pair: of images and prompt; None: the tokens attend to each other."""
        base = self.norm1(x, clock)
        x = x + (self.attn1(base, self.attn1.pair(base), None) if pair is None else self.attn1(base, pair, mask))
        return x + self.ff["net"](normed(x).to(x.dtype))


class TimestepEmbedding(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear_1, self.linear_2 = nn.Linear(CLOCK, width), nn.Linear(width, width)

    def forward(self, bucket: Tensor) -> Any:
        sine, cosine = waves(bucket, CLOCK // 2, CLOCK // 2 - 1)
        return self.linear_2(F.silu(self.linear_1(torch.cat([cosine, sine], dim=1))))


class DiffusionTransformer(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.width
        self.timestep_encoder = nn.ModuleDict({"timestep_embedder": TimestepEmbedding(width)})
        self.transformer_blocks = nn.ModuleList(
            TimedBlock(width, width if i % 2 else sizes.text_width, sizes.dit_heads) for i in range(sizes.dit_depth)
        )
        self.proj_out_1, self.proj_out_2 = nn.Linear(width, 2 * width), nn.Linear(width, sizes.output)

    def pairs(self, seen: Tensor) -> list[Pair]:
        """Keys and values of images and prompt, which are the same at every time."""
        blocks: Any = self.transformer_blocks
        return [block.attn1.pair(seen) for block in blocks[::2]]

    def forward(self, x: Tensor, bucket: Tensor, pairs: list[Pair], mask: Tensor, last: int) -> Any:
        """Tokens [B, T, D] -> float32 [B, last, D'], of the last ones."""
        clock = F.silu(self.timestep_encoder["timestep_embedder"](bucket))
        for i, block in enumerate(self.transformer_blocks):
            x = block(x, clock, None if i % 2 else pairs[i // 2], mask)
        shift, scale = self.proj_out_1(clock)[:, None].chunk(2, dim=2)
        return self.proj_out_2(normed(x[:, -last:], eps=1e-6) * (1 + scale) + shift)


class ActionHead(nn.Module):
    def __init__(self, sizes: Sizes, shape: Shape) -> None:
        super().__init__()
        count, width = sizes.embodiments, sizes.width
        self.model = DiffusionTransformer(sizes)
        self.state_encoder = CategoryMLP(count, shape.state_dim, sizes.hidden, width)
        self.action_encoder = ActionEncoder(count, shape.action_dim, width)
        self.action_decoder = CategoryMLP(count, sizes.output, sizes.hidden, shape.action_dim)
        self.future_tokens = nn.Embedding(sizes.future_tokens, width)
        self.vlln = nn.LayerNorm(sizes.text_width)
        blocks = nn.ModuleList(Block(sizes.text_width, sizes.mixer_heads) for _ in range(sizes.mixer_depth))
        self.vl_self_attention = nn.ModuleDict({"transformer_blocks": blocks})
        self.position_embedding = nn.Embedding(sizes.positions, width)

    def mixed(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """What the transformer is shown of the language model's output [B, P, D]."""
        x = normed(hidden, self.vlln).to(hidden.dtype)
        blocks: Any = self.vl_self_attention["transformer_blocks"]
        for block in blocks:
            x = block(x, mask)
        return x


class Groot(nn.Module):
    """What a checkpoint holds."""

    def __init__(self, sizes: Sizes, shape: Shape) -> None:
        super().__init__()
        vision = SiglipVisionConfig(
            hidden_size=sizes.vision_width,
            intermediate_size=sizes.vision_mlp,
            num_hidden_layers=sizes.vision_depth,
            num_attention_heads=sizes.vision_heads,
            image_size=sizes.image_size,
            patch_size=sizes.patch_size,
        )
        text = Qwen3Config(
            hidden_size=sizes.text_width,
            intermediate_size=sizes.text_mlp,
            num_hidden_layers=sizes.text_depth,
            num_attention_heads=sizes.heads,
            num_key_value_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
            vocab_size=sizes.vocab,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        )
        text._attn_implementation = "sdpa"
        eagle = {
            "vision_model": SiglipVisionModel(vision),
            "mlp1": nn.Sequential(nn.Linear(sizes.vision_width, sizes.text_width)),
            "language_model": nn.ModuleDict({"model": Qwen3Model(text)}),
        }
        self.backbone = nn.ModuleDict({"eagle_model": nn.ModuleDict(eagle)})
        self.action_head = ActionHead(sizes, shape)


def empty_network(sizes: Sizes, shape: Shape) -> Groot:
    """The network with memory that is not initialised, for `networks.fill` or `networks.allocate`."""
    with no_init_weights():
        network = Groot(sizes, shape)
    eagle: Any = network.backbone["eagle_model"]
    eagle["vision_model"].head.requires_grad_(False)  # in the files, and not computed
    eagle["vision_model"].use_head = False
    return network


class GrootModule(FlowModule):
    """All parameters of a policy."""

    def __init__(
        self,
        groot: Groot,
        shape: tuple[int, int],
        row: int,
        image_token: int,
        value_head: HorizonValueHead | PrefixValueHead | None = None,
        noise_head: NoiseHead | None = None,
    ) -> None:
        super().__init__(shape, value_head, noise_head)
        self.groot, self.row, self.image_token = groot, row, image_token
        self._dtype = self._eagle["mlp1"][0].weight.dtype

    @property
    def network(self) -> Groot:
        return self.groot

    @property
    def _eagle(self) -> Any:
        return self.groot.backbone["eagle_model"]

    def embed_images(self, pixels: Tensor) -> Any:
        """[N, 3, S, S] in [-1, 1] -> [N, tokens, D]."""
        return self._eagle["mlp1"](self._eagle["vision_model"](pixel_values=pixels).last_hidden_state)

    def look(self, pixels: Tensor, ids: Tensor) -> Any:
        """Run the language model: [B, cameras, 3, S, S] in [-1, 1] and int64 [B, P], padded on the right -> [B, P, D].
        A token sees those before it, so that padding changes nothing."""
        language = self._eagle["language_model"]["model"]
        features = self.embed_images(pixels.flatten(0, 1))
        embeds = language.embed_tokens(ids).masked_scatter((ids == self.image_token)[..., None], features)
        causal = {"full_attention": None}  # as sdpa takes it; else transformers looks at the numbers for packed prompts
        return language(inputs_embeds=embeds, attention_mask=causal, use_cache=False).last_hidden_state

    def tell(self, hidden: Tensor, mask: Tensor, state: Tensor) -> Prefix:
        """`look`'s output, bool [B, P] (False at padding) and the normalised state [B, S], through the head's part that
        comes before denoising."""
        head, seen = self.groot.action_head, mask[:, None, None]
        mixed = head.mixed(hidden, seen)
        told = head.state_encoder(state[:, None], self.row)
        summary = None
        if isinstance(self.value_head, PrefixValueHead):
            summary = torch.cat([mean_over(mixed, mask), told[:, 0]], dim=1)
        return Prefix(head.model.pairs(mixed), seen, told, summary)

    def denoise(self, prefix: Prefix, state: Tensor, x: Tensor, time: Tensor) -> Any:
        """The state is in the prefix."""
        head, horizon, bucket = self.groot.action_head, self.shape[0], bucket_of(time)
        actions = head.action_encoder(x, bucket, self.row) + head.position_embedding.weight[:horizon]
        future = head.future_tokens.weight.expand(len(x), -1, -1)
        tokens = torch.cat([prefix.state, future, actions], dim=1).to(self._dtype)
        return head.model(tokens, bucket, prefix.pairs, prefix.mask, horizon)

    def velocity(self, hidden: Tensor) -> Tensor:
        """The original's goes from noise to actions."""
        towards: Tensor = self.groot.action_head.action_decoder(hidden, self.row)
        return -towards


def stays_float32(name: str) -> bool:
    """Of the parameters: the head's norms, and its layers on state, time and actions."""
    return name.startswith("action_head.") and (".transformer_blocks." not in name or ".norm" in name)


def public_name(name: str) -> str:
    return name.replace("vision_model.", "vision_model.vision_model.")


def open_names(names: Collection[str]) -> Mapping[str, str]:
    """Tensors of a checkpoint -> what `public_name` says."""
    opened = {name: name for name in names if name != UNEMBEDDINGS}
    return opened if EMBEDDINGS in names or UNEMBEDDINGS not in names else {**opened, UNEMBEDDINGS: EMBEDDINGS}


@torch.no_grad()
def initialise(network: Groot, seed: int) -> None:
    """Random weights as a function of the seed alone; a velocity that starts near 0."""
    flow_network.initialise(network, seed, rms=1.0)
    rng = torch.Generator().manual_seed(seed)
    part: Any
    for name, part in network.named_modules():
        if isinstance(part, CategoryLinear):
            gain = 0.02 if name.endswith("action_decoder.layer2") else math.sqrt(2 / sum(part.W.shape[1:]))
            part.W.copy_(torch.randn(part.W.shape, generator=rng) * gain)
            part.b.zero_()
        elif name.endswith(("to_out.0", "net.2")):  # what blocks add: all of them together as much as one
            part.weight.mul_((2 * len(network.action_head.model.transformer_blocks)) ** -0.5)
