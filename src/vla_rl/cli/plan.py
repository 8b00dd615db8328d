"""`vla-rl plan`: what each placement strategy is expected to do with a job, before a device is spent."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from vla_rl.cli.candidates import Candidate, ahead, best, compare
from vla_rl.cli.inputs import GIB
from vla_rl.core.errors import UserError
from vla_rl.core.plan import Cluster
from vla_rl.core.spec.spec import Spec
from vla_rl.runtime.comm.status_line import shown
from vla_rl.runtime.gpu_memory.checks import NOT_PREDICTED, Prediction, predict
from vla_rl.runtime.planning.device_memory import DeviceMemory
from vla_rl.runtime.planning.forecast import ENOUGH, Forecast, Overlap, periodic
from vla_rl.runtime.planning.memory import waiting_bytes
from vla_rl.runtime.planning.profile import Profile, load_profile
from vla_rl.toolkit.waiting import waiting

PARTS = 4
"""Number of parts of a periodic step, for comparison; RL-VLA3 has as many."""
TITLES = (
    "env\nsteps/s",
    "step\ns",
    "rollout\ns",
    "update\ns",
    "idle %: sim,\npolicy, learner",
    "device\nGiB",
    "host\nGiB",
)
"""Two lines, so that numbers are whole on eighty columns."""
WORKERS = {"sim": "the simulators", "policy": "inference", "learner": "the learners"}


def main(spec: Spec, profiles: Sequence[Path], cluster: Cluster, json: bool) -> None:
    """Print the comparison. Raises UserError when no strategy fits."""
    if json:
        from json import dumps

        found = forecast(spec, profiles, cluster)
        print(dumps(found, indent=1))
        fits = any(candidate["best"] for candidate in found)
    else:
        profile = load_profile(profiles)
        with shown():
            prediction = _predict(spec, cluster)
            candidates = compare(spec, cluster, profile, prediction)
            winner, further = best(candidates), ahead(spec, candidates, profile)
        _print(spec, cluster, profile, candidates, winner)
        _print_gpus(winner, prediction)
        _print_overlap(spec, further, _waiting(spec, profile, further))
        fits = winner is not None
    if not fits:
        raise UserError("no placement fits on these devices; the reasons are above")


def forecast(spec: Spec, profiles: Sequence[Path], cluster: Cluster) -> list[dict[str, Any]]:
    """The comparison as plain data."""
    profile = load_profile(profiles)
    with shown():
        candidates = compare(spec, cluster, profile, _predict(spec, cluster))
        winner, further = best(candidates), ahead(spec, candidates, profile)
    found = [_plain(candidate, candidate is winner) for candidate in candidates]
    if further is not None:
        found[candidates.index(further[0])]["overlap"] = _plain_overlap(further[1], _waiting(spec, profile, further))
    return found


def _plain(candidate: Candidate, is_best: bool) -> dict[str, object]:
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
    return {
        "bytes": size,
        "workers": [
            {
                "worker": worker.worker,
                "roles": list(worker.roles),
                "phase": phases[worker.worker],
                "parts": {part.name: part.size for part in worker.phases[phases[worker.worker]]},
            }
            for worker in device.workers
        ],
    }


def _predict(spec: Spec, cluster: Cluster) -> Prediction:
    """Predict the model's memory where there are GPUs."""
    if not cluster.gpus:
        return NOT_PREDICTED
    with waiting("counting the model's memory", about=spec.model.type):
        return predict(spec)


def _print_gpus(winner: Candidate | None, prediction: Prediction) -> None:
    """Print what fills the fullest GPU of the best placement."""
    console = _console()
    if prediction.reason:
        console.print(f"[dim]memory of GPUs is not predicted: {escape(prediction.reason)}[/]")
    if winner is None or not winner.gpus:
        return
    size, phases = winner.gpus[0].peak
    console.print(f"fullest GPU: {_size(size)} GiB")
    for worker in winner.gpus[0].workers:
        phase = phases[worker.worker]
        parts = ", ".join(f"{_size(part.size)} {part.name}" for part in worker.phases[phase] if part.size >= GIB / 100)
        console.print(f"  worker {worker.worker} ({', '.join(worker.roles)}), {phase}: {parts}")


def _waiting(spec: Spec, profile: Profile, further: tuple[Candidate, Overlap] | None) -> dict[int, float]:
    """Return max_lag -> largest size of the waiting trajectories, in bytes; empty if a trajectory's size is unknown."""
    if further is None or profile.trajectory_bytes is None:
        return {}
    return {lag: waiting_bytes(spec, profile.trajectory_bytes, lag) for lag in further[1].by_lag}


