"""Memory of activations: bytes that a forward pass keeps for its backward pass, also on the meta device."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from vla_rl.runtime.gpu_memory.model_memory import LiveMemory


def saved_bytes(forward: Callable[[], Any]) -> int:
    """Return the bytes that are allocated inside `forward` and alive at its end, while its result is.

    These are the tensors that autograd saves, those that selective recomputation keeps, and the result. Each storage
    counts once, however many tensors share it. Parameters and inputs exist before and do not count. Copies of
    parameters do, such as those that autocast makes: take the difference of two batch sizes for the bytes of a sample.

    Args:
        forward: a forward pass with gradient; its tensors may be on the meta device or fake ones, which take no memory.
            Attention on the plain meta device has no fused kernel and saves its matrix; that of fake tensors has.
    """
    memory = LiveMemory(device=None, block=1)
    with memory:
        result = forward()
    gc.collect()  # what only cycles keep is not needed
    size = memory.now
    del result
    return size
