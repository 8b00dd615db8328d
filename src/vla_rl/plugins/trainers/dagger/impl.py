"""Dataset aggregation: DAgger (Ross et al. 2011, arXiv:1011.0686) and HG-DAgger (Kelly et al. 2019, arXiv:1810.02890).
Each training step adds labelled observations to all that were labelled before, and clones the whole."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import nn

from vla_rl.core.errors import UserError
from vla_rl.core.hookspecs import Demonstrations
from vla_rl.core.randomness import generator
from vla_rl.core.trainers import ImitationStep, Trainer, Transitions, TransitionsData, UpdateMetrics
from vla_rl.core.types import ActionSource, Array
from vla_rl.plugins.trainers.dagger.config import AggregationSettings, HGDaggerConfig
from vla_rl.toolkit.trainers.context import TrainerContext
from vla_rl.toolkit.trainers.demonstrated_actions import check_demonstrated_actions
from vla_rl.toolkit.trainers.imitation import imitate_demonstrations
from vla_rl.toolkit.trainers.labelled_chunks import AggregatedDemonstrations, LabelledChunks
from vla_rl.toolkit.trainers.takeovers import find_corrections, with_last_action_repeated


class AggregatingTrainer(Trainer[TransitionsData]):
    """Trainer that keeps labelled observations of the whole run, and clones all of them after each rollout."""

    name: str
    """Name in specs and metrics."""

    def __init__(self, config: AggregationSettings, context: TrainerContext) -> None:
        """Create an empty store. Raises UserError without a run folder."""
        if context.folder is None:
            raise UserError(f"trainer {self.name!r} keeps labels in the run folder, and here there is none")
        self._config = config
        self._trained = context.trained
        self._heartbeat = context.heartbeat
        self._seed = context.seed
        self._chunk = context.chunk
        self._updates = 0
        """Optimiser steps so far."""
        self._labelled = LabelledChunks(context.folder, self._trained.info, context.chunk, config.capacity)
        self._recorded: Demonstrations | None = None
        """Demonstrations of the spec, once they are checked."""

    def modules(self) -> Mapping[str, nn.Module]:
        return {"policy": self._trained.model.module}

    def optimizers(self) -> Mapping[str, torch.optim.Optimizer]:
        return {"policy": self._trained.optimizer}

    def state(self) -> Mapping[str, Any]:
        return {"updates": self._updates, "labelled": self._labelled.state()}

    def load(self, state: Mapping[str, Any]) -> None:
        self._updates = state["updates"]
        self._labelled.load(state["labelled"])

    def update(self, data: TransitionsData) -> UpdateMetrics:
        """Keep what was labelled in these transitions, and clone all that is kept. Raises UserError for several
        learners, for demonstrations that do not fit, and where the disk is full."""
        before = perf_counter()
        if self._trained.strategy.world > 1:
            raise UserError(f"trainer {self.name!r} keeps its labels on one learner; place one")
        self._check_demonstrations(data.demonstrations)
        chosen = np.zeros(0, np.int64)
        further: Mapping[str, float] = {}
        if data.transitions is not None:
            chosen, labels = self.select_labelled(data.transitions)
            further = self.compute_metrics(data.transitions)
            self._labelled.add(data.transitions.frames.take(data.transitions.first[chosen]), labels)
        samples = AggregatedDemonstrations(self._recorded, self._labelled)
        steps = self._plan_steps(data.step, samples.num_samples())
        sums = {
            f"{self.name}/labelled": float(len(chosen)),
            f"{self.name}/samples": float(samples.num_samples()),
            f"{self.name}/updates": float(len(steps)),
            **further,
        }
        if steps:
            total = float(imitate_demonstrations(self._trained, samples, steps, self._heartbeat))
            sums["loss/imitation"] = total / (len(steps) * self._config.batch)
            self._updates = steps[-1].number
        return UpdateMetrics(sums=sums, seconds=perf_counter() - before, warnings=self.list_warnings())

    @abstractmethod
    def select_labelled(self, transitions: Transitions) -> tuple[Array, Array]:
        """Return the transitions that have a label, int64 [B], and their labels, float32 [B, C, A]."""

    def compute_metrics(self, transitions: Transitions) -> Mapping[str, float]:
        """Return further metrics of new transitions."""
        return {}

    def list_warnings(self) -> tuple[str, ...]:
        """Return warnings after a training step."""
        return ()

    def _check_demonstrations(self, recorded: Demonstrations | None) -> None:
        if recorded is None or recorded is self._recorded:
            return
        check_demonstrated_actions(recorded, self._trained.info, self._chunk)
        images = recorded.read_samples(np.zeros(1, np.int64))[0].images
        for name, size in self._trained.info.cameras.items():
            if tuple(images[name].shape[1:3]) != size:
                height, width = images[name].shape[1:3]
                raise UserError(
                    f"the demonstrations have images of {height} x {width} pixels for camera {name!r} and the "
                    f"simulator {size[0]} x {size[1]}; trainer {self.name!r} mixes both in a batch, so they have to "
                    f"be equal"
                )
        self._recorded = recorded

    def _plan_steps(self, step: int, samples: int) -> list[ImitationStep]:
        """Return the optimiser steps after a rollout, whose samples their numbers decide; none without samples."""
        config = self._config
        train = self._trained.train
        numbers = range(self._updates + 1, self._updates + 1 + (config.updates if samples else 0))
        return [
            ImitationStep(
                number=number,
                first=0,
                indices=np.sort(generator(self._seed, "dagger/batch", number).integers(0, samples, config.batch)),
                total=config.batch,
                most=config.batch,
                lr=train.lr * train.factor(step),
                augment=config.augment,
                seed=self._seed,
            )
            for number in numbers
        ]


class Dagger(AggregatingTrainer):
    """Trainer that clones the simulator's expert on every observation of the run."""

    name = "dagger"

    def select_labelled(self, transitions: Transitions) -> tuple[Array, Array]:
        if transitions.expert_actions is None:
            raise UserError("trainer 'dagger' learns from labels of the simulator's expert, which was not asked")
        return np.arange(len(transitions)), transitions.expert_actions

    def compute_metrics(self, transitions: Transitions) -> Mapping[str, float]:
        """Return the share of chunks in which the expert acted."""
        source = transitions.source
        acts = 0.0 if source is None else float((source[:, 0] == ActionSource.EXPERT).mean())
        return {"dagger/expert_acts": acts}


