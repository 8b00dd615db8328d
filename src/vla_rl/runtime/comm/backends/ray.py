"""Workers as Ray actors: placement, calls, and the detection of dead and hung workers."""

from __future__ import annotations

import logging
import os
import pickle
import shlex
import signal
import socket
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep, time
from typing import Any

from vla_rl.core.errors import StopAndSave, WorkerDied
from vla_rl.core.plan import Cluster
from vla_rl.core.spec.spec import Spec
from vla_rl.runtime.comm.backend import TICK_S, Backend, CallHung
from vla_rl.runtime.comm.backends.actor import BY_REFERENCE, Actor
from vla_rl.runtime.comm.backends.own_ray import OwnRay, join_cluster
from vla_rl.runtime.comm.backends.reservation import is_node_alive, nodes_of, reserve_slots, rounded_down
from vla_rl.runtime.comm.interfaces import CLOSE_S, IDLE, MakeHost
from vla_rl.runtime.comm.remote import ConcurrencyGroup
from vla_rl.runtime.comm.shared_memory import host_key
from vla_rl.runtime.messages.reports import RolloutProgress
from vla_rl.runtime.placement.assignments import Assignment
from vla_rl.toolkit.processes import module_path
from vla_rl.toolkit.waiting import PATIENCE_S, Work, list_running_work


def is_unreachable(error: BaseException | None) -> bool:
    """Return whether a call was lost, and its worker may still be alive."""
    from ray import exceptions

    return isinstance(error, exceptions.ActorUnavailableError)


def has_died(error: BaseException | None) -> bool:
    """Return whether a worker has ended, or what it held is lost. All other errors say neither."""
    from ray import exceptions

    ends = (
        exceptions.ActorPlacementGroupRemoved,
        exceptions.ActorUnschedulableError,
        exceptions.LocalRayletDiedError,
        exceptions.NodeDiedError,
        exceptions.ObjectLostError,
        exceptions.OutOfMemoryError,  # Ray's memory monitor ended it
        exceptions.RayActorError,
        exceptions.WorkerCrashedError,
    )
    return isinstance(error, ends) and not is_unreachable(error)


def explain_death(error: BaseException) -> str:
    """Return why a worker ended; where memory ran out, one line with used, limit and what to lower."""
    from ray import exceptions

    if not isinstance(error, exceptions.OutOfMemoryError):
        return str(error)
    return (
        f"{str(error).splitlines()[0]}; end other programs on that node, or lower env.num_envs, rollout.episodes or "
        f"train.micro_batch"
    )


logger = logging.getLogger(__name__)

HEAD_LOOK_S, HEAD_MISSES = 4.0, 6
"""Seconds between two checks for the head of a cluster, and failed ones after which a run saves and ends: without the
head Ray ends the process after 60 s (`RAY_gcs_rpc_server_reconnect_timeout_s`)."""
LOOKS = 4
"""Number of checks for hung workers within a deadline."""


