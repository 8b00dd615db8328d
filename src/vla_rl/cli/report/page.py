"""The page: sections of HTML that need nothing but themselves, not even a network."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

from attrs import asdict

from vla_rl.cli.report.charts import PHONE, SCREEN, format_number, metric_figure, success_chart
from vla_rl.cli.report.gather import ReportData
from vla_rl.cli.report.html import interval_table, render_document, render_name, render_section
from vla_rl.cli.report.timeline import draw_timelines

OVER_ESTIMATION = "imagination/over_estimation"
IMAGINATION_METRICS = {
    OVER_ESTIMATION: "success over-estimation",
    "imagination/success_rate": "success of imagined episodes",
    "world_model/replay_auc": "AUC of success, episodes imagined again",
    "world_model/action_accuracy": "the right one of 8 chunks found",
    "world_model/changed_psnr/1": "dB of changed pixels, one chunk on",
    "world_model/outcome_auc": "AUC of success after a chunk",
}
UPDATE = re.compile("update_([0-9]{1,15})")
IMAGE_BYTES = 4_000_000
"""A larger image is not put into the page."""


def imagination_section(run: ReportData) -> str:
    """The section; nothing of a run without a world model."""
    if not run.metric_series("world_model/updates"):
        return ""
    return render_section("Imagination", _totals_table(run) + _metric_charts(run) + _image(run))


def _totals_table(run: ReportData) -> str:
    totals: Mapping[str, Any] = run.results.get("imagination") or {}
    real = sum(int(m.get("rollout/env_steps", 0)) for m in run.steps)
    imagined = sum(int(m.get("imagination/env_steps", 0)) for m in run.steps)
    paused = sum(1 for m in run.steps if m.get("imagination/paused"))
    rows = {
        "actions in the simulator": f"{real:,}",
        "imagined": f"{imagined:,}",
        "updates of the world model": f"{int(run.metric_series('world_model/updates')[-1][1]):,}",
        "seconds of fitting": f"{sum(m.get('time/fit', 0.0) for m in run.steps):,.0f}",
        "training steps without imagined episodes": f"{paused} of {len(run.steps)}",
    }
    if totals.get("paused"):
        rows["not in the last one, because"] = str(totals["paused"])
    body = "".join(
        f'<tr><td>{escape(title)}</td><td class="text">{escape(value)}</td></tr>' for title, value in rows.items()
    )
    return f'<div class="card scroll"><table>{body}</table></div>'


def _metric_charts(run: ReportData) -> str:
    figures = ""
    for name, label in IMAGINATION_METRICS.items():
        pairs = run.metric_series(name)
        if len(pairs) < 2:
            continue
        ends = [run.metric_series(f"{name}{end}") for end in ("_low", "_high")]
        figures += metric_figure(name, label, pairs, ends if all(ends) else ())
    note = (
        '<p class="note">Success over-estimation: how much more often the policy succeeds in the world model than in '
        "the simulator, from the same first frames; band: 95 % interval. The others are of episodes that the model was "
        "not fitted to.</p>"
    )
    return f'<div class="multiples">{figures}</div>{note}' if figures else ""


def _image(run: ReportData) -> str:
    images = [p for p in sorted((run.folder / "imagined").glob("update_*.png")) if UPDATE.fullmatch(p.stem)]
    if not images or images[-1].stat().st_size > IMAGE_BYTES:
        return ""
    data, updates = b64encode(images[-1].read_bytes()).decode(), int(images[-1].stem.partition("_")[2])
    note = (
        f"Held-out episodes after {updates:,} updates, chunk by chunk from left to right, cameras side by side: "
        "recorded, and below it imagined from the first frame on with the same actions."
    )
    return (
        f'<div class="card scroll"><img class="strip" alt="recorded and imagined episodes" '
        f'src="data:image/png;base64,{data}"></div><p class="note">{note}</p>'
    )


METRICS = {
    "env/return": "return of an episode",
    "env/episode_length": "steps of an episode",
    "loss/total": "loss",
    "policy/approx_kl": "approximate KL",
    "policy/entropy": "entropy",
    "loss/clip_fraction": "clipped",
    "loss/value": "value loss",
    "policy/grad_norm": "gradient norm",
    "throughput/env_steps_per_s": "environment steps a second",
    "time/step": "seconds of a training step",
}
AHEAD = {
    "policy/lag_mean": "age of what is trained on, in steps",
    "rollout/ready_tickets": "tickets that wait to be trained on",
    "time/rollout": "seconds that learners waited for tickets",
}
"""Metrics shown when rollouts run ahead of training."""
MIN_STEPS = 3
"""A curve of fewer says nothing."""


def render_report(run: ReportData, video_bytes: int) -> str:
    """The whole page. `video_bytes`: of the episode videos in it, at most; the newest come first."""
    name = escape(str(run.spec.get("name", run.folder.name)))
    sections = [
        _page_header(run, name),
        _success_section(run),
        _tasks_section(run),
        _card_section(run),
        _learning_section(run),
        imagination_section(run),
        _time_section(run),
        _videos_section(run, video_bytes),
        _setup_section(run),
        f"<footer>Made by vla-rl report from {escape(str(run.folder.resolve()))}</footer>",
    ]
    return render_document(name, "".join(sections))


def _page_header(run: ReportData, name: str) -> str:
    results = run.results
    parts = {part: str(run.spec_section(part).get("type", "?")) for part in ("model", "env", "algorithm", "placement")}
    done = int(results.get("steps") or (run.steps[-1]["step"] if run.steps else 0))
    planned = run.spec_section("train").get("steps", done)
    state = "" if results else " so far; the run has no results yet"
    line = (
        f"{parts['model']} on {parts['env']} ({run.spec_section('env').get('num_envs', '?')} envs) with "
        f"{parts['algorithm']}, {parts['placement']} placement, {done} of {planned} steps{state}"
    )
    tiles = "".join(
        f'<div class="tile {kind}"><span>{escape(title)}</span><b>{escape(value)}</b><span>{escape(note)}</span></div>'
        for title, value, note, kind in _list_tiles(run)
    )
    return f'<header><h1>{name}</h1><p>{escape(line)}</p></header><div class="tiles">{tiles}</div>'


def _list_tiles(run: ReportData) -> Iterator[tuple[str, str, str, str]]:
    """(title, value, note, class)."""
    results = run.results
    after, before = results.get("success"), results.get("success_before")
    if after:  # better or worse than before training; where that is not known, good unless there was none
        then = before["rate"] if before else 0.0
        css = "better" if after["rate"] > then else "worse" if after["rate"] < then else ""
        yield _success_tile("success", after, css)
    if before:
        yield _success_tile("before training", before)
    if not results:
        for point in dict.fromkeys([*run.evaluations[-1:], *run.evaluations[:1]]):
            title = f"success after step {point.step}" if point.step else "before training"
            yield _success_tile(title, asdict(point))
    speed = [value for _, value in run.metric_series("throughput/env_steps_per_s")]
    if speed:
        yield "env steps a second", format_number(round(sorted(speed)[len(speed) // 2], 1)), "median of the steps", ""
    steps = results.get("env_steps") or sum(int(m.get("rollout/env_steps", 0)) for m in run.steps)
    if steps:
        yield "environment steps", f"{steps:,.0f}" if steps < 1e6 else f"{steps / 1e6:,.2f} M", "single actions", ""
    seconds = results.get("wall_seconds") or sum(m.get("time/step", 0.0) for m in run.steps)
    if seconds:
        size, unit = (3600, "h") if seconds >= 3600 else (60, "min") if seconds >= 60 else (1, "s")
        yield "wall time", f"{seconds / size:.1f} {unit}", "" if results else "of training steps", ""
    if results.get("faults"):
        yield "faults", str(results["faults"]), "envs that broke", ""
    if results.get("missing"):
        yield "no result", str(len(results["missing"])), "evaluation episodes in which envs broke", ""
    if immediate := results.get("immediate_successes"):
        yield "succeeded at once", str(immediate), "evaluation episodes whose states may be solved already", ""


def _success_section(run: ReportData) -> str:
    rollouts = run.rollout_points
    if not rollouts and not run.evaluations:
        return render_section(
            "Success", '<p class="note">No metrics.jsonl: the run had no jsonl hook, or no step yet.</p>'
        )
    last = max([p.step for p in (*rollouts, *run.evaluations)])
    legend = '<div class="legend">'
    legend += '<span><i class="rollout"></i>rollouts, with exploration</span>' if rollouts else ""
    legend += '<span><i class="policy"></i>evaluations on held-out states</span>' if run.evaluations else ""
    legend += "<span>bands and bars: 95 % Wilson intervals</span></div>"
    chart = "".join(success_chart(rollouts, run.evaluations, last, shape) for shape in (SCREEN, PHONE))
    return render_section("Success", f'<div class="card">{chart}{legend}</div>')


def _tasks_section(run: ReportData) -> str:
    tasks: Mapping[str, Any] = run.results.get("tasks") or {}
    if not tasks:
        return ""
    success, start = run.results.get("success"), run.results.get("success_before")
    rows = {"all": success, **tasks} if len(tasks) > 1 and success else tasks
    before = run.results.get("tasks_before") or {}
    if before and start:
        before = {"all": start, **before}
    return render_section("Tasks", interval_table("task", rows, before))


def _card_section(run: ReportData) -> str:
    card = run.results.get("refute")
    if not card:
        return ""
    rows = {"as it is": run.results["success"], **{entry["name"]: entry["success"] for entry in card["entries"]}}
    note = "; ".join(card["shortcuts"]) or "no shortcut was found"
    return render_section(
        "What success depends on", interval_table("without", rows) + f'<p class="note">{escape(note)}</p>'
    )


def _learning_section(run: ReportData) -> str:
    figures = ""
    for name, label in (METRICS | AHEAD if run.metric_series("rollout/ready_tickets") else METRICS).items():
        pairs = run.metric_series(name)
        if len(pairs) >= MIN_STEPS:
            figures += metric_figure(name, label, pairs)
    return render_section("Learning, over training steps", f'<div class="multiples">{figures}</div>') if figures else ""


def _time_section(run: ReportData) -> str:
    roles: Mapping[str, Any] = run.results.get("roles") or run.trace.get("otherData", {}).get("roles") or {}
    drawings = draw_timelines(run.trace)
    if not roles and not drawings:
        return ""
    content = ""
    if roles:
        causes = list(next(iter(roles.values()))["waits_for"])
        titles = [escape(title) for title in ("busy", *(f"waits for {cause}" for cause in causes), "bubbles")]
        head = "".join(f"<th>{title}</th>" for title in (*titles, ""))
        body = ""
        for role, usage in roles.items():
            shares = [usage["busy"], *(usage["waits_for"].get(c, 0.0) for c in causes), usage["bubbles"]]
            texts = [f"{100 * share:.1f} %" if share else "–" for share in shares]
            cells = "".join(f'<td data-title="{t}">{text}</td>' for t, text in zip(titles, texts, strict=True))
            title = f'{escape(role)} <span class="count">× {usage["workers"]}</span>'
            body += f'<tr><td class="name">{title}</td>{cells}<td class="wide">{_usage_bar(role, usage)}</td></tr>'
        note = (
            "Shares of each role's time in the training steps. Bubbles: idle time within the role's own part of a "
            "step. Messages: no role works; processes talk, or the driver judges and writes."
        )
        legend = "".join(f'<span><i class="{escape(c)}"></i>{escape(c)}</span>' for c in causes)
        content += (
            f'<div class="card"><div class="scroll"><table class="roles"><tr><th>role</th>{head}</tr>{body}</table>'
            f'</div><div class="legend"><span>full colour: works; pale: waits for</span>{legend}</div>'
            f'<p class="note">{note}</p></div>'
        )
    if drawings:
        drawn = "".join(f"<h3>{escape(title)}</h3>{svg}" for title, svg in drawings)
        legend = "".join(f'<span><i class="{c}"></i>{c}</span>' for c in ("driver", "sim", "policy", "learner"))
        note = "Lanes of a role in shades; hover for the call. Every call of the last steps: trace.json, in Perfetto."
        content += f'<div class="card">{drawn}<div class="legend">{legend}</div><p class="note">{note}</p></div>'
    return render_section("Time", content)


def _usage_bar(role: str, usage: Mapping[str, Any]) -> str:
    parts = [(role, "", usage["busy"]), *((cause, " wait", share) for cause, share in usage["waits_for"].items())]
    spans = "".join(f'<span class="{escape(c)}{w}" style="width:{100 * s:.2f}%"></span>' for c, w, s in parts if s)
    return f'<div class="bar">{spans}</div>'


def _videos_section(run: ReportData, limit: int) -> str:
    if not run.videos:
        return ""
    figures, left, missing = "", limit, len(run.videos)
    for video in run.videos:
        size = video.stat().st_size
        if size > left:
            continue
        left -= size
        missing -= 1
        data = b64encode(video.read_bytes()).decode()
        figures += (
            f'<figure><video controls muted loop preload="metadata" src="data:video/mp4;base64,{data}"></video>'
            f"<figcaption>{_video_caption(video, run.captions)}</figcaption></figure>"
        )
    note = f'<p class="note">{missing} more in {escape(str(run.folder / "videos"))}</p>' if missing else ""
    return render_section("Episodes", f'<div class="videos">{figures}</div>{note}')


def _video_caption(video: Path, captions: Mapping[str, tuple[str, str]]) -> str:
    """Return instruction, task, step, episode and outcome; the last three from the file's name."""
    head, _, rest = video.stem.partition("_ep")
    episode, _, outcome = rest.partition("_")
    step = head.removeprefix("step_").lstrip("0") or "0"
    task, instruction = captions.get(video.name, ("", ""))
    where = ", ".join([*([task] if task else []), f"step {step}", *([f"episode {episode}"] if episode else [])])
    title = f"<b>{escape(instruction)}</b>" if instruction else ""
    badge = f'<span class="outcome {escape(outcome)}">{escape(outcome)}</span>'
    return f'{title}<span class="where"><span>{render_name(where)}</span>{badge}</span>'


