"""`vla-rl why`: the search through its stages, each of which ends it where it is certain."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attrs import asdict

from vla_rl.cli.report.gather import ReportData, pool_points, read_report_data
from vla_rl.cli.why.causes import Diagnosis
from vla_rl.cli.why.symptoms import RunFiles, find_symptoms
from vla_rl.core.errors import UserError
from vla_rl.runtime.run_folder.spec_file import load_run_spec


def find_causes(folder: Path, step: int | None, budget: str, say: Callable[[str], object]) -> Diagnosis:
    """Search the stages. Raises UserError for a folder without a run, and for a budget without a unit."""
    record = RunFiles(read_report_data(folder), load_run_spec(folder))
    run = record.run
    wall = float(run.results.get("wall_seconds") or sum(m.get("time/step", 0.0) for m in run.steps))
    diagnosis = Diagnosis(budget_s=budget_seconds(budget, wall))
    if not run.steps:
        diagnosis.not_looked_at.append("stage 1: there are no metrics; set hooks: [{type: jsonl}]")
    diagnosis.causes += find_symptoms(record)
    if diagnosis.is_certain:
        diagnosis.not_looked_at.append("stages 2 and 3: the run's files are certain")
    else:
        from vla_rl.cli.why.stages import repeat_and_compare  # imports torch

        try:
            repeat_and_compare(diagnosis, record, step, say)
        except UserError as exc:
            diagnosis.not_looked_at.append(f"what a repeated step shows: {str(exc).splitlines()[0]}")
    diagnosis.end_search()
    if diagnosis.causes:
        diagnosis.answer, diagnosis.text = "causes", f"most likely: {diagnosis.causes[0].name}"
    elif improves(run):
        diagnosis.answer, diagnosis.text = "healthy", "healthy: success rises, and nothing contradicts it"
    return diagnosis


def budget_seconds(budget: str, wall_seconds: float) -> float:
    """Return the seconds of a budget such as "20%" of the run's time, or "90s". Raises UserError."""
    number, unit = budget[:-1], budget[-1:]
    if unit not in ("%", "s") or not number.replace(".", "", 1).isdigit():
        raise UserError(f"--budget {budget!r}: give a share of the run's time, such as 20%, or seconds, such as 90s")
    return float(number) if unit == "s" else wall_seconds * float(number) / 100


def improves(run: ReportData) -> bool:
    """Return whether success rises beyond chance, by evaluations or else by rollouts, or is above 90 %."""
    evaluations, rollouts = run.evaluations, run.rollout_points
    if evaluations and (evaluations[-1].low > 0.9 or evaluations[-1].low > evaluations[0].high):
        return True
    third = len(rollouts) // 3
    return third > 0 and pool_points(rollouts[-third:]).low > pool_points(rollouts[:third]).high


def print_diagnosis(diagnosis: Diagnosis, given: Any) -> None:
    """Print the answer, or JSON."""
    if given.json:
        print(json.dumps(asdict(diagnosis, filter=lambda attribute, _: attribute.init), indent=1))
        return
    print(diagnosis.text)
    for number, cause in enumerate(diagnosis.causes[:3], 1):
        print(f"{number}. {cause.name} (certainty {cause.certainty:.2f}, stage {cause.stage})")
        print(f"   {cause.evidence}\n   change: {cause.key}")
    print(f"repeated: {diagnosis.repeated or 'nothing'}")
    for name, cosine in diagnosis.compared.items():
        print(f"  cosine {cosine:5.2f} with the plain gradient of true returns: {name}")
    for text in diagnosis.not_looked_at:
        print(f"not looked at: {text}")
    print(f"{diagnosis.seconds:.1f} s of a budget of {diagnosis.budget_s:.1f} s")
