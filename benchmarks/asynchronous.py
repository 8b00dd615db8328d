"""What running ahead of training brings, on Ray, with the seconds that RL-VLA3 publishes as latencies.

    python benchmarks/asynchronous.py [--only sync lag1 lag2 uneven streamed] [--rounds 3] [--steps 6] [--json FILE]

sync      max_lag 0, tickets of equal length
lag1      max_lag 1, tickets of equal length
lag2      max_lag 2, lengths with a coefficient of variation (CV) of 0.3
uneven    max_lag 0, lengths with a CV of 0.6
streamed  max_lag 0, lengths with a CV of 0.3, the learner begins while tickets are played
window    a lane an env, which is acted for as soon as it waits, against envs in lock-step (measured for itself)

R = 2.7 s of rollout and A = 2.2 s of update: RL-VLA3 (arXiv:2602.05765), tables 3 and 4, pi0 on 8 GPUs 1:1, over 200.
A step has 4 tickets an env and 48 chunk steps a ticket (in the mean), half simulation and half inference. All are
sleeps, so what is measured is the order of things and the runtime's own cost. Simulator, policy and learner have
separate workers.

Cases are started together and play in turn; before the measured steps of a turn others fill what is played ahead.
Shares are of max(R, A), the least that a training step can take, with the R and A of `sync`: its seconds a chunk step,
times the chunk steps that an env plays in a step. `uneven` is compared with rounds, in which all envs wait for the
slowest: the sum over rounds of the longest ticket, of the same draws, ticket n being played by env n mod envs. Each
ratio is taken within a round of turns; medians of these. `plan_error` is that of `vla-rl plan`, given the latencies of
`sync` and each case's lengths, in the case where it is largest.

`window` has 16 envs in separate processes: 0.2 s for a chunk step of an env with a CV of 0.5 (lognormal, every
draw), 80 ms for an inference and 5 ms more for each row of it. Envs play without a pause (max_lag 1, and an update
takes next to nothing). Chunk steps a second in lock-step, in lanes of an env (`window_rate`), and in lanes whose policy
waits for 4 envs or 0.3 s; each next to what `vla-rl plan` expects.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from time import perf_counter

import numpy as np
from attrs import define, frozen

from vla_rl.core.plan import Cluster
from vla_rl.core.run.flow import Flow
from vla_rl.core.run.loop import collect_rollout, finish_step, flow_of
from vla_rl.core.run.state import State
from vla_rl.core.spec.spec import Spec, parse_spec
from vla_rl.runtime.driver.driver import Driver
from vla_rl.runtime.planning.forecast import forecast_spec
from vla_rl.runtime.planning.plan import plan_for
from vla_rl.runtime.planning.profile import Cost, Profile
from vla_rl.runtime.start import start

ROLLOUT, UPDATE = 536.8 / 200, 441.3 / 200
"""Seconds of a training step."""
ENVS, TICKETS, LENGTH = 16, 4, 48
"""Tickets of an env, and chunk steps of a ticket."""
PART = 2 * LENGTH
"""Samples of a micro-batch of `streamed`."""
WARM_UP = 2
"""Training steps before the measured ones of a turn, at least; more where more is played ahead."""
ENDLESS = 10**6


@frozen(kw_only=True)
class Case:
    name: str
    max_lag: int = 0
    cv: float = 0.0
    """Coefficient of variation of the tickets' lengths."""
    stream: bool = False
    """The update's seconds are then those of its samples: as many in the mean."""

    def spec(self) -> Spec:
        latency, samples = ROLLOUT / (TICKETS * LENGTH) / 2, TICKETS * ENVS * LENGTH
        update = {"sample_latency_s": UPDATE / samples} if self.stream else {"learn_latency_s": UPDATE}
        return parse_spec(
            {
                "name": "asynchronous",
                "plugins": ["vla_rl.testing.scripted", "vla_rl.testing.slot_placement"],
                "model": {"type": "linear", "latency_s": latency, **update},
                "env": {
                    "type": "scripted",
                    "num_envs": ENVS,
                    "length": LENGTH,
                    "length_sigma": math.sqrt(math.log(1 + self.cv**2)),
                    "max_steps": 10 * LENGTH,
                    "num_states": 10**5,
                    "latency_s": latency,
                },
                "rollout": {"chunk": 1, "episodes": TICKETS * ENVS},
                "asynchrony": {"max_lag": self.max_lag, "streaming_update": self.stream},
                "algorithm": {"type": "ppo", "normalize_advantages": None if self.stream else "unbiased"},
                "placement": {"type": "slots"},
                "train": {"steps": ENDLESS, "lr": 1e-4, "micro_batch": PART if self.stream else 10 * samples},
                "hooks": [],
            }
        )


