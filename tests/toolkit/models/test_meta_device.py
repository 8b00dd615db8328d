"""The meta device by CUDA's rules: casts of autocast, fused attention, and bytes that are alive."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from vla_rl.runtime.gpu_memory.model_memory import BLOCK, LiveMemory
from vla_rl.toolkit.models.meta_device import CudaSemantics, device_autocast, is_autocast_on, on_host

META = torch.device("meta")


def test_autocast_casts_as_on_cuda():
    layer, norm = nn.Linear(64, 64, device=META), nn.LayerNorm(64, device=META)
    x = torch.empty(8, 64, device=META)
    with CudaSemantics():
        with device_autocast("meta"):
            assert is_autocast_on("meta")
            y = layer(x)
            assert y.dtype == torch.bfloat16
            assert norm(y).dtype == torch.float32, "which CPUs compute in bfloat16"
            assert (y @ y.T).dtype == torch.bfloat16 and y.exp().dtype == torch.float32
            assert F.gelu(y).dtype == torch.bfloat16, "what is in no list keeps its type"
            with device_autocast("meta", enabled=False):
                assert layer(x).dtype == torch.float32
        assert layer(x).dtype == torch.float32 and not is_autocast_on("meta")
    with device_autocast("meta"):
        assert layer(x).dtype == torch.float32, "outside of the rules the meta device is torch's"


def test_autocast_of_other_devices_is_torchs():
    with device_autocast("cpu"):
        assert is_autocast_on("cpu") and torch.is_autocast_enabled("cpu")
        with device_autocast("cpu", enabled=False):
            assert not is_autocast_on("cpu")


def test_a_weight_is_cast_once_in_an_autocast_region():
    layer, x = nn.Linear(64, 64, bias=False, device=META), torch.empty(64, 64, device=META, dtype=torch.bfloat16)
    with CudaSemantics(), LiveMemory() as memory:
        with torch.no_grad(), device_autocast("meta"):
            for _ in range(3):
                layer(x)
            assert memory.now == 64 * 64 * 2
        assert memory.now == 0


def test_layers_that_are_recomputed_are_cast_again():
    """The backward pass runs outside of the model's autocast, as in PyTorch, and recomputes what was cast."""
    layers = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64)).to(META)
    x = torch.empty(8, 64, device=META, requires_grad=True)
    with CudaSemantics():
        with device_autocast("meta"):
            y = checkpoint(layers, checkpoint(layers, x, use_reentrant=False), use_reentrant=False)
        y.float().sum().backward()
    assert x.grad is not None and all(p.grad is not None for p in layers.parameters())


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_keeps_no_weights(dtype, masked):
    batch, heads, length, width = 2, 4, 512, 64
    q, k, v = (torch.empty(batch, heads, length, width, device=META, dtype=dtype, requires_grad=True) for _ in range(3))
    mask = torch.ones(batch, 1, 1, length, device=META, dtype=torch.bool) if masked else None
    with CudaSemantics(), LiveMemory() as memory:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        assert out.shape == q.shape and out.dtype == dtype
        numbers = batch * heads * length * 4
        assert memory.now <= out.nbytes + 2 * numbers + 2 * BLOCK, "the output, and a number for each query"
        out.sum().backward()
    assert q.grad.shape == q.shape
    with LiveMemory() as memory:
        F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        assert memory.peak >= batch * heads * length * length * dtype.itemsize, "torch's own keeps a matrix"


def test_heads_of_odd_width_and_grouped_heads():
    q = torch.empty(2, 8, 16, 36, device=META, dtype=torch.bfloat16)
    pair = torch.empty(2, 2, 16, 36, device=META, dtype=torch.bfloat16)
    mask = torch.zeros(2, 1, 16, 16, device=META)
    with CudaSemantics():
        for seen in (None, mask):
            assert F.scaled_dot_product_attention(q, pair, pair, seen, enable_gqa=True).shape == q.shape


def test_attention_on_other_devices_is_torchs():
    q = torch.randn(1, 2, 8, 16)
    with CudaSemantics():
        inside = F.scaled_dot_product_attention(q, q, q)
    assert torch.equal(inside, F.scaled_dot_product_attention(q, q, q))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_bytes_are_counted_by_storage_until_they_are_freed(device):
    with LiveMemory(device) as memory:
        x = torch.zeros(1024, device=device)
        view = x[10:].view(-1)
        assert memory.now == 4096
        y = x.exp()
        assert memory.now == memory.peak == 8192
        del y
        assert memory.now == 4096 and memory.peak == 8192
        memory.restart_peak()
        x.add_(1)
        del x
        assert memory.now == memory.peak == 4096, "the view keeps it"
        del view
        assert memory.now == 0
        small = torch.zeros(3, device=device)
        assert memory.now == BLOCK
        assert small.numel() == 3


def test_values_of_the_meta_device_are_zeros_on_the_host():
    assert on_host(torch.empty(2, 3, device=META, dtype=torch.int64)).tolist() == [[0] * 3] * 2
    assert on_host(torch.tensor([1, 2])).tolist() == [1, 2]
