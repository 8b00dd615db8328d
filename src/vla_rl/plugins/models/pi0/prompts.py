"""Instructions -> token ids, cached: BOS, instruction, newline, padding on the right."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer

from vla_rl.core.errors import CheckpointError
from vla_rl.toolkit.models.prompts import BOS, PaddedPrompts


def prompt_text(instruction: str) -> str:
    """openpi's prompt."""
    return instruction.strip().replace("_", " ").replace("\n", " ") + "\n"


class Prompts(PaddedPrompts):
    """pi0's."""

    def __init__(self, tokenizer: Tokenizer, **rest: Any) -> None:
        self._bos = beginning(tokenizer)
        super().__init__(tokenizer, **rest)

    def ids(self, instruction: str) -> list[int]:
        return [self._bos, *self.tokenizer.encode(prompt_text(instruction), add_special_tokens=False).ids]


def beginning(tokenizer: Tokenizer) -> int:
    """Id of the first token."""
    bos = tokenizer.token_to_id(BOS)
    if bos is None:
        raise CheckpointError(f"the tokenizer has no {BOS!r}; pi0's is PaliGemma's")
    return int(bos)
