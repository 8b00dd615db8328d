"""The rollout loop of a policy's worker, which drives lanes of envs until no ticket is left, and their clients."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from threading import Lock
from typing import Any

from attrs import define, evolve, field, frozen

from vla_rl.core.interrupts import StopRequested
from vla_rl.runtime.comm.interfaces import RolloutInterface
from vla_rl.runtime.comm.peers import RayPeers
from vla_rl.runtime.comm.shared_memory import SharedMemoryReader
from vla_rl.runtime.comm.tracing import BACKGROUND
from vla_rl.runtime.messages.reports import RolloutProgress, RolloutReport, TrajectoryResult
from vla_rl.runtime.messages.requests import EnvTrajectory, EpisodeRequest, PolicyMode, RecordingKey, StepRequest
from vla_rl.runtime.placement.assignments import Assignment
from vla_rl.runtime.scheduling.batching import Call, Lane, drive_lanes
from vla_rl.runtime.scheduling.ticket_queue import TicketQueue
from vla_rl.runtime.workers.policy.policy_worker import PolicyWorker
from vla_rl.toolkit.data.recording import Recording


@define
class RecordingStore:
    """Recorded episodes on their way to the driver: in a file without a name, in the order of their ends; emptied when
    all are forgotten. Thread-safe. A simulator's worker that dies takes none of them with it; when the policy's dies,
    the run records again what came after its last checkpoint."""

    _file: Any = field(factory=tempfile.TemporaryFile, init=False)
    _positions: dict[RecordingKey, tuple[int, int]] = field(factory=dict, init=False)
    _lock: Any = field(factory=Lock, init=False)

    def put(self, key: RecordingKey, recording: Recording) -> None:
        data = pickle.dumps(recording, protocol=pickle.HIGHEST_PROTOCOL)
        with self._lock:
            self._positions[key] = self._file.seek(0, 2), len(data)
            self._file.write(data)

    def get(self, key: RecordingKey) -> Recording | None:
        """Return the recording of an episode; None: it was not kept."""
        with self._lock:
            if key not in self._positions:
                return None
            start, length = self._positions[key]
            self._file.seek(start)
            recording: Recording = pickle.loads(self._file.read(length))  # noqa: S301 - this process wrote it
            return recording

    def forget_up_to(self, last: int | None) -> None:
        """Forget the episodes of tickets up to this number; None: all."""
        with self._lock:
            self._positions = {key: p for key, p in self._positions.items() if last is not None and key[0] > last}
            if not self._positions:
                self._file.seek(0)
                self._file.truncate()


class ProgressCounter:
    """Counter of finished tickets and running chunk steps. One thread writes, others sum plain integers: no lock."""

    def __init__(self) -> None:
        self._tickets = 0
        self._steps: dict[int, int] = {}
        """Lane -> chunk steps of its running tickets."""

    def reset_counts(self) -> None:
        """Reset the counts, as a rollout or an evaluation begins."""
        self._tickets = 0
        self._steps = {}

    def note_request(self, lane: int, request: StepRequest) -> None:
        self._tickets += len(request.finished)
        self._steps[lane] = request.steps

    def current_progress(self) -> RolloutProgress:
        return RolloutProgress(self._tickets, sum(tuple(self._steps.values())))


@define(eq=False, slots=False)
class RolloutLoop(RolloutInterface):
    """Rollouts and evaluations of the policy of one worker, in simulators and in envs of added roles."""

    _assignment: Assignment
    _clients: EnvClients
    """Clients of the lanes that the policy acts for."""
    _direct: Callable[[str, str | None], Call]
    """(Role, track of the trace) -> a function that calls a role of this worker."""
    _policy: Callable[[], PolicyWorker]
    """Returns the policy role, which is built after the loop."""
    _frames: bool
    """The algorithm sees the frames of episodes."""
    _idle: Callable[[], None]
    """Tells that the worker waits, so that the waiting is not taken for a hung call."""
    _stop_requested: Callable[[], bool]

    def __attrs_post_init__(self) -> None:
        self.progress = ProgressCounter()
        served, homes = self._assignment.served, self._assignment.homes
        self._worker_of = {lane.index: worker for lane, worker in zip(served, homes, strict=True)}
        """Lane -> worker of its simulator."""
        self._queues: dict[str, TicketQueue] = {}
        """Purpose -> the tickets of its rollout; `queue_of` adds them."""
        self._recordings = {"action": RecordingStore(), "evaluation": RecordingStore()}
        """Purpose -> the episodes that were recorded for it."""

    def roll_out(self, batches: Sequence[Sequence[EpisodeRequest]]) -> RolloutReport:
        queue = self.queue_of("action")
        queue.begin_rollout(batches)
        with self._clients.through_channels():
            return self._drive_rollout(PolicyMode(purpose="action", greedy=False, keep=True), queue)

    def roll_out_in_background(
        self, batches: Sequence[Sequence[EpisodeRequest]], purpose: str, role: str
    ) -> RolloutReport:
        queue = self.queue_of(purpose)
        queue.begin_rollout(batches)
        return self._drive_rollout(PolicyMode(purpose=purpose, greedy=False, keep=True), queue, role)

    def evaluate(self, tickets: Sequence[EpisodeRequest], greedy: bool) -> RolloutReport:
        queue = TicketQueue(self._assignment.served, [tickets])
        with self._clients.through_channels():
            return self._drive_rollout(PolicyMode(purpose="evaluation", greedy=greedy, keep=False), queue)

    def evaluate_in_background(self, tickets: Sequence[EpisodeRequest], purpose: str, role: str) -> RolloutReport:
        queue = TicketQueue(self._assignment.served, [tickets])
        return self._drive_rollout(PolicyMode(purpose=purpose, greedy=False, keep=False), queue, role)

    def add_tickets(self, batches: Sequence[Sequence[EpisodeRequest]], purpose: str, rollout: int) -> bool:
        return self.queue_of(purpose).add_tickets(batches, rollout)

    def wait_for_report(self, needed: Sequence[int], early: bool, purpose: str, rollout: int) -> RolloutReport:
        self._idle()
        return self.queue_of(purpose).wait_for_report(needed, early, rollout)

    def queue_of(self, purpose: str) -> TicketQueue:
        """Return the queue of a purpose; who asks first creates it, as tickets and questions for their report race."""
        queue = self._queues.get(purpose)
        return self._queues.setdefault(purpose, TicketQueue(self._assignment.served)) if queue is None else queue

    def get_recording(self, purpose: str, key: RecordingKey) -> Recording | None:
        return self._recordings[purpose].get(key)

    def forget_recordings(self, purpose: str, last: int | None) -> None:
        self._recordings[purpose].forget_up_to(last)

    def _drive_rollout(self, mode: PolicyMode, queue: TicketQueue, role: str = "sim") -> RolloutReport:
        """Roll out the queue's tickets, also those added meanwhile, in a role's envs. Return what was not reported."""
        real = role == "sim"
        lanes = self._clients.lanes_of(role)
        infer = self._direct("policy", None if real else BACKGROUND)
        batching = self._assignment.batching
        if self._assignment.is_local:
            batching = evolve(batching, max_wait_s=None)
        if real:
            self.progress.reset_counts()

        def act_and_report(method: str, mode: PolicyMode, indices: Sequence[int], *requests: StepRequest) -> Any:
            if real:
                for lane, request in zip(indices, requests, strict=True):
                    self.progress.note_request(lane, request)
            report = self._work_of(indices, requests)
            actions = infer(method, mode, indices, *requests)
            self._add_results(report, mode, requests)
            queue.add_report(report)
            return actions

        with self._policy().acting():
            try:
                while not queue.end_if_empty():
                    if self._stop_requested():
                        raise StopRequested
                    for _ in drive_lanes(
                        lanes,
                        act_and_report,
                        mode,
                        batching,
                        queue.take_tickets,
                        self._clients.value_of,
                        self._clients.wait_for_any,
                    ):
                        pass  # nothing to do at a yield: `value_of` and `ready` wait by themselves
            finally:
                queue.end_rollout()
        return queue.wait_for_report((), False, queue.begun)

    def _work_of(self, lanes: Sequence[int], requests: Sequence[StepRequest]) -> RolloutReport:
        """Return the simulators' work that these requests report."""
        report = RolloutReport()
        for lane, request in zip(lanes, requests, strict=True):
            source = lane if self._assignment.concurrent_lanes else self._worker_of[lane]
            report.env_seconds[source] = report.env_seconds.get(source, 0.0) + request.seconds
            report.env_steps += request.env_steps
            report.replayed += request.replayed
            report.restarted += request.restarted
            report.faults += request.faults
        return report

    def _add_results(self, report: RolloutReport, mode: PolicyMode, requests: Sequence[StepRequest]) -> None:
        """Add the tickets that these requests finished, with the policy's half of their trajectories."""
        policy = self._policy()
        finished = [
            self._store_recording(mode.purpose, trajectory) for request in requests for trajectory in request.finished
        ]
        policy_fields = policy.ticket_results(finished, self._frames) if mode.keep else [{} for _ in finished]
        report.collected = [
            TrajectoryResult(env_part=trajectory, policy_part=fields)
            for trajectory, fields in zip(finished, policy_fields, strict=True)
        ]
        report.policy_seconds[self._assignment.index] = policy.seconds.pop(mode.purpose, 0.0)

    def _store_recording(self, purpose: str, trajectory: EnvTrajectory) -> EnvTrajectory:
        """Store the recording of a finished ticket, if it has one. Return the trajectory without it."""
        if trajectory.recording is None:
            return trajectory
        (episode,) = trajectory.episodes
        self._recordings[purpose].put((episode.number, episode.episode), trajectory.recording)
        return evolve(trajectory, recording=None)


