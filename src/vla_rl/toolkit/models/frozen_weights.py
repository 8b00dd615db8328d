"""Weights that are not trained, stored in 8 or 4 bits: `model.frozen_weights: bf16 | fp8 | int8 | nf4`.

int8 and nf4 (QLoRA, Dettmers et al. 2023) are storage: a layer dequantises its weight for each product, forward and
backward, and frees it afterwards. fp8 also computes both products in FP8. Acting and learning use the same stored
weights, so they give equal log-probs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_rl.toolkit.models.blocks import find_blocks
from vla_rl.toolkit.models.checkpoints.fitting import MismatchError
from vla_rl.toolkit.models.meta_device import META, autocast_type

FP8 = torch.float8_e4m3fn
FP8_CAPABILITY = (8, 9)
"""CUDA compute capability from which on GPUs multiply in FP8 (Ada, Hopper)."""
WITHOUT_FP8 = "fp8 needs a GPU that multiplies in FP8 (Ada, Hopper or newer), and {} does not; use int8, nf4 or bf16"
"""Message about a device, which is inserted."""
FP8_MULTIPLE = 16
"""Channels of an FP8 product are a multiple of this."""
LARGEST = {torch.int8: 127.0, FP8: 448.0}
"""Largest number of a type, to which the largest weight of a row is scaled."""
TINIEST = 1e-12
"""Scale of a row of zeros."""
NF4_BLOCK = 64
"""Weights that share a scale, as in QLoRA."""
NF4_LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634),
    *(0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""The 16 numbers of NormalFloat4 (QLoRA, appendix E): equally likely for normally distributed weights."""


# ------------------------------------------------------------------------------------------------------------- storage


