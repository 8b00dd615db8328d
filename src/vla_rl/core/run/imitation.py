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
    def total(spec: Spec) -> int:
        return imitation_of(spec).steps

    @classmethod
    def open(cls, spec: Spec, state: State, start: StartRuntime, folder: Path, interrupts: Interrupts) -> Runtime:
        return start(spec, imitation=True, scaling=state.scaling, folder=folder, interrupts=interrupts)

    def loop(self) -> None:
        imitation = self.runtime.imitation()
        self.state.scaling = self.runtime.scaling
        while self.milestone():
            self._train(imitation)
            self.trace("training")

    def due(self) -> tuple[bool, bool]:
        section, step = imitation_of(self.spec), self.state.step
        if step == 0:
            return self.spec.eval.before, False
        return (
            bool(section.eval_every) and step % section.eval_every == 0,
            bool(section.checkpoint_every) and step % section.checkpoint_every == 0,
        )

    def settle(self) -> None:
        """Do nothing: no rollout runs between evaluations."""

    def _train(self, imitation: Imitation) -> None:
        """Train until the next metrics line, evaluation or checkpoint."""
        begun, section = perf_counter(), imitation_of(self.spec)
        first = self.state.step + 1
        marks = (section.report_every, section.eval_every, section.checkpoint_every)
        last = min(section.steps, *(-(-first // every) * every for every in marks if every))

        def rate(step: int) -> float:
            return section.lr * section.factor(step)

        def progress(step: int) -> None:
            self.state.step = step - 1
            self.progress(f"epoch {(step - 1) // imitation.epoch + 1}", (step - 1) % imitation.epoch, imitation.epoch)

        loss = imitation.train(first, last, rate, progress)
        self.state.step = last
        self.runtime.publish()
        seconds = perf_counter() - begun
        metrics = {
            **imitation.about,
            "loss/imitation": loss,
            "imitation/lr": rate(last),
            "imitation/epochs": last / imitation.epoch,
            "time/step": seconds,
            "throughput/samples_per_s": sum(map(imitation.size, range(first, last + 1))) / seconds,
        }
        self.events.on_update_end(self.about, last, metrics)


def imitation_of(spec: Spec) -> ImitationSpec:
    if spec.imitation is None:
        raise UserError(
            "the spec has no `imitation:` section, which `vla-rl sft` trains by; add one such as\n"
            "  imitation: {expert: {episodes: 100}, steps: 2000, lr: 1e-4}"
        )
    return spec.imitation
