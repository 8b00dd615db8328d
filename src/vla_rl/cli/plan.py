"""`vla-rl plan`: what each placement strategy is expected to do with a job, before a device is spent."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from vla_rl.cli.candidates import Candidate, best_candidate, compare_placements, forecast_overlap
from vla_rl.cli.inputs import GIB, cluster_of
from vla_rl.core.errors import UserError, format_count
from vla_rl.core.plan import Cluster
from vla_rl.core.spec.spec import Spec
from vla_rl.runtime.comm.status_line import showing_progress
from vla_rl.runtime.gpu_memory.checks import NOT_PREDICTED, Prediction, predict_model_memory
from vla_rl.runtime.planning.device_memory import DeviceMemory
from vla_rl.runtime.planning.forecast import ENOUGH, Forecast, Overlap, periodic_seconds
from vla_rl.runtime.planning.memory import waiting_bytes
from vla_rl.runtime.planning.profile import Profile, load_profile
from vla_rl.toolkit.waiting import register_work

if TYPE_CHECKING:
    from vla_rl.runtime.gpu_memory.estimate import Estimate
    from vla_rl.runtime.planning.hardware import GpuRates

PARTS = 4
"""Number of parts of a periodic step, for comparison; RL-VLA3 has as many."""
TITLES = ("env\nsteps/s", "step\ns", "rollout\ns")
BOUND_TITLES = ("env steps/s\nat most", "step s\nat least", "rollout s\nat least")
"""Titles where nothing is known of how long simulation takes."""
FURTHER_TITLES = ("update\ns", "idle %: sim,\npolicy, learner", "device\nGiB", "host\nGiB")
"""Titles have two lines, so that numbers are whole on eighty columns."""
WORKERS = {"sim": "the simulators", "policy": "inference", "learner": "the learners"}


@frozen(kw_only=True)
class Latencies:
    """What a plan reckons with: the latencies of a job, the machine, and how both are known."""

    profile: Profile
    cluster: Cluster
    prediction: Prediction
    estimate: Estimate | None = None
    """Where the latencies are estimated; None: they were measured or given."""
    gpu: str = ""
    rates: GpuRates | None = None

    @property
    def forecasts_are_bounds(self) -> bool:
        """Whether forecasts are bounds: nothing is known of how long simulation takes, and it counts as no time."""
        return self.estimate is not None and self.estimate.simulation_s is None


def load_or_estimate_latencies(
    spec: Spec,
    profiles: Sequence[Path],
    gpu: str | None,
    machine: tuple[int | None, float | None, float | None, float | None],
) -> Latencies:
    """Load the latencies of a run or a file, or estimate those of a GPU. Raises UserError.

    Args:
        profiles: traces or profiles.
        gpu: name of a GPU, or a file of its rates; None: the profiles are used.
        machine: GPUs, CPUs, GiB of host memory and GiB of a GPU's memory; None: as in `cluster_of`.
    """
    if gpu is None:
        if not profiles:
            raise UserError(
                "there are no latencies to plan with; give --gpu h100 (or h200, a100, 4090) to estimate them, or "
                "--profile RUN/trace.json of a run, or a file"
            )
        profile, cluster = load_profile(profiles), cluster_of(*machine)
        if not cluster.gpus:
            return Latencies(profile=profile, cluster=cluster, prediction=NOT_PREDICTED)
        with showing_progress(), register_work("counting the model's memory", about=spec.model.type):
            return Latencies(profile=profile, cluster=cluster, prediction=predict_model_memory(spec))
    if profiles:
        raise UserError("--gpu estimates the latencies, and --profile gives them; leave one of them out")
    from vla_rl.runtime.gpu_memory.estimate import estimate_job
    from vla_rl.runtime.planning.hardware import gpu_rates

    rates = gpu_rates(gpu)
    devices, cpus, memory, gpu_memory = machine
    gpus = devices or 1
    cluster = cluster_of(gpus, cpus, memory, rates.gib if gpu_memory is None else gpu_memory)
    with showing_progress(), register_work("counting the model's operators", about=spec.model.type):
        expected = estimate_job(spec, cluster, rates)
    profile, prediction = expected.profile, expected.prediction
    return Latencies(profile=profile, cluster=cluster, prediction=prediction, estimate=expected, gpu=gpu, rates=rates)


class ForecastList(list[dict[str, Any]]):
    """What every strategy is expected to do, as plain data, and `show`, which prints it as tables. With `bounds: true`
    seconds are at least, and throughput is at most, so much; then no placement is the best, and nothing is forecast of
    running ahead."""

    def __init__(self, rows: Sequence[dict[str, Any]], show: Callable[[], None]) -> None:
        super().__init__(rows)
        self.show = show


def print_forecasts(forecasts: ForecastList, given: Any) -> None:
    """Print the comparison, or JSON. Raises UserError when no strategy fits."""
    if given.json:
        print(json.dumps(forecasts, indent=1))
    else:
        forecasts.show()
    if all("reason" in row for row in forecasts):
        raise UserError("no placement fits on these devices; the reasons are above")


def forecast_placements(spec: Spec, known: Latencies) -> ForecastList:
    """Compare the strategies."""
    winner: Candidate | None = None
    further: tuple[Candidate, Overlap] | None = None
    with showing_progress():
        candidates = compare_placements(spec, known.cluster, known.profile, known.prediction)
        if not known.forecasts_are_bounds:
            winner, further = best_candidate(candidates), forecast_overlap(spec, candidates, known.profile)
    waiting_sizes: dict[int, float] = {}
    if further is not None and known.profile.trajectory_bytes is not None:
        waiting_sizes = {lag: waiting_bytes(spec, known.profile.trajectory_bytes, lag) for lag in further[1].by_lag}
    rows = [
        {**_plain_candidate(candidate, candidate is winner), "bounds": known.forecasts_are_bounds}
        for candidate in candidates
    ]
    if further is not None:
        rows[candidates.index(further[0])]["overlap"] = _plain_overlap(further[1], waiting_sizes)
    if known.estimate is not None:
        rows = [{**candidate, "estimate": _plain_estimate(known, known.estimate)} for candidate in rows]

    def print_tables() -> None:
        if known.estimate is not None:
            _print_estimate(spec, known, known.estimate)
        _print_candidates(spec, known, candidates, winner)
        fitting = (candidate for candidate in candidates if candidate.forecast is not None)
        _print_gpus(winner or next(fitting, None), known.prediction)
        if not known.forecasts_are_bounds:
            _print_overlap(spec, further, waiting_sizes)

    return ForecastList(rows, print_tables)


def _plain_estimate(known: Latencies, estimate: Estimate) -> dict[str, object]:
    return {
        "gpu": known.gpu,
        "calibrated": estimate.calibrated,
        "inference_s": estimate.inference.total,
        "rows": estimate.rows,
        "learner_pass_s": estimate.learner_pass.total,
        "simulation_s": estimate.simulation_s,
        "parameters": estimate.parameters,
        "faster": [
            {"change": f.change, "call": f.call, "before_s": f.before, "after_s": f.after} for f in estimate.faster
        ],
        "guesses": list(estimate.guesses),
    }


def _print_estimate(spec: Spec, known: Latencies, estimate: Estimate) -> None:
    """Print the seconds of single calls, what would shorten them, and what is a guess."""
    console = _make_console()
    assert known.rates is not None
    rates = "measured rates" if known.rates.measured else "published rates"
    warning = "" if estimate.calibrated else "; [yellow]not calibrated[/]: nothing was measured on this card or model"
    console.print(f"estimated for {known.gpu}, {rates}{warning}")
    micro_batch, seconds = spec.train.micro_batch, estimate.learner_pass.total
    simulation = "?" if estimate.simulation_s is None else f"{_format_number(estimate.simulation_s)} s an env"
    console.print(
        f"  inference of {estimate.rows} rows {_format_number(estimate.inference.total)} s; learner's pass of "
        f"{micro_batch} samples {_format_number(seconds)} s ({_format_number(micro_batch / seconds)} samples/s); chunk "
        f"step of simulation {simulation}"
    )
    for change in estimate.faster:
        console.print(
            f"  faster: [green]{change.change}[/]: {change.call} {_format_number(change.before)} -> "
            f"{_format_number(change.after)} s"
        )
    for guess in estimate.guesses:
        console.print(f"  [dim]assumed: {escape(guess)}[/]")


def _plain_candidate(candidate: Candidate, is_best: bool) -> dict[str, object]:
    expected = candidate.forecast
    plain: dict[str, object] = {"strategy": candidate.name, "spec": candidate.own, "best": is_best}
    if expected is None:
        return {**plain, "reason": candidate.reason}
    return {
        **plain,
        "env_steps_per_s": expected.throughput,
        "iteration_s": expected.iteration,
        "rollout_s": expected.rollout,
        "update_s": expected.update,
        "publish_s": expected.publish,
        "idle": expected.idle,
        "bottleneck": expected.bottleneck,
        "device_bytes": expected.device_bytes,
        "host_bytes": expected.host_bytes,
        **({"gpus": [_plain_gpu(device) for device in candidate.gpus]} if candidate.gpus else {}),
    }


def _plain_gpu(device: DeviceMemory) -> dict[str, object]:
    size, phases = device.peak
    workers = []
    for worker in device.workers:
        phase = phases[worker.worker]
        parts = {part.name: part.size for part in worker.phases[phase]}
        workers.append({"worker": worker.worker, "roles": list(worker.roles), "phase": phase, "parts": parts})
    return {"bytes": size, "workers": workers}


def _print_gpus(candidate: Candidate | None, prediction: Prediction) -> None:
    """Print what fills the fullest GPU of a placement."""
    console = _make_console()
    if prediction.reason:
        console.print(f"[dim]memory of GPUs is not predicted: {escape(prediction.reason)}[/]")
    if candidate is None or not candidate.gpus:
        return
    size, phases = candidate.gpus[0].peak
    console.print(f"fullest GPU with {candidate.name}: {_format_gib(size)} GiB")
    for worker in candidate.gpus[0].workers:
        phase = phases[worker.worker]
        parts = ", ".join(
            f"{_format_gib(part.size)} {part.name}" for part in worker.phases[phase] if part.size >= GIB / 100
        )
        console.print(f"  worker {worker.worker} ({', '.join(worker.roles)}), {phase}: {parts}")


def _plain_overlap(overlap: Overlap, waiting: Mapping[int, float]) -> dict[str, object]:
    lags = {
        str(lag): {"step_s": expected.iteration, "share": overlap.bound_share(lag), "waiting_bytes": waiting.get(lag)}
        for lag, expected in overlap.by_lag.items()
    }
    return {
        "rollout_s": overlap.rollout,
        "training_s": overlap.training,
        "by_lag": lags,
        "least_lag": overlap.smallest_lag,
        "periodic_s": periodic_seconds(overlap.rollout, overlap.training, PARTS),
    }


def _print_candidates(spec: Spec, known: Latencies, candidates: Sequence[Candidate], winner: Candidate | None) -> None:
    """Print the strategies and the best of them, or why none is named."""
    console, cluster, profile = _make_console(), known.cluster, known.profile
    console.print(
        f"[bold]{spec.name}[/]: {format_count(spec.env.num_envs, 'env')} of {spec.env.type}, {spec.model.type}, on "
        f"{format_count(cluster.gpus, 'GPU')}, {format_count(cluster.cpus, 'CPU')}, {cluster.memory / GIB:.0f} GiB "
        f"of memory"
    )
    table = _make_table("strategy", *(BOUND_TITLES if known.forecasts_are_bounds else TITLES), *FURTHER_TITLES)
    for candidate in candidates:
        if candidate.forecast is not None:
            name = Text(candidate.name, style="bold green" if candidate is winner else "")
            name.append("\n(spec)" if candidate.own else "")
            table.add_row(name, *_forecast_cells(candidate.forecast, known.forecasts_are_bounds))
    if table.row_count:
        console.print(table)
    for candidate in candidates:
        if candidate.forecast is None:
            console.print(f"[yellow]{candidate.name}[/] does not fit: {candidate.reason}", markup=True)
    own = candidates[0]
    if winner is not None and winner.forecast is not None:
        gain = ""
        if own.forecast is not None and own is not winner:
            gain = f", {winner.forecast.throughput / own.forecast.throughput:.2f} times the spec's"
        expected, role = winner.forecast, winner.forecast.bottleneck
        busy = f"{WORKERS[role]}, busy {100 * (1 - expected.idle[role]):.0f} % of the time"
        console.print(f"best: [bold green]{winner.name}[/]{gain}; its bottleneck: {busy}")
    if known.forecasts_are_bounds:
        console.print(
            f"no best is named, as nothing is known of how long {spec.env.type} simulates: measure a short "
            f"run, and plan with --profile RUN/trace.json"
        )
    assumed = [
        f"{name} time {'does not depend on' if cost.fixed == 1 else 'is proportional to'} the envs of a call"
        for name, cost in (("simulation", profile.sim), ("inference", profile.policy))
        if known.estimate is None and cost.fixed in (0.0, 1.0) and not cost.each
    ]
    if assumed:
        console.print(f"[dim]assumed: {'; '.join(assumed)} (see docs/how-to/plan-a-run.md)[/]")


def _print_overlap(spec: Spec, further: tuple[Candidate, Overlap] | None, waiting: Mapping[int, float]) -> None:
    console = _make_console()
    if further is None:
        console.print("asynchrony.max_lag brings nothing here: no placement that fits has separate learners")
        return
    candidate, overlap = further
    streamed = ", streamed" if spec.asynchrony.streaming_update else ""
    first = f"max_lag, {candidate.name}{streamed}"
    table = _make_table(first, "step\ns", "of the best\n%", "oldest chunk\nsteps", "wait at most\nGiB")
    for lag, expected in overlap.by_lag.items():
        name = Text(str(lag), style="bold green" if lag == overlap.smallest_lag else "")
        own = " (spec)" if candidate.own and lag == spec.asynchrony.max_lag else ""
        memory = _format_gib(waiting[lag]) if waiting else "?"
        share = f"{100 * overlap.bound_share(lag):.0f}"
        table.add_row(name.append(own), _format_number(expected.iteration), share, str(expected.lag), memory)
    seconds = periodic_seconds(overlap.rollout, overlap.training, PARTS)
    share = f"{100 * overlap.lower_bound / seconds:.0f}" if seconds else "-"
    table.add_row(f"periodic, {PARTS} parts", _format_number(seconds), share, "0", "")
    console.print()
    console.print(table)
    console.print(
        f"the best: {overlap.lower_bound:,.2f} s, the longer of {overlap.rollout:,.2f} s for the tickets of a step and "
        f"{overlap.training:,.2f} s for update and publication"
    )
    least = f"the least that reaches {ENOUGH}: [bold green]max_lag {overlap.smallest_lag}[/]"
    console.print(f"none of these reaches {ENOUGH} of it" if overlap.smallest_lag is None else least)


def _make_console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 120, highlight=False)


def _make_table(first: str, *titles: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 0, 0, 1))
    table.add_column(first, no_wrap=True, overflow="fold")
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True, overflow="fold")
    return table


def _forecast_cells(expected: Forecast, bounds: bool) -> list[str]:
    memory = "?" if expected.device_bytes is None else _format_gib(expected.device_bytes)
    return [
        _format_number(expected.throughput),
        *map(_format_number, (expected.iteration, expected.rollout, expected.update)),
        "?" if bounds else ", ".join(f"{100 * expected.idle[role]:3.0f}" for role in ("sim", "policy", "learner")),
        memory,
        _format_gib(expected.host_bytes) if expected.host_bytes else "-",
    ]


def _format_number(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.{2 if value < 10 else 1 if value < 100 else 0}f}"


def _format_gib(count: float) -> str:
    """GiB."""
    return f"{count / GIB:,.1f}" if count >= GIB / 10 else f"{count / GIB:.3f}"
