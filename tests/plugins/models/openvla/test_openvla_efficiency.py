"""What saves time and memory, and what it may not change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from model_cases import noise, reloading
from openvla_cases import CHUNK, ENV, expert, observation, policy
from rounding import assert_same_up_to
from safetensors.torch import load_file
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from activation_memory import saved_bytes
from vla_rl.core.capabilities import HasReference
from vla_rl.core.contexts import ModelContext
from vla_rl.core.errors import CheckpointError
from vla_rl.core.types import to_numpy
from vla_rl.plugins.models.openvla import openvla, openvla_oft
from vla_rl.plugins.models.openvla.architecture import preset_config
from vla_rl.plugins.models.openvla.config import AttentionHeadConfig, OpenVLAARConfig, OpenVLAOFTConfig
from vla_rl.plugins.models.openvla.heads import AttentionValueHead
from vla_rl.plugins.models.openvla.lora import add_adapters
from vla_rl.plugins.models.openvla.modeling import OpenVLAForActionPrediction, hollow_model, initialise_weights
from vla_rl.testing import check_model
from vla_rl.toolkit.models.adapters import LoRAConfig
from vla_rl.toolkit.models.networks import allocate_network
from vla_rl.toolkit.models.recompute import RECOMPUTE, checkpoint_keys

BOTH = pytest.mark.parametrize(("plugin", "config"), [(openvla, OpenVLAARConfig), (openvla_oft, OpenVLAOFTConfig)])


def build(plugin: Any, config: Any, context: dict[str, Any] | None = None, **keys: Any) -> Any:
    given = {"env": ENV, "chunk": 2, **(context or {})}
    return plugin.build(config(**{"preset": "fast", **keys}), ModelContext(**given))


def calls(module: torch.nn.Module) -> list[Any]:
    """Input shapes of every call to come."""
    seen: list[Any] = []
    module.register_forward_pre_hook(lambda _, args: seen.append(tuple(args[0].shape)))
    return seen


@BOTH
def test_contract_with_everything_on(plugin: Any, config: Any) -> None:
    given = config(
        preset="fast",
        freeze_vision=True,
        reuse_vision_features=True,
        lora=LoRAConfig(rank=4),
        value_head=AttentionHeadConfig(hidden=(16,)),
    )

    check_model(plugin, given, env=ENV, values="action", temperature=1.6, atol=2e-5, reload=reloading(given))


# ------------------------------------------------------------------------------------------------- vision features


@BOTH
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_features_of_acting_serve_training(plugin: Any, config: Any, dtype: str) -> None:
    """Training computes no vision transformer, and the scores are the same to the bit, also after a way through NumPy."""
    keys = {"freeze_vision": True, "dtype": dtype}
    model, plain = (build(plugin, config, reuse_vision_features=reuse, **keys) for reuse in (True, False))
    obs = observation(3)
    chunk = model.sample_chunk(obs, noise(3), False)
    seen = calls(model.module.vla.vision_backbone)
    wanted = plain.chunk_log_probs(obs, plain.sample_chunk(obs, noise(3), False))
    travelled = attrs.evolve(chunk, extras={name: to_numpy(t).copy() for name, t in chunk.extras.items()})
    got = model.chunk_log_probs(obs, travelled)
    assert not seen
    assert torch.equal(got.log_probs, wanted.log_probs)
    got.log_probs.sum().backward()
    plain_loss = wanted.log_probs.sum()
    plain_loss.backward()
    grads = [m.module.vla.projector.fc1.weight.grad for m in (model, plain)]
    assert torch.equal(*grads)
    model.imitation_loss(obs, chunk.actions)
    assert seen


def test_features_of_a_trained_part_are_not_kept() -> None:
    with pytest.raises(ValueError, match="reuse_vision_features needs freeze_vision"):
        OpenVLAOFTConfig(preset="fast", reuse_vision_features=True)
    assert set(policy(freeze_vision=True).sample_chunk(observation(1), noise(1), False).extras) == {"tokens"}


# ---------------------------------------------------------------------------------------------------------- the head


@BOTH
def test_head_is_computed_at_action_positions_and_for_action_tokens_only(
    plugin: Any, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vla_rl.plugins.models.openvla.modeling import OpenVLAForActionPrediction

    model, obs, shapes = build(plugin, config), observation(3), []
    original = OpenVLAForActionPrediction.action_logits

    def record(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        logits = original(self, hidden)
        shapes.append((tuple(hidden.shape), tuple(logits.shape)))
        return logits

    monkeypatch.setattr(OpenVLAForActionPrediction, "action_logits", record)
    chunk = model.sample_chunk(obs, noise(3), False)
    shapes.clear()
    model.chunk_log_probs(obs, chunk)
    assert shapes == [((3, 6, 64), (3, 6, 256))]


def whole_and_slim() -> tuple[Any, Any]:
    """The same network, its head left as it is and slimmed."""
    whole, slim = (hollow_model(preset_config("fast")) for _ in range(2))
    for network in (whole, slim):
        allocate_network(network, torch.device("cpu"), torch.float32, "test")
        initialise_weights(network, 3)
    slim.slim_head()
    return whole, slim


def test_a_slim_head_is_exact() -> None:
    whole, slim = whole_and_slim()
    rows = slim.language_model.lm_head.weight
    assert rows.shape == (256, 64)
    hidden = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0))
    logits = [
        whole.language_model.lm_head(hidden)[..., 512:768],
        whole.action_logits(hidden),
        slim.action_logits(hidden),
    ]
    assert_same_up_to(8, logits[2], logits[0])  # products of another shape, so perhaps of another kernel
    assert torch.equal(logits[1], logits[2])
    for network in (whole, slim):
        network.action_logits(hidden).square().sum().backward()
    grad = whole.language_model.lm_head.weight.grad
    assert torch.equal(grad[512:768], rows.grad)
    assert not grad[:512].any() and not grad[768:].any()
    assert torch.equal(slim.whole_head(), whole.language_model.lm_head.weight)


def test_training_and_saving_leave_the_rows_of_text_alone(tmp_path: Path) -> None:
    model, obs = policy(), observation(2)
    network, before = model.module.vla, model.module.vla.whole_head()
    assert dict(model.weights())["vla.language_model.lm_head.weight"].shape == (256, 64)
    optimiser = torch.optim.AdamW(model.module.parameters(), 1e-2, weight_decay=0.1)
    model.imitation_loss(obs, expert(2)).backward()
    optimiser.step()
    model.save(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")["language_model.lm_head.weight"]
    text = torch.ones(832, dtype=torch.bool)
    text[512:768] = False
    assert torch.equal(saved[text], before[text])
    assert torch.equal(saved[~text], network.language_model.lm_head.weight)
    assert (saved[~text] - before[~text]).abs().min(1).values.max() > 1e-3
    again = policy(checkpoint=str(tmp_path))
    reads = CHUNK * model.tokens_per_action
    assert torch.equal(again._run_network(obs, reads)[0], model._run_network(obs, reads)[0])


def test_a_head_that_scores_text_is_whole() -> None:
    model = build(openvla, OpenVLAARConfig, log_prob_over="full_vocabulary")
    assert model.module.vla.language_model.lm_head.weight.shape == (832, 64)


@BOTH
def test_one_pass_of_the_llama_serves_policy_and_critic(plugin: Any, config: Any) -> None:
    model, obs = build(plugin, config, {"values": "chunk"}), observation(3)
    chunk = model.sample_chunk(obs, noise(3), False)
    passes: list[Any] = []
    model.module.vla.language_model.model.norm.register_forward_pre_hook(lambda _, args: passes.append(args[0].shape))
    model.chunk_log_probs(obs, chunk)
    assert len(passes) == 1


@BOTH
def test_attention_is_fused_and_unused_vision_layers_are_not_computed(
    plugin: Any, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, obs = build(plugin, config, preset="tiny"), observation(2)
    chunk = model.sample_chunk(obs, noise(2), False)
    network, fused, computed = model.module.vla, [], []
    attention = torch.nn.functional.scaled_dot_product_attention

    def record(*args: Any, **keys: Any) -> torch.Tensor:
        fused.append(args[0].shape)
        return attention(*args, **keys)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", record)
    for vit in (network.vision_backbone.featurizer, network.vision_backbone.fused_featurizer):
        for part in [*vit.blocks, *vit.unused()]:
            part.register_forward_hook(lambda part, *_: computed.append(part))
    model.chunk_log_probs(obs, chunk)
    assert len(fused) == 2 * (3 - 1) + 3
    assert len(computed) == 2 * (3 - 1)
    assert not set(computed) & {*network.vision_backbone.featurizer.unused()}


@BOTH
@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize(("frozen", "again"), [(False, 4), (True, 2)])
def test_recomputation_covers_llama_and_trained_vision(
    plugin: Any, config: Any, recompute: str, frozen: bool, again: int
) -> None:
    """`fast` has two Llama layers, and one computed block in each vision transformer."""
    model = build(plugin, config, recompute=recompute, freeze_vision=frozen)
    network, seen = model.module.vla, []
    vits = (network.vision_backbone.featurizer, network.vision_backbone.fused_featurizer)
    for layer in [*network.language_model.model.layers, *(vit.blocks[0] for vit in vits)]:
        layer.mlp.register_forward_pre_hook(lambda *_: seen.append(1))
    loss = model.imitation_loss(observation(2), np.zeros((2, 2, 3), np.float32))
    assert len(seen) == 4
    loss.backward()
    assert len(seen) == 4 + again


class ProductCounter(TorchDispatchMode):
    """Mode that counts products of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        return func(*args, **(kwargs or {}))


