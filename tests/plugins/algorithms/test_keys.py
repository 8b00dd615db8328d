"""No key is ignored: each one, changed alone, changes what the algorithm asks for, keeps, weighs, or minimises."""

from __future__ import annotations

import attrs
import pytest
import torch

from vla_rl.core.contexts import AlgorithmContext
from vla_rl.core.types import AdvantageScope, Scores
from vla_rl.plugins.algorithms import gipo, grpo, ppo
from vla_rl.plugins.algorithms.grpo.config import GRPOConfig, SoftGate
from vla_rl.plugins.algorithms.ppo.config import PPOConfig
from vla_rl.testing import synthetic
from vla_rl.toolkit.algorithms.policy_gradient import Decoupled, KLSettings, SuccessFilter, Truncated, VTrace

POLICY = {
    "log_prob": ("action", {}),
    "entropy_coef": (0.01, {}),
    "kl": (KLSettings(coef=0.1), {}),
}
CORRECTION = {"correction": (Decoupled(), {})}
CLIP = {"clip_low": (0.5, {}), "clip_high": (0.8, {}), "dual_clip": (1.2, {})}
GROUP = {
    "aggregation": ("step-mean", {}),
    "baseline": ("leave-one-out", {}),
    "normalize_by_std": (None, {}),
    "filter": (SuccessFilter(lower=0.9, upper=1.0), {}),
    "filter_identical": (False, {}),
    "filter_truncated": (True, {}),
}
CRITIC = {
    "gamma": (0.9, {}),
    "lam": (0.5, {}),
    "advantage": ("action", {}),
    "time_limit": ("terminal", {}),
    "normalize_advantages": (None, {}),
    "aggregation": ("trajectory-mean", {}),
    "value_coef": (0.7, {}),
    "value_clip": (0.05, {}),
    "huber_delta": (0.1, {}),
}
TABLE = {
    "grpo": (grpo.plugin, {**POLICY, **CLIP, **CORRECTION, **GROUP, "soft_gate": (SoftGate(), {})}),
    "ppo": (ppo.plugin, {**POLICY, **CLIP, **CORRECTION, **CRITIC}),
    "gipo": (
        gipo.plugin,
        {
            **POLICY,
            **CRITIC,
            "normalize_advantages": ("unbiased", {}),
            "sigma": (1.0, {}),
            "behaviour_kl_coef": (0.1, {}),
            "recompute_values": (False, {}),
        },
    ),
}
CASES = [(name, key) for name, (_, keys) in TABLE.items() for key in keys]
NESTED = [
    ("grpo", "kl", KLSettings(coef=0.1), KLSettings(coef=0.1, estimator="k1")),
    ("grpo", "normalize_by_std", "group", "step"),
    ("ppo", "normalize_advantages", "unbiased", "population"),
    ("grpo", "correction", Decoupled(), Decoupled(proximal="interpolate")),
    ("grpo", "correction", Decoupled(), Decoupled(threshold=1.1)),
    ("ppo", "correction", Truncated(), Truncated(threshold=1.1)),
    ("ppo", "correction", VTrace(), VTrace(rho_bar=3.0)),
    ("ppo", "correction", VTrace(), VTrace(c_bar=0.5)),
]
"""(Algorithm, key, a value, the same with one part changed)."""


def fingerprint(plugin, **keys):
    """Everything that a spec's key can reach."""
    algorithm = plugin.build(plugin.config(**keys), AlgorithmContext())
    values = algorithm.value_granularity if algorithm.needs.values else "none"
    rollout = synthetic.rollout(values=values, groups=6, chunk_steps=5, proximal=True)
    rollout = rollout.evolve(success=rollout.rewards.sum((0, 2)) > 0)
    selected = algorithm.select(rollout)
    found = algorithm.advantages(rollout)
    batch = synthetic.batch(rollout, found, reference=True)
    batch = attrs.evolve(batch, lag=batch.lag + 2)
    draws = torch.Generator().manual_seed(1)
    new = (batch.log_probs + 0.4 * torch.randn(batch.log_probs.shape, generator=draws)).requires_grad_()
    critic = None if batch.values is None else batch.values + 0.4 * torch.randn(batch.values.shape, generator=draws)
    entropy = torch.rand(new.shape, generator=draws) + new.detach()
    loss = algorithm.loss(Scores(log_probs=new, entropy=entropy, values=critic), batch)
    loss.total.backward()
    numbers = [
        t for t in (found.advantages, found.weights, found.returns, loss.total.detach(), new.grad) if t is not None
    ]
    return algorithm.needs, algorithm.value_granularity, selected.tolist(), [t.tolist() for t in numbers]


@pytest.mark.parametrize(("name", "key"), CASES)
def test_a_key_has_an_effect(name, key):
    plugin, keys = TABLE[name]
    value, other_keys = keys[key]
    assert getattr(plugin.config(**other_keys), key) != value
    assert fingerprint(plugin, **other_keys, **{key: value}) != fingerprint(plugin, **other_keys)


