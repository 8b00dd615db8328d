"""Requests of the driver to the learners for scores of samples that they hold."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from vla_rl.core.types import Array

SampleRefs = tuple[Array, Array]
"""References to samples: the policy workers that made them, and the sample ids there, int64 [b] each."""


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
