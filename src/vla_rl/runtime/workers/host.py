"""The host of a worker: holds the roles of a slot of the plan, answers calls of role "worker". Backends own hosts.

`role_builder.py` builds the roles, `role_calls.py` runs their calls, `policy/rollout_loop.py` rolls out.

Threads and locks (docs/explanation/threads.md). Threads are named by the concurrency groups whose calls they run
(`comm/remote.py`). With the local backend one thread runs all calls.

| threads (number) | run | may hold, one at a time |
| call (1) | roll_out, evaluate, serve, update, forward_backward, score_samples, set-up, close | in_lane of its simulators, between_requests |
| concurrent (1) | add_tickets, share_samples, take_samples, release_tickets, receive, recordings, trace | between_requests, for the policy's methods |
| weights (1) | load, adopt_version and verify_weights of the policy | between_requests, while a version arrives |
| waiting (2) | wait_for_report | none |
| background (2) | roll_out_in_background, evaluate_in_background; methods of added roles | background, between_requests |
| lane (concurrent lanes) | begin, step, collect_demonstrations of a simulator | in_lane |
| RpcServer's pool (the same number) | begin and step that come through a socket | in_lane |
| monitor (1) | activity, progress, stop requests | none |

1. Outer locks (`RoleLocks`: `in_lane`, `between_requests`, `background`) are never nested in each other. The exception is
`close`, which acquires the `in_lane` locks of all lanes, in the order of `assignment.lanes`.
2. Inner locks may be acquired while an outer one is held, and never the other way round: `TicketQueue._changed` (a new
version of the weights, within `between_requests`), `EnvLanes._counting` (within `in_lane` or `background`),
`RecordingStore._lock` (within none), `CallRecorder._changing` (within any). None of them is held while another one is
acquired.
3. No lock is held while a thread waits for another worker of the run. Exceptions: `Channel._sending`, while a full socket
drains; and `between_requests`, while the learner, which has begun and holds no lock, sends a version.
"""  # noqa: E501 - rows of the table

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from attrs import evolve

from vla_rl.core.catalogue import hook_modules
from vla_rl.core.hookspecs import Demonstrations, VLAModel
from vla_rl.core.spec.spec import Spec, restored_spec
from vla_rl.core.types import Array, DataProperties, EnvInfo
from vla_rl.runtime.comm.interfaces import HostInterface
from vla_rl.runtime.comm.peers import RayPeers
from vla_rl.runtime.comm.rpc_server import RpcServer
from vla_rl.runtime.comm.shared_memory import host_key
from vla_rl.runtime.comm.tracing import Event, read_machine_clock
from vla_rl.runtime.messages.added_roles import AddedRoles
from vla_rl.runtime.messages.reports import RolloutProgress
from vla_rl.runtime.placement.assignments import Assignment
from vla_rl.runtime.placement.components import build_algorithm
from vla_rl.runtime.placement.hardware import WorkerDevice, own_device, torch_threads
from vla_rl.runtime.placement.weight_strategy import WorkerLocation
from vla_rl.runtime.workers.added_roles import build_roles
from vla_rl.runtime.workers.env.env_worker import EnvWorker
from vla_rl.runtime.workers.learner.learner import Learner
from vla_rl.runtime.workers.offload import Offload
from vla_rl.runtime.workers.policy.rollout_loop import EnvClients, RolloutLoop
from vla_rl.runtime.workers.role_builder import RoleBuilder
from vla_rl.runtime.workers.role_calls import Heartbeats, RoleCalls
from vla_rl.toolkit.data.mixture import MixedDemonstrations
from vla_rl.toolkit.models.acting.compilation import CompilationReport, CompiledBlocks
from vla_rl.toolkit.models.frozen_weights import count_weights
from vla_rl.toolkit.trainers.master_weights import is_narrow
from vla_rl.toolkit.waiting import list_running_work


