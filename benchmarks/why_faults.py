"""Faults for `benchmarks/why.py`, one at a time: the wrappers around a run's components that the environment variable
WHY_FAULT names. A spec names this file in `plugins:`."""

from __future__ import annotations

import os

import numpy as np
import torch
from attrs import evolve

from vla_rl import hookimpl

KEPT: dict[str, object] = {}
RANDOM = np.random.default_rng(0)


def planted(name: str) -> bool:
    return os.environ.get("WHY_FAULT") == name


@hookimpl(wraps="env")
def reset_states(split):
    states = yield
    if planted("starving task") and split == "train":
        rare = states[-1].task
        return tuple(s for s in states if s.task != rare) + tuple(s for s in states if s.task == rare)[:2]
    return states


@hookimpl(wraps="env")
def chunk_step(actions):
    if planted("ignored dimension"):
        actions[..., 1] = 0
    result = yield
    rewards, success = np.asarray(result.rewards), np.asarray(result.success)
    if planted("late reward"):
        late = np.zeros_like(rewards)
        late[:, 1:] = rewards[:, :-1]
        return evolve(result, rewards=late)
    if planted("clipped rewards"):
        return evolve(result, rewards=np.clip(rewards, -0.1, 0.1))
    if planted("negated rewards"):
        return evolve(result, rewards=-rewards)
    if planted("false successes"):
        active = np.asarray(result.executed).any(1)
        lucky = active & ~success & (RANDOM.random(len(active)) < 0.05)
        last = np.zeros_like(np.asarray(result.terminated))
        last[np.arange(len(lucky)), np.maximum(np.asarray(result.executed).sum(1) - 1, 0)] = lucky
        return evolve(
            result,
            success=success | lucky,
            succeeded=None if result.succeeded is None else np.asarray(result.succeeded) | last,
            terminated=np.asarray(result.terminated) | last,
            rewards=rewards + last.astype(rewards.dtype),
        )
    if planted("success lost at the limit"):
        steps = result.obs.steps
        late = np.zeros(len(success), bool) if steps is None else np.asarray(steps) >= 12
        late |= RANDOM.random(len(success)) < (0.3 if steps is None else 0)
        keep = ~late[:, None]
        return evolve(
            result,
            success=success & ~late,
            succeeded=None if result.succeeded is None else np.asarray(result.succeeded) & keep,
            terminated=np.asarray(result.terminated) & keep,
            rewards=rewards * keep,
        )
    return result


@hookimpl(wraps="model")
def sample_chunk(obs, greedy):
    flipped = planted("flipped camera in acting")
    if flipped:
        for image in obs.images.values():
            image[:] = torch.flip(image, [2]) if torch.is_tensor(image) else image[:, :, ::-1].copy()
    weights = KEPT.get("module") if planted("stale weights act") else None
    if weights is not None:
        module, first = weights
        new = {name: p.detach().clone() for name, p in module.named_parameters()}
        with torch.no_grad():
            for name, p in module.named_parameters():
                p.copy_(first[name])
    result = yield
    if weights is not None:
        with torch.no_grad():
            for name, p in module.named_parameters():
                p.copy_(new[name])
    if flipped:
        for image in obs.images.values():
            image[:] = torch.flip(image, [2]) if torch.is_tensor(image) else image[:, :, ::-1].copy()
    if planted("statistics of another suite"):
        return evolve(result, actions=np.clip(np.asarray(result.actions) * 0.1 + 0.6, -1, 1).astype(np.float32))
    if planted("evaluation is greedy") and greedy:
        return evolve(result, actions=np.asarray(result.actions) * 0)
    if planted("identical groups"):
        state = np.asarray(obs.state).round(4).tolist()
        first: dict[tuple, int] = {}
        keys = [(told, *numbers) for told, numbers in zip(obs.instructions, state, strict=True)]
        rows = [first.setdefault(key, i) for i, key in enumerate(keys)]
        return result.take(np.array(rows))
    return result


@hookimpl(wraps="model")
def chunk_log_probs(chunk):
    result = yield
    if planted("wrong tokens scored"):
        return evolve(result, log_probs=torch.roll(result.log_probs, 1, dims=1))
    return result


@hookimpl(wraps="algorithm")
def advantages(rollout):
    result = yield
    if planted("wrong mask"):
        return evolve(result, weights=torch.roll(result.weights, 1, dims=0))
    if planted("normalised over padding"):
        whole = result.advantages
        return evolve(result, advantages=(whole - whole.mean()) / (whole.std() + 1e-8) * rollout.samples)
    return result


@hookimpl(wraps="algorithm")
def loss(scores, batch):
    result = yield
    if planted("micro-batches weighed wrongly"):
        share = float(batch.weights.sum())
        return evolve(result, total=result.total / max(share, 1e-8))
    return result


@hookimpl(wraps="trainer")
def modules():
    result = yield
    module = result["policy"]
    if planted("stale weights act"):  # from the first checkpoint on those of the first step act
        first = KEPT.setdefault("first", {name: p.detach().clone() for name, p in module.named_parameters()})
        KEPT["module"] = module, first
    if planted("idle adapter") and KEPT.get("id") != id(module):
        KEPT["id"] = id(module)
        trained = [p for p in module.parameters() if p.requires_grad]
        for p in trained[: len(trained) // 3]:
            p.register_hook(torch.zeros_like)
    return result
