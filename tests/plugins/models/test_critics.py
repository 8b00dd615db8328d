"""Critics of the papers against ours: pi_RL's mean over denoising steps, AcceRL's attention over action tokens."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import pytest
import torch
from model_cases import noise, reloading
from openvla_cases import CHUNK, ENV, observation
from openvla_cases import policy as oft

from vla_rl.core.contexts import ModelContext
from vla_rl.core.spec.structure import Problems, Structurer
from vla_rl.core.types import Observation
from vla_rl.plugins.models import openvla, pi0, smolvla
from vla_rl.plugins.models.openvla.config import (
    ActionAttentionHeadConfig,
    OpenVLAARConfig,
    OpenVLAOFTConfig,
)
from vla_rl.plugins.models.openvla.heads import ActionValueHead
from vla_rl.plugins.models.pi0.config import Pi0Config, Pi05Config, Pi05HeadConfig
from vla_rl.plugins.models.smolvla.config import SmolVLAConfig
from vla_rl.testing import check_model
from vla_rl.toolkit.models.flow.config import PrefixHeadConfig, ValueHeadConfig

POOLED = ActionAttentionHeadConfig(hidden=(16,))
FLOW: dict[str, Any] = {
    "pi0": (pi0.plugin, Pi0Config, ValueHeadConfig),
    "pi05": (pi0.pi05, Pi05Config, Pi05HeadConfig),
    "smolvla": (smolvla.plugin, SmolVLAConfig, PrefixHeadConfig),
}


@pytest.mark.parametrize("name", FLOW)
def test_the_mean_over_denoising_steps(name: str) -> None:
    """At each step of the ODE from the mean noise, at its time: what `sample_chunk` goes through when it is greedy."""
    plugin, config, head = FLOW[name]
    given = config(preset="tiny", denoise_steps=3, value_head=head(reads="denoising"))
    model, obs = plugin.build(given, ModelContext(env=ENV, chunk=CHUNK, values="chunk")), observation(3)
    chain = model.sample_chunk(obs, noise(3), True).extras["chain"]
    with torch.no_grad():
        prefix, state = model._encode_observation(obs)
        each = [
            model.critic(model.module.run_expert(prefix, state, chain[:, i], torch.full((3,), 1 - i / 3)))
            for i in range(3)
        ]
    assert (each[0] - each[2]).abs().max() > 1e-6
    found = model.sample_chunk(obs, noise(3), False).values
    torch.testing.assert_close(found, torch.stack(each).mean(0), rtol=0, atol=1e-6)
    assert torch.equal(model.values(obs), found)


@pytest.mark.parametrize(("name", "values"), [("pi0", "chunk"), ("smolvla", "action")])
def test_contract_with_it(name: str, values: Any) -> None:
    plugin, config, head = FLOW[name]
    given = config(preset="tiny", denoise_steps=3, value_head=head(reads="denoising", hidden=(16,)))

    check_model(plugin, given, env=ENV, chunk=CHUNK, values=values, atol=2e-5, reload=reloading(given))


def test_it_can_be_kept_from_the_expert() -> None:
    for detach in (False, True):
        head = ValueHeadConfig(reads="denoising", detach=detach)
        model = pi0.plugin.build(
            Pi0Config(preset="tiny", value_head=head), ModelContext(env=ENV, chunk=CHUNK, values="chunk")
        )
        chunk = model.sample_chunk(observation(2), noise(2), False)
        model.chunk_log_probs(observation(2), chunk).values.sum().backward()
        reached = {n for n, p in model.module.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
        assert all(n.startswith("value_head.") for n in reached) == detach


@pytest.mark.parametrize(("values", "outputs"), [("chunk", ()), ("action", (CHUNK,))])
def test_attention_over_action_tokens(values: Any, outputs: tuple[int, ...]) -> None:
    """AcceRL's equations 14 to 16 on the hidden states at the action tokens, and on nothing else."""
    model, obs = oft(context={"values": values}, value_head=POOLED), observation(3)
    head = model.critic
    assert isinstance(head, ActionValueHead)
    seen: list[Any] = []
    head.register_forward_pre_hook(lambda _, args: seen.append(args))
    found = model.values(obs)
    assert found.shape == (3, *outputs)
    hidden, at, *_ = seen[0]
    wanted = []
    for row in range(3):
        tokens = hidden[row, at[row] : at[row] + CHUNK * ENV.action_dim]
        score = torch.stack([token @ head.score.weight[0] for token in tokens]).exp()
        x = (tokens * (score / score.sum())[:, None]).sum(0)
        x = head.layers[1](torch.nn.functional.gelu(head.layers[0](x)))
        wanted.append(x if outputs else x[0])
    torch.testing.assert_close(found, torch.stack(wanted).detach(), rtol=0, atol=1e-6)
    for shift in (-1, CHUNK * ENV.action_dim):  # next to the first and the last of them
        other = hidden.clone()
        other[torch.arange(3), at + shift] += 1
        assert torch.equal(head(other, at, None), head(hidden, at, None))


