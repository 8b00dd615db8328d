"""Vision transformer with timm's parameter names: DINOv2 and SigLIP as OpenVLA uses them. Features are the output of
the second-to-last block, without the final norm and without class and register tokens. The last block, the norm and
SigLIP's pooling head exist so that files keep their public layout; they are frozen and never computed."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_layers import GradientCheckpointingLayer

from vla_rl.plugins.models.openvla.architecture import ViTSpec


class VisionAttention(nn.Module):
    """Multi-head self-attention with timm's parameter names."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        result: Tensor = self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, dim))
        return result


class MLP(nn.Module):
    """Feed-forward block with timm's parameter names."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.fc2(F.gelu(self.fc1(x)))
        return result


class LayerScale(nn.Module):
    """LayerScale with timm's `gamma` under the name that OpenVLA's files give it."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale_factor = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale_factor


class VisionBlock(GradientCheckpointingLayer):
    """Pre-norm transformer block."""

    def __init__(self, spec: ViTSpec) -> None:
        super().__init__()
        dim = spec.embed_dim
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = VisionAttention(dim, spec.num_heads)
        self.ls1 = LayerScale(dim) if spec.layer_scale else nn.Identity()
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = MLP(dim, spec.mlp_hidden)
        self.ls2 = LayerScale(dim) if spec.layer_scale else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.ls1(self.attn(self.norm1(x)))
        result: Tensor = x + self.ls2(self.mlp(self.norm2(x)))
        return result


class AttentionPool(nn.Module):
    """Parameters of SigLIP's pooling head; OpenVLA's files hold it and nothing uses it."""

    def __init__(self, spec: ViTSpec) -> None:
        super().__init__()
        dim = spec.embed_dim
        self.latent = nn.Parameter(torch.zeros(1, 1, dim))
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, 2 * dim)
        self.proj = nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = MLP(dim, spec.mlp_hidden)


class PatchEmbed(nn.Module):
    """Patch embedding: one strided convolution."""

    def __init__(self, spec: ViTSpec) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, spec.embed_dim, kernel_size=spec.patch_size, stride=spec.patch_size)

    def forward(self, pixels: Tensor) -> Tensor:
        result: Tensor = self.proj(pixels).flatten(2).transpose(1, 2)
        return result


class VisionTransformer(nn.Module):
    """Vision transformer that returns the features of its second-to-last block."""

    def __init__(self, spec: ViTSpec, image_size: int) -> None:
        super().__init__()
        self.spec = spec
        dim = spec.embed_dim
        self.patches = (image_size // spec.patch_size) ** 2
        self.patch_embed = PatchEmbed(spec)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim)) if spec.class_token else None
        self.reg_token = nn.Parameter(torch.zeros(1, spec.reg_tokens, dim)) if spec.reg_tokens else None
        self.pos_embed = nn.Parameter(torch.zeros(1, self.patches, dim))
        self.blocks = nn.ModuleList(VisionBlock(spec) for _ in range(spec.depth))
        self.norm = nn.LayerNorm(dim, eps=1e-6) if spec.class_token or spec.attention_pool else None
        self.attn_pool = AttentionPool(spec) if spec.attention_pool else None

    def unused(self) -> list[nn.Module]:
        """Return the parts that are in the file and never computed."""
        return [part for part in (self.blocks[-1], self.norm, self.attn_pool) if part is not None]

    def forward(self, pixels: Tensor) -> Tensor:
        """Return features [B, patches, D] of normalised images [B, 3, H, W]."""
        x = self.embed_images(pixels)
        for block in self.blocks[:-1]:
            x = block(x)
        result: Tensor = x[:, x.shape[1] - self.patches :]
        return result

    def embed_images(self, pixels: Tensor) -> Tensor:
        """Return the tokens of images: class and register tokens, then patches with their positions."""
        x = self.patch_embed(pixels) + self.pos_embed
        prefix = [token.expand(len(x), -1, -1) for token in (self.cls_token, self.reg_token) if token is not None]
        return torch.cat([*prefix, x], dim=1)
