"""Instructions -> token ids, cached: BOS, instruction, newline, padding on the right.

Rows of a batch are padded to the longest instruction known (to the checkpoint's limit where the simulator words them
anew), not to the longest of the batch: what a row gets does not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from torch import Tensor

from vla_rl.core.errors import CheckpointError
from vla_rl.toolkit.models.prompts import KnownPrompts, learn_merges

BOS, SPACE = "<bos>", "▁"
SPECIAL = ("<pad>", "<eos>", BOS, "<unk>")


def prompt_text(instruction: str) -> str:
    """openpi's prompt."""
    return instruction.strip().replace("_", " ").replace("\n", " ") + "\n"


def train_tokenizer(instructions: Iterable[str], vocab_size: int) -> Tokenizer:
    """A small BPE in the style of Gemma's (byte fallback, "▁" for a space), a function of the instructions alone."""
    tokenizer = _bpe(*learn_merges(_bpe(None, []), instructions, prompt_text, vocab_size, SPECIAL))
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    return tokenizer


def _bpe(vocab: dict[str, int] | None, merges: list[Any]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab, merges if vocab else None, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(rf"{SPACE}?[^{SPACE}\n]+|\n"), "isolated")
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


class Prompts(KnownPrompts):
    """Rows padded on the right."""

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
            raise CheckpointError(f"the tokenizer has no {BOS!r}; pi0's is PaliGemma's")
        super().__init__(tokenizer, device)
        self._bos, self._vocab, self._limit, self._full_width = int(bos), vocab, max_length, full_width
        self._learn(dict.fromkeys(instructions))

    def encode(self, instruction: str) -> list[int]:
        """BOS, instruction, newline; cut at the length that the model was trained with, as openpi does."""
        ids = [self._bos, *self.tokenizer.encode(prompt_text(instruction), add_special_tokens=False).ids]
        if max(ids) >= self._vocab:
            raise CheckpointError(
                f"the tokenizer gives id {max(ids)} for {instruction!r}, the model has {self._vocab} embeddings; "
                "it is another model's tokenizer"
            )
        return ids[: self._limit]

    def _lay_out(self, tokens: Sequence[list[int]]) -> None:
        lengths = [len(ids) for ids in tokens]
        width = self._limit if self._full_width else max(lengths)
        rows = [ids + [0] * (width - len(ids)) for ids in tokens]
        self._ids = torch.tensor(rows, device=self._device)
        self._mask = torch.arange(width, device=self._device) < torch.tensor(lengths, device=self._device)[:, None]

    def rows(self, instructions: Sequence[str]) -> tuple[Tensor, Tensor]:
        """ids and mask (False at padding), [B, L]."""
        at = self._positions(instructions)
        return self._ids[at], self._mask[at]
