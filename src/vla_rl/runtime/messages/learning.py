"""What the driver asks of learners: optimiser steps on samples that lie with them, and scores of such samples."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from vla_rl.core.types import Array


@frozen(kw_only=True)
class OptimizerStep:
    """One rank's share of one optimiser step; the divisors count all ranks, so summed gradients are exact means."""

    micro_batches: tuple[Array, ...]
    """int64 [B] each: indices into the rank's samples; none: the rank only joins the reduction."""
    passes: int
    """Micro-batches of the rank that has most."""
    divisor: float
    """Sum of the policy loss's counts over the whole optimiser step."""
    value_divisor: float
    fed: bool = False
    """Its passes were made before, of samples that are not here."""


UNDIVIDED = OptimizerStep(micro_batches=(), passes=0, divisor=1.0, value_divisor=1.0)
"""Of a part: what to divide by is not known yet."""


@frozen(kw_only=True)
class ImitationStep:
    """One rank's share of one optimiser step."""

    indices: Array
    """int64 [B]: of the rank's samples; none: the rank only joins the reduction."""
    total: int
    """Samples of all ranks."""
    most: int
    """Samples of the rank that has most."""
    lr: float


SampleRefs = tuple[Array, Array]
"""Samples: workers and places, int64 [b] each."""


@frozen(kw_only=True, eq=False)
class ScoreRequest:
    """Of one rank, in batches."""

    values: Sequence[SampleRefs] = ()
    finals: Sequence[SampleRefs] = ()
    """Samples whose final observations are valued."""
    log_probs: Sequence[tuple[SampleRefs, Array]] = ()
    """With those recorded, float32 [b, C, M]."""
    passes: tuple[int, int, int] = (0, 0, 0)
    """Batches of each, of the rank that has most."""


@frozen(kw_only=True, eq=False)
class SampleScores:
    """Batch by batch."""

    values: list[Array]
    """float32 [b] or [b, C] each."""
    next_values: list[Array]
    """float32 [b]."""
    log_probs: list[Array]
    """float32 [b, C, M]."""
