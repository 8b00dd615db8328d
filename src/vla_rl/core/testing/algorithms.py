"""`check_algorithm`: does an algorithm keep to the contract of `Algorithm`?"""

from __future__ import annotations

import copy
import math
from typing import Any

import attrs
import numpy as np
import torch
from attrs import frozen

from vla_rl.core.hookspecs import Algorithm
from vla_rl.core.runtime.assemble import take_columns
from vla_rl.core.statistics import read_all
from vla_rl.core.testing import synthetic
from vla_rl.core.testing.findings import Findings, built
from vla_rl.core.types import Advantages, Batch, Context, Loss, Plugin, Rollout, Scores, ValueGranularity

NEEDS = {"values", "fresh-values", "groups", "reference", "frames"}


@frozen(eq=False)
class _Case:
    algorithm: Algorithm
    f: Findings
    values: ValueGranularity
    features: int


def check_algorithm(algorithm: Algorithm | Plugin, config: Any = None, *, features: int = 0) -> None:
    """Run an algorithm on made-up rollouts with ragged ends. Raises CheckFailed with all findings.

    Advantages, weights and the loss must be finite, zero where an action is not valid, and a batch must give the same
    total and gradient in one piece as in micro-batches. `config`: of the plugin, when a `Plugin` is given.
    `features`: D of `Rollout.features`, for algorithms that use them without making them of frames.
    """
    chosen: Algorithm
    chosen, name = built("algorithm", algorithm, config, Context())
    f = Findings(f"check_algorithm of {name}")
    unknown = sorted(set(chosen.needs) - NEEDS)
    f.expect(not unknown, "needs", f"some of {sorted(NEEDS)}", unknown, "correct the name")
    granularity = chosen.value_granularity
    f.expect(granularity in ("chunk", "action"), "value_granularity", "chunk or action", repr(granularity), "choose")
    values: ValueGranularity = "none"
    if "values" in chosen.needs:
        values = "action" if granularity == "action" else "chunk"
    if "frames" in chosen.needs:
        features = _check_features(f, chosen)
    case = _Case(chosen, f, values, features)
    kinds: dict[str, dict[str, Any]] = {
        "a rollout": {},
        "a rollout without success": {"successes": False},
        "a rollout of one chunk step": {"chunk_steps": 1, "chunk": 1, "tokens": 1},
    }
    for kind, options in kinds.items():
        with f.section(kind):
            _whole_path(case, kind, synthetic.rollout(values=values, features=features, **options))
    f.close()


def _check_features(f: Findings, algorithm: Algorithm) -> int:
    """-> D of the algorithm's features."""
    lengths = (5, 0, 1, 70)
    frames = tuple(synthetic.observation(synthetic.env_info(1), n).images["camera0"] for n in lengths)
    with f.section("features"):
        features: Any = algorithm.features(frames)
        found = f"{str(features.dtype).removeprefix('torch.')} {list(features.shape)}"
        fine = features.ndim == 2 and found.startswith(f"float32 [{len(lengths)},") and bool(features.isfinite().all())
        wanted = f"finite float32 [{len(lengths)}, D] for trajectories of {lengths} frames"
        if f.expect(fine, "features", wanted, found, "one vector a trajectory"):
            return int(features.shape[1])
    return 0


def _whole_path(case: _Case, name: str, rollout: Rollout) -> None:
    kept = copy.deepcopy(rollout)
    shaped = case.algorithm.shape_rewards(rollout)
    _untouched(case, rollout, kept, "shape_rewards")
    _tensor(case, shaped.rewards, tuple(rollout.rewards.shape), "shape_rewards: rewards")
    paid = bool((shaped.rewards[~shaped.valid] == 0).all())
    case.f.expect(paid, "shape_rewards", "0 where not valid", "others", "multiply by valid")
    selected = case.algorithm.select(shaped)
    columns = shaped.valid.shape[1]
    found = f"{str(selected.dtype).removeprefix('torch.')} {list(selected.shape)}"
    wanted = f"bool [{columns}]"
    if not case.f.expect(found == wanted, "select", wanted, found, "one decision for each trajectory"):
        return
    trained = shaped if not bool(selected.any()) else take_columns(shaped, np.flatnonzero(selected.numpy()))
    kept = copy.deepcopy(trained)
    advantages = case.algorithm.advantages(trained)
    _untouched(case, trained, kept, "advantages")
    if _check_advantages(case, advantages, trained):
        _check_loss(case, name, trained, advantages)


