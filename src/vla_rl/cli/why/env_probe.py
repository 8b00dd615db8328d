"""Probe next to a run's components, within its own wrappers."""

from __future__ import annotations

from collections.abc import Generator

from attrs import evolve

from vla_rl.cli.why.repeat import NOTES, fingerprints
from vla_rl.core.manager import hookimpl
from vla_rl.core.types import ArrayOrTensor, Chunk, ChunkResult, Observation, Scores, to_numpy


@hookimpl(wraps="env")
def chunk_step(actions: ArrayOrTensor) -> Generator[None, ChunkResult, ChunkResult]:
    """Keep what reaches the simulator, and its own result."""
    received = to_numpy(actions).copy()
    result = yield
    own = evolve(result, rewards=to_numpy(result.rewards).copy(), success=to_numpy(result.success).copy())
    NOTES.inner = received, own
    return result


@hookimpl(wraps="model")
def sample_chunk(obs: Observation) -> Generator[None, Chunk, Chunk]:
    """Note what the model sees when it acts."""
    NOTES.acted.update(fingerprints(obs))
    return (yield)


@hookimpl(wraps="model")
def chunk_log_probs(obs: Observation) -> Generator[None, Scores, Scores]:
    """Note what the model sees when it is scored."""
    NOTES.learned.update(fingerprints(obs))
    return (yield)
