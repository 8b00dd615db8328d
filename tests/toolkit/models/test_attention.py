"""Attention of heads that share keys, and of queries that see nothing, compared with a softmax."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from vla_rl.toolkit.models.attention import (
    WITH_BLIND_QUERIES,
    added_to_scores,
    attend_to_shared_keys,
    repeat_for_heads,
)

B, HEADS, GROUPS, QUERIES, KEYS, SIZE = 2, 4, 2, 5, 6, 8


def draw_inputs(dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Return query, key and value, and which key each query sees, bool [B, 1, Q, K]: query 1 of sample 0 sees none."""
    rng = torch.Generator().manual_seed(0)
    shapes = [(B, HEADS, QUERIES, SIZE)] + [(B, HEADS // GROUPS, KEYS, SIZE)] * 2
    inputs = [torch.randn(shape, generator=rng).to(dtype).requires_grad_() for shape in shapes]
    seen = torch.rand(B, 1, QUERIES, KEYS, generator=rng) < 0.6
    seen[..., 0] = True
    seen[0, :, 1] = False
    return inputs, seen


def attend(inputs: list[Tensor], mask: Tensor) -> Tensor:
    module = nn.Module()
    module.num_key_value_groups = GROUPS
    function = AttentionInterface._global_mapping[WITH_BLIND_QUERIES]
    out: Tensor = function(module, *inputs, mask, scaling=SIZE**-0.5, dropout=0.0, blind_queries=True)[0]
    return out


def attend_exactly(inputs: list[Tensor], seen: Tensor) -> Tensor:
    """Return the definition's result in float64, [B, Q, heads, D]: equal weights where nothing is seen."""
    query, key, value = inputs[0].double(), *(part.double().repeat_interleave(GROUPS, 1) for part in inputs[1:])
    scores = query @ key.transpose(2, 3) * SIZE**-0.5
    equal = scores - scores.detach()  # zero, with the gradient of the scores
    weights = torch.where(
        seen.any(-1, keepdim=True), scores.masked_fill(~seen, -torch.inf).nan_to_num(neginf=-1e9), equal
    ).softmax(-1)
    return (weights @ value).transpose(1, 2)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02), (torch.float16, 4e-3)])
def test_a_query_that_sees_nothing_attends_to_all_keys_alike(dtype: torch.dtype, tolerance: float) -> None:
    """With torch's fused kernels alone, such a query has six times the gradient (one per key), and in float16 it
    attends as if nothing were hidden."""
    inputs, seen = draw_inputs(dtype)
    out = attend(inputs, added_to_scores(seen, dtype))
    expected = attend_exactly(inputs, seen)
    assert (out.double() - expected).abs().max() < tolerance
    slopes = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ours = torch.autograd.grad((out.double() * slopes).sum(), inputs)
    theirs = torch.autograd.grad((expected * slopes).sum(), inputs)
    for one, other in zip(ours, theirs, strict=True):
        assert (one.double() - other.double()).abs().max() < 3 * tolerance


def test_hidden_keys_change_nothing_for_queries_that_see() -> None:
    inputs, seen = draw_inputs(torch.float32)
    seen[..., 2] = False
    out = attend(inputs, added_to_scores(seen, torch.float32))
    moved = [inputs[0], *(part.detach().index_fill(2, torch.tensor([2]), 9.0) for part in inputs[1:])]
    changed = (attend(moved, added_to_scores(seen, torch.float32)) - out).abs().amax((2, 3))
    assert changed[0, 1] > 0.1, "the query that sees nothing attends to hidden keys too"
    changed[0, 1] = 0
    assert changed.max() == 0


@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_heads_that_share_keys_attend_as_with_copies_of_them(key_heads: int) -> None:
    rng = torch.Generator().manual_seed(0)
    query = torch.randn(B, QUERIES, HEADS, SIZE, generator=rng).transpose(1, 2).requires_grad_()
    pair = [torch.randn(B, key_heads, KEYS, SIZE, generator=rng).requires_grad_() for _ in range(2)]
    seen = torch.rand(B, 1, QUERIES, KEYS, generator=rng) < 0.6
    seen[..., 0] = True
    groups = HEADS // key_heads
    out = attend_to_shared_keys(query, *pair, repeat_for_heads(added_to_scores(seen, torch.float32), groups))
    scores = query @ pair[0].repeat_interleave(groups, 1).transpose(2, 3) * SIZE**-0.5
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    expected = (weights @ pair[1].repeat_interleave(groups, 1)).transpose(1, 2)
    torch.testing.assert_close(out, expected)
    slopes = torch.randn(out.shape, generator=rng)
    ours, theirs = (torch.autograd.grad((result * slopes).sum(), (query, *pair)) for result in (out, expected))
    torch.testing.assert_close(ours, theirs)
    with torch.no_grad():
        alike = attend_to_shared_keys(query, *pair, added_to_scores(seen[:, :, :1], torch.float32), 1.0)
        scores = query @ pair[0].repeat_interleave(groups, 1).transpose(2, 3)
        weights = scores.masked_fill(~seen[:, :, :1], -torch.inf).softmax(-1)
        torch.testing.assert_close(alike, (weights @ pair[1].repeat_interleave(groups, 1)).transpose(1, 2))
