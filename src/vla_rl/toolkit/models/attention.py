"""Attention masks as numbers added to attention scores, and attention of queries that see nothing.

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
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

WITH_BLIND_QUERIES = "sdpa_with_blind_queries"
"""Name for `_attn_implementation` of a transformers model: sdpa that is also correct for queries that see nothing. It
looks for those only in a forward pass with `blind_queries=True`."""


def added_to_scores(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask to add to attention scores, computed once for all layers and steps: 0 where `seen` (bool) is
    True, else the lowest float. If a whole row is False, the network needs `WITH_BLIND_QUERIES`."""
    return torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)


def attend_evenly(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Attend to all keys alike: return the mean of the values for each query, [B, heads, Q, D].

    The gradient is that of a softmax at equal scores, as in the original code, whose scores are rounded away and still
    reach query and key. It costs a D x D matrix for each head and no weights for each pair of tokens.
    """
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


AttentionInterface.register(WITH_BLIND_QUERIES, _sdpa_with_blind_queries)
