"""`train_on`: one update of a model on one rollout, in this process, as one learner makes it in one optimiser step."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import torch

from vla_rl.core.capabilities import HasReference, require_capability
from vla_rl.core.hookspecs import Algorithm, VLAModel
from vla_rl.core.randomness import Noise
from vla_rl.core.run.selection import take_columns
from vla_rl.core.types import Chunk, EnvInfo, Rollout, pick_rows, to_numpy
from vla_rl.testing import synthetic
from vla_rl.toolkit.algorithms.declarations import check_declarations
from vla_rl.toolkit.algorithms.statistics import read_all


def train_on(
    rollout: Rollout, *, algorithm: Algorithm, model: VLAModel, info: EnvInfo, optimizer: torch.optim.Optimizer
) -> dict[str, float]:
    """Train the model on a made-up rollout, such as `synthetic.rollout(values="chunk", chunk=3, tokens=2)`.

        model = LinearModel(info := synthetic.env_info(), chunk=3)
        optimizer = torch.optim.AdamW(model.module.parameters(), lr=1e-2)
        metrics = train_on(rollout, algorithm=MyAlgorithm(config), model=model, info=info, optimizer=optimizer)

    The model acts first, on random images that are the same every time: its log-probs and values take the place of
    the rollout's, whose rewards and ends stay. Then come `shape_rewards`, `select`, `advantages`, the loss of all
    samples and a step of the optimiser. No gradient is clipped.

    Args:
        rollout: C actions a chunk and M tokens an action are the model's.   info: what the model was built for.
    Returns: metrics under the names of a run; none where the algorithm keeps nothing.
    """
    check_declarations(algorithm, type(algorithm).__name__)
    shape = rollout.samples.shape
    count = rollout.samples.numel()
    obs = synthetic.observation(info, count)
    chunk = model.sample_chunk(obs, Noise(0, "train_on", range(count), [0] * count, [0] * count), False)
    scored = _with_scores(rollout, chunk)
    if algorithm.needs.proximal_log_probs:
        scored = scored.evolve(proximal_log_probs=scored.log_probs)
    shaped_rollout = algorithm.shape_rewards(scored)
    columns = np.flatnonzero(algorithm.select(shaped_rollout).numpy())
    if not len(columns):
        return {}
    selected = take_columns(shaped_rollout, columns)
    advantages = algorithm.advantages(selected)
    samples = np.arange(count).reshape(shape)[:, columns][selected.samples.numpy()]
    batch = synthetic.batch(selected, advantages)
    recorded_chunk = attrs.evolve(
        batch.chunk,
        actions=pick_rows(chunk.actions, samples),
        extras={name: pick_rows(tensor, samples) for name, tensor in chunk.extras.items()},
    )
    batch = attrs.evolve(batch, obs=obs.take(samples), chunk=recorded_chunk)
    if algorithm.needs.reference:
        reference = require_capability(model, HasReference, "the algorithm")
        with torch.no_grad():
            log_probs = reference.reference_log_probs(batch.obs, batch.chunk)
        batch = attrs.evolve(batch, reference_log_probs=log_probs)
    loss = algorithm.loss(model.chunk_log_probs(batch.obs, batch.chunk), batch)
    optimizer.zero_grad()
    loss.total.backward()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = torch.nn.utils.clip_grad_norm_(parameters, float("inf"))
    optimizer.step()
    return {
        **advantages.metrics,
        "loss/total": float(loss.total.detach()),
        "policy/grad_norm": float(norm),
        **{name: float(value) for name, value in {**loss.metrics, **loss.maxima}.items()},
        **read_all([{name: statistic.cpu() for name, statistic in loss.statistics.items()}]),
    }


def _with_scores(rollout: Rollout, chunk: Chunk) -> Rollout:
    """Return the rollout with the log-probs and values of the sampled chunks, [T * N, ...]."""

    def to_rollout_shape(array: Any) -> torch.Tensor:
        flat = torch.from_numpy(to_numpy(array))
        return flat.reshape(*rollout.samples.shape, *flat.shape[1:])

    values = rollout.values if chunk.values is None else to_rollout_shape(chunk.values)
    return rollout.evolve(log_probs=to_rollout_shape(chunk.log_probs), values=values)