def _untouched(case: _Case, rollout: Rollout, kept: Rollout, where: str) -> None:
    for field in attrs.fields(Rollout):
        now, before = getattr(rollout, field.name), getattr(kept, field.name)
        if isinstance(before, torch.Tensor):
            same = torch.equal(now, before)
            case.f.expect(same, where, f"`{field.name}` of its argument unchanged", "written into", "work on a copy")


def _tensor(case: _Case, tensor: Any, shape: tuple[int, ...], where: str) -> bool:
    found = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    if not case.f.expect(found == f"float32 {list(shape)}", where, f"float32 {list(shape)}", found, "reshape it"):
        return False
    finite = bool(torch.isfinite(tensor).all())
    return case.f.expect(finite, where, "finite numbers", "NaN or inf", "guard divisions by what can be 0")


def _check_advantages(case: _Case, advantages: Advantages, rollout: Rollout) -> bool:
    f, fine = case.f, True
    shapes = {2: tuple(rollout.samples.shape), 3: tuple(rollout.valid.shape)}
    masks = {2: rollout.samples, 3: rollout.valid}
    for name in ("advantages", "weights", "counts"):
        tensor, where = getattr(advantages, name), f"advantages: {name}"
        if tensor is None and name == "counts":
            continue
        if not f.expect(tensor.ndim in shapes, where, "[T, N] or [T, N, C]", list(tensor.shape), "reshape it"):
            return False
        fine &= _tensor(case, tensor, shapes[tensor.ndim], where)
        if fine:
            silent = bool((tensor[~masks[tensor.ndim]] == 0).all())
            f.expect(silent, where, "0 where not valid", "others", "multiply by valid")
        f.expect(not tensor.requires_grad, where, "no gradient", "a graph", "compute it under torch.no_grad()")
    weights = advantages.weights
    f.expect(bool((weights >= 0).all()), "advantages: weights", ">= 0", "negative ones", "the sign is the advantage's")
    f.expect(bool((weights > 0).any()), "advantages: weights", "some above 0", "none", "nothing would be learned")
    if case.values == "none":
        return fine
    shape = tuple(rollout.values.shape) if rollout.values is not None else ()
    for name in ("returns", "value_weights", "value_counts"):
        tensor, where = getattr(advantages, name), f"advantages: {name}"
        if tensor is None and name == "value_counts":
            continue
        if f.expect(tensor is not None, where, f"{list(shape)}, as it needs values", "None", "the critic's target"):
            fine &= _tensor(case, tensor, shape, where)
        else:
            fine = False
    if fine and advantages.value_weights is not None:
        silent = bool((advantages.value_weights[~masks[len(shape)]] == 0).all())
        f.expect(silent, "advantages: value_weights", "0 where not valid", "others", "multiply by valid")
    return fine


def _scores(batch: Batch) -> tuple[Scores, list[torch.Tensor]]:
    """Scores near the recorded ones, as leaves whose gradient can be read."""
    draws = torch.Generator().manual_seed(1)
    log_probs = batch.log_probs + 0.3 * torch.randn(batch.log_probs.shape, generator=draws)
    leaves = [log_probs, torch.rand(log_probs.shape, generator=draws)]
    if batch.values is not None:
        leaves.append(batch.values + 0.3 * torch.randn(batch.values.shape, generator=draws))
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    return Scores(
        log_probs=leaves[0], entropy=leaves[1], values=leaves[2] if batch.values is not None else None
    ), leaves


