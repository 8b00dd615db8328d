"""Instructions -> token ids, cached: BOS, instruction, newline, padding on the right.

Rows of a batch are padded to the longest instruction known (to the checkpoint's limit where the simulator words them
anew), not to the longest of the batch: what a row gets does not depend on its neighbours.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor

BOS, SPACE = "<bos>", "▁"
SPECIAL = ("<pad>", "<eos>", BOS, "<unk>")
WORDS = """pick up the red green blue yellow purple orange black white block cube ball bowl plate mug cup drawer pad
goal and place it on in into to of left right top bottom middle front back next push pull open close touch reach move
put turn lift stack under between cylinder square circle object table tray basket stove cabinet button lever door"""


def prompt_text(instruction: str) -> str:
    """openpi's prompt."""
    return instruction.strip().replace("_", " ").replace("\n", " ") + "\n"


def train_tokenizer(instructions: Iterable[str], vocab_size: int) -> Tokenizer:
    """A small BPE in the style of Gemma's (byte fallback, "▁" for a space), a function of the instructions alone."""
    tokenizer = _bpe(None, [])
    pieces = [*SPECIAL, *(f"<0x{i:02X}>" for i in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=pieces, show_progress=False)
    corpus = [*sorted({prompt_text(text) for text in instructions}), prompt_text(WORDS)]
    tokenizer.train_from_iterator(corpus, trainer)
    merges = [tuple(m) for m in json.loads(tokenizer.to_str())["model"]["merges"]]
    tokenizer = _bpe(tokenizer.get_vocab(), merges)  # afresh: bytes are special tokens to the trainer only
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    return tokenizer


def _bpe(vocab: dict[str, int] | None, merges: list[Any]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab, merges if vocab else None, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(rf"{SPACE}?[^{SPACE}\n]+|\n"), "isolated")
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


class Prompts:
    """The tokenised rows of every instruction seen so far, on the device."""

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
        bos = tokenizer.token_to_id(BOS)
        if bos is None:
            raise ValueError(f"the tokenizer has no {BOS!r}; pi0's is PaliGemma's")
        self.tokenizer = tokenizer
        self._bos, self._vocab, self._limit, self._device = int(bos), vocab, max_length, device
        self._full_width = full_width
        self._index: dict[str, int] = {}
        self._tokens: list[list[int]] = []
        self._learn(dict.fromkeys(instructions))

    def encode(self, instruction: str) -> list[int]:
        """BOS, instruction, newline; cut at the length that the model was trained with, as openpi does."""
        ids = [self._bos, *self.tokenizer.encode(prompt_text(instruction), add_special_tokens=False).ids]
        if max(ids) >= self._vocab:
            raise ValueError(
                f"the tokenizer gives id {max(ids)} for {instruction!r}, the model has {self._vocab} embeddings; "
                "it is another model's tokenizer"
            )
        return ids[: self._limit]

    def _learn(self, instructions: Iterable[str]) -> None:
        for text in instructions:
            self._index[text] = len(self._tokens)
            self._tokens.append(self.encode(text))
        if not self._tokens:
            return
        lengths = [len(tokens) for tokens in self._tokens]
        width = self._limit if self._full_width else max(lengths)
        rows = [tokens + [0] * (width - len(tokens)) for tokens in self._tokens]
        self._ids = torch.tensor(rows, device=self._device)
        self._mask = torch.arange(width, device=self._device) < torch.tensor(lengths, device=self._device)[:, None]

    def rows(self, instructions: Sequence[str]) -> tuple[Tensor, Tensor]:
        """ids and mask (False at padding), [B, L]."""
        new = dict.fromkeys(text for text in instructions if text not in self._index)
        if new:
            self._learn(new)
        at = torch.tensor([self._index[text] for text in instructions], device=self._device)
        return self._ids[at], self._mask[at]