def _setup_section(run: ReportData) -> str:
    environment = run.environment
    rows = ""
    for title, value in (
        ("versions", environment.get("versions")),
        ("platform", environment.get("platform")),
        ("CPUs", environment.get("cpus")),
        ("GPUs", environment.get("gpus") or ("none" if environment else None)),
        ("renderer", environment.get("renderer")),
        ("command", environment.get("argv")),
        ("plugins", environment.get("plugins")),
        ("notes", run.results.get("notes")),
    ):
        if value:
            rows += f'<tr><td>{title}</td><td class="text">{escape(_format_value(value))}</td></tr>'
    machine = f"<details><summary>Environment</summary><table>{rows}</table></details>" if rows else ""
    spec = f"<details open><summary>Spec, with all defaults</summary><pre>{escape(run.spec_text)}</pre></details>"
    return render_section("Set-up", _checkpoint_keys(run) + machine + spec)


def _checkpoint_keys(run: ReportData) -> str:
    """Return the keys that came with a known checkpoint, each with the file or page that says so."""
    checkpoint = run.results.get("checkpoint")
    if not checkpoint:
        return ""
    rows = "<tr><th>key</th><th>value</th><th>source</th></tr>"
    for key, known in checkpoint["keys"].items():
        value = json.dumps(known.get("value"))
        if "known" in known:
            value += f", known as {json.dumps(known['known'])}"
        cells = (key, value, known.get("source", ""))
        rows += "<tr>" + "".join(f'<td class="text">{escape(str(cell))}</td>' for cell in cells) + "</tr>"
    title = escape(f"Keys that go with {checkpoint.get('name', 'the checkpoint')}")
    return f'<details><summary>{title}</summary><div class="scroll"><table>{rows}</table></div></details>'


def _success_tile(title: str, success: Mapping[str, Any], css: str = "") -> tuple[str, str, str, str]:
    interval = f"{100 * success['low']:.1f} to {100 * success['high']:.1f} %, n\u00a0=\u00a0{success['n']}"
    return title, f"{100 * success['rate']:.1f} %", interval, css


def _format_value(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(
            f"{k}{':' if isinstance(v, Mapping) else ''} {_format_value(v)}" for k, v in value.items() if v
        )
    if isinstance(value, list):
        return " ".join(map(str, value))
    return str(value)
