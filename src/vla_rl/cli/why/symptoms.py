"""Stage 1: what a run's own files say, which takes no time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from statistics import median

from attrs import frozen

from vla_rl.cli.report.gather import ReportData
from vla_rl.cli.why.causes import Cause
from vla_rl.core.events import wilson_interval
from vla_rl.core.run.weight_changes import LEAST, WEIGHTS_CHANGED
from vla_rl.core.spec.spec import Spec

Symptom = partial(Cause, stage=1)
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


def find_silence(record: RunFiles) -> Iterator[Cause]:
    """Yield why episodes say nothing: no exploration, no success, no reward."""
    spec, points = record.spec, record.run.rollout_points
    episodes, wins = sum(p.n for p in points), sum(round(p.rate * p.n) for p in points)
    entropies = record.values("policy/entropy")
    kept, filtered = (sum(record.values(f"groups/{end}")) for end in ("kept", "filtered"))
    # An update that never came has no entropy; the entropy of a density (a flow policy) may be negative.
    silent = not kept and spec.rollout.temperature < 0.3 if not entropies else 0 <= min(entropies) < 0.02
    if silent and episodes:
        entropy = min(entropies, default=0.0)
        evidence = f"the policy hardly varies: its entropy is {entropy:.3g} nats"
        key = f"rollout.temperature, which is {spec.rollout.temperature:g}"
        yield Symptom(name="no exploration", evidence=evidence, number=entropy, key=key, certainty=0.95)
    rate, group = wins / max(episodes, 1), spec.rollout.group_size
    expected = 1 - rate**group - (1 - rate) ** group
    if filtered and kept <= 0.05 * (kept + filtered) and expected > 0.4:
        evidence = (
            f"{kept:.0f} of {kept + filtered:.0f} groups have different scores, though {rate:.0%} of the episodes "
            f"succeed: of independent members up to {expected:.0%} would"
        )
        key = "the simulator's seed, and the policy's noise"
        yield Symptom(name="members of a group are alike", evidence=evidence, number=kept, key=key, certainty=0.85)
    if episodes >= 32 and rate < 0.04 and all(point.rate < 0.1 for point in record.run.evaluations):
        evidence = f"{wins} of {episodes} training episodes succeeded"
        key = "the start: model.checkpoint with its statistics, bc_warmup, an easier task"
        yield Symptom(name="hardly any success", evidence=evidence, number=rate, key=key, certainty=0.7)
    if wins >= 5 and not any(record.values("env/return")):
        evidence = f"{wins} episodes succeeded, and the return of every episode is 0"
        key = "the simulator's rewards at an episode's last action"
        yield Symptom(name="success brings no reward", evidence=evidence, number=0.0, key=key, certainty=0.92)


def find_step_sizes(record: RunFiles) -> Iterator[Cause]:
    """Yield why updates move the policy too far, or not at all."""
    train, warm = record.spec.train, record.spec.train.critic_warmup_steps
    kls = record.values("policy/approx_kl", warm)
    clipped, updates = (record.middle(name, after=warm) for name in ("loss/clip_fraction", "update/optimizer_steps"))
    if not kls:
        return
    kl, farthest = median(kls), max(kls)
    if clipped > 0.3 and kl < 0.005:
        evidence = f"{clipped:.0%} of the loss terms are clipped at a KL of {kl:.2g}"
        key = "algorithm.clip_low, algorithm.clip_high"
        yield Symptom(name="clip too narrow", evidence=evidence, number=clipped, key=key, certainty=0.95)
    elif kl > 0.05 or farthest > 0.15 or (clipped > 0.3 and kl > 0.02):  # one step may lose the policy
        evidence = (
            f"a step moves the policy by a KL of up to {farthest:.2g}, in {updates:.0f} optimiser steps "
            f"({train.epochs} epochs, rate {train.lr:g})"
        )
        name, key = ("too many epochs", "train.epochs") if train.epochs >= 8 else ("rate too high", "train.lr")
        yield Symptom(name=name, evidence=evidence, number=farthest, key=key, certainty=0.8)
    series = record.run.metric_series(WEIGHTS_CHANGED)
    changed = max((value for step, value in series if train.factor(int(step)) >= 0.5), default=1.0)
    dtype = getattr(record.spec.model.config, "dtype", "float32")
    if changed < LEAST and dtype != "float32":
        evidence = f"at most {changed:.2%} of the weights change in a step as the policy acts with them ({dtype})"
        key = "model.dtype: float32, or train.lr"
        yield Symptom(name="rounding hides the update", evidence=evidence, number=changed, key=key, certainty=0.95)
    elif kl < 3e-5 and updates >= 2 and not clipped:  # with one optimiser step it is measured before the policy moves
        evidence = f"a step moves the policy by a KL of {kl:.2g}, and clips nothing (rate {train.lr:g})"
        yield Symptom(name="rate too low", evidence=evidence, number=kl, key="train.lr", certainty=0.9)


def find_estimates(record: RunFiles) -> Iterator[Cause]:
    """Yield what is wrong with estimates: critic, discount, age of the data, and evaluations unlike rollouts."""
    spec, config = record.spec, record.spec.algorithm.config
    explained = record.values("value/explained_variance", spec.train.critic_warmup_steps)
    late = median(explained[len(explained) // 2 :]) if len(explained) >= CRITIC_STEPS else 1.0
    if late <= 0.02:
        detached = getattr(getattr(spec.model.config, "value_head", None), "detach", False)
        key = "train.value_lr" + (", or model.value_head.detach: false" if detached else "")
        evidence = f"the critic's explained variance is {late:.2f} in the latest steps"
        yield Symptom(name="the critic explains nothing", evidence=evidence, number=late, key=key, certainty=0.75)
    gamma = getattr(config, "gamma", None)
    steps = record.middle("env/episode_length") / (
        spec.rollout.chunk if getattr(config, "advantage", "") == "chunk" else 1
    )
    if gamma is not None and gamma < 0.97 and gamma ** max(steps - 1, 0) < 0.3:
        left = gamma ** max(steps - 1, 0)
        evidence = f"{left:.1%} of a reward at the end reaches the first action, {steps:.0f} steps before"
        key = f"algorithm.gamma, which is {gamma:g}"
        yield Symptom(name="discount too strong", evidence=evidence, number=left, key=key, certainty=0.9)
    lag, ratio = record.middle("policy/lag_mean"), record.middle("policy/ratio_abs_log_p95")
    if lag >= 0.9 and ratio > (1.5 if getattr(config, "correction", None) else 0.3):
        key = f"{'rollout.lag' if spec.rollout.lag else 'asynchrony.max_lag'}, or algorithm.correction"
        evidence = f"samples are {lag:.1f} versions old, and 5 % of their ratios are beyond exp({ratio:.2f})"
        yield Symptom(name="data too old", evidence=evidence, number=ratio, key=key, certainty=0.9)
    points, rollouts = record.run.evaluations, record.run.rollout_points[-3:]
    if points and rollouts and spec.eval.greedy:
        sampled = wilson_interval(sum(round(p.rate * p.n) for p in rollouts), sum(p.n for p in rollouts))
        gap = sampled.low - points[-1].high
        if gap > 0.1:
            evidence = (
                f"rollouts, which sample, succeed in {sampled.rate:.0%} of {sampled.n}; the last evaluation, which "
                f"does not, in {points[-1].rate:.0%} of {points[-1].n}"
            )
            key = "eval.greedy: false, or model.greedy"
            yield Symptom(name="evaluation is greedy", evidence=evidence, number=gap, key=key, certainty=0.8)


def find_symptoms(record: RunFiles) -> list[Cause]:
    """Return what the run's files alone say."""
    return [cause for check in (find_silence, find_step_sizes, find_estimates) for cause in check(record)]
