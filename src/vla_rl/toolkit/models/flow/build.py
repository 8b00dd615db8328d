"""Builds a flow-matching policy from a spec's config and a worker's context; what families differ in is a subclass.
Settings add a reference policy (`lora`) and a steering head (`steering`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from attrs import asdict, evolve, frozen
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from vla_rl.core.capabilities import STEERING, Steerable
from vla_rl.core.contexts import ModelContext
from vla_rl.core.errors import CheckpointError, UserError
from vla_rl.core.randomness import Noise, derived_seed
from vla_rl.core.types import ArrayOrTensor, Chunk, Observation, Scores
from vla_rl.toolkit.models.adapter_files import store_network
from vla_rl.toolkit.models.adapters import insert_adapters
from vla_rl.toolkit.models.checkpoints.files import read_file, resolve_checkpoint
from vla_rl.toolkit.models.checkpoints.fitting import MismatchError
from vla_rl.toolkit.models.checkpoints.lerobot import bounds_statistics
from vla_rl.toolkit.models.combined_classes import AdaptedPolicy, combine_classes
from vla_rl.toolkit.models.flow.checkpoint import ARCHITECTURE, FlowCheckpoint, FlowShape
from vla_rl.toolkit.models.flow.config import FlowConfig, FlowNoise
from vla_rl.toolkit.models.flow.fit import (
    FlowIOAdapter,
    demonstration_statistics,
    fit_checkpoint,
    fit_preset,
    uses_state,
)
from vla_rl.toolkit.models.flow.inputs import FlowParts
from vla_rl.toolkit.models.flow.network import FlowModule, Heads, SteeringHead, freeze_unused, saved_settings
from vla_rl.toolkit.models.flow.policy import FlowPolicy
from vla_rl.toolkit.models.heads import (
    NOISE_HEAD,
    STEERING_HEAD,
    VALUE_HEAD,
    HorizonValueHead,
    NoiseHead,
    PrefixValueHead,
    load_head,
)
from vla_rl.toolkit.models.images import ImageProcessor
from vla_rl.toolkit.models.meta_device import META
from vla_rl.toolkit.models.networks import (
    allocate_network,
    as_tensor,
    check_shapes,
    construct_module,
    fill_network,
    load_weights,
    same_name,
)
from vla_rl.toolkit.models.prompts import PaddedPrompts, train_tokenizer

VOCAB = 512
"""Size of the vocabulary of a preset's tokenizer."""
TINY: Mapping[str, Any] = {
    "text_width": 64,
    "text_mlp": 128,
    "heads": 4,
    "head_dim": 16,
    "vocab": VOCAB,
    "vision_width": 48,
    "vision_mlp": 192,
    "vision_depth": 2,
    "vision_heads": 4,
    "image_size": 64,
}
"""Sizes that all tiny presets have."""


@frozen(kw_only=True)
class TrainedParts:
    """Parts of a network that are frozen or trained as the spec says."""

    vlm: nn.Module
    """Vision-language model, frozen with `train_expert_only`."""
    language: Any = None
    """The language part, whose layers without influence are frozen unless a critic reads its output."""
    state: Tensor | None = None
    """Weight of the state, which is frozen where the state is fed as zeros."""


