"""What learner ranks train on in one iteration: a rollout on its way through the runtime, for tests of the learner's
own code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import numpy as np
from attrs import frozen

from vla_rl.core.hookspecs import Algorithm
from vla_rl.core.randomness import generator
from vla_rl.core.run.selection import take_columns
from vla_rl.core.spec.sections import TrainSpec
from vla_rl.core.trainers import ModelInputs, UpdateMetrics
from vla_rl.core.types import Array, EnvInfo, Rollout
from vla_rl.plugins.trainers.behaviour_cloning.impl import BehaviourCloning
from vla_rl.plugins.trainers.policy_gradient.impl import PolicyGradient
from vla_rl.runtime.driver.collecting.assembler import RolloutBatch, all_samples
from vla_rl.runtime.driver.training.update import RankShard, split_into_minibatches
from vla_rl.runtime.messages.learning import SampleBatch, SampleRefs
from vla_rl.runtime.workers.learner.learner import Learner
from vla_rl.runtime.workers.learner.trainers import Trainers
from vla_rl.testing import synthetic
from vla_rl.toolkit.no_settings import NoSettings
from vla_rl.toolkit.trainers.context import TrainerContext
from vla_rl.toolkit.trainers.trained_model import TrainedModel


def policy_gradient(algorithm: Algorithm, compare_acting: bool = False) -> Callable[[TrainedModel], Trainers]:
    """The trainers of a run by this algorithm, for a `Learner`."""

    def make(trained: TrainedModel) -> Trainers:
        training = TrainerContext(
            trained=trained, algorithm=algorithm, heartbeat=lambda: None, compare_acting=compare_acting
        )
        return Trainers(
            collected=PolicyGradient(NoSettings(), training),
            demonstrations=BehaviourCloning(NoSettings(), training),
        )

    return make


BINS = 8
"""Bins of the `LinearModel` that chose the actions."""


@frozen(kw_only=True, eq=False)
class Update:
    """An iteration's samples, and what each rank does with them."""

    heavy: ModelInputs
    light: Mapping[str, Any]
    shares: list[RankShard]

    def train(self, learner: Learner, rank: int = 0, step: int = 1) -> UpdateMetrics:
        """The rank's optimiser steps. -> what `Learner.update` returns."""
        own = self.shares[rank]
        light = {name: None if array is None else array[own.samples] for name, array in self.light.items()}
        refs = hold_inputs(learner, self.heavy, own.samples)
        metrics = learner.update(step, refs, light, own.steps)
        learner.buffer.release_samples({0: own.samples})
        return metrics

    def train_in_parts(self, learner: Learner, rank: int, step: int, parts: int) -> UpdateMetrics:
        """The same, of one optimiser step, begun with parts of its samples."""
        of_ranks = [np.array_split(np.arange(len(share.steps[0].micro_batches)), parts) for share in self.shares]
        own = self.shares[rank]
        (whole,) = own.steps
        for i in range(parts):
            micro_batches = [whole.micro_batches[k] for k in of_ranks[rank][i]]
            samples = np.sort(np.concatenate([np.zeros(0, np.int64), *micro_batches]))
            light = {n: None if a is None else a[own.samples][samples] for n, a in self.light.items()}
            refs = hold_inputs(learner, self.heavy, own.samples[samples])
            indices = [np.searchsorted(samples, of_batch) for of_batch in micro_batches]
            passes = max(len(of_rank[i]) for of_rank in of_ranks)
            learner.forward_backward(step - 1, refs, light, indices, passes, i == 0)
        nothing = np.zeros(0, np.int64), np.zeros(0, np.int64)
        last = attrs.evolve(whole, micro_batches=(), passes=0, accumulated=True)
        metrics = learner.update(step, nothing, {}, [last])
        learner.buffer.release_samples({0: own.samples})
        return metrics


def hold_inputs(learner: Learner, heavy: ModelInputs, samples: Array) -> SampleRefs:
    """Let the learner hold these samples, as if worker 0 had made them. -> references to them."""
    ids = np.sort(samples)
    none = np.zeros(0, np.int64)
    if len(ids):
        learner.buffer.add(0, [SampleBatch(sample_ids=ids, inputs=heavy.take(ids), final_ids=none, finals=None)])
    return np.zeros(len(samples), np.int64), samples


def update_of(
    algorithm: Algorithm,
    rollout: Rollout,
    info: EnvInfo,
    *,
    world: int = 1,
    micro_batch: int,
    global_batch: int | None = None,
    mini_batches: int | None = None,
    lopsided: bool = False,
) -> Update:
    """One update on this rollout, of which the algorithm keeps what it wants; images and tokens are random.

    Args:
        lopsided: rank 0 has all samples.
    """
    keep = algorithm.select(rollout).nonzero().flatten().numpy()
    kept = take_columns(rollout, keep)
    columns = np.zeros(len(rollout.groups), np.int64)
    sample_ids = np.zeros(rollout.samples.shape, np.int64)
    gathered = RolloutBatch(rollout=rollout, sample_ids=sample_ids, workers=columns, numbers=columns)
    samples = all_samples(gathered.cut_columns(kept, keep), algorithm.advantages(kept))
    light = samples.fields
    count, (chunk, tokens) = len(samples.steps), rollout.log_probs.shape[2:]
    rng = generator(rollout.step, "samples")
    heavy = ModelInputs(
        obs=synthetic.observation(info, count, seed=rollout.step),
        actions=rng.standard_normal((count, chunk, info.action_dim), dtype=np.float32),
        extras={"tokens": rng.integers(0, BINS, (count, chunk, tokens))},
    )
    shares = split_into_minibatches(
        np.zeros(count, np.int64) if lopsided else np.arange(count) % world,
        np.arange(count),
        light,
        world=world,
        seed=0,
        step=rollout.step,
        train=TrainSpec(
            steps=1,
            lr=1e-4,
            global_batch=global_batch,
            mini_batches=mini_batches,
            micro_batch=min(micro_batch, global_batch or micro_batch),
        ),
    )
    return Update(heavy=heavy, light=light, shares=shares)
