"""Instructions as token ids, kept once they are made; and small tokenisers for presets."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

import torch
from tokenizers import Tokenizer, trainers
from torch import Tensor

WORDS = """pick up the red green blue yellow purple orange black white block cube ball bowl plate mug cup drawer pad
goal and place it on in into to of left right top bottom middle front back next push pull open close touch reach move
put turn lift stack under between cylinder square circle object table tray basket stove cabinet button lever door"""
"""What a small tokeniser knows besides the instructions."""
BYTES = tuple(f"<0x{i:02X}>" for i in range(256))


def learn_merges(
    tokenizer: Tokenizer, instructions: Iterable[str], prompt: Callable[[str], str], size: int, special: Sequence[str]
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Train an empty BPE on prompts, a function of the instructions alone. -> its vocabulary and its merges, of which a
    tokeniser is built afresh: bytes are special tokens to the trainer only.

    Args:
        prompt: instruction -> the model's prompt.
        size: of the vocabulary.
        special: tokens before the bytes.
    """
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[*special, *BYTES], show_progress=False)
    corpus = [*sorted({prompt(text) for text in instructions}), prompt(WORDS)]
    tokenizer.train_from_iterator(corpus, trainer)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return tokenizer.get_vocab(), [(left, right) for left, right in merges]


class KnownPrompts(ABC):
    """The tokenised rows of every instruction seen so far, on the device. They are laid out together, so that what a
    row gets does not depend on its neighbours in a batch."""

    def __init__(self, tokenizer: Tokenizer, device: torch.device) -> None:
        self.tokenizer = tokenizer
        self._device = device
        self._index: dict[str, int] = {}
        self._tokens: list[list[int]] = []

    @abstractmethod
    def encode(self, instruction: str) -> list[int]:
        """The prompt's ids, without padding."""

    @abstractmethod
    def _lay_out(self, tokens: Sequence[list[int]]) -> None:
        """Make the rows of all prompts anew."""

    def _learn(self, instructions: Iterable[str]) -> None:
        for text in instructions:
            self._index[text] = len(self._tokens)
            self._tokens.append(self.encode(text))
        if self._tokens:
            self._lay_out(self._tokens)

    def _positions(self, instructions: Sequence[str]) -> Tensor:
        """int64 [B]: which of the rows each instruction has; new ones are learnt."""
        new = dict.fromkeys(text for text in instructions if text not in self._index)
        if new:
            self._learn(new)
        return torch.tensor([self._index[text] for text in instructions], device=self._device)
