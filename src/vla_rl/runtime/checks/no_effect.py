"""Warnings about settings that are valid but without effect. A short trial of a long spec has some on purpose."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import FunctionType

from attrs import fields_dict

from vla_rl.core.catalogue import MODULE_PLUGINS, hook_modules
from vla_rl.core.plan import Plan
from vla_rl.core.run.shape import RunShape
from vla_rl.core.spec.sections import Component, RateSchedule, RewardsSpec, TrainSpec
from vla_rl.core.spec.source import Item
from vla_rl.core.spec.spec import Spec, has_own_policy, trains_on_transitions
from vla_rl.toolkit.algorithms.policy_gradient import CorrectionSettings, CriticSettings, GroupSettings
from vla_rl.toolkit.people.settings import PanelSettings
from vla_rl.toolkit.trainers.settings import DemonstrationSettings

NO_DISCOUNT = 1e-6
"""Factor below which nothing counts: a few steps of float32 at 1."""


def without_effect(spec: Spec, *, training: bool, imitation: bool) -> list[Item]:
    """Return what to warn of, each with the path of its key. The arguments are those of `check_spec`."""
    warnings = [*_modules_warnings(spec), *_runtime_warnings(spec)]
    warnings += _person_warnings(spec)
    if training and spec.train.steps:
        warnings += [
            *_schedule_warnings("train", spec.train),
            *_steps_warnings(spec),
            *_rollout_warnings(spec),
            *_samples_warnings(spec),
        ]
        warnings += [*_algorithm_warnings(spec), *_imagination_warnings(spec)]
        warnings += _transition_warnings(spec)
        warnings += _discount_warnings(("trainer", "discount"), spec.trainer, spec.rollout.chunk)
        warnings += _discount_warnings(("algorithm", "gamma"), spec.algorithm, 1)
    if imitation and spec.imitation is not None and spec.imitation.steps is not None:
        warnings += _schedule_warnings("imitation", spec.imitation)
        path = ("imitation", "trainer", "discount")
        warnings += _discount_warnings(path, spec.imitation.trainer, spec.rollout.chunk)
    return warnings


def transfer_warnings(spec: Spec, plan: Plan) -> Iterator[Item]:
    """Yield a strategy of the weight transfer where nothing is transferred."""
    requested = spec.placement.weight_transfer
    if requested in ("auto", "shared"):
        return
    learners = plan.hosting("learner")
    if spec.runtime.backend == "local" or all(index in learners for index in plan.hosting("policy")):
        text = f"{requested} has no effect: every policy is in a learner's worker and shares its weights; leave it out"
        yield ("placement", "weight_transfer"), text


def precision_warnings(spec: Spec, plan: Plan) -> Iterator[Item]:
    """Yield bfloat16 where a CPU computes gradients: torch 2.13 adds up some of them in bfloat16 there."""
    if not any(plan.slots[index].device == "cpu" for index in plan.hosting("learner")):
        return
    text = (
        "on a CPU, torch adds up the gradients of LayerNorms, and of embeddings with bfloat16 weights, in bfloat16: "
        "with more than some 256 rows in a micro-batch they are too small; use float32 there"
    )
    if spec.train.precision == "bf16":
        yield ("train", "precision"), text
    elif getattr(spec.model.config, "dtype", "") == "bfloat16":
        yield ("model", "dtype"), text


def _modules_warnings(spec: Spec) -> Iterator[Item]:
    for i, (name, module) in enumerate(hook_modules(spec.plugins)):
        hooks = any(isinstance(x, FunctionType) and hasattr(x, "vla_rl_impl") for x in vars(module).values())
        if not hooks and not getattr(module, MODULE_PLUGINS, None):
            text = (
                f"module {name!r} is imported, and nothing of it takes part: it has neither `{MODULE_PLUGINS}` nor a "
                f"function with @hookimpl"
            )
            yield ("plugins", i), text


def _runtime_warnings(spec: Spec) -> Iterator[Item]:
    runtime = spec.runtime
    if spec.rollout.compile is not None and has_own_policy(spec):
        yield ("rollout", "compile"), f"has no effect: engine {spec.rollout.engine.type!r} acts with its own policy"
    if runtime.backend != "local":
        return
    defaults = {"address": None, "deadline_s": 600.0, "restarts": 3}
    for key, default in defaults.items():
        if getattr(runtime, key) not in (default, 0):
            yield ("runtime", key), "has no effect with backend: local, where everything is in this process"


def _person_warnings(spec: Spec) -> Iterator[Item]:
    rewards = spec.rewards
    default = fields_dict(RewardsSpec)["threshold"].default
    if rewards is not None and isinstance(rewards.config, PanelSettings) and rewards.threshold != default:
        text = f"has no effect: {rewards.type!r} answers yes or no, and gives no probability between; leave it out"
        yield ("rewards", "threshold"), text


def _discount_warnings(path: tuple[str, ...], part: Component, times: int) -> Iterator[Item]:
    """Yield a discount after which nothing counts. `times`: how often it is applied until what comes next."""
    discount = getattr(part.config, path[-1], 1.0)
    if isinstance(discount, float) and discount**times < NO_DISCOUNT:
        text = (
            f"what comes next counts {discount**times:.2g} times its value, which is nothing: later rewards are not "
            f"learnt from; 0.99 is usual"
        )
        yield path, text


def _schedule_warnings(section: str, schedule: RateSchedule) -> Iterator[Item]:
    warmup, steps = schedule.lr_warmup_steps, schedule.steps
    if steps and warmup >= steps:
        text = (
            f"learning rates rise over {warmup} steps, and there are {steps}: they end at {schedule.factor(steps):.2g} "
            f"times their values; give fewer than {steps}"
        )
        yield (section, "lr_warmup_steps"), text


def _steps_warnings(spec: Spec) -> Iterator[Item]:
    """Yield numbers of training steps that exceed those of the run."""
    steps, train, asynchrony = spec.train.steps, spec.train, spec.asynchrony
    if train.critic_warmup_steps >= steps:
        text = f"all {steps} steps train the critic alone, and the policy stays as it is; give fewer than {steps}"
        yield ("train", "critic_warmup_steps"), text
    if asynchrony.max_lag >= steps > 0:
        text = f"rollouts run ahead of {steps} steps by {steps - 1} at most; more than that has no effect"
        yield ("asynchrony", "max_lag"), text
    if spec.rollout.lag >= steps:
        text = f"the weights that the run begins with act in all its {steps} steps; give fewer than {steps}"
        yield ("rollout", "lag"), text
    if asynchrony.replay is not None and asynchrony.replay.uses > steps:
        text = f"nothing is trained on more than once in each of {steps} steps; more uses than that have no effect"
        yield ("asynchrony", "replay", "uses"), text


def _ticket_step_limit(spec: Spec) -> int | None:
    """Return the most environment steps of a ticket; None: only the simulator knows."""
    env_limit = getattr(spec.env.config, "max_steps", None)
    return spec.rollout.steps or spec.rollout.max_steps or (env_limit if isinstance(env_limit, int) else None)


def _rollout_warnings(spec: Spec) -> Iterator[Item]:
    rollout, limit = spec.rollout, _ticket_step_limit(spec)
    if limit is not None and rollout.chunk > limit:
        text = f"{rollout.chunk} actions are chosen at once, and an episode ends after {limit}: the rest is never done"
        yield ("rollout", "chunk"), text


def _samples_warnings(spec: Spec) -> Iterator[Item]:
    limit, global_batch = _ticket_step_limit(spec), spec.train.global_batch
    if limit is None or global_batch is None:
        return
    shape = RunShape.from_spec(spec)
    tickets = (shape.groups_per_step + shape.added_groups) * shape.group_size
    chunks = -(-limit // shape.chunk)
    samples = tickets * chunks * shape.uses
    if global_batch > samples:
        text = (
            f"an optimiser step takes {global_batch} samples, and a training step has {samples} at most ({tickets} "
            f"trajectories of {chunks} chunks): it is one optimiser step an epoch, as without global_batch"
        )
        yield ("train", "global_batch"), text


def _algorithm_warnings(spec: Spec) -> Iterator[Item]:
    config, asynchrony = spec.algorithm.config, spec.asynchrony
    if isinstance(config, CriticSettings) and not config.value_coef:
        text = (
            "the critic is never trained, and advantages are those of the values that it begins with; give more than 0"
        )
        yield ("algorithm", "value_coef"), text
    bounds = config.filter if isinstance(config, GroupSettings) else None
    if bounds is not None and bounds.lower == 0 and bounds.upper == 1:
        yield ("algorithm", "filter"), "0 to 1 keeps every group; remove it, or give narrower bounds"
    old = asynchrony.max_lag or spec.rollout.lag or asynchrony.replay is not None
    if isinstance(config, CorrectionSettings) and config.correction is not None and not old:
        text = (
            "nothing that is trained on is old (asynchrony.max_lag: 0, rollout.lag: 0, no replay), and so nothing is "
            "corrected; set one of these, or correction: null"
        )
        yield ("algorithm", "correction"), text


def _transition_warnings(spec: Spec) -> Iterator[Item]:
    if not trains_on_transitions(spec):
        return
    train = spec.train
    for key in ("epochs", "global_batch", "mini_batches"):
        if getattr(train, key) != fields_dict(TrainSpec)[key].default:
            text = f"has no effect: trainer {spec.trainer.type!r} draws its own batches (trainer.batch); leave it out"
            yield ("train", key), text
    if train.max_skipped != fields_dict(TrainSpec)["max_skipped"].default:
        text = f"has no effect: trainer {spec.trainer.type!r} skips no step, as no filter drops samples; leave it out"
        yield ("train", "max_skipped"), text
    config = spec.trainer.config
    if isinstance(config, DemonstrationSettings) and config.demonstrations is not None:
        batch, share_given = getattr(config, "batch", 0), config.demonstrations.share
        if not round(share_given * batch):
            least = math.floor(0.5 / share_given) + 1
            share = f"{share_given:g} of a batch of {batch}"
            text = f"has no effect: {share} is not one sample; give trainer.batch: {least}, or more"
            yield ("trainer", "demonstrations", "share"), text
    yield from _early_transition_warnings(spec)


def _early_transition_warnings(spec: Spec) -> Iterator[Item]:
    """Yield numbers of transitions and updates that the run does not reach."""
    limit = _ticket_step_limit(spec)
    if limit is None:
        return
    shape, steps, config = RunShape.from_spec(spec), spec.train.steps, spec.trainer.config
    transitions = steps * shape.groups_per_step * shape.group_size * -(-limit // shape.chunk)
    min_data = getattr(config, "min_data", 0)
    critic_updates = getattr(config, "critic_updates", 0)
    interval = getattr(config, "actor_interval", 1)
    if min_data > transitions:
        text = (
            f"nothing is trained before this many transitions, and {steps} steps (train.steps) collect {transitions} "
            f"at most; give fewer, or raise train.steps"
        )
        yield ("trainer", "min_data"), text
    elif critic_updates >= (updates := int(transitions * getattr(config, "updates_per_step", 1))):
        text = (
            f"this many updates train the critics alone, and {steps} steps (train.steps) make {updates} at most: the "
            f"policy stays as it is; give fewer, or raise train.steps"
        )
        yield ("trainer", "critic_updates"), text
    elif updates // interval <= critic_updates // interval:
        text = (
            f"the policy is trained in every {interval}th update, and {steps} steps (train.steps) make {updates} at "
            f"most: it stays as it is; give fewer, or raise train.steps"
        )
        yield ("trainer", "actor_interval"), text


def _imagination_warnings(spec: Spec) -> Iterator[Item]:
    section = spec.imagination
    if section is None:
        return
    if section.warm_start >= spec.train.steps:
        text = f"none of the {spec.train.steps} steps has imagined trajectories; give fewer than {spec.train.steps}"
        yield ("imagination", "warm_start"), text
