"""Remote methods of each role, as the driver and other workers call them. Workers implement these classes, handles
(`handles.py`) are typed by them, and `@remote` declares the phase, the track in the trace and the concurrency group of
each method once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vla_rl.core.spec.spec import Spec
from vla_rl.core.trainers import ImitationStep, OptimizerStep, SampleFields, UpdateMetrics
from vla_rl.core.types import Array, DataProperties, EnvInfo, Observation, ResetState
from vla_rl.runtime.comm.peers import RayPeers
from vla_rl.runtime.comm.remote import remote
from vla_rl.runtime.comm.tracing import Event
from vla_rl.runtime.messages.added_roles import AddedRoles
from vla_rl.runtime.messages.learning import SampleBatch, SampleRefs, SampleScores, ScoreRequest
from vla_rl.runtime.messages.reports import RolloutProgress, RolloutReport
from vla_rl.runtime.messages.requests import EpisodeRequest, PolicyMode, RecordingKey, StepRequest
from vla_rl.runtime.messages.weights import WeightLayout, WeightTransfer
from vla_rl.runtime.placement.assignments import Assignment
from vla_rl.runtime.placement.hardware import WorkerDevice
from vla_rl.runtime.placement.weight_strategy import WorkerLocation
from vla_rl.toolkit.data.recording import Recording
from vla_rl.toolkit.models.acting.compilation import CompilationReport

Demonstrations = tuple[Observation, Array]
"""Observations of B chunk steps, and the expert's actions, float32 [B, C, A]."""


CLOSE_S = 10.0
"""Seconds that a simulator gets to close. What it has not freed by then is freed at the end of its process."""
IDLE = "idle"
"""Activity of a thread that has nothing to do."""


