"""What a learner computes of samples that lie with it before they are trained on: values, those of final observations
included (AcceRL eq. 3-4), and log-probs, by its weights, which are the newest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from attrs import asdict, frozen

from vla_rl.core.hookspecs import VLAModel
from vla_rl.core.types import Array, Chunk, Observation, to_numpy
from vla_rl.runtime.messages.learning import SampleScores, ScoreRequest
from vla_rl.runtime.messages.model_inputs import ModelInputs
from vla_rl.runtime.workers.learner.parallel.data_parallel import ParallelStrategy
from vla_rl.runtime.workers.learner.sample_buffer import SampleBuffer, ScatteredRows

T = TypeVar("T")


@frozen(eq=False)
class Scoring:
    model: VLAModel
    group: ParallelStrategy
    buffer: SampleBuffer
    filler: ModelInputs | None
    """One sample to keep step with other ranks, where all passes are made together."""
    beat: Callable[[], None]

    @torch.no_grad()
    def answer(self, asked: ScoreRequest) -> SampleScores:
        """Raises KeyError for a sample that does not lie here."""
        heavy, finals = self.buffer.heavy, self.buffer.finals
        values, next_values, log_probs = asked.passes
        return SampleScores(
            values=self._each(lambda b: self._values(_all(heavy(*b)).obs), asked.values, values, self._blank_values),
            next_values=self._each(
                lambda b: _first(self._values(_all(finals(*b)))), asked.finals, next_values, self._blank_values
            ),
            log_probs=self._each(
                lambda b: self._log_probs(_all(heavy(*b[0])), b[1]), asked.log_probs, log_probs, self._blank_log_probs
            ),
        )

    def _each(
        self, score: Callable[[T], Array], batches: Sequence[T], passes: int, blank: Callable[[ModelInputs], Any]
    ) -> list[Array]:
        found = []
        for batch in batches:
            self.beat()
            found.append(score(batch))
        for _ in range(passes - len(batches) if self.group.lockstep else 0):
            self.beat()
            assert self.filler is not None
            blank(self.filler)
        return found

    def _values(self, obs: Observation) -> Array:
        values: Array = to_numpy(self.group.run(lambda: self.model.values(obs))).astype(np.float32)
        return values

    def _log_probs(self, heavy: ModelInputs, recorded: Array) -> Array:
        chunk = Chunk(actions=heavy.actions, log_probs=recorded, extras=heavy.extras)
        scores = self.group.run(lambda: asdict(self.model.chunk_log_probs(heavy.obs, chunk), recurse=False))
        log_probs: Array = to_numpy(scores["log_probs"]).astype(np.float32)
        return log_probs

    def _blank_values(self, filler: ModelInputs) -> None:
        self._values(filler.obs)

    def _blank_log_probs(self, filler: ModelInputs) -> None:
        self._log_probs(filler, np.zeros((*filler.actions.shape[:2], self.model.tokens_per_action), np.float32))


def _all(rows: ScatteredRows[Any]) -> Any:
    return rows.take(np.arange(len(rows)))


def _first(values: Array) -> Array:
    """Of the first action of each row, [b]."""
    return values if values.ndim == 1 else values[:, 0]
