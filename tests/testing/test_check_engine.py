"""`check_engine` finds what an engine does wrong."""

from __future__ import annotations

import copy

import attrs
import pytest
import torch

from vla_rl.core.capabilities import ContinuesChunks
from vla_rl.core.declarations import EnginePlugin
from vla_rl.core.hookspecs import PolicyEngine
from vla_rl.core.types import Chunk
from vla_rl.plugins.engines.torch import plugin
from vla_rl.plugins.engines.torch.engine import TorchEngine
from vla_rl.testing import CheckFailed, LinearModel, check_engine
from vla_rl.testing.synthetic import env_info

INFO = env_info()


class Still(PolicyEngine):
    """Acts by the state alone; `noise` is ignored."""

    def __init__(self, info, chunk):
        self.low, self.high = (torch.tensor(bound) for bound in (info.action_low, info.action_high))
        self.length = chunk

    def actions(self, obs):
        share = torch.sigmoid(torch.as_tensor(obs.state).sum(-1))[:, None, None]
        return (self.low + share * (self.high - self.low)).repeat(1, self.length, 1)

    def act(self, obs, noise, greedy):
        return Chunk(actions=self.actions(obs))


@attrs.frozen(kw_only=True)
class StillConfig:
    pass


def build_still(config, context):
    return Still(context.env, context.chunk)


def findings(engine) -> str:
    with pytest.raises(CheckFailed) as failed:
        check_engine(engine, env=INFO)
    return str(failed.value)


def test_an_engine_with_its_own_policy_passes() -> None:
    check_engine(Still(INFO, 2), env=INFO)
    check_engine(EnginePlugin(config=StillConfig, build=build_still, summary="still", own_policy=True), env=INFO)


def test_the_torch_engine_passes() -> None:
    check_engine(plugin, model=LinearModel(INFO, 2), env=INFO)
    check_engine(plugin, model=LinearModel(INFO, 2, values="chunk"), env=INFO)


@pytest.mark.parametrize(("own_policy", "model"), [(True, LinearModel(INFO, 2)), (False, None)])
def test_a_model_is_given_to_engines_that_act_for_it(own_policy, model) -> None:
    declared = EnginePlugin(config=StillConfig, build=build_still, summary="still", own_policy=own_policy)
    with pytest.raises(CheckFailed, match=f"own_policy is {own_policy}; give"):
        check_engine(declared, model=model, env=INFO)


class Practises(Still):
    def warm_up(self, batch_sizes):
        self.low = self.low + 0.01


def test_an_engine_that_trains_its_own_policy_in_warm_up_is_found() -> None:
    assert "warm_up: expected the same chunk after a further call" in findings(Practises(INFO, 2))


class Deaf(TorchEngine):
    """Loads nothing, and has its own weights."""

    def __init__(self, model):
        super().__init__(copy.deepcopy(model))

    def load(self, pairs):
        pass


class Blurred(TorchEngine):
    def act(self, obs, noise, greedy):
        chunk = super().act(obs, noise, greedy)
        return attrs.evolve(chunk, log_probs=chunk.log_probs * 1.01)


class Silent(TorchEngine):
    def act(self, obs, noise, greedy):
        return attrs.evolve(super().act(obs, noise, greedy), log_probs=None)


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (Deaf, "load: expected other log_probs with other weights, got the same"),
        (Blurred, "act: expected log_probs equal to those of the model's chunk_log_probs"),
        (Silent, "act: expected log_probs, got None"),
    ],
)
def test_an_engine_acts_with_the_models_weights(engine, message) -> None:
    model = LinearModel(INFO, 2)
    with pytest.raises(CheckFailed) as failed:
        check_engine(engine(model), model=model, env=INFO)
    assert message in str(failed.value)
    check_engine(TorchEngine(model), model=model, env=INFO)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"act": lambda self, obs, noise, greedy: Chunk(actions=self.actions(obs)[:, :1])}, "[4, 2, 3]"),
        ({"act": lambda self, obs, noise, greedy: Chunk(actions=self.actions(obs) + 9)}, "the range outside"),
        (
            {"act": lambda self, obs, noise, greedy: Chunk(actions=self.actions(obs) * torch.rand(1))},
            "a change of torch's",
        ),
        (
            {"act": lambda self, obs, noise, greedy: Chunk(actions=self.actions(obs)[:1].repeat(4, 1, 1))},
            "wherever it stands in the batch",
        ),
    ],
)
def test_an_engine_that_acts_wrongly_is_found(change, message) -> None:
    assert message in findings(type("Wrong", (Still,), change)(INFO, 2))


@pytest.mark.parametrize(
    ("continued", "message"),
    [
        (lambda self, obs, previous: self.actions(obs)[:, :1], "continue_chunk: expected float32 [4, 2, 3]"),
        (lambda self, obs, previous: self.actions(obs) + 9, "continue_chunk: actions: expected within"),
        (lambda self, obs, previous: self.actions(obs).requires_grad_(), "expected no gradient"),
        (lambda self, obs, previous: self.actions(obs) * torch.rand(1), "the same actions from the same noise"),
        (
            lambda self, obs, previous: self.actions(obs) * 0 + torch.as_tensor(previous[0].actions[0]),
            "a row's actions wherever",
        ),
        (lambda self, obs, previous: self.actions(obs), None),
    ],
)
def test_how_chunks_are_continued_is_checked(continued, message) -> None:
    def continue_chunk(self, obs, noise, greedy, previous):
        return continued(self, obs, previous)

    engine = type("Continuing", (Still, ContinuesChunks), {"continue_chunk": continue_chunk})(INFO, 2)
    if message is None:
        check_engine(engine, env=INFO)
    else:
        assert message in findings(engine)
