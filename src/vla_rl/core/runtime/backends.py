"""Where workers live: in this process (for the debugger and golden tests), or as Ray actors."""

from __future__ import annotations

import logging
import os
import pickle
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic, time
from typing import Any

from vla_rl.core.errors import UserError
from vla_rl.core.plan import Cluster
from vla_rl.core.runtime.actor import HERE, Actor
from vla_rl.core.runtime.hardware import machine
from vla_rl.core.runtime.interrupts import Interrupts
from vla_rl.core.runtime.own_ray import OwnRay, join
from vla_rl.core.runtime.progress import Count, Glances
from vla_rl.core.runtime.reservation import holds, nodes_of, reserve, rounded_down
from vla_rl.core.runtime.worker import IDLE, Seat, Worker
from vla_rl.core.spec import Spec

SWAP = ("policy", "load")
"""(role, method) that, with weights that were published, is called while another call of the worker goes on."""
LOOKS = 4
"""How often within a deadline it is asked who is stuck."""
TICK_S = 0.5
"""How often, while the driver waits, it is asked whether the run has to stop, whether Ray lives and how far it is."""


class WorkerDied(UserError):
    """A worker's process ended while it was needed."""


class CallHung(UserError):
    """A call outlasted `runtime.deadline_s`."""


class Backend(ABC):
    """Calls to workers by index; a reference stands for a result that may still be on its way."""

    def __init__(self) -> None:
        self.interrupts = Interrupts()
        """When a stop is asked for, workers leave what they play (StopRequested)."""
        self.tick: Callable[[], None] = lambda: None
        """Is called about every `TICK_S` while results are waited for."""

    @abstractmethod
    def cluster(self) -> Cluster: ...

    @abstractmethod
    def start(self, spec: Spec, seats: Sequence[Seat]) -> None: ...

    @abstractmethod
    def call(self, worker: int, role: str, method: str, *arguments: Any, returns: int = 1) -> Any:
        """-> a reference, or a list of `returns` references. Arguments may be references."""

    def introduce(self, worker: int, others: Sequence[int]) -> Any:
        """Let a worker call others. -> a reference."""
        assert not others, "one process has no others"

    @abstractmethod
    def get(self, reference: Any) -> Any:
        """Wait for a result; raises what the call raised, WorkerDied, or CallHung."""

    def get_all(self, references: Sequence[Any]) -> list[Any]:
        """Wait for all, in whatever order they come, so that the first error is raised even if others never return."""
        left = list(references)
        while left:
            for reference in self.ready(left):
                left.remove(reference)
                self.get(reference)
        return [self.get(reference) for reference in references]

    @abstractmethod
    def ready(self, references: Sequence[Any]) -> list[Any]:
        """Wait until at least one is there, -> those that are."""

    @abstractmethod
    def played(self, workers: Sequence[int]) -> Count:
        """How far these are with what they play, as far as they have said; does not wait."""

    def dead(self) -> list[int]:
        """Workers whose process ended."""
        return []

    def revive(self, workers: Sequence[int]) -> None:
        """Start dead workers anew, on their device, or on a node that came back under the name of a lost one."""
        assert not workers, "none of these die"

    @abstractmethod
    def close(self) -> None:
        """End all workers; may be called twice, also after an error."""


