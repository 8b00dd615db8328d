"""Offload: roles leave their device for host memory while they have nothing to do, and come back exactly as they were.

There are two phases. In `act` simulators and policies work, in `learn` learners. The driver knows by what it is about
to call which one begins; all workers then first free what the phase does not need, and only then bring back what it
does, so that workers of one device never need both at once.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from vla_rl.core.hookspecs import SimEnv

if TYPE_CHECKING:
    from vla_rl.runtime.assignments import Assignment
    from vla_rl.runtime.roles.sim import SimRole

WORKS_IN = {"sim": "act", "policy": "act", "learner": "learn"}
BEGINS = {
    **dict.fromkeys([("worker", "play_train"), ("worker", "play_eval")], "act"),
    **dict.fromkeys([("sim", "demonstrate"), ("policy", "revalue")], "act"),
    **dict.fromkeys([("learner", method) for method in ("imitate", "load", "save", "weights")], "learn"),
    ("worker", "update"): "learn",
}
"""(role, method) that needs a phase -> the phase."""


class Phases:
    """The driver's part: which phase it is, and what changing it cost."""

    def __init__(self, offload: frozenset[str], assignments: Sequence[Assignment], call: Any, get_all: Any):
        self.offload, self.call, self.get_all = offload, call, get_all
        self.moving = [assignment.index for assignment in assignments if offload & set(assignment.slot.roles)]
        self.now = ""
        self.seconds, self.freed = 0.0, 0

    def before(self, role: str, method: str) -> None:
        """Enter the phase that this call needs."""
        phase = BEGINS.get((role, method), self.now) if self.moving else self.now
        if phase == self.now:
            return
        before = perf_counter()
        self.freed += sum(self.get_all([self.call(worker, "worker", "leave", phase) for worker in self.moving]))
        self.get_all([self.call(worker, "worker", "come_back", phase) for worker in self.moving])
        self.now = phase  # only now: where a worker died, all of it is done again
        self.seconds += perf_counter() - before

    def metrics(self) -> dict[str, float]:
        """Since the last time; nothing without offload."""
        if not self.moving:
            return {}
        found = {"time/offload": self.seconds, "offload/freed_mib": self.freed / 2**20}
        self.seconds, self.freed = 0.0, 0
        return found


class Offload:
    """A worker's part."""

    def __init__(self, roles: dict[str, Any], place: Assignment, make_env: Callable[[int], SimEnv]):
        """`make_env`: lane -> its simulator, built anew."""
        self.roles, self.device, self.make_env = roles, place.slot.device, make_env
        self.movable = [role for role in WORKS_IN if role in place.offload and role in place.slot.roles]
        self.shared = {"policy", "learner"} <= set(place.slot.roles)
        self.away: set[str] = set()
        self.snapshots: dict[int, Any] = {}

    def leave(self, phase: str) -> int:
        """Free what the phase does not need. -> bytes of device memory."""
        before, moved = self._allocated(), 0
        for role in self.movable:
            if WORKS_IN[role] != phase and role not in self.away:
                self.away.add(role)
                moved += self._park_sim(self.roles["sim"]) if role == "sim" else self._move(role, "cpu")
        if not self.device.startswith("cuda"):
            return moved
        gc.collect()
        torch.cuda.empty_cache()
        return before - self._allocated()

    def come_back(self, phase: str) -> None:
        for role in [role for role in self.away if WORKS_IN[role] == phase]:
            self.away.remove(role)
            if role == "sim":
                self._unpark_sim(self.roles["sim"])
            else:
                self._move(role, self.device)

    def _park_sim(self, sim: SimRole) -> int:
        """Simulators hold memory that only their end gives back: they are closed, and built anew from a snapshot."""
        envs = sim.place({})
        self.snapshots = {lane: env.snapshot() for lane, env in envs.items()}
        for env in envs.values():
            env.close()
        return 0

    def _unpark_sim(self, sim: SimRole) -> None:
        envs = {lane: self.make_env(lane) for lane in self.snapshots}
        for lane, env in envs.items():
            env.restore(self.snapshots.pop(lane))
        sim.place(envs)

    def _move(self, role: str, device: str) -> int:
        """-> bytes moved. Weights that policy and learner share stay, and a learner's share of sharded ones."""
        part, moved = self.roles[role], 0

        def copy(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal moved
            moved += tensor.nbytes
            return tensor.to(device, copy=True)

        if role == "learner":
            part.optimizer.zero_grad(set_to_none=True)
            for state, name, tensor in _moments(part.optimizer):
                state[name] = copy(tensor)
        if not self.shared and (role == "policy" or not part.group.lockstep):
            part.model.module._apply(copy)  # noqa: SLF001 - what Module.to is made of, which would not copy on a CPU
        return moved

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated() if self.device.startswith("cuda") else 0


def _moments(optimizer: torch.optim.Optimizer) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
    """Tensors of the optimiser's state; AdamW's step counters are scalars on the host and stay there."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim():
                yield state, name, value
