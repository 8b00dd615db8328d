"""Model inputs of GR00T: a chat turn that holds the images, and frames scaled as in each generation."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import torch
from attrs import field, frozen
from tokenizers import Tokenizer
from torch import Tensor

from vla_rl.core.errors import CheckpointError
from vla_rl.plugins.models.gr00t.folder import FACTS
from vla_rl.toolkit.models.images import ImageProcessor
from vla_rl.toolkit.models.prompts import PaddedPrompts


@frozen(kw_only=True)
class Chat:
    """Chat template of a generation."""

    image: str
    """Placeholder token of a part of an image."""
    image_template: str
    """Template of an image: `number` counts from 1, `parts` are its tokens."""
    closing: str
    system: str | None
    special: tuple[str, ...] = field(converter=tuple)
    model: str
    """Model to which the tokenizer belongs, for messages."""

    def write_opening(self, system: str | None, cameras: int, patches: int) -> str:
        """Return the prompt up to the instruction."""
        line = self.system if system is None else system
        images = (self.image_template.format(number=i + 1, parts=self.image * patches) for i in range(cameras))
        before = "" if line is None else f"<|im_start|>system\n{line}<|im_end|>\n"
        return f"{before}<|im_start|>user\n{''.join(images)}"


CHATS = {generation: Chat(**facts["chat"]) for generation, facts in FACTS.items()}


class ChatPrompts(PaddedPrompts):
    """Prompts of one chat turn: images, then the instruction, of which `max_length` tokens are kept."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        generation: str,
        system: str | None,
        cameras: int,
        patches: int,
        formal: bool,
        max_length: int,
        **rest: Any,
    ) -> None:
        chat = CHATS[generation]
        missing = [token for token in chat.special if tokenizer.token_to_id(token) is None]
        if missing:
            raise CheckpointError(
                f"the tokenizer has no {', '.join(missing)}; GR00T {generation}'s is that of {chat.model}"
            )
        self.image_token: Any = tokenizer.token_to_id(chat.image)
        self._chat = chat
        self._formal = formal
        self._words = max_length
        parts = (chat.write_opening(system, cameras, patches), chat.closing)
        before, after = (tokenizer.encode(text, add_special_tokens=False).ids for text in parts)
        self._before = before
        self._after = after
        at = [i for i, token in enumerate(self._before) if token == self.image_token]
        self.starts = at[::patches]
        """Index of the first token of each image, the same in every prompt."""
        fixed = len(self._before) + len(self._after)
        super().__init__(tokenizer, max_length=fixed + max_length, **rest)

    def prompt_ids(self, instruction: str) -> list[int]:
        text = re.sub(r"[^\w\s]", "", instruction.lower()) if self._formal else instruction
        words = self.tokenizer.encode(text, add_special_tokens=False).ids[: self._words]
        if self.image_token in words:
            image_token = self._chat.image
            raise CheckpointError(
                f"the instruction {instruction!r} holds {image_token}, which stands for a part of an image"
            )
        return [*self._before, *words, *self._after]


class AreaImages(ImageProcessor):
    """Image preprocessing of N1.7 for square frames: resize, centre crop, resize again, with OpenCV's INTER_AREA."""

    def __init__(self, size: int, device: torch.device, dtype: torch.dtype, crop: float) -> None:
        super().__init__(size, device, dtype)
        self._crop = crop

    def resize(self, pixels: Tensor, size: int) -> Tensor:
        inner = max(int(size * self._crop), 1)
        start = (size - inner) // 2
        pixels = resize_by_area(pixels, size)
        return resize_by_area(pixels[..., start : start + inner, start : start + inner], size)


def resize_by_area(pixels: Tensor, size: int) -> Tensor:
    """Resize squares [..., S, S] of 0..255 as OpenCV's INTER_AREA does, rounded to whole levels: the mean over the area
    when shrinking, and interpolation between the two nearest pixels when enlarging."""
    side = pixels.shape[-1]
    if side == size:
        return pixels
    weights = _compute_shares(side, size).to(pixels.device)
    return (weights @ pixels @ weights.T + 0.5).floor().clamp(0, 255)


@lru_cache
def _compute_shares(side: int, size: int) -> Tensor:
    """Return the weights [size, side] of a line of `side` pixels in each of `size` pixels; rows sum to 1."""
    step = side / size
    shares = torch.zeros(size, side, dtype=torch.float64)
    for i in range(size):
        if step > 1:
            for j in range(int(i * step), min(int((i + 1) * step) + 1, side)):
                shares[i, j] = max(min((i + 1) * step, j + 1) - max(i * step, j), 0) / step
            continue
        low = int(i * step)
        part = max((i + 1) - (low + 1) / step, 0.0)
        part -= int(part)
        shares[i, low] += 1 - part
        shares[i, min(low + 1, side - 1)] += part
    return shares.float()
