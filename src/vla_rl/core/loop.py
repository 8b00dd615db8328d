"""The loop: roll out, let the algorithm judge the whole rollout, train. `advance` is one iteration, in reading order;
where it happens (one process, Ray workers, which devices) is hidden by the runtime, and evaluations and checkpoints
between iterations by the session."""

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

    @staticmethod
    def total(spec: Spec) -> int:
        return spec.train.steps

    def due(self) -> tuple[bool, bool]:
        spec, step = self.spec, self.state.step
        evaluate = spec.eval.before if step == 0 else bool(spec.eval.every and step % spec.eval.every == 0)
        return evaluate, step % (spec.train.checkpoint_every or spec.train.steps or 1) == 0

    @property
    def prepared(self) -> bool:
        return self.spec.warmup is None or self.state.warmed_up

    def prepare(self) -> None:
        if not self.prepared:
            self.events.on_update_end(self.about, 0, self.runtime.warm_up())
            self.state.warmed_up = True
            self.save()

    def advance(self) -> None:
        begun, algorithm, step = perf_counter(), self.runtime.algorithm, self.state.step + 1
        self.progress("rollout")
        rollout, metrics = self.runtime.rollout(step)
        rollout = algorithm.shape_rewards(rollout)
        self.events.on_rollout_end(self.about, step, rollout, metrics)
        self.progress("update")
        keep = self.selection.choose(rollout, algorithm.select(rollout), metrics)
        if len(keep):
            kept = take_columns(rollout, keep)
            advantages = algorithm.advantages(kept)
            metrics |= {**advantages.metrics, **self.runtime.update(kept, keep, advantages)}
            self.events.on_weights_published(self.about, step, self.runtime.version)
        else:
            self.runtime.discard()
            metrics["update/skipped"] = 1.0
        self.state.step = step
        self.state.env_steps += int(metrics["rollout/env_steps"])
        metrics["time/step"] = seconds = perf_counter() - begun
        metrics["throughput/env_steps_per_s"] = metrics["rollout/env_steps"] / seconds
        self.events.on_update_end(self.about, step, metrics)
        self.selection.check_drought()
