"""Spec keys of `openvla` and `openvla_oft`; light to import."""

from __future__ import annotations

from typing import Any, Literal

from attrs import Attribute, field, frozen
from attrs.validators import and_, deep_iterable, ge, gt, in_, le, optional

from vla_rl.core.conventions import CAMERA_EVIDENCE, GRIPPER_EVIDENCE, convention, order_cameras
from vla_rl.core.types import EnvInfo
from vla_rl.toolkit.models.adapters import FROZEN_WEIGHTS, LoRAConfig, check_frozen_weights
from vla_rl.toolkit.models.checkpoints.fitting import one_source
from vla_rl.toolkit.models.flow.config import for_checkpoints
from vla_rl.toolkit.models.recompute import RECOMPUTE

PRESETS = ("tiny", "fast", "small", "full")
DTYPES = ("float32", "bfloat16")
HEADS = ("discrete", "l1")
GRIPPERS = ("keep", "rlds", "widowx")
SAVES = ("merged", "adapter")
DISTRIBUTIONS = ("laplace", "gaussian")
SUPPORTS = ("action_tokens", "full_vocabulary")
RANGES = {"q01_q99": ("q01", "q99"), "min_max": ("min", "max")}
"""Value of `statistics_range` -> the two statistics that are scaled to -1 and 1."""


def _list_statistics(config: FamilyConfig, info: EnvInfo) -> list[str | None]:
    """Return the names of the statistics in the checkpoint's folder."""
    from vla_rl.plugins.models.openvla.locate import read_known, resolve_checkpoint
    from vla_rl.toolkit.models.checkpoints.files import read_keys

    if config.checkpoint is None:
        return [None]
    folder = resolve_checkpoint(config.checkpoint)
    return list(read_known(folder, read_keys(folder / "config.json")).data)


def _list_ranges(config: FamilyConfig, info: EnvInfo) -> list[str | None]:
    return [None] if config.checkpoint is None else [*RANGES]


def _no_dropout(config: FamilyConfig, attribute: Attribute[Any], value: str) -> None:
    if value != "off" and config.lora is not None and config.lora.dropout > 0:
        raise ValueError(f"recompute: {value} runs layers twice and cannot be combined with lora.dropout > 0")


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


HIDDEN: Any = deep_iterable(and_(ge(1), le(16_384)))
"""Bounds of the widths of a critic's hidden layers."""


@frozen(kw_only=True)
class MLPHeadConfig:
    """The critic on the hidden state that predicts the first action token, as in RLinf. It is built when the algorithm
    needs one."""

    type: Literal["mlp"] = "mlp"
    hidden: tuple[int, ...] = field(default=(512, 128), validator=HIDDEN)
    """Widths of the MLP's hidden layers (GELU between), as in RLinf; 1 to 16,384."""
    detach: bool = False
    """Stop the critic's gradient from reaching the policy's trunk. RLinf does not, for OpenVLA: the last hidden state
    is trained to predict the next token and says little about success until the critic trains it too."""


@frozen(kw_only=True)
class AttentionHeadConfig:
    """The same after attention (four heads) from that hidden state over those of image and prompt, added to it."""

    type: Literal["attention"] = "attention"
    hidden: tuple[int, ...] = field(default=(512, 128), validator=HIDDEN)
    """Widths of the MLP's hidden layers, as for mlp."""
    detach: bool = False
    """Stop the critic's gradient from reaching the policy's trunk, as for mlp."""


@frozen(kw_only=True)
class ActionAttentionHeadConfig:
    """The critic on the hidden states of all action tokens, pooled with learnt weights (AcceRL, section 5.2)."""

    type: Literal["action_attention"] = "action_attention"
    hidden: tuple[int, ...] = field(default=(512, 128), validator=HIDDEN)
    """Widths of the MLP's hidden layers, as for mlp."""
    detach: bool = True
    """Stop the critic's gradient from reaching the policy's trunk, as in AcceRL."""
    steps: int | None = field(default=None, validator=optional(ge(2)))
    """Size of a learnt embedding of the episode's step, added to the pooled states (AcceRL's equation 16), 2 or more:
    the steps of the longest episode, plus one. Later steps use the last embedding. Null: none."""


