"""Checks of a loss by `check_algorithm`, which changes a batch: weights, directions, splits and extremes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import torch
from attrs import field, frozen
from torch import Tensor

from vla_rl.core.hookspecs import Algorithm
from vla_rl.core.types import Batch, Loss, Scores
from vla_rl.testing.common.findings import Findings
from vla_rl.toolkit.algorithms.result_checks import DEMANDED, RESERVED_NAMES, find_reserved
from vla_rl.toolkit.algorithms.statistics import read_all

EXACT = 1e-5
SPLIT = "divide by nothing that depends on the micro-batch: weights carry the normalisation"
EXTREME = 20.0
"""Log-ratio of a whole chunk, whose exponential is 5e8. That of 100 is infinite in float32: where it is not clamped, as
in the textbook's PPO, so is the loss, and no policy gets there."""
RATIOS = (0.5, 1.0, 2.0)
CLIP = "clip only what went too far already: -min(r A, clip(r, 1 - low, 1 + high) A), with the ratio r = exp(log_ratio)"


@frozen(eq=False)
class LossCase:
    algorithm: Algorithm
    f: Findings
    where: str
    batch: Batch
    signed: bool
    """Some advantages are below 0, so that the loss has to look at their sign."""
    leaves: tuple[Tensor, ...] = field(init=False)
    """Log-probs, entropies and, with a critic, values near the recorded ones."""

    def __attrs_post_init__(self) -> None:
        batch, draws = self.batch, torch.Generator().manual_seed(1)
        log_probs = batch.log_probs + 0.3 * torch.randn(batch.log_probs.shape, generator=draws)
        leaves = [log_probs, torch.rand(log_probs.shape, generator=draws)]
        if batch.values is not None:
            leaves.append(batch.values + 0.3 * torch.randn(batch.values.shape, generator=draws))
        object.__setattr__(self, "leaves", tuple(leaves))

    @property
    def one_policy_batch(self) -> Batch:
        """The batch with one old policy: the behaviour policy is the proximal one."""
        batch = self.batch
        return batch if batch.proximal_log_probs is None else attrs.evolve(batch, log_probs=batch.proximal_log_probs)

    @property
    def at_the_old_policy(self) -> tuple[Tensor, ...]:
        batch = self.batch
        log_probs = batch.log_probs if batch.proximal_log_probs is None else batch.proximal_log_probs
        old = (log_probs, self.leaves[1], batch.values)
        return tuple(tensor for tensor in old if tensor is not None)

    def loss_and_gradients(
        self, batch: Batch | None = None, leaves: Sequence[Tensor] | None = None, rows: Tensor | None = None
    ) -> tuple[Loss, list[Tensor]]:
        """Return the loss of these rows, and its gradients in all leaves."""
        batch = self.batch if batch is None else batch
        variables = [leaf.clone().requires_grad_() for leaf in (self.leaves if leaves is None else leaves)]
        values = variables[2] if len(variables) > 2 else None
        scores = Scores(log_probs=variables[0], entropy=variables[1], values=values)
        if rows is not None:
            scores, batch = scores.take(rows.numpy()), batch.take(rows.numpy())
        loss = self.algorithm.loss(scores, batch)
        if loss.total.requires_grad:
            loss.total.backward()
        return loss, [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in variables]

    def policy_gradient(self, batch: Batch, leaves: Sequence[Tensor] | None = None) -> Tensor:
        """Return the gradient in log_probs; by default, of those of the old policy."""
        return self.loss_and_gradients(batch, self.at_the_old_policy if leaves is None else leaves)[1][0]

    def expect(self, holds: bool | Tensor, expected: object, got: object, remedy: str) -> bool:
        return self.f.expect(bool(holds), self.where, expected, got, remedy)