def test_the_step_of_the_episode_is_embedded() -> None:
    """AcceRL's equation 16: added to what was weighted. Rows that do not say theirs are at their beginning."""
    model = oft(context={"values": "chunk"}, value_head=attrs.evolve(POOLED, steps=4))
    head, obs = model.critic, observation(3)
    told = attrs.evolve(obs, steps=np.array([0, 2, 9]))
    assert torch.equal(model.values(told), model.values(obs)), "it starts at 0"
    torch.nn.init.normal_(head.clock.weight, generator=torch.Generator().manual_seed(0))
    pooled: list[Any] = []
    head.layers[0].register_forward_pre_hook(lambda _, args: pooled.append(args[0]))
    began = model.values(obs)
    found = model.values(told)
    added = pooled[1] - pooled[0] + head.clock.weight[0]
    torch.testing.assert_close(added, head.clock.weight[[0, 2, 3]], rtol=0, atol=1e-5)
    assert found[0] == began[0] and (found[1:] - began[1:]).abs().min() > 1e-6
    chunk = model.sample_chunk(told, noise(3), False)
    scores = model.chunk_log_probs(told, chunk)
    assert torch.equal(chunk.values, found) and torch.equal(scores.values, found)
    scores.values.sum().backward()
    assert (head.clock.weight.grad.abs().amax(1) > 0).tolist() == [True, False, True, True]
    rows = attrs.evolve(told, state=None, images={}).take(np.array([2, 1])).numpy()
    assert Observation.concat([rows, rows]).steps.tolist() == [9, 2, 9, 2]
    with pytest.raises(Problems, match="value_head.steps: unknown key"):
        Structurer().read_class({"preset": "fast", "value_head": {"type": "mlp", "steps": 4}}, OpenVLAOFTConfig)


@pytest.mark.parametrize("steps", [None, 8])
def test_attention_over_action_tokens_as_a_plugin(steps: int | None) -> None:
    given = OpenVLAOFTConfig(preset="fast", value_head=attrs.evolve(POOLED, steps=steps))

    check_model(openvla.openvla_oft, given, env=ENV, chunk=CHUNK, values="chunk", atol=2e-5, reload=reloading(given))


@pytest.mark.parametrize(("detach", "shared"), [({}, False), ({"detach": False}, True)])
def test_attention_over_action_tokens_is_kept_from_the_trunk(detach: dict[str, bool], shared: bool) -> None:
    head = ActionAttentionHeadConfig(**detach)
    model = oft(context={"values": "chunk"}, value_head=head)
    chunk = model.sample_chunk(observation(2), noise(2), False)
    model.chunk_log_probs(observation(2), chunk).values.sum().backward()
    gradient = model.module.vla.projector.fc1.weight.grad
    assert (gradient is not None) == shared
    assert model.critic.score.weight.grad.abs().max() > 0


def test_tokens_that_are_not_yet_said_are_refused() -> None:
    with pytest.raises(
        Problems, match="value_head.type: expected one of 'mlp', 'attention', got str 'action_attention'"
    ):
        Structurer().read_class({"preset": "fast", "value_head": {"type": "action_attention"}}, OpenVLAARConfig)
