"""The layers of a language model of transformers, run one after another, and what a layer keeps of the tokens before.

transformers' own loop hands one cache to all layers, which tells them apart by their number: compiled code would be
compiled once for each layer. It also looks at the values of masks and positions on the host, which stalls a GPU. Here a
layer gets its own cache, and the caller prepares the mask.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines of a rotary embedding, [B or 1, T, D] each."""


class LayerCache(Protocol):
    """Cache of one layer, in the form in which transformers' layers call it."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, **_: Any) -> tuple[Tensor, Tensor]:
        """Return all keys and values that the new tokens attend to, [B, kv heads, T, D]. Layers also pass `kwargs`, the
        further arguments of their attention, since transformers 5.24."""


def cache_argument(layer: type) -> str:
    """Return the argument of a decoder layer of transformers for its cache: `cache` since 5.24,
    `past_key_values` before. A layer accepts any keyword, so that a wrong one would be ignored, and the tokens would
    attend to each other alone. TypeError if the layer has neither."""
    arguments = inspect.signature(layer.forward).parameters  # type: ignore[attr-defined]  # every module has it
    for name in ("cache", "past_key_values"):
        if name in arguments:
            return name
    raise TypeError(f"{layer.__name__}.forward has no argument `cache` or `past_key_values`: {', '.join(arguments)}")


CACHE = cache_argument(LlamaDecoderLayer)
"""Argument of the installed version's layers: Llama's, Gemma's and Qwen's have the same name."""


class RecordedLayer:
    """Records a layer's keys and values of one pass."""

    keys: Tensor
    values: Tensor

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.keys = key_states
        self.values = value_states
        return key_states, value_states


class LentLayer:
    """A prefix's keys and values, reused in one pass after the other. The suffix is attended to and not stored, so
    nothing has to be cropped and no pass keeps another one's graph. A pass may have several suffixes of each sample,
    all samples one after the other: its rows are a multiple of the prefix's."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys = keys
        self.values = values

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return _append_tokens(self.keys, key_states), _append_tokens(self.values, value_states)


def _append_tokens(lent: Tensor, own: Tensor) -> Tensor:
    """Return keys or values [n B, heads, P + T, D]: lent ones [B, heads, P, D], then a pass's [n B, heads, T, D]."""
    if len(own) == len(lent):
        return torch.cat([lent, own], dim=2)
    by_suffix = own.unflatten(0, (-1, len(lent)))
    return torch.cat([lent.expand(len(by_suffix), *lent.shape), by_suffix], dim=3).flatten(0, 1)


class PreallocatedLayer:
    """Keys and values of all tokens so far, in memory for all that follow: later ones are written, none copied."""

    def __init__(self, room: int) -> None:
        """Begin without tokens. `room`: number of tokens after those of the first pass."""
        self._room = room
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self._length = 0

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        start = self._length
        end = start + key_states.shape[2]
        self._length = end
        if self._keys is None or self._values is None:
            self._keys = _with_room(key_states, self._room)
            self._values = _with_room(value_states, self._room)
            return key_states, value_states
        self._keys[:, :, start:end] = key_states
        self._values[:, :, start:end] = value_states
        return self._keys[:, :, :end], self._values[:, :, :end]


def _with_room(tokens: Tensor, room: int) -> Tensor:
    """Return [B, heads, T, D] at the beginning of a new tensor [B, heads, T + room, D]."""
    rows, heads, length, dim = tokens.shape
    memory = tokens.new_empty(rows, heads, length + room, dim)
    memory[:, :, :length] = tokens
    return memory


def run_layers(
    model: Any,
    hidden: Tensor,
    mask: Tensor | None,
    rotation: Rotation,
    caches: Sequence[LayerCache] | None = None,
    *,
    normed: bool = True,
    **attention: Any,
) -> Tensor:
    """Return the output [B, T, D] of a language model's layers and its last norm, for embeddings [B, T, D].

    Args:
        model: a decoder of transformers (Llama, Gemma, Qwen) without sliding windows.
        mask: as the attention function takes it, [B, 1, T, all tokens]; None: no mask.
        rotation: the model's rotary embedding of the tokens' positions.
        caches: one for each layer; None: the tokens attend to each other alone.
        normed: compute the last norm.
        attention: further arguments of the attention function, such as `is_causal`.
    """
    for i, layer in enumerate(model.layers):
        hidden = layer(
            hidden,
            attention_mask=mask,
            position_embeddings=rotation,
            **({} if caches is None else {CACHE: caches[i]}),
            **attention,
        )
    result: Tensor = model.norm(hidden) if normed else hidden
    return result


def causal_mask(seen: Tensor, queries: int) -> Tensor:
    """Return the last tokens' causal mask, bool [B, 1, queries, T], where `seen` (bool [B, T], False at padding)."""
    length = seen.shape[1]
    before = torch.ones(queries, length, dtype=torch.bool, device=seen.device).tril(length - queries)
    return before & seen[:, None, None, :]