def check_shape(case: LossCase) -> bool:
    """Check the properties that every batch must have. Return whether there is a loss to check further."""
    original = copy.deepcopy(case.batch)
    full_loss, gradients = case.loss_and_gradients()
    check_untouched(case.f, case.where, case.batch, original)
    full_loss = attrs.evolve(full_loss, total=full_loss.total.detach())
    if not case.expect(full_loss.total.ndim == 0, "a scalar total", list(full_loss.total.shape), "sum it up"):
        return False
    case.expect(torch.isfinite(full_loss.total), "a finite total", full_loss.total, "clamp log-ratios")
    finite = all(bool(torch.isfinite(gradient).all()) for gradient in gradients)
    case.expect(finite, "a finite gradient", "NaN or inf", "mind 0 * inf: use torch.where before, not after")
    silent = all(bool((gradient[~case.batch.valid] == 0).all()) for gradient in gradients[:2])
    case.expect(silent, "no gradient from actions that are not valid", "some", "multiply by weights")
    if bool((case.batch.advantages != 0).any()):
        learns = (gradients[0] != 0).any()
        case.expect(learns, "a gradient in log_probs", "none", "let the ratio depend on scores.log_probs")
    if case.batch.values is not None:
        case.expect((gradients[-1] != 0).any(), "a gradient in values", "none", "add a value loss")
    _check_names(case, full_loss)
    _check_split(case, full_loss, gradients)
    return True


def check_untouched(f: Findings, where: str, argument: Any, original: Any) -> None:
    """Check that the tensors of a batch or a rollout are those of its copy."""
    for a in attrs.fields(type(original)):
        now, before = getattr(argument, a.name), getattr(original, a.name)
        if isinstance(before, Tensor):
            expected = f"`{a.name}` of its argument unchanged"
            f.expect(torch.equal(now, before), where, expected, "written into", "work on a copy")


def check_free_names(f: Findings, where: str, names: Iterable[str]) -> None:
    """Check that metrics have no names that the runtime writes itself."""
    reserved, remedy = find_reserved(names), f"{RESERVED_NAMES}: leave them out, or rename them"
    f.expect(not reserved, where, "metrics of names that are free", reserved, remedy)


def check_behaviour(case: LossCase) -> None:
    """Check how a loss responds when one thing in a batch changes."""
    checks: list[Callable[[LossCase], None]] = [
        _same_loss_twice,
        _weights_of_samples,
        _signs_of_advantages,
        _ratios_and_clips,
        _old_policy,
        _actions_apart,
        _entropy_bonus,
        _extreme_ratios,
        _zero_weights,
        _invalid_scores,
    ]
    if case.algorithm.off_policy:
        checks.append(_importance_weights)
    if case.batch.values is not None:
        checks.append(_value_loss)
    if case.batch.reference_log_probs is not None:
        checks.append(_reference_pull)
    case.f.run_checks(checks, case, f"{case.where}, ")


def _check_names(case: LossCase, full_loss: Loss) -> None:
    case.expect(DEMANDED in full_loss.metrics, f"metric {DEMANDED!r}", sorted(full_loss.metrics), "names are shared")
    names = [*full_loss.metrics, *full_loss.maxima, *full_loss.statistics]
    check_free_names(case.f, case.where, names)
    twice = sorted({name for name in names if names.count(name) > 1})
    case.expect(not twice, "each metric in one of metrics, maxima, statistics", f"{twice} in two", "rename one")
    graph = [name for name, value in {**full_loss.metrics, **full_loss.maxima}.items() if value.requires_grad]
    case.expect(not graph, "metrics without gradient", f"a graph in {graph}", "detach them, or memory fills up")


def _check_split(case: LossCase, full_loss: Loss, gradients: list[Tensor]) -> None:
    """The same numbers in one piece, in three, and sample by sample in another order."""
    rows = torch.arange(len(case.batch.valid))
    for pieces in (rows.tensor_split(min(3, len(rows))), rows.flip(0).split(1)):
        results = [case.loss_and_gradients(rows=piece) for piece in pieces]
        parts = [loss for loss, _ in results]
        total = float(torch.stack([loss.total.detach() for loss in parts]).sum())
        same = abs(total - float(full_loss.total)) < EXACT * max(1.0, abs(total))
        case.expect(same, f"the total {float(full_loss.total):.5f} from micro-batches", f"{total:.5f}", SPLIT)
        split = [torch.stack(of_leaf).sum(0) for of_leaf in zip(*(g for _, g in results), strict=True)]
        gap = max(float((a - b).abs().max()) for a, b in zip(gradients, split, strict=True))
        case.expect(gap < EXACT, "the same gradient from micro-batches", f"a difference of {gap:.2g}", SPLIT)
        _check_metrics(case, full_loss, parts)


