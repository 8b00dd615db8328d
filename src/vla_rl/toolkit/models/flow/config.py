"""Spec keys that flow-matching models share. Cheap to import."""

from __future__ import annotations

from typing import Any, Literal

from attrs import Attribute, field, frozen
from attrs.validators import deep_iterable, ge, gt, in_, le

from vla_rl.core.conventions import CAMERA_EVIDENCE, GRIPPER_EVIDENCE, convention, order_cameras
from vla_rl.core.types import EnvInfo
from vla_rl.toolkit.models.adapters import FROZEN_WEIGHTS, LoRAConfig, check_frozen_weights
from vla_rl.toolkit.relative_actions import RelativeActions

DTYPES = ("float32", "bfloat16", "float16")
STARTS = ("zeros", "fixed_noise")
GRIPPERS = ("as_is", "libero", "widowx")


def for_checkpoints(config: Any, attribute: Attribute[Any], value: Any) -> None:
    """Validate a key that a preset does not take (attrs validator)."""
    if value is not None and config.checkpoint is None:
        raise ValueError(f"`{attribute.name}` says how to read a checkpoint; a preset has its own")


def _list_references(config: FlowConfig, info: EnvInfo) -> list[Any]:
    """Return absolute actions, and actions relative to the numbers of the state at the same places."""
    numbers = tuple(range(min(info.action_dim - 1, info.state_dim)))
    relative = [RelativeActions(relative_to="state", dimensions=numbers)] if numbers else []
    return [config.actions, "absolute", *relative]


def _some_step_is_noisy(config: FlowConfig, attribute: Attribute[Any], value: FlowNoiseKind) -> None:
    if isinstance(value, FlowCPS) and config.denoise_steps < 2:
        raise ValueError("the last denoising step of flow_cps is free of noise; set denoise_steps to 2 or more")


def _goes_with_frozen(config: FlowConfig, attribute: Attribute[Any], value: SteeringConfig | None) -> None:
    """Validate that no key asks for what a steered policy, which is frozen, does not do (attrs validator)."""
    if value is None:
        return
    unused = {
        "noise": config.noise != FlowSDE(),
        "greedy_start": config.greedy_start != "zeros",
        "train_expert_only": not config.train_expert_only,
        "reuse_prefix": config.reuse_prefix,
        "lora": config.lora is not None,
    }
    clashing = [f"`{name}`" for name, given in unused.items() if given]
    if clashing:
        raise ValueError(
            f"a steered policy is frozen and denoised by the ODE, from noise that the steering head chooses; leave "
            f"{' and '.join(clashing)} out"
        )


def _prefix_is_frozen(config: FlowConfig, attribute: Attribute[Any], value: bool) -> None:
    if value and not config.train_expert_only:
        raise ValueError("reuse_prefix needs train_expert_only: true; keys and values of a trained model grow old")


def _check_std_range(config: FlowNoise, attribute: Attribute[Any], value: tuple[float, float]) -> None:
    if not 0 < value[0] < value[1]:
        raise ValueError(f"std_range must be 0 < low < high, not {list(value)}")


@frozen(kw_only=True)
class FlowSDE:
    """The ODE turned into an SDE with the same marginals."""

    type: Literal["flow_sde"] = "flow_sde"
    level: float = field(default=0.5, validator=gt(0.0))
    """Noise level a: sigma_t = a sqrt(t / (1 - t))."""
    steps: Literal["one", "all"] = "one"
    """Stochastic steps. `one`: one denoising step of each chunk, drawn at random, is stochastic and scored, the others
    follow the ODE (cheap to train); `all`: every step."""


@frozen(kw_only=True)
class FlowCPS:
    """Part of the remaining noise is replaced by new noise, which keeps its size at every step
    (coefficients-preserving sampling, Wang & Yu 2025). The last step, which leaves none, is never stochastic."""

    type: Literal["flow_cps"] = "flow_cps"
    level: float = field(default=0.5, validator=[gt(0.0), le(1.0)])
    """Noise level a: a share sin(pi a / 2) of the noise is new."""
    steps: Literal["one", "all"] = "one"
    """Stochastic steps, as for flow_sde."""


@frozen(kw_only=True)
class FlowNoise:
    """The ODE with Gaussian noise, whose size comes from a network that is trained too."""

    type: Literal["flow_noise"] = "flow_noise"
    std_range: tuple[float, float] = field(default=(0.08, 0.16), validator=_check_std_range)
    """Bounds of the standard deviation, in normalised actions."""


FlowNoiseKind = FlowSDE | FlowCPS | FlowNoise


@frozen(kw_only=True)
class ValueHeadConfig:
    """The critic, built when the algorithm needs one: an MLP on the action expert's output."""

    reads: str = field(default="expert", validator=in_(("expert", "denoising")))
    """Input of the critic. `expert`: the expert's output for the mean noise, at most one more pass. `denoising`: the
    average over all denoising steps from there, at that many passes; pi_RL averages over the steps of the sampled
    chunk."""
    hidden: tuple[int, ...] = (512, 256, 128)
    """Widths of its hidden layers (ReLU between), as in RLinf."""
    detach: bool = False
    """Keep the critic's gradient out of the expert."""


