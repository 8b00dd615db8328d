"""Score of a hypothesis: how far the policy's greedy actions are from the demonstrated ones.

A distance in the simulator's units is comparable between hypotheses that scale actions differently, which a likelihood
is not, and every model has one. Distances are in deviations: of the demonstrated number and of the policy's, multiplied
and rooted, so that neither small nor large actions are near to everything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from attrs import define, evolve, field

from vla_rl.cli.identify.frames import Frames
from vla_rl.cli.identify.keys import ConventionKey, Settings, as_key, with_settings
from vla_rl.core.errors import UserError
from vla_rl.core.hookspecs import PolicyEngine
from vla_rl.core.randomness import Noise
from vla_rl.core.spec.sections import ConventionsSpec
from vla_rl.core.spec.spec import Spec
from vla_rl.core.spec.structure import to_plain
from vla_rl.core.types import Array, EnvInfo, to_numpy
from vla_rl.runtime.workers.models import build_actor
from vla_rl.toolkit.models.conventions import Converter

SCREENED = 12
"""Frames on which each change is tried first."""
BATCH = 32
"""Frames of a forward pass."""
FARTHEST = 3.0
"""Distance in deviations beyond which a number is not more wrong."""
STILL = 1e-4
"""Share of an action's range below whose deviation a number does not move, and is not judged."""
LEAST_SPREAD = 0.25
"""Least deviation of the policy's numbers, in those of the demonstrated ones."""


@define(eq=False, slots=False)
class Scorer:
    """Scores hypotheses about a policy on frames. Its greedy actions on one frame are computed once."""

    spec: Spec
    info: EnvInfo
    keys: Sequence[ConventionKey]
    frames: Frames
    device: str
    most: int
    """Most forward passes of a frame."""
    passes: int = field(default=0, init=False)
    builds: int = field(default=0, init=False)
    refused: dict[str, str] = field(factory=dict, init=False)
    """Settings of which no policy can be built -> why."""
    _engine: tuple[str, PolicyEngine] | None = field(default=None, init=False)
    """Settings of the model that is loaded, and the model."""
    _given: dict[str, Array] = field(factory=dict, init=False)
    """Settings but those of actions -> chunks that the policy gave, float32 [F, C, A]; NaN where it was not asked."""

    def __attrs_post_init__(self) -> None:
        low, high = (np.array(end, np.float32) for end in (self.info.action_low, self.info.action_high))
        self.spread = self.frames.actions.std((0, 1))
        self.moving = self.spread > STILL * (high - low)
        self.order = np.argsort(np.arange(len(self.frames)) % max(len(self.frames) // SCREENED, 1), kind="stable")
        """Frames in the order in which they are asked: the first `SCREENED` are of all episodes."""

    def can_ask(self, frames: int) -> bool:
        """Return whether as many forward passes are left."""
        return self.passes + frames <= self.most

    def read_actions(self, settings: Settings, rows: Array) -> Array | None:
        """Return what the policy gives for frames [R], float32 [R, C, A]; None where it cannot be built."""
        inputs = {key.path: settings[key.path] for key in self.keys if not key.convention.of_actions}
        name = as_key(inputs)
        if name in self.refused:
            return None
        known = self._given.setdefault(name, np.full_like(self.frames.actions, np.nan))
        lacking = rows[np.isnan(known[rows]).any((1, 2))]
        if len(lacking):
            try:
                spec = with_settings(self.spec, inputs)
                engine = self._open_engine(spec)
            except UserError as exc:
                self.refused[name] = str(exc)
                return None
            converter = Converter(spec.conventions)
            for part in np.array_split(lacking, -(-len(lacking) // BATCH)):
                obs = converter.convert_observation(self.frames.obs.take(part))
                noise = Noise(spec.seed, "identify", part.tolist(), [0] * len(part), [0] * len(part))
                known[part] = to_numpy(engine.act(obs, noise, True).actions)
            self.passes += len(lacking)
        return known[rows]

    def restore(self, settings: Settings, given: Array) -> Array:
        """Return chunks that a policy gave in the simulator's units, not cut off at its bounds: a policy that asks for
        twice the most is not one that asks for the most."""
        own = {key.path.partition(".")[2]: settings[key.path] for key in self.keys if key.convention.of_actions}
        actions: Array = Converter(ConventionsSpec(**own)).restore_actions(given)
        return actions

    def measure_errors(self, settings: Settings, given: Array, demonstrated: Array) -> Array:
        """Return each frame's distance in deviations, [R], of chunks that a policy gave to demonstrated ones."""
        actions = self.restore(settings, given)
        own = np.maximum(actions.std((0, 1)), LEAST_SPREAD * self.spread)
        deviations = np.sqrt(own * self.spread)[self.moving]
        distances = np.abs(actions - demonstrated)[..., self.moving] / deviations
        errors: Array = np.minimum(distances, FARTHEST).mean((1, 2))
        return errors

    def fit_actions(self, settings: Settings, given: Array, demonstrated: Array) -> Settings:
        """Return the settings with the conventions of actions that bring a policy's chunks nearest."""

        def measure_mean(one: Settings) -> tuple[float, str]:
            return float(self.measure_errors(one, given, demonstrated).mean()), as_key(one)

        while True:
            tried = [*self.vary(settings, of_actions=True), *self.vary_pairs(settings, of_actions=True)]
            nearest = min(tried, key=measure_mean)
            if measure_mean(nearest)[0] >= measure_mean(settings)[0] - 1e-6:
                return settings
            settings = nearest

    def vary(self, settings: Settings, of_actions: bool) -> Iterator[Settings]:
        """Yield the settings that differ in one convention, of actions or of anything else."""
        for key in self.keys:
            if key.convention.of_actions == of_actions:
                yield from ({**settings, key.path: value} for value in self._other_values(key, settings))

    def vary_pairs(self, settings: Settings, of_actions: bool) -> Iterator[Settings]:
        """Yield settings that differ in two conventions that trade with each other; the second also has its default."""
        partners = {key.path: key for key in self.keys}
        for key in self.keys:
            for other in key.convention.trades_with if key.convention.of_actions == of_actions else ():
                traded = [*self._other_values(partners[other], settings), partners[other].default]
                for value in self._other_values(key, settings):
                    yield from ({**settings, key.path: value, other: two} for two in traded if two != settings[other])

    def _other_values(self, key: ConventionKey, settings: Settings) -> list[object]:
        """Return the values one step from the present one, which is left out."""
        section = key.path.partition(".")[0]
        config = self.spec.conventions if section == "conventions" else self.spec.model.config
        present = {path.partition(".")[2]: value for path, value in settings.items() if path.startswith(section)}
        values = to_plain(key.convention.list_values(evolve(config, **present), self.info))
        return [value for value in values if value != settings[key.path]]

    def _open_engine(self, spec: Spec) -> PolicyEngine:
        plain = evolve(spec, conventions=ConventionsSpec(), rollout=evolve(spec.rollout, compile="off"))
        name = as_key(plain.to_dict()["model"])
        if self._engine is None or self._engine[0] != name:
            self._engine = None  # free its memory first
            self._engine = name, build_actor(plain, self.info, self.device)
            self.builds += 1
        return self._engine[1]
