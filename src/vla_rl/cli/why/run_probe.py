"""Probe around a run's own wrappers: what the run gives to its components, and what it gets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator

from attrs import evolve

from vla_rl.cli.why.repeat import NOTES
from vla_rl.core.manager import hookimpl
from vla_rl.core.types import ArrayOrTensor, Batch, ChunkResult, Loss, ResetState, Scores, to_numpy


@hookimpl(wraps="env")
def reset_states(split: str) -> Generator[None, tuple[ResetState, ...], tuple[ResetState, ...]]:
    """Count the reset states of each task."""
    states = yield
    NOTES.states[split] = Counter(state.task for state in states)
    return states


@hookimpl(wraps="env")
def chunk_step(actions: ArrayOrTensor) -> Generator[None, ChunkResult, ChunkResult]:
    """Compare both sides of the run's wrappers around the simulator."""
    chosen = to_numpy(actions).copy()
    result = yield
    NOTES.note_chunk(chosen, result)
    return result


@hookimpl(wraps="algorithm")
def loss(scores: Scores, batch: Batch) -> Generator[None, Loss, Loss]:
    """Note the scores, and let another loss take the place of the run's."""
    gap = (scores.log_probs.detach() - batch.log_probs).abs().mean(-1)
    NOTES.differences.append(float(gap[batch.valid].mean()) if bool(batch.valid.any()) else 0.0)
    loss_of, NOTES.loss_of = NOTES.loss_of, None  # which may call a loss with this probe around it
    result = yield
    if loss_of is None:
        return result
    try:
        return evolve(result, total=loss_of(scores, batch, result))
    finally:
        NOTES.loss_of = loss_of
