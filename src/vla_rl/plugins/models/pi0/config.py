"""What a spec says about the model; light to import."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import in_, optional

from vla_rl.toolkit.models.flow_config import FlowConfig, PrefixHeadConfig, ValueHeadConfig, for_checkpoints

STATE_KINDS = ("exact", "padded", "none")


@frozen(kw_only=True)
class PiConfig(FlowConfig):
    """Keys of pi0 and pi0.5."""

    asset_id: str | None = field(default=None, validator=for_checkpoints)
    """openpi's layout: whose norm_stats.json under assets/ scales actions and state. None: the only one."""


@frozen(kw_only=True)
class Pi0Config(PiConfig):
    """Keys of `model:` in a spec with `type: pi0`."""

    use_state: bool | None = None
    """Feed the proprioceptive state; without it the model sees zeros. None: as the checkpoint was trained; a preset
    does when there is a state."""
    value_head: ValueHeadConfig = field(factory=ValueHeadConfig)
    """The critic, when the algorithm asks for one."""


@frozen(kw_only=True)
class Pi05HeadConfig(PrefixHeadConfig):
    """pi0.5's critic."""

    pads: bool = False
    """reads: prefix: count the padding of a prompt of full length too, as RLinf does, for its critics; a mean that
    depends on how long prompts may be."""


@frozen(kw_only=True)
class Pi05Config(PiConfig):
    """Keys of `model:` in a spec with `type: pi05`."""

    state_in_prompt: str | None = field(default=None, validator=optional(in_(STATE_KINDS)))
    """How the prompt tells the state. `exact`: for each dimension, which of 256 parts of [-1, 1] it is in (openpi's
    default, lerobot since 0.5); `padded`: with zeros up to the network's width (lerobot 0.4); `none`: not at all
    (openpi's and RLinf's LIBERO checkpoints). None: as lerobot's files say; openpi's do not, and the spec has to. A
    preset: exact where there is a state."""
    value_head: Pi05HeadConfig = field(factory=Pi05HeadConfig)
    """The critic, when the algorithm asks for one."""
