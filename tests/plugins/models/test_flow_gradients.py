"""Log-probabilities, values and gradients of pi0.5 and SmolVLA against the float64 network of `plain_flow`, which
itself meets the originals' numbers. Their own reference files hold neither log-probabilities nor values nor
gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_cases import noise
from pi0_cases import CHUNK, ENV, observation
from plain_flow import PlainPi05, PlainSmolVLA, density, transition, value
from rounding import assert_same_up_to
from safetensors.torch import load_file
from torch import Tensor

from reference_files import reference
from vla_rl.core.contexts import ModelContext
from vla_rl.plugins.models import pi0, smolvla
from vla_rl.plugins.models.pi0.config import Pi05Config
from vla_rl.plugins.models.pi0.statistics import public_name
from vla_rl.plugins.models.smolvla.config import SmolVLAConfig
from vla_rl.toolkit.models.flow.config import FlowCPS, FlowNoise, FlowSDE

STEPS, LEVEL = 4, 0.7
PLAIN: dict[str, Any] = {"pi05": PlainPi05, "smolvla": PlainSmolVLA}
BUILT: dict[str, Any] = {
    "pi05": (pi0.pi05, Pi05Config),
    "smolvla": (smolvla.plugin, SmolVLAConfig),
}


@torch.no_grad()
@pytest.mark.parametrize("name", PLAIN)
def test_the_plain_network_is_the_original(name: str) -> None:
    data = {
        n: t.double() if t.is_floating_point() else t for n, t in load_file(reference(name, "io.safetensors")).items()
    }
    weights = load_file(reference(name, "model.safetensors"))
    weights = {n.removeprefix("model."): t.double() for n, t in weights.items()}
    count = sum(n.startswith("image_mask_") for n in data)
    pixels, shown = (torch.stack([data[f"{kind}_{i}"] for i in range(count)], 1) for kind in ("image", "image_mask"))
    net = PLAIN[name](weights, pixels, shown, data["tokens"], data["token_mask"], data["state"])
    said, hidden, velocity = net.run(data["x_t"], data["time"])
    valid = data["prefix_pad"]
    for found, wanted in (
        (net.prefix, data["prefix_embs"]),
        (said[valid], data["prefix_out"][valid]),
        (hidden, data["suffix_out"]),
        (velocity, data["velocity"]),
    ):
        assert_same_up_to(32, found, wanted)


def scrambled(name: str, method: str, steps: str | None) -> Any:
    """A small policy whose every weight counts, all of them trained: a new one has norms that ignore the time."""
    plugin, config = BUILT[name]
    drawn = {"flow_sde": FlowSDE, "flow_cps": FlowCPS}
    kind = FlowNoise() if method == "flow_noise" else drawn[method](steps=steps or "one", level=LEVEL)
    given = config(preset="tiny", denoise_steps=STEPS, noise=kind, train_expert_only=False)
    model = plugin.build(given, ModelContext(env=ENV, chunk=CHUNK, values="chunk"))
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.module.parameters():
            p.add_(0.1 * p.std(correction=0).clamp(min=0.3) * torch.randn(p.shape, generator=rng))
    return model


def public_parameters(model: Any) -> dict[str, Tensor]:
    """By the checkpoint's names; heads by ours."""
    renamed = public_name if model.name == "pi05" else str
    heads = {n: p for n, p in model.module.named_parameters() if n.startswith(("value_head.", "noise_head."))}
    return {renamed(n): p for n, p in model.module.network.named_parameters()} | heads


def plain_inputs(model: Any, obs: Any) -> tuple[Tensor, ...]:
    """What the policy hands to its network: pixels, which are shown, ids, mask, state."""
    seen: list[Tensor] = []
    place = "run_backbone"
    entry = getattr(model.module, place)
    setattr(model.module, place, lambda *args: seen.extend(args[:3]) or entry(*args))
    with torch.no_grad():
        state = model._encode_observation(obs)[1]
    setattr(model.module, place, entry)
    pixels, ids, mask = seen
    return pixels.double(), mask.new_ones(pixels.shape[:2]), ids, mask, state.double()


def plain_scores(
    model: Any, obs: Any, chunk: Any, method: str, every: bool
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """The plain network's weights, and what it says of the chunk: log-probs [B, C] and values [B]."""
    weights = {name: p.detach().double().requires_grad_() for name, p in public_parameters(model).items()}
    net = PLAIN[model.name](weights, *plain_inputs(model, obs))
    chain = chunk.extras["chain"].double()
    each = []
    for i in range(STEPS):
        said, hidden, velocity = net.run(chain[:, i], torch.full((len(obs),), 1 - i / STEPS))
        mean, std = transition(weights, method, LEVEL, STEPS, i, chain[:, i], hidden, velocity)
        each.append(density(chain[:, i + 1], mean, std)[:, :CHUNK, : ENV.action_dim].sum(-1))
    steps = torch.stack(each, 1)
    log_probs = steps.sum(1) if every else steps[torch.arange(len(obs)), chunk.extras["step"]]
    return weights, log_probs, value(weights, net, said)


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize(("method", "steps"), [("flow_sde", "one"), ("flow_noise", None), ("flow_cps", "all")])
def test_scores_and_gradients(name: str, method: str, steps: str | None) -> None:
    """The project's bars: log-probs 2e-4, values 1e-5, gradients 1e-4 of a tensor's size."""
    model, obs = scrambled(name, method, steps), observation(3)
    chunk = model.sample_chunk(obs, noise(3), False)
    weights, log_probs, values = plain_scores(model, obs, chunk, method, steps != "one")
    scores = model.chunk_log_probs(obs, chunk)
    torch.testing.assert_close(scores.log_probs[..., 0].double(), log_probs, rtol=0, atol=2e-4)
    torch.testing.assert_close(scores.values.double(), values, rtol=0, atol=1e-5)
    assert chunk.log_probs.abs().max() > 1
    gains = torch.linspace(-1, 1, log_probs.numel()).reshape(log_probs.shape)
    ((scores.log_probs[..., 0] * gains).sum() + scores.values.sum()).backward()
    ((log_probs * gains).sum() + values.sum()).backward()
    own = public_parameters(model)
    largest = max(float(w.grad.norm()) for w in weights.values() if w.grad is not None)
    compared = 0
    for key, weight in weights.items():
        wanted, found = weight.grad, own[key].grad
        if wanted is None or float(wanted.norm()) < 1e-12 * largest:  # the unused head, the last keys' bias
            assert found is None or float(found.norm()) < 1e-6 * largest, key
            continue
        assert found is not None, key
        assert float((found - wanted).norm()) < 1e-4 * float(wanted.norm()) + 1e-9 * largest, key
        compared += 1
    assert compared > 0.9 * len(weights) - 2