def _pack_rows(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a matrix [N, K] in this type, and the scales [N, 1], float32, that multiply its rows."""
    wide = weight.float()
    scales = wide.abs().amax(dim=1, keepdim=True).clamp_(min=TINIEST) / LARGEST[dtype]
    wide = wide / scales
    return (wide.round_() if dtype == torch.int8 else wide).to(dtype), scales


def _pack_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return FP8 numbers as int8 with the same bits, which any process group sends, and scales as `_pack_rows`."""
    stored, scales = _pack_rows(weight, FP8)
    return stored.view(torch.int8), scales


def _pack_nf4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a weight as uint8 [ceil(numel / 64) * 32], two codes a byte, and the scale of each 64 weights in the
    weight's own type: their largest, which is thereby kept exactly."""
    flat = F.pad(weight.flatten(), (0, -weight.numel() % NF4_BLOCK)).view(-1, NF4_BLOCK)
    scales = flat.abs().amax(dim=1).clamp_(min=TINIEST)
    levels = torch.tensor(NF4_LEVELS, device=weight.device)
    codes = torch.bucketize(flat.float() / scales[:, None].float(), (levels[1:] + levels[:-1]) / 2, out_int32=True)
    codes = codes.to(torch.uint8).view(-1, 2)
    return codes[:, 0] * 16 + codes[:, 1], scales


def _pair_levels(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the two NF4 numbers of each byte, [256, 2]: one look-up finds both."""
    levels = torch.tensor(NF4_LEVELS, device=device).to(dtype)
    return torch.stack([levels.repeat_interleave(16), levels.repeat(16)], dim=1)


def unpack_weight(stored: Tensor, scales: Tensor, kind: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return a weight that `PACK[kind]` stored, in a type."""
    wide = stored.view(FP8).float() if kind == "fp8" else stored
    levels = _pair_levels(stored.device, dtype) if kind == "nf4" else None
    return _unpack_weight(wide, scales, levels, shape, dtype)


def round_weight(weight: Tensor, kind: str) -> Tensor:
    """Return a weight as a layer that stores it computes with it."""
    return unpack_weight(*PACK[kind](weight), kind, weight.shape, weight.dtype)


def _unpack_weight(
    stored: Tensor, scales: Tensor, levels: Tensor | None, shape: torch.Size, dtype: torch.dtype, backward: bool = False
) -> Tensor:
    """Return a weight in a type: rows rounded once, of NF4 the levels and their product with the scale.

    Args:
        levels: numbers of NF4's bytes, [256, 2]; None: rows with a scale each.
        backward: see `_Product`.
    """
    if levels is None:
        factors = (scales, stored) if backward else (stored, scales)
        return torch.mul(*factors, out=torch.empty(shape, dtype=dtype, device=stored.device))
    index = stored.long() if backward else stored.int()
    blocks = levels.to(dtype).index_select(0, index).view(-1, NF4_BLOCK).mul_(scales.to(dtype)[:, None])
    return blocks.view(-1)[: shape.numel()].view(shape)


PACK: Mapping[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "fp8": _pack_fp8,
    "int8": lambda weight: _pack_rows(weight, torch.int8),
    "nf4": _pack_nf4,
}


# ------------------------------------------------------------------------------------------------------------ products


class _Product(torch.autograd.Function):
    """Product with a weight dequantised for it, and again for the input's gradient: only stored numbers are kept. The
    compiler would find that both passes compute the same weight, and keep it from one to the other in full precision,
    for all layers. So the backward pass dequantises by other operators with an equal result."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        stored: Tensor,
        scales: Tensor,
        levels: Tensor | None,
        bias: Tensor | None,
        shape: torch.Size,
    ) -> Tensor:
        ctx.save_for_backward(stored, scales, levels)
        ctx.shape = shape
        return F.linear(x, _unpack_weight(stored, scales, levels, shape, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        stored, scales, levels = ctx.saved_tensors
        weight = _unpack_weight(stored, scales, levels, ctx.shape, gradient.dtype, backward=True)
        return gradient @ weight, None, None, None, None, None


class _FP8Product(torch.autograd.Function):
    """Product in FP8, with a scale for each row of the input and of the weight; the gradient of the input likewise. A
    scale of a weight's row does not factor out of the second product, so the gradient is multiplied by it before."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stored: Tensor, scales: Tensor) -> Tensor:
        ctx.save_for_backward(stored, scales)
        return _multiply_fp8(x, stored.view(FP8).t(), scales.view(1, -1))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        stored, scales = ctx.saved_tensors
        columns = stored.t().contiguous().t().view(FP8)  # GPUs multiply FP8 in this layout alone
        ones = torch.ones(1, stored.shape[1], device=stored.device)
        return _multiply_fp8(gradient * scales.view(-1), columns, ones).to(gradient.dtype), None, None


def _multiply_fp8(x: Tensor, matrix: Tensor, scales: Tensor) -> Tensor:
    """Return x [..., K] times a matrix [K, N], FP8, whose columns have the scales [1, N]."""
    rows, row_scales = _pack_rows(x.reshape(-1, x.shape[-1]), FP8)
    product = torch._scaled_mm(  # noqa: SLF001 - its public name, F.scaled_mm, is younger than the oldest torch here
        rows, matrix, scale_a=row_scales, scale_b=scales, out_dtype=torch.bfloat16
    )
    return product.view(*x.shape[:-1], -1).to(x.dtype)


class FrozenLinear(nn.Module):
    """Linear layer whose weight is stored in fewer bits and not trained."""

    levels: Tensor | None
    """With nf4 the two numbers of each byte, [256, 2]."""
    merged: Tensor | None
    """Weight with merged adapters, [N, K] in `dtype`, in place of the stored one in acting; None: that one."""

    def __init__(self, layer: nn.Linear, kind: str) -> None:
        """Store the weight of a layer whose parameters are frozen; `kind`: fp8, int8 or nf4."""
        super().__init__()
        self.kind = kind
        self.in_features = layer.in_features
        self.out_features = layer.out_features
        self.dtype = layer.weight.dtype
        """Type of the weight in full precision."""
        stored, scales = PACK[kind](layer.weight.detach())
        self.stored = nn.Parameter(stored, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.bias = layer.bias
        levels = _pair_levels(stored.device, self.dtype) if kind == "nf4" else None
        self.register_buffer("levels", levels, persistent=False)
        self.register_buffer("merged", None, persistent=False)

    @property
    def shape(self) -> torch.Size:
        """Shape of the weight."""
        return torch.Size((self.out_features, self.in_features))

    def forward(self, x: Tensor) -> Tensor:
        if self.merged is not None:
            return F.linear(x, self.merged, self.bias)
        dtype = autocast_type(x.device.type) or x.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        if self.kind == "fp8":
            product: Tensor = _FP8Product.apply(x.to(dtype), self.stored, self.scales)  # type: ignore[no-untyped-call]
            return product if bias is None else product + bias
        result: Tensor = _Product.apply(  # type: ignore[no-untyped-call]
            x.to(dtype), self.stored, self.scales, self.levels, bias, self.shape
        )
        return result

    def read_weight(self) -> Tensor:
        """Return the stored weight in full precision, [N, K]."""
        return unpack_weight(self.stored.detach(), self.scales.detach(), self.kind, self.shape, self.dtype)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, kind={self.kind}"


# -------------------------------------------------------------------------------------------------------------- models


def store_frozen_weights(module: nn.Module, blocks: Sequence[type[nn.Module]], kind: str) -> None:
    """Store the frozen linear layers of a network's repeated layers in fewer bits, in place. What is trained, norms,
    embeddings, heads and other layers outside of blocks stay as they are, with fp8 also layers of odd sizes.

    Args:
        blocks: classes of the repeated layers.
        kind: `model.frozen_weights`; bf16: nothing changes.

    Raises MismatchError for fp8 on a device without it.
    """
    if kind == "bf16":
        return
    repeated = find_blocks(module, blocks)
    if kind == "fp8":
        # of the blocks alone: a critic may still be on the host, where it was initialised
        for device in {next(block.parameters()).device for block in repeated}:
            if (problem := find_fp8_problem(device)) is not None:
                raise MismatchError(f"model.frozen_weights: {problem}")
    for parent, name, layer in list(find_storable(repeated, kind)):
        if not any(parameter.requires_grad for parameter in layer.parameters()):
            setattr(parent, name, FrozenLinear(layer, kind))


def find_storable(repeated: Sequence[nn.Module], kind: str) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Yield parent, name and layer of the blocks' linear layers that are stored in fewer bits where frozen."""
    for block in repeated:
        for path, part in block.named_modules():
            for name, layer in part.named_children():
                if type(layer) is not nn.Linear or "norm" in f"{path}.{name}" or isinstance(part, nn.ModuleDict):
                    continue  # peft keeps the layers of adapters in dicts
                if kind != "fp8" or not (layer.in_features % FP8_MULTIPLE or layer.out_features % FP8_MULTIPLE):
                    yield part, name, layer


def find_fp8_problem(device: torch.device) -> str | None:
    """Return why a device cannot multiply in FP8, and what to choose; None: it can, as the meta device may."""
    if device.type == META:
        return None
    name = f"device {device.type!r}"
    if device.type == "cuda":
        if torch.cuda.get_device_capability(device) >= FP8_CAPABILITY:
            return None
        name = torch.cuda.get_device_name(device)
    return WITHOUT_FP8.format(name)


def read_weight(layer: nn.Module) -> Tensor:
    """Return the weight [N, K] of a linear layer, stored or not, in full precision."""
    if isinstance(layer, FrozenLinear):
        return layer.read_weight()
    assert isinstance(layer, nn.Linear)
    return layer.weight.detach()


def count_weights(module: nn.Module) -> int:
    """Return the number of a network's weights; a stored one counts once, and its scales do not."""
    layers = [part for part in module.modules() if isinstance(part, FrozenLinear)]
    packed = sum(layer.stored.numel() + layer.scales.numel() for layer in layers)
    return sum(p.numel() for p in module.parameters()) - packed + sum(layer.shape.numel() for layer in layers)
