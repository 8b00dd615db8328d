"""Corrections for old data against their definitions, worked out entry by entry in float64, and what must hold of them
whatever the numbers are."""

from __future__ import annotations

import math

import attrs
import pytest
import torch

from vla_rl.core.types import Scores
from vla_rl.plugins.algorithms.grpo.config import GRPOConfig
from vla_rl.plugins.algorithms.grpo.impl import GRPO
from vla_rl.plugins.algorithms.ppo.config import PPOConfig
from vla_rl.plugins.algorithms.ppo.impl import PPO
from vla_rl.testing import synthetic
from vla_rl.toolkit.algorithms import functional as F
from vla_rl.toolkit.algorithms.checks import NotFiniteError, ShapeError
from vla_rl.toolkit.algorithms.functional import interpolate_log_probs, v_trace
from vla_rl.toolkit.algorithms.policy_gradient import (
    Decoupled,
    Truncated,
    VTrace,
    by_action,
    flatten_steps,
    log_behaviour_weights,
)
from vla_rl.toolkit.algorithms.statistics import read_all

LEVELS = ["token", "action", "chunk"]
WEIGHED = [
    {"correction": Decoupled()},
    {"correction": Decoupled(threshold=1.1)},
    {"correction": Decoupled(proximal="interpolate")},
    {"correction": Decoupled(proximal="interpolate", threshold=1.1)},
    {"correction": Truncated(threshold=1.1)},
    {"correction": Truncated(threshold=1.1, proximal="interpolate")},
]
CLIP = {"clip_low": 0.1, "clip_high": 0.15, "dual_clip": 1.3}


def doubled(thing):
    """With float64 in place of float32."""
    changes = {
        name: value.double()
        for name, value in attrs.asdict(thing, recurse=False).items()
        if isinstance(value, torch.Tensor) and value.dtype == torch.float32
    }
    return attrs.evolve(thing, **changes)


def made(algorithm, *, lag=None, proximal=True, shift=0.4):
    """(scores with a leaf, batch), in float64: current log-probs are `shift` times noise away from the recorded
    ones."""
    values = algorithm.value_granularity if algorithm.needs.values else "none"
    rollout = doubled(synthetic.rollout(values=values, proximal=True, chunk_steps=5))
    if not proximal:
        rollout = rollout.evolve(proximal_log_probs=rollout.log_probs)
    batch = doubled(synthetic.batch(rollout, algorithm.advantages(rollout)))
    lags = torch.arange(len(batch.lag)) % 4 if lag is None else torch.full_like(batch.lag, lag)
    batch = attrs.evolve(batch, lag=lags)
    noise = torch.randn(batch.log_probs.shape, generator=torch.Generator().manual_seed(1)).double()
    new = (batch.log_probs + shift * noise).requires_grad_()
    return Scores(log_probs=new, entropy=torch.zeros_like(new), values=batch.values), batch, new


# ---------------------------------------------------------------------------------------------------- in the loss


def entry_groups(valid, level):
    """[(b, c of the advantage and weight, the tokens (c, m) that make one ratio, share of the weight)]."""
    size, chunk, tokens = valid.shape
    for b in range(size):
        inside = [(c, m) for c in range(chunk) for m in range(tokens) if valid[b, c, m]]
        if level == "chunk" and inside:
            yield b, None, inside, 1.0
        for c in range(chunk):
            of_action = [place for place in inside if place[0] == c]
            if level == "action" and of_action:
                yield b, c, of_action, 1.0
            if level == "token":
                yield from ((b, c, [place], 1 / tokens) for place in of_action)


