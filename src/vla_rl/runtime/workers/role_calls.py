"""Calls of the roles of one worker: each holds its role's lock, sends a heartbeat, and is recorded for the trace. The
table at the top of `host.py` says which thread may hold which lock."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cached_property
from threading import Lock, get_ident
from time import monotonic, time
from typing import Any

import torch
from attrs import define

from vla_rl.core.errors import UserError
from vla_rl.core.interrupts import StopRequested
from vla_rl.core.spec.spec import Spec
from vla_rl.runtime.comm.interfaces import IDLE
from vla_rl.runtime.comm.remote import OWN_ROLES, Remote, declaration_of
from vla_rl.runtime.comm.tracing import CONCURRENT_TRACKS, CallRecorder, Event
from vla_rl.runtime.placement.assignments import Assignment
from vla_rl.runtime.scheduling.batching import Call
from vla_rl.runtime.workers.models import policy_name

Activity = tuple[str, float]
"""What a thread is doing, and the time of its last heartbeat (seconds since the epoch)."""


class Heartbeats:
    """Heartbeats of all threads of one worker. Each thread has an entry, as weights are published during a rollout, and
    writes it alone, so that no lock is needed."""

    def __init__(self, on_heartbeat: Callable[[], None] = lambda: None) -> None:
        """Create the heartbeats. `on_heartbeat` is called at each of them, in the thread that works."""
        self._on_heartbeat = on_heartbeat
        self._activities: dict[int, Activity] = {}
        """Thread id -> its activity."""

    def record_heartbeat(self, activity: str | None = None) -> None:
        """Record that this thread is alive. A call without one for longer than the deadline is reported as hung.

        Args:
            activity: what the thread begins to do; None: it continues what it was doing.
        """
        thread = get_ident()
        if activity is None:
            activity, _ = self._activities.get(thread, (IDLE, 0.0))
        self._activities[thread] = activity, time()
        self._on_heartbeat()

    def record_idle(self) -> None:
        """Record that this thread has nothing to do, or waits for others."""
        self.record_heartbeat(IDLE)

    def longest_activity(self) -> Activity:
        """Return the activity that has gone on longest without a heartbeat; `IDLE` where all threads are idle."""
        busy = [activity for activity in tuple(self._activities.values()) if activity[0] != IDLE]
        return min(busy, key=lambda activity: activity[1], default=(IDLE, time()))


class RoleLocks:
    """The outer locks of a worker: a thread holds at most one of them, except in `all_lanes`."""

    def __init__(self, assignment: Assignment) -> None:
        self.between_requests = Lock()
        """Held while the policy role is used: weights are swapped between two requests, never within one."""
        self.in_lane = {lane.index: Lock() for lane in assignment.lanes}
        """Lane -> lock that is held while its simulator works: after an error a request may meet a running call."""
        self.background = Lock()
        """Held while a role is used that a part of the training step added."""

    def for_call(self, role: str, declaration: Remote, arguments: Sequence[Any]) -> Lock | AbstractContextManager[None]:
        """Return the lock that a call of this role holds."""
        # Methods of the group "weights" lock by themselves, only while they swap: receiving a version takes long, and
        # the locks are not reentrant.
        if role == "policy" and declaration.group != "weights":
            return self.between_requests
        if role == "sim" and declaration.lane is not None:
            return self.in_lane[arguments[declaration.lane]]
        if role not in OWN_ROLES:
            return self.background
        return nullcontext()

    @contextmanager
    def all_lanes(self) -> Iterator[None]:
        """Context that holds the locks of all lanes, acquired in the order of `assignment.lanes`."""
        with ExitStack() as stack:
            # One order for everyone: two threads never wait for each other's lane.
            for lane in self.in_lane.values():
                stack.enter_context(lane)
            yield


@define(eq=False, slots=False)
class RoleCalls:
    """Calls of the roles of one worker, from other processes or from another role."""

    _spec: Spec
    _assignment: Assignment
    _roles: Mapping[str, object]
    """Role -> the object that implements it; roles may be added later."""
    _worker: object
    """Object that implements the role "worker"."""
    _heartbeats: Heartbeats
    _stop_requested: Callable[[], bool]

    def __attrs_post_init__(self) -> None:
        self.locks = RoleLocks(self._assignment)
        self.plugins: dict[str, str] = {}
        """Role that a part of the training step added -> kind and type of its plugin."""
        self.recorder = CallRecorder()

    def call(self, role: str, method: str, *arguments: Any) -> Any:
        """Call a method for another process. Errors of concurrent lanes name the lane."""
        callee = self._name_callee(role, method, arguments)
        self._heartbeats.record_heartbeat(f"{callee} ({self._name_plugin(role)}): {method}")
        try:
            return self._run_call(role, method, arguments)
        except Exception as exc:
            if is_full_device(exc):
                raise full_device(exc, f"{callee} ({self._name_plugin(role)})", role) from exc
            if role == "sim" and self._assignment.concurrent_lanes:
                exc.add_note(f"in {callee}")
            raise
        finally:
            self._heartbeats.record_idle()

    def make_caller(self, role: str, track: str | None = None) -> Call:
        """Return a function that calls a role for another role of this worker. It raises StopRequested once a rollout
        has to end.

        Args:
            track: track of the trace, instead of the one that the method declares.
        """

        def call(method: str, *arguments: Any) -> Any:
            if self._stop_requested():
                raise StopRequested
            self._heartbeats.record_heartbeat(
                f"{self._name_callee(role, method, arguments)} ({self._name_plugin(role)}): {method}"
            )
            return self._run_call(role, method, arguments, track)

        return call

    def _run_call(self, role: str, method: str, arguments: Sequence[Any], track: str | None = None) -> Any:
        """Run a call while holding the lock of its role, and record it on `track`, or on the declared one."""
        owner = self._worker if role == "worker" else self._roles[role]
        function = getattr(owner, method)
        declaration = declaration_of(owner, method)
        with self.locks.for_call(role, declaration, arguments):
            start = monotonic()
            try:
                return function(*arguments)
            finally:
                if declaration.track != "none":
                    lane = None if declaration.lane is None else arguments[declaration.lane]
                    track = track or self._find_track(role, declaration)
                    self.recorder.add(Event(track, method, lane, start, monotonic(), declaration.main))

    def _find_track(self, role: str, declaration: Remote) -> str:
        """Return the track on which a call shows, as `Remote.track` says."""
        if declaration.track in CONCURRENT_TRACKS:
            return declaration.track
        roles = self._assignment.slot.roles
        return {"own": role, "first": roles[0], "last": roles[-1]}[declaration.track]

    def _name_callee(self, role: str, method: str, arguments: Sequence[Any]) -> str:
        """Return role, worker and, where the method declares one, lane of a call, for messages."""
        if role in ("worker", "rollout"):
            return f"worker {self._assignment.index}"
        lane = declaration_of(self._roles[role], method).lane if role not in ("policy", "learner") else None
        return f"{role} worker {self._assignment.index}" + ("" if lane is None else f", lane {arguments[lane]}")

    @cached_property
    def _policy_name(self) -> str:
        return policy_name(self._spec)  # it looks plugins up, which every call of a role would pay for

    def _name_plugin(self, role: str) -> str:
        """Return kind and type of the plugin that a role runs, for messages."""
        if role not in OWN_ROLES:
            return self.plugins[role]
        if role == "policy":
            return self._policy_name
        return f"env {self._spec.env.type!r}" if role == "sim" else f"model {self._spec.model.type!r}"


GIB = 2**30
ADVICE: Mapping[str, str] = {
    "learner": "lower train.micro_batch, set model.recompute to selective or full, or train adapters (model.lora)",
    "policy": "lower env.num_envs, or set rollout.compile to blocks if it is graphs",
    "sim": "lower env.num_envs, or place the simulators on CPUs (placement: sim: cpu)",
}
"""Role -> what needs less memory of its device."""
ALWAYS = (
    "let roles leave the device between phases (placement.offload), or give them separate devices; `vla-rl check "
    "SPEC --devices N --gpu-memory GIB` predicts what a run needs"
)


def is_full_device(error: BaseException) -> bool:
    """Return whether a device has no memory left. Where not even a context fits, torch raises an AcceleratorError."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "CUDA" in str(error) and "out of memory" in str(error)


def full_device(error: BaseException, caller: str, role: str) -> UserError:
    """Return the error for users.

    Args:
        caller: what ran out of memory, such as "learner worker 0 (model 'openvla_oft')".
        role: "sim", "policy", "learner" or another one.
    """
    first_line = next((line for line in str(error).splitlines() if line), type(error).__name__)
    advice = "; ".join([*([ADVICE[role]] if role in ADVICE else ADVICE.values()), ALWAYS])
    return UserError(f"{caller} found its GPU full{_use_of_device()}: {first_line}\n  {advice}")


def _use_of_device() -> str:
    """Describe who has the memory of this process's device; empty where CUDA does not say."""
    try:
        if not torch.cuda.is_available():
            return ""
        free, total = torch.cuda.mem_get_info()
        own = torch.cuda.memory_reserved()
    except RuntimeError:  # no context can be created either
        return ""
    others = max(0, total - free - own)
    return (
        f" ({torch.cuda.get_device_name()}, {total / GIB:.1f} GiB: {own / GIB:.1f} are this worker's, "
        f"{others / GIB:.1f} other processes' and CUDA's own, {free / GIB:.1f} free)"
    )