def test_selective_recomputation_runs_no_product_of_the_llama_again() -> None:
    counts = {}
    for mode in RECOMPUTE:
        model = build(openvla_oft, OpenVLAOFTConfig, recompute=mode, freeze_vision=True)
        loss = model.imitation_loss(observation(2), np.zeros((2, 2, 3), np.float32))
        with ProductCounter() as products:
            loss.backward()
        counts[mode] = products.count
    layers = 2
    assert counts["selective"] == counts["off"]
    assert counts["full"] == counts["off"] + layers * 6  # the last of seven products is not needed


@pytest.mark.parametrize(("recompute", "part"), [("selective", 0.45), ("full", 0.15)])
def test_recomputation_saves_activations_at_full_width(recompute: str, part: float) -> None:
    """The public widths with LoRA in bfloat16, four layers in each tower; fake tensors take no memory."""
    sizes = {mode: _saved_bytes(mode) for mode in ("off", recompute)}
    assert sizes[recompute] <= part * sizes["off"]


def _saved_bytes(recompute: str) -> float:
    """Return the bytes of activations of one sample."""
    config = preset_config("full")
    config.text_config.num_hidden_layers = 4
    config.vision_specs = [attrs.asdict(attrs.evolve(spec, depth=5)) for spec in config.find_backbones()]
    with torch.device("meta"):
        torch.set_default_dtype(torch.bfloat16)
        network = OpenVLAForActionPrediction(config)
        torch.set_default_dtype(torch.float32)
        adapted = add_adapters(network, LoRAConfig(rank=32), autocast=True, seed=0)
    if recompute != "off":
        network.activation_checkpointing_enable(checkpoint_keys(recompute, config.text_config.hidden_size))
    with FakeTensorMode():
        for part in adapted.modules():
            for name, p in list(part.named_parameters(recurse=False)):
                setattr(part, name, torch.nn.Parameter(torch.empty(p.shape, dtype=p.dtype), p.requires_grad))
        network.language_model.model.rotary_emb = LlamaRotaryEmbedding(config=config.text_config)

        def forward(samples: int) -> Any:
            pixels = torch.zeros(samples, 6, 224, 224, dtype=torch.bfloat16)
            with torch.autocast("cpu", torch.bfloat16):
                return adapted(pixels, torch.zeros(samples, 79, dtype=torch.long)).sum()

        return saved_bytes(lambda: forward(2)) - saved_bytes(lambda: forward(1))


