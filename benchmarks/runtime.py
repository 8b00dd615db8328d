"""The runtime's own cost: simulators and policies with given latencies, on Ray, against the ideal.

    python benchmarks/runtime.py [--only control scale workers lanes strategies] [--rounds 5] [--json FILE]

control      a chunk step without any latency, simulator and policy in separate processes; its ideal is the same spec in
             one process, which does the same work without messages
scale        rollouts of 1,024 and 4,096 tabletop envs (16 px) with random actions and without a network, in one
             process: processor time that the runtime takes beyond the simulator, for each env and chunk step, from the
             issue of the tickets to the release of their samples; the fastest round. Run it with OMP_NUM_THREADS=1
workers      4, 16 and 48 worker processes, three simulators to a policy, which sleep 200 ms in each chunk step: the
             driver's processor time for each ticket, and seconds of a rollout against the ideal. 48 workers need 20 GiB
lanes        100 ms of simulation and 100 ms of inference, one and two lanes
strategies   unequal and lognormal latencies (one in a hundred takes 5 times the median) under every strategy

A lane of a k-th of the envs takes a k-th of the time. The ideal is `vla_rl.runtime.planning`'s forecast with messages
that take no time. Cases of a group are started together and play in turn; medians of the rounds.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from time import perf_counter, process_time
from typing import Any

from attrs import frozen
from measuring import command_line, write_json
from no_network import TimedTabletop

from vla_rl.core.plan import Cluster, Plan, Slot
from vla_rl.core.run.flow import Flow
from vla_rl.core.run.loop import collect_rollout, finish_step, flow_of
from vla_rl.core.run.state import State
from vla_rl.core.spec.spec import Spec, parse_spec
from vla_rl.runtime.driver.driver import Driver
from vla_rl.runtime.placement.assignments import assign_workers
from vla_rl.runtime.planning.forecast import forecast_job
from vla_rl.runtime.planning.plan import plan_for
from vla_rl.runtime.planning.profile import Cost, Profile
from vla_rl.runtime.start import start
from vla_rl.testing.linear import Latency

STEPS, TAIL = 32, 0.7
ONE_PROCESS = Plan(slots=(Slot(roles=("sim", "policy", "learner"), cpus=0.1),))
"""Collocated, on a share of the cores, so that other cases have room."""


@frozen(kw_only=True)
class Case:
    name: str
    num_envs: int = 16
    image: int = 224
    sim: float = 0.0
    """Seconds of a chunk step of all envs."""
    policy: float = 0.0
    sigma: float = 0.0
    lanes: int = 1
    """0: collocated, in one process."""
    backend: str = "ray"
    steps: int = STEPS

    def spec(self) -> Spec:
        share = max(self.lanes, 1)
        return parse_spec(
            {
                "name": "runtime",
                "plugins": ["vla_rl.testing.scripted", "vla_rl.testing.slot_placement"],
                "model": {"type": "linear", "latency_s": self.policy / share, "latency_sigma": self.sigma},
                "env": {
                    "type": "scripted",
                    "num_envs": self.num_envs,
                    "image": self.image,
                    "length": 10**6,
                    "max_steps": self.steps,
                    "latency_s": self.sim / share,
                    "latency_sigma": self.sigma,
                },
                "rollout": {"chunk": 1, "episodes": self.num_envs},
                "algorithm": {"type": "ppo"},
                "placement": {"type": "slots", "stages": share},
                "runtime": {"backend": self.backend},
                "train": {"steps": 10**6, "lr": 1e-3, "micro_batch": 64},
                "hooks": [],
            }
        )

    def plan(self) -> Plan:
        if not self.lanes:
            return ONE_PROCESS
        return plan_for(self.spec(), Cluster(cpus=float(os.cpu_count() or 1), gpus=0, memory=2**33))

    def ideal(self) -> float:
        """Seconds of a rollout whose messages take no time."""
        plan = self.plan()
        sim, policy = (self._cost(seconds) for seconds in (self.sim, self.policy))
        profile = Profile(chunk_steps=self.steps, sim=sim, policy=policy, message=0.0)
        return forecast_job(plan, assign_workers(plan, self.num_envs, one_process=False), profile, chunk=1).rollout

    def _cost(self, seconds: float) -> Cost:
        latency = Latency(seconds, self.sigma, seed=10**6)
        return Cost(
            seconds=tuple(latency.draw_seconds() for _ in range(5000 if self.sigma else 1)), num_envs=self.num_envs
        )


STRATEGIES = (("collocated", 0), ("one lane", 1), ("two lanes", 2), ("four lanes", 4))
SECTIONS = {
    "control": [
        [
            Case(name=name, num_envs=num_envs, image=image, steps=128, backend=backend)
            for name, num_envs, image in (
                ("16 envs of 8 px", 16, 8),
                ("16 envs of 224 px", 16, 224),
                ("64 envs of 224 px", 64, 224),
            )
            for backend in ("local", "ray")
        ]
    ],
    "lanes": [
        [
            Case(name=f"100 + 100 ms, {lanes} lane{'s' * (lanes > 1)}", sim=0.1, policy=0.1, lanes=lanes)
            for lanes in (1, 2)
        ]
    ],
    "strategies": [
        [
            Case(name=f"{label}, {strategy}", sim=sim, policy=policy, sigma=sigma, lanes=lanes)
            for strategy, lanes in STRATEGIES
        ]
        for label, sim, policy, sigma in (
            ("150 + 50 ms", 0.15, 0.05, 0.0),
            ("50 + 150 ms", 0.05, 0.15, 0.0),
            ("lognormal 100 + 100 ms", 0.1, 0.1, TAIL),
        )
    ],
}
"""Groups of cases; those of a group are alive side by side."""


@frozen(kw_only=True)
class ScaleCase:
    """A rollout of many envs in one process. Chunks are single actions, the dearest for the runtime."""

    name: str
    num_envs: int
    algorithm: str
    auto_reset: bool
    """A ticket is 64 chunk steps of an env's stream, of episodes of up to 16 steps; False: an episode of up to 64."""

    def spec(self) -> Spec:
        streams = {"auto_reset": {"steps": 64}, "max_steps": 16}
        episodes = {"episodes": self.num_envs, "group_size": 8, "max_steps": 64}
        return parse_spec(
            {
                "name": "scale",
                "plugins": ["no_network"],
                "model": {"type": "random_actions"},
                "env": {"type": "timed_tabletop", "num_envs": self.num_envs, "image_size": 16},
                "rollout": {"chunk": 1, **(streams if self.auto_reset else episodes)},
                "algorithm": {"type": self.algorithm},
                "runtime": {"backend": "local"},
                "train": {"steps": 10**6, "lr": 1e-3, "micro_batch": 8},
                "hooks": [],
            }
        )

    def plan(self, device: str) -> Plan:
        slot = Slot(roles=("sim", "policy", "learner"), cpus=1.0, device=device)
        return Plan(slots=(slot,))


