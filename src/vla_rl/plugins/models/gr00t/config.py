"""What a spec says about the model; light to import."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import in_, optional

from vla_rl.toolkit.models.fitting import one_source
from vla_rl.toolkit.models.flow_config import FlowConfig, PrefixHeadConfig, for_checkpoints

GRIPPERS = ("as_is", "libero")
PRESETS = ("tiny", "tiny_n1_7")


@frozen(kw_only=True)
class GrootConfig(FlowConfig):
    """Keys of `model:` in a spec with `type: gr00t`."""

    preset: str | None = field(default=None, validator=[optional(in_(PRESETS)), one_source])
    """Random weights instead of a checkpoint: `tiny` (N1.5) or `tiny_n1_7`, both of 64 px, for tests and CPUs."""
    embodiment: str | None = field(default=None, validator=for_checkpoints)
    """Whose statistics (of metadata.json, N1.7: of statistics.json) scale actions and state, and whose layers read and
    write them. None: the only one in the file."""
    state_keys: tuple[str, ...] | None = field(default=None, validator=for_checkpoints)
    """Keys of these statistics that make up the simulator's state, in its order. None: all, in the file's order."""
    action_keys: tuple[str, ...] | None = field(default=None, validator=for_checkpoints)
    """The same of an action."""
    gripper: str = field(default="as_is", validator=in_(GRIPPERS))
    """How an action's last number reaches the simulator. `as_is`: as it was trained; `libero`: 0 for closed and 1 for
    open becomes LIBERO's +1 and -1, as GR00T's models for LIBERO need."""
    system: str | None = None
    """The prompt's system line; it could not be compared with the original's. None: "You are a helpful assistant." in
    N1.5, no such line in N1.7."""
    use_state: bool | None = None
    """Feed the proprioceptive state; without it the model sees zeros. None: as the checkpoint was trained; a preset
    does when there is a state."""
    value_head: PrefixHeadConfig = field(factory=PrefixHeadConfig)
    """The critic, when the algorithm asks for one. On the prefix: the mean that the action head makes of images and
    prompt, with the state's features beside it."""