def _check_metrics(case: LossCase, full_loss: Loss, parts: Sequence[Loss]) -> None:
    f, where = case.f, case.where
    for key, value in full_loss.metrics.items():
        finite, number = bool(torch.isfinite(value.detach()).all()), float(value.detach())
        if not f.expect(finite, f"{where}: metric {key!r}", "a finite number", number, "mind counts of 0"):
            continue
        summed = float(sum(float(part.metrics[key]) for part in parts))
        same = abs(summed - float(value)) <= 1e-4 * max(1.0, abs(float(value)))
        f.expect(same, f"{where}: metric {key!r}", f"{float(value):.4g} from micro-batches", f"{summed:.4g}", SPLIT)
    for key, value in full_loss.maxima.items():
        largest = max(float(part.maxima[key]) for part in parts)
        same = math.isclose(largest, float(value), rel_tol=1e-4, abs_tol=1e-6)
        expected, remedy = f"{float(value):.4g} from micro-batches", "let it be a maximum over samples"
        f.expect(same, f"{where}: metric {key!r}", expected, f"{largest:.4g}", remedy)
    together, apart = read_all([full_loss.statistics]), read_all([part.statistics for part in parts])
    remedy = "let a statistic hold nothing but sums, which can be added"
    for key, number in together.items():
        f.expect(math.isfinite(number), f"{where}: metric {key!r}", "a finite number", number, "mask before, not after")
        same = key in apart and math.isclose(apart[key], number, rel_tol=1e-4, abs_tol=1e-6)
        f.expect(same, f"{where}: metric {key!r}", f"{number:.4g} from micro-batches", apart.get(key), remedy)


def _same_loss_twice(case: LossCase) -> None:
    (one, gradients), (other, again) = case.loss_and_gradients(), case.loss_and_gradients()
    same = torch.equal(one.total, other.total) and all(map(torch.equal, gradients, again))
    remedy = "no random numbers, and no state"
    case.expect(same, "the same loss for the same batch", "another the second time", remedy)


def _weights_of_samples(case: LossCase) -> None:
    """Each sample's gradient goes with its own weights, and with nothing else's."""
    batch, draws = case.batch, torch.Generator().manual_seed(2)
    factors = 0.5 + torch.rand(len(batch.valid), generator=draws)
    factors[::3] = 0.0

    def scale_rows(tensor: Tensor | None) -> Any:
        return None if tensor is None else tensor * _expand_like(factors, tensor)

    _, before = case.loss_and_gradients()
    _, scaled_gradients = case.loss_and_gradients(
        attrs.evolve(batch, weights=scale_rows(batch.weights), value_weights=scale_rows(batch.value_weights))
    )
    remedy = "sum weight * loss of each entry (`value_weights` for the critic's)"
    for name, one, other in zip(("log_probs", "entropy", "values"), before, scaled_gradients, strict=False):
        holds = _is_near(other, one * _expand_like(factors, one))
        case.expect(holds, f"a gradient in {name} that goes with each sample's weight", "another", remedy)
    if batch.value_weights is None:
        return
    _, critic = case.loss_and_gradients(attrs.evolve(batch, value_weights=scale_rows(batch.value_weights)))
    holds = _is_near(critic[2], before[2] * _expand_like(factors, before[2])) and _is_near(critic[0], before[0])
    case.expect(holds, "value_weights in the value loss alone", "elsewhere, or not used", remedy)


