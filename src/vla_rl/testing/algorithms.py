"""`check_algorithm`: does an algorithm keep to the contract of `Algorithm`?"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import attrs
import numpy as np
import torch

from vla_rl.core.contexts import AlgorithmContext
from vla_rl.core.declarations import AlgorithmPlugin
from vla_rl.core.hookspecs import Algorithm
from vla_rl.core.run.selection import take_columns
from vla_rl.core.types import Advantages, Batch, Rollout, ValueGranularity, to_numpy
from vla_rl.testing import synthetic
from vla_rl.testing.advantages import TENSORS, AdvantageCase, check_advantages, same_tensor
from vla_rl.testing.common.findings import Findings, build_component, check_array
from vla_rl.testing.losses import LossCase, check_behaviour, check_free_names, check_shape, check_untouched
from vla_rl.toolkit.algorithms.declarations import wrong_declarations

OLDEST = 8
"""Largest age of samples, in versions."""


def check_algorithm(
    algorithm: Algorithm | AlgorithmPlugin,
    config: Any = None,
    *,
    features: int = 0,
    extras: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Run an algorithm on made-up rollouts with ragged ends. Raises CheckFailed with all findings.

    Advantages, weights and the loss must be finite, zero where an action is not valid, and a batch must give the same
    total and gradient in one piece as in micro-batches. Advantages rise with the rewards, at the right steps, and
    follow from the rollout alone (`advantages.py`); the loss makes likelier what had a positive advantage, each sample
    by its weight, with a gradient in every log-prob where a step has not gone too far yet (`losses.py`); old data count
    as `off_policy` says; metrics have names that are free (`toolkit/algorithms/result_checks.py`).
    `config`: of the plugin, when an `AlgorithmPlugin` is given.
    `features`: D of `Rollout.features`, for algorithms that use them without making them of frames.
    `extras`: numbers of a simulator or a model that the algorithm reads, as `EnvInfo.extras` declares them.
    """
    chosen: Algorithm
    chosen, name = build_component("algorithm", algorithm, config, AlgorithmContext())
    f = Findings(f"check_algorithm of {name}")
    declaration_errors = wrong_declarations(chosen)
    for error in declaration_errors:
        f.expect(False, error.attribute, error.expected, error.got, error.remedy)
    if declaration_errors:
        f.close()
    granularity = chosen.value_granularity
    f.expect(granularity in ("chunk", "action"), "value_granularity", "chunk or action", repr(granularity), "choose")
    values: ValueGranularity = "none"
    if chosen.needs.values:
        values = "action" if granularity == "action" else "chunk"
    if chosen.needs.frames:
        features = _check_features(f, chosen)
    case = AdvantageCase(chosen, f, values, features, extras)
    kinds: dict[str, dict[str, Any]] = {
        "a rollout": {},
        "a rollout without success": {"successes": False},
        "a rollout of one chunk step": {"chunk_steps": 1, "chunk": 1, "tokens": 1},
    }
    if not chosen.needs.groups:
        kinds["a rollout of one trajectory"] = {"groups": 1, "group_size": 1}
    loss_cases: list[LossCase | None] = []
    for kind, options in kinds.items():
        with f.section(kind):
            proximal = chosen.needs.proximal_log_probs
            rollout = synthetic.rollout(values=values, features=features, proximal=proximal, extras=extras, **options)
            loss_cases.append(_whole_path(case, kind, rollout))
    if loss_cases and loss_cases[0] is not None:
        check_advantages(case)
        check_behaviour(loss_cases[0])
        with f.section("old data"):
            _check_old_data(case, loss_cases[0])
    f.close()


def _check_old_data(advantages: AdvantageCase, loss: LossCase) -> None:
    """Check that `off_policy` and `needs` agree with how the algorithm uses old data."""
    algorithm, f = loss.algorithm, loss.f
    by_lag = _matters_by_lag(advantages, loss)
    by_age = by_lag or _log_probs_matter(advantages, loss, "log_probs")
    remedy = "keep them, or weigh them and say off_policy = True"
    what = "older samples that count as new ones do"
    f.expect(algorithm.off_policy or not by_lag, "off_policy", what, "other weights", remedy)
    dropped = _dropped_by_lag(advantages, loss)
    f.expect(not dropped, "off_policy", "samples of the last version that still count", f"none in {dropped}", remedy)
    if algorithm.off_policy:
        remedy = (
            "weigh by exp(log_ratio) to batch.log_probs, by proximal_log_probs or by lag; or leave off_policy False"
        )
        f.expect(by_age, "off_policy", "old data that count otherwise than new ones", "the same loss", remedy)
    if not algorithm.needs.proximal_log_probs:
        return
    used = _log_probs_matter(advantages, loss, "proximal_log_probs")
    f.expect(used, "needs", "a use of proximal_log_probs, as it asks for them", "none", "leave it out of needs")
    declared = algorithm.off_policy or not (used and by_age)
    remedy = "say so, or the runtime refuses to train on data more than once"
    f.expect(declared, "off_policy", "True where proximal and recorded log_probs are compared", "False", remedy)


