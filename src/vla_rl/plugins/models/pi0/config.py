"""Spec keys of `pi0` and `pi05`; light to import."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import in_, optional

from vla_rl.core.conventions import convention
from vla_rl.toolkit.models.checkpoints.fitting import one_source
from vla_rl.toolkit.models.flow.config import FlowConfig, PrefixHeadConfig, ValueHeadConfig, for_checkpoints

PRESETS = ("tiny", "full")
STATE_KINDS = ("exact", "padded", "none")


@frozen(kw_only=True)
class PiConfig(FlowConfig):
    """Keys that pi0 and pi0.5 share."""

    preset: str | None = field(default=None, validator=[optional(in_(PRESETS)), one_source])
    """Random weights instead of a checkpoint: `tiny` (64 px, for tests and CPUs) or `full` (the public size, 3.5B), to
    measure machines."""

    asset_id: str | None = field(default=None, validator=for_checkpoints)
    """Asset whose norm_stats.json under assets/ scales actions and state, in openpi's layout. Null: the only one."""


@frozen(kw_only=True)
class Pi0Config(PiConfig):
    """Keys of `model:` in a spec with `type: pi0`."""

    use_state: bool | None = None
    """Feed the proprioceptive state; without it the model sees zeros. Null: as the checkpoint was trained; a preset
    does if the simulator has one."""
    value_head: ValueHeadConfig = field(factory=ValueHeadConfig)
    """Critic, used when the algorithm asks for one."""


@frozen(kw_only=True)
class Pi05HeadConfig(PrefixHeadConfig):
    """Keys of pi0.5's critic."""

    pads: bool = False
    """Include the padding of a full-length prompt in the mean of `reads: prefix`, as RLinf does; for RLinf's critics.
    The mean then depends on how long prompts may be."""


@frozen(kw_only=True)
class Pi05Config(PiConfig):
    """Keys of `model:` in a spec with `type: pi05`."""

    state_in_prompt: str | None = field(
        default=None, validator=optional(in_(STATE_KINDS)), metadata=convention(STATE_KINDS)
    )
    """Form of the state in the prompt. `exact`: for each dimension, its bin out of 256 on [-1, 1] (openpi's default,
    lerobot since 0.5); `padded`: the same with zeros up to the network's width (lerobot 0.4); `none`: no state
    (openpi's and RLinf's LIBERO checkpoints). Null: as lerobot's files say; required for openpi's files, which do not
    say. A preset: exact if the simulator has a state."""
    value_head: Pi05HeadConfig = field(factory=Pi05HeadConfig)
    """Critic, used when the algorithm asks for one."""
