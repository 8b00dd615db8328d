"""Samples on their way from policies to learners, and requests of the driver for scores of those that learners hold."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from vla_rl.core.trainers import ModelInputs
from vla_rl.core.types import Array, Observation, SampleRecord

SampleRefs = tuple[Array, Array]
"""References to samples: the policy workers that made them, and the sample ids there, int64 [b] each."""


@frozen(kw_only=True, eq=False)
class SampleBatch(SampleRecord):
    """Samples of one policy worker, on their way to a learner."""

    sample_ids: Array
    """int64 [B], ascending."""
    inputs: ModelInputs
    final_ids: Array
    """Ids of samples that have a final observation, int64 [K], ascending; empty if values are never recomputed."""
    finals: Observation | None
    """Final observations of the samples in `final_ids`, [K]; None without such samples."""


@frozen(kw_only=True, eq=False)
class ScoreRequest:
    """Samples that one rank has to score, in batches."""

    values: Sequence[SampleRefs] = ()
    finals: Sequence[SampleRefs] = ()
    """Samples whose final observations get a value."""
    log_probs: Sequence[tuple[SampleRefs, Array]] = ()
    """Samples whose log-probs are recomputed, each batch with the recorded log-probs, float32 [b, C, M]."""
    passes: tuple[int, int, int] = (0, 0, 0)
    """Number of batches of `values`, `finals` and `log_probs` on the rank that has the most."""


@frozen(kw_only=True, eq=False)
class SampleScores:
    """Answer to a `ScoreRequest`: one array for each of its batches."""

    values: list[Array]
    """float32 [b] or [b, C] for each batch."""
    next_values: list[Array]
    """float32 [b] for each batch."""
    log_probs: list[Array]
    """float32 [b, C, M] for each batch."""
