"""A page about a data set: findings, curves of all numbers, and images of each camera."""

from __future__ import annotations

import io
from base64 import b64encode
from collections import Counter
from html import escape

import numpy as np

from vla_rl.cli.report.charts import small_chart
from vla_rl.cli.report.html import render_document, render_section
from vla_rl.core.errors import UserError
from vla_rl.toolkit.data.inspection.recorded import InspectedEpisode, RecordedData
from vla_rl.toolkit.data.inspection.report import InspectedData

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
