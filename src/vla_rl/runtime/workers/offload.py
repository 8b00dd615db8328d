"""Offload: roles move from their device to host memory while they have nothing to do, and are restored exactly.

There are two phases. In `act` simulators and policies work, in `learn` learners do. Methods declare the phase that they
need (`comm/remote.py`), so the fleet knows from a call which phase begins. All workers then first free what the phase
does not need, and only then bring back what it needs, so that workers on one device never need both at once.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from vla_rl.core.hookspecs import SimEnv
from vla_rl.runtime.workers.env.closing import close_env

if TYPE_CHECKING:
    from vla_rl.runtime.placement.assignments import Assignment
    from vla_rl.runtime.workers.env.env_worker import EnvWorker

logger = logging.getLogger(__name__)

WORKS_IN = {"sim": "act", "policy": "act", "learner": "learn"}


class Offload:
    """Offload of one worker's roles."""

    def __init__(self, roles: dict[str, Any], assignment: Assignment, make_env: Callable[[int], SimEnv]):
        """Create the offload. `make_env`: lane -> a new simulator."""
        self.roles, self.device, self.make_env = roles, assignment.slot.device, make_env
        self.movable = [role for role in WORKS_IN if role in assignment.offload and role in assignment.slot.roles]
        self.shared = {"policy", "learner"} <= set(assignment.slot.roles)
        self.away: set[str] = set()
        self.snapshots: dict[int, Any] = {}

    def offload_for(self, phase: str) -> int:
        """Free what the phase does not need. Return the bytes of device memory that were freed."""
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

    def reload_for(self, phase: str) -> None:
        for role in [role for role in self.away if WORKS_IN[role] == phase]:
            self.away.remove(role)
            if role == "sim":
                self._unpark_sim(self.roles["sim"])
            else:
                self._move(role, self.device)

    def _park_sim(self, sim: EnvWorker) -> int:
        """Take snapshots and close the simulators, since only their end frees all of their memory."""
        envs = sim.swap({})
        self.snapshots = {lane: env.snapshot() for lane, env in envs.items()}
        for env in envs.values():
            if flaw := close_env(env, sim.name):
                logger.warning("%s", flaw)
        return 0

    def _unpark_sim(self, sim: EnvWorker) -> None:
        envs = {lane: self.make_env(lane) for lane in self.snapshots}
        for lane, env in envs.items():
            env.restore(self.snapshots.pop(lane))
        sim.swap(envs)

    def _move(self, role: str, device: str) -> int:
        """Move a role to a device. Return the bytes moved. Weights that policy and learner share stay, and so does a
        learner's share of sharded weights.
        """
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
    """Yield the tensors of the optimiser's state. AdamW's step counters are scalars on the host and stay there."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim():
                yield state, name, value
