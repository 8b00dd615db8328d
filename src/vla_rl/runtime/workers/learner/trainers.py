"""The trainers that a learner rank hosts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from vla_rl.core.capabilities import TrainsInParts
from vla_rl.core.catalogue import build
from vla_rl.core.errors import UserError
from vla_rl.core.hookspecs import Algorithm
from vla_rl.core.manager import Named, wrap
from vla_rl.core.spec.sections import Component, default_imitation_trainer
from vla_rl.core.spec.spec import Spec
from vla_rl.core.trainers import Trainer
from vla_rl.toolkit.trainers.context import TrainerContext
from vla_rl.toolkit.trainers.result_checks import guard_trainer
from vla_rl.toolkit.trainers.trained_model import TrainedModel

REPLAY = "replay"
"""Folder in the run folder for the trainer of what is collected."""


@frozen(eq=False)
class Trainers:
    """Trainers of one rank, by what they train on. They share the policy and its optimiser."""

    collected: Trainer[Any] | None
    """Trainer of what is collected, the spec's `trainer`; None in `vla-rl sft`."""
    demonstrations: Trainer[Any]
    """Trainer of `imitation:`, or of the behaviour cloning before RL."""

    @property
    def named_trainers(self) -> Mapping[str, Trainer[Any]]:
        """All trainers, by their names in checkpoints."""
        named = {"collected": self.collected, "demonstrations": self.demonstrations}
        return {name: trainer for name, trainer in named.items() if trainer is not None}


def trainers_of(
    spec: Spec,
    algorithm: Algorithm,
    wrappers: Named,
    heartbeat: Callable[[], None],
    *,
    compare_acting: bool,
    imitation: bool,
    folder: Path | None,
) -> Callable[[TrainedModel], Trainers]:
    """Return the function that builds a rank's trainers.

    Args:
        compare_acting: report `policy/recompute_kl`, where policies act with other arithmetic.
        imitation: True for `vla-rl sft`, which trains on demonstrations alone.
        folder: run folder; None: there is none.
    """

    def make_trainers(trained: TrainedModel) -> Trainers:
        def build_trainer(component: Component, part: str) -> Trainer[Any]:
            context = TrainerContext(
                seed=spec.seed,
                device=trained.device,
                chunk=spec.rollout.chunk,
                trained=trained,
                algorithm=algorithm,
                heartbeat=heartbeat,
                folder=None if folder is None else folder / part,
                compare_acting=compare_acting,
            )
            trainer: Trainer[Any] = build("trainer", component.type, component.config, context, spec.plugins)
            in_parts = spec.asynchrony.streaming_update and component is spec.trainer
            if in_parts and not isinstance(trainer, TrainsInParts):
                raise UserError(
                    f"trainer {component.type!r} cannot begin with a part of a training step; set "
                    f"asynchrony.streaming_update: false"
                )
            return wrap("trainer", trainer, component.type, [guard_trainer(f"trainer {component.type!r}"), *wrappers])

        section = spec.imitation if imitation else None
        cloning = default_imitation_trainer() if section is None else section.trainer
        return Trainers(
            collected=None if imitation else build_trainer(spec.trainer, REPLAY),
            demonstrations=build_trainer(cloning, "demonstrations"),
        )

    return make_trainers
