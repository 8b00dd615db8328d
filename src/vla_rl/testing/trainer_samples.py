"""Parts of `check_trainer`: random data of updates, and bandits that reward what has the sign of the state."""

from __future__ import annotations

from enum import Enum
from typing import Any

import numpy as np
import torch
from attrs import define, evolve

from vla_rl.core.capabilities import STEERING
from vla_rl.core.declarations import TrainingData
from vla_rl.core.hookspecs import Demonstrations
from vla_rl.core.randomness import Noise
from vla_rl.core.trainers import (
    DemonstrationsData,
    ImitationStep,
    ModelInputs,
    OptimizerStep,
    TrajectoryData,
    Transitions,
    TransitionsData,
)
from vla_rl.core.types import ActionSource, Array, Chunk, EnvInfo, Observation, RecordedRewards, to_numpy
from vla_rl.testing import synthetic
from vla_rl.testing.linear import LinearModel
from vla_rl.testing.trainer_case import CHUNK, SAMPLES, TrainerCase

RATE = 1e-2
"""Learning rate of optimiser steps on demonstrations."""


class LearningSource(Enum):
    """What a trainer learns from."""

    REWARDS = "rewards"
    """Rewards, or advantages."""
    LABELS = "labels"
    """Actions of demonstrations, or of an expert."""
    TAKEOVERS = "takeovers"
    """Actions of whoever takes over."""


@define(eq=False)
class RecordedSamples(Demonstrations):
    """Recorded samples with rewards."""

    obs: Observation
    actions: Array
    rewards: Array
    following: Array

    def num_samples(self) -> int:
        return len(self.obs)

    def read_samples(self, indices: Any) -> tuple[Observation, Array]:
        index = np.asarray(to_numpy(indices))
        return self.obs.take(index), self.actions[index]

    def read_rewards(self, indices: Any, discount: float) -> RecordedRewards:
        index = np.asarray(to_numpy(indices))
        return RecordedRewards(rewards=self.rewards[index], following=self.following[index])