@frozen(kw_only=True)
class PrefixHeadConfig:
    """The critic, built when the algorithm needs one: an MLP on the mean output of the vision-language model, which
    costs no pass of the expert; or on the expert's output."""

    reads: str = field(default="prefix", validator=in_(("prefix", "expert", "denoising")))
    """Input of the critic. `prefix`: the mean over images and prompt, padding left out. `expert`: the expert's output
    for the mean noise, at most one more pass. `denoising`: the average over all denoising steps from there, at that
    many passes."""
    hidden: tuple[int, ...] = (1024, 512, 256)
    """Widths of its hidden layers (ReLU between), as in RLinf."""
    detach: bool = False
    """Keep the critic's gradient out of its input."""


@frozen(kw_only=True)
class SteeringConfig:
    """The steering head: a small network that chooses the initial noise of a frozen policy (DSRL)."""

    range: float = field(default=1.5, validator=[gt(0.0), le(100.0)])
    """Largest absolute value of each number of the initial noise, above 0 (the authors' action magnitude: 1 to 2.5).
    The policy was trained on standard normal noise."""
    hidden: tuple[int, ...] = field(default=(256, 256), validator=deep_iterable(ge(1)))
    """Widths of its hidden layers (ReLU between)."""
    per_action: bool = False
    """Choose noise for each action of the denoised chunk, instead of one vector that is repeated over the chunk."""


@frozen(kw_only=True)
class FlowConfig:
    """Keys of `model:` that all flow-matching models have."""

    checkpoint: str | None = None
    """Folder with weights, config.json and statistics in a public layout; or a name on the Hugging Face hub,
    `OWNER/NAME` or `OWNER/NAME@REVISION`."""
    tokenizer: str | None = field(default=None, validator=for_checkpoints)
    """The language model's tokenizer.json, or a folder that holds it. None: in the checkpoint's folder."""
    cameras: tuple[str, ...] | None = field(default=None, metadata=convention(order_cameras, evidence=CAMERA_EVIDENCE))
    """The simulator's cameras in the order of the model's images. None: those of the checkpoint's training, or all."""
    actions: RelativeActions | Literal["absolute"] | None = field(
        default=None,
        metadata=convention(_list_references, evidence="demonstrations whose actions are far from the state"),
    )
    """What the network predicts: actions as the simulator takes them (`absolute`), or differences to the state. It is
    saved with the model. None: as the checkpoint's folder says; absolute in a preset, and where the folder says
    nothing, as openpi's do not."""
    gripper: str = field(
        default="as_is", validator=in_(GRIPPERS), metadata=convention(GRIPPERS, evidence=GRIPPER_EVIDENCE)
    )
    """Conversion of an action's last number, 0 (closed) or 1 (open) as the data stores it. `as_is`: none; `libero`: +1
    and -1, as GR00T's models for LIBERO need; `widowx`: -1 and +1, as RLinf's models for ManiSkill's WidowX do."""
    denoise_steps: int = field(default=4, validator=ge(1), metadata=convention((4, 10)))
    """K, steps from noise to actions: 4 in pi_RL's training recipes, 10 in the models' own inference."""
    noise: FlowNoiseKind = field(factory=FlowSDE, validator=_some_step_is_noisy)
    """Stochastic denoising, which gives a chunk a log-probability (pi_RL, section 4)."""
    greedy_start: str = field(default="zeros", validator=in_(STARTS))
    """Start of the ODE in greedy evaluation: the mean of the initial noise (zeros), or one fixed draw of it
    (fixed_noise)."""
    train_expert_only: bool = True
    """Train the action expert and freeze the vision-language model, as pi_RL does."""
    reuse_prefix: bool = field(default=False, validator=_prefix_is_frozen)
    """Keep what the frozen vision-language model computed while acting for training, which then runs the action expert
    alone; needs `train_expert_only`. Costs memory and, between processes, traffic for each chunk: about 10 MB for pi0
    and pi0.5 at full size with two cameras, in bfloat16."""
    lora: LoRAConfig | None = None
    """Train adapters on the linear layers of the trained part, instead of its weights; heads are trained in full."""
    dtype: str = field(default="float32", validator=in_(DTYPES))
    """Precision of the towers' weights. Norms, projections of state, time and actions, and all heads stay in
    float32."""
    frozen_weights: str = field(default="bf16", validator=[in_(FROZEN_WEIGHTS), check_frozen_weights])
    """Storage of the weights of transformer layers that are not trained (`train_expert_only`, `lora`). `bf16`: as
    `dtype` says; `int8` and `nf4`: one byte, or 4.25 bits a weight, and products in `dtype`; `fp8`: one byte, and
    products in FP8, on GPUs that have it (Ada, Hopper or newer). Everything else stays as it is, and checkpoints are in
    full precision."""
    steering: SteeringConfig | None = field(default=None, validator=_goes_with_frozen)
    """Freeze the policy, and train a head that chooses its initial noise, with `trainer: {type: dsrl}`. None: as the
    checkpoint's folder says, which has a file for it."""
