"""Score of a hypothesis: how far the policy's greedy actions are from the demonstrated ones.

A distance in the simulator's units is comparable between hypotheses that scale actions differently, which a likelihood
is not, and every model has one. Distances are in deviations: of the demonstrated number and of the policy's, multiplied
and rooted, so that neither small nor large actions are near to everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np
from attrs import define, evolve, field

from vla_rl.cli.identify.frames import Frames
from vla_rl.cli.identify.keys import ConventionKey, Settings, as_key, usual_settings, with_settings
from vla_rl.core.errors import UserError
from vla_rl.core.hookspecs import PolicyEngine
from vla_rl.core.randomness import Noise
from vla_rl.core.spec.sections import ConventionsSpec
from vla_rl.core.spec.spec import Spec
from vla_rl.core.spec.structure import Structurer
from vla_rl.core.types import Array, EnvInfo, to_numpy
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
    """Scores hypotheses on frames. Greedy actions of one policy on one frame are computed once."""

    spec: Spec
    info: EnvInfo
    keys: Sequence[ConventionKey]
    frames: Frames
    make_engine: Callable[[Spec], PolicyEngine]
    most: int
    """Most forward passes of a frame."""
    passes: int = field(default=0, init=False)
    builds: int = field(default=0, init=False)
    _engine: tuple[str, PolicyEngine] | None = field(default=None, init=False)
    """Settings of the model that is loaded, and the model."""
    _given: dict[str, Array] = field(factory=dict, init=False)
    """Settings but those of actions -> chunks that the policy gave, float32 [F, C, A]; NaN where it was not asked."""
    _values: dict[tuple[str, str], list[object]] = field(factory=dict, init=False)
    """Key and settings of its section -> other values."""
    refused: dict[str, str] = field(factory=dict, init=False)
    """Settings of which no policy can be built -> why."""

    def __attrs_post_init__(self) -> None:
        low, high = (np.array(end, np.float32) for end in (self.info.action_low, self.info.action_high))
        self.usual = usual_settings(self.spec, self.keys)
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
        changes: dict[str, Any] = {
            key.path.partition(".")[2]: settings[key.path] for key in self.keys if key.convention.of_actions
        }
        converter = Converter(Structurer().read_value(changes, ConventionsSpec))
        actions: Array = converter.restore_actions(given)
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
        best = float(self.measure_errors(settings, given, demonstrated).mean())
        while True:
            tried = [
                (float(self.measure_errors(one, given, demonstrated).mean()), as_key(one), one)
                for one in self.vary(settings, of_actions=True)
            ]
            error, _, nearest = min(tried, default=(best, "", settings))
            if error >= best - 1e-6:
                return settings
            best, settings = error, nearest

    def vary(self, settings: Settings, of_actions: bool) -> Iterator[Settings]:
        """Yield the settings that differ in one convention, of actions or of anything else; of actions also in two that
        trade with each other."""
        choices = {key.path: self._other_values(key, settings) for key in self.keys}
        chosen = [key for key in self.keys if key.convention.of_actions == of_actions]
        for key in chosen:
            for value in choices[key.path]:
                yield {**settings, key.path: value}
            for other in key.convention.trades_with if of_actions else ():
                for value, traded in product(choices[key.path], choices[other]):
                    yield {**settings, key.path: value, other: traded}

    def vary_pairs(self, settings: Settings) -> Iterator[Settings]:
        """Yield the settings that differ in two conventions of the policy's inputs that trade with each other; the
        second also has its default."""
        partners = {key.path: key for key in self.keys}
        for key in self.keys:
            for other in () if key.convention.of_actions else key.convention.trades_with:
                traded_values = [*self._other_values(partners[other], settings), self.usual[other]]
                for value, traded in product(self._other_values(key, settings), traded_values):
                    if traded != settings[other]:
                        yield {**settings, key.path: value, other: traded}

    def _other_values(self, key: ConventionKey, settings: Settings) -> list[object]:
        """Return the values one step from the present one, which is left out."""
        section = key.path.partition(".")[0]
        present = {path: value for path, value in settings.items() if path.partition(".")[0] == section}
        name = key.path, as_key(present)
        if name not in self._values:
            try:
                spec = with_settings(self.spec, present)
            except UserError:
                spec = self.spec
            self._values[name] = [v for v in key.list_values(spec, self.info) if v != settings[key.path]]
        return self._values[name]

    def _open_engine(self, spec: Spec) -> PolicyEngine:
        plain = evolve(spec, conventions=ConventionsSpec())
        name = as_key(plain.to_dict()["model"])
        if self._engine is None or self._engine[0] != name:
            self._engine = None  # free its memory first
            self._engine = name, self.make_engine(plain)
            self.builds += 1
        return self._engine[1]