class HostInterface(ABC):
    """The process of a worker: it builds the roles of its slot, and calls them (role "worker")."""

    assignment: Assignment
    stop_requested: Callable[[], bool]
    """Return whether a rollout or an evaluation has to end early, with StopRequested. The backend sets it."""

    # ------------------------------------------------- by the backend, in the worker's own process

    @abstractmethod
    def call(self, role: str, method: str, *arguments: Any) -> Any:
        """Call a remote method of a role of this worker; role "worker" is this object."""

    @abstractmethod
    def connect_peers(self, peers: RayPeers) -> None:
        """Connect to the workers whose simulators this worker's policy acts for."""

    @property
    @abstractmethod
    def longest_activity(self) -> tuple[str, float]:
        """Return the activity that has gone on longest without a heartbeat, and the time of its last heartbeat."""

    @abstractmethod
    def rollout_progress(self) -> RolloutProgress:
        """Return how far this worker is with what it rolls out."""

    # ------------------------------------------------- by other processes

    @remote(track="first")
    @abstractmethod
    def start_sim(self, added: Sequence[AddedRoles] = ()) -> EnvInfo:
        """Build the simulators of this worker, one component a lane, and the roles that step parts add."""

    @remote(track="none")
    @abstractmethod
    def open_data(self, info: EnvInfo) -> list[int]:
        """Open the demonstrations of the spec's `imitation:`. Return the number of samples of each data set."""

    @remote(track="none")
    @abstractmethod
    def data_statistics(self, references: Sequence[int | None]) -> Any:
        """Return the normalisation statistics of the demonstrations that `open_data` opened.

        Args:
            references: what the model's actions are relative to, as `ModelPlugin.relative_actions` returns it.
        """

    @remote(track="none")
    @abstractmethod
    def data_properties(self) -> DataProperties:
        """Return the properties of the demonstrations that `open_data` opened."""

    @remote(track="none")
    @abstractmethod
    def open_channel(self, policy: int, lanes: Sequence[int], reader: Any, address: str) -> bool:
        """Let the worker `policy`, which acts for these lanes, call the simulators directly. Return whether it can."""

    @remote(track="none")
    @abstractmethod
    def serve(self, policy: int) -> None:
        """Answer the calls of the worker `policy` until its rollout ends."""

    @remote(track="last")
    @abstractmethod
    def start_model(self, info: EnvInfo, scaling: Any, imitation: bool, folder: Path | None) -> None:
        """Build the model once, for the policy and the learner of this worker.

        Args:
            imitation: the learner trains on demonstrations alone (`vla-rl sft`).
            folder: run folder, where a trainer may keep its data; None: there is none.
        """

    @remote(track="none", group="concurrent")
    @abstractmethod
    def share_samples(self, sample_ids: Array, host: bool) -> None:
        """Hand samples of this worker's policy to its learner where they are; `host`: copy them into host memory."""

    @remote(track="none")
    @abstractmethod
    def open_rendezvous(self) -> str:
        """Return the address at which the learners join each other: this node's, as the Ray of the run knows it."""

    @remote(track="last")
    @abstractmethod
    def offload_for(self, phase: str) -> int:
        """Move what the phase does not need to host memory. Return the bytes that were freed."""

    @remote(track="last")
    @abstractmethod
    def reload_for(self, phase: str) -> None:
        """Move what the phase needs back to the device."""

    @remote(track="none", group="concurrent")
    @abstractmethod
    def read_clock(self) -> tuple[str, float]:
        """Return this machine's identity and its monotonic clock, in seconds."""

    @remote(track="none")
    @abstractmethod
    def worker_device(self) -> WorkerDevice:
        """Return the device that this worker computes on."""

    @remote(track="none")
    @abstractmethod
    def worker_location(self) -> WorkerLocation:
        """Return this worker's machine and device, as a weight transfer needs them."""

    @remote(track="none")
    @abstractmethod
    def model_size(self) -> dict[str, float]:
        """Return numbers of "parameters", "trainable" ones, and float32 "masters"; mean "weight_bytes" of one."""

    @remote(track="none", group="concurrent")
    @abstractmethod
    def compilation_report(self) -> CompilationReport | None:
        """Return what the compiler did since the last time; None: the model is not compiled."""

    @remote(track="none", group="concurrent")
    @abstractmethod
    def drain_trace(self) -> tuple[list[Event], int]:
        """Return the calls since the last time, and the number of calls that were dropped."""

    @remote(track="none")
    @abstractmethod
    def close(self) -> list[str]:
        """Close the simulators, once their running calls have returned. Return what went wrong, in words."""


class RolloutInterface(ABC):
    """Rollouts of the policy of a worker, in the envs that it acts for (role "rollout")."""

    @remote(phase="act", track="none")
    @abstractmethod
    def roll_out(self, batches: Sequence[Sequence[EpisodeRequest]]) -> RolloutReport:
        """Roll out these tickets, earlier batches first, and those of `add_tickets`. Return what was not reported."""

    @remote(phase="act", track="none", group="background")
    @abstractmethod
    def roll_out_in_background(
        self, batches: Sequence[Sequence[EpisodeRequest]], purpose: str, role: str
    ) -> RolloutReport:
        """Roll out tickets as `roll_out`, in the envs of this role. The simulators may run one meanwhile."""

    @remote(track="none", group="concurrent")
    @abstractmethod
    def add_tickets(self, batches: Sequence[Sequence[EpisodeRequest]], purpose: str, rollout: int) -> bool:
        """Add tickets to the rollout of this purpose and number (from 1), which may not have begun yet. Return False
        where it has ended; then they are not taken."""

    @remote(track="none", group="waiting")
    @abstractmethod
    def wait_for_report(self, needed: Sequence[int], early: bool, purpose: str, rollout: int) -> RolloutReport:
        """Wait until these tickets (`early`: any one) are finished, or this rollout ends. Return what is new."""

    @remote(phase="act", track="none")
    @abstractmethod
    def evaluate(self, tickets: Sequence[EpisodeRequest], greedy: bool) -> RolloutReport:
        """Roll out the episodes of an evaluation, on all lanes that this worker acts for."""

    @remote(phase="act", track="none", group="background")
    @abstractmethod
    def evaluate_in_background(self, tickets: Sequence[EpisodeRequest], purpose: str, role: str) -> RolloutReport:
        """Roll out episodes in the envs of this role, without samples for learners. Actions are sampled."""

    @remote(track="none", group="concurrent")
    @abstractmethod
    def get_recording(self, purpose: str, key: RecordingKey) -> Recording | None:
        """Return the recording of an episode of this purpose; None: it was not kept."""

    @remote(track="none", group="concurrent")
    @abstractmethod
    def forget_recordings(self, purpose: str, last: int | None) -> None:
        """Forget recorded episodes up to this number; None: all."""


