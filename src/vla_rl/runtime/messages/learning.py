"""Requests of the driver to the learners: optimiser steps on samples that they hold, and scores of such samples."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from vla_rl.core.spec.sections import AugmentSpec
from vla_rl.core.types import Array


@frozen(kw_only=True)
class OptimizerStep:
    """One rank's share of one optimiser step. The divisors count all ranks, so the sum of the ranks' gradients is an
    exact mean.
    """

    micro_batches: tuple[Array, ...]
    """Indices into the rank's samples, int64 [B] for each micro-batch; empty where the rank only joins the
    reduction.
    """
    passes: int
    """Number of micro-batches of the rank that has the most."""
    divisor: float
    """Sum of the policy loss's counts over the whole optimiser step."""
    value_divisor: float
    accumulated: bool = False
    """True where `forward_backward` already ran the passes, on samples that are not sent again (streaming update).
    """


UNNORMALISED = OptimizerStep(micro_batches=(), passes=0, divisor=1.0, value_divisor=1.0)
"""Placeholder step for a part of a streaming update, whose divisors are known only when the last part is there."""


@frozen(kw_only=True)
class ImitationStep:
    """One rank's share of one optimiser step of behaviour cloning."""

    step: int
    """Number of the optimiser step, from 1."""
    first: int
    """Number of the rank's first sample within the step, over all ranks."""
    indices: Array
    """Indices into the rank's samples, int64 [B]; empty where the rank only joins the reduction."""
    total: int
    """Number of samples of all ranks."""
    most: int
    """Number of samples of the rank that has the most."""
    lr: float
    augment: AugmentSpec | None = None
    """Random changes of the pictures; None: none."""
    seed: int = 0
    """Seed of these changes."""


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