def _log_probs_matter(advantages: AdvantageCase, loss: LossCase, name: str) -> bool:
    """Return whether the named log-probs of a rollout and its batches change the advantages or the loss."""
    rollout, batch = advantages.make_rollout(), loss.batch
    moved: dict[str, Any] = {name: getattr(rollout, name) + _draw_drift(getattr(rollout, name))}
    changed = attrs.evolve(batch, **{name: getattr(batch, name) + _draw_drift(getattr(batch, name))})
    return _results_differ(advantages, loss, (rollout, rollout.evolve(**moved)), changed)


def _matters_by_lag(advantages: AdvantageCase, loss: LossCase) -> bool:
    """Return whether the ages of samples change which trajectories count, their advantages or the loss."""
    rollout = advantages.make_rollout().evolve(step=OLDEST + 1)
    ages = torch.arange(rollout.versions.numel()).reshape(rollout.versions.shape) % OLDEST
    new, old = (rollout.evolve(versions=versions) for versions in (torch.full_like(ages, OLDEST), OLDEST - 1 - ages))
    older = attrs.evolve(loss.batch, lag=loss.batch.lag + 1 + torch.arange(len(loss.batch.lag)) % OLDEST)
    chosen = [advantages.algorithm.select(part) for part in (new, old)]
    return not torch.equal(*chosen) or _results_differ(advantages, loss, (new, old), older)


def _results_differ(advantages: AdvantageCase, loss: LossCase, rollouts: tuple[Rollout, Rollout], batch: Batch) -> bool:
    """Return whether the advantages of two rollouts differ, or a batch's gradients from those of the case's."""
    one, other = map(advantages.compute_advantages, rollouts)
    if any(not same_tensor(getattr(one, part), getattr(other, part)) for part in TENSORS):
        return True
    return not all(map(torch.equal, loss.loss_and_gradients()[1], loss.loss_and_gradients(batch)[1]))


def _dropped_by_lag(advantages: AdvantageCase, loss: LossCase) -> list[str]:
    """Return where samples that are one version old have no weight, though new ones have."""
    rollout = advantages.make_rollout().evolve(step=OLDEST + 1)
    new, old = (rollout.evolve(versions=torch.full_like(rollout.versions, OLDEST - age)) for age in (0, 1))
    batch, leaves = loss.one_policy_batch, loss.at_the_old_policy
    older = attrs.evolve(batch, lag=torch.ones_like(batch.lag))
    counted = {
        "select": [advantages.algorithm.select(part) for part in (new, old)],
        "advantages: weights": [advantages.compute_advantages(part).weights for part in (new, old)],
        "loss": [loss.loss_and_gradients(part, leaves)[1][0] for part in (batch, older)],
    }
    return [where for where, (first, then) in counted.items() if bool(((first != 0) & (then == 0)).any())]


def _draw_drift(tensor: torch.Tensor) -> torch.Tensor:
    return 0.3 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(4))


def _check_features(f: Findings, algorithm: Algorithm) -> int:
    """Check the algorithm's features. Return their size D."""
    lengths = (5, 0, 1, 70)
    frames = tuple(to_numpy(synthetic.observation(synthetic.env_info(1), n).images["camera0"]) for n in lengths)
    with f.section("features"):
        features: Any = algorithm.features(frames)
        got = f"{str(features.dtype).removeprefix('torch.')} {list(features.shape)}"
        holds = features.ndim == 2 and got.startswith(f"float32 [{len(lengths)},") and bool(features.isfinite().all())
        expected = f"finite float32 [{len(lengths)}, D] for trajectories of {lengths} frames"
        if f.expect(holds, "features", expected, got, "one vector a trajectory"):
            again = algorithm.features(frames)
            same = again is not None and torch.equal(features, again)
            f.expect(same, "features", "the same for the same frames", "others the second time", "no random numbers")
            differ = not torch.equal(features[0], features[3])
            f.expect(differ, "features", "others for other frames", "the same", "look at the frames")
            return int(features.shape[1])
    return 0


