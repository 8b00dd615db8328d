"""Operators that are counted as they run."""

from __future__ import annotations

import torch
from torch import nn

from vla_rl.toolkit.models.operation_counter import OperationCounter


def test_products_and_traffic_of_a_layer_forward_and_backward():
    with OperationCounter() as counter:
        layer = nn.Linear(8, 16, bias=False, device="meta")
        x = torch.empty(4, 8, device="meta")
        counter.restart_counts()
        y = layer(x)
        forward = counter.operation_counts
        counter.restart_counts()
        y.relu().sum().backward()
        backward = counter.operation_counts
    assert forward.total_flops == 2 * 4 * 8 * 16
    ((product, count),) = [(o, n) for o, n in forward.operations.items() if o.kind == "product"]
    assert count == 1 and product.traffic == 4 * (4 * 8 + 8 * 16 + 4 * 16)
    assert forward.module_calls == 1 and backward.module_calls == 0
    assert backward.total_flops == forward.total_flops, "the gradient of the weights; x needs none"
    assert any(operation.kind == "other" for operation in backward.operations)


def test_views_start_nothing_and_expanded_tensors_count_once():
    x = torch.empty(1, 8, device="meta")
    with OperationCounter() as counter:
        wide = x.expand(1000, 8)
        assert not counter.operation_counts.operations
        wide.t().view(8, 1000)
        assert not counter.operation_counts.operations
        wide + 1
    ((operation, count),) = counter.operation_counts.operations.items()
    assert (operation.kind, operation.traffic, count) == ("other", 4 * (8 + 8000), 1)


def test_attention_is_a_separate_kind_and_the_host_does_not_count():
    q = torch.empty(1, 2, 8, 16, device="meta", dtype=torch.bfloat16)
    with OperationCounter() as counter:
        torch.ones(3) + 1
        assert not counter.operation_counts.operations
        torch.ops.aten._scaled_dot_product_flash_attention(q, q, q)
    ((operation, _),) = [pair for pair in counter.operation_counts.operations.items() if pair[0].kind == "attention"]
    assert operation.flops == 2 * 2 * 2 * 8 * 8 * 16