def by_hand(batch, new, level, config):
    """(loss, its gradient [B, C, M]): a sum over entries of weight * w * max(-A u, -A clip(u)), bounded by the dual
    clip, where w = pi_old / mu as the correction has it and u = pi / pi_old; pi_old and w are constants."""
    total, gradient = 0.0, torch.zeros_like(new)
    valid = batch.valid[..., None].expand(new.shape)
    for b, c, places, share in entry_groups(valid, level):
        mu = sum(float(batch.log_probs[b, i, m]) for i, m in places)
        pi = sum(float(new[b, i, m]) for i, m in places)
        correction = config.correction
        if correction.proximal == "interpolate":
            v_mu, v_old = 0, int(batch.lag[b])
            v_now = v_old + 1
            old = mu + (v_old - v_mu) / (v_now - v_mu) * (pi - mu)
        else:
            old = sum(float(batch.proximal_log_probs[b, i, m]) for i, m in places)
        w, u = math.exp(old - mu), math.exp(pi - old)
        if isinstance(correction, Truncated):
            w = min(w, correction.threshold)
        elif correction.threshold is not None and w > correction.threshold:
            w = 0.0
        advantage = float(batch.advantages[b] if batch.advantages.dim() == 1 else batch.advantages[b, c])
        weight = share * float(batch.weights[b] if batch.weights.dim() == 1 else batch.weights[b, c])
        clipped = min(max(u, 1 - config.clip_low), 1 + config.clip_high)
        loss, slope = max((-advantage * u, -advantage), (-advantage * clipped, 0.0 if clipped != u else -advantage))
        if advantage < 0 and loss > -advantage * config.dual_clip:
            loss, slope = -advantage * config.dual_clip, 0.0
        total += weight * w * loss
        for i, m in places:
            gradient[b, i, m] += weight * w * slope * u
    return total, gradient


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("keys", WEIGHED, ids=lambda keys: "-".join(map(str, keys.values())))
def test_weighted_surrogates_are_their_definition(level, keys):
    for algorithm in (
        PPO(PPOConfig(log_prob=level, value_coef=0.0, **keys, **CLIP)),
        PPO(
            PPOConfig(
                log_prob=level, value_coef=0.0, advantage="chunk" if level == "chunk" else "action", **keys, **CLIP
            )
        ),
        GRPO(GRPOConfig(log_prob=level, **keys, **CLIP)),
    ):
        scores, batch, new = made(algorithm)
        loss = algorithm.loss(scores, batch)
        loss.total.backward()
        total, gradient = by_hand(batch, new.detach(), level, algorithm.config)
        assert float(loss.total.detach()) == pytest.approx(total, rel=1e-9)
        torch.testing.assert_close(new.grad, gradient, rtol=1e-9, atol=1e-12)
        assert gradient.any() and float(loss.metrics["loss/policy"]) == pytest.approx(total, rel=1e-9)


@pytest.mark.parametrize("level", LEVELS)
def test_the_divisor_counts_what_the_threshold_leaves(level):
    """A mean over the entries that are kept; RLinf's own aggregation, and interpolation, divide by all."""
    keys = {"log_prob": level, "correction": Decoupled(threshold=1.05)}
    rollout = synthetic.rollout(values="chunk", proximal=True)
    for aggregation in ("step-mean", "trajectory-mean"):
        algorithm = PPO(PPOConfig(**keys, aggregation=aggregation))
        plain = PPO(PPOConfig(log_prob=level, aggregation=aggregation)).advantages(rollout)
        found = algorithm.advantages(rollout)
        assert torch.equal(found.weights, plain.weights) and torch.equal(found.advantages, plain.advantages)
        wanted = torch.zeros_like(plain.counts)
        valid = rollout.valid[..., None].expand(rollout.log_probs.shape)
        apart = rollout.proximal_log_probs - rollout.log_probs
        for t in range(len(valid)):
            for b, c, places, share in entry_groups(valid[t], level):
                kept = math.exp(sum(float(apart[t, b, i, m]) for i, m in places)) <= 1.05
                at = (t, b) if c is None else (t, b, c)
                wanted[at] += share * kept * plain.counts[at]
        torch.testing.assert_close(found.counts, wanted)
        assert 0 < float(wanted.sum()) < float(plain.counts.sum())
    interpolated = {"log_prob": level, "correction": Decoupled(threshold=1.05, proximal="interpolate")}
    for config in (PPOConfig(**keys, aggregation="rlinf"), PPOConfig(**interpolated)):
        plain = PPO(PPOConfig(log_prob=level, aggregation=config.aggregation)).advantages(rollout)
        assert torch.equal(PPO(config).advantages(rollout).counts, plain.counts)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "keys",
    [
        {"correction": Decoupled()},
        {"correction": Decoupled(threshold=1.0)},
        {"correction": Decoupled(proximal="interpolate")},
        {"correction": Truncated(threshold=1.0)},
        {"correction": Truncated(proximal="interpolate")},
    ],
)
def test_at_lag_0_nothing_is_corrected(level, keys):
    """Bit for bit: pi_old is mu, so weights are 1 and the ratio is that of PPO."""
    found = []
    for changes in ({}, keys):
        algorithm = PPO(PPOConfig(log_prob=level, entropy_coef=0.01, **changes, **CLIP))
        scores, batch, new = made(algorithm, lag=0, proximal=False)
        loss = algorithm.loss(scores, batch)
        loss.total.backward()
        found.append((loss, new.grad))
    (plain, gradient), (corrected, same) = found
    assert torch.equal(plain.total, corrected.total) and torch.equal(gradient, same)
    theirs, ours = read_all([plain.statistics]), read_all([corrected.statistics])
    assert {name: ours[name] for name in theirs} == theirs
    assert ours.get("policy/behaviour_cut", 0.0) == 0.0
    assert ours["policy/behaviour_weight_p95"] == pytest.approx(1.0, abs=1e-4)


