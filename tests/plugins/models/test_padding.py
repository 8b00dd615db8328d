"""Padding changes nothing of what a row gets, and the fused attention kernels give eager attention's gradients, whoever
sees nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from model_cases import noise
from pi0_cases import CHUNK, ENV, expert, observation
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from vla_rl.core.contexts import ModelContext
from vla_rl.core.spec.structure import Structurer
from vla_rl.core.types import Observation
from vla_rl.plugins.models import gr00t, openvla, pi0, smolvla
from vla_rl.toolkit.models.attention import attend_evenly

LONG = "put the yellow cup on the plate in front of the drawer and push the blue ball to the left of the red block"
PLUGINS: dict[str, tuple[Any, dict[str, Any]]] = {
    "pi0": (pi0.plugin, {"train_expert_only": False}),
    "pi05, state": (pi0.pi05, {"train_expert_only": False}),
    "pi05, none": (pi0.pi05, {"train_expert_only": False, "state_in_prompt": "none"}),
    "smolvla": (smolvla.plugin, {"train_expert_only": False}),
    "gr00t": (gr00t.plugin, {"train_expert_only": False}),
    "gr00t n1.7": (gr00t.plugin, {"train_expert_only": False, "preset": "tiny_n1_7"}),
    "openvla": (openvla.openvla, {}),
    "openvla_oft": (openvla.openvla_oft, {"value_head": {"type": "attention"}}),
}
PADS = {"train_expert_only": False, "value_head": {"reads": "prefix", "pads": True}}
"""Keys of RLinf's critic of pi0.5."""


def built(plugin: Any, keys: dict[str, Any], chunk: int = CHUNK) -> Any:
    """A model whose every weight counts, of a spec's keys."""
    config = Structurer().read_value({"preset": "tiny", **keys}, plugin.config)
    model = plugin.build(config, ModelContext(env=ENV, chunk=chunk, values="chunk"))
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.module.parameters():
            p.add_(0.1 * p.std(correction=0).clamp(min=0.3) * torch.randn(p.shape, generator=rng))
    return model


