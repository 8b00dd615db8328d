"""What a learner gives to the trainer that it hosts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from attrs import frozen

from vla_rl.core.contexts import Context
from vla_rl.core.hookspecs import Algorithm
from vla_rl.toolkit.trainers.trained_model import TrainedModel


@frozen(kw_only=True, eq=False)
class TrainerContext(Context):
    """What a trainer gets: a learner rank, as its trainer sees it."""

    trained: TrainedModel
    """The policy, with its optimiser and its parallel strategy. All trainers of a learner share it."""
    algorithm: Algorithm
    """Algorithm of the spec, for trainers that take a policy gradient."""
    heartbeat: Callable[[], None]
    """Function to call before each pass."""
    folder: Path | None = None
    """Folder of the run that the trainer alone may write to; None: there is none."""
    compare_acting: bool = False
    """Report `policy/recompute_kl`, where policies act with other arithmetic than learners."""
