"""`vla-rl eval`."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import NormalDist
from typing import Any

from attrs import asdict, evolve, frozen

from vla_rl.cli.benchmark.run import describe_missing, evaluate_suite, rate_line, write_result
from vla_rl.cli.benchmark.suites import load_benchmark
from vla_rl.cli.inputs import checkpoint_of, name_of, read_spec
from vla_rl.cli.protocol.protocols import protocol_record, with_protocol
from vla_rl.cli.refute import keep_card, refute
from vla_rl.cli.report.gather import read_report_data
from vla_rl.cli.until import StoppingRule, describe_answer
from vla_rl.core.errors import UserError
from vla_rl.core.events import wilson_interval
from vla_rl.core.paths import check_file
from vla_rl.core.spec.spec import Component, Spec, make_component
from vla_rl.runtime.checks.run import check_spec
from vla_rl.runtime.comm.status_line import StatusLine
from vla_rl.runtime.driver.evaluation.checkpoint_evaluation import NotRecorded, Progress
from vla_rl.runtime.placement.components import describe_simulator
from vla_rl.runtime.run_folder.env_info import read_env_info
from vla_rl.runtime.start import evaluate
from vla_rl.toolkit.data.recording import RecordSettings

ERROR = 0.05


def describe_selection(checkpoint: Path | None, result: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return among how many evaluations of the run a checkpoint was the best, and its interval corrected for so many
    (Bonferroni): each of their intervals holds with 95 % at once. None: it was not chosen, as the last of a run is
    not."""
    if checkpoint is None:
        return None
    try:
        run = read_report_data(checkpoint.resolve().parents[1])
    except (UserError, OSError):
        return None
    step, n = result["step"], result["success"]["n"]
    rates = {point.step: point.rate for point in run.evaluations if point.n == n}  # of the same states
    if len(rates) < 2 or step == run.evaluations[-1].step or rates.get(step, -1.0) < max(rates.values()):
        return None
    z = NormalDist().inv_cdf(1 - ERROR / len(rates) / 2)
    corrected = wilson_interval(round(result["success"]["rate"] * n), n, z)
    return {"evaluations": len(rates), "steps": sorted(rates), "corrected": asdict(corrected)}


def describe_choice(selection: Mapping[str, Any]) -> str:
    """Return what a selection means, in one line."""
    corrected = selection["corrected"]
    return (
        f"the best of {selection['evaluations']} evaluations of its run on these states; corrected for the choice its "
        f"interval is [{100 * corrected['low']:.1f}, {100 * corrected['high']:.1f}]; other states would say more"
    )


logger = logging.getLogger(__name__)


@frozen
class EvaluationSource:
    """What is evaluated."""

    name: str
    read_spec: Callable[[Sequence[str]], Spec]
    """Further overrides, which the user's own take precedence over -> the spec."""
    checkpoint: Path | None
    """Folder with the weights; None: the model as the spec builds it, or one that is served."""
    run_folder: Path
    """Folder of the run; without a run, the working directory."""


@frozen(kw_only=True)
class PlannedEvaluation:
    """An evaluation, once or on the suites of a benchmark. Attributes as the arguments of `vla_rl.evaluate`."""

    source: EvaluationSource
    checkpoint: Path | None
    """Folder with other weights than those of the source."""
    record: Path | None
    protocol: str | None
    progress: Progress | None
    until: StoppingRule | None = None
    refute: Callable[[str], object] | None = None
    """Receives the lines of the card; None: there is none."""

    def evaluate_once(self, output: Path | None) -> dict[str, Any]:
        """Return the success, written to a file if one is given. Raises UserError with the result in `result` if that,
        or recording, failed at the end."""
        if output is not None:
            check_file("--output", output)
        try:
            result = self.evaluate_spec(self.source.read_spec(()), self.checkpoint or self.source.checkpoint)
            if self.refute is not None:
                result["refute"] = self.make_card(result, self.refute)
        except NotRecorded as exc:
            if output is not None:
                write_result("--output", output, exc.result)
            raise
        if output is not None:
            write_result("--output", output, result)
        return result

    def make_card(self, result: Mapping[str, Any], say: Callable[[str], object]) -> dict[str, Any]:
        """Return the card of an evaluation, which is kept in the run's results.json too."""
        spec, checkpoint = self.source.read_spec(()), self.checkpoint or self.source.checkpoint
        info = describe_simulator(spec) if checkpoint is None else read_env_info(checkpoint)
        plain = evolve(self, record=None, until=None, protocol=None)
        card = refute(spec, checkpoint, info, result, plain.evaluate_spec, say)
        keep_card(self.source.run_folder, checkpoint, card)
        return card

    def evaluate_suites(
        self, name: str, suites: Sequence[str], folder: Path | None, say: Callable[[str], object]
    ) -> dict[str, dict[str, Any]]:
        """Return suite -> success on it."""
        benchmark = load_benchmark(name)
        return evaluate_suite(
            benchmark,
            benchmark.choose_suites(list(suites) or None),
            self.source.name,
            self.checkpoint or self.source.checkpoint,
            self.source.read_spec,
            self.evaluate_spec,
            folder or self.source.run_folder / "benchmarks" / Path(name).stem,
            say,
            optional=() if suites else benchmark.optional,
            check=partial(check_spec, training=False),
        )

    def evaluate_spec(self, spec: Spec, checkpoint: Path | None) -> dict[str, Any]:
        line = StatusLine()
        hook = None if self.record is None else _recording_to(spec, self.record)

        def show_fault(text: str) -> None:
            line.clear()
            logger.warning("fault: %s", text)

        try:
            enough = None if self.until is None else self.until.is_answered
            result = evaluate(spec, checkpoint, self.progress or line.show_progress, hook, show_fault, enough)
        finally:
            line.clear()
        if self.until is not None:
            result["until"] = self.until.answer
        selection = describe_selection(checkpoint, result) if spec.eval.split == "eval" else None
        if selection is not None:
            result["selection"] = selection
        return result if self.protocol is None else {**result, "protocol": protocol_record(self.protocol, spec)}


def find_source(what: Any, overrides: Sequence[str], policy: str | None, protocol: str | None) -> EvaluationSource:
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

    name = policy or name_of(checkpoint, what if isinstance(what, str | Path) else "the model of a spec")
    return EvaluationSource(name, read_with, checkpoint, run_folder)


def print_result(result: dict[str, Any], given: Any) -> None:
    """Print the success rates. Those of a benchmark are printed as they come."""
    if given.benchmark is not None:
        return
    rows = {"all": result["success"], **(result.get("categories") or result["tasks"])}
    if (interventions := result.get("interventions")) is not None:
        rows["without interventions"] = interventions["unaided"]
    for name, rate in rows.items():
        print(rate_line(name, rate, max(map(len, rows))))
    if interventions is not None:
        print(f"interventions in {interventions['rate']:.1%} of all steps")
    for shortcut in result.get("refute", {}).get("shortcuts", ()):
        print(f"the card says: {shortcut}")
    if "selection" in result:
        print(describe_choice(result["selection"]))
    if "until" in result:
        print(describe_answer(result["until"]))
    if result.get("missing"):
        print(describe_missing(result))


def _recording_to(spec: Spec, folder: Path) -> Component:
    """Return the hook that records to a folder, with the settings of the spec's recording hook, if any."""
    own = next(
        (hook for hook in spec.hooks if isinstance(hook.config, RecordSettings)), make_component("hook", "lerobot")
    )
    return evolve(own, config=evolve(own.config, folder=folder, what="evaluation", every=0))
