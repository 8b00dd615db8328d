"""Search for the conventions under which a policy does what the demonstrations show, and how sure the answer is.

Conventions are nearly independent, so one is changed at a time: each change is screened on some frames, and the best
are compared on all. For each choice of inputs the conventions of actions are fitted, which costs no forward pass and
covers choices that trade with each other, such as a mirrored world. Frames are drawn in blocks of neighbouring episodes
(bootstrap), since frames of an episode are alike. A key keeps its value unless another is clearly better.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from attrs import define, field, frozen

from vla_rl.cli.identify.keys import Settings, as_key
from vla_rl.cli.identify.scoring import SCREENED, Scorer
from vla_rl.core.randomness import generator
from vla_rl.core.types import Array

FINALISTS = 3
"""Changes of a sweep that are compared on all frames."""
SWEEPS = 8
DRAWS = 2000
"""Bootstrap draws."""
CLOSE = 0.05
"""Share of the draws in which another hypothesis is at least as good, from which the two are not told apart."""
BY_CHANCE, LEAST_GAIN = 0.005, 0.05
"""The same of the answer, and the share of its error, below which a value of the spec is given up."""
CLEARLY_WORSE = 0.1
"""The same of the present values, below which a sweep goes on from the other."""
RANDOM = 0.9
"""Error in that of the same actions on other frames, from which a policy knows nothing about its frame."""


@frozen(kw_only=True, eq=False)
class Hypothesis:
    """Settings, and the errors of the frames on which they were measured."""

    settings: Settings
    actions: Array
    """The policy's chunks as the simulator takes them, [R, C, A]."""
    errors: Array
    """Distance of each frame in deviations, [R]; frames in the scorer's order."""

    def mean(self, count: int | None = None) -> float:
        """Return the mean error, of the first so many frames."""
        return float(self.errors[:count].mean())


@frozen(kw_only=True, eq=False)
class Rival:
    """A hypothesis next to the answer."""

    settings: Settings
    changes: dict[str, Any]
    """Keys whose values differ from the answer's."""
    gains: Array
    """Errors less the answer's in each bootstrap draw, on the frames that both were measured on."""
    measured: int
    """Number of those."""
    same: bool
    """It gives the same actions."""

    @property
    def share(self) -> float:
        """Share of the draws in which it is at least as good as the answer."""
        return float((self.gains <= 0).mean())

    @property
    def is_open(self) -> bool:
        """Return whether it is not told apart from the answer."""
        return self.share > CLOSE and not self.same


