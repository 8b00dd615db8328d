#!/usr/bin/env bash
# torch on a CPU: in bfloat16 the gradients of LayerNorm's bias and of an embedding stop growing at 256 contributions.
#
# An expert would guess: products and sums in bfloat16 are accumulated in float32 and rounded once at the end; the
#   gradient of a bias is the sum over all tokens, right to half a percent, whichever layer the bias is in.
# Versions: torch 2.13.0 (CPU), NumPy 2.4.6.
# Behaviour: Linear, Conv, RMSNorm, GroupNorm, BatchNorm and a broadcast addition do so. The backward pass of
#   LayerNorm adds row by row in bfloat16, and so do Embedding, indexing with a tensor, and index_add: a sum that is
#   256 times a contribution no longer changes. scatter_add is right. With gradients of both signs the sum does not
#   stop but loses the small excess of one sign that is the gradient: of a mean of 0.1 with a deviation of 1 a sixth
#   is found. (LayerNorm adds within each thread; this is one thread, as in a Ray worker.)
# What it means: an action token, a position or a task embedding that occurs in each row of a batch, and every
#   LayerNorm of a vision tower, learn more slowly the larger the batch is, and gradients on a CPU and elsewhere
#   differ by a factor, not by rounding. Comparisons on small batches agree. float32 weights cure an embedding, and not
#   a LayerNorm: its sums are in the type of the activations, so autocast on a CPU has them too.
# Output seen (gradient for n like contributions of 1/64; it should be n / 64; "float32": weights, bfloat16 activations):
#   Linear:              n = 256: 4, 1,024: 16, 16,384: 256
#   GroupNorm:           n = 256: 4, 1,024: 16, 16,384: 256
#   broadcast:           n = 256: 4, 1,024: 16, 16,384: 256
#   LayerNorm:           n = 256: 4, 1,024: 4, 16,384: 4
#   LayerNorm, float32:  n = 256: 4, 1,024: 4, 16,384: 4
#   Embedding:           n = 256: 4, 1,024: 4, 16,384: 4
#   table[index]:        n = 256: 4, 1,024: 4, 16,384: 4
#   65,536 contributions of 0.1 +- 1, gradient over the true one, mean of 8:
#   Linear:              1.00
#   GroupNorm:           1.00
#   broadcast:           1.00
#   LayerNorm:           0.16
#   LayerNorm, float32:  0.16
#   Embedding:           0.16
#   table[index]:        0.16
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export TMPDIR=$work
python3 -m venv "$work/venv"
pip=("$work/venv/bin/pip" install -q --no-compile)
{ "${pip[@]}" torch==2.13.0 && "${pip[@]}" numpy==2.4.6; } >"$work/pip.log" 2>&1 ||
  { cat "$work/pip.log"; exit 2; } # torch's CPU build suffices
"$work/venv/bin/python" - <<'PY'
import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(0)


def gradient(name, upstream):
    """The gradient of the bias (or of the one row that is used) for the upstream gradient (n, 8)."""
    n, dtype = len(upstream), upstream.dtype
    x, zeros = torch.randn(n, 8).to(dtype), torch.zeros(n, dtype=torch.long)
    table = nn.Parameter(torch.zeros(4, 8, dtype=dtype))
    base = torch.zeros(1, 8, dtype=dtype, requires_grad=True)
    layers = {"Linear": (8, 8), "LayerNorm": (8,), "GroupNorm": (2, 8)}
    kind, _, wide = name.partition(", ")
    if kind in layers:
        layer = getattr(nn, kind)(*layers[kind]).to(torch.float32 if wide else dtype)
        layer(x).backward(upstream)
        return layer.bias.grad.float()
    if name == "Embedding":
        layer = nn.Embedding(4, 8).to(dtype)
        layer(zeros).backward(upstream)
        return layer.weight.grad[0].float()
    if name == "table[index]":
        table[zeros].backward(upstream)
        return table.grad[0].float()
    (torch.zeros_like(x) + base).backward(upstream)
    return base.grad[0].float()


names = ("Linear", "GroupNorm", "broadcast", "LayerNorm", "LayerNorm, float32", "Embedding", "table[index]")
seen = {}
for name in names:
    seen[name] = [gradient(name, torch.full((n, 8), 1 / 64, dtype=torch.bfloat16))[0].item() for n in (256, 1024, 16384)]
    print("{:20s} n = 256: {:g}, 1,024: {:g}, 16,384: {:g}".format(name + ":", *seen[name]))
for name in names[:3]:
    assert seen[name] == [4, 16, 256], "the behaviour changed"
for name in names[3:]:
    assert seen[name] == [4, 4, 4], "the behaviour changed"
noise = (torch.randn(65536, 8) + 0.1).to(torch.bfloat16)
true = noise.double().sum(0)
print("65,536 contributions of 0.1 +- 1, gradient over the true one, mean of 8:")
for name in names:
    ratio = (gradient(name, noise) / true).mean().item()
    print(f"{name + ':':20s} {ratio:.2f}")
    assert abs(ratio - 1) < 0.02 if name in names[:3] else ratio < 0.8, "the behaviour changed"
PY
