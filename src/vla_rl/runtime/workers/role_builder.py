"""Construction of a worker's roles from the spec and the worker's assignment. Every process builds its components
itself; live components are never pickled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from attrs import frozen

from vla_rl.core.errors import UserError
from vla_rl.core.hookspecs import Algorithm, Demonstrations, PolicyEngine, SimEnv, VLAModel
from vla_rl.core.manager import Named, unwrap_component, wrap
from vla_rl.core.reward_models import RewardModel
from vla_rl.core.run.shape import RunShape
from vla_rl.core.spec.spec import Spec, has_own_policy, trains_on_transitions
from vla_rl.core.types import EnvInfo
from vla_rl.runtime.checks.compilation import role_of_model
from vla_rl.runtime.checks.run import check_offload, on_this_machine, run_preflight
from vla_rl.runtime.placement.assignments import Assignment
from vla_rl.runtime.placement.components import build_env, build_reward_model, open_data
from vla_rl.runtime.workers.added_roles import RoleContext
from vla_rl.runtime.workers.compilation import compile_model
from vla_rl.runtime.workers.env.env_worker import EnvWorker
from vla_rl.runtime.workers.env.episodes import Bootstrap, RolloutObserver
from vla_rl.runtime.workers.learner.learner import Learner
from vla_rl.runtime.workers.learner.trainers import trainers_of
from vla_rl.runtime.workers.models import build_engine, build_model, policy_name
from vla_rl.runtime.workers.policy.ablation import Ablation
from vla_rl.runtime.workers.policy.policy_worker import PolicyWorker
from vla_rl.toolkit.models.acting.compilation import CompiledBlocks
from vla_rl.toolkit.models.adapters import merge_mode


@frozen(eq=False)
class RoleBuilder:
    """Builder of the roles of one worker."""

    spec: Spec
    assignment: Assignment
    algorithm: Algorithm
    wrappers: Named
    heartbeat: Callable[[], None]
    """Called by the roles within long calls."""
    stop_requested: Callable[[], bool]

    def make_env(self, lane: int) -> SimEnv:
        """Build the simulator of a lane."""
        name = self.spec.env.type
        env = build_env(self.spec, self.assignment, lane)
        if "sim" in self.assignment.offload:
            check_offload(env, name)
        return wrap("env", env, name, self.wrappers)

    def make_envs(self) -> dict[int, SimEnv]:
        """Build the simulators of all lanes of this worker: lane -> simulator."""
        if not on_this_machine(self.spec):
            run_preflight(self.spec)
        return {lane.index: self.make_env(lane.index) for lane in self.assignment.lanes}

    def env_worker(self, envs: dict[int, SimEnv], make_observers: Sequence[Callable[[], RolloutObserver]]) -> EnvWorker:
        """Build the sim role. Raises UserError for a wait that would be reported as hung."""
        waits_s = max(unwrap_component(env).waits_s for env in envs.values())
        limit = self.spec.runtime.deadline_s
        if waits_s >= limit:
            raise UserError(
                f"env: {self.spec.env.type!r} waits up to {waits_s:g} s for a person, and runtime.deadline_s is "
                f"{limit:g}; give more than {waits_s:g}"
            )
        return EnvWorker(
            self.spec,
            envs,
            self.assignment.lanes,
            bootstrap=self._bootstrap,
            framed=self.algorithm.needs.frames,
            camera=self.algorithm.camera,
            local=self.assignment.is_local,
            make_observers=make_observers,
            reward_model=self._reward_model(next(iter(envs.values())).info),
            heartbeat=self.heartbeat,
            stop_requested=self.stop_requested,
        )

    def _reward_model(self, info: EnvInfo) -> RewardModel | None:
        """Build the model of the spec's `rewards:`; None: none. Raises UserError for a wait that would look hung."""
        rewards = self.spec.rewards
        if rewards is None:
            return None
        model = build_reward_model(self.spec, self.assignment, info, self.wrappers)
        limit = self.spec.runtime.deadline_s
        if 2 * model.waits_s >= limit:
            raise UserError(
                f"rewards: {rewards.type!r} waits up to {model.waits_s:g} s for a person, twice in a chunk step, and "
                f"runtime.deadline_s is {limit:g}; give more than {2 * model.waits_s:g}"
            )
        return model

    def role_context(self, info: EnvInfo) -> RoleContext:
        """Return what roles are built from that parts of the training step add."""
        return RoleContext(
            spec=self.spec,
            info=info,
            device=self.assignment.slot.device,
            wrappers=self.wrappers,
            bootstrap=self._bootstrap,
            heartbeat=self.heartbeat,
            stop_requested=self.stop_requested,
        )

    def open_demonstrations(self, info: EnvInfo) -> Demonstrations:
        """Open the demonstrations of the spec's `imitation:`."""
        return open_data(self.spec, info, self.assignment.slot.device, self.wrappers)

    def make_model(self, info: EnvInfo, scaling: Any, imitation: bool) -> VLAModel:
        slot = self.assignment.slot
        role = role_of_model(slot.roles)
        return build_model(
            self.spec, info, slot.device, scaling, self.algorithm, self.wrappers, role, imitation=imitation
        )

    def compiled_blocks(self, model: VLAModel) -> CompiledBlocks | None:
        """Let the model be compiled as the spec says; None: it is not."""
        slot = self.assignment.slot
        moves = bool({"policy", "learner"} & set(self.assignment.offload))
        return compile_model(self.spec, model, slot.device, role_of_model(slot.roles), moves=moves)

    def make_engine(self, info: EnvInfo, make_model: Callable[[], VLAModel]) -> PolicyEngine:
        """Build the engine, and do its one-time work for the batches of the lanes that it acts for."""
        slot = self.assignment.slot
        role = role_of_model(slot.roles)
        engine = build_engine(self.spec, info, slot.device, make_model, self.wrappers, role)
        engine.warm_up(sorted({lane.num_envs for lane in self.assignment.served}))
        return engine

    def make_policy(
        self,
        engine: PolicyEngine,
        *,
        on_version: Callable[[int], None],
        between_requests: AbstractContextManager[Any],
    ) -> PolicyWorker:
        shape = RunShape.from_spec(self.spec)
        needs = self.algorithm.needs
        lag = 0 if has_own_policy(self.spec) else shape.pinned_lag
        if lag and engine.model is None:
            raise UserError(
                f"engine {self.spec.rollout.engine.type!r} has no model in this process, and only such a model acts "
                f"with earlier weights; use rollout.engine.type: torch, or neither asynchrony.max_lag: "
                f"{{pinned: ...}} nor rollout.lag"
            )
        return PolicyWorker(
            engine,
            name=policy_name(self.spec),
            seed=self.spec.seed,
            worker=self.assignment.index,
            device=self.assignment.slot.device,
            lag=lag,
            finals=needs.recomputed_values or needs.final_observations or (needs.values and shape.has_replay),
            values_finals=needs.values,
            embed=self.algorithm.features,
            on_version=on_version,
            between_requests=between_requests,
            ablation=None if self.spec.eval.ablate is None else Ablation(self.spec.eval.ablate),
        )

    def make_learner(
        self,
        model: VLAModel,
        info: EnvInfo,
        demonstrations: Demonstrations | None,
        imitation: bool,
        folder: Path | None,
    ) -> Learner:
        slot = self.assignment.slot
        return Learner(
            model,
            trainers_of(
                self.spec,
                self.algorithm,
                self.wrappers,
                self.heartbeat,
                compare_acting=merge_mode(self.spec.model.config) != "off",
                imitation=imitation,
                folder=folder,
            ),
            self.spec.train,
            name=self.spec.model.type,
            device=slot.device,
            world=self.assignment.world,
            info=info,
            acting="policy" in slot.roles,
            keeps_transitions=trains_on_transitions(self.spec),
            replays=RunShape.from_spec(self.spec).has_replay,
            heartbeat=self.heartbeat,
            demonstrations=demonstrations,
        )

    @property
    def _bootstrap(self) -> Bootstrap:
        """Ends of episodes after which policies get the observations, to compute values or to keep them."""
        needs = self.algorithm.needs
        if needs.values and needs.terminal_values:
            return "ended"
        return "truncated" if needs.values or needs.final_observations else "none"