class LocalBackend(Backend):
    """One worker with all roles in this process. References are the results themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.worker: Worker | None = None
        self._ticked = monotonic()

    def cluster(self) -> Cluster:
        return machine()

    def start(self, spec: Spec, seats: Sequence[Seat]) -> None:
        self.worker = _WorkerHere(spec, seats[0], self._beat)
        self.worker.has_to_leave = lambda: self.interrupts.requested

    def _beat(self) -> None:
        if monotonic() - self._ticked >= TICK_S:
            self._ticked = monotonic()
            self.tick()

    def played(self, workers: Sequence[int]) -> Count:
        assert self.worker is not None
        return self.worker.played.count()

    def call(self, worker: int, role: str, method: str, *arguments: Any, returns: int = 1) -> Any:
        assert self.worker is not None
        self.interrupts.check_waiting()
        return self.worker.call(role, method, *arguments)

    def get(self, reference: Any) -> Any:
        return reference

    def get_all(self, references: Sequence[Any]) -> list[Any]:
        return list(references)

    def ready(self, references: Sequence[Any]) -> list[Any]:
        return list(references)

    def close(self) -> None:
        if self.worker is not None:
            self.worker.close()
            self.worker = None


class _WorkerHere(Worker):
    """Lets the driver, in whose thread it works, look up from time to time."""

    def __init__(self, spec: Spec, place: Seat, on_beat: Callable[[], None]):
        self._on_beat = on_beat
        super().__init__(spec, place)

    def beat(self, doing: str | None = None) -> None:
        super().beat(doing)
        self._on_beat()


class RayBackend(Backend):
    """One Ray actor a worker; what the driver passes on travels through Ray's object store, by reference."""

    def __init__(self, address: str | None, deadline_s: float):
        import ray

        super().__init__()
        self.ray, self.deadline = ray, deadline_s
        self.actors: list[Any] = []
        self.names: list[str] = []
        self.handles: dict[tuple[int, str, int], Any] = {}
        self.last: dict[str, str] = {}
        """What each worker was last asked to do."""
        self._glances = Glances(ray)
        self.silent: dict[str, float] = {}
        """Since when workers have not even said what they do."""
        self.looked = time()
        """When it was last asked who is stuck, or the waiting began."""
        self.leaving = False
        """Workers were told to leave what they play."""
        self.seats: tuple[Seat, ...] = ()
        self.groups: list[Any] = []
        """Ray's placement groups, which hold the resources of all workers."""
        self.held: list[tuple[Any, int]] = []
        """Placement group and bundle of each worker."""
        self.own: OwnRay | None = None
        """Ray was started for this run."""
        self.owner = not ray.is_initialized()
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        path = os.pathsep.join(dict.fromkeys([str(Path.cwd()), *filter(None, sys.path)]))
        options: dict[str, Any] = {
            "logging_level": logging.ERROR,
            "log_to_driver": True,
            "runtime_env": {"env_vars": {"PYTHONPATH": path}},
        }
        if self.owner and address is not None:
            join(address, **options)
        elif self.owner:
            self.own = OwnRay()
            self.own.start(**options)

    def cluster(self) -> Cluster:
        nodes = tuple(node for _, node in nodes_of(self.ray))
        return Cluster(
            cpus=sum(node.cpus for node in nodes),
            gpus=sum(node.gpus for node in nodes),
            memory=sum(node.memory for node in nodes),
            nodes=nodes,
        )

    def start(self, spec: Spec, seats: Sequence[Seat]) -> None:
        self.spec, self.seats = spec, tuple(seats)
        group, bundle_of = reserve(self.ray, [place.slot for place in seats], self.deadline)
        self.groups.append(group)
        self.held = [(group, bundle_of[place.index]) for place in seats]
        for place in seats:
            plugins = (
                f"env {spec.env.type!r}, model {spec.model.type!r}"
                if place.slot.roles != ("sim",)
                else f"env {spec.env.type!r}"
            )
            self.actors.append(self._launch(place))
            self.names.append(f"worker {place.index} ({', '.join(place.slot.roles)}; {plugins})")

    def _launch(self, place: Seat) -> Any:
        """A worker's actor, on the device that it holds."""
        group, bundle = self.held[place.index]
        actor = self.ray.remote(concurrency_groups={"monitor": 1, "weights": 1})(Actor)  # type: ignore[call-overload]
        options: dict[str, Any] = {
            "num_cpus": rounded_down(place.slot.cpus),
            "num_gpus": place.slot.gpus,
            "scheduling_strategy": self.ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=bundle
            ),
        }
        if place.slot.roles == ("sim",) and self.spec.env.python is not None:
            options["runtime_env"] = _interpreter(self.spec.env.python)
        return actor.options(**options).remote(self.spec.to_dict(), place)

    def dead(self) -> list[int]:
        if self.own and self.own.ended():
            return []
        asked = {actor.doing.remote(): index for index, actor in enumerate(self.actors)}
        there, _ = self.ray.wait(list(asked), num_returns=len(asked), timeout=30)
        return [asked[answer] for answer in there if self._raises(answer)]

    def revive(self, workers: Sequence[int]) -> None:
        homeless = [worker for worker in workers if not holds(self.ray, *self.held[worker])]
        if homeless:
            group, bundle_of = reserve(self.ray, [self.seats[worker].slot for worker in homeless], self.deadline)
            self.groups.append(group)
            for worker, bundle in zip(homeless, bundle_of, strict=True):
                self.held[worker] = group, bundle
        for worker in workers:
            self.actors[worker] = self._launch(self.seats[worker])
        self.handles = {key: handle for key, handle in self.handles.items() if key[0] not in workers}

    def _raises(self, reference: Any) -> bool:
        try:
            self.ray.get(reference)
        except self.ray.exceptions.RayActorError:
            return True
        return False

    def call(self, worker: int, role: str, method: str, *arguments: Any, returns: int = 1) -> Any:
        self.last[self.names[worker]] = f"{role} {method}"
        door = "swap" if (role, method) == SWAP and arguments[-1] is not None else "call"
        handle = self.handles.get((worker, door, returns))
        if handle is None:
            handle = getattr(self.actors[worker], door).options(num_returns=returns)
            self.handles[worker, door, returns] = handle
        references = [a for a in arguments if isinstance(a, self.ray.ObjectRef)]
        plain = [HERE if isinstance(a, self.ray.ObjectRef) else a for a in arguments]
        return handle.remote(pickle.dumps((role, method, plain)), *references)

    def introduce(self, worker: int, others: Sequence[int]) -> Any:
        return self.actors[worker].meet.remote({other: self.actors[other] for other in others})

    def get(self, reference: Any) -> Any:
        self._begin_waiting()
        while True:
            try:
                return self._result(reference)
            except self.ray.exceptions.GetTimeoutError:
                self._wait_on()

    def played(self, workers: Sequence[int]) -> Count:
        return self._glances.look([self.actors[worker] for worker in workers])

    def ready(self, references: Sequence[Any]) -> list[Any]:
        self._begin_waiting()
        while not self.ray.wait(list(references), num_returns=1, timeout=TICK_S)[0]:
            self._wait_on()
        return list(self.ray.wait(list(references), num_returns=len(references), timeout=0)[0])

    def close(self) -> None:
        actors, self.actors = self.actors, []
        if self.ray.is_initialized() and not (self.own and self.own.ended()):
            self._end(actors)
        if self.own:
            self.own.stop()
            self.own = None
        elif self.owner:
            self.ray.shutdown()

    def _end(self, actors: Sequence[Any]) -> None:
        simulating = [actor for actor, place in zip(actors, self.seats, strict=False) if place.lanes]
        for actor in actors:
            if actor not in simulating:  # at once, so that simulators stop answering and can close
                self.ray.kill(actor)
        closing = [actor.call.remote(pickle.dumps(("worker", "close", []))) for actor in simulating]
        if closing:
            self.ray.wait(closing, num_returns=len(closing), timeout=10)
        for actor in simulating:
            self.ray.kill(actor)
        groups, self.groups = self.groups, []
        for group in groups:
            self.ray.util.remove_placement_group(group)

    def _begin_waiting(self) -> None:
        self.silent.clear()
        self.looked = time()

    def _wait_on(self) -> None:
        """What has to be done every `TICK_S` while the driver waits."""
        self.interrupts.check_waiting()
        if self.interrupts.requested and not self.leaving:
            self.leaving = True
            for actor in self.actors:
                actor.leave_play.remote()
        self._check_ray()
        self.tick()
        if time() - self.looked > self.deadline / LOOKS:
            self.looked = time()
            self._raise_if_hung()

    def _check_ray(self) -> None:
        ended = self.own.ended() if self.own else []
        if ended:
            raise WorkerDied(
                f"Ray's {' and '.join(ended)} ended, from outside or for lack of memory, and with it all workers; what "
                f"was done since the last checkpoint is lost"
            )

    def _result(self, reference: Any) -> Any:
        errors = self.ray.exceptions
        lost = (errors.RayActorError, errors.ObjectLostError)
        try:
            return self.ray.get(reference, timeout=TICK_S)
        except (errors.RayTaskError, *lost) as exc:
            cause = exc.cause if isinstance(exc, errors.RayTaskError) else exc
            if isinstance(cause, lost):  # this call's worker, or the one that an argument was to come from
                self._check_ray()
                ids = [actor._ray_actor_id.hex() for actor in self.actors]  # noqa: SLF001 - Ray offers no public way
                dead = [name for identity, name in zip(ids, self.names, strict=True) if identity in str(cause)]
                raise WorkerDied(f"{', '.join(dead) or 'a worker'} died: {cause}") from exc
            if isinstance(cause, Exception):
                raise cause from exc
            raise

    def _raise_if_hung(self) -> None:
        """Ask every worker what it is doing; a second thread answers while the first is stuck."""
        for actor, name in zip(self.actors, self.names, strict=True):
            asked, answer = time(), actor.doing.remote()
            there, _ = self.ray.wait([answer], timeout=min(10.0, self.deadline))
            if not there:
                if time() - self.silent.setdefault(name, asked) < self.deadline:
                    continue
                raise CallHung(
                    f"{name} has not answered for {self.deadline:g} s (runtime.deadline_s); last call: "
                    f"{self.last.get(name, 'none')}; its output is above"
                )
            self.silent.pop(name, None)
            what, since = self._result(answer)
            if what != IDLE and time() - since > self.deadline:
                raise CallHung(
                    f"{what} has not returned for {time() - since:.0f} s (deadline {self.deadline:g} s, "
                    f"runtime.deadline_s); its output is above"
                )


def _interpreter(python: Path) -> dict[str, Any]:
    """Ray's runtime environment with another interpreter. It finds the user's modules as this one does, and its own
    packages, never ours."""
    prefixes = (sys.prefix, sys.base_prefix)
    own = [path for path in map(str, (Path.cwd(), *sys.path)) if path and not path.startswith(prefixes)]
    return {"py_executable": str(python), "env_vars": {"PYTHONPATH": os.pathsep.join(dict.fromkeys(own))}}
