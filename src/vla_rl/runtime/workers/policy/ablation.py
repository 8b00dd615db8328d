"""What evaluations take from a policy (`eval.ablate`), to see what its success depends on."""

from __future__ import annotations

import numpy as np
from attrs import define, evolve, field

from vla_rl.core.spec.sections import AblationSpec
from vla_rl.core.types import Array, Observation


@define(eq=False)
class Ablation:
    """The changes of one policy's observations and actions."""

    spec: AblationSpec
    _first: dict[tuple[int, int], Array] = field(factory=dict, init=False)
    """(number of the state, repeat) -> the episode's first chunk, float32 [C, A]."""

    def change_observation(self, obs: Observation) -> Observation:
        """Return what the policy gets of an observation."""
        spec = self.spec
        changed = spec.instructions
        return evolve(
            obs,
            images={name: image * 0 if name in spec.black else image for name, image in obs.images.items()},
            state=obs.state * 0 if spec.zero_state and obs.state is not None else obs.state,
            instructions=tuple(changed.get(text, changed.get("*", text)) for text in obs.instructions),
        )

    def change_actions(self, numbers: Array, episodes: Array, chunks: Array, actions: Array) -> Array:
        """Return what is executed of chosen actions, float32 [R, C, A].

        Args:
            numbers, episodes, chunks: number of the state, repeat and chunk of each row, int64 [R].
        """
        if not self.spec.open_loop:
            return actions
        keys = list(zip(numbers.tolist(), episodes.tolist(), strict=True))
        self._first |= {key: actions[row] for row, key in enumerate(keys) if chunks[row] == 0}
        return np.stack([self._first.get(key, actions[row]) for row, key in enumerate(keys)])
