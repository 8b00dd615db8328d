"""Opens a data set for `vla-rl data`: the numbers of each episode, and images on demand."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import numpy as np
from attrs import evolve

from vla_rl.core.errors import UserError
from vla_rl.core.types import Array
from vla_rl.plugins.data.rlds.checks import find_files
from vla_rl.plugins.data.rlds.config import RLDSConfig
from vla_rl.plugins.data.rlds.dataset import OBSERVATION, STEPS, count_steps
from vla_rl.plugins.data.rlds.tfrecord import Example, Span, find_records, read_bytes, read_example
from vla_rl.toolkit.data.images import MAX_PIXELS, decode_image
from vla_rl.toolkit.data.inspection.recorded import DataFinding, InspectedEpisode, RecordedData

DEFAULTS = RLDSConfig(folder=Path())
MARKS = ("is_first", "is_last", "is_terminal")
"""Numbers that say where an episode begins and ends."""


def open_recordings(folder: Path) -> RecordedData:
    """Open the split `train` of a folder. Raise UserError for a folder without one complete data set."""
    files = find_files(RLDSConfig(folder=folder))
    episodes: list[InspectedEpisode] = []
    findings: list[DataFinding] = []
    images: dict[int, tuple[Path, dict[str, tuple[Span, ...]]]] = {}
    for number, record in enumerate(chain.from_iterable(map(find_records, files))):
        example = read_example(record)
        try:
            steps = count_steps(example.features)
            if not steps:
                findings.append(DataFinding(subject="rows", message="has no steps", episodes=(number,)))
                continue
            vectors = _read_vectors(example, steps)
            if DEFAULTS.action not in vectors:
                raise UserError(f"it has no {DEFAULTS.action}; it has: {', '.join(sorted(vectors)) or 'no numbers'}")
        except UserError as exc:
            findings.append(DataFinding(subject="rows", message=str(exc), episodes=(number,)))
            continue
        images[number] = record.file, _find_images(example, steps)
        episodes.append(
            InspectedEpisode(
                number=number,
                task=_read_task(example),
                times=np.arange(steps, dtype=np.float64),
                vectors=vectors,
            )
        )
    if not episodes:
        raise UserError(
            f"{folder}: none of its episodes can be read: {findings[0].message if findings else 'no records'}"
        )
    common = set.intersection(*(set(episode.vectors) for episode in episodes))
    widths = {name: {episode.vectors[name].shape[1] for episode in episodes} for name in common}
    for name in [name for name, sizes in widths.items() if len(sizes) > 1]:
        text = f"its episodes have {' and '.join(map(str, sorted(widths[name])))} numbers"
        findings.append(DataFinding(subject=name, message=text))
    kept = [name for name in episodes[0].vectors if len(widths.get(name, ())) == 1]

    def read_image(episode: InspectedEpisode, camera: str, frame: int) -> Array:
        file, spans = images[episode.number]
        if camera not in spans:
            raise UserError("it has another number of images than steps")
        try:
            return decode_image(read_bytes(file, spans[camera][frame]), MAX_PIXELS)
        except ValueError as exc:
            raise UserError(f"an image cannot be decoded ({exc})") from exc

    return RecordedData(
        folder=folder,
        layout="RLDS",
        fps=None,
        episodes=[evolve(episode, vectors={name: episode.vectors[name] for name in kept}) for episode in episodes],
        action=DEFAULTS.action,
        state=DEFAULTS.state if DEFAULTS.state in kept else None,
        cameras=sorted({name for _, spans in images.values() for name in spans}),
        read_image=read_image,
        findings=findings,
    )


def _read_vectors(example: Example, steps: int) -> dict[str, Array]:
    """Return the numbers of each step, by feature, float32 [steps, D]."""
    vectors = {}
    for full, feature in example.features.items():
        name = full.removeprefix(STEPS)
        numbers = feature.numbers
        if full.startswith(STEPS) and name not in MARKS and numbers is not None and len(numbers):
            if len(numbers) % steps:
                raise UserError(f"{name} has {len(numbers)} numbers in an episode of {steps} steps")
            vectors[name] = numbers.reshape(steps, -1).astype(np.float32)
    return vectors


def _find_images(example: Example, steps: int) -> dict[str, tuple[Span, ...]]:
    """Return the places of the images of each camera, where there is one for each step."""
    return {
        name.removeprefix(STEPS): feature.spans
        for name, feature in example.features.items()
        if name.startswith(STEPS + OBSERVATION) and feature.spans is not None and len(feature.spans) == steps
    }


def _read_task(example: Example) -> str:
    spans = example.features.get(STEPS + DEFAULTS.instruction)
    if spans is None or not spans.spans:
        return "unknown"
    return example.read_span(spans.spans[0]).decode("utf-8", "replace")