def _signs_of_advantages(case: LossCase) -> None:
    """Check that near the old policy, actions with positive advantage become more likely, and the others less."""
    batch = case.batch
    signs = torch.ones(len(batch.valid))
    signs[1::2] = -1 if case.signed else 1
    advantages = torch.where(batch.advantages != 0, _expand_like(signs, batch.advantages), torch.zeros(()))
    good = attrs.evolve(batch, advantages=advantages)
    per_sample = (len(batch.valid), -1)
    counted = (advantages.reshape(per_sample) != 0).any(1) & (batch.weights.reshape(per_sample) > 0).any(1)
    for place, leaves in (("at the old policy", case.at_the_old_policy), ("near the old policy", case.leaves)):
        gradient = case.policy_gradient(good, leaves)
        if case.signed:  # what does not depend on advantages, such as a KL term, cancels
            gradient = (gradient - case.policy_gradient(attrs.evolve(batch, advantages=-advantages), leaves)) / 2
        up = -gradient * _expand_like(signs, gradient)
        used = (up != 0).any() and bool((up.flatten(1).abs().sum(1) > 0)[counted].all())
        if place == "at the old policy":
            expected = "a gradient in log_probs that goes with the advantage, of every sample that has one"
            case.expect(used, expected, "none", "multiply the ratio by batch.advantages")
        opposite = float((up < -1e-3 * up.abs().max()).float().mean())
        expected = f"a step {place} that makes actions of positive advantage likelier, of negative ones less likely"
        case.expect(opposite == 0, expected, f"the opposite for {opposite:.0%} of the log-probs", "mind the sign")
    if not case.signed or batch.reference_log_probs is not None or _is_regression(case):
        return
    neutral = case.policy_gradient(attrs.evolve(batch, advantages=torch.zeros_like(advantages)))
    largest = case.policy_gradient(good).abs().max()
    holds = neutral.abs().max() <= 1e-3 * largest
    case.expect(holds, "no gradient in log_probs from advantages of 0", "one", "multiply by batch.advantages as it is")


def _ratios_and_clips(case: LossCase) -> None:
    """Check ratios of 0.5, 1 and 2 with advantages of both signs: where a step has not gone too far yet, no log-prob
    moves in the wrong direction, and each has a gradient. Where it has, a penalty may pull back towards the old policy.
    """
    batch = case.one_policy_batch
    counted = _weighted_entries(batch)
    signs = (1, -1) if case.signed else (1,)
    tokens = _tokens_of_a_ratio(case, batch)
    for ratio in RATIOS:
        leaves = [batch.log_probs + math.log(ratio) / tokens, *case.at_the_old_policy[1:]]
        if batch.reference_log_probs is not None:  # no divergence, which would drown small gradients
            batch = attrs.evolve(batch, reference_log_probs=leaves[0])
        neutral = case.policy_gradient(_with_advantages(batch, 0), leaves)
        for sign in signs:
            if ratio > 1 if sign > 0 else ratio < 1:
                continue
            gradient = case.policy_gradient(_with_advantages(batch, sign), leaves) - neutral
            up = (-sign * gradient)[counted]
            kind = "positive" if sign > 0 else "negative"
            direction = "likelier" if sign > 0 else "less likely"
            opposite = float((up < -1e-3 * up.abs().max()).float().mean())
            expected = f"a step at a ratio of {ratio:g} that makes actions of {kind} advantage {direction}"
            case.expect(opposite == 0, expected, f"the opposite for {opposite:.0%} of the log-probs", "mind the sign")
            if case.signed:
                none = float((up == 0).float().mean())
                remedy = CLIP if sign > 0 or none < 1 else f"{CLIP}; or drop what went badly in `advantages` already"
                expected = f"a gradient in every log-prob of {kind} advantage at a ratio of {ratio:g}"
                case.expect(none == 0, expected, f"none in {none:.0%} of them", remedy)


def _is_regression(case: LossCase) -> bool:
    """Whether all that was done is made likelier, by a weight that goes to nothing with the advantage: exp(A), as in
    advantage-weighted regression. Then advantages of 0 count."""
    counted = _weighted_entries(case.one_policy_batch)
    even, bad = (-case.policy_gradient(_with_advantages(case.one_policy_batch, sign))[counted] for sign in (0, -10))
    return bool((even > 0).all() and bad.abs().max() < 0.1 * even.max())


def _with_advantages(batch: Batch, sign: int) -> Batch:
    """The batch with this advantage wherever there is an action."""
    acted = batch.valid if batch.advantages.dim() > 1 else batch.valid.any(-1)
    return attrs.evolve(batch, advantages=torch.where(acted, float(sign), 0.0))


def _weighted_entries(batch: Batch) -> Tensor:
    """bool [B, C, M]: log-probs of actions that count and have a weight."""
    weighted = batch.weights > 0
    counted = batch.valid & (weighted if weighted.dim() > 1 else weighted[:, None])
    return counted[..., None].expand(batch.log_probs.shape)


