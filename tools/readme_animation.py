r"""Make the animation in README.md: the same evaluation episodes before and after training, side by side.

    python tools/readme_animation.py runs/libero-spatial-ppo eval.episodes_per_task=4 \
        'env.cameras={agentview: 224, wrist: 64}'

It evaluates the weights that a run began with (`model.checkpoint` of its spec) and its newest checkpoint on the same
states, and records both in LeRobot's format in RUN/before-after. Existing recordings are used again. Then it draws
the instruction, both episodes in step, and the outcome of each where it ends.
"""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from attrs import frozen
from PIL import Image, ImageDraw, ImageFont

import vla_rl

ROOT = Path(__file__).parents[1]
OUT = ROOT / "docs" / "images" / "before-after.webp"
TITLES = ("before training", "after training")
PAPER, INK, FAINT = (24, 24, 27), (240, 240, 240), (165, 165, 172)
OUTCOME = {True: ("success", (34, 140, 70)), False: ("failure", (200, 45, 35))}
MARGIN, GAP, LINE = 12, 12, 26
QUALITIES = (80, 70, 60, 50, 40, 30, 20)
Frames = np.ndarray[Any, Any]


@frozen(kw_only=True, eq=False)
class RecordedEpisode:
    """A recorded episode as one camera saw it."""

    instruction: str
    success: bool
    frames: Frames
    """uint8 [steps, H, W, 3]."""


def record(run: Path, overrides: Sequence[str]) -> tuple[Path, Path]:
    """Record an evaluation of the run's first weights and one of its newest checkpoint. Return both data sets' folders,
    which are made only where they are not there yet."""
    before, after = run / "before-after" / "before", run / "before-after" / "after"
    for folder, source in ((before, run / "spec.yaml"), (after, run)):
        if not folder.exists():
            result = vla_rl.evaluate(source, overrides=overrides, record=folder)
            print(
                f"{folder.name}: success {100 * result['success']['rate']:.0f} % of {result['success']['n']} episodes"
            )
    return before, after


def read_episodes(folder: Path, camera: str | None = None) -> Iterator[RecordedEpisode]:
    """Yield the episodes of a recorded data set in order, one at a time. `camera`: default is the first one. Raises
    SystemExit for a folder that holds no recording or not this camera."""
    lists = sorted(folder.glob("meta/episodes/*/*.parquet"))
    if not lists:
        raise SystemExit(f"{folder} holds no recorded episodes; make some with `vla-rl eval RUN --record {folder}`")
    origins = [json.loads(line) for line in (folder / "meta" / "vla_rl.jsonl").read_text().splitlines()]
    lines = [line for file in lists for line in pq.read_table(str(file)).to_pylist()]
    for line, origin in zip(lines, origins, strict=True):
        chunk, number = line["data/chunk_index"], line["data/file_index"]
        table = pq.read_table(str(folder / f"data/chunk-{chunk:03d}/file-{number:03d}.parquet"))
        cameras = [name for name in table.column_names if name.startswith("observation.images.")]
        column = cameras[0] if camera is None else f"observation.images.{camera}"
        if column not in cameras:
            raise SystemExit(f"{folder} has no camera {camera!r}, but {', '.join(c.split('.')[-1] for c in cameras)}")
        images = [np.asarray(Image.open(io.BytesIO(cell["bytes"].as_py()))) for cell in table[column]]
        yield RecordedEpisode(instruction=line["tasks"][0], success=bool(origin["success"]), frames=np.stack(images))


def draw(pair: tuple[RecordedEpisode, RecordedEpisode], every: int, panel: int) -> list[Image.Image]:
    """Return the frames of two episodes side by side: one in `every` steps, cameras `panel` pixels wide.

    An episode that ended earlier stays at its last frame; its outcome is shown from there on."""
    shown = [_sampled(len(episode.frames), every) for episode in pair]
    return [
        _compose(pair, [rows[min(t, len(rows) - 1)] for rows in shown], [t >= len(rows) - 1 for rows in shown], panel)
        for t in range(max(map(len, shown)))
    ]


def _sampled(steps: int, every: int) -> list[int]:
    """Return each step whose number is a multiple of `every`, and the last one."""
    return sorted({*range(0, steps, every), steps - 1})