@frozen(kw_only=True)
class FamilyConfig:
    """Keys that `openvla` and `openvla_oft` share."""

    checkpoint: str | None = None
    """Folder in OpenVLA's public layout (or of an adapter to such a folder); `builtin:tabletop`, the tiny checkpoint
    that ships with the package; or a name on the Hugging Face hub, `OWNER/NAME` or `OWNER/NAME@REVISION`."""
    preset: str | None = field(default=None, validator=[optional(in_(PRESETS)), one_source])
    """Random weights instead of a checkpoint: `tiny` (64 px, Llama 64x3) or `fast`, for tests; `small` (109M
    parameters, with the public model's image size and vocabulary) or `full` (its 7.5B), to measure machines."""
    unnorm_key: str | None = field(default=None, metadata=convention(_list_statistics))
    """Data set whose statistics scale actions and state. Null: the checkpoint's only one."""
    gripper: str = field(
        default="keep", validator=in_(GRIPPERS), metadata=convention(GRIPPERS, evidence=GRIPPER_EVIDENCE)
    )
    """Conversion of an action's last number. `keep`: as the statistics scale it. `rlds`: the data set stores 0 closed,
    1 open (LIBERO, Bridge) and the simulator takes -1 open, +1 closed; the model's output is rounded to one of
    these. `widowx`: the same data, and the simulator takes -1 closed, +1 open (the WidowX of ManiSkill and SimplerEnv,
    RLinf's `policy_setup: widowx_bridge`)."""
    lora: LoRAConfig | None = None
    """Train LoRA adapters instead of all weights; null: all weights."""
    save_lora: str = field(default="merged", validator=[in_(SAVES), _adapter_has_a_base])
    """Output of `save` with adapters: `merged` into all weights, or the `adapter` alone (peft's files), which needs its
    base, the `checkpoint`, when it is loaded."""
    cameras: tuple[str, ...] | None = field(default=None, metadata=convention(order_cameras, evidence=CAMERA_EVIDENCE))
    """Cameras in the order in which the model sees them. Null: those of the checkpoint's training, else all (`openvla`:
    the first)."""
    center_crop: bool = field(default=False, metadata=convention((False, True)))
    """Crop the central 0.9 of the area, as evaluation does for models trained with random crops."""
    freeze_vision: bool = False
    """Do not train the two vision transformers."""
    reuse_vision_features: bool = field(default=False, validator=_features_are_frozen)
    """Keep the vision features computed while acting for training, which then runs no vision transformer; needs
    `freeze_vision`. Costs memory and, between processes, traffic: at full size about 1.1 MB per camera in bfloat16,
    seven times the image."""
    value_head: MLPHeadConfig | AttentionHeadConfig | ActionAttentionHeadConfig = field(factory=MLPHeadConfig)
    """Critic, used when the algorithm asks for one."""
    recompute: str = field(default="off", validator=[in_(RECOMPUTE), _no_dropout])
    """Activations of the Llama's layers and of trained vision transformers that the backward pass computes again
    instead of keeping them. `off`: none. `selective`: all but the large products of matrices, and attention over long
    sequences: 0.4 of the memory at full size. `full`: all, 0.06 of the memory and about a third more time."""
    dtype: str = field(default="float32", validator=in_(DTYPES))
    """Precision of the weights: float32 or bfloat16. Log-probs, entropies and values are always computed in float32."""
    frozen_weights: str = field(default="bf16", validator=[in_(FROZEN_WEIGHTS), check_frozen_weights])
    """Storage of the weights of transformer layers that `lora` leaves frozen. `bf16`: as `dtype` says; `int8` and
    `nf4`: one byte, or 4.25 bits a weight, and products in `dtype`; `fp8`: one byte, and products in FP8, on GPUs that
    have it (Ada, Hopper or newer). Everything else stays as it is, and checkpoints are in full precision."""
    autocast: bool = field(default=False, validator=_autocast_narrows)
    """Compute the network in bfloat16 while weights and optimiser stay in float32 (mixed precision); meant for GPUs.
    With `dtype: bfloat16` and `lora`: the adapters, which stay in float32 either way, are computed in bfloat16 too."""


@frozen(kw_only=True)
class DeviationConfig:
    """Distribution of actions around those of the L1 head, so that they can be sampled, scored and trained by RL."""

    kind: str = field(default="laplace", validator=in_(DISTRIBUTIONS))
    """Family: `laplace`, whose log-likelihood is the mean absolute error, or `gaussian`."""
    start: float = field(default=0.1, validator=gt(0.0))
    """Initial scale (Laplace) or standard deviation (Gaussian) in normalised actions, above 0; one is learnt for each
    dimension of each action of a chunk."""


@frozen(kw_only=True)
class OpenVLAOFTConfig(FamilyConfig):
    """Keys of `model:` in a spec with `type: openvla_oft`."""

    head: str = field(default="discrete", validator=in_(HEADS))
    """Action head. `discrete`: 256 bins per action dimension. `l1`: the regression head of the public OpenVLA-OFT
    checkpoints, for evaluation and behaviour cloning; without `deviation` it has no distribution, and RL is refused."""
    deviation: DeviationConfig | None = field(default=None, validator=_only_with_l1)
    """Distribution around the actions of `head: l1`, with a learnt scale, for RL. Null: deterministic, no RL."""
    use_proprio: bool | None = None
    """Feed the state as one token. Null: as the checkpoint was trained; a preset does if the simulator has one."""
    statistics_range: str | None = field(
        default=None,
        validator=[optional(in_(RANGES)), for_checkpoints],
        metadata=convention(_list_ranges),
    )
    """Statistics that are scaled to -1 and 1 for actions and state. `q01_q99`: 1st and 99th percentile, as OpenVLA-OFT
    does for LIBERO and Bridge; `min_max`: minimum and maximum, as it does for ALOHA. Null: as the checkpoint was
    trained, if the folder says so, else q01_q99; for statistics of ALOHA, or of 14 numbers, the key is then
    required."""
    append_stop_token: bool | None = field(default=None, metadata=convention((False, True)))
    """End the sequence with `</s>`, as OpenVLA-OFT does. Null: as the checkpoint was trained, else true."""


@frozen(kw_only=True)
class OpenVLAARConfig(FamilyConfig):
    """Keys of `model:` in a spec with `type: openvla`."""

    value_head: MLPHeadConfig | AttentionHeadConfig = field(factory=MLPHeadConfig)
    """Critic, used when the algorithm asks for one. There is no action_attention: action tokens are known only after
    acting."""
    log_prob_over: str = field(default="action_tokens", validator=in_(SUPPORTS))
    """Tokens that are sampled and scored. `action_tokens`: the 256 action tokens, without the others' logits (RLinf).
    `full_vocabulary`: every token, as SimpleVLA-RL scores OpenVLA; a text token then means the nearest action."""


def no_rl(config: OpenVLAOFTConfig) -> str | None:
    """Return why RL is impossible, for `ModelPlugin.no_rl`; None if it is possible."""
    if config.head == "discrete" or config.deviation is not None:
        return None
    return (
        "its `head: l1` gives one action, no distribution; it serves evaluation and `vla-rl sft`. Set "
        "`deviation: {}` with it, or use `head: discrete` and a checkpoint that was trained so"
    )
