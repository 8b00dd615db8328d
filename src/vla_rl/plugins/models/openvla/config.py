"""What a spec says about the model; light to import."""

from __future__ import annotations

from typing import Any

from attrs import Attribute, field, frozen
from attrs.validators import ge, gt, in_, optional

from vla_rl.toolkit.models.adapters import LoRAConfig
from vla_rl.toolkit.models.fitting import one_source
from vla_rl.toolkit.models.flow_config import for_checkpoints

PRESETS = ("tiny", "fast", "small", "full")
DTYPES = ("float32", "bfloat16")
HEADS = ("discrete", "l1")
GRIPPERS = ("keep", "rlds")
VALUE_HEADS = ("mlp", "attention", "action_attention")
SAVES = ("merged", "adapter")
DISTRIBUTIONS = ("laplace", "gaussian")
SUPPORTS = ("action_tokens", "full_vocabulary")
RANGES = {"q01_q99": ("q01", "q99"), "min_max": ("min", "max")}
"""Name in a spec -> the two statistics whose numbers become -1 and 1."""


def _no_dropout(config: FamilyConfig, attribute: Attribute[Any], value: bool) -> None:
    if value and config.lora is not None and config.lora.dropout > 0:
        raise ValueError("gradient_checkpointing recomputes layers and cannot be combined with lora.dropout > 0")


def _features_are_frozen(config: FamilyConfig, attribute: Attribute[Any], value: bool) -> None:
    if value and not config.freeze_vision:
        raise ValueError("reuse_vision_features needs freeze_vision: true; features of a trained part grow old")


def _autocast_narrows(config: FamilyConfig, attribute: Attribute[Any], value: bool) -> None:
    if value and config.dtype != "float32" and config.lora is None:
        raise ValueError(
            f"autocast narrows float32 weights, and with dtype: {config.dtype} there are none; leave it out "
            "(with `lora` there are: adapters are kept in float32)"
        )


def _adapter_has_a_base(config: FamilyConfig, attribute: Attribute[Any], value: str) -> None:
    if value == "adapter" and (config.lora is None or config.checkpoint is None):
        raise ValueError("save_lora: adapter needs `lora`, and a `checkpoint` as the base that the adapter belongs to")


def _only_with_l1(config: OpenVLAOFTConfig, attribute: Attribute[Any], value: DeviationConfig | None) -> None:
    if value is not None and config.head != "l1":
        raise ValueError(
            f"`deviation` belongs to `head: l1`; the head is {config.head!r}, whose bins are a distribution"
        )


def _acts_in_one_pass(config: FamilyConfig, attribute: Attribute[Any], value: OpenVLAValueHeadConfig) -> None:
    if value.kind == "action_attention" and not isinstance(config, OpenVLAOFTConfig):
        raise ValueError(
            "value_head.kind: action_attention reads what stands at the action tokens, which openvla knows only once "
            "it has acted; use mlp or attention"
        )


def _only_for_actions(config: OpenVLAValueHeadConfig, attribute: Attribute[Any], value: int | None) -> None:
    if value is not None and config.kind != "action_attention":
        raise ValueError(f"`steps` belongs to kind 'action_attention'; the kind is {config.kind!r}")


@frozen(kw_only=True)
class OpenVLAValueHeadConfig:
    """The critic, built when the algorithm needs one, on the hidden state behind the first action token."""

    kind: str = field(default="mlp", validator=in_(VALUE_HEADS))
    """`mlp`: on that hidden state alone, as in RLinf. `attention`: it first looks back over the hidden states of image
    and prompt (four heads) and adds what it finds. `action_attention` (openvla_oft): the hidden states of all action
    tokens, weighted by learnt scores (AcceRL, section 5.2)."""
    steps: int | None = field(default=None, validator=[optional(ge(2)), _only_for_actions])
    """`action_attention`: rows of a learnt embedding of the episode's step, added to what is weighted (AcceRL's
    equation 16); as many as the longest episode has steps, and one more. Later steps have the last. None: none."""
    hidden: tuple[int, ...] = (512, 128)
    """Widths of the MLP's hidden layers (GELU between), as in RLinf."""
    detach: bool | None = None
    """True keeps the critic's gradient out of the policy's trunk. None: for `action_attention`, as AcceRL does. The
    others share the trunk, as RLinf does for OpenVLA: the last hidden state is made for the next token and says little
    about success until it is trained to."""


