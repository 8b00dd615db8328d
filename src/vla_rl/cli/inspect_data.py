"""`vla-rl data`: what is in a data set, and what is wrong with it, before a policy is trained on it; printed, and as a
page with findings, curves of all numbers, and images of each camera."""

from __future__ import annotations

import io
import json
import sys
from base64 import b64encode
from collections import Counter
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from attrs import asdict

from vla_rl.cli.report.charts import small_chart
from vla_rl.cli.report.html import render_document, render_section
from vla_rl.core.catalogue import load, missing_package
from vla_rl.core.errors import UserError
from vla_rl.runtime.placement.components import find_data_plugin
from vla_rl.toolkit.data.episodes import exclude_remedy
from vla_rl.toolkit.data.inspection.recorded import DataFinding, InspectedEpisode, RecordedData
from vla_rl.toolkit.data.inspection.report import InspectedData

LISTED = 8
"""Most tasks that are printed."""
NUMBERS = 32
"""Most numbers of a feature that are printed; rows of whole chunks have many."""


def open_recordings(folder: Path, kind: str | None = None) -> RecordedData:
    """Open a data set for inspection. `kind`: type of the data plugin; None: the one whose files the folder has. Raises
    UserError for a folder that cannot be read at all."""
    chosen = kind or find_data_plugin(folder)
    try:
        inspect = load("data", chosen).inspect
        if inspect is None:
            raise UserError(
                f"data plugin {chosen!r} has no `inspect`, which `vla-rl data` calls; the author can add it"
            )
        opened: RecordedData = inspect(folder)
    except ModuleNotFoundError as exc:
        raise missing_package("data", chosen, exc) from exc
    return opened


def describe_inspection(inspected: InspectedData) -> dict[str, Any]:
    """Return the inspection as plain data."""
    data = inspected.data
    lengths = [len(episode) for episode in data.episodes]
    features: dict[str, dict[str, Any]] = {}
    for name in data.features:
        rows = data.stack_rows(name).astype(np.float64)
        measures = {key: getattr(rows, key)(0).tolist() for key in ("min", "mean", "max", "std")}
        features[name] = {"names": list(data.names.get(name, ())), **measures}
    return {
        "folder": str(data.folder),
        "format": data.layout,
        "fps": data.fps,
        "episodes": len(data.episodes),
        "frames": sum(lengths),
        "lengths": {"least": min(lengths), "most": max(lengths), "median": float(np.median(lengths))},
        "tasks": dict(Counter(episode.task for episode in data.episodes)),
        "cameras": {views.camera: list(next(iter(views.sizes.values()), ())) for views in inspected.views},
        "features": features,
        "uncompared": inspected.uncompared,
        "findings": [asdict(finding) for finding in inspected.findings],
    }


def print_inspection(about: Mapping[str, Any], given: Any) -> int:
    """Print what is in a data set, or JSON, and the page's file. Return 1 if something is wrong."""
    if given.json:
        print(json.dumps(about, indent=1))
    else:
        _print_description(about)
    if given.page is not None:
        print(f"wrote {given.page}", file=sys.stderr if given.json else sys.stdout)
    return int(bool(about["findings"]))


def _print_description(about: Mapping[str, Any]) -> None:
    rate = ""
    if about["fps"]:
        minutes, seconds = divmod(int(about["frames"] / about["fps"]), 60)
        rate = f" at {about['fps']:g} fps, {minutes}:{seconds:02d} minutes"
    print(f"{about['folder']}: {about['format']}, {about['episodes']} episodes, {about['frames']:,} frames{rate}")
    lengths = about["lengths"]
    print(f"  lengths    {lengths['least']} to {lengths['most']} frames, median {lengths['median']:.0f}")
    tasks: Mapping[str, int] = about["tasks"]
    for number, (task, count) in enumerate(sorted(tasks.items(), key=lambda item: -item[1])[:LISTED]):
        print(f"  {'tasks' if not number else '':10} {count} x {task!r}")
    if len(tasks) > LISTED:
        print(f"  {'':10} and {len(tasks) - LISTED} others")
    for camera, size in about["cameras"].items():
        print(f"  camera     {camera}: {' x '.join(map(str, size)) or 'cannot be read'}")
    for name, feature in about["features"].items():
        print(f"  {name}")
        names = feature["names"] or [str(index) for index in range(len(feature["min"]))]
        for index, label in enumerate(names[:NUMBERS]):
            low, mean, high, std = (feature[key][index] for key in ("min", "mean", "max", "std"))
            print(f"    {label:24} {low:>11.4g} to {high:<11.4g} mean {mean:<11.4g} std {std:.4g}")
        if len(names) > NUMBERS:
            print(f"    and {len(names) - NUMBERS} other numbers")
    if about["uncompared"]:
        print(about["uncompared"])
    findings = [DataFinding(**finding) for finding in about["findings"]]
    if not findings:
        print("nothing wrong was found")
        return
    count = len(findings)
    print(f"{count} finding{'s' if count > 1 else ''}:")
    for finding in findings:
        print(f"  {finding.describe()}")
    episodes = {number for finding in findings for number in finding.episodes}
    if episodes and len(episodes) < about["episodes"]:
        print(f"to train without these episodes, set in `data`: {exclude_remedy(episodes)}")