MakeHost = Callable[[Spec | dict[str, Any], Assignment, Callable[[], None]], HostInterface]
"""(spec, or its dict in another process; assignment; function that is called at each heartbeat) -> a worker."""


class EnvInterface(ABC):
    """The simulators of a worker (role "sim")."""

    @remote()
    @abstractmethod
    def eval_states(self) -> tuple[ResetState, ...]:
        """Return the reset states of the eval split."""

    @remote()
    @abstractmethod
    def train_states(self) -> tuple[ResetState, ...]:
        """Return the reset states of the train split."""

    @remote(lane=0, main=True)
    @abstractmethod
    def begin(self, lane: int, purpose: str, tickets: Sequence[EpisodeRequest]) -> Any:
        """Start these tickets, for the purpose of a `PolicyMode`, and forget the lane's earlier ones. Return a
        `StepRequest`, or the message that it travels in."""

    @remote(lane=0, main=True)
    @abstractmethod
    def step(self, lane: int, actions: Any, tickets: Sequence[EpisodeRequest]) -> Any:
        """Execute a chunk in each env that has a ticket, and start further tickets. Return as `begin`."""

    @remote(phase="act", lane=0)
    @abstractmethod
    def collect_demonstrations(
        self, lane: int, count: int, noise: float
    ) -> tuple[Demonstrations | None, tuple[int, int, int]]:
        """Let the scripted expert act until `count` episodes succeeded (at most 3 tries for each).

        Gaussian noise with this standard deviation is added to the executed actions, never to the labels.
        Raises UserError for a simulator without an expert, StopRequested.
        Returns: ((observations, expert actions float32 [B, C, A]) of the successful episodes, (B, successes, tries)).
        """


class PolicyInterface(ABC):
    """The policy of a worker (role "policy")."""

    @remote(lane=1, main=True)
    @abstractmethod
    def act(self, mode: PolicyMode, lanes: tuple[int, ...], *requests: StepRequest) -> list[Array]:
        """Infer one batch for all given lanes. Return float32 [R, C, A] a lane, as its request's positions."""

    @remote(group="concurrent")
    @abstractmethod
    def take_samples(self, samples: Array) -> SampleBatch:
        """Return samples by their ids, int64 ascending, ready to cross processes."""

    @remote(group="concurrent")
    @abstractmethod
    def release_tickets(self, tickets: Sequence[int] | None = None) -> None:
        """Free the samples of these tickets; None: all samples."""

    @remote()
    @abstractmethod
    def load_checkpoint(self, file: Path) -> None:
        """Load the weights of a learner's file, for an evaluation. Raises CheckpointError for another model's."""

    @remote(track="none")
    @abstractmethod
    def connect_learner(self, transfer: WeightTransfer) -> None:
        """Open this policy's end of the transfer. Raises PluginError that names a parameter that does not fit."""

    @remote(group="weights")
    @abstractmethod
    def load(self, version: int, memory: Array | None) -> None:
        """Receive a version between two requests. `memory`: the version, uint8 [bytes], if the runtime passes it on."""

    @remote(group="weights")
    @abstractmethod
    def verify_weights(self, version: int, checksums: Mapping[str, int]) -> None:
        """Raise PluginError naming the parameter where the model does not hold the weights with these checksums."""

    @remote(group="weights")
    @abstractmethod
    def adopt_version(self, version: int) -> None:
        """Take note that the model already has the weights of this version."""

    @remote(group="concurrent")
    @abstractmethod
    def save_past(self, file: Path) -> None:
        """Write the older versions of the weights that tickets may still ask for."""

    @remote()
    @abstractmethod
    def load_past(self, file: Path) -> None:
        """Read what `save_past` wrote; do nothing if the file does not exist."""