@frozen(eq=False)
class _Remote:
    """Reference to the answer of an env in another process."""

    lane: int
    reference: Any


@define(eq=False)
class EnvClients:
    """Clients of the lanes that a worker's policy acts for: in its own process, or through its peers."""

    assignment: Assignment
    direct: Callable[[str], Call]
    """Returns a function that calls a role of this worker."""
    idle: Callable[[], None]
    """Tells that the worker waits, so that the waiting is not taken for a hung call."""
    peers: RayPeers | None = field(default=None, init=False)
    _readers: dict[int, SharedMemoryReader] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._readers = {lane.index: SharedMemoryReader() for lane in self.assignment.served}

    def connect_peers(self, peers: RayPeers) -> None:
        """Connect to the workers whose simulators run in other processes, in place of earlier connections."""
        if self.peers is not None:
            self.peers.close()
        self.peers = peers
        of_worker: dict[int, list[int]] = {}
        for lane, sim_worker in zip(self.assignment.served, self.assignment.homes, strict=True):
            of_worker.setdefault(sim_worker, []).append(lane.index)
        peers.open_channels(of_worker)

    def through_channels(self) -> AbstractContextManager[None]:
        return nullcontext() if self.peers is None else self.peers.through_channels()

    def lanes_of(self, role: str) -> list[Lane]:
        """Return the lanes that this worker acts for, with calls to simulators ("sim") or to an added role's envs."""
        served, homes, added_at = self.assignment.served, self.assignment.homes, self.assignment.added_envs_at
        at = homes if role == "sim" or added_at is None else (added_at,) * len(served)
        return [
            Lane(slice=lane, sim=self._call_of(role, lane.index, sim_worker))
            for lane, sim_worker in zip(served, at, strict=True)
        ]

    def _call_of(self, role: str, lane: int, sim_worker: int) -> Call:
        if sim_worker == self.assignment.index:
            reader = self._readers[lane]
            direct = self.direct(role)
            return lambda method, *arguments: reader.open_message(direct(method, *arguments))
        peers = self.peers
        assert peers is not None  # the driver connects them before the first rollout
        return lambda method, *arguments: _Remote(lane, peers.call(sim_worker, role, method, *arguments))

    def value_of(self, reference: Any) -> Any:
        """Wait for an answer and return it, copied out of shared memory."""
        if not isinstance(reference, _Remote):
            return reference
        assert self.peers is not None
        self.idle()
        return self._readers[reference.lane].open_message(self.peers.value_of(reference.reference))

    def wait_for_any(self, references: Sequence[Any], timeout: float | None) -> list[Any]:
        """Return those of the references, the same objects, whose results are there: at least one, unless the timeout
        (seconds) passed first. Calls in this process are done already."""
        local = [reference for reference in references if not isinstance(reference, _Remote)]
        remote = {remote.reference: remote for remote in references if isinstance(remote, _Remote)}
        if not remote:
            return local
        assert self.peers is not None
        self.idle()
        answered = self.peers.wait_for_any(list(remote), 0.0 if local else timeout)
        return [*local, *(remote[reference] for reference in answered)]
