"""The policy role: a model that acts for lanes and keeps what learning needs."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar, cast

import numpy as np
import torch
from attrs import define

from vla_rl.core.errors import PluginError
from vla_rl.core.hookspecs import ActingModel, VLAModel
from vla_rl.core.randomness import Noise
from vla_rl.core.types import Array, Chunk, Observation, concat, pick, to_numpy
from vla_rl.runtime.comm.interfaces import PolicyInterface
from vla_rl.runtime.comm.weight_sync import PublishedWeights, receive, swap_in
from vla_rl.runtime.messages.ids import SampleId
from vla_rl.runtime.messages.model_inputs import ModelInputs, SampleBatch
from vla_rl.runtime.messages.requests import EnvTrajectory, PolicyMode, StepRequest
from vla_rl.toolkit.models.checkpoints import read_file

T = TypeVar("T")


NOBODY = nullcontext()


@define(eq=False)
class _Inference:
    """One inference of the policy for one lane, with its R samples."""

    place: int
    versions: Array
    """int64 [R]: versions of the weights that chose the actions."""
    log_probs: Array
    values: Array | None
    """Values of each sample, float32 [R] or [R, C]; None without a critic."""
    heavy: ModelInputs
    next_values: Array
    """Bootstrap values, float32 [R]; 0 where there is none."""
    left: int
    """Number of samples that may still be needed; the inference is dropped when it is 0."""
    ended: Array
    """bool [R]: samples that are followed by a final observation."""
    finals: Observation | None = None
    """Final observations of these samples, where learners recompute their values."""


class PolicyWorker(PolicyInterface):
    """The policy of a worker (role "policy")."""

    def __init__(
        self,
        model: ActingModel,
        *,
        name: str,
        seed: int,
        lag: int = 0,
        finals: bool = False,
        embed: Callable[[tuple[Array, ...]], Any] = lambda frames: None,
        on_version: Callable[[int], None] = lambda version: None,
        between_requests: AbstractContextManager[Any] = NOBODY,
    ):
        """Create the role around a model.

        Args:
            lag: number of versions before the newest that tickets may ask for; they are kept in host memory.
            finals: learners recompute values, so final observations are kept for them.
            embed: `Algorithm.features`.
            on_version: called with the version of the weights that act from now on.
            between_requests: lock that is held while the model is used.
        """
        self.between_requests = between_requests
        self.embed, self.on_version = embed, on_version
        self.model, self.name, self.seed, self.lag, self.finals = model, name, seed, lag, finals
        self.version = 0
        self.past: deque[tuple[int, list[tuple[str, torch.Tensor]]]] = deque(maxlen=lag + 1)
        self.made = 0
        """Number of inferences so far: the first half of a `SampleId`."""
        self.seconds: dict[str, float] = {}
        """Purpose of a `PolicyMode` -> seconds that it took, until the rollout reports and resets them."""
        self.store: dict[int, _Inference] = {}
        """Inferences by number, until none of their samples is needed."""
        self.tickets: dict[int, list[tuple[_Inference, int]]] = {}
        """Ticket -> its chunk steps: (inference, row in its batch)."""

    @property
    def trained_model(self) -> VLAModel:
        """Return the model, in a run that trains it. A model that only acts is in evaluations alone."""
        return cast(VLAModel, self.model)

    def act(self, mode: PolicyMode, lanes: tuple[int, ...], *requests: StepRequest) -> list[Array]:
        before = perf_counter()
        if mode.keep:
            for number, standing in (ticket for request in requests for ticket in request.again):
                self._forget(number, standing)
            self._value_finals(requests)
        busy = [(lane, request) for lane, request in zip(lanes, requests, strict=True) if request.obs is not None]
        actions: dict[int, Array] = {}
        if busy:
            obs = Observation.concat([request.obs for _, request in busy if request.obs is not None])
            _, _, *keys, wanted = np.concatenate([request.asking for _, request in busy], axis=1)

            def sample(rows: Array) -> Chunk:
                noise = Noise(self.seed, mode.purpose, *(key[rows].tolist() for key in keys))
                return self.model.sample_chunk(_taken(obs, rows), noise, mode.greedy)

            parts = self._by_version(wanted, sample)
            chunk, versions = _joined([(rows, part) for rows, _, part in parts]), np.empty(len(obs), np.int64)
            for rows, version, _ in parts:
                versions[rows] = version
            chosen = to_numpy(chunk.actions).astype(np.float32)
            self._check(chosen, chunk)
            start = 0
            for lane, request in busy:
                part = slice(start, start + len(request.positions))
                actions[lane] = chosen[part]
                if mode.keep:
                    self._keep(request, chunk, part, versions[part])
                start = part.stop
        self._took(mode.purpose, before)
        empty = np.zeros((0, 0, 0), np.float32)
        return [actions.get(lane, empty) for lane in lanes]

    def results(self, finished: Sequence[EnvTrajectory], framed: bool) -> list[dict[str, Any]]:
        """Return the policy's half of each finished ticket: its fields [T, ...], and "features" [D] of its frames if
        `framed`. "ended" marks the chunks that are followed by a final observation.
        """
        features = self._features([self._frames(ticket) for ticket in finished]) if framed and finished else None
        results = []
        for i, ticket in enumerate(finished):
            steps = self.tickets[ticket.number]
            light = {
                "log_probs": np.stack([inference.log_probs[row] for inference, row in steps]),
                "versions": np.array([inference.versions[row] for inference, row in steps], np.int64),
                "sample": np.array([SampleId.pack(inference.place, row) for inference, row in steps], np.int64),
                **_values_of(steps),
            }
            if self.finals:
                light["ended"] = np.array([inference.ended[row] for inference, row in steps])
            results.append(light if features is None else light | {"features": features[i]})
        return results

    def take(self, samples: Array) -> SampleBatch:
        return SampleBatch.concat(self.parts(samples)).numpy()

    def parts(self, samples: Array) -> list[SampleBatch]:
        """Return the samples of `take` where they are, by inference. Nothing is copied of an inference that is needed
        in full.
        """
        inferences, rows = SampleId.unpack(samples)
        cuts = np.flatnonzero(np.diff(inferences)) + 1
        return [
            self._part(self.store[int(inferences[own[0]])], rows[own])
            for own in np.split(np.arange(len(samples)), cuts)
            if len(own)
        ]

    def _part(self, inference: _Inference, rows: Array) -> SampleBatch:
        finals, with_final = inference.finals, rows[inference.ended[rows]]
        if finals is not None:
            finals = _taken(finals, np.searchsorted(np.flatnonzero(inference.ended), with_final))
        return SampleBatch(
            sample_ids=SampleId.pack(inference.place, rows),
            inputs=inference.heavy.take(rows),
            final_ids=SampleId.pack(inference.place, rows[:0] if finals is None else with_final),
            finals=finals if finals is not None and len(finals) else None,
        )

    def release(self, tickets: Sequence[int] | None = None) -> None:
        if tickets is None:
            self.tickets.clear()
            self.store.clear()
            return
        for number in tickets:
            self._forget(number)
            self.tickets.pop(number, None)

    def _took(self, purpose: str, since: float) -> None:
        self.seconds[purpose] = self.seconds.get(purpose, 0.0) + perf_counter() - since

    def _forget(self, number: int, standing: int = 0) -> None:
        """Drop a ticket's chunk steps except the first `standing`."""
        steps = self.tickets.get(number, [])
        for inference, _ in steps[standing:]:
            inference.left -= 1
            if not inference.left:
                del self.store[inference.place]
        del steps[standing:]

    # ------------------------------------------------------------------------------------------------- weights

    def load(self, version: int, published: PublishedWeights) -> None:
        received = receive(self.trained_model, published)
        with self.between_requests:
            swap_in(self.trained_model, received, published)
            self._take(version)

    def adopt(self, version: int) -> None:
        with self.between_requests:
            self._take(version)

    def _take(self, version: int) -> None:
        self.version = version
        if self.lag:
            self._remember()
        self.on_version(version)

    def _by_version(self, wanted: Array, act: Callable[[Array], T]) -> list[tuple[Array, int, T]]:
        """Act for the envs [R] with the versions of the weights that they want (below 0: the newest), and leave the
        newest loaded. Return (rows, version, result of `act`) for each version.
        """
        if self.lag and not self.past:
            self._remember()
        newest, found = self.version, []
        if (wanted < 0).all():
            return [(rows := np.arange(len(wanted)), newest, act(rows))]
        wanted = np.where(wanted < 0, newest, wanted)
        past = dict(self.past)
        try:
            for version in np.unique(wanted)[::-1].tolist():
                if version != self.version:
                    self._put(version, past[version])
                rows = np.flatnonzero(wanted == version)
                found.append((rows, version, act(rows)))
        finally:
            if self.version != newest:
                self._put(newest, past[newest])
        return found

    def save_past(self, file: Path) -> None:
        torch.save(list(self.past), file)

    def load_past(self, file: Path) -> None:
        if file.exists():
            self.past.extend(read_file(file, lambda path: torch.load(path, weights_only=True)))

    def _remember(self) -> None:
        if self.past and self.past[-1][0] == self.version:
            self.past.pop()  # the version was published again: after behaviour cloning, or from a checkpoint
        weights = [(name, weight.detach().to("cpu", copy=True)) for name, weight in self.trained_model.weights()]
        self.past.append((self.version, weights))

    def _put(self, version: int, weights: list[tuple[str, torch.Tensor]]) -> None:
        self.trained_model.load_weights(weights)
        self.version = version

    def _frames(self, ticket: EnvTrajectory) -> Array:
        assert ticket.frames is not None
        (images,) = ticket.frames.values()
        return images

    def _features(self, frames: Sequence[Array]) -> Array:
        before = perf_counter()
        features = to_numpy(self.embed(tuple(frames)))
        self._took("action", before)
        found = f"{features.dtype} {list(features.shape)}" if isinstance(features, np.ndarray) else repr(features)
        if not re.fullmatch(rf"float32 \[{len(frames)}, \d+\]", found):
            raise PluginError(f"the algorithm's features are {found}; expected float32 [{len(frames)}, D]")
        if not np.isfinite(features).all():
            raise PluginError("the algorithm's features are not finite")
        return np.asarray(features)

    # ------------------------------------------------------------------------------------------------- records

    def _keep(self, request: StepRequest, chunk: Chunk, part: slice, versions: Array) -> None:
        assert request.obs is not None and chunk.log_probs is not None
        heavy = ModelInputs(
            obs=request.obs,
            actions=chunk.actions[part],
            extras={name: tensor[part] for name, tensor in chunk.extras.items()},
        )
        rows = len(request.positions)
        inference = _Inference(
            place=self.made,
            versions=versions,
            log_probs=to_numpy(chunk.log_probs)[part].astype(np.float32),
            values=None if chunk.values is None else to_numpy(chunk.values)[part].astype(np.float32),
            heavy=heavy,
            next_values=np.zeros(rows, np.float32),
            ended=np.zeros(rows, bool),
            left=rows,
        )
        self.made += 1
        self.store[inference.place] = inference
        for row, number in enumerate(request.numbers.tolist()):
            self.tickets.setdefault(number, []).append((inference, row))

    def _value_finals(self, requests: Sequence[StepRequest]) -> None:
        """Compute the bootstrap values of the previous chunk step, in one forward pass of the envs that need one."""
        due = [request for request in requests if request.final is not None]
        if not due:
            return
        final = Observation.concat([request.final for request in due if request.final is not None])
        last = [[self.tickets[number][-1] for number in request.final_numbers.tolist()] for request in due]
        pinned = np.concatenate([request.final_versions for request in due])
        values = np.zeros(len(final), np.float32)
        for rows, _, found in self._by_version(pinned, lambda rows: self._bootstrap(_taken(final, rows))):
            values[rows] = found
        for request, of_lane in zip(due, last, strict=True):
            inference, rows = of_lane[0][0], np.array([row for _, row in of_lane])  # a lane is in one inference
            inference.next_values[rows], values = values[: len(rows)], values[len(rows) :]
            inference.ended[rows] = True
            if self.finals and request.final is not None:
                inference.finals = _taken(request.final, np.argsort(rows))

    def _bootstrap(self, obs: Observation) -> Array:
        """Return the value of the first action of each row, float32 [R]."""
        values = to_numpy(self.trained_model.values(obs))
        first: Array = (values if values.ndim == 1 else values[:, 0]).astype(np.float32)
        return first

    def _check(self, actions: Array, chunk: Chunk) -> None:
        log_probs = np.zeros(0) if chunk.log_probs is None else to_numpy(chunk.log_probs)
        if not np.isfinite(actions).all() or not np.isfinite(log_probs).all():
            raise PluginError(f"model {self.name!r} sampled actions or log-probs that are not finite")