def made_up_data(case: TrainerCase, number: int, samples: Array | None = None, steps: int = 1) -> Any:
    """Return the data of an update (from 1) of chance.

    Args:
        samples: those of this rank, int64 [B]; None: all. Trainers of transitions get as many, or by default one more
            than there are samples.
        steps: optimiser steps, among which samples are divided; for trainers of transitions, which make their own, it
            does not count.
    """
    if case.kind is TrainingData.TRANSITIONS:
        return _transition_update(case, number, SAMPLES + 1 if samples is None else len(samples))
    info = case.trained.info
    obs = synthetic.observation(info, SAMPLES, seed=number)
    zeros = [0] * SAMPLES
    noise = Noise(0, "check_trainer", list(range(SAMPLES)), zeros, [number] * SAMPLES)
    chunk = _first_policy(case).sample_chunk(obs, noise, False)
    own = np.arange(SAMPLES) if samples is None else samples
    if case.is_cloning:
        last = np.arange(SAMPLES) % (SAMPLES // 2) == SAMPLES // 2 - 1
        recording = RecordedSamples(  # two episodes of which the first earns a reward at its end
            obs=obs,
            actions=to_numpy(chunk.actions),
            rewards=(last & (np.arange(SAMPLES) < SAMPLES // 2)).astype(np.float32),
            following=np.where(last, -1, np.arange(SAMPLES) + 1),
        )
        return _demonstration_update(recording, number, np.array_split(own, steps), SAMPLES // steps)
    advantages = np.random.default_rng(number).standard_normal(SAMPLES, np.float32)
    return _trajectory_update(case, number, obs, chunk, advantages, own, steps)


def bandit_data(
    case: TrainerCase, number: int, good: int, learns_from: LearningSource, recording: RecordedSamples | None = None
) -> Any:
    """Return the data of an update (from 1) in which an action is good if its sign is `good` (1 or -1) times the
    state's. The sign of an action says whether all of its numbers are at the upper or the lower bounds.

    Neighbours in the data differ in such a way that to mistake one for the other turns most of what is learnt round.

    Args:
        learns_from: what the trainer learns from. Good actions are rewarded, demonstrated, or those of a person.
        recording: that of the update before, for trainers of recordings, which keep them.
    """
    states, signs = bandit_rows()
    count = len(states)
    info = case.trained.info
    obs = bandit_observation(info, states, number)
    is_good = states * signs * good > 0
    if case.kind is TrainingData.TRAJECTORIES:
        actions = _chunks_at_bounds(info, signs)
        tokens = _first_policy(case).encode_actions(actions)
        chunk = Chunk(actions=actions, extras={"tokens": tokens})
        with torch.no_grad():
            log_probs = _first_policy(case).chunk_log_probs(obs, chunk).log_probs
        advantages = np.where(is_good, 1, -1).astype(np.float32)
        chunk = evolve(chunk, log_probs=log_probs)
        return _trajectory_update(case, number, obs, chunk, advantages, np.arange(count), 1)
    if case.is_cloning:
        demonstrated = states * good if learns_from is LearningSource.LABELS else signs
        if recording is None:
            recording = RecordedSamples(
                obs=obs,
                actions=_chunks_at_bounds(info, demonstrated),
                rewards=is_good.astype(np.float32),
                following=np.full(count, -1),
            )
        return _demonstration_update(recording, number, [np.arange(count)] * 2, count)
    taken_over = is_good & (learns_from is LearningSource.TAKEOVERS)
    source = np.where(taken_over, ActionSource.PERSON, ActionSource.POLICY).astype(np.int8)
    transitions = Transitions(
        frames=Observation.concat([obs, obs.take(np.zeros(1, np.int64))]),
        first=np.arange(count),
        following=np.arange(1, count + 1),
        actions=_chunks_at_bounds(info, signs),
        rewards=np.repeat(np.where(is_good, 1, -1)[:, None], CHUNK, axis=1).astype(np.float32),
        valid=np.ones((count, CHUNK), bool),
        terminated=np.ones(count, bool),
        source=np.repeat(source[:, None], CHUNK, axis=1),
        expert_actions=_chunks_at_bounds(info, states * good),
        extras={STEERING: np.repeat(2.0 * signs, CHUNK * info.action_dim).reshape(count, CHUNK, -1).astype(np.float32)},
    )
    return TransitionsData(step=number, version=number - 1, transitions=transitions)


def bandit_rows() -> tuple[Array, Array]:
    """Return the signs of the states and of the actions of a bandit's samples, int64 [24] each. In two thirds of them
    the sign of the action changes from one to the next, in two thirds that of the state, and in two thirds whether the
    action has the state's sign."""
    turns = np.tile([1, -1], 4)
    same = np.ones(8, np.int64)
    states = np.concatenate([np.repeat([1, -1], 4), turns, turns])
    return states, np.concatenate([turns, same, turns])


def bandit_observation(info: EnvInfo, states: Array, number: int) -> Observation:
    """Return observations of states with these signs, int64 [B], and a little noise."""
    obs = synthetic.observation(info, len(states), seed=number)
    noise = 0.1 * np.random.default_rng(number).standard_normal((len(states), info.state_dim), np.float32)
    return evolve(obs, state=(states[:, None] + noise).astype(np.float32))


def _chunks_at_bounds(info: EnvInfo, signs: Array) -> Array:
    """Return chunks at the bounds that the signs (int64 [B]) say, float32 [B, C, A]."""
    low, high = (np.array(bound, np.float32) for bound in (info.action_low, info.action_high))
    actions = np.where(signs[:, None] > 0, high, low)
    return np.repeat(actions[:, None], CHUNK, axis=1)


def _first_policy(case: TrainerCase) -> LinearModel:
    """Return the policy before any update."""
    return LinearModel(case.trained.info, CHUNK)


def _demonstration_update(
    recording: RecordedSamples, number: int, parts: list[Array], total: int
) -> DemonstrationsData:
    """Return the `number`-th update, with an optimiser step for each part of the samples."""
    first = 1 + (number - 1) * len(parts)
    steps = [
        ImitationStep(number=first + i, first=0, indices=part, total=total, most=len(part), lr=RATE)
        for i, part in enumerate(parts)
    ]
    return DemonstrationsData(demonstrations=recording, steps=steps)


def _trajectory_update(
    case: TrainerCase, number: int, obs: Observation, chunk: Chunk, advantages: Array, own: Array, steps: int
) -> TrajectoryData:
    count = len(obs)
    size = case.trained.train.micro_batch
    valid = np.ones((count, CHUNK), bool)
    valid[::3, -1] = False
    ones = np.ones(count, np.float32)
    fields: dict[str, Array | None] = {
        "valid": valid,
        "log_probs": to_numpy(chunk.log_probs),
        "values": np.zeros(count, np.float32),
        "versions": np.zeros(count, np.int64),
        "advantages": advantages,
        "weights": ones,
        "counts": ones,
        "returns": advantages / 2,
        "value_weights": ones,
        "value_counts": ones,
    }
    of_steps = np.array_split(np.arange(len(own)) if steps == 1 else np.arange(len(own))[::-1], steps)
    optimizer_steps = []
    for rows in of_steps:
        parts = tuple(rows[start : start + size] for start in range(0, len(rows), size))
        divisor = count / steps
        optimizer_steps.append(
            OptimizerStep(micro_batches=parts, passes=len(parts), divisor=divisor, value_divisor=divisor)
        )
    return TrajectoryData(
        step=number,
        version=number - 1,
        inputs=ModelInputs(obs=obs, actions=chunk.actions, extras=chunk.extras).numpy().take(own),
        fields={name: None if array is None else array[own] for name, array in fields.items()},
        steps=optimizer_steps,
    )


def _transition_update(case: TrainerCase, number: int, count: int) -> TransitionsData:
    """Return episodes of three transitions each. A person acts in the odd transitions."""
    draws = np.random.default_rng(number)
    info = case.trained.info
    low, high = (np.array(bound, np.float32) for bound in (info.action_low, info.action_high))
    actions = low + (high - low) * draws.random((count, CHUNK, info.action_dim), np.float32)
    taken_over = np.arange(count) % 2 == 1
    source = np.where(taken_over, ActionSource.PERSON, ActionSource.POLICY).astype(np.int8)
    transitions = Transitions(
        frames=synthetic.observation(info, count + 1, seed=number),
        first=np.arange(count),
        following=np.arange(1, count + 1),
        actions=actions,
        rewards=draws.random((count, CHUNK), np.float32),
        valid=np.ones((count, CHUNK), bool),
        terminated=np.arange(count) % 3 == 2,
        source=np.repeat(source[:, None], CHUNK, axis=1),
        expert_actions=np.flip(actions, 0).copy(),
        extras={STEERING: draws.standard_normal((count, CHUNK, info.action_dim), np.float32)},
    )
    return TransitionsData(step=number, version=number - 1, transitions=transitions)