# --------------------------------------------------------------------------------------------------- mixed precision


@BOTH
def test_autocast_computes_in_bfloat16_and_keeps_float32_weights(plugin: Any, config: Any) -> None:
    context = {"values": "chunk"}
    wide, mixed = (build(plugin, config, context, autocast=on, lora=LoRAConfig(rank=2)) for on in (False, True))
    obs = observation(4)
    dtypes: list[torch.dtype] = []
    layer = mixed.module.vla.get_base_model().language_model.model.layers[0].mlp.down_proj
    layer.register_forward_hook(lambda _m, _a, out: dtypes.append(out.dtype))
    chunk = mixed.sample_chunk(obs, noise(4), False)
    scores = mixed.chunk_log_probs(obs, chunk)
    assert set(dtypes) == {torch.bfloat16}
    assert {p.dtype for p in mixed.module.parameters()} == {torch.float32}
    assert {t.dtype for t in (chunk.log_probs, chunk.values, scores.log_probs, scores.entropy, scores.values)} == {
        torch.float32
    }
    drift = (wide.chunk_log_probs(obs, chunk).log_probs - scores.log_probs).abs()
    assert 0 < drift.mean() < 0.05
    (scores.log_probs.sum() + mixed.imitation_loss(obs, chunk.actions)).backward()
    assert all(p.grad is None or p.grad.dtype == torch.float32 for p in mixed.module.parameters())


