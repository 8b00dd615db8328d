"""Checks of a policy by `check_model`, by sampling and small steps: rows are independent, entropies and log-probs are
those of the sampled distribution, gradients point in the right direction."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from vla_rl.core.capabilities import ActionTokens, HasCritic, HasReference
from vla_rl.core.hookspecs import VLAModel
from vla_rl.core.types import Array, Chunk, Observation, to_numpy
from vla_rl.testing import synthetic
from vla_rl.testing.common.comparison import same_data
from vla_rl.testing.model_case import ModelCase, check_unchanged

COPIES = 24
SPREAD = 0.6
"""Standard deviation of log-probs, in nats, from which a distribution is far enough from a uniform one."""
SCALES = (0.1, 0.3, 1.0)
"""Factors that weights are moved by until log-probs spread."""
SIGMAS = 6.0
OPPOSITE = -0.7
"""Cosine of gradients that go against each other. Those of a flow's loss and of its log-probs just differ."""
NUDGE = 3e-3
"""Step that weights are moved by, in both directions, to estimate Fisher's information."""
CALM = 0.02
"""Variance of the log-probs' change, in nats squared, within which that is small."""
LEAST, MOST = 0.5, 1.9
"""Bounds of the ratio of Fisher's two definitions: 1, from 0.67 to 1.2 by chance; a mean of three numbers gives 0.33,
twice a sum 2."""
TURNED = 0.75
"""Cosine from which a clone in the opposite order fits: 0.89 of a Gaussian policy, up to 0.5 of a flow by chance."""
KERNELS = 10.0
"""Times `atol`: batches of other sizes run other kernels."""


def check_policy(case: ModelCase) -> None:
    """Findings on all of them."""
    checks: tuple[Callable[[ModelCase], None], ...] = (
        _rows_apart,
        _sampled_likelihoods,
        _density_scale,
        _each_entry,
        _gradient_steps,
        _cloning_gradient,
        _demonstrated_numbers,
        _use_of_arguments,
        _reference_policy,
    )
    case.f.run_checks(checks, case)


# ----------------------------------------------------------------------------------------------------- rows apart


def _rows_apart(case: ModelCase) -> None:
    """Compare each row alone, and among other rows, with the same row in the batch."""
    with case.moved_weights(SCALES[0]):
        batch_chunks = {greedy: case.draw_chunks(greedy) for greedy in (False, True)}
        for b in range(case.row_count):
            _compare_rows(case, batch_chunks, case.obs.take(np.array([b])), [b], [0])
        strangers = synthetic.observation(case.env, case.row_count, seed=1)
        keep = [b for b in range(case.row_count) if b % 2 == 0]
        mixed = Observation.concat([case.obs, strangers]).take(
            np.array([b if b in keep else case.row_count + b for b in range(case.row_count)])
        )
        _compare_rows(case, batch_chunks, mixed, keep, keep)


def _compare_rows(
    case: ModelCase, batch_chunks: dict[bool, Chunk], obs: Observation, rows: list[int], at: list[int]
) -> None:
    """Compare the results for `obs` at the indices `at` with those of the whole batch at `rows`."""
    keys = list(range(len(obs))) if len(obs) > 1 else rows
    remedy = "use no statistics of the batch, and each row's own noise"
    for greedy, chunk in batch_chunks.items():
        sampled = case.model.sample_chunk(obs, case.make_noise(keys), greedy)
        for name in ("actions", "log_probs", "values"):
            one, other = getattr(sampled, name), getattr(chunk, name)
            if other is not None:
                what = f"a row's {name} whatever other rows there are"
                case.expect_near(to_numpy(one)[at], to_numpy(other)[rows], "sample_chunk", what, remedy, KERNELS)
    if len(obs) > 1:
        return
    with torch.no_grad():
        scores = case.model.chunk_log_probs(obs, batch_chunks[False].numpy().take(np.array(rows)))
        all_rows = case.model.chunk_log_probs(case.obs, batch_chunks[False])
    for name in ("log_probs", "entropy", "values"):
        one, other = getattr(scores, name), getattr(all_rows, name)
        if other is not None:
            what = f"a row's {name} whatever other rows there are"
            case.expect_near(one, to_numpy(other)[rows], "chunk_log_probs", what, remedy, KERNELS)
    model = case.model
    if case.values != "none" and isinstance(model, HasCritic):
        what = "a row's value whatever other rows there are"
        case.expect_near(model.values(obs), to_numpy(model.values(case.obs))[rows], "values", what, remedy, KERNELS)