SCALE = (
    ScaleCase(name="1,024 envs, an episode a ticket", num_envs=1024, algorithm="grpo", auto_reset=False),
    ScaleCase(name="1,024 envs, auto_reset", num_envs=1024, algorithm="ppo", auto_reset=True),
    ScaleCase(name="4,096 envs, auto_reset", num_envs=4096, algorithm="ppo", auto_reset=True),
)


def scale(case: ScaleCase, device: str, rounds: int) -> tuple[float, float]:
    """Return the processor time of runtime and simulator in the fastest rollout, in microseconds for each valid chunk
    step of an env.
    """
    spec = case.spec()
    runtime = start(spec, plan=case.plan(device))
    flow = flow_of(spec, State())
    play(runtime, flow)
    fastest = min(microseconds(runtime, flow) for _ in range(rounds))
    runtime.workers.close()
    return fastest


def microseconds(runtime: Driver, flow: Flow) -> tuple[float, float]:
    TimedTabletop.seconds = 0.0
    before = process_time()
    rollout, _, _ = collect_rollout(runtime, flow, flow.step + 1)
    finish_step(runtime, runtime.fleet.version + 1, False)
    flow.finish_step("discarded")
    seconds = process_time() - before
    steps = int(rollout.valid.any(-1).sum())
    return 1e6 * (seconds - TimedTabletop.seconds) / steps, 1e6 * TimedTabletop.seconds / steps


def print_scale(rounds: int) -> dict[str, float]:
    """Measure all cases on the CPU. Return the figures."""
    figures = {}
    print(f"{'scale: us of an env and chunk step':40} {'runtime':>12} {'simulator':>10}")
    for case in SCALE:
        runtime_us, simulator_us = scale(case, "cpu", rounds)
        key = case.name.replace(" ", "_")
        figures |= {f"{key}_us": runtime_us, f"{key}_simulator_us": simulator_us}
        print(f"{case.name:40} {runtime_us:9.2f} us {simulator_us:7.2f} us", flush=True)
    return figures