def _plain_overlap(found: Overlap, waiting: Mapping[int, float]) -> dict[str, object]:
    lags = {
        str(lag): {"step_s": expected.iteration, "share": found.share(lag), "waiting_bytes": waiting.get(lag)}
        for lag, expected in found.by_lag.items()
    }
    return {
        "rollout_s": found.rollout,
        "training_s": found.training,
        "by_lag": lags,
        "least_lag": found.least,
        "periodic_s": periodic(found.rollout, found.training, PARTS),
    }


def _print(
    spec: Spec, cluster: Cluster, profile: Profile, candidates: Sequence[Candidate], winner: Candidate | None
) -> None:
    console = _console()
    gpus = f"{cluster.gpus} GPU{'s' * (cluster.gpus != 1)}"
    console.print(
        f"[bold]{spec.name}[/]: {spec.env.num_envs} envs of {spec.env.type}, {spec.model.type}, on {gpus}, "
        f"{cluster.cpus:g} CPUs, {cluster.memory / GIB:.0f} GiB of memory"
    )
    table = _table("strategy", *TITLES)
    for candidate in candidates:
        expected = candidate.forecast
        if expected is not None:
            name = Text(candidate.name, style="bold green" if candidate is winner else "")
            table.add_row(name.append("\n(spec)" if candidate.own else ""), *_cells(expected))
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
    assumed = [
        f"{name} time {'does not depend on' if cost.fixed == 1 else 'is proportional to'} the envs of a call"
        for name, cost in (("simulation", profile.sim), ("inference", profile.policy))
        if cost.fixed in (0.0, 1.0) and not cost.each
    ]
    if assumed:
        console.print(f"[dim]assumed: {'; '.join(assumed)} (see docs/how-to/plan-a-run.md)[/]")


def _print_overlap(spec: Spec, further: tuple[Candidate, Overlap] | None, waiting: Mapping[int, float]) -> None:
    console = _console()
    if further is None:
        console.print("asynchrony.max_lag brings nothing here: no placement that fits has learners of their own")
        return
    candidate, found = further
    streamed = ", streamed" if spec.asynchrony.streaming_update else ""
    first = f"max_lag, {candidate.name}{streamed}"
    table = _table(first, "step\ns", "of the best\n%", "oldest chunk\nsteps", "wait at most\nGiB")
    for lag, expected in found.by_lag.items():
        name = Text(str(lag), style="bold green" if lag == found.least else "")
        own = " (spec)" if candidate.own and lag == spec.asynchrony.max_lag else ""
        memory = _size(waiting[lag]) if waiting else "?"
        share = f"{100 * found.share(lag):.0f}"
        table.add_row(name.append(own), _number(expected.iteration), share, str(expected.lag), memory)
    seconds = periodic(found.rollout, found.training, PARTS)
    share = f"{100 * found.bound / seconds:.0f}" if seconds else "-"
    table.add_row(f"periodic, {PARTS} parts", _number(seconds), share, "0", "")
    console.print()
    console.print(table)
    console.print(
        f"the best: {found.bound:,.2f} s, the longer of {found.rollout:,.2f} s for the tickets of a step and "
        f"{found.training:,.2f} s for update and publication"
    )
    least = f"the least that reaches {ENOUGH}: [bold green]max_lag {found.least}[/]"
    console.print(f"none of these reaches {ENOUGH} of it" if found.least is None else least)


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 120, highlight=False)


def _table(first: str, *titles: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 0, 0, 1))
    table.add_column(first, no_wrap=True, overflow="fold")
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True, overflow="fold")
    return table


def _cells(expected: Forecast) -> list[str]:
    memory = "?" if expected.device_bytes is None else _size(expected.device_bytes)
    return [
        _number(expected.throughput),
        *map(_number, (expected.iteration, expected.rollout, expected.update)),
        ", ".join(f"{100 * expected.idle[role]:3.0f}" for role in ("sim", "policy", "learner")),
        memory,
        _size(expected.host_bytes) if expected.host_bytes else "-",
    ]


def _number(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.{2 if value < 10 else 1 if value < 100 else 0}f}"


def _size(count: float) -> str:
    """GiB."""
    return f"{count / GIB:,.1f}" if count >= GIB / 10 else f"{count / GIB:.3f}"
