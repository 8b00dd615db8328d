"""Builds the policy from a spec's config and a worker's context, and tests it. A wrong attention mask, active dropout
or overflowing weights do not stop a run; it merely never learns. Each test takes a few tokens and one layer, so that
they are cheap at full size too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from vla_rl.core.contexts import ModelContext
from vla_rl.core.errors import UserError
from vla_rl.core.randomness import derived_seed
from vla_rl.plugins.models.openvla.autoregressive import ARModule, ARPolicy
from vla_rl.plugins.models.openvla.base import FamilyPolicy, OpenVLAImageProcessor, Parts
from vla_rl.plugins.models.openvla.checkpoint import DEVIATION, read_part
from vla_rl.plugins.models.openvla.checks import find_decoding, uses_l1_head
from vla_rl.plugins.models.openvla.codec import EPSILON, ActionCodec, ActionScaler
from vla_rl.plugins.models.openvla.config import (
    ActionAttentionHeadConfig,
    AttentionHeadConfig,
    FamilyConfig,
    OpenVLAARConfig,
    OpenVLAOFTConfig,
)
from vla_rl.plugins.models.openvla.fit import OpenVLAIOAdapter, find_fit, over_full_vocabulary
from vla_rl.plugins.models.openvla.heads import (
    ActionValueHead,
    AttentionValueHead,
    Deviation,
    L1Head,
    OFTModule,
    OpenVLAValueHead,
    PolicyModule,
    ProprioProjector,
    public_network,
)
from vla_rl.plugins.models.openvla.lora import Adapter, add_adapters, compute_fingerprint
from vla_rl.plugins.models.openvla.modeling import OpenVLAForActionPrediction, hollow_model, initialise_weights
from vla_rl.plugins.models.openvla.policy import L1Policy, OFTPolicy, SampledL1Policy
from vla_rl.plugins.models.openvla.prompts import CausalPrompts, DecodingPrompts
from vla_rl.toolkit.models.adapter_files import store_network
from vla_rl.toolkit.models.blocks import find_blocks
from vla_rl.toolkit.models.combined_classes import AdaptedPolicy, combine_classes
from vla_rl.toolkit.models.frozen_weights import find_storable, round_weight
from vla_rl.toolkit.models.heads import VALUE_HEAD, load_head
from vla_rl.toolkit.models.networks import allocate_network, construct_module, fill_network, keep_tensor, load_weights
from vla_rl.toolkit.models.recompute import checkpoint_keys

M = TypeVar("M", bound=PolicyModule)


def build_policy(config: OpenVLAOFTConfig, context: ModelContext) -> OFTPolicy | L1Policy:
    """Build the OFT policy. Raise CheckpointError or MismatchError when checkpoint, spec and simulator do not fit."""
    parts = _build_parts(config, context, OFTModule)
    if uses_l1_head(config) and config.deviation is None:
        return L1Policy(parts)  # it scores nothing, also not under a reference
    kind: type[OFTPolicy | SampledL1Policy] = SampledL1Policy if uses_l1_head(config) else OFTPolicy
    return combine_classes(kind, *_list_capabilities(config))(parts)


def build_autoregressive(config: OpenVLAARConfig, context: ModelContext) -> ARPolicy:
    """Build the plain OpenVLA policy. Raise errors as `build_policy`."""
    kind = combine_classes(ARPolicy, *_list_capabilities(config))
    return kind(_build_parts(config, context, ARModule), over_full_vocabulary(config))


def _list_capabilities(config: FamilyConfig) -> tuple[type, ...]:
    """Return the classes of what the settings let the policy do in addition."""
    return () if config.lora is None else (AdaptedPolicy,)


def _build_parts(config: FamilyConfig, context: ModelContext, kind: type[M]) -> Parts:
    fit = find_fit(config, context)
    device, dtype = torch.device(context.device), getattr(torch, config.dtype)
    module = construct_module(lambda: _build_module(config, context, fit, kind, device, dtype), device)
    autoregressive = kind is ARModule
    fit.config.policy_setup = {
        "decoding": find_decoding(config),
        "cameras": list(fit.cameras),
        "chunk": fit.chunk,
        "state_dim": 0 if fit.state is None else len(fit.state.q01),
        "append_stop_token": fit.stop,
        "statistics_range": fit.statistics_range,
    }
    codec = ActionCodec(
        fit.action,
        fit.config.action_vocab_end,
        fit.config.n_action_bins,
        device,
        epsilon=0.0 if autoregressive else EPSILON,
        gripper=config.gripper,
    )
    return Parts(
        module=module,
        config=fit.config,
        codec=codec,
        prompts=_build_prompts(fit, autoregressive, device, [task.instruction for task in context.env.tasks]),
        images=OpenVLAImageProcessor(fit.config, device, dtype, config.center_crop),
        state_scaler=None if fit.state is None else ActionScaler(fit.state, device),
        cameras=fit.cameras,
        chunk=fit.chunk,
        bounds=(context.env.action_low, context.env.action_high),
        temperature=context.temperature,
        autocast=config.autocast,
        reuse=config.reuse_vision_features,
        base=fit.checkpoint.adapter_base(config) if fit.checkpoint and config.save_lora == "adapter" else None,
        statistics_name=config.unnorm_key,
        device=device,
        dtype=dtype,
    )


def _build_prompts(
    fit: OpenVLAIOAdapter, autoregressive: bool, device: torch.device, instructions: list[str]
) -> DecodingPrompts:
    common: dict[str, Any] = {"pad_id": fit.config.pad_token_id, "device": device, "instructions": instructions}
    if autoregressive:
        return CausalPrompts(fit.tokenizer, **common)
    return DecodingPrompts(fit.tokenizer, placeholders=fit.token_count, append_stop_token=fit.stop, **common)


def _build_module(
    config: FamilyConfig,
    context: ModelContext,
    fit: OpenVLAIOAdapter,
    kind: type[M],
    device: torch.device,
    dtype: torch.dtype,
) -> M:
    """Return the network with weights from the folder, or random ones of the seed. The critic stays in float32."""
    checkpoint = fit.checkpoint
    vla = _build_network(config, context, fit, device, dtype)
    check_network(vla, find_decoding(config) == "autoregressive", config.checkpoint or f"preset {config.preset}")
    width = fit.config.text_config.hidden_size
    projector = None if fit.state is None else ProprioProjector(len(fit.state.q01), width)
    if projector is not None:
        initialise_weights(projector, derived_seed(context.seed, "openvla/proprio"))
    head = L1Head(width, len(fit.action.q01)) if uses_l1_head(config) else None
    if head is not None:
        initialise_weights(head, derived_seed(context.seed, "openvla/action_head"))
        vla.get_output_embeddings().requires_grad_(False)
    if checkpoint is not None:
        for part, file in ((projector, checkpoint.proprio_file), (head, checkpoint.action_head_file)):
            if part is not None and file is not None:
                load_weights(part, read_part(file), file)
    for part in (projector, head):
        if part is not None:
            part.to(dtype)
    if config.freeze_vision:
        vla.vision_backbone.requires_grad_(False)
    if not over_full_vocabulary(config):
        vla.slim_head()
    value_head, deviation = _value_head(config, context, width, fit), _build_deviation(config, context, fit)
    module = kind(vla, projector, value_head, head, deviation)
    if config.lora is not None:
        seed = derived_seed(context.seed, "openvla/lora")
        module.vla = add_adapters(vla, config.lora, autocast=config.autocast, seed=seed)
        if checkpoint is not None and checkpoint.adapter is not None:
            checkpoint.adapter.copy_into(module.vla, config.lora)
    folder = None if checkpoint is None else checkpoint.folder
    store_network(module, public_network(module.vla), FamilyPolicy.blocks, config, folder)
    if config.recompute != "off":
        vla.activation_checkpointing_enable(checkpoint_keys(config.recompute, width))
    return module


def _build_network(
    config: FamilyConfig, context: ModelContext, fit: OpenVLAIOAdapter, device: torch.device, dtype: torch.dtype
) -> OpenVLAForActionPrediction:
    vla = hollow_model(fit.config)
    if fit.checkpoint is None:
        allocate_network(vla, device, dtype, f"preset {config.preset}")
        initialise_weights(vla, derived_seed(context.seed, "openvla/network"))
        return vla
    weights, adapter = fit.checkpoint.weights, fit.checkpoint.adapter
    if adapter is None:
        fill_network(vla, weights, device, dtype)
    else:
        adapter.check_base(compute_fingerprint(weights))
        adapter.check_merges(weights.shapes)
        fill_network(vla, weights, device, dtype, change=_change_base(config, vla, adapter, dtype))
    return vla


def _change_base(
    config: FamilyConfig, vla: OpenVLAForActionPrediction, adapter: Adapter, dtype: torch.dtype
) -> Callable[[str, Tensor], Tensor]:
    """Return what is done to tensors of an adapter's base: those that were stored in fewer bits while it was trained
    are rounded as they were then, and the adapter is merged where the spec trains none."""
    adapter.check_storage(config.frozen_weights)
    merge = adapter.merge_tensor if config.lora is None else keep_tensor
    kind = adapter.frozen_weights
    if kind in ("bf16", config.frozen_weights):
        return merge
    names = {layer: name for name, layer in vla.named_modules()}
    blocks = find_blocks(vla, FamilyPolicy.blocks)
    rounded = {f"{names[layer]}.weight" for _, _, layer in find_storable(blocks, kind)}
    return lambda name, tensor: merge(name, round_weight(tensor.to(dtype), kind) if name in rounded else tensor)


def _build_deviation(config: FamilyConfig, context: ModelContext, fit: OpenVLAIOAdapter) -> Deviation | None:
    options = config.deviation if isinstance(config, OpenVLAOFTConfig) else None
    if options is None:
        return None
    part = Deviation(fit.chunk, len(fit.action.q01), options.kind, options.start, context.temperature)
    load_head(part, None if fit.checkpoint is None else fit.checkpoint.folder, DEVIATION)
    return part


def _value_head(
    config: FamilyConfig, context: ModelContext, width: int, fit: OpenVLAIOAdapter
) -> OpenVLAValueHead | None:
    if context.values == "none":
        return None
    outputs = context.chunk if context.values == "action" else None
    options, seed = config.value_head, derived_seed(context.seed, "openvla/value_head")
    if isinstance(options, ActionAttentionHeadConfig):
        head: OpenVLAValueHead = ActionValueHead(
            width, options.hidden, outputs, options.detach, seed, fit.token_count, options.steps
        )
    else:
        kind = AttentionValueHead if isinstance(options, AttentionHeadConfig) else OpenVLAValueHead
        head = kind(width, options.hidden, outputs, options.detach, seed)
    load_head(head, None if fit.checkpoint is None else fit.checkpoint.folder, VALUE_HEAD)
    return head


LENGTH = 8
"""Number of text tokens of a test."""


class GuardError(UserError):
    """Raised when the network does not compute what its weights were trained for."""


@contextmanager
def reduce_network(network: OpenVLAForActionPrediction) -> Iterator[None]:
    """Reduce the network, inside the context, to one Llama layer and one computed block in each vision transformer."""
    llama = network.language_model.model
    vits = (network.vision_backbone.featurizer, network.vision_backbone.fused_featurizer)
    layers, blocks = llama.layers, [vit.blocks for vit in vits]
    llama.layers = layers[:1]
    for vit in vits:
        vit.blocks = nn.ModuleList([vit.blocks[0], vit.blocks[-1]])
    try:
        yield
    finally:
        llama.layers = layers
        for vit, all_blocks in zip(vits, blocks, strict=True):
            vit.blocks = all_blocks


@torch.no_grad()
def check_network(network: OpenVLAForActionPrediction, causal: bool, source: str) -> None:
    """Run the self-tests. Raise GuardError, which says what is wrong and what to do. Weights on the meta device have no
    values to test."""
    if cast("Tensor", network.get_input_embeddings().weight).is_meta:
        return
    with reduce_network(network):
        _check_repetition(network, causal, source)
        _check_attention(network, causal, source)


def _check_attention(network: OpenVLAForActionPrediction, causal: bool, source: str) -> None:
    """Check that earlier positions see the last token if and only if attention is bidirectional, and never padding."""
    weight = cast("Tensor", network.get_input_embeddings().weight)
    ids = torch.arange(LENGTH, device=weight.device)[None]
    other = ids.clone()
    other[0, -1] = LENGTH
    features = weight.new_zeros(1, 2, network.vision_backbone.embed_dim)

    def earlier_states(tokens: Tensor, mask: Tensor | None) -> Tensor:
        result: Tensor = network(None, tokens, attention_mask=mask, causal=causal, features=features)[:, :-1].float()
        return result

    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[0, -1] = False
    moved = float((earlier_states(ids, None) - earlier_states(other, None)).abs().max())
    leaked = float((earlier_states(ids, mask) - earlier_states(other, mask)).abs().max())
    which = network.config.text_config._attn_implementation
    remedy = f"attention implementation {which!r}; use 'sdpa', and the transformers version that the extra asks for"
    if causal and moved > 1e-3:
        raise GuardError(f"{source}: OpenVLA needs causal attention, and tokens see those behind them ({remedy})")
    if not causal and moved == 0:
        raise GuardError(
            f"{source}: OpenVLA-OFT attends in both directions, and tokens do not see those behind them ({remedy})"
        )
    if leaked > 1e-3:
        raise GuardError(f"{source}: padding is seen by other tokens ({remedy})")


def _check_repetition(network: OpenVLAForActionPrediction, causal: bool, source: str) -> None:
    """Check that an input gives the same, finite logits twice: greedy actions are a function of the observation."""
    weight = cast("Tensor", network.get_input_embeddings().weight)
    size = network.config.image_sizes[0]
    pixels = torch.linspace(-1, 1, 6 * size * size, device=weight.device).to(weight.dtype).view(1, 6, size, size)
    ids = torch.arange(LENGTH, device=weight.device)[None]
    first, second = (network.action_logits(network(pixels, ids, causal=causal)[:, -1]).float() for _ in range(2))
    if not bool(torch.isfinite(first).all()):
        raise GuardError(
            f"{source}: the first layers already give NaN or inf in {str(weight.dtype).removeprefix('torch.')}; "
            "the weights are broken, or too large for this precision (try model.dtype: float32)"
        )
    if not torch.equal(first, second):
        raise GuardError(
            f"{source}: the same input gives other logits the second time (by {(first - second).abs().max():.1e}), "
            "so greedy actions are not reproducible; look for dropout in config.json's text_config, and for kernels "
            "that are not deterministic"
        )
