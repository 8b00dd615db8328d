"""Loss, gradient and every metric are the same however a batch is split over micro-batches and ranks: the learner's own
code on a model with real gradients, ragged episodes and filtered groups."""

from __future__ import annotations

import pytest
import torch

from updates import policy_gradient, update_of
from vla_rl.core.spec.sections import TrainSpec
from vla_rl.plugins.algorithms.gipo.config import GIPOConfig
from vla_rl.plugins.algorithms.gipo.impl import GIPO
from vla_rl.plugins.algorithms.grpo.config import GRPOConfig
from vla_rl.plugins.algorithms.grpo.impl import GRPO
from vla_rl.plugins.algorithms.ppo.config import PPOConfig
from vla_rl.plugins.algorithms.ppo.impl import PPO
from vla_rl.runtime.workers.learner.learner import Learner
from vla_rl.testing import synthetic
from vla_rl.testing.linear import LinearModel
from vla_rl.toolkit.algorithms.policy_gradient import Decoupled, SuccessFilter, Truncated, VTrace
from vla_rl.toolkit.algorithms.statistics import read_all

INFO = synthetic.env_info()
CHUNK = 3
BONUS = {"entropy_coef": 0.01}
ALGORITHMS = {
    "ppo-action-token": PPO(PPOConfig(advantage="action", dual_clip=2.0, **BONUS)),
    "ppo-chunk-chunk": PPO(PPOConfig(log_prob="chunk", aggregation="trajectory-mean", **BONUS)),
    "ppo-token-rlinf": PPO(PPOConfig(advantage="action", aggregation="rlinf")),
    "ppo-decoupled": PPO(PPOConfig(correction=Decoupled(threshold=1.05), **BONUS)),
    "ppo-interpolated": PPO(PPOConfig(log_prob="action", correction=Decoupled(proximal="interpolate"))),
    "ppo-v-trace": PPO(PPOConfig(advantage="action", correction=VTrace())),
    "grpo-truncated": GRPO(GRPOConfig(log_prob="chunk", correction=Truncated(threshold=1.05))),
    "grpo-token": GRPO(GRPOConfig(filter=SuccessFilter(lower=0.2, upper=0.8))),
    "grpo-action-rlinf": GRPO(GRPOConfig(log_prob="action", aggregation="rlinf", baseline="leave-one-out")),
    "grpo-chunk": GRPO(GRPOConfig(log_prob="chunk", aggregation="step-mean", **BONUS)),
    "gipo": GIPO(GIPOConfig(behaviour_kl_coef=0.1, **BONUS)),
}


def without_steps(learner):
    """-> a list to which every optimiser step adds its gradient, instead of taking it."""
    gradients = []

    def keep(optimizer, *_):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients.append(torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters]))
        optimizer.zero_grad()

    learner.trained.optimizer.register_step_pre_hook(keep)
    return gradients


def learn(algorithm, micro_batches, ranks, global_batch=None):
    """-> (gradient of each optimiser step, metrics), summed over ranks."""
    values = "none" if algorithm.needs.groups else algorithm.value_granularity
    rolled = synthetic.rollout(
        values=values, groups=4, chunk=CHUNK, tokens=INFO.action_dim, chunk_steps=5, proximal=True
    )
    rolled = rolled.evolve(  # near the model's: 8 bins about equally likely
        log_probs=0.1 * rolled.log_probs - 2.0,
        proximal_log_probs=0.1 * rolled.proximal_log_probs - 2.0,
    )
    keep = algorithm.select(rolled)
    assert not algorithm.needs.groups or 0 < int(keep.sum()) < 16  # something is filtered, something is left
    size = -(-int(rolled.samples[:, keep].sum()) // ranks // micro_batches) + 1
    update = update_of(algorithm, rolled, INFO, world=ranks, micro_batch=size, global_batch=global_batch)
    train = TrainSpec(steps=1, lr=0.1, micro_batch=size, max_grad_norm=None)
    gradients, results = [], []
    for rank in range(ranks):
        model = LinearModel(INFO, CHUNK, values=values)
        learner = Learner(
            model,
            policy_gradient(algorithm),
            train,
            name="linear",
            device="cpu",
            world=1,
            info=INFO,
            acting=True,
            heartbeat=lambda: None,
        )
        kept = without_steps(learner)
        results.append(update.train(learner, rank, step=4))
        gradients.append(torch.stack(kept))
    metrics = read_all([result.statistics for result in results])
    for name in results[0].sums:
        metrics[name] = sum(result.sums[name] for result in results)
    for name in set(results[0].maxima) - {"policy/grad_norm"}:  # of a rank's own part
        metrics[name] = max(result.maxima[name] for result in results)
    return sum(gradients), metrics


@pytest.mark.parametrize("name", ALGORITHMS)
def test_no_split_changes_gradient_or_metrics(name):
    gradient, metrics = learn(ALGORITHMS[name], 1, 1)
    assert float(gradient.abs().max()) > 1e-3
    for micro_batches in (1, 2, 4):
        for ranks in (1, 2, 3):
            again, found = learn(ALGORITHMS[name], micro_batches, ranks)
            torch.testing.assert_close(again, gradient, rtol=0, atol=1e-6)
            assert found == pytest.approx(metrics, rel=1e-5, abs=1e-6)


def test_no_split_changes_the_parts_of_several_optimiser_steps():
    gradient, metrics = learn(ALGORITHMS["ppo-action-token"], 1, 1, global_batch=20)
    assert len(gradient) > 1
    again, found = learn(ALGORITHMS["ppo-action-token"], 3, 3, global_batch=20)
    torch.testing.assert_close(again, gradient, rtol=0, atol=1e-6)
    assert found == pytest.approx(metrics, rel=1e-5, abs=1e-6)


NAMES = {
    "loss/total",
    "loss/policy",
    "loss/clip_fraction",
    "policy/approx_kl",
    "policy/dead_gradients",
    "policy/effective_sample_size",
    "policy/entropy",
    "policy/lag_mean",
    "policy/lag_max",
    "policy/ratio_p50",
    "policy/ratio_p95",
    "policy/ratio_abs_log_p95",
    "policy/ratio_max",
    "policy/ratio_cut",
    "update/weights_changed",
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_all_algorithms_report_the_same_names(name):
    _, metrics = learn(ALGORITHMS[name], 2, 2)
    of_age = {name for name in metrics if name.startswith("policy/behaviour_")}
    assert bool(of_age) == (getattr(ALGORITHMS[name].config, "correction", None) is not None)
    assert set(metrics) - of_age - {"loss/value", "value/clip_fraction"} == NAMES
    assert ("loss/value" in metrics) == ALGORITHMS[name].needs.values
    assert metrics["policy/lag_mean"] == metrics["policy/lag_max"] == 3
    shares = ("loss/clip_fraction", "policy/dead_gradients", "policy/effective_sample_size", "policy/ratio_cut")
    assert all(0 <= metrics[share] <= 1 for share in shares)
    assert metrics["policy/ratio_p50"] <= metrics["policy/ratio_p95"] <= metrics["policy/ratio_max"] * 1.01
