"""Fields that turn samples into transitions, from the rollout to the learner."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

EXTRAS: Mapping[str, str] = MappingProxyType(
    {
        "transition_rewards": "T N C",
        "transition_terminated": "T N",
        "transition_continues": "T N",
        "transition_step": "T N",
        "transition_column": "T N",
    }
)
"""Names and dimensions, as `Algorithm.extras`: rewards; whether the task ended within the chunk; whether the next
sample of the trajectory is of the same episode; chunk step and trajectory of the sample."""
