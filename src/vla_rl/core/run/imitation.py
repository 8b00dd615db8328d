"""Behaviour cloning (`vla-rl sft`): train on demonstrations, evaluate, save. A step is an optimiser step."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter

from attrs import define

from vla_rl.core.errors import UserError
from vla_rl.core.interrupts import Interrupts
from vla_rl.core.run.runtime import Imitation, Runtime, StartRuntime
from vla_rl.core.run.session import Session
from vla_rl.core.run.state import State
from vla_rl.core.spec.sections import ImitationSpec
from vla_rl.core.spec.spec import Spec


@define
class Cloning(Session):
    """A behaviour-cloning run; a step is an optimiser step."""

    mode = "imitation"

    @staticmethod
    def last_step(spec: Spec) -> int:
        steps = imitation_of(spec).steps
        assert steps is not None, "check_spec refuses a run without"
        return steps

    @classmethod
    def start_runtime(
        cls, spec: Spec, state: State, start: StartRuntime, folder: Path, interrupts: Interrupts
    ) -> Runtime:
        return start(spec, imitation=True, scaling=state.scaling, folder=folder, interrupts=interrupts)

    def run_loop(self) -> None:
        imitation = self.runtime.learners.open_imitation()
        self.state.scaling = self.runtime.scaling
        while self.pass_milestone():
            self._train_interval(imitation)
            self.record_trace("training")

    def eval_and_save_due(self) -> tuple[bool, bool]:
        section, step = imitation_of(self.spec), self.state.step
        if step == 0:
            return self.spec.eval.before, False
        return (
            bool(section.eval_every) and step % section.eval_every == 0,
            bool(section.checkpoint_every) and step % section.checkpoint_every == 0,
        )

    def drain_rollouts(self) -> None:
        """Do nothing: no rollout runs between evaluations."""

    def _train_interval(self, imitation: Imitation) -> None:
        """Train until the next metrics line, evaluation or checkpoint."""
        section = imitation_of(self.spec)
        rate = section.lr
        assert rate is not None, "check_spec refuses a run without"
        start = perf_counter()
        first = self.state.step + 1
        intervals = (section.report_every, section.eval_every, section.checkpoint_every)
        last = min(self.run_info.steps, *(-(-first // every) * every for every in intervals if every))

        steps_per_epoch = imitation.steps_per_epoch

        def lr_at(step: int) -> float:
            return rate * section.factor(step)

        def on_step(step: int) -> None:
            self.state.step = step - 1
            epoch, done = divmod(step - 1, steps_per_epoch)
            self.note_progress(f"epoch {epoch + 1}", done, steps_per_epoch)

        learned = imitation.train(first, last, lr_at, on_step)
        self.weight_change_monitor.note_metrics(learned, section.factor(last))
        self.state.step = last
        self.runtime.learners.publish(version=0)  # the newest weights alone evaluate
        seconds = perf_counter() - start
        metrics = {
            **imitation.metrics,
            **learned,
            "imitation/lr": lr_at(last),
            "imitation/epochs": last / steps_per_epoch,
            "time/step": seconds,
            "throughput/samples_per_s": sum(map(imitation.batch_size, range(first, last + 1))) / seconds,
        }
        self.events.on_update_end(self.run_info, last, metrics)


def imitation_of(spec: Spec) -> ImitationSpec:
    """Return the section that `vla-rl sft` trains by. Raises UserError if the spec has none."""
    if spec.imitation is None:
        raise UserError(
            "the spec has no `imitation:` section, which `vla-rl sft` trains by; add one such as\n"
            "  imitation: {expert: {episodes: 100}, steps: 2000, lr: 1e-4}"
        )
    return spec.imitation
