"""The policy of GR00T N1.5."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import frozen
from tokenizers import Tokenizer
from torch import Tensor

from vla_rl.core.errors import CheckpointError
from vla_rl.core.types import Observation
from vla_rl.plugins.models.gr00t.folder import METADATA, Robot, Sizes, metadata_of
from vla_rl.plugins.models.gr00t.network import GrootModule, Prefix, public_name
from vla_rl.toolkit.models.flow_checkpoint import Checkpoint, save_folder
from vla_rl.toolkit.models.flow_policy import FlowPolicy
from vla_rl.toolkit.models.prompts import PaddedPrompts
from vla_rl.toolkit.models.scaling import GripperScaler

IMAGE = "<IMG_CONTEXT>"
SPECIAL = ("<|im_start|>", "<|im_end|>", "<img>", "</img>", IMAGE)


@frozen(kw_only=True)
class GrootCheckpoint(Checkpoint):
    """`raw` stays empty: config.json is not lerobot's."""

    robot: Robot
    config: Mapping[str, Any]
    """config.json."""

    @property
    def images(self) -> tuple[str, ...]:
        return self.robot.cameras


def opening(system: str, cameras: int, patches: int) -> str:
    """Of the chat up to the instruction. Eagle numbers images from 1."""
    images = "".join(f"<image {i + 1}><img>{IMAGE * patches}</img>" for i in range(cameras))
    return f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{images}"


CLOSING = "<|im_end|>\n<|im_start|>assistant\n"


class Prompts(PaddedPrompts):
    """One turn of a chat: images, then the instruction, of which `max_length` tokens are kept."""

    def __init__(
        self, tokenizer: Tokenizer, *, system: str, cameras: int, patches: int, max_length: int, **rest: Any
    ) -> None:
        missing = [token for token in SPECIAL if tokenizer.token_to_id(token) is None]
        if missing:
            raise CheckpointError(f"the tokenizer has no {', '.join(missing)}; GR00T N1.5's is that of its Eagle model")
        self.image_token: Any = tokenizer.token_to_id(IMAGE)
        parts = (opening(system, cameras, patches), CLOSING)
        self._before, self._after = (tokenizer.encode(text, add_special_tokens=False).ids for text in parts)
        self._words = max_length
        fixed = len(self._before) + len(self._after)
        super().__init__(tokenizer, max_length=fixed + max_length, **rest)

    def ids(self, instruction: str) -> list[int]:
        words = self.tokenizer.encode(instruction, add_special_tokens=False).ids[: self._words]
        if self.image_token in words:
            raise CheckpointError(f"the instruction {instruction!r} holds {IMAGE}, which stands for a part of an image")
        return [*self._before, *words, *self._after]


class GrootPolicy(FlowPolicy):
    """Made by `builder.build_policy`."""

    module: GrootModule
    checkpoint: GrootCheckpoint
    name = "gr00t"
    exact_time = True

    def __init__(self, *common: Any, prompts: Prompts, gripper: str) -> None:
        super().__init__(*common)
        self.prompts = prompts
        if gripper == "libero":
            self._actions = GripperScaler(self.checkpoint.statistics.action, self._device)

    def _prefix(self, obs: Observation, state: Tensor) -> Prefix:
        ids, mask = self.prompts.rows(obs.instructions)
        pixels = self._pixels(obs)
        with self._frozen_prefix():
            hidden = self.module.look(pixels, ids)
        return self.module.tell(hidden, mask, state)

    def save(self, folder: Path) -> None:
        """NVIDIA's layout, adapters merged into the weights."""
        source = self.checkpoint
        own = metadata_of(source.robot.tag, source.statistics, self._cameras, source.sizes.image_size)
        save_folder(
            self.module,
            source,
            Path(folder),
            raw=source.config,
            processors=lambda _: {METADATA: own},
            public_name=public_name,
            public_sizes=source.sizes == Sizes(),
            prefix="",
        )