CURVES = 200
"""Most points of a curve."""
SHOWN = 12
"""Most episodes whose images are shown: those with findings first."""
WIDTH = 240
"""Largest side of an image on the page, in pixels."""


def render_data_page(inspected: InspectedData) -> str:
    """Return the page, which needs no other file."""
    data = inspected.data
    frames = sum(map(len, data.episodes))
    tasks = Counter(episode.task for episode in data.episodes)
    line = f"{data.layout}, {len(data.episodes)} episodes, {frames:,} frames" + (
        f" at {data.fps:g} fps" if data.fps else ""
    )
    rows = "".join(f"<tr><td>{escape(task)}</td><td>{count}</td></tr>" for task, count in tasks.most_common())
    items = "".join(f"<li>{escape(finding.describe())}</li>" for finding in inspected.findings)
    findings = f"<ul>{items}</ul>" if items else "Nothing wrong was found."
    table = f'<div class="card"><table><tr><th>task</th><th>episodes</th></tr>{rows}</table></div>'
    return render_document(
        escape(data.folder.name),
        f"<header><h1>{escape(data.folder.name)}</h1><p>{escape(line)}</p></header>"
        + render_section("Findings", f'<div class="card">{findings}</div>')
        + render_section("Tasks", table)
        + "".join(render_section(escape(name), _draw_curves(data, name)) for name in data.features)
        + "".join(render_section(escape(camera), _show_images(inspected, camera)) for camera in data.cameras),
    )


def _draw_curves(data: RecordedData, feature: str) -> str:
    """Return a chart for each number: the median over the episodes at each share of their length, and the range in
    which nine of ten are."""
    share = np.linspace(0, 1, min(CURVES, max(len(episode) for episode in data.episodes)))
    rows = [episode.vectors[feature] for episode in data.episodes]
    resampled = np.stack([values[np.round(share * (len(values) - 1)).astype(np.int64)] for values in rows])
    low, middle, high = np.quantile(np.nan_to_num(resampled), [0.05, 0.5, 0.95], axis=0)
    names = data.names.get(feature, ())
    figures = ""
    for index in range(middle.shape[1]):
        name = names[index] if index < len(names) else f"number {index}"
        pairs, below, above = (
            list(zip((100 * share).tolist(), values[:, index].tolist(), strict=True)) for values in (middle, low, high)
        )
        figures += f"<figure><figcaption>{escape(name)}</figcaption>{small_chart(name, pairs, (below, above))}</figure>"
    note = "The median of all episodes, and the range of nine of ten, over the course of an episode in per cent."
    return f'<div class="multiples">{figures}</div><p class="note">{note}</p>'


def _show_images(inspected: InspectedData, camera: str) -> str:
    data = inspected.data
    suspect = {number for finding in inspected.findings if finding.subject == camera for number in finding.episodes}
    chosen = sorted(data.episodes, key=lambda episode: (episode.number not in suspect, episode.number))[:SHOWN]
    figures = "".join(_show_image(data, episode, camera, episode.number in suspect) for episode in chosen)
    return f'<div class="videos">{figures}</div>'


def _show_image(data: RecordedData, episode: InspectedEpisode, camera: str, suspect: bool) -> str:
    caption = f"episode {episode.number}" + (", see the findings" if suspect else "")
    try:
        image = data.read_image(episode, camera, len(episode) // 2)
    except UserError as exc:
        return f"<figure><figcaption><b>{caption}</b>{escape(str(exc))}</figcaption></figure>"
    from PIL import Image

    small = Image.fromarray(image)
    small.thumbnail((WIDTH, WIDTH))
    buffer = io.BytesIO()
    small.save(buffer, format="WEBP", quality=80)
    encoded = b64encode(buffer.getvalue()).decode()
    source = f"data:image/webp;base64,{encoded}"
    return (
        f'<figure><img src="{source}" alt="{escape(camera)} of {caption}" width="{small.width}" '
        f'height="{small.height}"><figcaption><b>{caption}</b>{escape(episode.task)}</figcaption></figure>'
    )