def test_a_bound_that_is_never_reached_leaves_the_importance_weights():
    found = []
    for keys in ({"correction": Truncated(threshold=1e6)}, {"correction": Decoupled()}):
        algorithm = PPO(PPOConfig(**keys))
        scores, batch, new = made(algorithm)
        algorithm.loss(scores, batch).total.backward()
        found.append(new.grad)
    assert torch.equal(*found)


def test_no_gradient_flows_through_the_proximal_policy():
    """Also where it is made of the policy in training: else its gradient would undo half of the ratio's at lag 1."""
    algorithm = PPO(PPOConfig(correction=Decoupled(proximal="interpolate"), value_coef=0.0))
    scores, batch, new = made(algorithm, lag=1, shift=0.01)  # no ratio reaches the clip
    algorithm.loss(scores, batch).total.backward()
    mask = batch.valid[..., None].expand(new.shape)
    wanted = -(batch.weights * batch.advantages[:, None])[..., None].expand(new.shape) / new.shape[-1]
    ratio = (new.detach() - batch.log_probs).exp()
    torch.testing.assert_close(new.grad[mask], (wanted * ratio)[mask])
    assert not interpolate_log_probs(new, batch.log_probs, batch.lag).requires_grad


@pytest.mark.parametrize("lag", [0, 1, 2, 8])
def test_interpolation_goes_from_the_version_that_acted_to_the_next(lag):
    mu, pi = torch.tensor([[-3.0, -1.0]]).double(), torch.tensor([[-1.0, -2.0]]).double()
    found = interpolate_log_probs(pi, mu, torch.tensor([lag]))
    assert found.tolist()[0] == pytest.approx([-3 + 2 * lag / (lag + 1), -1 - lag / (lag + 1)])
    assert torch.equal(
        interpolate_log_probs(pi, mu, torch.tensor([-1])), mu
    )  # a version from the future, which none has


def test_what_is_dropped_or_bounded_is_counted():
    """Weights of 3, 2, 1.5 and 1: one is above 2, and one is at it, which is kept."""
    weights = torch.tensor([3.0, 2.0, 1.5, 1.0]).log()
    rollout = synthetic.rollout(values="chunk", chunk=1, tokens=1, groups=1, chunk_steps=1, ends=[2] * 4)
    shares = {}
    for keys in ({"correction": Decoupled(threshold=2.0)}, {"correction": Truncated()}):
        algorithm = PPO(PPOConfig(**keys))
        old = rollout.evolve(proximal_log_probs=rollout.log_probs + weights.reshape(1, 4, 1, 1))
        batch = synthetic.batch(old, algorithm.advantages(old))
        new = batch.proximal_log_probs.clone()
        loss = algorithm.loss(Scores(log_probs=new, entropy=0 * new, values=batch.values), batch)
        found = read_all([loss.statistics])
        kind = keys["correction"].type
        shares[kind] = found["policy/behaviour_cut"], found["policy/dead_gradients"]
        used = [0.0, 2.0, 1.5, 1.0] if kind == "decoupled" else [2.0, 2.0, 1.5, 1.0]
        size = sum(used) ** 2 / (4 * sum(u * u for u in used))
        assert found["policy/effective_sample_size"] == pytest.approx(size, rel=1e-6)
        assert found["policy/ratio_p95"] == pytest.approx(3.0, rel=0.01)  # pi / mu, as ever
    assert shares == {"decoupled": (0.25, 0.25), "truncated": (0.25, 0.0)}