def test_autocast_computes_float32_adapters_of_bfloat16_weights_in_bfloat16() -> None:
    """Without it they would be multiplied in float32, which matrix units do far more slowly."""
    obs = observation(2)
    for autocast, wanted in ((False, torch.float32), (True, torch.bfloat16)):
        model = policy(dtype="bfloat16", autocast=autocast, lora=LoRAConfig(rank=2))
        trained = {name: p.dtype for name, p in model.weights() if "lora_" in name}
        assert trained and set(trained.values()) == {torch.float32}
        inputs: list[torch.dtype] = []
        outputs: list[torch.dtype] = []

        def record(_: Any, args: Any, out: torch.Tensor, inputs: Any = inputs, outputs: Any = outputs) -> None:
            inputs.append(args[0].dtype)
            outputs.append(out.dtype)

        for name, part in model.module.vla.named_modules():
            if "layers." in name and name.endswith("lora_A.default"):
                part.register_forward_hook(record)
        chunk = model.sample_chunk(obs, noise(2), False)
        assert torch.equal(model.chunk_log_probs(obs, chunk).log_probs, chunk.log_probs)
        assert set(inputs) == set(outputs) == {wanted}


def test_autocast_needs_float32_weights() -> None:
    with pytest.raises(ValueError, match="autocast narrows float32 weights, and with dtype: bfloat16 there are none"):
        OpenVLAOFTConfig(preset="fast", autocast=True, dtype="bfloat16")


# --------------------------------------------------------------------------------------------------- attention critic


@BOTH
def test_attention_critic_sees_image_and_prompt_and_no_actions(plugin: Any, config: Any) -> None:
    model = build(plugin, config, {"values": "chunk"}, value_head=AttentionHeadConfig())
    obs = observation(4)
    head = model.module.value_head
    assert isinstance(head, AttentionValueHead)
    seen: dict[str, Any] = {}
    hook = head.register_forward_hook(lambda _m, args, out: seen.update(hidden=args[0], at=args[1], mask=args[2]))
    chunk = model.sample_chunk(obs, noise(4), False)
    values = model.chunk_log_probs(obs, chunk).values
    hook.remove()
    torch.testing.assert_close(values, chunk.values, rtol=0, atol=1e-5)
    hidden, at, mask = seen["hidden"].detach(), seen["at"], seen["mask"]
    columns = torch.arange(hidden.shape[1])
    hide = columns > at[:, None] if mask is None else (columns > at[:, None]) | ~mask
    assert hide.any()
    assert torch.equal(head(torch.where(hide[..., None], 7.0, hidden), at, mask), values)
    past = (columns < at[:, None]) & ~hide
    assert (head(torch.where(past[..., None], -hidden, hidden), at, mask) - values).abs().min() > 1e-5


def test_kinds_of_critic_are_not_mixed_up(tmp_path: Path) -> None:
    policy(context={"values": "chunk"}).save(tmp_path)
    with pytest.raises(CheckpointError, match=r"(?s)value_head.safetensors does not fit.*remove.*key.weight"):
        policy(checkpoint=str(tmp_path), context={"values": "chunk"}, value_head=AttentionHeadConfig())


# ---------------------------------------------------------------------------------------------------------- reference


@BOTH
def test_reference_is_the_policy_before_training(plugin: Any, config: Any) -> None:
    obs = observation(3)
    model = build(plugin, config, {"temperature": 1.3}, lora=LoRAConfig(rank=4))
    start = model.sample_chunk(obs, noise(3), False)
    optimiser = torch.optim.Adam([p for p in model.module.parameters() if p.requires_grad], 3e-3)
    for _ in range(3):
        optimiser.zero_grad()
        model.chunk_log_probs(obs, start).log_probs.sum().backward()
        optimiser.step()
    now = model.chunk_log_probs(obs, start)
    assert (now.log_probs - start.log_probs).abs().max() > 0.01
    reference = model.reference_log_probs(obs, start)
    torch.testing.assert_close(reference, start.log_probs, rtol=0, atol=1e-5)
    assert not reference.requires_grad
    again = model.chunk_log_probs(obs, start)
    assert torch.equal(again.log_probs, now.log_probs)
    assert again.log_probs.requires_grad
    trained = {name for name, p in model.module.named_parameters() if p.requires_grad}
    assert any("lora_" in name for name in trained)


def test_reference_needs_adapters() -> None:
    assert isinstance(policy(lora=LoRAConfig(rank=4)), HasReference) and not isinstance(policy(), HasReference)
