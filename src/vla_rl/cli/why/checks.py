"""Stage 2 without any change: what one repeated step shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import torch
from attrs import evolve

from vla_rl.cli.why.causes import Cause, name_cause
from vla_rl.cli.why.repeat import NOTES, RepeatedStep, Update

SMALL = 2e-3  # difference of log-probs, in nats a token, that rounding explains


def find_wrappers() -> Iterator[Cause]:
    """Yield what the run's wrappers change between policy and simulator."""
    pairs = NOTES.rewards
    own, rewarded = (np.concatenate([pair[side].ravel() for pair in pairs] or [np.zeros(1)]) for side in (0, 1))
    if not np.array_equal(own, rewarded):
        name = "rewards are changed"
        evidence = f"the run gets {int((own != rewarded).sum())} other rewards than it earned"
        if np.array_equal(rewarded, -own):
            name = "rewards have the wrong sign"
        elif all(np.array_equal(a[:, :-1], b[:, 1:]) and not b[:, 0].any() for a, b in pairs):
            name = "rewards come late"
        elif np.array_equal(rewarded, np.clip(own, rewarded.min(), rewarded.max())):
            name = "rewards are clipped"
        yield name_cause(name, rewarded.max(), f"{evidence}: up to {rewarded.max():g} instead of {own.max():g}")
    won, counted = (np.concatenate([pair[side] for pair in NOTES.wins] or [np.zeros(1, bool)]) for side in (0, 1))
    added, lost = int((counted & ~won).sum()), int((won & ~counted).sum())
    if added or lost:
        evidence = f"of the simulator's {won.sum()} successes the run misses {lost}, and it counts {added} others"
        yield name_cause("false successes" if added >= lost else "successes are lost", added or lost, evidence)
    if NOTES.ignored is not None and NOTES.ignored.any():
        numbers = np.flatnonzero(NOTES.ignored).tolist()
        evidence = f"the simulator gets other values than the policy chose of the action's numbers {numbers}"
        yield name_cause("actions are changed", len(numbers), evidence)
    train, evaluated = (NOTES.states.get(split) or Counter[str]() for split in ("train", "eval"))
    shares = {task: train[task] * evaluated.total() / (train.total() * n) for task, n in evaluated.items() if train}
    task = min(shares, key=shares.__getitem__, default="")
    if shares and shares[task] < 0.1:
        evidence = f"{train[task]} of {train.total()} training states and {evaluated[task]} of {evaluated.total()} "
        yield name_cause("a task starves", shares[task], f"{evidence}evaluation states are of {task}")


def find_signs(step: RepeatedStep) -> Iterator[Cause]:
    """Yield where failures are rewarded as much as successes, or more."""
    rollout = step.rollout
    ends = (rollout.terminated | rollout.truncated).any(-1).long()
    first = ends.cumsum(0) - ends == 0
    scores = (torch.where(rollout.valid, rollout.rewards, torch.zeros(())).sum(-1) * first).sum(0)
    won = rollout.success.bool()
    if int(won.sum()) < 3 or int((~won).sum()) < 3:
        return
    win, loss = float(scores[won].mean()), float(scores[~won].mean())
    if win < loss + 1e-6:
        name = "rewards have the wrong sign" if win < loss - 1e-6 else "success brings no reward"
        cause = name_cause(name, win - loss, f"successes are rewarded {win:.3g}, failures {loss:.3g}")
        yield evolve(cause, stage=2, certainty=0.93)


def find_different_acting(step: RepeatedStep, update: Update) -> Iterator[Cause]:
    """Yield why what is scored is not what acted, although the weights are the same."""
    first, prepared = step.first_difference, step.prepared
    newest = bool((prepared.versions[prepared.samples] == step.step - 1).all())
    if update.difference < SMALL or not newest:
        return
    seen = sum(count for image, count in NOTES.learned.items() if image in NOTES.acted)
    total = NOTES.learned.total()
    evidence = (
        f"log-probs of the same weights differ by {update.difference:.2g} nats a token between acting and learning; "
        f"{seen} of {total} images that are scored were seen in acting"
    )
    name = "acting and scoring differ"
    if first is not None and first < update.difference / 10:
        evidence += f"; at the run's first weights they differ by {first:.2g}"
        name = "stale weights act"
    elif seen < 0.5 * total:
        name = "acting sees other images"
    yield name_cause(name, update.difference, evidence)


def find_wrong_terms(step: RepeatedStep) -> Iterator[Cause]:
    """Yield wrong masks, wrong normalisation, and weights without a gradient."""
    rollout, own = step.prepared, step.advantages
    valid = rollout.samples if own.weights.dim() == 2 else rollout.valid
    stray, missing = int(((own.weights > 0) & ~valid).sum()), int(((own.weights <= 0) & valid).sum())
    if stray or missing > 0.1 * int(valid.sum()):
        evidence = f"{stray} terms of the loss are of no executed action, and {missing} executed ones are left out"
        yield name_cause("a wrong mask", stray + missing, evidence)
    inside = own.advantages[rollout.samples if own.advantages.dim() == 2 else rollout.valid]
    if getattr(step.spec.algorithm.config, "normalize_advantages", None) and len(inside) > 2:
        mean, std = float(inside.mean()), float(inside.std())
        if std and (abs(mean) > 0.05 or abs(std - 1) > 0.05):
            evidence = (
                f"over executed actions normalised advantages have mean {mean:.2f} and std {std:.2f}, not 0 and 1"
            )
            yield name_cause("normalised over padding", mean, evidence)
    if NOTES.idle > 0.1 * NOTES.tensors:
        evidence = f"{NOTES.idle} of {NOTES.tensors} trained tensors have no gradient"
        yield name_cause("weights without a gradient", NOTES.idle, evidence)