class FlowBuilder(ABC):
    """Builds a spec's policy. Raises CheckpointError or MismatchError if checkpoint, spec and simulator do not fit."""

    policy: type[FlowPolicy]
    prompts: type[PaddedPrompts]
    images: type[ImageProcessor] = ImageProcessor
    presets: Mapping[str, Any]
    """Preset -> sizes of its network; those named `tiny...` have no padding except of small states."""
    slots = 3
    """Number of images in the public model's training."""
    max_prompt = 48
    """Most tokens of a preset's prompt."""
    quantiles = False
    """Where the run measures the demonstrations: scale by quantiles; else by z-scores."""
    by_step = False
    """Where the run measures them: scale relative actions by their range at each step of a chunk."""
    blind = "use_state: false"
    """What a spec says for a model that shall see no state."""
    stays_float32: Callable[[str], bool]
    """See `networks.fill_network`; `public_name` too."""
    public_name: Callable[[str], str] = staticmethod(same_name)

    def __init__(self, config: Any, context: ModelContext) -> None:
        self.config = config
        self.context = context
        self.env = context.env
        self.device = torch.device(context.device)
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        """Precision of the towers."""
        if self.dtype == torch.float16 and self.device.type == "cpu":
            raise MismatchError(
                "dtype float16 is for GPUs: on the CPU it overflows and is slow; use float32 or bfloat16"
            )
        self.measured = demonstration_statistics(context, self.quantiles, self.by_step)

    # -------------------------------------------------------------------------------------------- what families define

    @abstractmethod
    def open_checkpoint(self, folder: Path) -> FlowCheckpoint:
        """Open a folder by its small files. Raise CheckpointError."""

    @abstractmethod
    def prompt_text(self, instruction: str) -> str:
        """Return the prompt of an instruction, for a preset's tokenizer."""

    @abstractmethod
    def empty_network(self, checkpoint: FlowCheckpoint) -> nn.Module:
        """Return the network with uninitialised memory."""

    @abstractmethod
    def initialise_network(self, network: Any, seed: int) -> None:
        """Set random weights that depend on the seed alone."""

    @abstractmethod
    def find_parts(self, network: Any) -> TrainedParts:
        """Return the parts that are frozen or trained."""

    @abstractmethod
    def make_module(self, network: Any, fit: FlowIOAdapter, prompts: Any, heads: Heads) -> FlowModule:
        """Return the module with all parameters of the policy."""

    def wants_state(self) -> bool | None:
        """Return whether the policy sees the state; None: if checkpoint and simulator have one."""
        wanted: bool | None = self.config.use_state
        return wanted

    def head_widths(self, sizes: Any) -> tuple[int, int]:
        """Return the widths of the expert's output and of the prefix's summary."""
        return sizes.expert_width, sizes.text_width

    # ------------------------------------------------------------------------------------------------------ the policy

    def build(self) -> Any:
        """Build the policy."""
        fit = self.choose_fit()
        prompts = self.make_prompts(fit)
        module = construct_module(lambda: self._build_module(fit, prompts), self.device)
        parts = FlowParts(
            config=self.config,
            context=self.context,
            fit=fit,
            module=module,
            images=self.make_images(fit),
            prompts=prompts,
            device=self.device,
        )
        return choose_class(self.policy, self.config, module)(parts)

    def choose_fit(self) -> FlowIOAdapter:
        """Return what checkpoint or preset, simulator and spec agree on."""
        name, config = self.policy.name, self.config
        if config.checkpoint is None:
            sees = uses_state(self.wants_state(), self.env)
            return fit_preset(name, config, self.env, self.preset_checkpoint(sees), sees)
        checkpoint = self.open_checkpoint(resolve_checkpoint(config.checkpoint))
        return fit_checkpoint(
            name,
            config,
            self.context,
            checkpoint,
            self.wants_state(),
            blind=self.blind,
            measured=self.measured,
        )

    def preset_checkpoint(self, sees_state: bool) -> FlowCheckpoint:
        """Return what stands in for a checkpoint where weights are random: statistics of the demonstrations, or of the
        simulator's bounds, and a tokenizer trained on the instructions."""
        name, env = self.config.preset, self.env
        widths = {"action_dim": env.action_dim, "state_dim": max(env.state_dim, 1)} if name.startswith("tiny") else {}
        return FlowCheckpoint(
            sizes=self.presets[name],
            shape=FlowShape(horizon=self.context.chunk, tokenizer_max_length=self.max_prompt, **widths),
            statistics=self.measured or evolve(bounds_statistics(env, sees_state), references=None),
            tokenizer=self.train_tokenizer(),
            raw={},
            slots=self.slots,
        )

    def train_tokenizer(self) -> Tokenizer:
        """Return a preset's tokenizer."""
        return train_tokenizer((task.instruction for task in self.env.tasks), self.prompt_text, VOCAB)

    def make_prompts(self, fit: FlowIOAdapter, **options: Any) -> Any:
        """Return the prompts; `options` are further arguments of their class."""
        tasks = self.env.tasks
        common = {
            "vocab": fit.checkpoint.sizes.vocab,
            "max_length": fit.checkpoint.shape.tokenizer_max_length,
            "device": self.device,
            "instructions": [task.instruction for task in tasks],
            "full_width": any(task.instruction_varies for task in tasks),
        }
        return self.prompts(fit.checkpoint.tokenizer, **{**common, **options})

    def make_images(self, fit: FlowIOAdapter) -> ImageProcessor:
        return self.images(fit.checkpoint.sizes.image_size, self.device, self.dtype)

    # ----------------------------------------------------------------------------------------------------- the network

    def _build_module(self, fit: FlowIOAdapter, prompts: PaddedPrompts) -> FlowModule:
        """Return the module with weights from the folder, or random ones that depend on the seed alone."""
        network = self._build_network(fit.checkpoint)
        heads = self._make_heads(fit.checkpoint)
        self._choose_trained(network, heads[0], blind=fit.state is None)
        module = self.make_module(network, fit, prompts, heads)
        steering = self._make_steering_head(fit.checkpoint)
        if steering is not None:
            module.attach_steering(steering)
        store_network(module, module.network, self.policy.blocks, self.config, fit.checkpoint.folder)
        return module

    def _build_network(self, checkpoint: FlowCheckpoint) -> nn.Module:
        """Return the network on the device in the spec's precision. A file's sizes are compared with weights first."""
        weights, device = checkpoint.weights, self.device
        if weights is not None and (weights.folder / ARCHITECTURE).is_file():
            with torch.device("meta"):
                check_shapes(self.empty_network(checkpoint), weights, self.public_name)
        with torch.device(device) if device.type == META else nullcontext():
            network = self.empty_network(checkpoint)
        if weights is not None:
            fill_network(
                network,
                weights,
                device,
                self.dtype,
                public_name=self.public_name,
                stays_float32=self.stays_float32,
            )
        else:
            allocate_network(network, device, self.dtype, f"preset {self.config.preset}", self.stays_float32)
            self.initialise_network(network, self._derive_seed("network"))
        return network

    def _derive_seed(self, part: str) -> int:
        return derived_seed(self.context.seed, f"{self.policy.name}/{part}")

    def _choose_trained(self, network: nn.Module, head: nn.Module | None, blind: bool) -> None:
        """Freeze what the spec does not train or has no influence, then insert adapters if the spec asks for them."""
        parts = self.find_parts(network)
        if self.config.train_expert_only:
            parts.vlm.requires_grad_(False)
        elif parts.language is not None and (not isinstance(head, PrefixValueHead) or head.detach):
            freeze_unused(parts.language)
        if blind and parts.state is not None:
            parts.state.requires_grad_(False)
        if self.config.lora is not None:
            insert_adapters(network, self.config.lora, self._derive_seed("lora"))

    def _make_heads(self, checkpoint: FlowCheckpoint) -> Heads:
        """Return the critic and Flow-Noise network that algorithm and spec need, as the checkpoint has them or new."""
        config, context, options = self.config, self.context, self.config.value_head
        expert_width, prefix_width = self.head_widths(checkpoint.sizes)
        value_head: HorizonValueHead | PrefixValueHead | None = None
        noise_head = None
        if context.values != "none":
            per_action = context.chunk if context.values == "action" else None
            arguments = options.hidden, per_action, options.detach, self._derive_seed("value_head")
            if options.reads == "prefix":
                value_head = PrefixValueHead(prefix_width, *arguments)
            else:
                value_head = HorizonValueHead(expert_width, *arguments)
                value_head.passes = config.denoise_steps if options.reads == "denoising" else 1
        if isinstance(config.noise, FlowNoise):
            width, seed = checkpoint.shape.action_dim, self._derive_seed("noise_head")
            noise_head = NoiseHead(expert_width, width, config.noise.std_range, seed)
        load_head(value_head, checkpoint.folder, VALUE_HEAD)
        load_head(noise_head, checkpoint.folder, NOISE_HEAD)
        return value_head, noise_head

    def _make_steering_head(self, checkpoint: FlowCheckpoint) -> SteeringHead | None:
        """Return the head that was saved with the checkpoint, or a new one that the spec asks for, else None. Raises
        CheckpointError for a damaged file, MismatchError where the spec asks for another head than saved."""
        path = None if checkpoint.folder is None else checkpoint.folder / STEERING_HEAD
        saved = None if path is None or not path.is_file() else read_file(path, load_file)
        settings, shape = self.config.steering, checkpoint.shape
        if saved is not None:
            try:
                recorded = saved_settings(saved, shape.action_dim)
            except (KeyError, ValueError) as exc:
                raise CheckpointError(f"{path} is not a steering head ({exc}); remove it to go without") from exc
            if settings is not None and settings != recorded:
                raise MismatchError(
                    f"{path} has {asdict(recorded)}, and model.steering asks for {asdict(settings)}; leave "
                    f"model.steering out, or take the folder of the policy that is not steered yet"
                )
            settings = recorded
        if settings is None:
            return None
        inputs = self.head_widths(checkpoint.sizes)[0] + shape.state_dim
        head = SteeringHead(inputs, (shape.horizon, shape.action_dim), settings, self._derive_seed("steering"))
        if saved is not None:
            assert path is not None
            load_weights(head, saved, path)
        return head


