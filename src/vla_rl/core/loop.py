"""Reinforcement learning, top down: play a rollout, turn its rewards into advantages, train, publish.

Where this happens (one process, Ray workers, which devices) is the runtime's; the run folder, listeners, evaluations,
checkpoints, resume and a clean stop are the session's.
"""

from __future__ import annotations

from time import perf_counter

from attrs import Factory, define, field

from vla_rl.core.selection import Selection, take_columns
from vla_rl.core.session import Session
from vla_rl.core.spec.spec import Spec


@define
class ReinforcementLearning(Session):
    doing = "training"
    selection: Selection = field(init=False, default=Factory(lambda self: Selection(self.spec), takes_self=True))

    def loop(self) -> None:
        runtime, algorithm, state, events = self.runtime, self.runtime.algorithm, self.state, self.events
        if self.spec.warmup is not None and not state.warmed_up:
            self.warm_up()
        while self.milestone():
            begun, step = perf_counter(), state.step + 1

            self.progress("rollout")
            rollout, metrics = runtime.rollout(step)
            rollout = algorithm.shape_rewards(rollout)
            events.on_rollout_end(self.about, step, rollout, metrics)

            self.progress("update")
            columns = self.selection.choose(rollout, algorithm.select(rollout), metrics)
            if len(columns):
                chosen = take_columns(rollout, columns)
                advantages = algorithm.advantages(chosen)
                metrics |= {**advantages.metrics, **runtime.update(chosen, columns, advantages)}
                events.on_weights_published(self.about, step, runtime.version)
            else:
                runtime.discard()
                metrics["update/skipped"] = 1.0

            state.step, state.env_steps = step, state.env_steps + int(metrics["rollout/env_steps"])
            metrics["time/step"] = seconds = perf_counter() - begun
            metrics["throughput/env_steps_per_s"] = metrics["rollout/env_steps"] / seconds
            events.on_update_end(self.about, step, metrics)
            self.selection.check_progress()
            self.trace("training")

    def warm_up(self) -> None:
        """Clone the simulator's expert. A run that is stopped before its end starts again."""
        self.events.on_update_end(self.about, 0, self.runtime.warm_up())
        self.state.warmed_up = True
        self.save()

    @staticmethod
    def total(spec: Spec) -> int:
        return spec.train.steps

    def due(self) -> tuple[bool, bool]:
        spec, step = self.spec, self.state.step
        evaluate = spec.eval.before if step == 0 else bool(spec.eval.every and step % spec.eval.every == 0)
        return evaluate, step % (spec.train.checkpoint_every or spec.train.steps or 1) == 0