class RayBackend(Backend):
    """Backend with a Ray actor a worker. What the driver passes on goes through Ray's object store, by reference."""

    def __init__(self, make_host: MakeHost, address: str | None, deadline_s: float):
        import ray

        super().__init__()
        self.make_host = make_host
        self.ray = ray
        self.deadline = deadline_s
        self.actors: list[Any] = []
        self.names: list[str] = []
        self.processes: list[Any] = []
        """Reference to the process of each worker, which is there once the worker has started."""
        self.handles: dict[tuple[int, str, int], Any] = {}
        self.last: dict[str, str] = {}
        """Worker -> the call that it was last asked for."""
        self._progress_polls = ProgressPolls(ray)
        self.silent: dict[str, float] = {}
        """Worker -> time since which it has not even answered what it is doing."""
        self.looked = time()
        """Time of the last check for hung workers, or of the beginning of the waiting."""
        self.begun = monotonic()
        """Time at which workers began to start."""
        self.stop_sent = False
        """True once workers were asked to end their rollouts early."""
        self.assignments: tuple[Assignment, ...] = ()
        self.groups: list[Any] = []
        """Ray placement groups, which hold the resources of all workers."""
        self.held: list[tuple[Any, int]] = []
        """Placement group and bundle of each worker."""
        self.own: OwnRay | None = None
        """The Ray that was started for this run; None where it runs on a cluster's."""
        self.owner = not ray.is_initialized()
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        # the standard library first, which PYTHONPATH would otherwise hide, and the working directory last
        library = sysconfig.get_path("stdlib")
        folders = [library, f"{library}/lib-dynload", *filter(None, sys.path), str(Path.cwd())]
        path = os.pathsep.join(dict.fromkeys(folders))
        options: dict[str, Any] = {
            "logging_level": logging.ERROR,
            "log_to_driver": True,
            "runtime_env": {"env_vars": {"PYTHONPATH": path}},
        }
        if self.owner and address is not None:
            # otherwise a worker ends its connections after 30 s of a cut network, and with them the calls
            options["runtime_env"]["env_vars"]["RAY_grpc_keepalive_timeout_ms"] = str(round(1000 * deadline_s))
            join_cluster(address, **options)
        elif self.owner:
            self.own = OwnRay()
            self.own.start(**options)
        self.head: str = ray.get_runtime_context().gcs_address
        """Address of the cluster's head."""
        self.head_checked = monotonic()
        """Time of the last check for the head."""
        self.head_misses = 0
        """Failed checks since the head was reached last."""

    def cluster_resources(self) -> Cluster:
        nodes = tuple(node for _, node in nodes_of(self.ray))
        return Cluster(
            cpus=sum(node.cpus for node in nodes),
            gpus=sum(node.gpus for node in nodes),
            memory=sum(node.memory for node in nodes),
            nodes=nodes,
        )

    def check_store(self, size: int) -> None:
        if self.own:
            self.own.check_store(size)

    def launch_workers(self, spec: Spec, assignments: Sequence[Assignment]) -> None:
        self.spec = spec
        self.assignments = tuple(assignments)
        self.begun = monotonic()
        group, bundle_of = reserve_slots(self.ray, [assignment.slot for assignment in assignments], self.deadline)
        self.groups.append(group)
        self.held = [(group, bundle_of[assignment.index]) for assignment in assignments]
        if self.own:
            self.own.note_launch()
        for assignment in assignments:
            plugins = (
                f"env {spec.env.type!r}, model {spec.model.type!r}"
                if assignment.slot.roles != ("sim",)
                else f"env {spec.env.type!r}"
            )
            self.actors.append(self._launch_actor(assignment))
            self.processes.append(self.actors[-1].process.remote())
            self.names.append(f"worker {assignment.index} ({', '.join(assignment.slot.roles)}; {plugins})")

    def _launch_actor(self, assignment: Assignment) -> Any:
        """Start a worker's actor on the device that it holds."""
        group, bundle = self.held[assignment.index]
        # Threads of each group of `comm/remote.py`, besides the default group ("call"), which has one. "monitor"
        # answers while all others are busy. "waiting" has two, for the reports of the rollout and of one in the
        # background; "background" has two, for the policy and for the role that it waits for.
        threads = {
            "monitor": 1,
            "concurrent": 1,
            "weights": 1,
            "waiting": 2,
            "background": 2,
            "lane": assignment.lane_threads or 1,
        }
        actor = self.ray.remote(concurrency_groups=threads)(Actor)  # type: ignore[call-overload]
        options: dict[str, Any] = {
            "num_cpus": rounded_down(assignment.slot.cpus),
            "num_gpus": assignment.slot.gpus,
            "scheduling_strategy": self.ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=bundle
            ),
        }
        if assignment.slot.roles == ("sim",) and self.spec.env.python is not None:
            options["runtime_env"] = _interpreter_environment(self.spec.env.python)
        return actor.options(**options).remote(self.make_host, self.spec.to_dict(), assignment)

    def dead_workers(self) -> list[int]:
        if self.head_misses >= HEAD_MISSES or (self.own and self.own.ended_processes()):
            return []
        workers = {actor.activity.remote(): index for index, actor in enumerate(self.actors)}
        answers, _ = self.ray.wait(list(workers), num_returns=len(workers), timeout=30)
        return [workers[answer] for answer in answers if has_died(self._read_error(answer))]

    def revive_workers(self, workers: Sequence[int]) -> None:
        homeless = [worker for worker in workers if not is_node_alive(self.ray, *self.held[worker])]
        if homeless:
            group, bundle_of = reserve_slots(
                self.ray, [self.assignments[worker].slot for worker in homeless], self.deadline
            )
            self.groups.append(group)
            for worker, bundle in zip(homeless, bundle_of, strict=True):
                self.held[worker] = group, bundle
        if self.own:
            self.own.note_launch()
        for worker in workers:
            self.actors[worker] = self._launch_actor(self.assignments[worker])
            self.processes[worker] = self.actors[worker].process.remote()
        self.handles = {key: handle for key, handle in self.handles.items() if key[0] not in workers}

    def _read_error(self, reference: Any, timeout: float | None = None) -> Exception | None:
        """Return the error of Ray that a call ended with."""
        try:
            self.ray.get(reference, timeout=timeout)
        except self.ray.exceptions.RayError as exc:
            return exc
        return None

    def call_worker(
        self, worker: int, role: str, method: str, *arguments: Any, returns: int = 1, group: ConcurrencyGroup = "call"
    ) -> Any:
        self.last[self.names[worker]] = f"{role} {method}"
        handle = self.handles.get((worker, group, returns))
        if handle is None:
            options = {} if group == "call" else {"concurrency_group": group}
            handle = self.actors[worker].call.options(num_returns=returns, **options)
            self.handles[worker, group, returns] = handle
        references = [a for a in arguments if isinstance(a, self.ray.ObjectRef)]
        plain = [BY_REFERENCE if isinstance(a, self.ray.ObjectRef) else a for a in arguments]
        return handle.remote(pickle.dumps((role, method, plain)), *references)

    def connect_worker(self, worker: int, others: Sequence[int]) -> Any:
        return self.actors[worker].connect.remote({other: self.actors[other] for other in others})

    def get(self, reference: Any) -> Any:
        self._begin_waiting()
        while True:
            try:
                return self._get_result(reference)
            except self.ray.exceptions.GetTimeoutError:
                self._wait_on()

    def starting_work(self) -> tuple[Work, ...]:
        works = self.read_progress(range(len(self.actors))).works
        started = sum(actor in self._progress_polls.known for actor in self.actors)
        if started == len(self.actors) or self.begun > monotonic() - PATIENCE_S:
            return works
        return Work(what="starting workers", done=started, total=len(self.actors)), *works

    def read_progress(self, workers: Sequence[int]) -> RolloutProgress:
        return self._progress_polls.poll_actors([self.actors[worker] for worker in workers]) + RolloutProgress(
            works=list_running_work()
        )

    def wait_for_any(self, references: Sequence[Any]) -> list[Any]:
        self._begin_waiting()
        while not self.ray.wait(list(references), num_returns=1, timeout=TICK_S)[0]:
            self._wait_on()
        return list(self.ray.wait(list(references), num_returns=len(references), timeout=0)[0])

    def close(self) -> None:
        self._line.clear()
        actors = self.actors
        self.actors = []
        if self.ray.is_initialized() and not (self.own and self.own.ended_processes()):
            self._end_actors(actors)
        if self.own:
            self.own.stop()
            self.own = None
        elif self.owner:
            self.ray.shutdown()

    def _end_actors(self, actors: Sequence[Any]) -> None:
        simulating = [actor for actor, assignment in zip(actors, self.assignments, strict=False) if assignment.lanes]
        for actor in actors:
            if actor not in simulating:  # killed first, so that simulators stop answering and can close
                self.ray.kill(actor)
        closing = {actor.call.remote(pickle.dumps(("worker", "close", []))): actor for actor in simulating}
        if closing:
            closed, late = self.ray.wait(list(closing), num_returns=len(closing), timeout=CLOSE_S)
            self._warn_of_closing(closed, [closing[reference] for reference in late])
        for actor in simulating:
            self.ray.kill(actor)
        groups = self.groups
        self.groups = []
        if not self._reaches_head():  # it carries out what is above, and what is below would wait for it
            for actor in actors:
                actor.__ray_terminate__.remote()
            return
        for group in groups:
            self.ray.util.remove_placement_group(group)

    def _warn_of_closing(self, closed: Sequence[Any], late: Sequence[Any]) -> None:
        """Log a warning for each simulator that could not be closed or has not finished closing in time."""
        for reference in closed:
            with suppress(self.ray.exceptions.RayError):  # the worker has died
                for flaw in self.ray.get(reference):
                    logger.warning("%s", flaw)
        activities = [actor.activity.remote() for actor in late]
        for answer in self.ray.wait(activities, num_returns=len(activities), timeout=1.0)[0] if activities else ():
            with suppress(self.ray.exceptions.RayError):
                what, _ = self.ray.get(answer)
                if what.endswith(": close"):  # otherwise the worker is still in an abandoned call, before `close`
                    logger.warning("%s has not returned within %g s; its end was not waited for", what, CLOSE_S)

    def _begin_waiting(self) -> None:
        self.silent.clear()
        self.looked = time()

    def _wait_on(self) -> None:
        """Do what is due every `TICK_S` seconds while the driver waits."""
        self.interrupts.check_waiting()
        if self.interrupts.requested and not self.stop_sent:
            self.stop_sent = True
            for actor in self.actors:
                actor.request_stop.remote()
        self._check_ray()
        if self.own and self.ray.wait(self.processes, num_returns=len(self.processes), timeout=0)[1]:
            self.own.check_starting_workers()
        self.tick()
        if time() - self.looked > self.deadline / LOOKS:
            self.looked = time()
            self._raise_if_hung()

    def _check_ray(self) -> None:
        ended = self.own.ended_processes() if self.own else []
        if not self.own and monotonic() - self.head_checked > HEAD_LOOK_S:
            self.head_checked = monotonic()
            self.head_misses = 0 if self._reaches_head() else self.head_misses + 1
            if self.head_misses == HEAD_MISSES:
                lost = f"the head of the Ray cluster ({self.head}) has not answered for {HEAD_LOOK_S * HEAD_MISSES:g} s"
                self.interrupts.stop_because(StopAndSave(f"{lost}; without it Ray ends every process after 60 s"))
        if ended:
            raise WorkerDied(
                f"Ray's {' and '.join(ended)} ended, from outside or for lack of memory, and with it all workers; what "
                f"was done since the last checkpoint is lost"
            )

    def _reaches_head(self) -> bool:
        host, _, port = self.head.rpartition(":")
        with suppress(OSError):
            socket.create_connection((host.strip("[]"), int(port)), timeout=1.0).close()
            return True
        return False

    def _get_result(self, reference: Any) -> Any:
        try:
            return self.ray.get(reference, timeout=TICK_S)
        except self.ray.exceptions.RayError as exc:
            cause = exc.cause if isinstance(exc, self.ray.exceptions.RayTaskError) else exc
            if has_died(cause) or is_unreachable(cause):  # the called worker, or the one that supplies an argument
                self._check_ray()
                ids = [actor._ray_actor_id.hex() for actor in self.actors]  # noqa: SLF001 - Ray offers no public way
                lost = [worker for worker, identity in enumerate(ids) if identity in str(cause)]
                why = f"died: {explain_death(cause)}"
                if is_unreachable(cause):
                    why = self._end_unreachable(lost)
                raise WorkerDied(f"{', '.join(self.names[worker] for worker in lost) or 'a worker'} {why}") from exc
            if isinstance(cause, Exception):
                raise cause from exc
            raise

    def _end_unreachable(self, workers: Sequence[int]) -> str:
        """Ask workers that lost a call until they answer, and end them. Return what happened to them."""
        begun = monotonic()
        for worker in workers:
            while self.head_misses < HEAD_MISSES:
                error = self._read_error(self.actors[worker].activity.remote(), TICK_S)
                if has_died(error):
                    return f"could not be reached for {monotonic() - begun:.0f} s, lost a call and ended: {error}"
                if error is None:
                    self._kill_worker(worker)
                sleep(TICK_S)
                self._wait_on()  # raises WorkerDied after the deadline
        return f"could not be reached for {monotonic() - begun:.0f} s"

    def _kill_worker(self, worker: int) -> None:
        """End a worker that answers neither the driver nor Ray."""
        started, _ = self.ray.wait([self.processes[worker]], timeout=0)
        with suppress(self.ray.exceptions.RayError, ProcessLookupError):
            machine, number = self.ray.get(started[0]) if started else (None, 0)
            if machine is not None and machine == host_key():
                os.kill(number, signal.SIGKILL)
        self.ray.kill(self.actors[worker])

    def _raise_if_hung(self) -> None:
        """Ask every worker what it is doing; a second thread of the worker answers while the first is stuck. A worker
        that does not answer (stopped, or holding Python's lock) is killed. Raises WorkerDied or CallHung."""
        for worker, (actor, name) in enumerate(zip(self.actors, self.names, strict=True)):
            asked_at = time()
            answer = actor.activity.remote()
            answered, _ = self.ray.wait([answer], timeout=min(10.0, self.deadline))
            if not answered or is_unreachable(self._read_error(answer)):
                if time() - self.silent.setdefault(name, asked_at) < self.deadline:
                    continue
                self._kill_worker(worker)
                raise WorkerDied(
                    f"{name} did not answer for {self.deadline:g} s (runtime.deadline_s) and was killed; last call: "
                    f"{self.last.get(name, 'none')}; its output is above"
                )
            self.silent.pop(name, None)
            activity, since = self._get_result(answer)
            if activity != IDLE and time() - since > self.deadline:
                raise CallHung(
                    f"{activity} has not returned for {time() - since:.0f} s (deadline {self.deadline:g} s, "
                    f"runtime.deadline_s); its output is above"
                )