class LearnerInterface(ABC):
    """A learner rank (role "learner")."""

    @remote()
    @abstractmethod
    def join_group(self, address: str, rank: int) -> None:
        """Enter the torch.distributed group of all learners, and shard the model where the spec says so."""

    @remote(phase="learn")
    @abstractmethod
    def score_samples(self, request: ScoreRequest) -> SampleScores:
        """Compute values and log-probs of this rank's samples, with the current weights; all ranks together."""

    @remote(track="receiver", group="concurrent")
    @abstractmethod
    def receive(self, policy: int, part: SampleBatch, copied: bool) -> None:
        """Store samples of another worker's policy; `copied`: copy them, as others may reuse their memory."""

    @remote(track="none", group="concurrent")
    @abstractmethod
    def release_samples(self, sample_ids: Mapping[int, Array]) -> int:
        """Free those of these samples (worker -> sample ids) that this rank holds. Return the bytes that are left."""

    @remote(phase="learn")
    @abstractmethod
    def sample_bytes(self) -> int:
        """Return the bytes of one sample's model inputs."""

    @remote(phase="learn", main=True)
    @abstractmethod
    def update(
        self, step: int, refs: SampleRefs, fields: SampleFields, steps: Sequence[OptimizerStep]
    ) -> UpdateMetrics:
        """Train this rank on samples that it holds, in one order. Return the trainer's metrics."""

    @remote(phase="learn", main=True)
    @abstractmethod
    def forward_backward(
        self,
        version: int,
        refs: SampleRefs,
        fields: SampleFields,
        micro_batches: Sequence[Array],
        passes: int,
        first: bool,
    ) -> None:
        """Run forward and backward passes of a part of a step's samples (streaming update); the rank holds the samples.

        Args:
            version: version of the weights before the step.
            micro_batches, passes: as in `OptimizerStep`.
            first: this is the step's first part.
        """

    @remote()
    @abstractmethod
    def set_demonstrations(self, *demonstrations: tuple[Observation, Array] | None) -> None:
        """Store this rank's demonstrations for `behaviour_cloning_update`."""

    @remote(phase="learn", main=True)
    @abstractmethod
    def behaviour_cloning_update(self, steps: Sequence[ImitationStep]) -> UpdateMetrics:
        """Make optimiser steps on demonstrations. Return metrics: "loss/imitation" sums this rank's losses."""

    @remote()
    @abstractmethod
    def forget_demonstrations(self) -> None:
        """Free the demonstrations and reset the optimiser's moments."""

    @remote(track="none")
    @abstractmethod
    def weight_layout(self) -> WeightLayout:
        """Return the layout in which trainable weights are sent to policies."""

    @remote(track="none")
    @abstractmethod
    def connect_policies(self, transfer: WeightTransfer) -> None:
        """Open the learner's end of the transfer, on the first rank."""

    @remote(phase="learn")
    @abstractmethod
    def send_weights(self, check: bool) -> tuple[Array | None, dict[str, int]]:
        """Send the trainable weights to policies in other processes; all ranks together, of which the first sends.

        Returns: (the version's memory, uint8 [bytes], where the runtime passes it on; checksums by name if `check`).
        """

    @remote(phase="learn")
    @abstractmethod
    def save(self, model_folder: Path | None, state_file: Path | None, version: int) -> None:
        """Write the model in its public format, with the description of its env next to it; and the exact weights with
        optimiser state and version, as full tensors for any number of learners. All ranks together; the first writes.
        """

    @remote(phase="learn")
    @abstractmethod
    def load(self, state_file: Path) -> int:
        """Restore what `save` wrote; all ranks together. Return the version of the weights. Raises UserError for the
        weights of another model."""
