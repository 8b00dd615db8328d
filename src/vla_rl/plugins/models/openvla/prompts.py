"""Tokenised instructions, laid out for decoding and cached.

A sequence is, for parallel decoding: BOS, prompt, placeholders, `</s>`, padding; for autoregressive decoding: BOS,
padding, prompt. (The network inserts patches and the state after BOS.) Sequences of a batch are padded to the longest
known instruction, not to the longest of the batch: a sample's result does not depend on its batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from attrs import evolve, frozen
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor

from vla_rl.core.errors import CheckpointError
from vla_rl.plugins.models.openvla.architecture import OpenVLAConfig
from vla_rl.toolkit.models.prompts import KnownPrompts, learn_merges

UNK, BOS, EOS, PAD, SPACE = "<unk>", "<s>", "</s>", "<PAD>", "▁"


def prompt_text(instruction: str) -> str:
    """Return OpenVLA's prompt."""
    return f"In: What action should the robot take to {instruction.lower()}?\nOut:"


def train_tokenizer(instructions: Iterable[str], config: OpenVLAConfig) -> Tokenizer:
    """Train a small BPE tokenizer in the style of Llama 2 (byte fallback, "▁" for a space), a function of the
    instructions alone. Its vocabulary ends with the action tokens, so that `<PAD>` gets the first id after them, as in
    OpenVLA."""
    text_tokens = config.action_vocab_end - config.n_action_bins
    vocab, merges = learn_merges(_build_tokenizer(None, []), instructions, prompt_text, text_tokens, (UNK, BOS, EOS))
    vocab.setdefault(SPACE, len(vocab))
    vocab.update({f"<extra_{i}>": i for i in range(len(vocab), text_tokens)})
    vocab.update({f"<action_{i}>": text_tokens + i for i in range(config.n_action_bins)})
    tokenizer = _build_tokenizer(vocab, merges)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in (UNK, BOS, EOS, PAD)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


def _build_tokenizer(vocab: dict[str, int] | None, merges: list[Any]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab, merges if vocab else None, unk_token=UNK, byte_fallback=True))
    words = pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=True)
    marks = pre_tokenizers.Split(Regex(r"[?:,.\n]"), "isolated")  # so a word is the same token in every position
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, marks])
    pieces = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(pieces)
    return tokenizer


TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": BOS,
    "eos_token": EOS,
    "unk_token": UNK,
    "pad_token": PAD,
    "add_bos_token": True,
    "add_eos_token": False,
    "model_max_length": 2048,
}


@frozen(kw_only=True)
class PromptBatch:
    """Token sequences of a batch; see `OFTModule.forward`. `start`: column of the last prompt token."""

    ids: Tensor
    mask: Tensor | None
    placeholder: Tensor
    start: Tensor


class DecodingPrompts(KnownPrompts):
    """Sequences for parallel decoding."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        placeholders: int = 0,
        append_stop_token: bool = False,
        pad_id: int,
        device: torch.device,
        instructions: Iterable[str] = (),
    ) -> None:
        super().__init__(tokenizer, device)
        self._placeholders = placeholders
        self._pad = pad_id
        bos, eos, space = (self._find_token(token) for token in (BOS, EOS, SPACE))
        self._bos = bos
        self._eos = eos
        self._space = space
        self._stop = [self._eos] if append_stop_token else []
        self._learn_prompts(dict.fromkeys(instructions))

    def _find_token(self, token: str) -> int:
        index = self.tokenizer.token_to_id(token)
        if index is None:
            raise CheckpointError(
                f"the tokenizer has no {token!r}; OpenVLA's is Llama 2's with BOS, EOS and the lone space"
            )
        return int(index)

    def encode_instruction(self, instruction: str) -> list[int]:
        """Return BOS and the prompt, ending with the single space after which OpenVLA was trained to answer."""
        ids = self.tokenizer.encode(prompt_text(instruction)).ids
        ids = ids if ids[:1] == [self._bos] else [self._bos, *ids]
        return ids if ids[-1] == self._space else [*ids, self._space]

    def _lay_out(self, tokens: Sequence[list[int]]) -> None:
        lengths = self._count_tokens(tokens)
        tail = [self._pad] * self._placeholders + self._stop
        width = max(map(len, tokens)) + len(tail)
        rows = [[*ids, *tail] for ids in tokens]
        self._ids = torch.tensor([row + [self._pad] * (width - len(row)) for row in rows], device=self._device)
        columns = torch.arange(width, device=self._device)
        self._is_placeholder = (columns >= lengths) & (columns < lengths + self._placeholders)
        self._mask = columns < lengths + len(tail) if _differ_in_length(tokens) else None
        self._start = lengths[:, 0] - 1

    def _count_tokens(self, tokens: Sequence[list[int]]) -> Tensor:
        """Return the lengths, int64 [instructions, 1]."""
        return torch.tensor([len(ids) for ids in tokens], device=self._device)[:, None]

    def take_prompts(self, instructions: Sequence[str]) -> PromptBatch:
        at = self._find_rows(instructions)
        mask = None if self._mask is None else self._mask[at]
        return PromptBatch(ids=self._ids[at], mask=mask, placeholder=self._is_placeholder[at], start=self._start[at])


class CausalPrompts(DecodingPrompts):
    """Sequences for autoregressive decoding: padded after BOS, so that all end with the last prompt token."""

    def _lay_out(self, tokens: Sequence[list[int]]) -> None:
        lengths = self._count_tokens(tokens)
        width = max(map(len, tokens))
        rows = [[ids[0], *[self._pad] * (width - len(ids)), *ids[1:]] for ids in tokens]
        self._ids = torch.tensor(rows, device=self._device)
        columns = torch.arange(width, device=self._device)
        self._is_placeholder = torch.zeros_like(self._ids, dtype=torch.bool)
        self._mask = (columns == 0) | (columns > width - lengths) if _differ_in_length(tokens) else None
        self._start = torch.full_like(lengths[:, 0], width - 1)

    def take_prompts(self, instructions: Sequence[str]) -> PromptBatch:
        """Return the sequences. They have no mask where none of them is padded, so that attention takes its faster
        kernel; this is known here, without a look at the mask on the device."""
        batch = super().take_prompts(instructions)
        shortest = min((len(self._tokens[self._index[text]]) for text in instructions), default=0)
        return evolve(batch, mask=None) if shortest == self._ids.shape[1] else batch


def _differ_in_length(tokens: Sequence[list[int]]) -> bool:
    """Return whether prompts differ in length, so that some are padded."""
    return len(set(map(len, tokens))) > 1
