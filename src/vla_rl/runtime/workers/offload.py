"""Offload: roles move from their device to host memory while they have nothing to do, and are restored exactly.

In the phase `act` simulators and policies work, in `learn` learners. Methods declare their phase (`comm/remote.py`).
When one begins, all workers first free what it does not need, then restore what it needs: no device holds both.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from vla_rl.core.capabilities import Offloadable, require_capability
from vla_rl.core.hookspecs import SimEnv, VLAModel
from vla_rl.core.trainers import Trainer
from vla_rl.runtime.workers.env.simulator import close_env
from vla_rl.toolkit.trainers.trainer_state import owned_parts

if TYPE_CHECKING:
    from vla_rl.runtime.placement.assignments import Assignment
    from vla_rl.runtime.workers.env.env_worker import EnvWorker
    from vla_rl.runtime.workers.learner.learner import Learner
    from vla_rl.runtime.workers.policy.policy_worker import PolicyWorker

logger = logging.getLogger(__name__)

WORKS_IN = {"sim": "act", "policy": "act", "learner": "learn"}
"""Role -> phase in which it works."""


class Offload:
    """Offload of one worker's roles."""

    def __init__(self, roles: Mapping[str, Any], assignment: Assignment, make_env: Callable[[int], SimEnv]):
        """Create the offload.

        Args:
            roles: role -> the object that implements it; roles may be added later.
            make_env: lane -> a new simulator.
        """
        self.away: set[str] = set()
        """Roles that are in host memory."""
        self._roles = roles
        self._make_env = make_env
        self._device = assignment.slot.device
        self._movable = [role for role in WORKS_IN if role in assignment.offload and role in assignment.slot.roles]
        self._one_model = {"policy", "learner"} <= set(assignment.slot.roles)
        """True where policy and learner have one model, which then stays on the device."""
        self._snapshots: dict[int, Any] = {}
        """Lane -> snapshot of its simulator."""

    def offload_for(self, phase: str) -> int:
        """Free what the phase does not need. Return the bytes of device memory that were freed."""
        before = self._allocated_bytes()
        moved = 0
        for role in self._movable:
            if WORKS_IN[role] != phase and role not in self.away:
                self.away.add(role)
                moved += self._offload_role(role)
        if not self._device.startswith("cuda"):
            return moved
        # Cycles hold tensors until they are collected, and the cache holds them after that.
        gc.collect()
        torch.cuda.empty_cache()
        return before - self._allocated_bytes()

    def reload_for(self, phase: str) -> None:
        """Bring back what the phase needs."""
        for role in [role for role in self.away if WORKS_IN[role] == phase]:
            self.away.remove(role)
            if role == "sim":
                self._rebuild_envs(self._roles["sim"])
            else:
                self._move_role(role, self._device)

    def _offload_role(self, role: str) -> int:
        """Free the device memory of a role. Return the bytes that were moved to host memory."""
        if role == "sim":
            self._close_envs(self._roles["sim"])
            return 0
        return self._move_role(role, "cpu")

    def _close_envs(self, sim: EnvWorker) -> None:
        """Take snapshots and close the simulators, since only their end frees all of their memory."""
        envs = sim.swap_envs({})
        self._snapshots = {
            lane: require_capability(env, Offloadable, "offload").snapshot() for lane, env in envs.items()
        }
        for env in envs.values():
            if flaw := close_env(env, sim.name):
                logger.warning("%s", flaw)

    def _rebuild_envs(self, sim: EnvWorker) -> None:
        envs = {lane: self._make_env(lane) for lane in self._snapshots}
        for lane, env in envs.items():
            require_capability(env, Offloadable, "offload").restore(self._snapshots.pop(lane))
        sim.swap_envs(envs)

    def _move_role(self, role: str, device: str) -> int:
        """Move a policy or a learner to a device. Return the bytes moved. A shared model stays, as do shards."""
        moved = 0

        def copy_to_device(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal moved
            moved += tensor.nbytes
            return tensor.to(device, copy=True)

        sharded = False
        if role == "learner":
            learner: Learner = self._roles[role]
            learner.trained.optimizer.zero_grad(set_to_none=True)
            for state, name, tensor in _optimizer_tensors(learner.trained.optimizer):
                state[name] = copy_to_device(tensor)
            for master in learner.trained.master_weights.masters.values():
                master.data = copy_to_device(master.data)
            for trainer in learner.trainers.named_trainers.values():
                _move_owned(trainer, copy_to_device)
            sharded = learner.trained.strategy.lockstep
            model: VLAModel | None = learner.model
        else:
            policy: PolicyWorker = self._roles[role]
            model = policy.engine.model
        if model is not None and not self._one_model and not sharded:
            model.module._apply(copy_to_device)  # noqa: SLF001 - what Module.to is made of, which would not copy on a CPU
        return moved

    def _allocated_bytes(self) -> int:
        return torch.cuda.memory_allocated() if self._device.startswith("cuda") else 0


def _move_owned(trainer: Trainer[Any], copy: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Copy the networks, targets and optimisers that a trainer owns in addition to the policy."""
    for part in owned_parts(trainer).values():
        if isinstance(part, torch.nn.Module):
            part._apply(copy)  # noqa: SLF001 - as in `_move_role`
        else:
            for state, name, tensor in _optimizer_tensors(part):
                state[name] = copy(tensor)


def _optimizer_tensors(optimizer: torch.optim.Optimizer) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
    """Yield the tensors of the optimiser's state. AdamW's step counters are scalars and stay where they are."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim():
                yield state, name, value
