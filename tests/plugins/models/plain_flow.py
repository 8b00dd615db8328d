"""pi0.5 and SmolVLA once more, in float64 and in the plainest form: functions of the public weights, prefix and suffix
in one pass at every denoising step, log-probabilities as RLinf writes them. Shares no line with the package or with
transformers, so that scores and gradients have something to be compared with."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

Weights = Mapping[str, Tensor]
HEAD_DIM, VISION_HEADS = 16, 4


def linear(w: Weights, name: str, x: Tensor) -> Tensor:
    return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))


def layer_norm(w: Weights, name: str, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], 1e-6)


def rms(x: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def heads(x: Tensor) -> Tensor:
    return x.unflatten(2, (-1, HEAD_DIM)).transpose(1, 2)


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    half = HEAD_DIM // 2
    angle = positions[:, None, :, None] * 10_000.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    one, two = x[..., :half], x[..., half:]
    return torch.cat([one * angle.cos() - two * angle.sin(), two * angle.cos() + one * angle.sin()], dim=-1)


def attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """seen: bool [B, queries, keys]."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = (q @ k.transpose(2, 3) / math.sqrt(q.shape[3])).masked_fill(~seen[:, None], -1e30)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def vision(w: Weights, at: str, pixels: Tensor) -> Tensor:
    """SigLIP: [N, 3, S, S] -> [N, patches, D]."""
    patch = w[f"{at}.embeddings.patch_embedding.weight"]
    x = F.conv2d(pixels, patch, w[f"{at}.embeddings.patch_embedding.bias"], stride=patch.shape[2])
    x = x.flatten(2).transpose(1, 2) + w[f"{at}.embeddings.position_embedding.weight"]
    everything = torch.ones(len(x), x.shape[1], x.shape[1], dtype=torch.bool)
    for i in range(2):
        layer = f"{at}.encoder.layers.{i}"
        base = layer_norm(w, f"{layer}.layer_norm1", x)
        q, k, v = (
            linear(w, f"{layer}.self_attn.{n}_proj", base).unflatten(2, (VISION_HEADS, -1)).transpose(1, 2)
            for n in "qkv"
        )
        x = x + linear(w, f"{layer}.self_attn.out_proj", attention(q, k, v, everything))
        inner = F.gelu(linear(w, f"{layer}.mlp.fc1", layer_norm(w, f"{layer}.layer_norm2", x)), approximate="tanh")
        x = x + linear(w, f"{layer}.mlp.fc2", inner)
    return layer_norm(w, f"{at}.post_layernorm", x)


