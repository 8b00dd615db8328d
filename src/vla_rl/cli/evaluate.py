"""`vla-rl eval`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import typer

from vla_rl.cli.benchmark.run import evaluate_suite, rate_line
from vla_rl.cli.benchmark.suites import load_benchmark
from vla_rl.cli.protocol.protocols import protocol_record
from vla_rl.core.errors import UserError
from vla_rl.core.paths import check_file, check_folder, explain_path_errors, write_whole
from vla_rl.core.spec.spec import Component, Spec, make_component
from vla_rl.runtime.checks.run import check_spec
from vla_rl.runtime.comm.status_line import StatusLine
from vla_rl.runtime.driver.evaluation.checkpoint_evaluation import NotRecorded
from vla_rl.runtime.start import evaluate
from vla_rl.toolkit.data.recording import RecordSettings


def main(
    spec_with: Callable[[Sequence[str]], Spec],
    checkpoint: Path | None,
    policy: str,
    run_folder: Path,
    *,
    output: Path | None,
    benchmark: str | None,
    suites: list[str] | None,
    folder: Path | None,
    record: Path | None,
    protocol: str | None,
) -> None:
    """Print the success of one evaluation, or of all suites of a benchmark.

    Args:
        spec_with: further overrides -> the spec.   policy: how tables call it.
        home: folder of a benchmark's results, unless `folder` is given.
        record: folder of a data set that the episodes are appended to.
        protocol: name of the protocol that `spec_with` applies, for the result.
    Raises UserError: a place that cannot be written, before the first episode; what could not be written at the end,
    after the result was printed.
    """
    if record is not None:
        check_folder("--record", record)
    run_evaluation = partial(_evaluate_checkpoint, record=record, protocol=protocol)
    if benchmark is None:
        if suites or folder:
            raise UserError("--suite and --folder are of a benchmark; name it: --benchmark libero")
        if output is not None:
            check_file("--output", output)
        try:
            result = run_evaluation(spec_with(()), checkpoint)
        except NotRecorded as exc:
            _print_result(exc.result, output)
            raise
        _print_result(result, output)
        return
    if output is not None:
        raise UserError("--output is for a single evaluation; a benchmark's suites go to --folder, a file each")
    chosen = load_benchmark(benchmark)
    folder = folder or run_folder / "benchmarks" / Path(benchmark).stem
    evaluate_suite(
        chosen,
        chosen.choose_suites(suites),
        policy,
        checkpoint,
        spec_with,
        run_evaluation,
        folder,
        typer.echo,
        optional=() if suites else chosen.optional,
        check=partial(check_spec, training=False),
    )
    typer.echo(f"wrote {folder / 'index.html'}")


def _print_result(result: dict[str, Any], output: Path | None) -> None:
    """Write it, and print the success rates; all of it where it cannot be written."""
    text = json.dumps(result, indent=1) + "\n"
    failed: UserError | None = None
    if output is not None:
        try:
            with explain_path_errors("--output", output):
                write_whole(output, text)
        except UserError as exc:
            typer.echo(text, nl=False)
            failed = exc
        except KeyboardInterrupt:  # a pipe without a reader
            typer.echo(text, nl=False)
            raise
    rows = {"all": result["success"], **(result.get("categories") or result["tasks"])}
    if (interventions := result.get("interventions")) is not None:
        rows["without interventions"] = interventions["unaided"]
    for name, rate in rows.items():
        typer.echo(rate_line(name, rate, max(map(len, rows))))
    if interventions is not None:
        typer.echo(f"interventions in {interventions['rate']:.1%} of all steps")
    if failed is not None:
        raise UserError(f"{failed}; what it would have held is printed above") from failed


def _evaluate_checkpoint(
    spec: Spec, checkpoint: Path | None, record: Path | None, protocol: str | None
) -> dict[str, Any]:
    line = StatusLine()
    try:
        result = evaluate(spec, checkpoint, line.show_progress, None if record is None else recording_to(spec, record))
    finally:
        line.clear()
    return result if protocol is None else {**result, "protocol": protocol_record(protocol, spec)}


def recording_to(spec: Spec, folder: Path) -> Component:
    """Return the hook that records to a folder, with the settings of the spec's recording hook, if any."""
    own = next(
        (hook for hook in spec.hooks if isinstance(hook.config, RecordSettings)), make_component("hook", "lerobot")
    )
    return attrs.evolve(own, config=attrs.evolve(own.config, folder=folder, what="evaluation", every=0))