CASES = [
    Case(name="sync"),
    Case(name="lag1", max_lag=1),
    Case(name="lag2", max_lag=2, cv=0.3),
    Case(name="uneven", cv=0.6),
    Case(name="streamed", cv=0.3, stream=True),
]


ENV_STEP, ENV_CV, INFERENCE, INFERENCE_ENV = 0.2, 0.5, 0.08, 0.005
"""Seconds: of an env's chunk step, with its CV, of an inference, and of each of its rows."""
SHORT = 5
"""Chunk steps of a ticket."""


@frozen(kw_only=True)
class LaneCase(Case):
    """How envs share inferences."""

    max_lag: int = 1
    placement: Mapping[str, object]

    def spec(self) -> Spec:
        changes = {"type": "slots", **self.placement}
        return parse_spec(
            {
                "name": "lanes",
                "plugins": ["vla_rl.testing.scripted", "vla_rl.testing.slot_placement"],
                "model": {"type": "linear", "latency_s": INFERENCE, "latency_env_s": INFERENCE_ENV},
                "env": {
                    "type": "scripted",
                    "num_envs": ENVS,
                    "length": SHORT,
                    "num_states": 10**5,
                    "latency_s": ENV_STEP,
                    "latency_sigma": SIGMA,
                    "independent_envs": True,
                },
                "rollout": {"chunk": 1, "episodes": TICKETS * ENVS},
                "asynchrony": {"max_lag": self.max_lag},
                "algorithm": {"type": "ppo"},
                "placement": changes,
                "train": {"steps": ENDLESS, "lr": 1e-4, "micro_batch": TICKETS * ENVS * SHORT},
                "hooks": [],
            }
        )

    def expected_rate(self) -> float:
        """Chunk steps a second, as `vla-rl plan` expects them."""
        random = Random(0)
        drawn = tuple(ENV_STEP * math.exp(random.gauss(0.0, SIGMA) - SIGMA**2 / 2) for _ in range(20_000))
        whole = INFERENCE + ENVS * INFERENCE_ENV
        profile = Profile(
            chunk_steps=SHORT,
            sim=Cost(seconds=drawn, each=True),
            policy=Cost(seconds=whole, num_envs=ENVS, fixed=INFERENCE / whole),
            message=0.0,
        )
        plan = plan_for(self.spec(), Cluster(cpus=float(os.cpu_count() or 1), gpus=0, memory=2**33))
        return TICKETS * ENVS * SHORT / forecast_spec(plan, self.spec(), profile).iteration