# ---------------------------------------------------------------------------------------------------- likelihoods


def _sampled_likelihoods(case: ModelCase) -> None:
    _sampled_from(case, "")
    for scale in SCALES:
        with case.moved_weights(scale):
            spread = float(torch.as_tensor(case.sample_copies(COPIES)[1].log_probs).std())
            if spread >= SPREAD or scale == SCALES[-1]:
                _sampled_from(case, " (at moved weights)")
                _greedy_likelihood(case)
                return


def _sampled_from(case: ModelCase, where: str) -> None:
    """The mean of -log p over samples is the entropy, whatever the distribution."""
    obs, chunk = case.sample_copies(COPIES)
    with torch.no_grad():
        scores = case.model.chunk_log_probs(obs, chunk)
    log_probs, entropy = scores.log_probs.double(), scores.entropy.double()
    what = f"the log_probs recorded at sampling{where}"
    case.expect_near(log_probs, chunk.log_probs, "chunk_log_probs", what, "score what was sampled", KERNELS)
    gap = -log_probs - entropy
    holds = all(
        bool((part.mean(0).abs() <= SIGMAS * part.std(0) / len(part) ** 0.5 + floor * (1 + entropy.mean().abs())).all())
        for part, floor in ((gap, 0.01), (gap.mean((1, 2)), 0.003))  # of each number, and of all together
    )
    got = f"{float(entropy.mean()):.3g} nats, and {float(-log_probs.mean()):.3g}"
    expected = f"an entropy that is the mean of -log_probs over samples{where}"
    remedy = "entropy in nats of the distribution that is sampled, temperature included: -sum p log p"
    case.f.expect(holds, "chunk_log_probs: entropy", expected, got, remedy)
    if where:
        fixed = bool((log_probs.unflatten(0, (case.row_count, COPIES)).std(1) < 1e-7).all())
        expected = "log_probs that differ with what was sampled"
        case.f.expect(not fixed, "chunk_log_probs", expected, "the same for all", "gather those of the chunk")
        _entries_apart(case, log_probs)
        _in_order(case, chunk)
    if isinstance(case.model, ActionTokens):
        holds = bool((log_probs <= 1e-5).all())
        case.f.expect(holds, "log_probs", "at most 0, as of tokens", f"{float(log_probs.max()):.3g}", "mind the sign")
    _draws_apart(case, to_numpy(chunk.actions))


def _draws_apart(case: ModelCase, actions: Array) -> None:
    """Numbers of one row's chunk are not all made of one draw."""
    flat = actions.reshape(case.row_count, COPIES, -1).astype(np.float64)
    flat = (flat - flat.mean(1, keepdims=True)).reshape(case.row_count * COPIES, -1)
    flat = flat[:, flat.std(0) > 1e-9]
    if flat.shape[1] < 2:
        return
    lowest = float(np.abs(np.corrcoef(flat, rowvar=False)).min())
    expected = "independent draws for all numbers of a chunk"
    got = f"samples that move together (correlation {lowest:.2f} at least)"
    case.f.expect(lowest < 0.95, "sample_chunk", expected, got, "draw noise of the shape of the chunk")


def _entries_apart(case: ModelCase, log_probs: Tensor) -> None:
    """[rows, C, M]: an action has its own log-prob, not that of the whole chunk."""
    for axis, what in ((1, "action"), (2, "token")):
        if log_probs.shape[axis] > 1:
            alike = bool((log_probs.diff(dim=axis).abs() < 1e-7).all())
            expected, got = f"a separate log-prob for each {what}", "the same for all of a chunk"
            case.f.expect(not alike, "chunk_log_probs", expected, got, "sum over the numbers of one action only")


def _density_scale(case: ModelCase) -> None:
    """Log-probs of a distribution vary, near the weights that sampled, by twice as much as they fall on average
    (Fisher's information, by its two definitions). Their mean over numbers, or twice their sum, do not. One direction
    is enough for most models; where chance may have misled it, others are asked too."""
    if case.model.tokens_per_action >= case.env.action_dim:
        return
    with case.moved_weights(SCALES[0]):
        obs, chunk = case.sample_copies(COPIES)
        nudge = NUDGE
        varied, fallen = _fisher_information(case, obs, chunk, nudge, seed=5)
        if varied > CALM:  # too far for both definitions to agree
            nudge *= (CALM / varied) ** 0.5
            varied, fallen = _fisher_information(case, obs, chunk, nudge, seed=5)
        for seed in range(6, 10):
            if fallen > 0 and LEAST < varied / fallen < MOST:
                return
            more = _fisher_information(case, obs, chunk, nudge, seed)
            varied, fallen = varied + more[0], fallen + more[1]
    ratio = varied / fallen if fallen > 0 else float("nan")
    holds = varied == 0 or LEAST < ratio < MOST
    expected = "log_probs of a probability density, summed over all numbers of an action"
    got = f"ones that are {ratio:.2f} times as large" if fallen > 0 else "ones that rise where they should fall"
    case.f.expect(holds, "log_probs", expected, got, "use .sum(-1) over the numbers, not .mean(-1)")


