"""What `vla-rl why` answers: causes with their evidence, or why there are none."""

from __future__ import annotations

from importlib.resources import files
from time import perf_counter
from typing import Any, Literal

from attrs import define, field, frozen

from vla_rl.core.spec.yaml import parse_yaml

KNOWN: dict[str, dict[str, Any]] = parse_yaml(files(__package__).joinpath("causes.yaml").read_text("utf-8")).data
"""Name of a cause -> its stage, certainty and key."""
CERTAIN, NAMED = 0.9, 0.5
"""Certainties from which a cause ends the search, and from which it is named."""


@frozen(kw_only=True)
class Cause:
    """One reason why a run may not learn."""

    name: str
    """Kind of cause, such as "clip too narrow"."""
    evidence: str
    number: float
    """Number that the evidence rests on."""
    key: str
    """Key of the spec to change, or what else to look at."""
    certainty: float
    """From 0 to 1: how rarely the check that found it is wrong, as its author judges it; no measured probability."""
    stage: int
    """1: the run's files; 2: the same data, another computation; 3: other data."""


def name_cause(name: str, number: float, evidence: str) -> Cause:
    """Return one of the causes that causes.yaml lists, with its evidence."""
    return Cause(name=name, number=float(number), evidence=evidence, **KNOWN[name])


@define(kw_only=True)
class Diagnosis:
    """Answer of `why`."""

    answer: Literal["causes", "healthy", "slow", "unknown"] = "unknown"
    text: str = "cannot tell: its files show nothing, and no step was compared"
    """The answer in a sentence."""
    causes: list[Cause] = field(factory=list)
    """Most certain first."""
    repeated: str = ""
    """Step that was repeated, and how exactly; empty: none."""
    compared: dict[str, float] = field(factory=dict)
    """What was changed in the step -> cosine of its update with the plain policy gradient of true returns, on the same
    samples."""
    more_samples: int | None = None
    """Samples a step beyond the run's own that a clear direction would need; None: not measured."""
    not_looked_at: list[str] = field(factory=list)
    seconds: float = 0.0
    budget_s: float
    _begun: float = field(factory=perf_counter, init=False, repr=False)

    @property
    def is_certain(self) -> bool:
        """Whether a cause ends the search."""
        return any(cause.certainty >= CERTAIN for cause in self.causes)

    def affords(self, seconds: float, what: str) -> bool:
        """Return whether the budget allows something; note it as not looked at if not."""
        possible = perf_counter() - self._begun + seconds <= self.budget_s
        if not possible:
            self.not_looked_at.append(f"{what}: the budget is spent")
        return possible

    def end_search(self) -> None:
        """Keep one cause of each name that is certain enough to be named, the most certain first."""
        self.seconds = perf_counter() - self._begun
        ranked = sorted(self.causes, key=lambda cause: (-cause.certainty, cause.stage))
        self.causes = list({cause.name: cause for cause in reversed(ranked) if cause.certainty >= NAMED}.values())[::-1]
