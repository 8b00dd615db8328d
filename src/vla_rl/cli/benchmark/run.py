"""Evaluation of a policy on all suites of a benchmark, each measured once and kept at once; and the page of its table:
ours in the order of the field, published figures below, then the tasks of each suite."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from vla_rl.cli.benchmark.suites import Benchmark, mean_of
from vla_rl.cli.report.html import interval_table, render_document, render_section
from vla_rl.core.errors import UserError, format_count
from vla_rl.core.paths import check_file, check_folder, explain_path_errors, write_whole
from vla_rl.core.spec.spec import Spec
from vla_rl.core.spec.yaml import dump_yaml, value_at
from vla_rl.runtime.driver.evaluation.checkpoint_evaluation import NotRecorded
from vla_rl.runtime.run_folder.environment import library_versions
from vla_rl.runtime.run_folder.manifest import NAME as MANIFEST
from vla_rl.toolkit.json_files import read_record

Result = dict[str, Any]


def evaluate_suite(
    benchmark: Benchmark,
    suites: list[str],
    policy: str,
    checkpoint: Path | None,
    spec_with: Callable[[Sequence[str]], Spec],
    evaluate: Callable[[Spec, Path | None], Result],
    folder: Path,
    say: Callable[[str], object],
    optional: Collection[str] = (),
    check: Callable[[Spec], object] = lambda spec: None,
) -> dict[str, Result]:
    """Play what is not yet in `folder`, and write SUITE.json for each, and index.html over all that are there.

    Args:
        policy: how the table calls it.   spec_with: further overrides -> the spec.
        evaluate: evaluates one suite.   say: receives each suite's line.
        optional: suites that are left out, with the reason, where the spec or its `check` raises UserError.
    Raises UserError for a spec of another simulator; each suite's spec is read before the first is evaluated."""
    env_type = _env_type(benchmark, suites[0], spec_with)
    if env_type != benchmark.env:
        raise UserError(
            f"{benchmark.title} runs env {benchmark.env!r}, the spec has {env_type!r}; give a spec of that simulator, "
            f"with the cameras and the state that the policy knows"
        )
    specs: dict[str, Spec] = {}
    for name in suites:
        try:
            spec = spec_with(benchmark.suite_overrides(name))
            if name in optional:
                check(spec)
        except UserError as exc:
            if name not in optional:
                raise
            say(f"{name} is left out: {exc}")
        else:
            specs[name] = spec
    check_folder("--folder", folder)
    with explain_path_errors("--folder", folder):
        folder.mkdir(parents=True, exist_ok=True)
    slugs = {name: re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_") for name in specs}
    files = {name: folder / f"{slug}.json" for name, slug in slugs.items()}
    for file in (*files.values(), folder / "index.html"):
        check_file("--folder", file)
    results: dict[str, Result] = {}
    for name, spec in specs.items():
        file, mark = files[name], result_fingerprint(spec, checkpoint)
        record = _read_record(file)
        reused = record.get("fingerprint") == mark
        if not reused:
            unrecorded: NotRecorded | None = None
            try:
                result = evaluate(spec, checkpoint)
            except NotRecorded as exc:
                result, unrecorded = exc.result, exc
            record = {
                "benchmark": benchmark.title,
                "suite": name,
                "policy": policy,
                "fingerprint": mark,
                "spec": spec.to_dict(),
                "versions": library_versions(),
                **result,
            }
            write_result("--folder", file, record, say)
            if unrecorded is not None:
                raise unrecorded
        results[name] = record
        say(rate_line(name, record["success"]) + ("  (was there)" if reused else ""))
        if record.get("missing"):
            say(describe_missing(record))
        with explain_path_errors("--folder", folder):
            write_whole(folder / "index.html", render_benchmark(benchmark, policy, results))
    rates = benchmark.with_groups({name: 100 * result["success"]["rate"] for name, result in results.items()})
    mean = mean_of(rates, benchmark.mean)
    if mean is not None:
        say(f"mean of {', '.join(benchmark.mean)}: {mean:.1f} %")
    say(f"wrote {folder / 'index.html'}")
    return results


def _env_type(benchmark: Benchmark, suite: str, spec_with: Callable[[Sequence[str]], Spec]) -> str:
    """Return the simulator of a spec, which may be complete only with a suite's keys: the command line may change keys
    (`env.plus.sample`) that exclude those of the spec (`env.suite`)."""
    try:
        return spec_with(()).env.type
    except UserError:
        return spec_with(benchmark.suite_overrides(suite)).env.type


def _read_record(file: Path) -> Result:
    """Return an earlier evaluation's results; empty if none exist. Raises UserError for another kind of file."""
    if not file.is_file():
        return {}
    try:
        return dict(read_record(file).data)
    except UserError as exc:
        raise UserError(
            f"{file} is not a suite's result, and one would replace it ({exc}); remove it, or choose another --folder"
        ) from exc


class NotSaved(UserError):
    """Error for an evaluation whose file could not be written."""

    def __init__(self, result: Result, cause: UserError) -> None:
        super().__init__(f"{cause}; what it would have held is printed above")
        self.result = result


def write_result(option: str, file: Path, result: Result, say: Callable[[str], object] = print) -> None:
    """Write a result, or say all of it where that is not possible. `option`: what named the file."""
    text = json.dumps(result, indent=1)
    try:
        with explain_path_errors(option, file):
            write_whole(file, f"{text}\n")
    except UserError as exc:
        say(text)
        raise NotSaved(result, exc) from exc
    except KeyboardInterrupt:  # a pipe without a reader
        say(text)
        raise


def result_fingerprint(spec: Spec, checkpoint: Path | None) -> str:
    """Return a hash of everything that determines a result: it differs for another spec or other weights."""
    manifest = checkpoint / MANIFEST if checkpoint else None
    weights = manifest.read_bytes() if manifest is not None and manifest.exists() else str(checkpoint).encode()
    text = json.dumps(spec.to_dict(), sort_keys=True, default=str)
    return hashlib.sha256(text.encode() + weights).hexdigest()


def rate_line(name: str, rate: Mapping[str, float], width: int = 24) -> str:
    """A success rate in one line, with its interval and n."""
    bounds = f"[{100 * rate['low']:.1f}, {100 * rate['high']:.1f}]"
    return f"{name:<{width}}  {100 * rate['rate']:5.1f} %  {bounds:<14} n={rate['n']}"


def describe_missing(result: Mapping[str, Any]) -> str:
    """Describe the episodes of an evaluation that have no result."""
    missing = result["missing"]
    states = dict.fromkeys(f"state {episode['state']} of task {episode['task']!r}" for episode in missing)
    total = result["success"]["n"] + len(missing)
    return f"no result, as envs broke, for {len(missing)} of {format_count(total, 'episode')}: {', '.join(states)}"


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
