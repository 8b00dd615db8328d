"""`vla-rl eval`."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import typer
from attrs import frozen

from vla_rl.cli.benchmark.run import describe_missing, evaluate_suite, rate_line
from vla_rl.cli.benchmark.suites import load_benchmark
from vla_rl.cli.inputs import checkpoint_of, name_of, read_spec
from vla_rl.cli.protocol.protocols import protocol_record, with_protocol
from vla_rl.core.errors import UserError
from vla_rl.core.paths import check_file, check_folder, explain_path_errors, write_whole
from vla_rl.core.spec.spec import Component, Spec, make_component
from vla_rl.runtime.checks.run import check_spec
from vla_rl.runtime.comm.status_line import StatusLine
from vla_rl.runtime.driver.evaluation.checkpoint_evaluation import NotRecorded, Progress
from vla_rl.runtime.start import evaluate
from vla_rl.toolkit.data.recording import RecordSettings

logger = logging.getLogger(__name__)


def main(
    what: Path,
    overrides: Sequence[str],
    *,
    policy: str | None,
    output: Path | None,
    benchmark: str | None,
    suites: Sequence[str],
    folder: Path | None,
    record: Path | None,
    protocol: str | None,
) -> None:
    """Print the success of one evaluation, or of all suites of a benchmark; arguments as on the command line.

    Raises UserError: a place that cannot be written, before the first episode; what could not be written at the end,
    after the result was printed.
    """
    if record is not None:
        check_folder("--record", record)
    settings: dict[str, Any] = {"overrides": overrides, "policy": policy, "protocol": protocol, "record": record}
    if benchmark is not None:
        if output is not None:
            raise UserError("--output is for a single evaluation; a benchmark's suites go to --folder, a file each")
        evaluate_benchmark(what, benchmark, suites=suites, folder=folder, say=typer.echo, **settings)
        return
    if suites or folder:
        raise UserError("--suite and --folder are of a benchmark; name it: --benchmark libero")
    if output is not None:
        check_file("--output", output)
    try:
        result = evaluate_policy(what, **settings)
    except NotRecorded as exc:
        _print_result(exc.result, output)
        raise
    _print_result(result, output)


def evaluate_policy(
    what: Any,
    checkpoint: Path | None = None,
    *,
    overrides: Sequence[str],
    policy: str | None,
    protocol: str | None,
    record: Path | None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Return the success on the evaluation states; arguments and result as of `vla_rl.evaluate`."""
    source = _find_source(what, overrides, policy, protocol)
    return _evaluate_spec(source.read_spec(()), checkpoint or source.checkpoint, record, protocol, progress)


def evaluate_benchmark(
    what: Any,
    name: str,
    *,
    suites: Sequence[str],
    folder: Path | None,
    overrides: Sequence[str],
    policy: str | None,
    protocol: str | None,
    record: Path | None,
    say: Callable[[str], object],
) -> dict[str, dict[str, Any]]:
    """Return suite -> success on it; arguments as of `vla_rl.benchmark`. `say` receives the lines to print."""
    source, benchmark = _find_source(what, overrides, policy, protocol), load_benchmark(name)
    return evaluate_suite(
        benchmark,
        benchmark.choose_suites(list(suites) or None),
        policy or name_of(source.checkpoint, what if isinstance(what, str | Path) else "the model of a spec"),
        source.checkpoint,
        source.read_spec,
        partial(_evaluate_spec, record=record, protocol=protocol),
        folder or source.run_folder / "benchmarks" / Path(name).stem,
        say,
        optional=() if suites else benchmark.optional,
        check=partial(check_spec, training=False),
    )


@frozen
class _Source:
    """What is evaluated."""

    read_spec: Callable[[Sequence[str]], Spec]
    """Further overrides, which the user's own take precedence over -> the spec."""
    checkpoint: Path | None
    """Folder with the weights; None: the model as the spec builds it, or one that is served."""
    run_folder: Path
    """Folder of the run; without a run, the working directory."""


def _find_source(what: Any, overrides: Sequence[str], policy: str | None, protocol: str | None) -> _Source:
    """Return what a path, a spec or plain data means. Raises CheckpointError."""
    source, checkpoint, run_folder = what, None, Path()
    if isinstance(what, str | Path):
        source = Path(what)
        checkpoint = checkpoint_of(source) if policy is None or (source / "model").is_dir() else None
        source = checkpoint.parents[1] if checkpoint else source
        run_folder = source if (source / "spec.yaml").is_file() else run_folder
    own = list(overrides)
    if policy is not None:
        checkpoint = None
        own.insert(0, f"rollout.engine={{type: remote, url: {json.dumps(policy)}}}")

    def read_with(changes: Sequence[str]) -> Spec:
        def read_further(further: Sequence[str]) -> Spec:
            return read_spec(source, [*changes, *own, *further])[0]

        if protocol is None:
            return read_further(())
        return with_protocol(protocol, read_further, own, recorded=run_folder != Path())

    return _Source(read_with, checkpoint, run_folder)


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
    if result.get("missing"):
        typer.echo(describe_missing(result))
    if failed is not None:
        raise UserError(f"{failed}; what it would have held is printed above") from failed


def _evaluate_spec(
    spec: Spec, checkpoint: Path | None, record: Path | None, protocol: str | None, progress: Progress | None = None
) -> dict[str, Any]:
    line = StatusLine()
    hook = None if record is None else _recording_to(spec, record)

    def show_fault(text: str) -> None:
        line.clear()
        logger.warning("fault: %s", text)

    try:
        result = evaluate(spec, checkpoint, progress or line.show_progress, hook, show_fault)
    finally:
        line.clear()
    return result if protocol is None else {**result, "protocol": protocol_record(protocol, spec)}


def _recording_to(spec: Spec, folder: Path) -> Component:
    """Return the hook that records to a folder, with the settings of the spec's recording hook, if any."""
    own = next(
        (hook for hook in spec.hooks if isinstance(hook.config, RecordSettings)), make_component("hook", "lerobot")
    )
    return attrs.evolve(own, config=attrs.evolve(own.config, folder=folder, what="evaluation", every=0))