def _taken(obs: Observation, rows: Array) -> Observation:
    return obs if len(rows) == len(obs) else obs.take(rows)


def _joined(parts: Sequence[tuple[Array, Chunk]]) -> Chunk:
    """Return one chunk of these parts, in the order of their rows."""
    if len(parts) == 1:
        return parts[0][1]
    chunks, order = [chunk for _, chunk in parts], np.argsort(np.concatenate([rows for rows, _ in parts]))
    log_probs = [chunk.log_probs for chunk in chunks if chunk.log_probs is not None]
    values = [chunk.values for chunk in chunks if chunk.values is not None]
    return Chunk(
        actions=pick(concat([chunk.actions for chunk in chunks]), order),
        log_probs=pick(concat(log_probs), order) if log_probs else None,
        values=pick(concat(values), order) if values else None,
        extras={key: pick(concat([chunk.extras[key] for chunk in chunks]), order) for key in chunks[0].extras},
    )


def _values_of(steps: Sequence[tuple[_Inference, int]]) -> dict[str, Array]:
    """Return values [T] or [T, C] and next_values [T]; empty without a critic."""
    values = [inference.values[row] for inference, row in steps if inference.values is not None]
    if not values:
        return {}
    return {
        "values": np.stack(values),
        "next_values": np.array([inference.next_values[row] for inference, row in steps], np.float32),
    }
