"""Fields of transitions, in place of advantages."""

from __future__ import annotations

import torch

from vla_rl.core.contexts import AlgorithmContext
from vla_rl.core.errors import UserError
from vla_rl.core.hookspecs import Algorithm
from vla_rl.core.types import Advantages, Batch, Loss, Requirements, Rollout, Scores
from vla_rl.toolkit.no_settings import NoSettings
from vla_rl.toolkit.trainers.transition_fields import EXTRAS


class TransitionFields(Algorithm):
    """Algorithm without a loss: each sample carries its rewards, and where it stands in its trajectory."""

    needs = Requirements(final_observations=True, takeovers=True)
    off_policy = True
    extras = EXTRAS

    def __init__(self, config: NoSettings, context: AlgorithmContext | None = None) -> None:
        """Neither settings nor context matter."""

    def advantages(self, rollout: Rollout) -> Advantages:
        ended = (rollout.terminated | rollout.truncated).any(-1)
        samples = rollout.samples
        continues = torch.zeros_like(samples)
        continues[:-1] = samples[:-1] & samples[1:] & ~ended[:-1]
        steps, columns = torch.meshgrid(*(torch.arange(size) for size in samples.shape), indexing="ij")
        return Advantages(
            advantages=torch.zeros(samples.shape),
            weights=samples.float(),
            extras={
                "transition_rewards": rollout.rewards,
                "transition_terminated": rollout.terminated.any(-1),
                "transition_continues": continues,
                "transition_step": steps,
                "transition_column": columns,
            },
        )

    def loss(self, scores: Scores, batch: Batch) -> Loss:
        raise UserError("algorithm 'transitions' has no loss; it is for trainers of transitions")
