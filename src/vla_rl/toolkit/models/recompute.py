"""Recomputation of activations in the backward pass: `model.recompute: off | selective | full`. Cheap to import.

Full recomputation (Chen et al. 2016) keeps the input of a layer alone. Selective recomputation (Korthikanti et al.
2023) also keeps the results that cost the most floating-point operations a byte; the rest is memory traffic.
"""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

RECOMPUTE = ("off", "selective", "full")
"""Values of `model.recompute`."""
NARROWING = (2, 16)
"""Ratio of inputs to outputs, both excluded, of a product that ends a feed-forward block. Only the residual sum reads
its result, so the backward pass does not need it. Adapters narrow by more, to few outputs."""
PRODUCTS = {"mm": 0, "bmm": 0, "_scaled_mm": 0, "addmm": 1, "baddbmm": 1}
"""Operator -> position of its first factor."""


def checkpoint_keys(recompute: str, width: int) -> dict[str, Any]:
    """Return the keywords of `torch.utils.checkpoint.checkpoint` for layers without randomness.

    Args:
        recompute: "selective" or "full".
        width: channels of the layers. Selective recomputation keeps the products of matrices that sum over at least
            half of them: a product over k channels costs 2 k operations for each number that it returns.
    """
    keys: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if recompute == "selective":
        from torch.utils.checkpoint import create_selective_checkpoint_contexts

        keys["context_fn"] = partial(create_selective_checkpoint_contexts, partial(_choose_policy, max(width // 2, 1)))
    return keys


def _choose_policy(
    least: int, context: SelectiveCheckpointContext, operator: Any, *args: Any, **keys: Any
) -> CheckpointPolicy:
    """Return whether selective recomputation keeps this operator's result."""
    from torch.utils.checkpoint import CheckpointPolicy

    keep = _summed_channels(operator, args) >= least
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def _summed_channels(operator: Any, args: tuple[Any, ...]) -> int:
    """Return half the operations for each number of the result: the channels k over which a product sums, or twice the
    keys that a query attends to. 0 for cheap operators, and for products whose result is not needed."""
    name = _operator_name(operator)
    if name.startswith("_scaled_dot_product"):
        attended: Tensor = args[1]
        return 2 * attended.shape[-2]
    if name not in PRODUCTS:
        return 0
    position = PRODUCTS[name]
    left: Tensor = args[position]
    right: Tensor = args[position + 1]
    channels, outputs = left.shape[-1], right.shape[-1]
    low, high = NARROWING
    return 0 if low * outputs < channels < high * outputs else channels


@cache
def _operator_name(operator: Any) -> str:
    return str(operator.overloadpacket.__name__)
