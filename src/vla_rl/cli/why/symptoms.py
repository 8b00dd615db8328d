"""Stage 1: what a run's own files say, which takes no time."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from attrs import frozen

from vla_rl.cli.report.gather import ReportData, pool_points
from vla_rl.cli.why.causes import Cause, name_cause
from vla_rl.core.run.weight_changes import LEAST, WEIGHTS_CHANGED
from vla_rl.core.spec.spec import Spec

CRITIC_STEPS = 10  # before which a sound critic may explain nothing yet


@frozen
class RunFiles:
    """What a run left behind, for checks."""

    run: ReportData
    spec: Spec

    def values(self, metric: str, after: int = 0) -> list[float]:
        """Return a metric of all steps after step `after`; empty: no step has it."""
        return [value for step, value in self.run.metric_series(metric) if step > after]

    def middle(self, metric: str, default: float = float("nan"), after: int = 0) -> float:
        """Return a metric's median over the steps; NaN, which no comparison holds for, if no step has it."""
        return median(self.values(metric, after) or [default])


def find_symptoms(record: RunFiles) -> Iterator[Cause]:
    """Yield what the run's files alone say."""
    yield from find_silence(record)
    yield from find_step_sizes(record)
    yield from find_estimates(record)


def find_silence(record: RunFiles) -> Iterator[Cause]:
    """Yield why episodes say nothing: no exploration, no success, no reward."""
    spec, all_episodes = record.spec, pool_points(record.run.rollout_points)
    rate, episodes, wins = all_episodes.rate, all_episodes.n, round(all_episodes.rate * all_episodes.n)
    entropies = record.values("policy/entropy")
    kept, filtered = (sum(record.values(f"groups/{end}")) for end in ("kept", "filtered"))
    # An update that never came has no entropy; the entropy of a density (a flow policy) may be negative.
    silent = not kept and spec.rollout.temperature < 0.3 if not entropies else 0 <= min(entropies) < 0.02
    if silent and episodes:
        entropy = min(entropies, default=0.0)
        evidence = f"the policy hardly varies, at a temperature of {spec.rollout.temperature:g}: its entropy is "
        yield name_cause("no exploration", entropy, f"{evidence}{entropy:.3g} nats")
    expected = 1 - rate**spec.rollout.group_size - (1 - rate) ** spec.rollout.group_size
    if filtered and kept <= 0.05 * (kept + filtered) and expected > 0.4:
        evidence = (
            f"{kept:.0f} of {kept + filtered:.0f} groups have different scores, though {rate:.0%} of the episodes "
            f"succeed: of independent members up to {expected:.0%} would"
        )
        yield name_cause("members of a group are alike", kept, evidence)
    if episodes >= 32 and rate < 0.04 and all(point.rate < 0.1 for point in record.run.evaluations):
        yield name_cause("hardly any success", rate, f"{wins} of {episodes} training episodes succeeded")
    if wins >= 5 and not any(record.values("env/return")):
        evidence = f"{wins} episodes succeeded, and the return of every episode is 0"
        yield name_cause("success brings no reward", 0, evidence)


def find_step_sizes(record: RunFiles) -> Iterator[Cause]:
    """Yield why updates move the policy too far, or not at all."""
    train, warm = record.spec.train, record.spec.train.critic_warmup_steps
    kls = record.values("policy/approx_kl", warm)
    clipped, updates = (record.middle(name, after=warm) for name in ("loss/clip_fraction", "update/optimizer_steps"))
    if not kls:
        return
    kl, farthest = median(kls), max(kls)
    if clipped > 0.3 and kl < 0.005:
        yield name_cause("clip too narrow", clipped, f"{clipped:.0%} of the loss terms are clipped at a KL of {kl:.2g}")
    elif kl > 0.05 or farthest > 0.15 or (clipped > 0.3 and kl > 0.02):  # one step may lose the policy
        evidence = (
            f"a step moves the policy by a KL of up to {farthest:.2g}, in {updates:.0f} optimiser steps "
            f"({train.epochs} epochs, rate {train.lr:g})"
        )
        yield name_cause("too many epochs" if train.epochs >= 8 else "rate too high", farthest, evidence)
    series = record.run.metric_series(WEIGHTS_CHANGED)
    changed = max((value for step, value in series if train.factor(int(step)) >= 0.5), default=1.0)
    dtype = getattr(record.spec.model.config, "dtype", "float32")
    if changed < LEAST and dtype != "float32":
        evidence = f"at most {changed:.2%} of the weights change in a step as the policy acts with them ({dtype})"
        yield name_cause("rounding hides the update", changed, evidence)
    elif kl < 3e-5 and updates >= 2 and not clipped:  # with one optimiser step it is measured before the policy moves
        evidence = f"a step moves the policy by a KL of {kl:.2g}, and clips nothing (rate {train.lr:g})"
        yield name_cause("rate too low", kl, evidence)


def find_estimates(record: RunFiles) -> Iterator[Cause]:
    """Yield what is wrong with estimates: critic, discount, age of the data, and evaluations unlike rollouts."""
    spec, config = record.spec, record.spec.algorithm.config
    explained = record.values("value/explained_variance", spec.train.critic_warmup_steps)
    late = median(explained[len(explained) // 2 :]) if len(explained) >= CRITIC_STEPS else 1.0
    if late <= 0.02:
        evidence = f"the critic's explained variance is {late:.2f} in the latest steps"
        yield name_cause("the critic explains nothing", late, evidence)
    gamma, steps = getattr(config, "gamma", None) or 1.0, record.middle("env/episode_length")
    if getattr(config, "advantage", "") == "chunk":
        steps /= spec.rollout.chunk
    left = gamma ** max(steps - 1, 0)
    if gamma < 0.97 and left < 0.3:
        evidence = f"{left:.1%} of a reward at the end reaches the first action, {steps:.0f} steps before, by {gamma:g}"
        yield name_cause("discount too strong", left, evidence)
    lag, ratio = record.middle("policy/lag_mean"), record.middle("policy/ratio_abs_log_p95")
    if lag >= 0.9 and ratio > (1.5 if getattr(config, "correction", None) else 0.3):
        evidence = f"samples are {lag:.1f} versions old, and 5 % of their ratios are beyond exp({ratio:.2f})"
        yield name_cause("data too old", ratio, evidence)
    if record.run.evaluations and spec.eval.greedy and not any(record.values("env/intervention_rate")):
        sampled, last = pool_points(record.run.rollout_points[-3:]), record.run.evaluations[-1]
        if sampled.low - last.high > 0.1:
            evidence = (
                f"rollouts, which sample, succeed in {sampled.rate:.0%} of {sampled.n}; the last evaluation, which "
                f"does not, in {last.rate:.0%} of {last.n}"
            )
            yield name_cause("evaluation is greedy", sampled.low - last.high, evidence)
