"""The reinforcement learning loop, top down: collect tickets, compute advantages from rewards, train, publish.

The flow (`core/run/flow.py`) decides how far rollouts run ahead, the runtime where the work happens. Parts that a run
can do without follow each rollout (`Runtime.parts`). The session owns the run folder, listeners, evaluations,
checkpoints, resume and a clean stop.
"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

from attrs import Factory, define, field

from vla_rl.core.run.flow import Flow
from vla_rl.core.run.runtime import Runtime
from vla_rl.core.run.selection import Selection, select_trajectories, take_columns
from vla_rl.core.run.session import Session
from vla_rl.core.run.shape import RunShape
from vla_rl.core.run.state import State
from vla_rl.core.spec.spec import Spec
from vla_rl.core.types import Rollout

if TYPE_CHECKING:
    import torch


@define
class ReinforcementLearning(Session):
    """A reinforcement learning run; a step is a rollout and its updates."""

    mode = "training"
    selection: Selection = field(init=False, default=Factory(lambda self: Selection(self.spec), takes_self=True))
    flow: Flow = field(init=False, default=Factory(lambda self: flow_of(self.spec, self.state), takes_self=True))

    def run_loop(self) -> None:
        runtime = self.runtime
        algorithm = runtime.algorithm
        state = self.state
        events = self.events
        if self.spec.bc_warmup is not None and not state.bc_warmup_done:
            self.bc_warmup()
        # Checkpoints are without replayed samples, so a resumed run fills its buffer again.
        state.refilled += RunShape.from_spec(self.spec).has_replay and state.step > 0
        while self.pass_milestone():
            start = perf_counter()
            step = state.step + 1

            self.note_progress("rollout")
            rollout, keep, metrics = collect_rollout(runtime, self.flow, step)
            events.on_rollout_end(self.run_info, step, rollout, metrics)
            for part in runtime.parts:
                metrics |= part.follow_rollout(step)

            self.note_progress("update")
            columns = self.selection.choose_columns(rollout, keep, metrics)
            trained = len(columns) > 0
            if trained:
                prepared = runtime.samples.prepare(take_columns(rollout, columns), columns)
                advantages = algorithm.advantages(prepared)
                metrics |= {**advantages.metrics, **runtime.learners.train(prepared, advantages)}
                self.weight_change_monitor.note_metrics(metrics, self.spec.train.factor(step))
                state.reused += prepared.valid.shape[1] - len(columns)
            metrics |= finish_step(runtime, step, trained)
            self.flow.finish_step("trained" if trained else "discarded")
            state.parts = {part.name: part.totals() for part in runtime.parts}
            state.step = step
            state.env_steps += int(metrics["rollout/env_steps"])
            if trained:
                events.on_weights_published(self.run_info, step, step)
            else:
                metrics["update/skipped"] = 1.0

            metrics["time/step"] = seconds = perf_counter() - start
            metrics["throughput/env_steps_per_s"] = metrics["rollout/env_steps"] / seconds
            events.on_update_end(self.run_info, step, metrics)
            self.selection.check_progress()
            self.record_trace("training")

    def drain_rollouts(self) -> None:
        while running := self.flow.tickets_running:
            for number in self.runtime.rollouts.wait(running):
                self.flow.record_ticket(number)

    def bc_warmup(self) -> None:
        """Clone the simulator's expert (`bc_warmup:`). A run that is stopped before the end repeats it."""
        self.events.on_update_end(self.run_info, 0, self.runtime.learners.clone_expert())
        self.state.bc_warmup_done = True
        self.save_checkpoint()

    @staticmethod
    def last_step(spec: Spec) -> int:
        return spec.train.steps

    def eval_and_save_due(self) -> tuple[bool, bool]:
        spec = self.spec
        step = self.state.step
        evaluate = spec.eval.before if step == 0 else bool(spec.eval.every and step % spec.eval.every == 0)
        # Without `checkpoint_every` the last step saves.
        return evaluate, step % (spec.train.checkpoint_every or spec.train.steps or 1) == 0


def collect_rollout(runtime: Runtime, flow: Flow, step: int) -> tuple[Rollout, torch.Tensor, dict[str, float]]:
    """Collect the groups of a step, in the order of their numbers, and further groups in place of those that the
    filters drop. Return (rollout, kept trajectories as bool [N], metrics)."""
    consumed = list[int]()
    while True:
        runtime.rollouts.issue(step, flow.issue_tickets())
        while (groups := flow.take_groups()) is None:
            runtime.samples.begin(step, [*consumed, *flow.tickets_of(flow.groups_ready)])
            for number in runtime.rollouts.wait(flow.tickets_needed):
                flow.record_ticket(number)
        consumed += flow.tickets_of(groups)
        rollout, metrics = runtime.rollouts.assemble(step, consumed)
        rollout, keep = select_trajectories(rollout, runtime.algorithm)
        flow.keep_groups(rollout.groups[keep].unique().tolist())
        if not flow.groups_wanted:
            return rollout, keep, metrics


def finish_step(runtime: Runtime, step: int, trained: bool) -> dict[str, float]:
    """Free the step's samples and publish its weights. `trained`: False if there was nothing to. Return metrics."""
    return {**runtime.samples.release(trained), **runtime.learners.publish(step, changed=trained)}


def flow_of(spec: Spec, state: State) -> Flow:
    """Return the flow of a run, from its current state."""
    shape = RunShape.from_spec(spec)
    return Flow(
        groups_per_step=shape.groups_per_step,
        steps=spec.train.steps,
        group_size=shape.group_size,
        max_lag=shape.max_lag,
        resampled_groups=shape.resampled_groups,
        ledger=state.tickets,
    )