def _tokens_of_a_ratio(case: LossCase, batch: Batch) -> Tensor:
    """float [B, 1, 1]: how many tokens a ratio is taken of. The log-ratio of one token is changed: where gradients of
    others change too, they share a ratio."""
    leaves = [batch.log_probs.clone(), *case.at_the_old_policy[1:]]
    before = case.policy_gradient(_with_advantages(batch, 1), leaves)
    leaves[0][:, 0, 0] -= 0.05
    moved = (case.policy_gradient(_with_advantages(batch, 1), leaves) - before).abs() > 1e-4 * before.abs().max()
    shared = moved & _weighted_entries(batch)
    tokens = batch.log_probs.shape[-1]
    if bool(shared[:, 1:].any()):
        return (batch.valid.sum(-1).float() * tokens).clamp_min(1)[:, None, None]
    return torch.full((len(batch.valid), 1, 1), float(tokens if bool(shared[:, 0, 1:].any()) else 1))


def _importance_weights(case: LossCase) -> None:
    """Check that actions that the current policy takes more often than the behaviour policy count no less than those it
    takes more rarely, unless they are dropped."""
    batch = case.one_policy_batch
    current, tokens = batch.log_probs, _tokens_of_a_ratio(case, batch)
    for sign in (1, -1):
        sizes = []
        for ratio in (0.5, 2.0):
            older = attrs.evolve(batch, log_probs=current - math.log(ratio) / tokens)
            with_signs, neutral = (case.policy_gradient(_with_advantages(older, s)) for s in (sign, 0))
            sizes.append(float((with_signs - neutral).abs().sum()))
        holds = sizes[1] == 0 or sizes[1] >= sizes[0] * (1 - 1e-3)
        expected = "no smaller gradient at a ratio of 2 to the policy that acted than at 0.5, as off_policy is True"
        remedy = "weigh by exp(log_probs - batch.log_probs), not its inverse"
        case.expect(holds, expected, f"{sizes[1]:.3g}, and {sizes[0]:.3g}", remedy)


def _old_policy(case: LossCase) -> None:
    """Without advantages, nothing pushes log-probs further up that have risen already."""
    if not case.signed or _is_regression(case):
        return  # it may look at weights alone
    batch = _with_advantages(case.one_policy_batch, 0)
    if batch.reference_log_probs is not None:
        batch = attrs.evolve(batch, reference_log_probs=batch.log_probs)
    gradient = case.policy_gradient(batch, (batch.log_probs + math.log(2.0), *case.at_the_old_policy[1:]))
    holds = (gradient >= -1e-6).all()
    expected = "no push away from the old policy, without advantages"
    case.expect(holds, expected, "one for log-probs that have risen", "add a divergence, do not subtract it")


def _actions_apart(case: LossCase) -> None:
    """Check that an action's advantage affects no other action where advantages and weights are per action."""
    batch = case.batch
    if batch.advantages.dim() < 2 or batch.weights.dim() < 2:
        return
    remedy = "keep [B, C] in order; where one ratio is of a whole chunk, return advantages and weights as [T, N], "
    remedy += "one a chunk"
    for c in range(batch.valid.shape[1]):
        only = torch.zeros_like(batch.advantages)
        only[:, c] = torch.where(batch.valid[:, c], 1.0, 0.0)
        plus, minus = (case.policy_gradient(attrs.evolve(batch, advantages=sign * only)) for sign in (1, -1))
        others = [i for i in range(batch.valid.shape[1]) if i != c]
        leak = (plus - minus)[:, others].abs().max() if others else torch.zeros(())
        holds = leak <= 1e-3 * (plus - minus).abs().max()
        case.expect(holds, "an action's advantage on its own log-probs", "on others too", remedy)


def _entropy_bonus(case: LossCase) -> None:
    gradient = case.loss_and_gradients()[1][1]
    holds = (gradient <= 1e-9).all()
    case.expect(holds, "a loss that does not rise with the entropy", "one that does", "subtract the entropy bonus")


def _extreme_ratios(case: LossCase) -> None:
    shift = torch.where(torch.arange(len(case.batch.valid)) % 2 == 0, EXTREME, -EXTREME)
    shift = shift / case.batch.log_probs[0].numel()
    for sign in (1, -1):
        log_probs, *others = case.at_the_old_policy
        leaves = [log_probs + sign * _expand_like(shift, log_probs), *others]
        loss, gradients = case.loss_and_gradients(leaves=leaves)
        finite = bool(torch.isfinite(loss.total)) and all(bool(torch.isfinite(g).all()) for g in gradients)
        remedy = "clamp log-ratios before exp"
        case.expect(finite, f"finite numbers at log-ratios of {EXTREME:g}", "NaN or inf", remedy)


