"""Instructions as bags of words, for networks without a language model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from vla_rl.toolkit.models.networks import as_tensor


class BagOfWords:
    """Bags of words and of pairs of neighbouring words, which distinguish "the bowl on the plate" from "the plate on
    the bowl". Each is looked up by its hash, so there is no vocabulary to store and no unknown word."""

    def __init__(self, rows: int, device: torch.device, instructions: Iterable[str] = ()) -> None:
        """Create the encoder.

        Args:
            rows: rows of the embedding table.   instructions: known ones, encoded at once.
        """
        self._rows = rows
        self._index: dict[str, int] = {}
        self._bags = torch.zeros(0, rows, device=device)
        self._learn_instructions(instructions)

    def __call__(self, instructions: Sequence[str]) -> Tensor:
        """Return bags float32 [B, rows] of norm about 1 each, to multiply with the embedding table."""
        self._learn_instructions(text for text in instructions if text not in self._index)
        rows = np.array([self._index[text] for text in instructions], np.int64)
        return self._bags[as_tensor(rows, self._bags.device)]

    def _learn_instructions(self, instructions: Iterable[str]) -> None:
        for text in dict.fromkeys(instructions):
            self._index[text] = len(self._bags)
            self._bags = torch.cat([self._bags, self._count_words(text)[None].to(self._bags)])

    def _count_words(self, text: str) -> Tensor:
        words = re.findall(r"\w+", text.lower())
        terms = [*words, *(f"{a} {b}" for a, b in pairwise(words))]
        rows = torch.tensor([crc32(term.encode()) % self._rows for term in terms], dtype=torch.int64)
        # Of length 1 where no word comes twice, however long the text is.
        bag: Tensor = torch.bincount(rows, minlength=self._rows) / max(len(terms), 1) ** 0.5
        return bag
