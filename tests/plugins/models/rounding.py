"""How far two computations of the same numbers may be apart in float32."""

from __future__ import annotations

import torch
from torch import Tensor

EPS = torch.finfo(torch.float32).eps


def assert_same_up_to(roundings: int, found: Tensor, wanted: Tensor) -> None:
    """Every entry within this many roundings (2^-23) of the largest number in `wanted`.

    Which kernel multiplies two matrices depends on the processor and on the shapes, and each adds the products up in
    its own order. What that changes is relative to the terms of the sums; an entry that is small is a difference
    of larger ones, so the tensor's largest number is the measure and not the entry. With AVX-512, AVX2 and SSE4.2 of
    two makers, tiny networks differ by at most 8 roundings after a vision tower, 14 after the language model behind it
    and 18 after four denoising steps.
    """
    largest = float(wanted.abs().max())
    apart = float((found - wanted).detach().abs().max())
    print(f"{apart:.1e} apart, {apart / (EPS * largest):.1f} of {roundings} roundings of {largest:.3g}")
    torch.testing.assert_close(found, wanted, rtol=0, atol=roundings * EPS * largest)