def _fisher_information(
    case: ModelCase, obs: Observation, chunk: Chunk, nudge: float, seed: int
) -> tuple[float, float]:
    """Along a direction by chance: (variance of the log-probs' change, -2 times its mean)."""
    trained, draws = list(case.trained_parameters.values()), torch.Generator().manual_seed(seed)
    steps = [(nudge * torch.randn(p.shape, generator=draws)).to(p) for p in trained]

    def scores_after(times: int) -> Tensor:
        for p, step in zip(trained, steps, strict=True):
            p.add_(times * step)
        return case.model.chunk_log_probs(obs, chunk).log_probs.double()

    with torch.no_grad():
        centre, up, down = scores_after(0), scores_after(1), scores_after(-2)
        scores_after(1)
    odd, even = (up - down) / 2, (up + down) / 2 - centre
    varied = float(odd.unflatten(0, (case.row_count, COPIES)).var(1).mean())
    return varied, float(-2 * even.mean())


def _in_order(case: ModelCase, chunk: Chunk) -> None:
    """The log-probs of an action follow from its own numbers, where they follow from any action's."""
    steps = case.chunk
    if steps < 2:
        return
    log_probs = to_numpy(torch.as_tensor(chunk.log_probs).double().sum(-1)).reshape(case.row_count, COPIES, steps)
    actions = to_numpy(chunk.actions).astype(np.float64).reshape(case.row_count, COPIES, steps, -1)
    pairs = [[_explained_variance(log_probs[..., c], actions[:, :, k]) for k in range(steps)] for c in range(steps)]
    explained = np.array(pairs)
    own_explained = np.diag(explained)
    misplaced = [c for c in range(steps) if explained[c].max() > own_explained[c] + 0.4]
    expected = "log_probs of an action that follow from that action"
    got = ", ".join(f"those of action {c} from action {int(explained[c].argmax())}" for c in misplaced)
    case.f.expect(not misplaced, "log_probs", expected, got, "keep the actions of a chunk in order")


def _explained_variance(target: np.ndarray[Any, Any], numbers: np.ndarray[Any, Any]) -> float:
    """Part of the variance of [rows, copies] within rows that numbers [rows, copies, A] and their squares explain."""
    features = np.concatenate([numbers, numbers**2], -1)
    features = (features - features.mean(1, keepdims=True)).reshape(-1, features.shape[-1])
    centred = (target - target.mean(1, keepdims=True)).reshape(-1)
    total = float((centred**2).sum())
    if total == 0:
        return 0.0
    fitted = features @ np.linalg.lstsq(features, centred, rcond=None)[0]
    return 1 - float(((centred - fitted) ** 2).sum()) / total


def _greedy_likelihood(case: ModelCase) -> None:
    if not isinstance(case.model, ActionTokens):
        return
    best = case.draw_chunks(greedy=True)
    with torch.no_grad():
        greedy = float(case.model.chunk_log_probs(case.obs, best).log_probs.mean())
    chance = float(torch.as_tensor(case.sample_copies(COPIES)[1].log_probs).mean())
    got = f"{greedy:.3g}, where samples have {chance:.3g}"
    expected = "a greedy chunk that is likelier than samples are"
    case.f.expect(greedy >= chance - 1e-3, "sample_chunk", expected, got, "take the mode")


# ---------------------------------------------------------------------------------------------------- small steps


def _each_entry(case: ModelCase) -> None:
    """Each row, each action of a chunk and each token has a gradient; one entry for each of them is looked at. Each
    gradient has a separate forward pass, since selective recomputation allows one backward pass over a graph."""
    with case.moved_weights(0.02):
        chunk = case.draw_chunks()
        scores = case.model.chunk_log_probs(case.obs, chunk)
        for name in ("log_probs", "values"):
            tensor = getattr(scores, name)
            if tensor is None or not tensor.requires_grad:
                continue
            without = []
            for i in range(max(tensor.shape)):
                at = tuple(i % size for size in tensor.shape)
                entry = getattr(case.model.chunk_log_probs(case.obs, chunk), name)[at]
                gradient = torch.autograd.grad(entry, list(case.trained_parameters.values()), allow_unused=True)
                if not any(g is not None and bool((g != 0).any()) for g in gradient):
                    without.append(str(list(at)))
            expected, got = f"a gradient of every entry of {name}", f"none of entry {', '.join(without[:4])}"
            case.f.expect(not without, "chunk_log_probs", expected, got, "detach none of them")


