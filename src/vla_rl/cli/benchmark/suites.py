"""Benchmarks as the field reports them: which suites, in which order, next to which published figures.

A benchmark is a YAML file; those of this package go by their names, and any other by its path:

    title: LIBERO
    about: one line
    env: libero                                  # `env.type` of the spec
    change: {env.tasks: null}                    # keys of the spec that are set for every suite ...
    suites:
      Spatial: {env.suite: libero_spatial}       # ... and for this one
    groups: {Easy: [Spatial]}                    # means of some suites, which `mean` and `rates` may name
    mean: [Spatial]                              # of which the mean is reported; left out: none
    optional: []                                 # left out, with the reason, where the simulator refuses them
    published:
      - {policy: name, rates: {Spatial: 98.8}, source: where}     # percent; `mean` where it is not that of `rates`
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from attrs import field, frozen

from vla_rl.core.errors import UserError, did_you_mean
from vla_rl.core.spec.shipped_files import parse_file, read_named

PACKAGE = "vla_rl.cli.benchmark"

Keys = dict[str, Any]


@frozen(kw_only=True)
class PublishedFigures:
    """Figures of a policy, in percent, as its authors or others report them."""

    policy: str
    source: str
    rates: dict[str, float] = field(factory=dict)
    mean: float | None = None


@frozen(kw_only=True)
class Benchmark:
    """The content of a benchmark's file."""

    title: str
    env: str
    suites: dict[str, Keys]
    about: str = ""
    change: Keys = field(factory=dict)
    groups: dict[str, tuple[str, ...]] = field(factory=dict)
    mean: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    published: tuple[PublishedFigures, ...] = ()

    def suite_keys(self, suite: str) -> Keys:
        """Return the keys of a spec that define one suite, with their values."""
        return self.change | self.suites[suite]

    def suite_overrides(self, suite: str) -> list[str]:
        """Return the overrides of a spec for one suite, in the command line's form."""
        return [f"{key}={json.dumps(value)}" for key, value in self.suite_keys(suite).items()]

    def with_groups(self, rates: Mapping[str, float]) -> dict[str, float]:
        """Return the rates of suites, and the means of the groups whose suites are all there."""
        means = {group: mean_of(rates, names) for group, names in self.groups.items()}
        return {**{group: mean for group, mean in means.items() if mean is not None}, **rates}

    def choose_suites(self, names: list[str] | None) -> list[str]:
        """Suites in the benchmark's order. Raises UserError for a name that it does not have."""
        for name in names or ():
            if name not in self.suites:
                near = did_you_mean(name, self.suites)
                raise UserError(f"{self.title} has no suite {name!r}{near}; suites: {', '.join(self.suites)}")
        return [name for name in self.suites if names is None or name in names]


def load_benchmark(name: str) -> Benchmark:
    """Load a benchmark by name or path. Raises UserError if it does not exist, or if the file does not hold one."""
    benchmark, _ = parse_file(read_named("benchmark", name, PACKAGE, "libero.yaml"), name, Benchmark)
    suites, groups = benchmark.suites, benchmark.groups
    reported = (*benchmark.mean, *(suite for p in benchmark.published for suite in p.rates))
    evaluated = (*benchmark.optional, *(suite for names in groups.values() for suite in names))
    for suite in (*evaluated, *(one for one in reported if one not in groups)):
        if suite not in suites:
            raise UserError(f"{name}: names a suite {suite!r} that it does not have: {', '.join(suites)}")
    return benchmark


def mean_of(rates: Mapping[str, float], over: tuple[str, ...]) -> float | None:
    """Return the mean rate over these suites; None if one is missing."""
    return sum(rates[name] for name in over) / len(over) if over and all(name in rates for name in over) else None
