"""Attention masks as numbers added to scores, attention of heads that share keys, and of queries that see nothing.

openpi and transformers add the lowest float to the scores of what a token does not see. A query that sees nothing then
has equal scores: it attends to all keys alike, also to hidden ones. torch's fused kernels cannot compute such a query.
They keep the logarithm of the scores' sum for the backward pass, and the lowest float plus log(n) is the lowest float:
each weight comes back as 1 in place of 1/n. Kernels that scale scores by log2(e), and autocast to bfloat16, make them
infinite, and the result is not a number.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

WITH_BLIND_QUERIES = "sdpa_with_blind_queries"
"""Name for `_attn_implementation` of a transformers model: sdpa that is also correct for queries that see nothing. It
looks for those only in a forward pass with `blind_queries=True`."""

WITH_SHARED_KEYS = "sdpa_with_shared_keys"
"""Name for `_attn_implementation` of a transformers model: `attend_to_shared_keys`, with its mask."""


def added_to_scores(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask to add to attention scores, computed once for all layers and steps: 0 where `seen` (bool) is
    True, else the lowest float. If a whole row is False, the network needs `WITH_BLIND_QUERIES`."""
    return torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)


def attend_to_shared_keys(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None = None
) -> Tensor:
    """Attend with heads that share keys; return [B, Q, heads, D].

    Query heads that share a head of keys become further queries of that head, so keys and values are read once. torch
    and transformers copy them for each query head, and sum the gradients of the copies.

    Args:
        query: [B, heads, Q, D].
        key: [B, kv heads, K, D]; `value` too.
        mask: added to the scores, [B, 1, 1, K], or of `repeat_for_heads`; None: all keys are seen.
        scaling: factor of the scores; None: 1 / sqrt(D).
    """
    # Layers compute queries as [B, Q, heads, D], and show them transposed: with one head of keys this copies nothing.
    grouped = query.transpose(1, 2).unflatten(2, (key.shape[1], -1)).transpose(1, 2)
    attended = F.scaled_dot_product_attention(grouped.flatten(2, 3), key, value, attn_mask=mask, scale=scaling)
    result: Tensor = attended.unflatten(2, grouped.shape[2:4]).transpose(1, 2).flatten(2, 3)
    return result


def repeat_for_heads(mask: Tensor, groups: int) -> Tensor:
    """Return the mask [B, 1, Q * groups, K] of `attend_to_shared_keys`, computed once for all layers and steps.

    Args:
        mask: [B, 1, Q, K].
        groups: number of query heads that share a head of keys.
    """
    return mask.repeat_interleave(groups, dim=2)


def attend_evenly(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Attend to all keys alike: return the mean of the values for each query, [B, heads, Q, D]. The gradient is that of
    a softmax at equal scores, as in the original code, whose scores are rounded away and still reach query and key. It
    costs a D x D matrix for each head and no weights for each pair of tokens."""
    groups = query.shape[1] // key.shape[1]
    mean = value.mean(2, keepdim=True, dtype=torch.float32)
    out = repeat_kv(mean, groups).expand(*query.shape[:3], -1)
    if not torch.is_grad_enabled():
        return out
    apart = (value - mean).detach()
    slope = scaling / key.shape[2] * key.transpose(2, 3).float() @ apart
    moved = query.float() @ repeat_kv(slope, groups)
    return out + (moved - moved.detach())


def _sdpa_with_blind_queries(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    blind_queries: bool = False,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Attend as an attention function of transformers: from [B, heads, T, D] to [B, T, heads, D]."""
    if not blind_queries or attention_mask is None:
        out: Tensor = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **rest)[0]
        return out, None
    blind = attention_mask.amax(-1, keepdim=True) == torch.finfo(attention_mask.dtype).min
    attention_mask = attention_mask.masked_fill(blind, 0)
    out = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **rest)[0]
    even = attend_evenly(query, key, value, scaling).to(out.dtype)
    return torch.where(blind, even, out.transpose(1, 2)).transpose(1, 2), None


def _sdpa_with_shared_keys(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Attend as an attention function of transformers: from [B, heads, T, D] to [B, T, heads, D]."""
    return attend_to_shared_keys(query, key, value, attention_mask, scaling), None


AttentionInterface.register(WITH_BLIND_QUERIES, _sdpa_with_blind_queries)
AttentionInterface.register(WITH_SHARED_KEYS, _sdpa_with_shared_keys)
