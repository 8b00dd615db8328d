"""Spec keys of `smolvla`; light to import."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import in_, optional

from vla_rl.toolkit.models.checkpoints.fitting import one_source
from vla_rl.toolkit.models.flow.config import FlowConfig, PrefixHeadConfig

PRESETS = ("tiny", "full")


@frozen(kw_only=True)
class SmolVLAConfig(FlowConfig):
    """Keys of `model:` in a spec with `type: smolvla`."""

    preset: str | None = field(default=None, validator=[optional(in_(PRESETS)), one_source])
    """Random weights instead of a checkpoint: `tiny` (64 px, for tests and CPUs) or `full` (the public size)."""
    use_state: bool | None = None
    """Feed the proprioceptive state; without it the model sees zeros. Null: as the checkpoint was trained; a preset
    does if the simulator has one."""
    value_head: PrefixHeadConfig = field(factory=PrefixHeadConfig)
    """Critic, used when the algorithm asks for one."""
