"""Scores with a learner's current weights, before training: values (also final ones, AcceRL eq. 3-4), log-probs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from attrs import asdict, frozen

from vla_rl.core.capabilities import HasCritic, require_capability
from vla_rl.core.trainers import ModelInputs
from vla_rl.core.types import Array, Chunk, Observation, to_numpy
from vla_rl.runtime.messages.learning import SampleScores, ScoreRequest
from vla_rl.runtime.workers.learner.sample_buffer import SampleBuffer
from vla_rl.toolkit.trainers.trained_model import TrainedModel

T = TypeVar("T")


@frozen(eq=False)
class Scoring:
    """Scoring of samples in the buffer of one rank."""

    trained: TrainedModel
    buffer: SampleBuffer
    heartbeat: Callable[[], None]
    """Called before each batch."""

    @torch.no_grad()
    def answer_request(self, request: ScoreRequest) -> SampleScores:
        """Compute all scores of a request. Raises KeyError for a sample that this rank does not hold."""
        inputs, finals = self.buffer.find_inputs, self.buffer.find_finals
        values, next_values, log_probs = request.passes
        with self.trained.released():
            return SampleScores(
                values=self._score_batches(
                    lambda refs: self._compute_values(inputs(*refs).take_all().obs),
                    request.values,
                    values,
                    self._dummy_values,
                ),
                next_values=self._score_batches(
                    lambda refs: _first_values(self._compute_values(finals(*refs).take_all())),
                    request.finals,
                    next_values,
                    self._dummy_values,
                ),
                log_probs=self._score_batches(
                    lambda batch: self._log_probs(inputs(*batch[0]).take_all(), batch[1]),
                    request.log_probs,
                    log_probs,
                    self._dummy_log_probs,
                ),
            )

    def _score_batches(
        self, score: Callable[[T], torch.Tensor], batches: Sequence[T], passes: int, dummy: Callable[[ModelInputs], Any]
    ) -> list[Array]:
        """Score each batch, then dummy batches while other ranks have batches left (`passes`: the most of any rank).
        Scores are copied to the host after the last batch, so that the device never waits for the host."""
        scores: list[torch.Tensor] = []
        for batch in batches:
            self.heartbeat()
            scores.append(score(batch))
        for _ in range(self.trained.dummy_passes(passes, len(batches))):
            self.heartbeat()
            dummy(self.trained.dummy_inputs)
        return [to_numpy(tensor).astype(np.float32) for tensor in scores]

    def _compute_values(self, obs: Observation) -> torch.Tensor:
        model = require_capability(self.trained.model, HasCritic, "an algorithm with values")
        return self.trained.strategy.run(lambda: model.values(obs))

    def _log_probs(self, inputs: ModelInputs, recorded: Array) -> torch.Tensor:
        model = self.trained.model
        chunk = Chunk(actions=inputs.actions, log_probs=recorded, extras=inputs.extras)
        scores = self.trained.strategy.run(lambda: asdict(model.chunk_log_probs(inputs.obs, chunk), recurse=False))
        log_probs: torch.Tensor = scores["log_probs"]
        return log_probs

    def _dummy_values(self, inputs: ModelInputs) -> None:
        self._compute_values(inputs.obs)

    def _dummy_log_probs(self, inputs: ModelInputs) -> None:
        tokens = self.trained.model.tokens_per_action
        self._log_probs(inputs, np.zeros((*inputs.actions.shape[:2], tokens), np.float32))


def _first_values(values: torch.Tensor) -> torch.Tensor:
    """Return the values of the first action of each sample, [b]."""
    return values if values.ndim == 1 else values[:, 0]