def test_a_batch_without_proximal_log_probs_is_refused():
    algorithm = PPO(PPOConfig(correction=Decoupled()))
    scores, batch, _ = made(algorithm)
    with pytest.raises(ShapeError, match="needs proximal_log_probs; set that field of the algorithm's Requirements"):
        algorithm.loss(scores, attrs.evolve(batch, proximal_log_probs=None))


# ------------------------------------------------------------------------------------------------------- V-trace


def series(seed=0, steps=7, columns=5):
    """rewards, values, next_values, terminated, truncated, log_weights, valid: [S, N], float64."""
    g = torch.Generator().manual_seed(seed)

    def normal():
        return torch.randn(steps, columns, generator=g).double()

    ends = torch.rand(steps, columns, generator=g)
    return {
        "rewards": normal(),
        "values": normal(),
        "next_values": normal(),
        "terminated": ends < 0.1,
        "truncated": (ends > 0.1) & (ends < 0.2),
        "log_weights": 0.7 * normal(),
        "valid": torch.rand(steps, columns, generator=g) < 0.8,
    }


def v_trace_by_hand(data, n, gamma, lam, rho_bar, c_bar):
    """Espeholt et al. 2018, eq. 1, as the sum that it is: for each valid step of column n (advantage, target)."""
    column = {name: tensor[:, n].tolist() for name, tensor in data.items()}
    steps = [t for t, valid in enumerate(column["valid"]) if valid]
    out = {}

    def bootstrap(i):
        """(V of what follows step i, whether the episode continues there)."""
        t = steps[i]
        if column["terminated"][t]:
            return 0.0, False
        if column["truncated"][t] or i + 1 == len(steps):
            return (column["next_values"][t] if column["truncated"][t] else column["next_values"][-1]), False
        return column["values"][steps[i + 1]], True

    def target(i):
        total, factor, j = column["values"][steps[i]], 1.0, i
        while True:
            t = steps[j]
            weight = math.exp(column["log_weights"][t])
            after, goes_on = bootstrap(j)
            total += factor * min(rho_bar, weight) * (column["rewards"][t] + gamma * after - column["values"][t])
            if not goes_on:
                return total
            factor *= gamma * lam * min(c_bar, weight)
            j += 1

    for i, t in enumerate(steps):
        after, goes_on = bootstrap(i)
        following = target(i + 1) if goes_on else after
        rho = min(rho_bar, math.exp(column["log_weights"][t]))
        out[t] = rho * (column["rewards"][t] + gamma * following - column["values"][t]), target(i)
    return out


@pytest.mark.parametrize(
    ("lam", "rho_bar", "c_bar"), [(1.0, 1.0, 1.0), (0.9, 1.0, 1.0), (0.95, 2.0, 0.7), (0.0, 1.0, 1.0)]
)
def test_v_trace_is_its_definition(lam, rho_bar, c_bar):
    for seed in range(3):
        data = series(seed)
        found = v_trace(**data, gamma=0.9, lam=lam, rho_bar=rho_bar, c_bar=c_bar)
        for n in range(data["valid"].shape[1]):
            wanted = v_trace_by_hand(data, n, 0.9, lam, rho_bar, c_bar)
            for t in range(len(data["valid"])):
                ours = float(found[0][t, n]), float(found[1][t, n])
                assert ours == pytest.approx(wanted.get(t, (0.0, 0.0)), rel=1e-12, abs=1e-12)


def test_on_policy_v_trace_gives_n_step_returns():
    """With lam 1: discounted rewards up to the end and the value behind it, whatever the values on the way are."""
    data = {**series(3), "log_weights": torch.zeros(7, 5).double()}
    advantages, targets = v_trace(**data, gamma=0.875, lam=1.0)
    del data["log_weights"]
    wanted, returns = F.gae(**data, gamma=0.875, lam=1.0)
    torch.testing.assert_close(targets, returns)
    torch.testing.assert_close(advantages, wanted)
    other = {**data, "values": torch.where(data["valid"], data["values"] + 5.0, data["values"])}
    torch.testing.assert_close(F.gae(**other, gamma=0.875, lam=1.0)[1], targets)