@pytest.mark.parametrize(("name", "key", "value", "other"), NESTED)
def test_each_part_of_a_key_has_an_effect(name, key, value, other):
    plugin = TABLE[name][0]
    assert fingerprint(plugin, **{key: value}) != fingerprint(plugin, **{key: other})


@pytest.mark.parametrize("name", TABLE)
def test_the_table_knows_every_key(name):
    plugin, keys = TABLE[name]
    constant = {"advantage"} if name == "grpo" else set()  # one value: GRPO has one advantage a trajectory
    assert {f.name for f in attrs.fields(plugin.config)} == set(keys) | constant


def test_grpo_says_that_its_advantages_are_of_chunks():
    from vla_rl.core.spec.structure import Problems, Structurer

    with pytest.raises(Problems, match="advantage: expected one of 'chunk', got str 'action'"):
        Structurer().read_class({"advantage": "action"}, GRPOConfig)


def test_keys_of_grpo_that_contradict():
    with pytest.raises(ValueError, match="soft_gate takes the place of the clip; leave clip_low"):
        GRPOConfig(soft_gate=SoftGate(), dual_clip=3.0)
    assert GRPOConfig(normalize_by_std="step").scope_reason.endswith("set algorithm.normalize_by_std: group")
    assert GRPOConfig(normalize_by_std="step").advantage_scope is AdvantageScope.STEP
    assert GRPOConfig().advantage_scope is AdvantageScope.GROUP and not GRPOConfig().scope_reason


def test_kl_needs_a_reference_and_only_then():
    for plugin, _ in TABLE.values():
        assert not plugin.build(plugin.config(), AlgorithmContext()).needs.reference
        assert plugin.build(plugin.config(kl=KLSettings(coef=0.1)), AlgorithmContext()).needs.reference


@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_what_a_correction_needs(name):
    plugin, _ = TABLE[name]

    def asked(**keys):
        algorithm = plugin.build(plugin.config(**keys), AlgorithmContext())
        return algorithm.off_policy, algorithm.needs.proximal_log_probs, algorithm.needs.recomputed_values

    assert asked() == (False, False, False)
    assert asked(correction=Decoupled()) == asked(correction=Truncated()) == (True, True, False)
    assert asked(correction=Decoupled(proximal="interpolate")) == (True, False, False)
    if name == "ppo":
        assert asked(correction=VTrace()) == (True, True, True)
    assert gipo.plugin.build(gipo.plugin.config(), AlgorithmContext()).off_policy  # by its trust weights


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"correction": {"type": "decoupeld"}}, "correction.type: expected one of .*; did you mean 'decoupled'"),
        ({"correction": "decoupled"}, "correction: expected {type: decoupled} or .*, got str 'decoupled'"),
        ({"correction": {"threshold": 2.0}}, "correction.type: required, but missing; one of 'decoupled', 'trunc"),
        ({"proximal": "interpolate"}, "proximal: unknown key; now correction: {type: decoupled, proximal: ...}"),
        ({"correction": {"type": "v-trace", "proximal": "interpolate"}}, "correction.proximal: unknown key"),
        ({"behaviour_weight_threshold": 2.0}, "threshold: unknown key; now correction: {type: decoupled, threshold"),
        ({"correction": {"type": "decoupled", "threshold": 0.5}}, "correction.threshold: 'threshold' must be >= 1"),
        ({"correction": {"type": "truncated", "threshold": 0.5}}, "correction.threshold: 'threshold' must be >= 1"),
        ({"correction": {"type": "truncated", "rho_bar": 2.0}}, "correction.rho_bar: unknown key"),
        ({"correction": {"type": "v-trace", "c_bar": 2.0}}, r"c_bar \(2.0\) is above rho_bar \(1.0\); lower it, or"),
        ({"kl": {"estimator": "k1"}}, "kl.coef: required, but missing"),
        ({"kl_coef": 0.1}, "kl_coef: unknown key; now kl: {coef: ...}"),
        ({"normalize_advantages": False}, "normalize_advantages: expected one of 'unbiased', 'population', null, got"),
        ({"advantage_std": "population"}, "advantage_std: unknown key; now normalize_advantages: unbiased, pop"),
    ],
)
def test_a_key_of_another_correction_is_refused(keys, message):
    from vla_rl.core.spec.structure import Problems, Structurer

    with pytest.raises(Problems, match=message):
        Structurer().read_class(keys, PPOConfig)


def test_without_values_there_is_no_v_trace():
    from vla_rl.core.spec.structure import Problems, Structurer

    with pytest.raises(Problems, match="correction.type: expected one of 'decoupled', 'truncated', got str 'v-trace'"):
        Structurer().read_class({"correction": {"type": "v-trace"}}, GRPOConfig)