SIGMA = math.sqrt(math.log(1 + ENV_CV**2))
LANES: Mapping[str, object] = {"stages": ENVS, "concurrent_lanes": True}
LANE_CASES = [
    LaneCase(name="lockstep", placement={}),
    LaneCase(name="window", placement={**LANES, "max_wait_s": 0.0}),
    LaneCase(name="window_waiting", placement={**LANES, "max_batch": ENVS // 4, "max_wait_s": 0.3}),
]


@frozen(kw_only=True)
class Step:
    """A training step: seconds, chunk steps of each ticket, and the age of the oldest chunk."""

    whole: float
    rollout: float
    """Seconds of waiting for its tickets."""
    train: float
    """Seconds of all else: the rollout is scored, trained on, and weights are published."""
    lengths: np.ndarray
    lag: float

    @property
    def chunk_steps(self) -> float:
        """Chunk steps of an env that never waits: all of them, split evenly."""
        return float(self.lengths.sum()) / ENVS

    @property
    def of_rounds(self) -> int:
        """Chunk steps, where in each round all envs wait for the slowest."""
        return int(self.lengths.reshape(TICKETS, ENVS).max(1).sum())


@define
class Running:
    case: Case
    runtime: Driver
    flow: Flow

    @classmethod
    def start(cls, case: Case) -> Running:
        spec = case.spec()
        return cls(case, start(spec), flow_of(spec, State()))

    def turn(self, steps: int) -> list[Step]:
        """Some training steps, of which the last are measured; then what is played ahead, so that others have the
        machine."""
        played = [self.step() for _ in range(max(WARM_UP, self.case.max_lag + 1) + steps)]
        while playing := self.flow.tickets_running:
            for number in self.runtime.rollouts.wait(playing):
                self.flow.record_ticket(number)
        return played[-steps:]

    def step(self) -> Step:
        runtime, step, begun = self.runtime, self.flow.step + 1, perf_counter()
        rollout, _, played = collect_rollout(runtime, self.flow, step)
        prepared = runtime.samples.prepare(rollout, np.arange(rollout.valid.shape[1]))
        metrics = runtime.learners.train(prepared, runtime.algorithm.advantages(prepared))
        finish_step(runtime, step, True)
        self.flow.finish_step()
        whole, waited = perf_counter() - begun, played["time/rollout"]
        return Step(
            whole=whole,
            rollout=waited,
            train=whole - waited,
            lengths=rollout.valid.any(2).sum(0).numpy(),
            lag=metrics["policy/lag_max"],
        )


def measure(cases: Sequence[Case], rounds: int, steps: int) -> list[dict[str, list[Step]]]:
    """Return for each round: name -> the measured steps of its turn."""
    running: list[Running] = []
    try:
        running.extend(map(Running.start, cases))
        return [{one.case.name: one.turn(steps) for one in running} for _ in range(rounds)]
    finally:
        for one in running:
            one.runtime.workers.close()


def forecast(case: Case, turn: list[Step], chunk_step: float, update: float) -> float:
    """Seconds of a training step, as `vla-rl plan` expects them of these latencies and lengths."""
    half = Cost(seconds=chunk_step / 2, num_envs=ENVS, fixed=1.0)
    lengths = tuple(int(length) for step in turn for length in step.lengths)
    profile = Profile(chunk_steps=lengths, sim=half, policy=half, learner=Cost(seconds=update), message=0.0)
    plan = plan_for(case.spec(), Cluster(cpus=float(os.cpu_count() or 1), gpus=0, memory=2**33))
    return forecast_spec(plan, case.spec(), profile).iteration


def figures_of(turns: dict[str, list[Step]]) -> dict[str, float]:
    """What these cases' measured steps of one round say."""

    def mean(name: str, what: str) -> float:
        return statistics.fmean(getattr(step, what) for step in turns[name])

    rollout, update = mean("sync", "rollout"), mean("sync", "train")
    chunk_step = rollout / mean("sync", "chunk_steps")
    figures = {f"{name}_s": mean(name, "whole") for name in turns}
    figures |= {"rollout_s": rollout, "update_s": update, "chunk_step_ms": 1e3 * chunk_step}
    for name, key in (("lag1", "lag1_share"), ("lag2", "lag2_varied_share"), ("streamed", "streamed_share")):
        if name in turns:
            figures[key] = max(chunk_step * mean(name, "chunk_steps"), update) / figures[f"{name}_s"]
    if "uneven" in turns:
        figures["varied_over_rounds"] = mean("uneven", "rollout") / (chunk_step * mean("uneven", "of_rounds"))
    ratios = {
        case.name: forecast(case, turns[case.name], chunk_step, update) / figures[f"{case.name}_s"]
        for case in CASES
        if case.name in turns
    }
    figures |= {f"{name}_plan_over_measured": ratio for name, ratio in ratios.items()}
    return figures | {"plan_error": max(abs(ratio - 1) for ratio in ratios.values())}


def lane_figures_of(turns: dict[str, list[Step]]) -> dict[str, float]:
    """What one round of `LANE_CASES` says."""
    rates = {name: sum(s.lengths.sum() for s in turn) / sum(s.whole for s in turn) for name, turn in turns.items()}
    figures = {f"{name}_rate": rate for name, rate in rates.items()}
    figures |= {f"{case.name}_rate_by_plan": case.expected_rate() for case in LANE_CASES}
    return figures | {
        "window_over_lockstep": rates["window"] / rates["lockstep"],
        "window_waiting_over_lockstep": rates["window_waiting"] / rates["lockstep"],
    }


def lag_beyond_bound(rounds: list[dict[str, list[Step]]]) -> float:
    """Return the largest excess over the bound, of all steps of all cases."""
    bounds = {case.name: case.max_lag for case in CASES}
    return max(step.lag - bounds[name] for turns in rounds for name, turn in turns.items() for step in turn)


def medians(of_rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(found[name] for found in of_rounds) for name in of_rounds[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*(case.name for case in CASES), "window"]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="the others are compared with sync")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="measured training steps of a turn")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    import ray

    ray.init(address="local", num_cpus=64, include_dashboard=False, log_to_driver=False)
    cases = [case for case in CASES if case.name in {"sync", *options.only}]
    figures: dict[str, float] = {}
    if options.only != ["window"]:
        rounds = measure(cases, options.rounds, options.steps)
        figures |= medians([figures_of(turns) for turns in rounds])
        figures["lag_beyond_bound"] = lag_beyond_bound(rounds)
    if "window" in options.only:
        lanes = measure(LANE_CASES, options.rounds, max(1, options.steps // 2))
        figures |= medians([lane_figures_of(turns) for turns in lanes])
    for name, value in figures.items():
        print(f"{name:28} {value:10.4f}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