def time_embedding(time: Tensor, width: int) -> Tensor:
    period = 4e-3 * 1000 ** torch.linspace(0, 1, width // 2, dtype=torch.float64)
    angle = 2 * math.pi * time.double()[:, None] / period
    return torch.cat([angle.sin(), angle.cos()], dim=1)


def qkv(w: Weights, layer: str, base: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (heads(linear(w, f"{layer}.self_attn.{n}_proj", base)) for n in "qkv")
    return rotated(q, positions), rotated(k, positions), v


def depth_of(w: Weights, at: str) -> int:
    return len([name for name in w if name.startswith(f"{at}.layers.") and name.endswith(".mlp.up_proj.weight")])


class PlainPi05:
    """Images [B, n, 3, S, S], which of them are shown [B, n], ids and their mask [B, L]."""

    vlm = "paligemma_with_expert.paligemma.model"
    expert = "paligemma_with_expert.gemma_expert.model"

    def __init__(self, w: Weights, pixels: Tensor, shown: Tensor, ids: Tensor, mask: Tensor, state: Tensor) -> None:
        self.w = w
        features = vision(w, f"{self.vlm}.vision_tower.vision_model", pixels.flatten(0, 1))
        features = linear(w, f"{self.vlm}.multi_modal_projector.linear", features)
        text = w["paligemma_with_expert.paligemma.lm_head.weight"][ids]
        self.prefix = torch.cat([features.reshape(len(ids), -1, text.shape[2]), text * text.shape[2] ** 0.5], 1)
        tokens = features.shape[1]
        self.valid = torch.cat([shown.repeat_interleave(tokens, 1), mask], 1)

    def adaptive(self, name: str, x: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        scale, shift, gate = linear(self.w, f"{name}.dense", condition)[:, None].chunk(3, -1)
        return rms(x, 1e-6) * (1 + scale) + shift, gate

    def run(self, x_t: Tensor, time: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the language model says, the expert's output, the velocity."""
        w, x, y = self.w, self.prefix, linear(self.w, "action_in_proj", x_t)
        condition = F.silu(linear(w, "time_mlp_in", time_embedding(time, y.shape[2])))
        condition = F.silu(linear(w, "time_mlp_out", condition))
        rows, length, horizon = len(x), x.shape[1], y.shape[1]
        positions = torch.cat([self.valid, self.valid.new_ones(rows, horizon)], 1).cumsum(1) - 1
        seen = self.valid[:, None].expand(-1, length + horizon, -1)
        own = torch.cat([self.valid.new_zeros(rows, length), self.valid.new_ones(rows, horizon)], 1)
        seen = torch.cat([seen, own[:, :, None].expand(-1, -1, horizon)], 2)
        for i in range(depth_of(w, self.expert)):
            one, two = f"{self.vlm}.language_model.layers.{i}", f"{self.expert}.layers.{i}"
            normed, gate = self.adaptive(f"{two}.input_layernorm", y, condition)
            first = qkv(w, one, self.gemma(f"{one}.input_layernorm", x), positions[:, :length])
            second = qkv(w, two, normed, positions[:, length:])
            found = attention(*(torch.cat(pair, 2) for pair in zip(first, second, strict=True)), seen)
            x = x + linear(w, f"{one}.self_attn.o_proj", found[:, :length])
            x = x + self.mlp(one, self.gemma(f"{one}.post_attention_layernorm", x))
            y = y + gate * linear(w, f"{two}.self_attn.o_proj", found[:, length:])
            normed, gate = self.adaptive(f"{two}.post_attention_layernorm", y, condition)
            y = y + gate * self.mlp(two, normed)
        y = self.adaptive(f"{self.expert}.norm", y, condition)[0]
        return self.gemma(f"{self.vlm}.language_model.norm", x), y, linear(w, "action_out_proj", y)

    def gemma(self, name: str, x: Tensor) -> Tensor:
        return rms(x, 1e-6) * (1 + self.w[f"{name}.weight"])

    def mlp(self, layer: str, x: Tensor) -> Tensor:
        gate = F.gelu(linear(self.w, f"{layer}.mlp.gate_proj", x), approximate="tanh")
        return linear(self.w, f"{layer}.mlp.down_proj", gate * linear(self.w, f"{layer}.mlp.up_proj", x))


class PlainSmolVLA:
    """SmolVLA written plainly, as `PlainPi05` is."""

    vlm = "vlm_with_expert.vlm.model"
    expert = "vlm_with_expert.lm_expert"

    def __init__(self, w: Weights, pixels: Tensor, shown: Tensor, ids: Tensor, mask: Tensor, state: Tensor) -> None:
        self.w = w
        features = vision(w, f"{self.vlm}.vision_model", pixels.flatten(0, 1))
        features = linear(w, f"{self.vlm}.connector.modality_projection.proj", self.shuffled(features))
        text = w[f"{self.vlm}.text_model.embed_tokens.weight"][ids]
        self.prefix = torch.cat([features.reshape(len(ids), -1, text.shape[2]), text], 1) * text.shape[2] ** 0.5
        self.prefix = torch.cat([self.prefix, linear(w, "state_proj", state)[:, None]], 1)
        there = mask.new_ones(len(ids), 1)
        self.valid = torch.cat([shown.repeat_interleave(features.shape[1], 1), mask, there], 1)

    def shuffled(self, x: Tensor) -> Tensor:
        """Neighbouring patches side by side, s x s of them to a token."""
        wide = self.w[f"{self.vlm}.connector.modality_projection.proj.weight"].shape[1]
        side, s = math.isqrt(x.shape[1]), math.isqrt(wide // x.shape[2])
        return x.unflatten(1, (side // s, s, side // s, s)).transpose(2, 3).flatten(3).flatten(1, 2)

    def run(self, x_t: Tensor, time: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the language model says, the expert's output, the velocity."""
        w, x, y = self.w, self.prefix, linear(self.w, "action_in_proj", x_t)
        told = time_embedding(time, y.shape[2])[:, None].expand(-1, y.shape[1], -1)
        y = linear(w, "action_time_mlp_in", torch.cat([y, told], 2))
        y = linear(w, "action_time_mlp_out", F.silu(y))
        rows, length, horizon = len(x), x.shape[1], y.shape[1]
        positions = torch.cat([self.valid, self.valid.new_ones(rows, horizon)], 1).cumsum(1) - 1
        among = torch.ones(length, length, dtype=torch.bool)
        among[:-1, -1] = False
        seen = self.valid[:, None] & among
        behind = self.valid[:, None].expand(-1, horizon, -1)
        before = torch.ones(horizon, horizon, dtype=torch.bool).tril().expand(rows, -1, -1)
        for i in range(depth_of(w, self.expert)):
            one, two = f"{self.vlm}.text_model.layers.{i}", f"{self.expert}.layers.{i}"
            q, k, v = qkv(w, one, self.llama(f"{one}.input_layernorm", x), positions[:, :length])
            base = self.llama(f"{two}.input_layernorm", y)
            if i % 2:
                keys, values = (
                    heads(linear(w, f"{two}.self_attn.{n}_proj", part.transpose(1, 2).flatten(2)))
                    for n, part in (("k", k), ("v", v))
                )
                ahead = torch.arange(horizon).expand(rows, -1)
                own = rotated(heads(linear(w, f"{two}.self_attn.q_proj", base)), ahead)
                found = attention(own, keys, values, behind)
            else:
                own, keys, values = qkv(w, two, base, positions[:, length:])
                everything = torch.cat([behind, before], 2)
                found = attention(own, torch.cat([k, keys], 2), torch.cat([v, values], 2), everything)
            y = y + linear(w, f"{two}.self_attn.o_proj", found)
            y = y + self.mlp(two, self.llama(f"{two}.post_attention_layernorm", y))
            x = x + linear(w, f"{one}.self_attn.o_proj", attention(q, k, v, seen))
            x = x + self.mlp(one, self.llama(f"{one}.post_attention_layernorm", x))
        y = self.llama(f"{self.expert}.norm", y)
        return self.llama(f"{self.vlm}.text_model.norm", x), y, linear(w, "action_out_proj", y)

    def llama(self, name: str, x: Tensor) -> Tensor:
        return rms(x, 1e-5) * self.w[f"{name}.weight"]

    def mlp(self, layer: str, x: Tensor) -> Tensor:
        gate = F.silu(linear(self.w, f"{layer}.mlp.gate_proj", x))
        return linear(self.w, f"{layer}.mlp.down_proj", gate * linear(self.w, f"{layer}.mlp.up_proj", x))


def perceptron(w: Weights, name: str, x: Tensor, act: str) -> Tensor:
    last = max(int(key.split(".")[2]) for key in w if key.startswith(f"{name}."))
    for i in range(last):
        x = getattr(torch, act)(linear(w, f"{name}.layers.{i}", x))
    return linear(w, f"{name}.layers.{last}", x)


def value(w: Weights, net: PlainPi05 | PlainSmolVLA, said: Tensor) -> Tensor:
    """RLinf's `value_after_vlm`, over rows that are not padding."""
    mean = (said * net.valid[..., None]).sum(1) / net.valid.sum(1, keepdim=True)
    return perceptron(w, "value_head", mean, "relu").squeeze(-1)


def transition(
    w: Weights, method: str, level: float, steps: int, i: int, x: Tensor, hidden: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """RLinf's mean and deviation of step i, from the clean and the noisy end of the velocity."""
    t, d = 1 - i / steps, 1 / steps
    clean, noisy = x - v * t, x + v * (1 - t)
    if method == "flow_sde":
        s = level * math.sqrt(t / (1 - (1 - d if i == 0 else t)))
        mean = clean * (1 - (t - d)) + noisy * (t - d - s**2 * d / (2 * t))
        return mean, torch.full_like(x, math.sqrt(d) * s)
    if method == "flow_cps":
        angle = math.pi * level / 2
        mean = clean * (1 - (t - d)) + noisy * (t - d) * math.cos(angle)
        return mean, torch.full_like(x, (t - d) * math.sin(angle))
    assert method == "flow_noise"
    low, high = math.log(0.08**2), math.log(0.16**2)
    variance = low + (high - low) * (torch.tanh(perceptron(w, "noise_head", hidden, "tanh")) + 1) / 2
    return clean * (1 - (t - d)) + noisy * (t - d), variance.exp().sqrt()


def density(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    if not std.all():  # the last step of Flow-CPS
        torch.testing.assert_close(x, mean, rtol=0, atol=1e-5)
        return torch.zeros_like(x)
    return -0.5 * ((x - mean) / std) ** 2 - std.log() - 0.5 * math.log(2 * math.pi)