@frozen(kw_only=True)
class WorkersCase:
    """A rollout of one episode per env in many worker processes, which sleep instead of simulating and computing."""

    workers: int
    """Worker processes; three of four simulate, the fourth acts for them."""
    seconds: float = 0.2
    """Seconds of a chunk step's simulation, and of its inference."""
    steps: int = 8

    @property
    def num_envs(self) -> int:
        return 2 * (self.workers * 3 // 4)

    def spec(self) -> Spec:
        latency = {"latency_s": self.seconds}
        return parse_spec(
            {
                "name": "workers",
                "plugins": ["vla_rl.testing.scripted", "vla_rl.testing.slot_placement"],
                "model": {"type": "linear", **latency},
                "env": {
                    "type": "scripted",
                    "num_envs": self.num_envs,
                    "image": 8,
                    "length": 10**6,
                    "max_steps": self.steps,
                    **latency,
                },
                "rollout": {"chunk": 1, "episodes": self.num_envs},
                "algorithm": {"type": "ppo"},
                "placement": {"type": "slots", "sim": self.workers * 3 // 4, "policy": self.workers // 4},
                "train": {"steps": 10**6, "lr": 1e-3, "micro_batch": 64},
                "hooks": [],
            }
        )

    def measure_rollouts(self, rounds: int) -> tuple[float, float]:
        """Return medians of (the driver's processor time in milliseconds for each ticket, seconds of a rollout)."""
        spec = self.spec()
        runtime = start(spec, plan=plan_for(spec, Cluster(cpus=64.0, gpus=0, memory=2**35)))
        try:
            flow = flow_of(spec, State())
            play(runtime, flow)
            figures = []
            for _ in range(rounds):
                before = process_time()
                elapsed = play(runtime, flow)
                figures.append((1e3 * (process_time() - before) / self.num_envs, elapsed))
        finally:
            runtime.workers.close()
        processor, elapsed_of = zip(*figures, strict=True)
        return statistics.median(processor), statistics.median(elapsed_of)


def print_workers(rounds: int) -> dict[str, float]:
    """Measure growth with the number of workers. Return the figures."""
    figures = {}
    print(f"{'workers':10} {'driver, a ticket':>18} {'rollout':>10} {'ideal':>8} {'ratio':>7}")
    for count in (4, 16, 48):
        case = WorkersCase(workers=count)
        milliseconds, elapsed = case.measure_rollouts(rounds)
        ideal = 2 * case.steps * case.seconds
        figures |= {f"{count}_workers_ticket_ms": milliseconds, f"{count}_workers_ratio": elapsed / ideal}
        print(f"{count:<10} {milliseconds:15.2f} ms {elapsed:8.2f} s {ideal:6.2f} s {elapsed / ideal:7.3f}", flush=True)
    return figures


def play(runtime: Driver, flow: Flow) -> float:
    """Seconds of a rollout, which is not trained on."""
    before = perf_counter()
    collect_rollout(runtime, flow, flow.step + 1)
    seconds = perf_counter() - before
    finish_step(runtime, runtime.fleet.version + 1, False)
    flow.finish_step("discarded")
    return seconds


def measure(cases: list[Case], rounds: int) -> Iterator[tuple[Case, float]]:
    """-> median seconds of a rollout of each case."""
    runtimes: list[tuple[Driver, Flow]] = []
    try:
        for case in cases:
            spec = case.spec()
            runtimes.append((start(spec, plan=case.plan()), flow_of(spec, State())))
            play(*runtimes[-1])
        times: list[list[float]] = [[] for _ in cases]
        for _ in range(rounds):
            for (runtime, flow), own in zip(runtimes, times, strict=True):
                own.append(play(runtime, flow))
    finally:
        for runtime, _ in runtimes:
            runtime.workers.close()
    for case, own in zip(cases, times, strict=True):
        yield case, statistics.median(own)


def main() -> None:
    parser = command_line(__doc__, ["scale", "workers", *SECTIONS], "SECTION")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    import ray

    figures: dict[str, Any] = print_scale(options.rounds) if "scale" in options.only else {}
    sections = [section for section in options.only if section in SECTIONS]
    if options.only != ["scale"]:
        ray.init(address="local", num_cpus=64, include_dashboard=False, log_to_driver=False)
    if "workers" in options.only:
        figures |= print_workers(options.rounds)
    for section in sections:
        print(f"{section:40} {'measured':>12} {'ideal':>10} {'ratio':>7}")
        work = 0.0
        for case, seconds in (pair for group in SECTIONS[section] for pair in measure(group, options.rounds)):
            key = case.name.replace(" ", "_")
            if case.backend == "local":
                work = 1e3 * seconds / case.steps
                continue
            if section == "control":
                figures[f"{key}_ms"] = 1e3 * seconds / case.steps
                figures[f"{key}_work_ms"] = work
                print(
                    f"{case.name:40} {figures[f'{key}_ms']:9.2f} ms {work:7.2f} ms {figures[f'{key}_ms'] / work:7.3f}"
                )
                continue
            ideal = case.ideal()
            figures |= {f"{key}_s": seconds, f"{key}_ratio": seconds / ideal}
            print(f"{case.name:40} {seconds:10.2f} s {ideal:8.2f} s {seconds / ideal:7.3f}", flush=True)
    write_json(figures, options.json)


if __name__ == "__main__":
    main()
