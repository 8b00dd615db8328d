"""Self-tests of a newly built model, each on a few tokens and one layer, so that they are cheap at full size too.

A wrong attention mask, active dropout or overflowing weights do not stop a run; it merely never learns.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn

from vla_rl.core.errors import UserError
from vla_rl.plugins.models.openvla.modeling import OpenVLAForActionPrediction

LENGTH = 8
"""Number of text tokens of a test."""


class GuardError(UserError):
    """Raised when the network does not compute what its weights were trained for."""


@contextmanager
def reduce_network(network: OpenVLAForActionPrediction) -> Iterator[None]:
    """Reduce the network, inside the context, to one Llama layer and one computed block in each vision transformer."""
    llama = network.language_model.model
    vits = (network.vision_backbone.featurizer, network.vision_backbone.fused_featurizer)
    layers, blocks = llama.layers, [vit.blocks for vit in vits]
    llama.layers = layers[:1]
    for vit in vits:
        vit.blocks = nn.ModuleList([vit.blocks[0], vit.blocks[-1]])
    try:
        yield
    finally:
        llama.layers = layers
        for vit, all_blocks in zip(vits, blocks, strict=True):
            vit.blocks = all_blocks


@torch.no_grad()
def check_network(network: OpenVLAForActionPrediction, causal: bool, source: str) -> None:
    """Run the self-tests. Raise GuardError, which says what is wrong and what to do. Weights on the meta device have no
    values to test."""
    if cast("Tensor", network.get_input_embeddings().weight).is_meta:
        return
    with reduce_network(network):
        _check_repetition(network, causal, source)
        _check_attention(network, causal, source)


def _check_attention(network: OpenVLAForActionPrediction, causal: bool, source: str) -> None:
    """Check that earlier positions see the last token if and only if attention is bidirectional, and never padding."""
    weight = cast("Tensor", network.get_input_embeddings().weight)
    ids = torch.arange(LENGTH, device=weight.device)[None]
    other = ids.clone()
    other[0, -1] = LENGTH
    features = weight.new_zeros(1, 2, network.vision_backbone.embed_dim)

    def earlier_states(tokens: Tensor, mask: Tensor | None) -> Tensor:
        result: Tensor = network(None, tokens, attention_mask=mask, causal=causal, features=features)[:, :-1].float()
        return result

    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[0, -1] = False
    moved = float((earlier_states(ids, None) - earlier_states(other, None)).abs().max())
    leaked = float((earlier_states(ids, mask) - earlier_states(other, mask)).abs().max())
    which = network.config.text_config._attn_implementation
    remedy = f"attention implementation {which!r}; use 'sdpa', and the transformers version that the extra asks for"
    if causal and moved > 1e-3:
        raise GuardError(f"{source}: OpenVLA needs causal attention, and tokens see those behind them ({remedy})")
    if not causal and moved == 0:
        raise GuardError(
            f"{source}: OpenVLA-OFT attends in both directions, and tokens do not see those behind them ({remedy})"
        )
    if leaked > 1e-3:
        raise GuardError(f"{source}: padding is seen by other tokens ({remedy})")


def _check_repetition(network: OpenVLAForActionPrediction, causal: bool, source: str) -> None:
    """Check that the same input gives the same, finite logits twice, since greedy actions are a function of the
    observation."""
    weight = cast("Tensor", network.get_input_embeddings().weight)
    size = network.config.image_sizes[0]
    pixels = torch.linspace(-1, 1, 6 * size * size, device=weight.device).to(weight.dtype).view(1, 6, size, size)
    ids = torch.arange(LENGTH, device=weight.device)[None]
    first, second = (network.action_logits(network(pixels, ids, causal=causal)[:, -1]).float() for _ in range(2))
    if not bool(torch.isfinite(first).all()):
        raise GuardError(
            f"{source}: the first layers already give NaN or inf in {str(weight.dtype).removeprefix('torch.')}; "
            "the weights are broken, or too large for this precision (try model.dtype: float32)"
        )
    if not torch.equal(first, second):
        raise GuardError(
            f"{source}: the same input gives other logits the second time (by {(first - second).abs().max():.1e}), "
            "so greedy actions are not reproducible; look for dropout in config.json's text_config, and for kernels "
            "that are not deterministic"
        )
