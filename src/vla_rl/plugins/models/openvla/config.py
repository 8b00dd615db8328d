"""What a spec says about the model; light to import."""

from __future__ import annotations

from typing import Any

from attrs import Attribute, field, frozen
from attrs.validators import ge, in_, lt, optional

PRESETS = ("tiny", "fast")
DTYPES = ("float32", "bfloat16")


def _one_source(config: OpenVLAOFTConfig, attribute: Attribute[Any], value: str | None) -> None:
    if (config.checkpoint is None) == (value is None):
        raise ValueError("give exactly one of `checkpoint` (a folder to start from) and `preset` (random weights)")


def _no_dropout(config: OpenVLAOFTConfig, attribute: Attribute[Any], value: bool) -> None:
    if value and config.lora is not None and config.lora.dropout > 0:
        raise ValueError("gradient_checkpointing recomputes layers and cannot be combined with lora.dropout > 0")


@frozen(kw_only=True)
class LoRAConfig:
    """Low-rank adapters on every linear layer that is used (Hu et al. 2021)."""

    rank: int = field(default=32, validator=ge(1))
    """Rank r of the update."""
    alpha: float | None = None
    """The update is scaled by alpha / rank. None: min(rank, 16), as OpenVLA-OFT is fine-tuned."""
    dropout: float = field(default=0.0, validator=[ge(0.0), lt(1.0)])
    """On the adapters' input, in imitation only: RL scores what the policy really sampled from."""


@frozen(kw_only=True)
class ValueHeadConfig:
    """The critic, built when the algorithm needs one: an MLP on the hidden state behind the first action token."""

    hidden: tuple[int, ...] = (512, 128)
    """Widths of its hidden layers (GELU between), as in RLinf."""
    detach: bool = False
    """True keeps the critic's gradient out of the policy's trunk. The default shares the trunk, as RLinf does for
    OpenVLA: the last hidden state is made for the next token and says little about success until it is trained to."""


@frozen(kw_only=True)
class OpenVLAOFTConfig:
    """Keys of `model:` in a spec with `type: openvla_oft`."""

    checkpoint: str | None = None
    """Folder in OpenVLA's public layout, or `builtin:tabletop`, the tiny checkpoint that ships with the package."""
    preset: str | None = field(default=None, validator=[optional(in_(PRESETS)), _one_source])
    """Random weights instead of a checkpoint: `tiny` (64 px, Llama 64x3) or `fast` (for tests)."""
    unnorm_key: str | None = None
    """Data set whose statistics scale actions and state. None: the checkpoint's only one."""
    lora: LoRAConfig | None = None
    """Train adapters instead of all weights. `save` writes them merged."""
    use_proprio: bool | None = None
    """Feed the state as one token. None: as the checkpoint was trained; a preset does when there is a state."""
    cameras: tuple[str, ...] | None = None
    """Cameras in the order in which the model sees them. None: those of the checkpoint's training, else all."""
    append_stop_token: bool | None = None
    """End the sequence with `</s>` (OpenVLA-OFT: yes). None: as the checkpoint was trained, else yes."""
    center_crop: bool = False
    """Cut 0.9 of the area out of the middle, as evaluation does for models trained with random crops."""
    freeze_vision: bool = False
    """Do not train the two vision transformers."""
    value_head: ValueHeadConfig = field(factory=ValueHeadConfig)
    """The critic, when the algorithm asks for one."""
    gradient_checkpointing: bool = field(default=False, validator=_no_dropout)
    """Recompute the Llama layers in the backward pass: less memory, about a third more time."""
    dtype: str = field(default="float32", validator=in_(DTYPES))
    """Of the weights. Log-probs, entropies and values are computed in float32 either way."""
