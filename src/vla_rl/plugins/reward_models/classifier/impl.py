"""The success classifier of a folder, as a reward model."""

from __future__ import annotations

import torch

from vla_rl.core.contexts import RewardModelContext
from vla_rl.core.errors import UserError
from vla_rl.core.reward_models import RewardModel
from vla_rl.core.types import Array, Observation
from vla_rl.plugins.reward_models.classifier.config import ClassifierConfig
from vla_rl.toolkit.reward_models.success_classifier import load_classifier


class ClassifierRewards(RewardModel):
    """Success by a classifier of the images after each chunk."""

    def __init__(self, config: ClassifierConfig, context: RewardModelContext) -> None:
        """Load the classifier. Raises UserError for a simulator without its cameras, or with other instructions."""
        self._model = load_classifier(config.folder, context.device)
        shape = self._model.shape
        env = context.env
        missing = [camera for camera in shape.cameras if camera not in env.cameras]
        if missing:
            raise UserError(
                f"rewards: the classifier in {config.folder} looks at camera {missing[0]!r}, and the simulator has: "
                f"{', '.join(env.cameras) or 'none'}"
            )
        self._model.instruction_ids([task.instruction for task in env.tasks if not task.instruction_varies])

    def success_probability(self, obs: Observation, ends: Array) -> torch.Tensor:
        return self._model.predict_success(obs)
