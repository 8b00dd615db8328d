"""Products in FP8 on a CPU, which a run refuses because they are slow, and which tests compute."""

from __future__ import annotations

import pytest
import torch


def _multiplies_fp8() -> bool:
    matrix, scales = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(16, 1)
    try:
        torch._scaled_mm(matrix, matrix.t(), scale_a=scales, scale_b=scales.t(), out_dtype=torch.bfloat16)
    except RuntimeError:  # torch 2.9 has one scale for a whole matrix, on a CPU
        return False
    return True


MULTIPLIES_FP8 = _multiplies_fp8()
"""Whether this version of torch multiplies FP8 with a scale for each row on a CPU."""
needs_fp8 = pytest.mark.skipif(not MULTIPLIES_FP8, reason="this torch multiplies FP8 by rows on a GPU alone")
KINDS = ("int8", "nf4", pytest.param("fp8", marks=needs_fp8))
"""Values of `frozen_weights` that store weights, to compute with."""