P = TypeVar("P", bound=FlowPolicy)


def choose_class(policy: type[P], config: FlowConfig, module: FlowModule) -> type[P]:
    """Return the class of a policy with these settings and this network."""
    adapted = () if config.lora is None else (AdaptedPolicy,)
    steered = () if module.steering is None else (SteeredFlow,)
    return combine_classes(policy, *adapted, *steered)


class SteeredFlow(FlowPolicy, Steerable):
    """A frozen policy, denoised by the ODE from noise that a trained head chooses (DSRL), whose score it has."""

    extra_names = (STEERING,)

    def __init__(self, parts: FlowParts) -> None:
        super().__init__(parts)
        self.steering_shape = self._head.shape

    @property
    def _head(self) -> SteeringHead:
        assert self.module.steering is not None
        return self.module.steering

    def _draw_noise(self, rows: int, noise: Noise, greedy: bool) -> dict[str, Tensor]:
        return {} if greedy else {"normals": as_tensor(noise.normals(*self.steering_shape), self._device)}

    def decide(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Denoise chunks. Without "normals" among the inputs the head takes its mode."""
        state = inputs["state"]
        prefix = self.module.build_prefix(self._encode_inputs(inputs), state)
        distribution = self._head(self._compute_features(prefix, state), self._spread)
        unsquashed = distribution.sample(inputs.get("normals"))
        x = self._head.initial_noise(unsquashed)
        step, log_probs = self._begin_denoising(x, None)
        for i in range(self._schedule.steps):
            x, _ = self._denoise_step(prefix, state, x, self._schedule.indices[i].expand(len(x)), step, None, log_probs)
        decided = {
            "actions": self._restore_actions(x, inputs.get("offset")),
            "log_probs": self._by_action(distribution.log_prob(unsquashed)),
            STEERING: unsquashed,
        }
        values = self.module.estimate_values(prefix, state)
        return decided if values is None else {**decided, "values": values}

    def chunk_log_probs(self, obs: Observation, chunk: Chunk) -> Scores:
        prefix, state = self._encode_observation(obs)
        distribution = self._head(self._compute_features(prefix, state), self._spread)
        unsquashed = as_tensor(chunk.extras[STEERING], self._device)
        return Scores(
            log_probs=self._by_action(distribution.log_prob(unsquashed)),
            entropy=self._by_action(distribution.entropy()),
            values=self.module.estimate_values(prefix, state),
        )

    def steering_noise(self, features: Tensor, normals: Tensor) -> tuple[Tensor, Tensor]:
        distribution = self._head(features, self._spread)
        unsquashed = distribution.sample(normals)
        return torch.tanh(unsquashed), distribution.log_prob(unsquashed)

    def imitation_loss(self, obs: Observation, actions: ArrayOrTensor) -> Tensor:
        """Raise UserError, since the policy is frozen."""
        raise UserError(
            f"this {self.name} is steered, and its weights are frozen: it cannot clone; clone first, and set "
            f"model.steering for the run with trainer 'dsrl'"
        )

    def _unscored_start(self, prefix: Any, state: Tensor, noise: Noise, greedy: bool) -> Tensor:
        normals = self._draw_noise(len(state), noise, greedy).get("normals")
        return self._head.initial_noise(self._head(self._compute_features(prefix, state), self._spread).sample(normals))

    def _compute_features(self, prefix: Any, state: Tensor) -> Tensor:
        with torch.no_grad():
            return super()._compute_features(prefix, state)

    def _by_action(self, elements: Tensor) -> Tensor:
        """Return the sum of numbers of the noise [B, R, W] in equal parts for each action, [B, C, 1]."""
        parts = elements.sum((1, 2)) / self._chunk
        return parts[:, None, None].expand(-1, self._chunk, 1)