def _whole_path(case: AdvantageCase, name: str, rollout: Rollout) -> LossCase | None:
    """Run shaping, selection and advantages. Return the batch of the loss, or None if a result has the wrong shape."""
    original = copy.deepcopy(rollout)
    shaped = case.algorithm.shape_rewards(rollout)
    check_untouched(case.f, "shape_rewards", rollout, original)
    _check_tensor(case, shaped.rewards, tuple(rollout.rewards.shape), "shape_rewards: rewards")
    masked = bool((shaped.rewards[~shaped.valid] == 0).all())
    case.f.expect(masked, "shape_rewards", "0 where not valid", "others", "multiply by valid")
    selected = case.algorithm.select(shaped)
    remedy = "one decision for each trajectory"
    if not check_array(case.f, selected, shaped.valid.shape[1:2], "bool", "select", remedy):
        return None
    trained = shaped if not bool(selected.any()) else take_columns(shaped, np.flatnonzero(selected.numpy()))
    original = copy.deepcopy(trained)
    advantages = case.algorithm.advantages(trained)
    check_untouched(case.f, "advantages", trained, original)
    if not _check_shapes(case, advantages, trained):
        return None
    batch = synthetic.batch(trained, advantages, reference=case.algorithm.needs.reference)
    signed = bool((advantages.advantages < 0).any())
    of_loss = LossCase(case.algorithm, case.f, f"loss of {name}", batch, signed)
    return of_loss if check_shape(of_loss) else None


def _check_tensor(case: AdvantageCase, tensor: Any, shape: tuple[int, ...], where: str) -> bool:
    if not check_array(case.f, tensor, shape, "float32", where):
        return False
    finite = bool(torch.isfinite(tensor).all())
    return case.f.expect(finite, where, "finite numbers", "NaN or inf", "guard divisions by what can be 0")


def _check_shapes(case: AdvantageCase, advantages: Advantages, rollout: Rollout) -> bool:
    f, valid = case.f, True
    shapes = {2: tuple(rollout.samples.shape), 3: tuple(rollout.valid.shape)}
    masks = {2: rollout.samples, 3: rollout.valid}
    for name in ("advantages", "weights", "counts"):
        tensor, where = getattr(advantages, name), f"advantages: {name}"
        if tensor is None and name == "counts":
            continue
        if not f.expect(tensor.ndim in shapes, where, "[T, N] or [T, N, C]", list(tensor.shape), "reshape it"):
            return False
        valid &= _check_tensor(case, tensor, shapes[tensor.ndim], where)
        if valid:
            silent = bool((tensor[~masks[tensor.ndim]] == 0).all())
            f.expect(silent, where, "0 where not valid", "others", "multiply by valid")
        f.expect(not tensor.requires_grad, where, "no gradient", "a graph", "compute it under torch.no_grad()")
    check_free_names(f, "advantages", advantages.metrics)
    broken = [name for name, number in advantages.metrics.items() if not math.isfinite(number)]
    f.expect(not broken, "advantages: metrics", "finite numbers", f"others in {broken}", "guard divisions")
    weights = advantages.weights
    f.expect(bool((weights >= 0).all()), "advantages: weights", ">= 0", "negative ones", "the sign is the advantage's")
    f.expect(bool((weights > 0).any()), "advantages: weights", "some above 0", "none", "nothing would be learned")
    if case.values == "none":
        return valid
    shape = tuple(rollout.values.shape) if rollout.values is not None else ()
    for name in ("returns", "value_weights", "value_counts"):
        tensor, where = getattr(advantages, name), f"advantages: {name}"
        if tensor is None and name == "value_counts":
            continue
        if f.expect(tensor is not None, where, f"{list(shape)}, as it needs values", "None", "the critic's target"):
            valid &= _check_tensor(case, tensor, shape, where)
        else:
            valid = False
    if valid and advantages.value_weights is not None:
        silent = bool((advantages.value_weights[~masks[len(shape)]] == 0).all())
        f.expect(silent, "advantages: value_weights", "0 where not valid", "others", "multiply by valid")
    return valid