def _zero_weights(case: LossCase) -> None:
    """Check a batch without weight, which a learner computes while it waits for others."""
    batch = case.batch
    zeros: dict[str, Any] = {
        a.name: torch.zeros_like(value)
        for a in attrs.fields(Batch)
        if isinstance(value := getattr(batch, a.name), Tensor)
    }
    loss, gradients = case.loss_and_gradients(attrs.evolve(batch, **zeros))
    silent = float(loss.total.detach()) == 0 and all(bool((g == 0).all()) for g in gradients)
    case.expect(silent, "nothing from a batch without weights", f"a total of {float(loss.total.detach()):.3g}", SPLIT)
    none = attrs.evolve(batch, **{name: zeros[name] for name in zeros.keys() & {"weights", "value_weights"}})
    total = float(case.loss_and_gradients(none)[0].total.detach())
    case.expect(
        total == 0, "a total of 0 where all weights are 0", total, "multiply every part of the total by weights"
    )


def _invalid_scores(case: LossCase) -> None:
    """Scores of actions that do not count."""
    log_probs, entropy, *values = case.leaves
    silent = ~case.batch.valid[..., None]
    changed = [torch.where(silent, 9.0, log_probs), torch.where(silent, 9.0, entropy), *values]
    (one, gradients), (other, again) = case.loss_and_gradients(), case.loss_and_gradients(leaves=changed)
    same = _is_near(other.total, one.total) and all(map(_is_near, again, gradients))
    case.expect(same, "the same loss whatever the scores of actions that are not valid", "another", "mask them")


def _value_loss(case: LossCase) -> None:
    """Check that from the recorded values, where no clip is active, the loss moves values towards the returns."""
    values, weights = case.batch.values, case.batch.value_weights
    assert values is not None and weights is not None
    sides = torch.where(torch.rand(values.shape, generator=torch.Generator().manual_seed(3)) < 0.5, -1.0, 1.0)
    gradient = case.loss_and_gradients(attrs.evolve(case.batch, returns=values + sides), case.at_the_old_policy)[1][2]
    towards = -gradient * sides
    holds = (towards[weights > 0] > 0).all() and (gradient[weights == 0] == 0).all()
    share_wrong = float((towards[weights > 0] <= 0).float().mean())
    remedy = "penalise scores.values - batch.returns, times value_weights"
    case.expect(holds, "a step of the values towards batch.returns", f"another for {share_wrong:.0%} of them", remedy)
    far = list(case.at_the_old_policy)
    far[2] = values - 3 * sides
    gradient = case.loss_and_gradients(attrs.evolve(case.batch, returns=values + 3 * sides), far)[1][2]
    share_wrong = float(((-gradient * sides)[weights > 0] <= 0).float().mean())
    expected = "a step towards batch.returns of values that went the other way"
    remedy = "with a clip, take the larger of both losses: max(loss(v), loss(v_old + clip(v - v_old, -c, c)))"
    case.expect(share_wrong == 0, expected, f"none for {share_wrong:.0%} of them", remedy)


def _reference_pull(case: LossCase) -> None:
    """Without advantages, log-probs above the reference's come down."""
    batch = attrs.evolve(
        case.batch,
        advantages=torch.zeros_like(case.batch.advantages),
        reference_log_probs=case.batch.log_probs - 0.5,
    )
    gradient = case.policy_gradient(batch)
    holds = (gradient >= 0).all() and (gradient > 0).any()
    got = "the opposite" if bool((gradient < 0).any()) else "none: batch.reference_log_probs is not used"
    case.expect(holds, "a pull towards the reference policy, as `needs` has it", got, "add coef * KL(pi || reference)")


def _expand_like(per_sample: Tensor, tensor: Tensor) -> Tensor:
    """[B] as [B, 1, ...], to go with [B, ...]."""
    return per_sample.reshape(-1, *[1] * (tensor.dim() - 1))


def _is_near(one: Tensor, other: Tensor) -> bool:
    return bool(((one - other).abs() <= 1e-4 * other.abs().max() + 1e-8).all())
