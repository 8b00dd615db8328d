"""Tokenised prompts of pi0 and pi0.5.

pi0: BOS, instruction, newline; cached. pi0.5: the same, or instruction and state as text, which change at every step.
Padding is on the right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from torch import Tensor

from vla_rl.core.errors import CheckpointError
from vla_rl.core.types import Array
from vla_rl.toolkit.models.prompts import BOS, PaddedPrompts, pad_tokens


def prompt_text(instruction: str) -> str:
    """Return openpi's prompt."""
    return instruction.strip().replace("_", " ").replace("\n", " ") + "\n"


BINS, ROUND = 256, 16


EDGES = np.arange(BINS, dtype=np.float32) / (BINS / 2) - 1


def find_state_bins(state: Array) -> Array:
    """Return the bins of normalised numbers, int64 0..255 for 256 equal parts of [-1, 1]; -1 below and 255 above the
    range."""
    bins: Array = np.searchsorted(EDGES, state, side="right") - 1
    return bins


def state_text(instruction: str, bins: Sequence[int]) -> str:
    """Return openpi's prompt of pi0.5 that contains the state."""
    return f"Task: {prompt_text(instruction)[:-1]}, State: {' '.join(map(str, bins))};\nAction: "


class PiPrompts(PaddedPrompts):
    """Prompts of pi0 and pi0.5."""

    def __init__(self, tokenizer: Tokenizer, **rest: Any) -> None:
        self._bos = find_bos(tokenizer)
        super().__init__(tokenizer, **rest)

    def prompt_ids(self, instruction: str) -> list[int]:
        return [self._bos, *self.tokenizer.encode(prompt_text(instruction), add_special_tokens=False).ids]

    def state_rows(self, instructions: Sequence[str], bins: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Return ids and mask of prompts that contain the state's bins, like `rows`, padded to the next multiple of
        16."""
        tokens = []
        for instruction, row in zip(instructions, bins, strict=True):
            ids = self.tokenizer.encode(state_text(instruction, row), add_special_tokens=False).ids
            tokens.append(self._limit_ids([self._bos, *ids], instruction))
        width = -(-max(map(len, tokens)) // ROUND) * ROUND
        return pad_tokens(tokens, self.limit if self._full_width else min(width, self.limit), self._device)


def find_bos(tokenizer: Tokenizer) -> int:
    """Return the id of the first token (BOS). Raise CheckpointError for a tokenizer without it."""
    bos = tokenizer.token_to_id(BOS)
    if bos is None:
        raise CheckpointError(f"the tokenizer has no {BOS!r}; pi0's is PaliGemma's")
    return int(bos)