def _demonstrated_numbers(case: ModelCase) -> None:
    """Each row, each action of a chunk and each number of an action counts in the loss."""
    low, high = np.array(case.env.action_low), np.array(case.env.action_high)
    with case.moved_weights(0.02), torch.no_grad():
        actions = np.array(to_numpy(case.draw_chunks().actions))
        before = float(case.model.imitation_loss(case.obs, actions))
        unread = []
        for i in range(max(actions.shape)):
            at = tuple(i % size for size in actions.shape)
            number = at[2]
            changed = actions.copy()
            above = actions[at] > (low[number] + high[number]) / 2
            changed[at] = low[number] if above else high[number]
            if float(case.model.imitation_loss(case.obs, changed)) == before:
                unread.append("row {}, action {}, number {}".format(*at))
    expected = "another loss for another number anywhere in the demonstrated actions"
    got = f"the same for {'; '.join(unread[:4])}"
    case.f.expect(not unread, "imitation_loss", expected, got, "compare all of them")


def _gradient_steps(case: ModelCase) -> None:
    """Check that a step along a gradient raises its function."""
    with case.moved_weights(0.02):
        chunk = case.draw_chunks()
        parts = ["log_probs", "entropy"] + ["values"] * (case.values != "none")
        for part in parts:
            _climb_gradient(case, chunk, part)


def _climb_gradient(case: ModelCase, chunk: Chunk, part: str) -> None:
    def sum_part() -> Tensor:
        total: Tensor = getattr(case.model.chunk_log_probs(case.obs, chunk), part).sum()
        return total

    before = sum_part()
    if not before.requires_grad:
        return  # found before
    gradient = case.compute_gradient(before)
    norm = float(torch.stack([g.double().square().sum() for g in gradient]).sum().sqrt())
    if norm < 1e-6:
        return  # flat, as the entropy of a Gaussian of fixed width is
    parameters = list(case.trained_parameters.values())
    start = [p.detach().clone() for p in parameters]
    risen = False
    with torch.no_grad():
        for size in (1e-1, 1e-2, 1e-3):
            for p, origin, g in zip(parameters, start, gradient, strict=True):
                p.copy_(origin + size * g / norm)
            risen |= float(sum_part() - before) >= 0.1 * size * norm
        for p, origin in zip(parameters, start, strict=True):
            p.copy_(origin)
    expected = f"higher {part} after a small step up their gradient"
    case.f.expect(risen, "chunk_log_probs", expected, "no rise", "differentiate what is returned; no detours")


def _cloning_gradient(case: ModelCase) -> None:
    """The gradient of `imitation_loss` against that of the log-probs of the same actions."""
    where = "imitation_loss"
    with case.moved_weights(0.02):
        chunk, other = case.draw_chunks(seed=1), case.draw_chunks(seed=2)
        towards = _flat_gradient(case, -case.model.imitation_loss(case.obs, chunk.actions))
        likelier = _flat_gradient(case, case.model.chunk_log_probs(case.obs, chunk).log_probs.sum())
        cosine = float(towards @ likelier / (towards.norm() * likelier.norm()).clamp_min(1e-12))
        expected = "a step that makes demonstrated actions likelier"
        case.f.expect(cosine > OPPOSITE, where, expected, f"the opposite (cosine {cosine:.2f})", "mind the sign")
        _same_order(case, chunk, likelier, cosine)
        elsewhere = _flat_gradient(case, -case.model.imitation_loss(case.obs, other.actions))
        moved = not torch.equal(towards, elsewhere)
        case.f.expect(moved, where, "another gradient for other actions", "the same", "compare with `actions`")
        rows = np.tile(np.arange(case.row_count), 4)
        longer = _flat_gradient(case, -case.model.imitation_loss(case.obs.take(rows), to_numpy(chunk.actions)[rows]))
        ratio = float(longer.norm() / towards.norm().clamp_min(1e-12))
        case.f.expect(ratio < 2.5, where, "a mean over the batch", f"{ratio:.1f} times as much of 4 batches", "divide")


