"""The host of a worker: it builds the roles that the plan puts into one slot, and calls them. Backends own hosts, in
this process or as Ray actors.

Every process builds its components from the spec; live components are never pickled.

Threads and locks (docs/explanation/threads.md). Threads are named by the concurrency groups whose calls they run
(`comm/remote.py`). With the local backend one thread runs all calls.

| threads (number) | run | may hold, one at a time |
| call (1) | play, play_eval, serve, update, feed, score, set-up, close | in_lane of its simulators, between_requests |
| beside (1) | give, keep, take, release, receive, recordings, trace | between_requests, for the policy's methods |
| weights (1) | load and adopt of the policy | between_requests, while it swaps weights |
| waiting (2) | report | none |
| practice (2) | imagine, imagine_eval; the world model's methods | imagining, between_requests |
| lanes (concurrent lanes) | begin, step, demonstrate of a simulator | in_lane |
| RpcServer's pool (the same number) | begin and step that come through a socket | in_lane |
| monitor (1) | doing, played, stop requests | none |

1. Outer locks (`in_lane`, `between_requests`, `imagining`) are never nested in each other. The exception is `close`,
which acquires the `in_lane` locks of all lanes, in the order of `assignment.lanes`.
2. Inner locks may be acquired while an outer one is held, and never the other way round: `TicketQueue._changed` (a new
version of the weights, within `between_requests`), `EnvLanes._counting` and `RecordingStore._lock` (within `in_lane` or
`imagining`), `CallRecorder._changing` (within any). None of them is held while another one is acquired.
3. No lock is held while a thread waits for another worker of the run, except `Channel._sending`, while a full socket
drains.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from threading import Lock, get_ident
from time import monotonic, time
from typing import Any

import numpy as np
import torch
from attrs import evolve

from vla_rl.core.catalogue import hook_modules
from vla_rl.core.hookspecs import Demonstrations, SimEnv
from vla_rl.core.interrupts import StopRequested
from vla_rl.core.manager import wrap
from vla_rl.core.run.shape import RunShape
from vla_rl.core.spec.spec import Spec, parse_spec
from vla_rl.core.types import Array, EnvInfo
from vla_rl.runtime.checks.run import check_offload, on_this_machine, run_preflight
from vla_rl.runtime.comm.channel import RayPeers, RpcServer
from vla_rl.runtime.comm.interfaces import IDLE, HostInterface
from vla_rl.runtime.comm.remote import IMAGINED, declaration_of
from vla_rl.runtime.comm.tracing import IMAGINATION, RECEIVER, CallRecorder, Event, clock
from vla_rl.runtime.messages.learning import SampleRefs
from vla_rl.runtime.messages.reports import RolloutProgress, RolloutReport, TrajectoryResult
from vla_rl.runtime.messages.requests import EpisodeRequest, PolicyMode, StepRequest
from vla_rl.runtime.placement.assignments import Assignment
from vla_rl.runtime.placement.components import build_algorithm, build_env, open_data, values_for
from vla_rl.runtime.placement.hardware import WorkerDevice, own_device, threads
from vla_rl.runtime.scheduling.batching import Call, drive
from vla_rl.runtime.scheduling.ticket_queue import TicketQueue
from vla_rl.runtime.workers.env.env_worker import EnvWorker
from vla_rl.runtime.workers.env.world_model_recording import WorldModelRecordings
from vla_rl.runtime.workers.learner.learner import Learner
from vla_rl.runtime.workers.models import build_model
from vla_rl.runtime.workers.offload import Offload
from vla_rl.runtime.workers.policy.env_clients import EnvClients
from vla_rl.runtime.workers.policy.policy_worker import PolicyWorker
from vla_rl.runtime.workers.policy.progress import ProgressCounter
from vla_rl.runtime.workers.world_model.imagined_envs import ImaginedEnvs
from vla_rl.runtime.workers.world_model.worker import WorldModelWorker
from vla_rl.toolkit.waiting import works_now

Result = dict[str, Any]
PLAYING = "action", "evaluation"
"""Purposes of a `PolicyMode` in the simulators; the other purposes are in the world model."""


class WorkerHost(HostInterface):
    """The process of a worker. See the table at the top of this file for its threads and locks."""

    def __init__(
        self, spec: Spec | dict[str, Any], assignment: Assignment, on_beat: Callable[[], None] = lambda: None
    ) -> None:
        """Create a host. `on_beat` is called at each heartbeat, in the thread that works."""
        self.on_beat = on_beat
        self.spec = parse_spec(spec) if isinstance(spec, dict) else spec
        self.assignment = assignment
        self.algorithm = build_algorithm(self.spec, assignment.slot.device)
        self.wrappers = hook_modules(self.spec.plugins)
        self.roles: dict[str, Any] = {}
        self.data: Demonstrations | None = None
        self.trace = CallRecorder()
        self.offload = Offload(self.roles, assignment, self._make_env)
        self.activities: dict[int, tuple[str, float]] = {}
        """Thread id -> (activity, time of its last heartbeat). There is one entry for each thread, because weights are
        published while a rollout runs.
        """
        self.between_requests = Lock()
        """Held while the policy role is used: weights are swapped between two requests, never within one."""
        self.in_lane = {lane.index: Lock() for lane in assignment.lanes}
        """Lane -> lock that is held while its simulator works. After an error the policy may send a request while its
        last call is still running.
        """
        self.stop_requested: Callable[[], bool] = lambda: False
        """Return whether a rollout or an evaluation has to end early, with StopRequested."""
        self.imagining = Lock()
        """Held while the world model is used."""
        self.reach = EnvClients(assignment, self._direct, lambda: self.beat(IDLE))
        self.answering = RpcServer(assignment.threads)
        self._homes = {lane.index: home for lane, home in zip(assignment.served, assignment.homes, strict=True)}
        self.plays = {purpose: TicketQueue(assignment.served) for purpose in ("action", "imagination")}
        self.played = ProgressCounter()
        if assignment.slot.device == "cpu":
            torch.set_num_threads(threads(assignment.slot.cpus))

    # -------------------------------------------------------------------------------------------------- set-up

    def start_sim(self, folder: Path | None = None, imagined: Mapping[int, int] | None = None) -> EnvInfo:
        spec = self.spec
        if not on_this_machine(spec):
            run_preflight(spec)
        envs = {lane.index: self._make_env(lane.index) for lane in self.assignment.lanes}
        bootstrap = values_for(self.algorithm) != "none"
        long: dict[str, Any] = {"beat": self.beat, "stop_requested": lambda: self.stop_requested()}
        if folder is not None:
            self.roles["recordings"] = WorldModelRecordings()
        if folder is not None and imagined:
            info = next(iter(envs.values())).info
            practice = WorldModelWorker(spec, info, folder, self.assignment.slot.device, self.wrappers, **long)
            self.roles["imagination"] = practice
            self.roles[IMAGINED] = ImaginedEnvs(practice, imagined, bootstrap)
        self.roles["sim"] = EnvWorker(
            spec,
            envs,
            self.assignment.lanes,
            bootstrap=bootstrap,
            framed=self.algorithm.needs.frames,
            camera=self.algorithm.camera,
            local=self.assignment.local,
            recordings=self.roles.get("recordings"),
            **long,
        )
        return next(iter(envs.values())).info

    def _make_env(self, index: int) -> SimEnv:
        env, name = build_env(self.spec, self.assignment, index), self.spec.env.type
        if "sim" in self.assignment.offload:
            check_offload(env, name)
        return wrap("env", env, name, self.wrappers)

    def open_data(self, info: EnvInfo) -> int:
        self.data = open_data(self.spec, info, self.assignment.slot.device, self.wrappers)
        return self.data.num_samples()

    def data_statistics(self) -> Any:
        assert self.data is not None
        return self.data.data_statistics()

    def connect(self, peers: RayPeers) -> None:
        """Connect to the workers whose simulators the policy role acts for."""
        self.reach.connect(peers)

    def open_channel(self, policy: int, lanes: Sequence[int], reader: Any, address: str) -> bool:
        opened = self.answering.connect(policy, reader, address)
        self.roles["sim"].shared.update(dict.fromkeys(lanes, opened))
        return opened

    def serve(self, policy: int) -> None:
        self.beat(IDLE)
        self.answering.serve(policy, self.call)

    def start_model(self, info: EnvInfo, scaling: Any) -> None:
        spec, slot = self.spec, self.assignment.slot
        shape = RunShape.of(spec)
        model = build_model(spec, info, slot.device, scaling, self.algorithm, self.wrappers)
        needs = self.algorithm.needs
        if "policy" in slot.roles:
            self.roles["policy"] = PolicyWorker(
                model,
                name=spec.model.type,
                seed=spec.seed,
                lag=shape.pinned_lag,
                finals=needs.recomputed_values or (needs.values and shape.replays),
                embed=self.algorithm.features,
                on_version=self.plays["action"].reach,
                between_requests=self.between_requests,
            )
        if "learner" in slot.roles:
            self.roles["learner"] = Learner(
                model,
                self.algorithm,
                spec.train,
                name=spec.model.type,
                device=slot.device,
                world=self.assignment.world,
                info=info,
                acting="policy" in slot.roles,
                beat=self.beat,
                data=self.data,
            )

    # --------------------------------------------------------------------------------------------------- calls

    def call(self, role: str, method: str, *arguments: Any) -> Any:
        """Call a method of a hosted role; `role` "worker" is this object."""
        who = self._who(role, method, arguments)
        self.beat(f"{who} ({self._plugin(role)}): {method}")
        try:
            return self._timed(role, method, arguments)
        except Exception as exc:
            if role == "sim" and self.assignment.concurrent_lanes:
                exc.add_note(f"in {who}")
            raise
        finally:
            self.beat(IDLE)

    def roll_out(self, batches: Sequence[Sequence[EpisodeRequest]]) -> RolloutReport:
        self.plays["action"].begin(batches)
        with self.reach.talking():
            return self._drive(PolicyMode(purpose="action", greedy=False, keep=True), self.plays["action"])

    def imagine(self, batches: Sequence[Sequence[EpisodeRequest]]) -> RolloutReport:
        self.plays["imagination"].begin(batches)
        return self._drive(PolicyMode(purpose="imagination", greedy=False, keep=True), self.plays["imagination"])

    def add_tickets(self, batches: Sequence[Sequence[EpisodeRequest]], purpose: str) -> bool:
        return self.plays[purpose].give(batches)

    def wait_for_report(self, needed: Sequence[int], early: bool, purpose: str) -> RolloutReport:
        self.beat(IDLE)
        return self.plays[purpose].report(needed, early)

    def evaluate(self, tickets: Sequence[EpisodeRequest], greedy: bool) -> RolloutReport:
        play = TicketQueue(self.assignment.served, [tickets])
        with self.reach.talking():
            return self._drive(PolicyMode(purpose="evaluation", greedy=greedy, keep=False), play)

    def evaluate_imagined(self, tickets: Sequence[EpisodeRequest]) -> RolloutReport:
        play = TicketQueue(self.assignment.served, [tickets])
        return self._drive(PolicyMode(purpose="over_estimation", greedy=False, keep=False), play)

    # "beside" reads the policy's samples without `between_requests`: they belong to finished tickets, which no
    # inference changes.
    def share_samples(self, sample_ids: Array, host: bool) -> None:
        parts = self.roles["policy"].parts(sample_ids)
        self.roles["learner"].buffer.add(self.assignment.index, [p.numpy() for p in parts] if host else parts)

    def update(self, step: int, named: SampleRefs, light: Any, steps: Any) -> Result:
        result: Result = self.roles["learner"].update(step, self._heavy(named), light, steps)
        return result

    def forward_backward(self, named: SampleRefs, light: Any, micro_batches: Any, passes: int, first: bool) -> None:
        self.roles["learner"].forward_backward(self._heavy(named), light, micro_batches, passes, first)

    def _heavy(self, named: SampleRefs) -> Any:
        rows = self.roles["learner"].buffer.heavy(*named)
        once = not RunShape.of(self.spec).replays and len(rows)
        return rows.take(np.arange(len(rows))) if once else rows

    def rendezvous(self) -> str:
        import ray

        return str(self.roles["learner"].open_door(ray.util.get_node_ip_address()))

    def offload_for(self, phase: str) -> int:
        return self.offload.offload_for(phase)

    def reload_for(self, phase: str) -> None:
        self.offload.reload_for(phase)

    def clock(self) -> tuple[str, float]:
        return clock()

    def device(self) -> WorkerDevice:
        return own_device(self.assignment.slot.device)

    def model_size(self) -> dict[str, float]:
        role = self.roles.get("learner") or self.roles["policy"]
        parameters = list(role.model.module.parameters())
        count = sum(p.numel() for p in parameters)
        return {
            "parameters": count,
            "trainable": sum(p.numel() for p in parameters if p.requires_grad),
            "weight_bytes": sum(p.numel() * p.element_size() for p in parameters) / max(count, 1),
        }

    def drain_trace(self) -> tuple[list[Event], int]:
        return self.trace.drain()

    def close(self) -> list[str]:
        if "sim" not in self.roles:
            return []
        with ExitStack() as stack:
            for lane in self.in_lane.values():
                stack.enter_context(lane)
            sim: EnvWorker = self.roles["sim"]
            return sim.close()

    def beat(self, doing: str | None = None) -> None:
        """Tell that the current call is alive. A call without a heartbeat for longer than the deadline is reported as
        hung.
        """
        thread = get_ident()
        self.activities[thread] = (doing or self.activities.get(thread, (IDLE, 0.0))[0], time())
        self.on_beat()

    @property
    def activity(self) -> tuple[str, float]:
        """Return the activity that has gone on longest without a heartbeat, and the time of its last heartbeat."""
        busy = [doing for doing in tuple(self.activities.values()) if doing[0] != IDLE]
        return min(busy, key=lambda doing: doing[1], default=(IDLE, time()))

    def progress(self) -> RolloutProgress:
        """Return how far this worker is with what it rolls out."""
        sim: EnvWorker | None = self.roles.get("sim")
        return evolve(self.played.count(), solved=sum(sim.solved.values()) if sim else 0, works=works_now())

    def _who(self, role: str, method: str, arguments: Sequence[Any]) -> str:
        """Return role, worker and, for simulators, lane of a call, for messages."""
        if role == "worker":
            return f"worker {self.assignment.index}"
        lane = declaration_of(self.roles[role], method).lane if role in ("sim", IMAGINED) else None
        return f"{role} worker {self.assignment.index}" + ("" if lane is None else f", lane {arguments[lane]}")

    def _plugin(self, role: str) -> str:
        if role in ("imagination", IMAGINED) and self.spec.world_model is not None:
            return f"world model {self.spec.world_model.type!r}"
        return f"env {self.spec.env.type!r}" if role == "sim" else f"model {self.spec.model.type!r}"

    def _direct(self, name: str, track: str | None = None) -> Call:
        """Return a function that calls a role of this worker, as lanes do. `track`: track of the trace, instead of the
        method's.
        """

        def call(method: str, *arguments: Any) -> Any:
            if self.stop_requested():
                raise StopRequested
            self.beat(f"{self._who(name, method, arguments)} ({self._plugin(name)}): {method}")
            return self._timed(name, method, arguments, track)

        return call

    def _timed(self, role: str, method: str, arguments: Sequence[Any], track: str | None = None) -> Any:
        """Run a call while holding the lock of its role, and record it on the trace (on `track`, if given)."""
        owner = self if role == "worker" else self.roles[role]
        called = getattr(owner, method)
        about = declaration_of(owner, method)
        # Methods of the group "weights" lock by themselves, only while they swap: receiving a version takes long, and
        # the locks are not reentrant.
        guard = self.between_requests if role == "policy" and about.group != "weights" else None
        if role == "sim" and about.lane is not None:
            guard = self.in_lane[arguments[about.lane]]
        if role in ("imagination", IMAGINED):
            guard = self.imagining
        with guard or nullcontext():
            start = monotonic()
            try:
                return called(*arguments)
            finally:
                if about.track != "none":
                    roles = self.assignment.slot.roles
                    tracks = {
                        "own": role,
                        "first": roles[0],
                        "last": roles[-1],
                        "receiver": RECEIVER,
                        "imagination": IMAGINATION,
                    }
                    track = track or tracks[about.track]
                    lane = None if about.lane is None else arguments[about.lane]
                    self.trace.add(Event(track, method, lane, start, monotonic(), about.main))

    def _drive(self, mode: PolicyMode, play: TicketQueue) -> RolloutReport:
        """Roll out the tickets of the queue, and those that are added meanwhile. Return what was not reported."""
        real, home = mode.purpose in PLAYING, self._homes
        lanes = self.reach.lanes("sim" if real else IMAGINED)
        policy = self._direct("policy", None if real else IMAGINATION)
        framed = self.algorithm.needs.frames
        batching = (
            evolve(self.assignment.batching, max_wait_s=None) if self.assignment.local else self.assignment.batching
        )
        if real:
            self.played.begin()

        def act(method: str, mode: PolicyMode, indices: Sequence[int], *requests: StepRequest) -> Any:
            done = RolloutReport(env_steps=sum(request.env_steps for request in requests))
            for lane, request in zip(indices, requests, strict=True):
                if real:
                    self.played.note(lane, request)
                source = lane if self.assignment.concurrent_lanes else home[lane]
                done.env_seconds[source] = done.env_seconds.get(source, 0.0) + request.seconds
                done.faults += request.faults
                done.replayed, done.restarted = done.replayed + request.replayed, done.restarted + request.restarted
            actions = policy(method, mode, indices, *requests)
            finished = [ticket for request in requests for ticket in request.finished]
            role: PolicyWorker = self.roles["policy"]
            chosen = role.results(finished, framed) if mode.keep else [{} for _ in finished]
            done.played = [TrajectoryResult(finished=f, chosen=c) for f, c in zip(finished, chosen, strict=True)]
            done.policy_seconds[self.assignment.index] = role.seconds.pop(mode.purpose, 0.0)
            play.add(done)
            return actions

        try:
            while not play.end():
                if self.stop_requested():
                    raise StopRequested
                for _ in drive(lanes, act, mode, batching, play.tickets, self.reach.value_of, self.reach.ready):
                    pass  # nothing to do at a yield: `value_of` and `ready` wait by themselves
        finally:
            play.stop()
        return play.report((), False)
