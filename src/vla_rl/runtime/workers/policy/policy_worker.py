"""The policy role: an engine that acts for lanes, and what learning needs of its chunks."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from attrs import define, evolve, field

from vla_rl.core.errors import PluginError, WorkerDied
from vla_rl.core.fields import check_extras, shape_matches
from vla_rl.core.hookspecs import PolicyEngine
from vla_rl.core.randomness import Noise
from vla_rl.core.types import Array, Chunk, Observation, to_numpy
from vla_rl.runtime.comm.interfaces import PolicyInterface
from vla_rl.runtime.comm.weight_transfer.connect import open_receiver
from vla_rl.runtime.comm.weight_transfer.ends import WeightReceiver
from vla_rl.runtime.messages.learning import SampleBatch
from vla_rl.runtime.messages.requests import EnvTrajectory, PolicyMode, StepRequest
from vla_rl.runtime.messages.weights import WeightTransfer, verify_checksums
from vla_rl.runtime.workers.policy.ablation import Ablation
from vla_rl.runtime.workers.policy.sample_store import SampleStore, select_observations
from vla_rl.runtime.workers.policy.weight_versions import WeightVersions, load_trained

NO_LOCK = nullcontext()
NO_ACTIONS = np.zeros((0, 0, 0), np.float32)


@define(eq=False, slots=False)
class PolicyWorker(PolicyInterface):
    """The policy of a worker (role "policy")."""

    engine: PolicyEngine
    name: str = field(kw_only=True)
    """Description of the policy in messages, such as "model 'openvla'"."""
    seed: int = field(kw_only=True)
    worker: int = 0
    """Index of the worker."""
    device: str = "cpu"
    """Device that weights arrive on."""
    lag: int = 0
    """Number of versions before the newest that tickets may ask for; they are kept in host memory."""
    finals: bool = False
    """Final observations are kept for the learners."""
    values_finals: bool = True
    """There is a critic, which values final observations."""
    embed: Callable[[tuple[Array, ...]], Any] = lambda frames: None
    """`Algorithm.features`."""
    on_version: Callable[[int], None] = lambda version: None
    """Called with the version of the weights that act from now on."""
    between_requests: AbstractContextManager[Any] = NO_LOCK
    """Lock that is held while the engine is used."""

    ablation: Ablation | None = None
    """What evaluations take from the policy."""

    def __attrs_post_init__(self) -> None:
        self.weights = WeightVersions(self.engine, self.lag)
        self._receiver: WeightReceiver | None = None
        """End of the transfer from a learner in another worker."""
        self._partly_loaded = ""
        """Error that broke off the loading of a version; the model must not act then."""
        self.extras = {} if self.engine.model is None else self.engine.model.extras
        try:
            check_extras(self.extras, "CAM")
        except ValueError as exc:
            raise PluginError(f"{self.name}: VLAModel.{exc}") from exc
        self.samples = SampleStore(self.finals, self.extras)
        self.seconds: dict[str, float] = {}
        """Purpose of a `PolicyMode` -> seconds that it took, until the rollout reports and resets them."""

    @property
    def version(self) -> int:
        """Version of the weights that are loaded."""
        return self.weights.version

    # ----------------------------------------------------------------------------------------------- inference

    @contextmanager
    def acting(self) -> Iterator[None]:
        """Context of a rollout or an evaluation, in which the engine is awake."""
        with self.between_requests:
            self.engine.wake_up()
        try:
            yield
        finally:
            with self.between_requests:
                self.engine.sleep()

    def act(self, mode: PolicyMode, lanes: tuple[int, ...], *requests: StepRequest) -> list[Array]:
        started = perf_counter()
        if self._partly_loaded:
            raise WorkerDied(self._partly_loaded)
        if mode.keep:
            for request in requests:
                for ticket, remaining in request.again:
                    self.samples.forget_ticket(ticket, remaining)
            # Before anything is inferred, as final observations belong to the newest chunk step of their tickets.
            self._store_final_observations(requests)
        actions: dict[int, Array] = {}
        busy = [(lane, request) for lane, request in zip(lanes, requests, strict=True) if request.obs is not None]
        if busy:
            chunk, versions = self._sample_chunks(mode, [request for _, request in busy])
            chosen = to_numpy(chunk.actions).astype(np.float32)
            self._check_chunk(chosen, chunk, mode.keep)
            if mode.keep:
                # Samples wait in host memory: megabytes of features would fill the device.
                chunk = evolve(chunk, extras={name: to_numpy(extra) for name, extra in chunk.extras.items()})
            start = 0
            for lane, request in busy:
                part = slice(start, start + len(request.positions))
                actions[lane] = chosen[part]
                if mode.keep:
                    self.samples.add_inference(request, chunk, part, versions[part])
                start = part.stop
        self._add_seconds(mode.purpose, started)
        return [actions.get(lane, NO_ACTIONS) for lane in lanes]

    def _sample_chunks(self, mode: PolicyMode, requests: Sequence[StepRequest]) -> tuple[Chunk, Array]:
        """Sample chunks for the observations of all requests. Return them with the versions of the weights, int64."""
        obs = Observation.concat([request.obs for request in requests if request.obs is not None])
        _, numbers, *keys, wanted = np.concatenate([request.asking for request in requests], axis=1)
        ablation = self.ablation if mode.purpose == "evaluation" else None
        if ablation is not None:
            obs = ablation.change_observation(obs)

        def sample_rows(rows: Array) -> Chunk:
            noise = Noise(self.seed, mode.purpose, *(key[rows] for key in keys))
            return self.engine.act(select_observations(obs, rows), noise, mode.greedy)

        parts = self.weights.with_each(wanted, sample_rows)
        versions = np.empty(len(obs), np.int64)
        for rows, version, _ in parts:
            versions[rows] = version
        chunk = _join_chunks([(rows, part) for rows, _, part in parts])
        if ablation is not None:
            chunk = evolve(chunk, actions=ablation.change_actions(numbers, keys[1], keys[2], to_numpy(chunk.actions)))
        return chunk, versions

    def _store_final_observations(self, requests: Sequence[StepRequest]) -> None:
        """Keep the last chunk step's final observations, with bootstrap values from one pass of those that need one."""
        due = [request for request in requests if request.final is not None]
        if not due:
            return
        final = Observation.concat([request.final for request in due if request.final is not None])
        wanted = np.concatenate([request.final_versions for request in due])
        values = np.zeros(len(final), np.float32)
        if self.values_finals:
            for rows, _, part in self.weights.with_each(
                wanted, lambda rows: self._bootstrap_values(select_observations(final, rows))
            ):
                values[rows] = part
        start = 0
        for request in due:
            end = start + len(request.final_numbers)
            self.samples.add_finals(request, values[start:end])
            start = end

    def _bootstrap_values(self, obs: Observation) -> Array:
        """Return the value of the first action of each row, float32 [R]."""
        values = to_numpy(self.engine.values(obs))
        first: Array = (values if values.ndim == 1 else values[:, 0]).astype(np.float32)
        return first

    def _check_chunk(self, actions: Array, chunk: Chunk, keep: bool) -> None:
        if keep and chunk.log_probs is None:
            raise PluginError(f"{self.name} sampled a chunk without log_probs, which training needs")
        log_probs = np.zeros(0) if chunk.log_probs is None else to_numpy(chunk.log_probs)
        if not np.isfinite(actions).all() or not np.isfinite(log_probs).all():
            raise PluginError(f"{self.name} sampled actions or log-probs that are not finite")
        sizes = {"N": len(actions), "C": actions.shape[1], "A": actions.shape[2], "M": log_probs.shape[-1]}
        for name, dims in self.extras.items() if keep else ():
            shape = list(chunk.extras[name].shape) if name in chunk.extras else None
            if shape is None or not shape_matches(shape, f"N {dims}", sizes):
                raise PluginError(
                    f"{self.name} declares the extra {name!r} with dimensions {dims!r} (VLAModel.extras), and "
                    f"`sample_chunk` returned {'none' if shape is None else f'the shape {shape}'} in Chunk.extras for "
                    f"{sizes['N']} samples of {sizes['C']} actions"
                )

    def _add_seconds(self, purpose: str, started: float) -> None:
        self.seconds[purpose] = self.seconds.get(purpose, 0.0) + perf_counter() - started

    # ------------------------------------------------------------------------------------------------- samples

    def ticket_results(self, finished: Sequence[EnvTrajectory], framed: bool) -> list[dict[str, Any]]:
        """Return the policy's half of each finished ticket: its fields [T, ...], and "features" [D] of its frames if
        `framed`. "ended" marks the chunks that are followed by a final observation."""
        records: list[dict[str, Any]] = self.samples.trajectory_records([trajectory.number for trajectory in finished])
        if framed and finished:
            features = self._embed_frames([_only_camera(trajectory) for trajectory in finished])
            for record, feature in zip(records, features, strict=True):
                record["features"] = feature
        return records

    def take_samples(self, samples: Array) -> SampleBatch:
        return SampleBatch.concat(self.samples.sample_batches(samples)).numpy()

    def release_tickets(self, tickets: Sequence[int] | None = None) -> None:
        self.samples.release_tickets(tickets)

    def _embed_frames(self, frames: Sequence[Array]) -> Array:
        started = perf_counter()
        features = to_numpy(self.embed(tuple(frames)))
        self._add_seconds("action", started)
        shape = f"{features.dtype} {list(features.shape)}" if isinstance(features, np.ndarray) else repr(features)
        if not re.fullmatch(rf"float32 \[{len(frames)}, \d+\]", shape):
            raise PluginError(f"the algorithm's features are {shape}; expected float32 [{len(frames)}, D]")
        if not np.isfinite(features).all():
            raise PluginError("the algorithm's features are not finite")
        return np.asarray(features)

    # ------------------------------------------------------------------------------------------------- weights

    def connect_learner(self, transfer: WeightTransfer) -> None:
        if self.engine.model is not None:
            transfer.layout.check_layout(self.engine.model.weights())
        self._receiver = open_receiver(transfer, self.worker, torch.device(self.device))

    def load(self, version: int, memory: Array | None) -> None:
        receiver = self._receiver
        assert receiver is not None, "connect_learner comes first"
        receiver.wait_for_version(memory)
        with self.between_requests:
            try:
                pairs = receiver.named_tensors()
                self.engine.load(pairs)
                deque(pairs, maxlen=0)  # what the engine left out is under way too
            except BaseException as exc:
                self._partly_loaded = f"version {version} of the weights was loaded in part: {exc}"
                raise
            self._advance_version(version)

    def load_checkpoint(self, file: Path) -> None:
        load_trained(self.engine, file)

    def verify_weights(self, version: int, checksums: Mapping[str, int]) -> None:
        with self.between_requests:
            if self.engine.model is not None:
                verify_checksums(self.engine.model.weights(), checksums, version)

    def adopt_version(self, version: int) -> None:
        with self.between_requests:
            self._advance_version(version)

    def _advance_version(self, version: int) -> None:
        self.weights.advance_to(version)
        self.on_version(version)

    def close(self) -> None:
        """Close the engine."""
        self.engine.close()

    def save_past(self, file: Path) -> None:
        self.weights.save(file)

    def load_past(self, file: Path) -> None:
        self.weights.load(file)


def _only_camera(trajectory: EnvTrajectory) -> Array:
    """Return the frames of the one camera whose frames were kept."""
    assert trajectory.frames is not None
    (images,) = trajectory.frames.values()
    return images


def _join_chunks(parts: Sequence[tuple[Array, Chunk]]) -> Chunk:
    """Return one chunk of these parts, in the order of their rows."""
    if len(parts) == 1:
        return parts[0][1]
    return Chunk.concat([chunk for _, chunk in parts]).take(np.argsort(np.concatenate([rows for rows, _ in parts])))
