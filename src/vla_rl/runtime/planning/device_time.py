"""Seconds that a GPU takes for counted operators.

The host launches operators, and the device computes them: each takes the longer of its arithmetic and its memory
traffic. Both overlap in part, so that a call takes the root of the sum of their squares. The constants are fitted to
the 78 calls that were measured on H200s (tests/reference/gpu_times.json), which they meet within 18 %.
"""

from __future__ import annotations

import math
from typing import Literal

from attrs import frozen

from vla_rl.runtime.planning.hardware import GpuRates
from vla_rl.toolkit.models.operation_counter import OperationCounts

Compiled = Literal["off", "blocks", "graphs"]

PRODUCT, ATTENTION, TRAFFIC = 0.83, 0.13, 0.94
"""Shares of the card's rates that operators reach: products and attention of its FLOP/s, others of its traffic."""
FP8_SPEEDUP = 2.2
"""Rate of products in FP8 over those in bfloat16: all products of a learner's pass on an H200. Data sheets say 2."""
KERNEL = 5.1e-6
"""Seconds that each kernel takes besides."""
FUSED_TRAFFIC, FUSED_KERNELS = 0.15, 0.25
"""What compilation leaves of the traffic and of the kernels that are neither products nor attention."""
LAUNCH, RECORDED_LAUNCH, SELECTIVE_LAUNCH = 7.4e-6, 16.8e-6, 42e-6
"""Seconds of the host for an operator: acting; learning, where autograd records it and runs it backward; and learning
with `recompute: selective` without compilation, where Python decides about each."""
CALL = 25e-6
"""Seconds of the host for the call of a module."""
COMPILED_HOST = 0.73
"""What compilation leaves of the host's seconds."""
OPTIMIZER_PASSES = 7
"""Reads and writes of a trained weight in a step of AdamW: weight, gradient and two moments are read, three written."""
CALIBRATED_MODELS = frozenset({"openvla", "openvla_oft", "pi0", "pi05"})
"""Models whose calls were measured."""


@frozen(kw_only=True)
class CallSeconds:
    """Seconds of a call."""

    host: float
    """To launch its operators."""
    device: float
    """To compute them."""

    @property
    def total(self) -> float:
        """Return the seconds until the call is done."""
        return math.hypot(self.host, self.device)


def call_seconds(
    counts: OperationCounts,
    gpu: GpuRates,
    compiled: Compiled = "off",
    *,
    learns: bool = False,
    selective: bool = False,
    adapted_layers: int = 0,
) -> CallSeconds:
    """Return the seconds of a call with these operators.

    Args:
        compiled: as `rollout.compile`.
        learns: the call is a pass forward and backward.
        selective: it recomputes selectively.
        adapted_layers: layers whose adapters are merged, each of which calls a layer inside.
    """
    products, traffic = gpu.product_flops_per_s, gpu.traffic_bytes_per_s * TRAFFIC
    rates = {
        "product": products * PRODUCT,
        "fp8_product": products * FP8_SPEEDUP * PRODUCT,
        "attention": products * ATTENTION,
    }
    device, kernels = 0.0, 0.0
    fused = compiled != "off"
    for operation, count in counts.operations.items():
        seconds = operation.traffic / traffic
        if operation.kind == "other":
            device += count * seconds * (FUSED_TRAFFIC if fused else 1.0)
            kernels += count * (FUSED_KERNELS if fused else 1.0)
        else:
            device += count * max(seconds, operation.flops / rates[operation.kind])
            kernels += count
    launch = RECORDED_LAUNCH if learns else LAUNCH
    if selective and not fused:
        launch = SELECTIVE_LAUNCH
    operators = sum(counts.operations.values())
    host = launch * operators + CALL * (counts.module_calls + adapted_layers)
    share = {"off": 1.0, "blocks": COMPILED_HOST, "graphs": 0.0}[compiled]
    return CallSeconds(host=share * host, device=device + KERNEL * kernels)


def optimizer_seconds(trained_bytes: float, gpu: GpuRates) -> float:
    """Return the seconds of a step of AdamW on float32 weights of this many bytes."""
    return OPTIMIZER_PASSES * trained_bytes / (gpu.traffic_bytes_per_s * TRAFFIC)