def _same_order(case: ModelCase, chunk: Chunk, likelier: Tensor, cosine: float) -> None:
    """Demonstrated actions are cloned as actions are sampled, not turned round in time."""
    if case.chunk < 2 or cosine > 0.5:
        return
    turned = np.ascontiguousarray(to_numpy(chunk.actions)[:, ::-1])
    other = _flat_gradient(case, -case.model.imitation_loss(case.obs, turned))
    swapped = float(other @ likelier / (other.norm() * likelier.norm()).clamp_min(1e-12))
    expected = "actions of a chunk in the order in which they are sampled"
    got = f"a better fit in the opposite order (cosine {swapped:.2f}, and {cosine:.2f})"
    holds = swapped < max(TURNED, cosine + 0.4)
    case.f.expect(holds, "imitation_loss", expected, got, "keep them in order")


def _flat_gradient(case: ModelCase, total: Tensor) -> Tensor:
    return torch.cat([g.flatten().double() for g in case.compute_gradient(total)])


# ------------------------------------------------------------------------------------------ arguments and reference


def _use_of_arguments(case: ModelCase) -> None:
    """The observation is looked at, and neither it nor a recorded chunk is written into."""
    with case.moved_weights(SCALES[0]):
        chunk = case.draw_chunks()
        original = copy.deepcopy(chunk.numpy())
        scores = case.model.chunk_log_probs(case.obs, chunk)
        case.model.imitation_loss(case.obs, chunk.actions)
        others = synthetic.observation(case.env, case.row_count, seed=1)
        others = attrs.evolve(others, instructions=others.instructions[::-1])
        elsewhere = case.model.chunk_log_probs(others, chunk)
        acted = case.choose_chunks(others, case.make_noise(), False)
    for name in ("log_probs", "values"):
        one, other = getattr(scores, name), getattr(elsewhere, name)
        if one is not None:
            # A chunk may carry what was computed of its observation, so what acting makes of the others counts, too.
            used = not torch.equal(one, other) or not np.array_equal(
                to_numpy(getattr(original, name)), to_numpy(getattr(acted, name))
            )
            text = "the same for other images, states and instructions"
            case.f.expect(used, "chunk_log_probs", f"{name} of the observation", text, "use it")
    check_unchanged(case.f, case.obs, synthetic.observation(case.env, case.row_count))
    same = same_data(chunk, original)
    case.f.expect(same, "chunk_log_probs", "a recorded chunk that stays as it is", "written into", "work on a copy")


def _reference_policy(case: ModelCase) -> None:
    model, chunk = case.model, case.draw_chunks()
    if not isinstance(model, HasReference):
        return
    before = model.reference_log_probs(case.obs, chunk)
    where = "reference_log_probs"
    graph = bool(before.requires_grad)
    case.f.expect(not graph, where, "no gradient", "a graph", "decorate it with torch.no_grad()")
    same = tuple(before.shape) == tuple(torch.as_tensor(chunk.log_probs).shape)
    if not case.f.expect(same, where, "the shape of log_probs", list(before.shape), "as chunk_log_probs gives them"):
        return
    with case.moved_weights(SCALES[0]):
        after = model.reference_log_probs(case.obs, chunk)
    what = "the same log_probs whatever the trained weights are"
    case.expect_near(after, before, where, what, "score with the weights before training", KERNELS)


def check_temperature(case: ModelCase, hotter: VLAModel) -> None:
    """`hotter`: the same model, built for twice the temperature."""
    remedy = "divide logits (or multiply deviations) by ModelContext.temperature, in sampling and in scoring alike"
    for scale in (SCALES[1], 0.0):
        with case.moved_weights(scale):
            hotter.load_weights([(name, tensor.clone()) for name, tensor in case.model.weights()])
            chunk = case.draw_chunks()
            with torch.no_grad():
                cold, hot = (float(m.chunk_log_probs(case.obs, chunk).entropy.mean()) for m in (case.model, hotter))
        if hot > cold:
            break  # heated, a wide squashed Gaussian loses entropy: its samples gather at the ends of the range
    got = f"{hot:.3g} nats, and {cold:.3g} without"
    case.f.expect(hot > cold, "temperature", "a higher entropy at twice the temperature", got, remedy)
    heated = attrs.evolve(case, model=hotter)
    sampled = heated.draw_chunks()
    with torch.no_grad():
        scores = hotter.chunk_log_probs(case.obs, sampled)
    what = "the log_probs recorded at sampling, at twice the temperature"
    case.expect_near(scores.log_probs, sampled.log_probs, "chunk_log_probs", what, remedy, KERNELS)
    _sampled_from(heated, " (at twice the temperature)")
