"""Where workers live: in this process (for the debugger and golden tests), or as Ray actors."""

from __future__ import annotations

import importlib
import logging
import os
import pickle
import socket
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import time
from typing import Any

import numpy as np
import psutil
import torch

from vla_rl.core.errors import UserError
from vla_rl.core.plan import Cluster
from vla_rl.core.runtime.peers import RayPeers
from vla_rl.core.runtime.reservation import holds, nodes_of, object_store, reserve, rounded_down
from vla_rl.core.runtime.worker import IDLE, Seat, Worker
from vla_rl.core.spec import Spec

if np.lib.NumpyVersion(np.__version__) < "2.0.0":  # simulators in an old interpreter: read what NumPy 2 has pickled
    sys.modules.setdefault("numpy._core.numeric", importlib.import_module("numpy.core.numeric"))


SWAP = ("policy", "load")
"""(role, method) that, with weights that were published, is called while another call of the worker goes on."""
HERE = "\0reference"
"""Stands for an argument that travels by reference."""


LOOKS = 4
"""How often within a deadline it is asked who is stuck."""
LINGER_S = 5.0
"""Seconds that Ray's processes get to end after a shutdown; its agents sometimes miss the end of their node."""


class WorkerDied(UserError):
    """A worker's process ended while it was needed."""


class CallHung(UserError):
    """A call outlasted `runtime.deadline_s`."""


class Backend(ABC):
    """Calls to workers by index; a reference stands for a result that may still be on its way."""

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
        self.worker: Worker | None = None

    def cluster(self) -> Cluster:
        return machine()

    def start(self, spec: Spec, seats: Sequence[Seat]) -> None:
        self.worker = Worker(spec, seats[0])

    def call(self, worker: int, role: str, method: str, *arguments: Any, returns: int = 1) -> Any:
        assert self.worker is not None
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


class RayBackend(Backend):
    """One Ray actor a worker; what the driver passes on travels through Ray's object store, by reference."""

    def __init__(self, address: str | None, deadline_s: float):
        import ray

        self.ray, self.deadline = ray, deadline_s
        self.actors: list[Any] = []
        self.names: list[str] = []
        self.handles: dict[tuple[int, str, int], Any] = {}
        self.last: dict[str, str] = {}
        """What each worker was last asked to do."""
        self.silent: dict[str, float] = {}
        """Since when workers have not even said what they do."""
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        path = os.pathsep.join(dict.fromkeys([str(Path.cwd()), *filter(None, sys.path)]))
        if address is not None:
            _check_reachable(address)
        self.seats: tuple[Seat, ...] = ()
        self.groups: list[Any] = []
        """Ray's placement groups, which hold the resources of all workers."""
        self.held: list[tuple[Any, int]] = []
        """Placement group and bundle of each worker."""
        self.owner = not ray.is_initialized()
        self.alone = address is None
        """Ray was started for this run."""
        if self.owner:
            try:
                ray.init(
                    address=address or "local",
                    object_store_memory=None if address is not None else object_store(),
                    include_dashboard=False if address is None else None,
                    logging_level=logging.ERROR,
                    log_to_driver=True,
                    runtime_env={"env_vars": {"PYTHONPATH": path}},
                )
            except (ConnectionError, ValueError) as exc:
                raise UserError(f"no Ray cluster could be reached at runtime.address={address!r}: {exc}") from exc

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
        actor = self.ray.remote(concurrency_groups={"monitor": 1, "weights": 1})(_Actor)  # type: ignore[call-overload]
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
        self.silent.clear()
        while True:
            try:
                return self._result(reference)
            except self.ray.exceptions.GetTimeoutError:
                self._raise_if_hung()

    def ready(self, references: Sequence[Any]) -> list[Any]:
        self.silent.clear()
        while not self.ray.wait(list(references), num_returns=1, timeout=self.deadline / LOOKS)[0]:
            self._raise_if_hung()
        return list(self.ray.wait(list(references), num_returns=len(references), timeout=0)[0])

    def close(self) -> None:
        actors, self.actors = self.actors, []
        if not self.ray.is_initialized():
            return
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
        if self.owner:
            started = _ray_processes() if self.alone else []
            self.ray.shutdown()
            _, left = psutil.wait_procs(started, timeout=LINGER_S)
            for process in left:
                process.kill()

    def _result(self, reference: Any) -> Any:
        errors = self.ray.exceptions
        lost = (errors.RayActorError, errors.ObjectLostError)
        try:
            return self.ray.get(reference, timeout=self.deadline / LOOKS)
        except (errors.RayTaskError, *lost) as exc:
            cause = exc.cause if isinstance(exc, errors.RayTaskError) else exc
            if isinstance(cause, lost):  # this call's worker, or the one that an argument was to come from
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


class _Actor:
    def __init__(self, data: dict[str, Any], place: Seat):
        # arrays from the object store are read-only; nothing here writes to what it was given
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        self.worker = Worker(data, place)

    def call(self, order: bytes, *referenced: Any) -> Any:
        """`order`: (role, method, arguments) in one piece, which Ray sends faster than one by one; `HERE` stands for
        the next of those that came by reference."""
        role, method, arguments = pickle.loads(order)  # noqa: S301 - from our own driver
        came = iter(referenced)
        return self.worker.call(
            role, method, *(next(came) if isinstance(a, str) and a == HERE else a for a in arguments)
        )

    def swap(self, order: bytes, *referenced: Any) -> Any:
        """`SWAP`, in a thread of its own, since the policy may be playing a rollout."""
        return self.call(order, *referenced)

    swap.__ray_concurrency_group__ = "weights"  # type: ignore[attr-defined]

    def meet(self, actors: Mapping[int, Any]) -> None:
        self.worker.meet(RayPeers(self.worker.place.index, actors))

    def doing(self) -> tuple[str, float]:
        return self.worker.doing

    doing.__ray_concurrency_group__ = "monitor"  # type: ignore[attr-defined]


def _interpreter(python: Path) -> dict[str, Any]:
    """Ray's runtime environment with another interpreter. It finds the user's modules as this one does, and its own
    packages, never ours."""
    prefixes = (sys.prefix, sys.base_prefix)
    own = [path for path in map(str, (Path.cwd(), *sys.path)) if path and not path.startswith(prefixes)]
    return {"py_executable": str(python), "env_vars": {"PYTHONPATH": os.pathsep.join(dict.fromkeys(own))}}


def _ray_processes() -> list[psutil.Process]:
    """Those that this process started, and all of theirs."""
    found: list[psutil.Process] = []
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            if any("/ray/" in part for part in child.cmdline()):
                found += [child, *child.children(recursive=True)]
    return found


def _check_reachable(address: str) -> None:
    """Ray itself tries for minutes. Raises UserError when nothing listens at host:port."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        return  # "auto" and the like
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError as exc:
        raise UserError(f"no Ray cluster could be reached at runtime.address={address!r}: {exc}") from exc


def machine() -> Cluster:
    """This machine."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Cluster(cpus=float(cpus), gpus=torch.cuda.device_count(), memory=psutil.virtual_memory().available)
