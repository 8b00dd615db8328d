"""What a spec says about the model; light to import."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import in_

from vla_rl.toolkit.models.flow_config import FlowConfig, PrefixHeadConfig, for_checkpoints

GRIPPERS = ("as_is", "libero")


@frozen(kw_only=True)
class GrootConfig(FlowConfig):
    """Keys of `model:` in a spec with `type: gr00t`."""

    embodiment: str | None = field(default=None, validator=for_checkpoints)
    """Whose statistics of metadata.json scale actions and state, and whose layers read and write them. None: the only
    one in the file."""
    state_keys: tuple[str, ...] | None = field(default=None, validator=for_checkpoints)
    """Keys of metadata.json that make up the simulator's state, in its order. None: all, in the file's order."""
    action_keys: tuple[str, ...] | None = field(default=None, validator=for_checkpoints)
    """The same of an action."""
    gripper: str = field(default="as_is", validator=in_(GRIPPERS))
    """How an action's last number reaches the simulator. `as_is`: as it was trained; `libero`: 0 for closed and 1 for
    open becomes LIBERO's +1 and -1, as GR00T's models for LIBERO need."""
    system: str = "You are a helpful assistant."
    """The prompt's system line. It could not be compared with the original's."""
    use_state: bool | None = None
    """Feed the proprioceptive state; without it the model sees zeros. None: as the checkpoint was trained; a preset
    does when there is a state."""
    value_head: PrefixHeadConfig = field(factory=PrefixHeadConfig)
    """The critic, when the algorithm asks for one. On the prefix: the mean that the action head makes of images and
    prompt, with the state's features beside it."""