def _part(batch: Batch, scores: Scores, rows: torch.Tensor) -> tuple[Scores, Batch]:
    def taken(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value[rows]
        return value

    changes = {a.name: taken(getattr(batch, a.name)) for a in attrs.fields(Batch) if a.name not in ("obs", "chunk")}
    chunk = attrs.evolve(batch.chunk, **{n: taken(getattr(batch.chunk, n)) for n in ("actions", "log_probs", "values")})
    said = Scores(log_probs=scores.log_probs[rows], entropy=scores.entropy[rows], values=taken(scores.values))
    return said, attrs.evolve(batch, obs=batch.obs.take(rows.numpy()), chunk=chunk, **changes)


def _run(case: _Case, batch: Batch, pieces: int) -> tuple[list[Loss], list[torch.Tensor]]:
    scores, leaves = _scores(batch)
    rows = torch.arange(len(batch.valid))
    losses = [case.algorithm.loss(*_part(batch, scores, piece)) for piece in rows.tensor_split(pieces)]
    total = torch.stack([loss.total for loss in losses]).sum()
    total.backward()
    return losses, [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]


def _check_loss(case: _Case, name: str, rollout: Rollout, advantages: Advantages) -> None:
    f, where = case.f, f"loss of {name}"
    batch = synthetic.batch(rollout, advantages, reference="reference" in case.algorithm.needs)
    (whole,), gradients = _run(case, batch, 1)
    f.expect(whole.total.ndim == 0, where, "a scalar total", list(whole.total.shape), "sum it up")
    f.expect(bool(torch.isfinite(whole.total)), where, "a finite total", whole.total, "clamp log-ratios")
    finite = all(bool(torch.isfinite(gradient).all()) for gradient in gradients)
    f.expect(finite, where, "a finite gradient", "NaN or inf", "mind 0 * inf: use torch.where before, not after")
    silent = all(bool((gradient[~batch.valid] == 0).all()) for gradient in gradients[:2])
    f.expect(silent, where, "no gradient from actions that are not valid", "some", "multiply by weights")
    if bool((advantages.advantages != 0).any()):
        learns = bool((gradients[0] != 0).any())
        f.expect(learns, where, "a gradient in log_probs", "none", "let the ratio depend on scores.log_probs")
    if case.values != "none":
        learns = bool((gradients[-1] != 0).any())
        f.expect(learns, where, "a gradient in values", "none", "add a value loss")
    f.expect("loss/policy" in whole.metrics, where, "metric 'loss/policy'", sorted(whole.metrics), "names are shared")
    parts, split = _run(case, batch, min(3, len(batch.valid)))
    remedy = "divide by nothing that depends on the micro-batch: weights carry the normalisation"
    total = torch.stack([part.total.detach() for part in parts]).sum()
    gap = float((total - whole.total.detach()).abs())
    f.expect(gap < 1e-5, where, f"the total {whole.total:.5f} from micro-batches", f"{total:.5f}", remedy)
    gap = max(float((a - b).abs().max()) for a, b in zip(gradients, split, strict=True))
    f.expect(gap < 1e-5, where, "the same gradient from micro-batches", f"a difference of {gap:.2g}", remedy)
    for key, value in whole.metrics.items():
        summed = float(sum(float(part.metrics[key]) for part in parts))
        same = abs(summed - float(value)) <= 1e-4 * max(1.0, abs(float(value)))
        f.expect(same, f"{where}: metric {key!r}", f"{float(value):.4g} from micro-batches", f"{summed:.4g}", remedy)
    together, apart = read_all([whole.statistics]), read_all([part.statistics for part in parts])
    remedy = "let a statistic hold nothing but sums, which can be added"
    for key, number in together.items():
        f.expect(math.isfinite(number), f"{where}: metric {key!r}", "a finite number", number, "mask before, not after")
        same = key in apart and math.isclose(apart[key], number, rel_tol=1e-4, abs_tol=1e-6)
        f.expect(same, f"{where}: metric {key!r}", f"{number:.4g} from micro-batches", apart.get(key), remedy)
