"""Model card of a checkpoint, from its run's records: a README for a model repository, and the curve of its success."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from html import escape
from importlib import resources
from string import Template
from typing import Any

import attrs

from vla_rl.cli.report.charts import IMAGE, success_chart
from vla_rl.cli.report.gather import ReportData
from vla_rl.core.spec.yaml import dump_yaml

WHITE = '<rect width="100%" height="100%" fill="white"/>'
DARK = "@media (prefers-color-scheme: dark)"
FONT = "svg { font: 12px system-ui, sans-serif; }"
LABELS = ".tick { font-size: 15px; }"
"""Size of the labels: 10 px in an image that is scaled to 440 px, the width of a page on a phone."""
DRAWN = tuple(f".{name} " for name in ("grid", "tick,", "line", "band", "eval", "eval-line"))
"""Beginnings of the rules that a chart needs."""


def success_curve(run: ReportData) -> str:
    """Success over training as a separate image (SVG)."""
    last = max((point.step for point in (*run.rollout_points, *run.evaluations)), default=1)
    style = _read_resource("report/style.css")
    colours = dict(re.findall(r"(--[a-z]+): (#[0-9a-f]+);", style.partition(DARK)[0]))
    rules = "".join(line for line in style.splitlines() if line.startswith(DRAWN))
    rules = re.sub(r"var\((--[a-z]+)\)", lambda name: colours[name[1]], rules)  # not every viewer knows variables
    image = success_chart(run.rollout_points, run.evaluations, last, IMAGE)
    head, _, rest = image.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1).partition(">")
    return f"{head}><style>{FONT}{rules}{LABELS}</style>{WHITE}{rest}\n"


def render_card(run: ReportData, step: int, title: str, suffix: str = "", library: str = "vla-rl") -> str:
    """Return the README.

    Args:
        step: training step of the checkpoint.
        suffix: text that follows every instruction of the policy (`VLAModel.instruction_suffix`).
        library: the one that the hub names as loading the folder.
    """
    kinds = {part: _escape_markdown(run.spec_section(part).get("type", "?")) for part in ("model", "env", "algorithm")}
    eval_result = find_evaluation(run, step)
    versions = run.results.get("versions") or {}
    arguments = (run.environment.get("argv") or [])[1:]
    return Template(_read_resource("model_card.md")).substitute(
        kinds,
        front=dump_yaml(_front_matter(title, kinds, eval_result, library)),
        title=title,
        step=step,
        steps=_escape_markdown(run.spec_section("train").get("steps", "?")),
        success=f"Step {step} was not evaluated." if eval_result is None else _success_text(run, eval_result),
        condition=_condition_text(suffix),
        command=shlex.join(["vla-rl", *arguments]) if arguments else "vla-rl run vla_rl_spec.yaml",
        versions=_escape_markdown(", ".join(f"{package} {version}" for package, version in versions.items()))
        or "not written down",
        notes="".join(f"\n- {_escape_markdown(note)}" for note in run.results.get("notes") or ()),
    )


def find_evaluation(run: ReportData, step: int) -> Mapping[str, Any] | None:
    """Return the evaluation at the checkpoint's step: success, and per task if the run ended with it."""
    if run.results.get("steps") == step and run.results.get("success"):
        return run.results
    point = next((point for point in run.evaluations if point.step == step), None)
    return None if point is None else {"success": attrs.asdict(point)}


def _front_matter(
    title: str, kinds: Mapping[str, str], eval_result: Mapping[str, Any] | None, library: str
) -> dict[str, Any]:
    """Return the front matter that the hub reads."""
    front: dict[str, Any] = {
        "library_name": library,
        "pipeline_tag": "robotics",
        "tags": ["robotics", "reinforcement-learning", "vision-language-action", *kinds.values()],
    }
    if eval_result is not None:
        rate = round(100 * eval_result["success"]["rate"], 1)
        measured = {"type": "success_rate", "value": rate, "name": "success, %"}
        task = {"type": "robotics", "name": "robot manipulation"}
        result = {"task": task, "dataset": {"type": kinds["env"], "name": kinds["env"]}, "metrics": [measured]}
        front["model-index"] = [{"name": title, "results": [result]}]
    return front


def _success_text(run: ReportData, eval_result: Mapping[str, Any]) -> str:
    tasks = eval_result.get("tasks") or {}
    rates = {
        "before training": run.results.get("success_before"),
        "all tasks": eval_result["success"],
        **(tasks if len(tasks) > 1 else {}),
    }
    table = ["| | success | 95 % interval | n |", "| --- | --- | --- | --- |"]
    for name, rate in rates.items():
        if rate:
            low, high, mid = (100 * rate[key] for key in ("low", "high", "rate"))
            table.append(f"| {_escape_markdown(name)} | {mid:.1f} % | {low:.1f} to {high:.1f} | {rate['n']} |")
    section = run.spec_section("eval")
    acts = "greedy actions" if section.get("greedy", True) else "sampled actions"
    limit = run.spec_section("rollout").get("max_steps")
    steps = f"at most {limit} steps" if limit else "the simulator's own step limit"
    repeats = section.get("repeats", 1)
    each = "one episode of each" if repeats == 1 else f"{repeats} episodes of each"
    protocol = f"States of the `eval` split, {each}; {acts}; {steps}."
    return "\n".join([*table, "", protocol, *_card_text(eval_result.get("refute"))])


def _card_text(card: Mapping[str, Any] | None) -> list[str]:
    """Return the lines about what the success depends on; none without `vla-rl eval --refute`."""
    if not card:
        return []
    rows = [
        f"| {_escape_markdown(e['name'])} | {e['success']['rate']:.1%} | {e['success']['n']} |" for e in card["entries"]
    ]
    findings = "; ".join(card["shortcuts"]) or "no shortcut was found"
    return [
        "",
        f"What the success depends on: {findings}.",
        "",
        "| without | success | n |",
        "| --- | --- | --- |",
        *rows,
    ]


def _condition_text(suffix: str) -> str:
    """Return the paragraph about the text without which the policy is another one; empty without such a text."""
    if not suffix:
        return ""
    return (
        "\nThe policy acts with a condition: every instruction ends with this text, between the quotes:\n\n"
        f"```json\n{json.dumps(suffix, ensure_ascii=False)}\n```\n\n"
        "vla-rl appends it by itself (`instruction.json`). Other code has to append it, or the policy acts as one that "
        "was not conditioned.\n"
    )


def _escape_markdown(value: Any) -> str:
    """Return the value as text for a line or a table of Markdown, with HTML escaped."""
    return escape(str(value), quote=False).replace("|", "\\|").replace("\n", " ")


def _read_resource(name: str) -> str:
    return resources.files("vla_rl.cli").joinpath(name).read_text(encoding="utf-8")
