"""Cached token ids of instructions, and small tokenizers for presets."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor

from vla_rl.core.errors import CheckpointError
from vla_rl.toolkit.models.networks import as_tensor

BOS, SPACE = "<bos>", "▁"
SPECIAL = ("<pad>", "<eos>", BOS, "<unk>")
WORDS = """pick up the red green blue yellow purple orange black white block cube ball bowl plate mug cup drawer pad
goal and place it on in into to of left right top bottom middle front back next push pull open close touch reach move
put turn lift stack under between cylinder square circle object table tray basket stove cabinet button lever door"""
"""Words that a small tokenizer knows besides the instructions."""
BYTES = tuple(f"<0x{i:02X}>" for i in range(256))


def learn_merges(
    tokenizer: Tokenizer, instructions: Iterable[str], prompt: Callable[[str], str], size: int, special: Sequence[str]
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Train an empty BPE on prompts; the result depends on the instructions alone. Return (vocabulary, merges), from
    which the tokenizer is rebuilt, since bytes are special tokens only for the trainer.

    Args:
        prompt: instruction -> the model's prompt.
        size: size of the vocabulary.
        special: tokens before the bytes.
    """
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[*special, *BYTES], show_progress=False)
    corpus = [*sorted({prompt(text) for text in instructions}), prompt(WORDS)]
    tokenizer.train_from_iterator(corpus, trainer)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return tokenizer.get_vocab(), [(left, right) for left, right in merges]


def train_tokenizer(instructions: Iterable[str], prompt: Callable[[str], str], vocab_size: int) -> Tokenizer:
    """Train a small BPE in the style of Gemma's (byte fallback, "▁" for a space), of the instructions alone."""
    tokenizer = _build_bpe(*learn_merges(_build_bpe(None, []), instructions, prompt, vocab_size, SPECIAL))
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    return tokenizer


def _build_bpe(vocab: dict[str, int] | None, merges: list[Any]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab, merges if vocab else None, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(rf"{SPACE}?[^{SPACE}\n]+|\n"), "isolated")
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


class KnownPrompts(ABC):
    """Token rows of every instruction seen so far, on the device. One layout: a sample's do not depend on its batch."""

    def __init__(self, tokenizer: Tokenizer, device: torch.device) -> None:
        self.tokenizer = tokenizer
        self._device = device
        self._index: dict[str, int] = {}
        self._tokens: list[list[int]] = []

    @abstractmethod
    def encode_instruction(self, instruction: str) -> list[int]:
        """Return the prompt's token ids, without padding."""

    @abstractmethod
    def _lay_out(self, tokens: Sequence[list[int]]) -> None:
        """Rebuild the rows of all prompts."""

    def _learn_prompts(self, instructions: Iterable[str]) -> None:
        for text in instructions:
            self._index[text] = len(self._tokens)
            self._tokens.append(self.encode_instruction(text))
        if self._tokens:
            self._lay_out(self._tokens)

    def _find_rows(self, instructions: Sequence[str]) -> Tensor:
        """Return the row index of each instruction, int64 [B]; new instructions are added."""
        new = dict.fromkeys(text for text in instructions if text not in self._index)
        if new:
            self._learn_prompts(new)
        return as_tensor(np.array([self._index[text] for text in instructions], np.int64), self._device)


class PaddedPrompts(KnownPrompts):
    """Prompts padded on the right with id 0, to the longest known instruction (or to the checkpoint's limit if the
    simulator rephrases them), not to the longest of the batch: a sample's tokens do not depend on the others."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        vocab: int,
        max_length: int,
        device: torch.device,
        instructions: Iterable[str] = (),
        full_width: bool = False,
    ) -> None:
        super().__init__(tokenizer, device)
        self._vocab = vocab
        self.limit = max_length
        """Most tokens of a prompt."""
        self._full_width = full_width
        self._learn_prompts(dict.fromkeys(instructions))

    @abstractmethod
    def prompt_ids(self, instruction: str) -> list[int]:
        """Return the prompt's token ids, however many."""

    def encode_instruction(self, instruction: str) -> list[int]:
        """Return the token ids, cut at the length that the model was trained with, as its own code does."""
        return self._limit_ids(self.prompt_ids(instruction), instruction)

    def _limit_ids(self, ids: list[int], text: str) -> list[int]:
        if max(ids) >= self._vocab:
            raise CheckpointError(
                f"the tokenizer gives id {max(ids)} for {text!r}, the model has {self._vocab} embeddings; "
                "it is another model's tokenizer"
            )
        return ids[: self.limit]

    def _lay_out(self, tokens: Sequence[list[int]]) -> None:
        width = self.limit if self._full_width else max(len(ids) for ids in tokens)
        new_ids, mask = pad_tokens(tokens, width, self._device)
        self._ids = new_ids
        self._mask = mask

    def token_rows(self, instructions: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return token ids and mask (False at padding), [B, L]."""
        at = self._find_rows(instructions)
        return self._ids[at], self._mask[at]


def pad_tokens(tokens: Sequence[list[int]], width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return token ids and mask (False at padding), [B, width], padded on the right with id 0."""
    lengths = as_tensor(np.array([len(ids) for ids in tokens], np.int64), device)
    rows = np.array([ids + [0] * (width - len(ids)) for ids in tokens], np.int64)
    return as_tensor(rows, device), torch.arange(width, device=device) < lengths[:, None]