def _compose(
    pair: tuple[RecordedEpisode, RecordedEpisode], steps: Sequence[int], ended: Sequence[bool], panel: int
) -> Image.Image:
    large, small = ImageFont.load_default(size=19), ImageFont.load_default(size=17)
    width = 2 * panel + GAP + 2 * MARGIN
    lines = wrapped(f"“{pair[0].instruction}”", large.getlength, width - 2 * MARGIN)
    height = panel * pair[0].frames.shape[1] // pair[0].frames.shape[2]
    top = MARGIN + LINE * len(lines) + 6
    image = Image.new("RGB", (width, top + height + LINE + 2 * MARGIN), PAPER)
    canvas = ImageDraw.Draw(image)
    for number, line in enumerate(lines):
        canvas.text((width / 2, MARGIN + LINE * number), line, fill=INK, font=large, anchor="ma")
    below = top + height + MARGIN
    for number, (episode, step) in enumerate(zip(pair, steps, strict=True)):
        left = MARGIN + number * (panel + GAP)
        image.paste(
            Image.fromarray(episode.frames[step]).resize((panel, height), Image.Resampling.LANCZOS), (left, top)
        )
        canvas.text((left, below + 2), TITLES[number], fill=FAINT, font=small)
        if ended[number]:
            word, colour = OUTCOME[episode.success]
            badge = (left + panel - small.getlength(word) - 16, below - 2, left + panel, below + LINE - 2)
            canvas.rounded_rectangle(badge, radius=5, fill=colour)
            canvas.text((badge[0] + 8, below + 1), word, fill=(255, 255, 255), font=small)
    return image


def wrapped(text: str, length: Callable[[str], float], width: float) -> list[str]:
    """Return lines of whole words, each at most `width` long unless it is one word."""
    lines: list[str] = []
    for word in text.split():
        if lines and length(f"{lines[-1]} {word}") <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def assemble(
    before: Path,
    after: Path,
    out: Path,
    *,
    episodes: Sequence[int] | None = None,
    camera: str | None = None,
    every: int = 3,
    panel: int = 300,
    frame_ms: int = 80,
    hold_ms: int = 1600,
    max_mb: float = 2.0,
) -> None:
    """Write the animation, an endless WebP of at most `max_mb`: the quality is the best that fits.

    Args:
        before, after: recorded data sets of the same evaluation states.
        episodes: numbers of the pairs to show, in this order; None: all.
    Raises SystemExit for recordings that do not belong together, and where no quality fits."""
    frames: list[Image.Image] = []
    durations: list[int] = []
    pairs = list(zip(read_episodes(before, camera), read_episodes(after, camera), strict=False))
    for number in range(len(pairs)) if episodes is None else episodes:
        if not 0 <= number < len(pairs):
            raise SystemExit(f"there is no episode {number}; both recordings have 0 to {len(pairs) - 1}")
        pair = pairs[number]
        if pair[0].instruction != pair[1].instruction:
            raise SystemExit(f"episode {number} is of two tasks: {pair[0].instruction!r}, {pair[1].instruction!r}")
        drawn = draw(pair, every, panel)
        frames += drawn
        durations += [frame_ms] * (len(drawn) - 1) + [hold_ms]
    size = (max(frame.width for frame in frames), max(frame.height for frame in frames))
    frames = [_on_paper(frame, size) for frame in frames]
    for quality in QUALITIES:
        buffer = io.BytesIO()
        frames[0].save(
            buffer,
            "WEBP",
            save_all=True,
            append_images=frames[1:],
            duration=durations,
            loop=0,
            quality=quality,
            method=4,
        )
        if buffer.tell() <= max_mb * 1e6:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_bytes(buffer.getvalue())
            print(f"wrote {out}: {len(frames)} frames, {buffer.tell() / 1e6:.2f} MB, quality {quality}")
            return
    raise SystemExit(
        f"{len(frames)} frames take {buffer.tell() / 1e6:.1f} MB at quality {quality}; show fewer --episodes, a "
        "smaller --panel, or a larger --every"
    )


def _on_paper(frame: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Return the frame at the top of an image of this size: instructions take different numbers of lines."""
    image = Image.new("RGB", size, PAPER)
    image.paste(frame)
    return image


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a finished run")
    parser.add_argument("overrides", nargs="*", help="keys of the spec for both evaluations, such as larger cameras")
    parser.add_argument("--out", type=Path, default=OUT, help="file of the animation")
    parser.add_argument("--episodes", type=int, nargs="+", help="numbers of the episodes to show; default: all")
    parser.add_argument("--camera", help="default: the first one")
    parser.add_argument("--every", type=int, default=3, help="steps of the simulator from frame to frame")
    parser.add_argument("--panel", type=int, default=300, help="width of a camera in pixels")
    options = parser.parse_intermixed_args()
    before, after = record(options.run, options.overrides)
    assemble(
        before,
        after,
        options.out,
        episodes=options.episodes,
        camera=options.camera,
        every=options.every,
        panel=options.panel,
    )


if __name__ == "__main__":
    main()
