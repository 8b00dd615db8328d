"""Spec keys of `gr00t`; light to import."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import in_, optional

from vla_rl.toolkit.models.checkpoints.fitting import one_source
from vla_rl.toolkit.models.flow.config import FlowConfig, PrefixHeadConfig, for_checkpoints

PRESETS = ("tiny", "tiny_n1_7", "full", "full_n1_7")


@frozen(kw_only=True)
class GrootConfig(FlowConfig):
    """Keys of `model:` in a spec with `type: gr00t`."""

    preset: str | None = field(default=None, validator=[optional(in_(PRESETS)), one_source])
    """Random weights instead of a checkpoint: `tiny` (N1.5) or `tiny_n1_7`, both with images of 64 px, for tests and
    CPUs; `full` (N1.5) or `full_n1_7`, the public sizes, to measure machines."""
    embodiment: str | None = field(default=None, validator=for_checkpoints)
    """Embodiment tag, which selects the statistics of actions and state (metadata.json; N1.7: statistics.json) and the
    embodiment-specific layers. Null: the only one in the file."""
    state_keys: tuple[str, ...] | None = field(default=None, validator=for_checkpoints)
    """Keys of the statistics that make up the simulator's state, in its order. Null: all, in the file's order."""
    action_keys: tuple[str, ...] | None = field(default=None, validator=for_checkpoints)
    """Keys of the statistics that make up an action, in the simulator's order. Null: all, in the file's order."""
    system: str | None = None
    """System message of the prompt; it could not be compared with the original's. Null: "You are a helpful assistant."
    in N1.5, no system message in N1.7."""
    use_state: bool | None = None
    """Feed the proprioceptive state; without it the model sees zeros. Null: as the checkpoint was trained; a preset
    does if the simulator has one."""
    value_head: PrefixHeadConfig = field(factory=PrefixHeadConfig)
    """Critic, used when the algorithm asks for one. With `reads: prefix` it reads the mean of the refined image and
    prompt tokens, concatenated with the state's features."""