class HGDagger(AggregatingTrainer):
    """Trainer that clones the chunks in which a person, or a script in the person's place, had taken over."""

    name = "hg_dagger"

    def __init__(self, config: HGDaggerConfig, context: TrainerContext) -> None:
        """Create an empty store. Raises UserError for a simulator without takeovers."""
        super().__init__(config, context)
        if not self._trained.info.takeovers:
            raise UserError(
                "trainer 'hg_dagger' learns from takeovers, and this simulator has none "
                "(EnvInfo.takeovers): give gym_hil a person, gymnasium `interventions`, or use trainer dagger where "
                "the simulator has an expert"
            )
        self._warned = False

    def select_labelled(self, transitions: Transitions) -> tuple[Array, Array]:
        """Return the indices, int64 [B], of chunks whose executed actions all came from a takeover, and their actions
        [B, C, A], in which the last executed one fills the rest. None are chosen where `source` is None."""
        chosen = find_corrections(transitions)
        return chosen, with_last_action_repeated(transitions).actions[chosen]

    def list_warnings(self) -> tuple[str, ...]:
        if self._warned or self._labelled.sample_count:
            return ()
        self._warned = True
        text = (
            "no takeover covered a whole chunk, so trainer 'hg_dagger' has nothing to learn from yet; look at "
            "env/intervention_rate, at the person's device, and at rollout.chunk, which a takeover has to outlast"
        )
        return (text,)
