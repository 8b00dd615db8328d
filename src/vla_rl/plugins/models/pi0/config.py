"""What a spec says about the model; light to import."""

from __future__ import annotations

from attrs import field, frozen

from vla_rl.toolkit.models.flow_config import FlowConfig, ValueHeadConfig, for_checkpoints


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