def gradients(module: nn.Module, loss: Callable[[], Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    module.zero_grad()
    total = loss()
    total.backward()
    return total.detach(), {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}


def assert_same_gradients(found: tuple[Tensor, dict[str, Tensor]], wanted: tuple[Tensor, dict[str, Tensor]]) -> None:
    """Within 1e-5 of each tensor's size; tensors of which only rounding is left are compared with the largest one."""
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-5, atol=1e-5)
    assert found[1].keys() == wanted[1].keys()
    largest = max(float(grad.norm()) for grad in wanted[1].values())
    for name, grad in wanted[1].items():
        apart = float((found[1][name] - grad).norm())
        assert apart <= 1e-5 * float(grad.norm()) + 1e-7 * largest, (name, apart, float(grad.norm()))


@pytest.mark.parametrize("name", PLUGINS)
def test_padding_and_the_fused_kernel_change_nothing(name: str) -> None:
    plugin, keys = PLUGINS[name]
    chunk = 1 if name == "openvla" else CHUNK
    model, obs = built(plugin, keys, chunk), observation(3)
    played = model.sample_chunk(obs, noise(3), False)
    demonstrated = expert(3, chunk=chunk)

    def loss() -> Tensor:
        scores = model.chunk_log_probs(obs, played)
        return scores.log_probs.mean() + scores.values.sum() + model.imitation_loss(obs, demonstrated)

    wanted = gradients(model.module, loss)
    with sdpa_kernel(SDPBackend.MATH):
        assert_same_gradients(gradients(model.module, loss), wanted)
    lay_out = model.prompts.take_prompts if name.startswith("openvla") else model.prompts.token_rows
    lay_out([LONG])  # all rows are laid out again
    if name == "pi05, state":
        model.prompts._full_width = True
    assert_same_gradients(gradients(model.module, loss), wanted)


@pytest.mark.parametrize("kind", ["exact", "none"])
def test_a_critic_that_counts_padding_has_eager_attentions_gradient(kind: str) -> None:
    """Tokens of padding see nothing, and attend to all alike. openpi and RLinf have eager attention."""
    model, obs = built(pi0.pi05, {**PADS, "state_in_prompt": kind}), observation(3)

    def loss() -> Tensor:
        values: Tensor = model.module.estimate_values(*model._encode_observation(obs))
        return values.sum()

    if kind == "none":  # its prompts are kept; those with a state are laid out at every step
        assert model.prompts.token_rows(obs.instructions)[0].shape == (3, 200)
    found = gradients(model.module, loss)
    with torch.no_grad():
        torch.testing.assert_close(loss(), found[0])
    with torch.autocast("cpu", torch.bfloat16):
        narrow = gradients(model.module, loss)
    assert all(grad.isfinite().all() for grad in narrow[1].values())
    model.module.pi0.model.vlm.language_model.config._attn_implementation = "eager"
    assert_same_gradients(found, gradients(model.module, loss))


def test_attending_evenly_is_a_softmax_at_equal_scores() -> None:
    rng = torch.Generator().manual_seed(0)
    parts = [torch.randn(shape, generator=rng).requires_grad_() for shape in ((2, 4, 3, 8), (2, 2, 5, 8), (2, 2, 5, 6))]
    query, key, value = parts
    gains = torch.randn(2, 4, 3, 6, generator=rng)
    wide_key, wide_value = (part.repeat_interleave(2, 1) for part in (key, value))
    scores = 0.3 * query @ wide_key.transpose(2, 3) + torch.finfo(torch.float32).min
    wanted = scores.softmax(-1) @ wide_value
    out = attend_evenly(query, key, value, 0.3)
    torch.testing.assert_close(out, wanted)
    for own, other in zip(*(torch.autograd.grad((o * gains).sum(), parts) for o in (out, wanted)), strict=True):
        assert own.abs().max() > 1e-2
        torch.testing.assert_close(own, other)


@torch.no_grad()
@pytest.mark.parametrize("name", [*PLUGINS, "pi05, pads", "pi05, none, pads"])
def test_what_a_row_gets_does_not_depend_on_its_neighbours(name: str) -> None:
    plugin, keys = PLUGINS.get(name, (pi0.pi05, PADS))
    if name == "pi05, none, pads":
        keys = {**keys, "state_in_prompt": "none"}
    chunk = 1 if name == "openvla" else CHUNK
    model, alone = built(plugin, keys, chunk), observation(1)
    actions = model.sample_chunk(alone, noise(1), True).actions
    played = model.sample_chunk(alone, noise(1), False)
    one = model.chunk_log_probs(alone, played)  # before the model knows the other instructions
    batch = _with_first(observation(3), alone)
    batch = attrs.evolve(batch, instructions=(batch.instructions[0], LONG, "push"))
    replay = {key: torch.cat([torch.as_tensor(part)] * 3) for key, part in played.extras.items()}
    three = model.chunk_log_probs(batch, attrs.evolve(played, extras=replay))
    for found, wanted in (
        (three.log_probs, one.log_probs),
        (three.entropy, one.entropy),
        (three.values, one.values),
        (model.values(batch), one.values),
        (model.sample_chunk(batch, noise(3), True).actions, actions),
    ):
        torch.testing.assert_close(torch.as_tensor(found)[:1], torch.as_tensor(wanted), rtol=1e-4, atol=2e-5)


def _with_first(obs: Observation, row: Observation) -> Observation:
    """Return these observations with another first one."""
    images = {name: image.copy() for name, image in obs.images.items()}
    state = obs.state.copy()
    for name, image in row.images.items():
        images[name][0] = image[0]
    state[0] = row.state[0]
    return attrs.evolve(obs, images=images, state=state)
