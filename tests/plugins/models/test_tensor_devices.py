"""No model assumes where tensors are: it is given a device, and inputs come from elsewhere.

Without a GPU the default device of a tensor is the meta device, which holds no numbers and does not mix with others: a
tensor that is made without the policy's device shows. With one, weights are there and inputs in the host's memory.
"""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from model_cases import NAMES, noise, read_only_and_tensors, smallest

from vla_rl.core.catalogue import load
from vla_rl.core.types import Observation
from vla_rl.testing import synthetic

ENV, CHUNK, ROWS = synthetic.env_info(), 2, 3
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none")
COMMON: tuple[dict[str, Any], ...] = ({}, {"lora": {"rank": 4}})
OWN: dict[str, tuple[dict[str, Any], ...]] = {
    "openvla_oft": ({"head": "l1", "deviation": {}}, {"value_head": {"type": "action_attention"}}),
    "openvla": ({"value_head": {"type": "attention"}},),
}
FLOW: tuple[dict[str, Any], ...] = (
    {"noise": {"type": "flow_noise"}, "value_head": {"reads": "denoising"}, "train_expert_only": False},
    {"noise": {"type": "flow_cps", "steps": "all"}},
)
"""What else makes its own tensors: of each plugin, and of those that denoise."""


def settings() -> list[Any]:
    """Each plugin with each set of keys that it has."""
    found = []
    for name in NAMES:
        keys = attrs.fields_dict(load("model", name).config)
        sets = COMMON + OWN.get(name, ()) + FLOW * ("denoise_steps" in keys)
        found += [(name, given) for given in sets if set(given) <= set(keys)]
    return [pytest.param(name, given, id="-".join([name, *given])) for name, given in found]


def build(name: str, given: dict[str, Any], device: str = "cpu") -> Any:
    return smallest(name, ENV, CHUNK, device, **given)


def play(policy: Any, obs: Observation) -> list[torch.Tensor]:
    """Act, score, clone, take a step of the optimiser. -> what came out."""
    chunk = policy.sample_chunk(obs, noise(ROWS), False)
    greedy = policy.sample_chunk(obs, noise(ROWS), True)
    carried = attrs.evolve(chunk, extras={name: t.cpu().numpy() for name, t in chunk.extras.items()})
    scores, values = policy.chunk_log_probs(obs, carried), policy.values(obs)
    demonstrated = greedy.actions.cpu().numpy()
    loss = scores.log_probs.mean() + scores.entropy.mean() + (scores.values**2).mean()
    loss = loss + policy.imitation_loss(obs, demonstrated)
    trained = [p for p in policy.module.parameters() if p.requires_grad]
    optimiser = torch.optim.SGD(trained, 1e-4, momentum=0.9)  # on meta tensors, torch 2.9 has no Adam
    loss.backward()
    optimiser.step()
    after = policy.chunk_log_probs(obs, carried)
    return [chunk.actions, chunk.log_probs, greedy.actions, scores.log_probs, values, loss, after.log_probs]


@pytest.mark.parametrize(("name", "given"), settings())
def test_tensors_are_where_the_policy_is(name: str, given: dict[str, Any]) -> None:
    made = synthetic.observation(ENV, ROWS)
    wanted = play(build(name, given), made)
    for obs in read_only_and_tensors(made):
        policy = build(name, given)
        with torch.device("meta"):  # the device of a tensor that names none
            found = play(policy, obs)
        assert {(t.device.type, t.dtype) for t in found} == {("cpu", torch.float32)}
        for one, other in zip(found, wanted, strict=True):
            assert torch.equal(one, other)


@CUDA
@pytest.mark.gpu
@pytest.mark.parametrize(("name", "given"), settings())
def test_weights_on_a_gpu(name: str, given: dict[str, Any]) -> None:
    obs = synthetic.observation(ENV, ROWS)
    found, wanted = play(build(name, given, "cuda"), obs), play(build(name, given), obs)
    assert {t.device.type for t in found} == {"cuda"}
    torch.testing.assert_close(found[2].cpu(), wanted[2], rtol=0, atol=1e-2)
    torch.testing.assert_close(found[4].cpu(), wanted[4], rtol=0, atol=1e-2)
