"""The policy role: a model that acts for lanes and keeps what learning needs."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from attrs import define, field

from vla_rl.core.episodes import Request
from vla_rl.core.errors import PluginError
from vla_rl.core.hookspecs import VLAModel
from vla_rl.core.randomness import Noise
from vla_rl.core.types import Chunk, Observation, to_numpy
from vla_rl.runtime.learning.weights import Published, receive
from vla_rl.runtime.remote import remote
from vla_rl.runtime.rollouts.heavy import Heavy
from vla_rl.runtime.rollouts.lanes import Mode

Array = np.ndarray[Any, Any]
FRESH = frozenset({"fresh-values", "fresh-log-probs"})
"""Of `Algorithm.needs`: what `refresh` gives."""


@define
class _Record:
    """One chunk step of one lane."""

    positions: Array
    log_probs: Array
    values: Array | None
    version: int
    heavy: Heavy
    final_positions: Array = field(factory=lambda: np.zeros(0, np.int64))
    final_values: Array = field(factory=lambda: np.zeros(0, np.float32))
    final_obs: Observation | None = None


class PolicyRole:
    def __init__(
        self,
        model: VLAModel,
        *,
        name: str,
        seed: int,
        lag: int = 0,
        fresh: frozenset[str] = frozenset(),
        embed: Callable[[tuple[Array, ...]], Any] = lambda frames: None,
    ):
        """
        Args:
            lag: `rollout.lag`, for which past weights are kept in host memory.
            fresh: of FRESH, what `refresh` will be asked for; final observations are kept for it.
            embed: `Algorithm.features`.
        """
        self.embed = embed
        self.model, self.name, self.seed, self.lag, self.fresh = model, name, seed, lag, fresh
        self.version = 0
        self.past: deque[tuple[int, list[tuple[str, torch.Tensor]]]] = deque(maxlen=lag + 1)
        self.kept: dict[tuple[int, int], list[_Record]] = {}
        self.seconds = 0.0
        self.records: dict[int, list[_Record]] = {}
        self.store: dict[tuple[int, int], list[Heavy]] = {}

    @remote(lane=1, main=True)
    def act(self, mode: Mode, lanes: tuple[int, ...], *requests: Request) -> list[Array]:
        """One batch for all given lanes. -> float32 [R, C, A] a lane, aligned with its request's positions."""
        before = perf_counter()
        if mode.keep:
            self._value_finals(lanes, requests)
        busy = [(lane, request) for lane, request in zip(lanes, requests, strict=True) if request.obs is not None]
        actions: dict[int, Array] = {}
        if busy:
            obs = Observation.concat([request.obs for _, request in busy if request.obs is not None])
            noise = Noise(
                self.seed,
                mode.purpose,
                np.concatenate([request.rows for _, request in busy]).tolist(),
                np.concatenate([request.episodes for _, request in busy]).tolist(),
                np.concatenate([request.chunks for _, request in busy]).tolist(),
            )
            chunk = self.model.sample_chunk(obs, noise, mode.greedy)
            chosen = to_numpy(chunk.actions).astype(np.float32)
            self._check(chosen, chunk)
            start = 0
            for lane, request in busy:
                part = slice(start, start + len(request.positions))
                actions[lane] = chosen[part]
                if mode.keep:
                    self._keep(lane, request, chunk, part)
                start = part.stop
        self.seconds += perf_counter() - before
        empty = np.zeros((0, 0, 0), np.float32)
        return [actions.get(lane, empty) for lane in lanes]

    @remote(lane=0)
    def collect(
        self, lane: int, round_index: int, rows: int, frames: tuple[Array, ...] | None = None
    ) -> dict[str, Any]:
        """The light part of the round that ended, [T, N, ...] padded with zeros; its heavy part goes into the store.
        `frames` of the N trajectories become "features" [N, D]."""
        records = self.records.pop(lane, [])
        steps = len(records)
        light: dict[str, Array] = {
            "log_probs": _log_probs_of(records, [record.log_probs for record in records], rows),
            "versions": np.zeros((steps, rows), np.int64),
            "sample": np.full((steps, rows), -1, np.int64),
        }
        light |= _values_of(records, rows)
        if self.fresh:
            self.kept[lane, round_index] = records
        count = 0
        for t, record in enumerate(records):
            light["versions"][t, record.positions] = record.version
            light["sample"][t, record.positions] = count + np.arange(len(record.positions))
            count += len(record.positions)
        self.store[lane, round_index] = [record.heavy for record in records]
        features = None if frames is None else self._features(frames)
        seconds, self.seconds = self.seconds, 0.0
        return {"light": light, "features": features, "seconds": seconds}

    @remote()
    def take_heavy(self, wanted: Sequence[tuple[tuple[int, int], Array]], remote: bool) -> Heavy | None:
        """Samples of stored rounds, by their positions in each (ascending). None: nothing wanted."""
        parts: list[Heavy] = []
        for key, positions in wanted:
            start = 0
            for heavy in self.store[key]:
                inside = positions[(positions >= start) & (positions < start + len(heavy))] - start
                start += len(heavy)
                if len(inside):
                    parts.append(heavy.take(inside))
        if not parts:
            return None
        heavy = Heavy.concat(parts)
        return heavy.numpy() if remote else heavy

    @remote()
    def clear_store(self) -> None:
        self.records.clear()
        self.store.clear()
        self.kept.clear()

    @remote(phase="act", lane=0)
    def refresh(self, lane: int, round_index: int, rows: int) -> dict[str, Array]:
        """Of a collected round and the current weights, as far as `fresh` has it: `values` and `next_values`, as
        `collect` gave them, and `fresh_log_probs`. Log-probs of chunks that these weights chose are those recorded."""
        records, light = self.kept[lane, round_index], {}
        if "fresh-values" in self.fresh:
            for record in records:
                record.values = to_numpy(self.model.values(record.heavy.obs)).astype(np.float32)
                if record.final_obs is not None:
                    record.final_values = self._bootstrap(record.final_obs)
            light = _values_of(records, rows)
        if "fresh-log-probs" in self.fresh:
            now = [self._log_probs_now(record) for record in records]
            light["fresh_log_probs"] = _log_probs_of(records, now, rows)
        return light

    def _log_probs_now(self, record: _Record) -> Array:
        if record.version == self.version:
            return record.log_probs
        heavy = record.heavy
        chunk = Chunk(actions=heavy.actions, log_probs=record.log_probs, replay=heavy.replay)
        with torch.no_grad():
            scores = self.model.chunk_log_probs(heavy.obs, chunk)
        log_probs: Array = to_numpy(scores.log_probs).astype(np.float32)
        return log_probs

    # ------------------------------------------------------------------------------------------------- weights

    @remote(beside=True)
    def load(self, version: int, published: Published) -> None:
        """Swap in a version, between two requests."""
        receive(self.model, published)
        self.adopt(version)

    @remote()
    def adopt(self, version: int) -> None:
        """The model, which is the learner's own, has this version."""
        self.version = version
        if self.lag:
            self._remember()

    @remote()
    def rewind(self) -> None:
        """Act with the weights of `lag` versions ago, or the first, until `forward`."""
        if not self.past:
            self._remember()
        self._put(*self.past[0])

    @remote()
    def forward(self) -> None:
        self._put(*self.past[-1])

    @remote()
    def save_past(self, file: Path) -> None:
        torch.save(list(self.past), file)

    @remote()
    def load_past(self, file: Path) -> None:
        """What `save_past` wrote; nothing where the run had no lag so far."""
        if file.exists():
            self.past.extend(torch.load(file, weights_only=True))

    def _remember(self) -> None:
        if self.past and self.past[-1][0] == self.version:
            self.past.pop()  # published again: after a warm-up, or from a checkpoint
        self.past.append((self.version, [(n, w.detach().to("cpu", copy=True)) for n, w in self.model.weights()]))

    def _put(self, version: int, weights: list[tuple[str, torch.Tensor]]) -> None:
        self.model.load_weights(weights)
        self.version = version

    def _features(self, frames: tuple[Array, ...]) -> Array:
        before = perf_counter()
        features = to_numpy(self.embed(frames))
        self.seconds += perf_counter() - before
        found = f"{features.dtype} {list(features.shape)}" if isinstance(features, np.ndarray) else repr(features)
        if not re.fullmatch(rf"float32 \[{len(frames)}, \d+\]", found):
            raise PluginError(f"the algorithm's features are {found}; expected float32 [{len(frames)}, D]")
        if not np.isfinite(features).all():
            raise PluginError("the algorithm's features are not finite")
        return np.asarray(features)

    # ------------------------------------------------------------------------------------------------- records

    def _keep(self, lane: int, request: Request, chunk: Chunk, part: slice) -> None:
        assert request.obs is not None
        heavy = Heavy(
            obs=request.obs,
            actions=chunk.actions[part],
            replay={name: tensor[part] for name, tensor in chunk.replay.items()},
        )
        self.records.setdefault(lane, []).append(
            _Record(
                positions=request.positions,
                log_probs=to_numpy(chunk.log_probs)[part].astype(np.float32),
                values=None if chunk.values is None else to_numpy(chunk.values)[part].astype(np.float32),
                version=self.version,
                heavy=heavy,
            )
        )

    def _value_finals(self, lanes: tuple[int, ...], requests: Sequence[Request]) -> None:
        """Bootstrap values of the previous chunk step: one value-only forward on just the rows that need one."""
        due = [(lane, r) for lane, r in zip(lanes, requests, strict=True) if r.final is not None]
        if not due:
            return
        values = self._bootstrap(Observation.concat([r.final for _, r in due if r.final is not None]))
        start = 0
        for lane, request in due:
            record = self.records[lane][-1]
            record.final_positions = request.final_positions
            record.final_obs = request.final if self.fresh else None
            record.final_values = values[start : start + len(request.final_positions)]
            start += len(request.final_positions)

    def _bootstrap(self, obs: Observation) -> Array:
        """Value of the first action of each row, float32 [R]."""
        values = to_numpy(self.model.values(obs))
        first: Array = (values if values.ndim == 1 else values[:, 0]).astype(np.float32)
        return first

    def _check(self, actions: Array, chunk: Chunk) -> None:
        if not np.isfinite(actions).all() or not np.isfinite(to_numpy(chunk.log_probs)).all():
            raise PluginError(f"model {self.name!r} sampled actions or log-probs that are not finite")


def _log_probs_of(records: Sequence[_Record], log_probs: Sequence[Array], rows: int) -> Array:
    """[T, N, C, M] of each record's [R, C, M], padded with zeros."""
    out = np.zeros((len(records), rows, *log_probs[0].shape[1:]), np.float32)
    for t, (record, of_record) in enumerate(zip(records, log_probs, strict=True)):
        out[t, record.positions] = of_record
    return out


def _values_of(records: Sequence[_Record], rows: int) -> dict[str, Array]:
    """values [T, N] or [T, N, C] and next_values [T, N], padded with zeros; nothing without a critic."""
    first = records[0].values
    if first is None:
        return {}
    values = np.zeros((len(records), rows, *first.shape[1:]), np.float32)
    next_values = np.zeros((len(records), rows), np.float32)
    for t, record in enumerate(records):
        values[t, record.positions] = record.values
        next_values[t, record.final_positions] = record.final_values
    return {"values": values, "next_values": next_values}
