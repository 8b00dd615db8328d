"""A benchmark's table as a page: ours in the field's order, published figures below, then each suite's tasks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from vla_rl.cli.benchmark.suites import Benchmark, mean_of
from vla_rl.cli.report.html import interval_table, render_document, render_section
from vla_rl.core.spec.yaml import dump_yaml, value_at

Result = Mapping[str, Any]


def render_benchmark(benchmark: Benchmark, policy: str, results: Mapping[str, Result]) -> str:
    """Return the page of the suites that have been evaluated so far."""
    about = f"<p>{escape(benchmark.about)}</p>" if benchmark.about else ""
    parts = [
        f"<header><h1>{escape(benchmark.title)}</h1>{about}</header>",
        render_section("Success", _success_table(benchmark, policy, results)),
        *(render_section(name, interval_table(*_listed_rates(result))) for name, result in results.items()),
        _setup_section(results),
        "<footer>Made by vla-rl eval. Intervals: 95 %, Wilson.</footer>",
    ]
    return render_document(f"{escape(benchmark.title)}: {escape(policy)}", "".join(parts))


def _success_table(benchmark: Benchmark, policy: str, results: Mapping[str, Result]) -> str:
    rates = benchmark.with_groups({name: 100 * result["success"]["rate"] for name, result in results.items()})
    named = (*benchmark.suites, *benchmark.groups)
    order = [name for name in named if name in rates or any(name in p.rates for p in benchmark.published)]
    means = ["mean"] if benchmark.mean else []
    head = "".join(f"<th>{escape(name)}</th>" for name in ("policy", *order, *means, "source"))
    cells = [
        _format_measured(results[name]["success"]) if name in results else _format_percent(rates.get(name))
        for name in order
    ]
    mean = mean_of(rates, benchmark.mean)
    changes = "; ".join(_list_changes(benchmark, results))
    source = f"measured here{', changed (below)' if changes else ''}"
    rows = _table_row(f"<b>{escape(policy)}</b>", [*cells, *([_format_percent(mean)] if means else []), source])
    for published in benchmark.published:
        mean = published.mean if published.mean is not None else mean_of(published.rates, benchmark.mean)
        figures = [_format_percent(published.rates.get(name)) for name in order]
        rows += _table_row(
            escape(published.policy), [*figures, *([_format_percent(mean)] if means else []), escape(published.source)]
        )
    notes = ["In %, ours with 95 % intervals."]
    if changes:
        notes.append(f"Ours are of a changed benchmark: {changes}.")
    if benchmark.mean:
        notes.append(f"Mean of {', '.join(benchmark.mean)}.")
    if benchmark.published:
        notes.append("Published figures are as their source reports them; none was run here.")
    return (
        f'<div class="card"><div class="scroll"><table><tr>{head}</tr>{rows}</table></div>'
        f'<p class="note">{escape(" ".join(notes))}</p></div>'
    )


def _list_changes(benchmark: Benchmark, results: Mapping[str, Result]) -> Iterator[str]:
    """Name the keys, with their values, to which the command line gave other values than the benchmark."""
    for name, result in results.items():
        own = benchmark.suite_keys(name)
        values = {key: value_at(result["spec"], key.split(".")) for key in own}
        changed = [f"{key}={json.dumps(value)}" for key, value in values.items() if value != own[key]]
        if changed:
            yield f"{name} with {', '.join(changed)}"


def _format_measured(rate: Mapping[str, float]) -> str:
    return f'{100 * rate["rate"]:.1f}<br><span class="count">{100 * rate["low"]:.1f} to {100 * rate["high"]:.1f}</span>'


def _format_percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def _table_row(name: str, cells: Sequence[str]) -> str:
    return f"<tr><td>{name}</td>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _listed_rates(result: Result) -> tuple[str, dict[str, Any]]:
    """Return the rates that the page lists, and what they are of: categories of tasks where the simulator has any."""
    what = "category" if result.get("categories") else "task"
    rates = result["categories" if what == "category" else "tasks"]
    return what, {"all": result["success"], **rates} if len(rates) > 1 else rates


def _setup_section(results: Mapping[str, Result]) -> str:
    content = ""
    for name, result in results.items():
        notes = "".join(f'<p class="note">{escape(note)}</p>' for note in result.get("notes", ()))
        versions = escape(", ".join(f"{package} {version}" for package, version in result["versions"].items()))
        content += (
            f"<details><summary>{escape(name)}: spec, with all defaults</summary>{notes}"
            f'<p class="note">{versions}</p><pre>{escape(dump_yaml(result["spec"]))}</pre></details>'
        )
    return render_section("Set-up", content)