def _interpreter_environment(python: Path) -> dict[str, Any]:
    """Return Ray's runtime environment for another interpreter, whose path Ray hands to a shell."""
    return {"py_executable": shlex.quote(str(python.absolute())), "env_vars": {"PYTHONPATH": module_path()}}


class ProgressPolls:
    """Polls the progress of busy workers and keeps the last answer of each."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._pending: dict[Any, Any] = {}
        """Actor -> reference to its next answer."""
        self.known: dict[Any, RolloutProgress] = {}

    def poll_actors(self, actors: Iterable[Any]) -> RolloutProgress:
        """Return the sum of the last answers of these actors, and ask again."""
        total = RolloutProgress()
        for actor in actors:
            pending = self._pending.get(actor)
            if pending is not None and self._ray.wait([pending], timeout=0)[0]:
                self.known[actor] = self._read_answer(pending)
                pending = None
            self._pending[actor] = actor.progress.remote() if pending is None else pending
            total += self.known.get(actor, RolloutProgress())
        return total

    def _read_answer(self, reference: Any) -> RolloutProgress:
        try:
            progress: RolloutProgress = self._ray.get(reference)
        except self._ray.exceptions.RayError as exc:
            if not (has_died(exc) or is_unreachable(exc)):
                raise
            return RolloutProgress()  # the driver learns of it when it waits for a result
        return progress