@pytest.mark.parametrize("lam", [0.0, 0.5, 0.75])
def test_on_policy_the_targets_are_those_of_gae(lam):
    data = {**series(4), "log_weights": torch.zeros(7, 5).double()}
    _, targets = v_trace(**data, gamma=0.875, lam=lam)
    del data["log_weights"]
    torch.testing.assert_close(targets, F.gae(**data, gamma=0.875, lam=lam)[1])


def test_v_trace_of_nothing_and_of_what_is_not_finite():
    empty = {name: tensor[:0] for name, tensor in series().items()}
    assert v_trace(**empty, gamma=0.9, lam=1.0)[0].shape == (0, 5)
    data = series()
    place = tuple(data["valid"].nonzero()[0].tolist())
    data["log_weights"][place] = math.nan
    with pytest.raises(NotFiniteError, match="log_weights"):
        v_trace(**data, gamma=0.9, lam=1.0)
    data["valid"][place] = False
    assert torch.isfinite(v_trace(**data, gamma=0.9, lam=1.0)[0]).all()


@pytest.mark.parametrize("advantage", ["chunk", "action"])
def test_a_step_weighs_as_all_its_tokens_together(advantage):
    rollout = synthetic.rollout(values=advantage, proximal=True)
    found = by_step(log_behaviour_weights(rollout, advantage), advantage)
    apart = torch.where(rollout.valid[..., None], rollout.proximal_log_probs - rollout.log_probs, torch.zeros(()))
    wanted = apart.sum((2, 3)) if advantage == "chunk" else apart.sum(3).permute(0, 2, 1).flatten(0, 1)
    torch.testing.assert_close(found, wanted)
    config = PPOConfig(correction=VTrace(rho_bar=1.2, c_bar=0.9), advantage=advantage, normalize_advantages=None)
    made = PPO(config).advantages(rollout)
    data = {**flatten_steps(rollout, config), "log_weights": found}
    for n in range(found.shape[1]):
        wanted = v_trace_by_hand(data, n, config.gamma, config.lam, 1.2, 0.9)
        for place, flat in enumerate(
            zip(*(by_step(t, advantage)[:, n] for t in (made.advantages, made.returns)), strict=True)
        ):
            assert tuple(map(float, flat)) == pytest.approx(wanted.get(place, (0.0, 0.0)), rel=1e-4, abs=1e-5)


def test_what_the_proximal_policy_would_not_do_gets_no_gradient():
    """Neither from its own advantage nor from the mean of all."""
    rollout = synthetic.rollout(values="chunk", proximal=True)
    unlikely = rollout.samples & (torch.rand(rollout.samples.shape, generator=torch.Generator().manual_seed(0)) < 0.5)
    proximal = torch.where(unlikely[..., None, None], rollout.log_probs - 20.0, rollout.log_probs)
    made = PPO(PPOConfig(correction=VTrace())).advantages(rollout.evolve(proximal_log_probs=proximal))
    assert made.advantages[unlikely].abs().max() < 1e-6
    assert made.advantages[rollout.samples & ~unlikely].abs().min() > 1e-6


def by_step(tensor, granularity):
    return tensor if granularity == "chunk" else by_action(tensor)


def test_the_surrogate_of_v_trace_is_around_the_proximal_policy():
    """The advantages are weighted; the ratio is pi / pi_old, unweighted."""
    algorithm = PPO(PPOConfig(correction=VTrace(), value_coef=0.0, **CLIP))
    scores, batch, new = made(algorithm)
    algorithm.loss(scores, batch).total.backward()
    plain = PPO(PPOConfig(value_coef=0.0, **CLIP))
    moved = attrs.evolve(batch, log_probs=batch.proximal_log_probs)
    again = new.detach().clone().requires_grad_()
    plain.loss(attrs.evolve(scores, log_probs=again), moved).total.backward()
    assert torch.equal(new.grad, again.grad)
