"""The learners of a run, as the loop sees them: they train, publish their weights, and are saved."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter

from attrs import define, evolve

from vla_rl.core.run.shape import RunShape
from vla_rl.core.spec.spec import Spec
from vla_rl.core.types import Advantages, Rollout
from vla_rl.runtime.comm.interfaces import LearnerInterface, PolicyInterface
from vla_rl.runtime.driver.collecting.collector import Collector
from vla_rl.runtime.driver.collecting.rollouts import EpisodeRequests
from vla_rl.runtime.driver.reports.compilation_monitor import CompilationMonitor
from vla_rl.runtime.driver.reports.trace import Trace, traced
from vla_rl.runtime.driver.training.behaviour_cloning import ImitationTrainer, clone_expert, start_behaviour_cloning
from vla_rl.runtime.driver.training.part import StepPart
from vla_rl.runtime.driver.training.update import StepUpdate

logger = logging.getLogger(__name__)
WEIGHTS = "learner.pt"
PAST_WEIGHTS = "past.pt"
"""Files of a checkpoint's trainer folder."""


@define(eq=False, slots=False)
class RunLearners:
    """Trains on prepared samples, publishes weights and writes checkpoints: the `Learners` of a runtime."""

    spec: Spec
    collector: Collector
    requests: EpisodeRequests
    update: StepUpdate
    parts: Sequence[StepPart]
    recorded_samples: Sequence[int]
    """Samples of each data set that the learners opened."""
    compilation: CompilationMonitor
    on_progress: Callable[[str, int, int], None]
    trace: Trace

    def __attrs_post_init__(self) -> None:
        self.shape = RunShape.from_spec(self.spec)
        self.fleet = self.collector.fleet

    @traced
    def train(self, prepared: Rollout, advantages: Advantages) -> dict[str, float]:
        start = perf_counter()
        update = self.update
        assert update.prepared is not None
        batch = evolve(update.prepared, rollout=prepared)
        update.prepared = None
        for part in self.parts:
            batch, advantages = part.add_samples(batch, advantages)
        metrics = update.run_update(batch, advantages)
        seconds = update.prepare_seconds + perf_counter() - start
        return {**update.router.metrics, **metrics, "time/update": seconds}

    @traced
    def publish(self, version: int, changed: bool = True) -> dict[str, float]:
        start = perf_counter()
        if changed:
            self._send_weights(version)
        else:
            self.fleet.skip_version(version)
        return {
            "time/publish": perf_counter() - start,
            **self.fleet.phases.take_metrics(),
            **self.compilation.collect_metrics(),
        }

    @traced
    def clone_expert(self) -> dict[str, float]:
        start = perf_counter()
        metrics = clone_expert(self.fleet, self.spec, self.on_progress)
        self._send_weights(self.fleet.version)
        return metrics | {"time/bc_warmup": perf_counter() - start}

    def open_imitation(self) -> ImitationTrainer:
        return start_behaviour_cloning(self.fleet, self.spec, self.recorded_samples, self.on_progress)

    @traced
    def save(self, model_folder: Path, trainer_folder: Path) -> None:
        fleet = self.fleet
        weights = trainer_folder / WEIGHTS
        version = fleet.version
        fleet.get_all(
            [learner.call(LearnerInterface.save, model_folder, weights, version) for learner in fleet.learners]
        )
        self.requests.save(trainer_folder)
        for part in self.parts:
            part.save(trainer_folder)
        if self.shape.pinned_lag:
            fleet.get(fleet.policies[0].call(PolicyInterface.save_past, trainer_folder / PAST_WEIGHTS))

    def load(self, trainer_folder: Path) -> None:
        """Restore what `save` wrote; the weights alone without learners."""
        fleet = self.fleet
        weights = trainer_folder / WEIGHTS
        if not fleet.learners:
            fleet.get_all([policy.call(PolicyInterface.load_checkpoint, weights) for policy in fleet.policies])
            return
        version = fleet.get_all([learner.call(LearnerInterface.load, weights) for learner in fleet.learners])[0]
        self.requests.load(trainer_folder)
        for part in self.parts:
            part.load(trainer_folder)
        if self.shape.has_replay:
            logger.warning("the replay buffer is not part of a checkpoint: it is empty, and is filled again")
        if self.shape.pinned_lag:
            past_weights = trainer_folder / PAST_WEIGHTS
            fleet.get_all([policy.call(PolicyInterface.load_past, past_weights) for policy in fleet.policies])
        self._send_weights(version)

    def _send_weights(self, version: int) -> None:
        """Send the weights to the policies. Those in a learner's process hold them; others get them by reference. Where
        rollouts run ahead, only tickets that need the new version wait for it; otherwise this call waits."""
        self.collector.wait_for_weights()
        self.collector.publishing = self.fleet.publish_weights(version, self.spec.runtime.check_weights)
        if not self.shape.has_overlap:
            self.collector.wait_for_weights()