class WorkerHost(HostInterface):
    """The process of a worker. See the table at the top of this file for its threads and locks."""

    def __init__(
        self, spec: Spec | dict[str, Any], assignment: Assignment, on_heartbeat: Callable[[], None] = lambda: None
    ) -> None:
        """Create a host without roles. `on_heartbeat` is called at each heartbeat, in the thread that works."""
        self.spec = restored_spec(spec) if isinstance(spec, dict) else spec
        self.assignment = assignment
        self.stop_requested: Callable[[], bool] = lambda: False
        self.roles: dict[str, Any] = {}
        self._demonstrations: Demonstrations | None = None
        self._compiled_blocks: CompiledBlocks | None = None
        self._heartbeats = Heartbeats(on_heartbeat)
        algorithm = build_algorithm(self.spec, assignment.slot.device)

        def stop_requested() -> bool:
            return self.stop_requested()  # the backend replaces the attribute

        self._builder = RoleBuilder(
            self.spec,
            assignment,
            algorithm,
            hook_modules(self.spec.plugins),
            self._heartbeats.record_heartbeat,
            stop_requested,
        )
        self._calls = RoleCalls(self.spec, assignment, self.roles, self, self._heartbeats, stop_requested)
        self._offload = Offload(self.roles, assignment, self._builder.make_env)
        self._clients = EnvClients(assignment, self._calls.make_caller, self._heartbeats.record_idle)
        self._server = RpcServer(assignment.lane_threads)
        self._rollouts = RolloutLoop(
            assignment,
            self._clients,
            self._calls.make_caller,
            lambda: self.roles["policy"],
            frames=algorithm.needs.frames,
            idle=self._heartbeats.record_idle,
            stop_requested=stop_requested,
        )
        self.roles["rollout"] = self._rollouts
        if assignment.slot.device == "cpu":
            torch.set_num_threads(torch_threads(assignment.slot.cpus))

    def call(self, role: str, method: str, *arguments: Any) -> Any:
        return self._calls.call(role, method, *arguments)

    # -------------------------------------------------------------------------------------------------- set-up

    def start_sim(self, added: Sequence[AddedRoles] = ()) -> EnvInfo:
        envs = self._builder.make_envs()
        info = next(iter(envs.values())).info
        built = [build_roles(roles, self._builder.role_context(info)) for roles in added]
        for one in built:
            self.roles |= one.roles
            self._calls.plugins |= dict.fromkeys(one.roles, one.plugin)
        observers = [one.make_observer for one in built if one.make_observer is not None]
        self.roles["sim"] = self._builder.env_worker(envs, observers)
        return info

    def open_data(self, info: EnvInfo) -> list[int]:
        self._demonstrations = self._builder.open_demonstrations(info)
        if isinstance(self._demonstrations, MixedDemonstrations):
            return self._demonstrations.sizes
        return [self._demonstrations.num_samples()]

    def data_statistics(self, references: Sequence[int | None]) -> Any:
        assert self._demonstrations is not None
        if not references:
            return self._demonstrations.data_statistics()
        statistics = self._demonstrations.relative_statistics(references)
        relative_to = [-1 if place is None else place for place in references]
        return {**statistics, "action": {**statistics["action"], "relative_to": relative_to}}

    def data_properties(self) -> DataProperties:
        assert self._demonstrations is not None
        return self._demonstrations.data_properties()

    def start_model(self, info: EnvInfo, scaling: Any, imitation: bool, folder: Path | None) -> None:
        @cache
        def make_model() -> VLAModel:
            model = self._builder.make_model(info, scaling, imitation)
            self._compiled_blocks = self._builder.compiled_blocks(model)
            return model

        if "policy" in self.assignment.slot.roles:
            self.roles["policy"] = self._builder.make_policy(
                self._builder.make_engine(info, make_model),
                on_version=self._rollouts.queue_of("action").reach_version,
                between_requests=self._calls.locks.between_requests,
            )
        if "learner" in self.assignment.slot.roles:
            self.roles["learner"] = self._builder.make_learner(
                make_model(), info, self._demonstrations, imitation, folder
            )

    def connect_peers(self, peers: RayPeers) -> None:
        """Connect to the workers whose simulators the policy role acts for."""
        self._clients.connect_peers(peers)

    def open_channel(self, policy: int, lanes: Sequence[int], reader: Any, address: str) -> bool:
        opened = self._server.connect_policy(policy, reader, address)
        self.roles["sim"].shared.update(dict.fromkeys(lanes, opened))
        return opened

    def serve(self, policy: int) -> None:
        self._heartbeats.record_idle()
        self._server.answer_calls(policy, self.call)

    # ------------------------------------------------------------------------------------------------ learning

    # The group "concurrent" reads the policy's samples without `between_requests`: they belong to finished tickets,
    # which no inference changes.
    def share_samples(self, sample_ids: Array, host: bool) -> None:
        batches = self.roles["policy"].samples.sample_batches(sample_ids)
        if host:
            batches = [batch.numpy() for batch in batches]
        self.roles["learner"].buffer.add(self.assignment.index, batches)

    def open_rendezvous(self) -> str:
        import ray

        learner: Learner = self.roles["learner"]
        return learner.listen_for_ranks(ray.util.get_node_ip_address())

    # -------------------------------------------------------------------------------------------------- device

    def offload_for(self, phase: str) -> int:
        return self._offload.offload_for(phase)

    def reload_for(self, phase: str) -> None:
        self._offload.reload_for(phase)

    def worker_device(self) -> WorkerDevice:
        return own_device(self.assignment.slot.device)

    def worker_location(self) -> WorkerLocation:
        device = torch.device(self.assignment.slot.device).type
        gpu = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid) if device == "cuda" else None
        return WorkerLocation(
            worker=self.assignment.index,
            machine=host_key(),
            device=device,
            gpu=gpu,
            nccl=torch.distributed.is_nccl_available(),
        )

    def model_size(self) -> dict[str, float]:
        learner: Learner | None = self.roles.get("learner")
        model = self.roles["policy"].engine.model if learner is None else learner.model
        parameters = [] if model is None else list(model.module.parameters())
        count = 0 if model is None else count_weights(model.module)
        return {
            "parameters": count,
            "trainable": sum(p.numel() for p in parameters if p.requires_grad),
            "masters": sum(p.numel() for p in parameters if p.requires_grad and is_narrow(p.dtype)),
            "weight_bytes": sum(p.numel() * p.element_size() for p in parameters) / max(count, 1),
        }

    def compilation_report(self) -> CompilationReport | None:
        return None if self._compiled_blocks is None else self._compiled_blocks.take_report()

    # ------------------------------------------------------------------------------------------------- monitor

    @property
    def longest_activity(self) -> tuple[str, float]:
        return self._heartbeats.longest_activity()

    def rollout_progress(self) -> RolloutProgress:
        sim: EnvWorker | None = self.roles.get("sim")
        solved = sum(sim.solved.values()) if sim else 0
        return evolve(self._rollouts.progress.current_progress(), solved=solved, works=list_running_work())

    def read_clock(self) -> tuple[str, float]:
        return read_machine_clock()

    def drain_trace(self) -> tuple[list[Event], int]:
        return self._calls.recorder.drain_events()

    def close(self) -> list[str]:
        if "policy" in self.roles:
            self.roles["policy"].close()
        if "sim" not in self.roles:
            return []
        # A call that still runs in a lane ends first.
        with self._calls.locks.all_lanes():
            sim: EnvWorker = self.roles["sim"]
            return sim.close()