@define(eq=False, slots=False)
class Search:
    """A search from the spec's own values."""

    scorer: Scorer
    given: Settings
    known: dict[str, Hypothesis] = field(factory=dict)
    """Hypotheses by their settings, with the most frames measured."""

    def __attrs_post_init__(self) -> None:
        scorer = self.scorer
        blocks = scorer.frames.blocks[scorer.order]
        names = np.unique(blocks)
        drawn = generator(0, "identify/bootstrap").integers(len(names), size=(DRAWS, len(names)))
        self.weights = np.stack([(drawn == i).sum(1) for i in range(len(names))], 1)[:, blocks]
        """How often each frame is in each draw, int64 [draws, F]."""
        self.count = len(scorer.frames)
        self.reserve = scorer.most // 3
        """Forward passes that sweeps leave for the comparison of the answer with its rivals."""

    def measure(self, settings: Settings, frames: int, fit: bool = True) -> Hypothesis | None:
        """Return a hypothesis on the first so many frames, with the conventions of actions that fit best, if wanted;
        None where no such policy can be built."""
        scorer, rows = self.scorer, self.scorer.order[:frames]
        given = scorer.read_actions(settings, rows)
        if given is None:
            return None
        demonstrated = scorer.frames.actions[rows]
        chosen = scorer.fit_actions(settings, given, demonstrated) if fit else settings
        errors = scorer.measure_errors(chosen, given, demonstrated)
        measured = Hypothesis(settings=chosen, actions=scorer.restore(chosen, given), errors=errors)
        before = self.known.get(as_key(chosen))
        if before is None or len(before.errors) < frames:
            self.known[as_key(chosen)] = measured
        return measured

    def find_answer(self) -> Hypothesis | None:
        """Return the hypothesis that changes of one convention at a time lead to, or one that was met on the way, with
        as few changes as are as good. None: no policy can be built."""
        best = self.measure(self.given, self.count)
        if best is None:  # such as statistics of several data sets, none of which is chosen
            some = [self.measure(one, self.count) for one in self.scorer.vary(self.given, of_actions=False)]
            best = min((one for one in some if one is not None), key=Hypothesis.mean, default=None)
        if best is None:
            return None
        for _ in range(SWEEPS):
            better = self._sweep(best)
            if better is None:
                break
            best = better
        answer = self._simplify(best)
        self.find_rivals(answer)
        return self._simplify(min([answer, *self._list_measured()], key=Hypothesis.mean))

    def _sweep(self, best: Hypothesis) -> Hypothesis | None:
        """Return the best change of one convention, or of several that each helped; None: none helps."""
        screened = []
        for settings in self.scorer.vary(best.settings, of_actions=False):
            if not self.scorer.can_ask(SCREENED + self.reserve):
                break
            one = self.measure(settings, SCREENED)
            if one is not None and one.mean() < best.mean(SCREENED):
                screened.append(one)
        finalists = [self._measure_all(one.settings) for one in sorted(screened, key=Hypothesis.mean)[:FINALISTS]]
        better = [one for one in finalists if one is not None and self.compare(one, best).share < CLEARLY_WORSE]
        if len(better) > 1:
            merged = dict(best.settings)
            for one in sorted(better, key=Hypothesis.mean, reverse=True):
                merged |= list_changes(one.settings, best.settings)
            joint = self._measure_all(merged)
            better += [joint] if joint is not None and joint.mean() < best.mean() else []
        return min(better, key=Hypothesis.mean, default=None)

    def _measure_all(self, settings: Settings) -> Hypothesis | None:
        return self.measure(settings, self.count) if self.scorer.can_ask(self.count + self.reserve) else None

    def _simplify(self, best: Hypothesis) -> Hypothesis:
        """Return the hypothesis with the fewest changes of the spec, then of the defaults, of those that are about as
        good as the best: it, the spec's own, those with keys of the spec, and all that were measured on all frames."""
        defaults = {key.path: key.default for key in self.scorer.keys}
        kept = [{**best.settings, path: self.given[path]} for path in list_changes(best.settings, self.given)]
        for settings in [self.given, *kept]:
            self.measure(settings, self.count, fit=False)

        def count_changes(one: Hypothesis) -> tuple[int, int, float]:
            return len(list_changes(one.settings, self.given)), len(list_changes(one.settings, defaults)), one.mean()

        close = [  # many are compared, so one of them is better by chance
            one
            for one in self._list_measured()
            if self.compare(best, one).share > BY_CHANCE or one.mean() < (1 + LEAST_GAIN) * best.mean()
        ]
        return min([best, *close], key=count_changes)

    def _list_measured(self) -> list[Hypothesis]:
        """Return the hypotheses that were measured on all frames."""
        return [one for one in self.known.values() if len(one.errors) == self.count]

    def compare(self, best: Hypothesis, other: Hypothesis) -> Rival:
        """Return another hypothesis next to this one."""
        count = min(len(best.errors), len(other.errors))
        return Rival(
            settings=other.settings,
            changes=list_changes(other.settings, best.settings),
            gains=self.weights[:, :count] @ (other.errors[:count] - best.errors[:count]),
            measured=count,
            same=bool(np.allclose(best.actions[:count], other.actions[:count], atol=1e-5)),
        )

    def _list_rivals(self, best: Hypothesis) -> list[Rival]:
        rivals = [self.compare(best, one) for key, one in self.known.items() if key != as_key(best.settings)]
        return sorted(rivals, key=lambda one: -one.share)

    def find_rivals(self, best: Hypothesis) -> list[Rival]:
        """Return all hypotheses that were measured, the nearest first, among them those one step from the best, and
        those in which two conventions trade; those in doubt are measured on all frames."""
        vary, vary_pairs = self.scorer.vary, self.scorer.vary_pairs
        for settings in [*vary(best.settings, of_actions=True), *vary_pairs(best.settings, of_actions=True)]:
            self.measure(settings, self.count, fit=False)
        inputs = [(one, False) for one in vary(best.settings, of_actions=False)]
        pairs = [(one, True) for one in vary_pairs(best.settings, of_actions=False)]
        for settings, fit in [*inputs, *pairs]:
            if self.scorer.can_ask(SCREENED):
                self.measure(settings, SCREENED, fit=fit)
        for rival in self._list_rivals(best):
            in_doubt = rival.share > CLOSE / 10 and rival.measured < self.count and not rival.same
            if in_doubt and self.scorer.can_ask(self.count):
                self.measure(rival.settings, self.count, fit=False)
        return self._list_rivals(best)

    def compare_to_random(self, best: Hypothesis) -> tuple[float, bool]:
        """Return the error of the best hypothesis in that of the same actions on other frames, and whether it is
        clearly less than `RANDOM`."""
        scorer, rows = self.scorer, self.scorer.order
        given = scorer.read_actions(best.settings, rows)
        assert given is not None
        other = np.roll(scorer.frames.actions, len(rows) // 2, axis=0)[rows]
        chance = scorer.measure_errors(scorer.fit_actions(best.settings, given, other), given, other)
        ratios = (self.weights @ best.errors) / (self.weights @ chance)
        return float(best.mean() / chance.mean()), bool(np.quantile(ratios, 0.975) < RANDOM)


def compute_confidence(rivals: Iterable[Rival]) -> float:
    """Return the share of the draws in which none of the rivals that are told apart from the answer is better."""
    worse = np.ones(DRAWS, bool)
    for rival in rivals:
        if not rival.same and not rival.is_open:
            worse &= rival.gains >= 0
    return float(worse.mean())


def list_changes(settings: Settings, given: Settings) -> dict[str, Any]:
    """Return the keys whose values differ from the given ones, with their values."""
    return {path: value for path, value in settings.items() if value != given[path]}


def find_smallest(rivals: Iterable[Rival]) -> list[dict[str, Any]]:
    """Return the changes of the answer that are not told apart from it, without those that contain others."""
    changes = [one.changes for one in rivals if one.is_open]
    return [one for one in changes if not any(other.items() < one.items() for other in changes)]
