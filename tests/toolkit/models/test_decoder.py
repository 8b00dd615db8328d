"""Caches of a language model's layers, with the installed version of transformers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GemmaConfig, GemmaModel, LlamaConfig, LlamaModel, Qwen3Config, Qwen3Model

from vla_rl.toolkit.models.decoder import (
    CACHE,
    LayerCache,
    LentLayer,
    PreallocatedLayer,
    RecordedLayer,
    cache_argument,
    causal_mask,
    run_layers,
)

SIZES = {
    "vocab_size": 8,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
MODELS = {
    "llama": lambda: LlamaModel(LlamaConfig(**SIZES)),
    "gemma": lambda: GemmaModel(GemmaConfig(**SIZES)),
    "qwen3": lambda: Qwen3Model(Qwen3Config(**SIZES)),
}
PREFIX, SUFFIX = 6, 3


class Decoder:
    """A small language model that counts the tokens that its layers compute."""

    def __init__(self, model: Any) -> None:
        self.model = model.eval()
        self.computed = 0
        self.hidden = torch.randn(2, PREFIX + SUFFIX, SIZES["hidden_size"])
        model.layers[0].self_attn.q_proj.register_forward_hook(self._count)

    def _count(self, _module: nn.Module, args: tuple[Tensor], _output: Tensor) -> None:
        self.computed += args[0].shape[1]

    def run(self, start: int, end: int, caches: list[Any] | None) -> Tensor:
        """Output of tokens start to end, which attend to those before them, too; `caches` hold these."""
        hidden = self.hidden[:, start:end]
        mask = causal_mask(torch.ones(2, end, dtype=torch.bool), end - start)
        rotation = self.model.rotary_emb(hidden, position_ids=torch.arange(start, end).unsqueeze(0))
        return run_layers(self.model, hidden, mask, rotation, caches)


@pytest.fixture(params=MODELS)
def decoder(request: pytest.FixtureRequest) -> Iterator[Decoder]:
    torch.manual_seed(0)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)  # an argument that transformers will drop
        yield Decoder(MODELS[request.param]())


def test_a_prefix_in_a_cache_is_computed_once(decoder: Decoder) -> None:
    expected = decoder.run(0, PREFIX + SUFFIX, None)
    assert decoder.computed == PREFIX + SUFFIX
    recorded = [RecordedLayer() for _ in decoder.model.layers]
    decoder.computed = 0
    decoder.run(0, PREFIX, recorded)
    for _ in range(2):
        again = decoder.run(PREFIX, PREFIX + SUFFIX, [LentLayer(layer.keys, layer.values) for layer in recorded])
        torch.testing.assert_close(again, expected[:, PREFIX:])
    assert decoder.computed == PREFIX + 2 * SUFFIX


def test_each_decoded_token_is_computed_once(decoder: Decoder) -> None:
    expected = decoder.run(0, PREFIX + SUFFIX, None)
    caches: list[LayerCache] = [PreallocatedLayer(SUFFIX) for _ in decoder.model.layers]
    decoder.computed = 0
    outputs = [decoder.run(0, PREFIX, caches)]
    outputs += [decoder.run(at, at + 1, caches) for at in range(PREFIX, PREFIX + SUFFIX)]
    torch.testing.assert_close(torch.cat(outputs, dim=1), expected)
    assert decoder.computed == PREFIX + SUFFIX


def test_the_cache_has_one_name_in_all_models(decoder: Decoder) -> None:
    layer = decoder.model.layers[0]
    assert cache_argument(type(layer)) == cache_argument(type(layer.self_attn)) == CACHE


def test_a_layer_without_a_cache_is_refused() -> None:
    """It would take the cache as one of its further keywords, and every token would see its own pass alone."""

    class Layer(nn.Module):
        def forward(self, hidden: Tensor, memory: Any = None, **_: Any) -> Tensor:
            return hidden

    with pytest.raises(
        TypeError, match="Layer.forward has no argument `cache` or `past_key_values`: self, hidden, memory"
    ):
        cache_argument(Layer)
