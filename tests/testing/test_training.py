"""`train_on` is what a run does: the learner's numbers, and learning."""

from __future__ import annotations

import attrs
import pytest
import torch

from updates import policy_gradient, update_of
from vla_rl.core.contexts import AlgorithmContext
from vla_rl.core.randomness import Noise
from vla_rl.core.spec.sections import TrainSpec
from vla_rl.core.trainers import ModelInputs
from vla_rl.plugins.algorithms import gipo, grpo, ppo
from vla_rl.plugins.algorithms.gipo.config import GIPOConfig
from vla_rl.plugins.algorithms.grpo.config import GRPOConfig
from vla_rl.plugins.algorithms.ppo.config import PPOConfig
from vla_rl.runtime.workers.learner.learner import Learner
from vla_rl.testing import LinearModel, synthetic, train_on

INFO = synthetic.env_info()
LR = 1e-2
ALGORITHMS = {
    "grpo": grpo.plugin.build(GRPOConfig(entropy_coef=0.01), AlgorithmContext()),
    "ppo": ppo.plugin.build(PPOConfig(advantage="action"), AlgorithmContext()),
    "gipo": gipo.plugin.build(GIPOConfig(), AlgorithmContext()),
}


class Remembers(LinearModel):
    """What it was trained on."""

    def chunk_log_probs(self, obs, chunk):
        self.seen = obs, chunk
        return super().chunk_log_probs(obs, chunk)


def model_for(algorithm):
    values = algorithm.value_granularity if algorithm.needs.values else "none"
    model = Remembers(INFO, 3, values=values)
    return model, synthetic.rollout(values=values, chunk=3, tokens=INFO.action_dim)


def optimizer_of(model):
    return torch.optim.AdamW(model.module.parameters(), lr=LR, weight_decay=0.0)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_it_does_what_a_learner_does(name):
    algorithm = ALGORITHMS[name]
    model, rollout = model_for(algorithm)
    metrics = train_on(rollout, algorithm=algorithm, model=model, info=INFO, optimizer=optimizer_of(model))
    obs, chunk = model.seen
    other, _ = model_for(algorithm)
    start, shape = acted(other, rollout), rollout.samples.shape
    values = None if start.values is None else start.values.unflatten(0, shape)
    played = rollout.evolve(log_probs=start.log_probs.unflatten(0, shape), values=values)
    update = update_of(algorithm, played, INFO, micro_batch=1000)
    update = attrs.evolve(update, heavy=ModelInputs(obs=obs, actions=chunk.actions, extras=chunk.extras))
    learner = Learner(
        other,
        policy_gradient(algorithm),
        TrainSpec(steps=1, lr=LR, micro_batch=1000, max_grad_norm=None),
        name="linear",
        device="cpu",
        world=1,
        info=INFO,
        acting=True,
        heartbeat=lambda: None,
    )
    result = update.train(learner)
    assert metrics["loss/total"] == pytest.approx(result.sums["loss/total"], abs=1e-6)
    assert metrics["policy/grad_norm"] == pytest.approx(result.maxima["policy/grad_norm"], rel=1e-5)
    for (name, mine), (_, theirs) in zip(model.weights(), other.weights(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5, msg=name)


def acted(model, rollout):
    """What `train_on` lets a model choose."""
    count = rollout.samples.numel()
    obs = synthetic.observation(INFO, count)
    return model.sample_chunk(obs, Noise(0, "train_on", range(count), [0] * count, [0] * count), False)


def test_the_critic_learns_the_returns():
    algorithm = ALGORITHMS["gipo"]
    model, rollout = model_for(algorithm)
    optimizer = optimizer_of(model)
    losses = [
        train_on(rollout, algorithm=algorithm, model=model, info=INFO, optimizer=optimizer)["loss/value"]
        for _ in range(30)
    ]
    assert losses[-1] < 0.8 * losses[0]


def test_nothing_is_learned_where_nothing_is_kept():
    model, _ = model_for(ALGORITHMS["grpo"])
    before = [(name, tensor.clone()) for name, tensor in model.weights()]
    rollout = synthetic.rollout(chunk=3, tokens=INFO.action_dim, successes=False)
    keys = {"algorithm": ALGORITHMS["grpo"], "model": model, "info": INFO, "optimizer": optimizer_of(model)}
    assert train_on(rollout, **keys) == {}
    assert all(torch.equal(old, new) for (_, old), (_, new) in zip(before, model.weights(), strict=True))
