"""Networks on the meta device, which has shapes and no memory: they run there as they would on a CUDA device. The meta
device knows neither autocast nor fused attention. Both decide how many bytes a network needs, so that `CudaSemantics`
does what PyTorch does on CUDA: the casts of autocast, and attention that keeps no matrix of weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

META = "meta"
NARROW = frozenset(
    {"linear", "conv1d", "conv2d", "conv3d", "matmul", "mm", "bmm", "addmm", "baddbmm", "__matmul__", "__rmatmul__"}
    | {"einsum", "prelu", "scaled_dot_product_attention"}
)
"""Functions that autocast computes in its precision on CUDA (torch's `autocast_mode.h`), that networks use."""
WIDE = frozenset(
    {"layer_norm", "group_norm", "norm", "softmax", "log_softmax", "softplus", "logsumexp", "interpolate", "pow"}
    | {"__pow__", "rsqrt", "reciprocal", "exp", "expm1", "log", "log1p", "sum", "prod", "cumsum", "cumprod"}
    | {"cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss"}
)
"""Functions that autocast computes in float32 on CUDA."""
FLASH_HEAD = 256
"""Largest head dimension of flash attention."""


class CudaSemantics(TorchFunctionMode):
    """Mode in which tensors of the meta device are computed by CUDA's rules."""

    def __init__(self) -> None:
        super().__init__()
        self.precision: torch.dtype | None = None
        """Precision of autocast; None: off."""
        self.casts: dict[int, tuple[Tensor, Tensor]] = {}
        """Id of a weight -> the weight and its copy in autocast's precision, which lives until autocast ends."""
        self._last: torch.dtype | None = None
        """Precision of the last autocast."""
        self._tokens: list[Any] = []

    def __enter__(self) -> Self:
        self._tokens.append(_RULES.set(self))
        super().__enter__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # as above
        _RULES.reset(self._tokens.pop())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.backward:
            return self._run_backward(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if self.precision is not None and (name in NARROW or name in WIDE):
            with torch._C.DisableTorchFunction():  # noqa: SLF001 - the casts themselves
                args, kwargs = tree_map(self._narrow_tensor if name in NARROW else _widen_tensor, (args, kwargs))
        if name == "scaled_dot_product_attention":
            return _fused_attention(*args, **kwargs)
        return func(*args, **kwargs)

    def _run_backward(
        self,
        loss: Tensor,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        """Run a backward pass in this mode, so that layers that are recomputed follow the rules of the forward pass.
        torch's own functions switch the mode off first, so the engine is called as they call it."""
        engine: Any = torch.autograd.Variable._execution_engine  # noqa: SLF001 - there is no public name
        with self.resume_autocast(), self:
            gradient = torch.ones_like(loss) if gradient is None else gradient
            keep = create_graph if retain_graph is None else retain_graph
            engine.run_backward(
                (loss,),
                (gradient,),
                keep,
                create_graph,
                () if inputs is None else inputs,
                allow_unreachable=True,
                accumulate_grad=True,
            )

    @contextmanager
    def imitate_autocast(self, precision: torch.dtype | None) -> Iterator[None]:
        """Context of autocast in this precision; None: off."""
        outer = self.precision
        self.precision = precision
        self._last = precision or self._last
        try:
            yield
        finally:
            self.precision = outer
            if outer is None:
                self.casts.clear()

    @contextmanager
    def resume_autocast(self) -> Iterator[None]:
        """Context in which autocast is as it last was in a forward pass."""
        outer = self.precision
        self.precision = self._last
        try:
            yield
        finally:
            self.precision = outer

    def _narrow_tensor(self, value: Any) -> Any:
        precision = self.precision
        if not _is_meta_float(value) or value.dtype in (precision, torch.float64):
            return value
        assert precision is not None
        if not (value.requires_grad and value.is_leaf):
            return value.to(precision)
        if id(value) not in self.casts:
            self.casts[id(value)] = value, value.to(precision)
        return self.casts[id(value)][1]


_RULES: ContextVar[CudaSemantics | None] = ContextVar("rules of the meta device", default=None)


def _is_meta_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta and value.is_floating_point()


def _widen_tensor(value: Any) -> Any:
    narrow = _is_meta_float(value) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if narrow else value


def device_autocast(
    device: str, dtype: torch.dtype = torch.bfloat16, *, enabled: bool = True
) -> AbstractContextManager[Any]:
    """Return `torch.autocast` for a type of device; on the meta device its imitation, inside `CudaSemantics`."""
    if device != META:
        return torch.autocast(device, dtype, enabled)
    rules = _RULES.get()
    return nullcontext() if rules is None else rules.imitate_autocast(dtype if enabled else None)


def autocast_type(device: str) -> torch.dtype | None:
    """Return the type in which autocast computes products on this type of device; None where it is off."""
    if device != META:
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    rules = _RULES.get()
    return None if rules is None else rules.precision


def is_autocast_on(device: str) -> bool:
    """Return whether autocast is on for this type of device."""
    return autocast_type(device) is not None


def _fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attend as CUDA's kernels do: flash attention without a mask in half precision, else memory-efficient attention.
    Both keep their inputs, the output and a number a query for the backward pass. A mask of bools becomes numbers, one
    for each pair of tokens, and rows of masks are padded to multiples of 8."""
    aten: Any = torch.ops.aten
    tracked = torch.is_grad_enabled() and any(part.requires_grad for part in (query, key, value))
    if not query.is_meta:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    half = query.dtype in (torch.bfloat16, torch.float16)
    if attn_mask is None and half and query.shape[-1] <= FLASH_HEAD:
        width = query.shape[-1]
        scale = width**-0.5 if scale is None else scale
        if width % 8:
            query, key, value = (F.pad(part, (0, 8 - width % 8)) for part in (query, key, value))
        result: Tensor = aten._scaled_dot_product_flash_attention(  # noqa: SLF001 - has no public name
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
        return result[..., :width]
    if enable_gqa:
        key, value = (part.repeat_interleave(query.shape[-3] // part.shape[-3], -3) for part in (key, value))
    bias = None
    if attn_mask is not None:
        bias = attn_mask
        if bias.dtype == torch.bool:
            bias = torch.zeros_like(bias, dtype=query.dtype).masked_fill_(bias.logical_not(), -torch.inf)
        length = bias.shape[-1]
        if length % 8:
            bias = F.pad(bias, (0, 8 - length % 8))[..., :length]
        bias = bias.to(query.dtype).expand(*query.shape[:2], query.shape[2], key.shape[2])
    result = aten._scaled_dot_product_efficient_attention(  # noqa: SLF001 - as above
        query, key, value, bias, tracked, dropout_p, is_causal, scale=scale
    )[0]
    return result


def on_host(tensor: Tensor) -> Tensor:
    """Return a tensor in host memory; zeros for one of the meta device, which has no values."""
    return torch.zeros(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else tensor.cpu()