@frozen(kw_only=True)
class FamilyConfig:
    """Keys that `openvla` and `openvla_oft` share."""

    checkpoint: str | None = None
    """Folder in OpenVLA's public layout (or of an adapter to such a folder); `builtin:tabletop`, the tiny checkpoint
    that ships with the package; or a name on the Hugging Face hub, `OWNER/NAME` or `OWNER/NAME@REVISION`."""
    preset: str | None = field(default=None, validator=[optional(in_(PRESETS)), one_source])
    """Random weights instead of a checkpoint: `tiny` (64 px, Llama 64x3) or `fast` (for tests); to measure machines,
    `small` (109M parameters with the images and the vocabulary of the public model) and `full` (its 7.5B)."""
    unnorm_key: str | None = None
    """Data set whose statistics scale actions and state. None: the checkpoint's only one."""
    gripper: str = field(default="keep", validator=in_(GRIPPERS))
    """The last number of an action. `keep`: as the statistics scale it. `rlds`: the data set stores 0 closed, 1 open
    (LIBERO, Bridge) and the simulator takes -1 open, +1 closed; what the model says is rounded to one of these."""
    lora: LoRAConfig | None = None
    """Train adapters instead of all weights."""
    save_lora: str = field(default="merged", validator=[in_(SAVES), _adapter_has_a_base])
    """What `save` writes of adapters: `merged` into all weights, or the `adapter` alone (peft's files), which needs its
    base, the `checkpoint`, to be loaded again."""
    cameras: tuple[str, ...] | None = None
    """Cameras in the order in which the model sees them. None: those of the checkpoint's training, else all
    (`openvla`: the first)."""
    center_crop: bool = False
    """Cut 0.9 of the area out of the middle, as evaluation does for models trained with random crops."""
    freeze_vision: bool = False
    """Do not train the two vision transformers."""
    reuse_vision_features: bool = field(default=False, validator=_features_are_frozen)
    """With `freeze_vision`: keep the features of acting for training, which then computes no vision transformer. Costs
    memory and, between processes, traffic: at full size about 1.1 MB a camera in bfloat16, seven times the image."""
    value_head: OpenVLAValueHeadConfig = field(factory=OpenVLAValueHeadConfig, validator=_acts_in_one_pass)
    """The critic, when the algorithm asks for one."""
    gradient_checkpointing: bool = field(default=False, validator=_no_dropout)
    """Recompute the layers of the Llama and of trained vision transformers in the backward pass: less memory, about a
    third more time."""
    dtype: str = field(default="float32", validator=in_(DTYPES))
    """Of the weights. Log-probs, entropies and values are computed in float32 either way."""
    autocast: bool = field(default=False, validator=_autocast_narrows)
    """Compute the network in bfloat16 while weights and optimiser keep float32 (mixed precision); meant for GPUs. With
    `dtype: bfloat16` and `lora`: the adapters, which keep float32 either way, are computed in bfloat16 too."""


@frozen(kw_only=True)
class DeviationConfig:
    """How actions lie around those of the L1 head, so that they can be sampled, scored and trained by RL."""

    kind: str = field(default="laplace", validator=in_(DISTRIBUTIONS))
    """`laplace`: the distribution whose likelihood the mean absolute error is; `gaussian`."""
    start: float = field(default=0.1, validator=gt(0.0))
    """The scale (Laplace) or standard deviation (Gaussian) that is trained from, in normalised actions: one number for
    each dimension of each action of a chunk."""


@frozen(kw_only=True)
class OpenVLAOFTConfig(FamilyConfig):
    """Keys of `model:` in a spec with `type: openvla_oft`."""

    head: str = field(default="discrete", validator=in_(HEADS))
    """`discrete`: 256 bins an action dimension. `l1`: the regression head of the public OpenVLA-OFT checkpoints, for
    evaluation and imitation; alone it gives no distribution, and RL is refused."""
    deviation: DeviationConfig | None = field(default=None, validator=_only_with_l1)
    """head: l1: sample around its actions, with a deviation that is trained too. None: it acts as it is, without RL."""
    use_proprio: bool | None = None
    """Feed the state as one token. None: as the checkpoint was trained; a preset does when there is a state."""
    statistics_range: str | None = field(default=None, validator=[optional(in_(RANGES)), for_checkpoints])
    """Which statistics scale actions and state to [-1, 1]. `q01_q99`: the 1st and the 99th percentile, as OpenVLA-OFT
    does for LIBERO and Bridge; `min_max`: the ends, as it does for ALOHA. None: as the checkpoint was trained, where
    the folder says so, else q01_q99; statistics of ALOHA, and of 14 numbers, then ask for the key."""
    append_stop_token: bool | None = None
    """End the sequence with `</s>` (OpenVLA-OFT: yes). None: as the checkpoint was trained, else yes."""


@frozen(kw_only=True)
class OpenVLAARConfig(FamilyConfig):
    """Keys of `model:` in a spec with `type: openvla`."""

    log_prob_over: str = field(default="action_tokens", validator=in_(SUPPORTS))
    """What is sampled and scored. `action_tokens`: the 256 action tokens, the others' logits left out (RLinf).
    `full_vocabulary`: every token, as SimpleVLA-RL scores OpenVLA; a token of text then means the nearest action."""


def no_rl(config: OpenVLAOFTConfig) -> str | None:
    """Why RL is impossible, for `Plugin.no_rl`."""
    if config.head == "discrete" or config.deviation is not None:
        return None
    return (
        "its `head: l1` gives one action, no distribution; it serves evaluation and `vla-rl sft`. Set "
        "`deviation: {}` beside it, or use `head: discrete` and a checkpoint that was trained so"
    )
