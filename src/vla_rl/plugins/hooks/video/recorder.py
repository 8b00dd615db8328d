"""Evaluation videos: all cameras side by side above a caption with instruction and task, and the outcome at the end."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import imageio_ffmpeg
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from vla_rl.core.events import EpisodeFrames, Evaluation, Run
from vla_rl.core.paths import write_whole
from vla_rl.core.types import to_numpy
from vla_rl.plugins.hooks.video.config import VideoConfig

INK, FAINT, PAPER, PROGRESS = (235, 235, 235), (150, 150, 150), (24, 24, 27), (96, 125, 200)
OUTCOME = {True: ("SUCCESS", (52, 168, 83)), False: ("FAILURE", (217, 48, 37))}
GAP, MARGIN, LINE = 4, 8, 20
MIN_HEIGHT = 224
"""Least height in pixels to which camera images are enlarged, by whole factors: simulators that render 64 pixels are
legible then, and those of most checkpoints (224) stay as they are."""
MIN_WIDTH = 320
HOLD_SECONDS = 1.6
"""How long the last frame, the only one that shows the outcome, stays."""

logger = logging.getLogger(__name__)
Frames = np.ndarray[Any, Any]


class VideoRecorder:
    """Requests frames of evaluations and writes `videos/step_000020_ep0_success.mp4`, and what each shows into
    `videos/step_000020.json`."""

    def __init__(self, config: VideoConfig) -> None:
        self._config = config
        self._last_step = -1

    def on_run_start(self, run: Run) -> None:
        self._last_step = run.steps

    def frames_wanted(self, step: int) -> int:
        every = self._config.every
        return self._config.episodes if every == 0 or step % every == 0 or step == self._last_step else 0

    def on_eval_end(self, run: Run, step: int, evaluation: Evaluation) -> None:
        if not evaluation.frames:
            return
        folder = Path(run.folder) / "videos"
        folder.mkdir(exist_ok=True)
        for stale in folder.glob(f"step_{step:06d}_ep*.mp4"):
            stale.unlink()
        captions = []
        for number, episode in enumerate(evaluation.frames[: self._config.episodes]):
            outcome = OUTCOME[bool(episode.success)][0].lower()
            video = compose_video(episode)
            file = folder / f"step_{step:06d}_ep{number}_{outcome}.mp4"
            try:
                write_mp4(file, video, self._config.fps)
            except OSError as exc:  # includes the encoder's errors, with all that it printed
                file.unlink(missing_ok=True)
                error_lines = [line for line in str(exc).splitlines() if line.strip()]
                logger.warning(
                    "hook video could not encode %s, the run continues without it: %s", file, error_lines[:1] or exc
                )
                break
            captions.append({"file": file.name, "task": episode.task, "instruction": episode.instruction})
        write_whole(folder / f"step_{step:06d}.json", json.dumps({"episodes": captions}, indent=1) + "\n")


def compose_video(episode: EpisodeFrames, min_height: int = MIN_HEIGHT) -> Frames:
    """Return a video uint8 [frames, H, W, 3]: the cameras, enlarged to `min_height` by whole factors, above the
    caption, which shows the outcome in the last frame alone. H and W are even."""
    cameras = []
    for images in map(to_numpy, episode.images.values()):
        factor = -(-min_height // images.shape[1])
        cameras.append(images.repeat(factor, axis=1).repeat(factor, axis=2))
    height = max(camera.shape[1] for camera in cameras)
    width = max(sum(camera.shape[2] for camera in cameras) + GAP * (len(cameras) - 1), MIN_WIDTH)
    width += width % 2
    caption = _draw_caption(episode, width, ended=False)
    height += (height + len(caption)) % 2
    video = np.full((len(cameras[0]), height + len(caption), width, 3), PAPER, np.uint8)
    left = (width - sum(camera.shape[2] for camera in cameras) - GAP * (len(cameras) - 1)) // 2
    for camera in cameras:
        video[:, : camera.shape[1], left : left + camera.shape[2]] = camera
        left += camera.shape[2] + GAP
    video[:-1, height:] = caption
    video[-1, height:] = _draw_caption(episode, width, ended=True)
    for number, frame in enumerate(video, 1):  # a thin line of progress, at the end in the outcome's colour
        colour = OUTCOME[bool(episode.success)][1] if number == len(video) else PROGRESS
        frame[height : height + 2, : width * number // len(video)] = colour
    return video


def write_mp4(path: Path, video: Frames, fps: float) -> None:
    """Write H.264 that plays everywhere; the last frame is held for `HOLD_SECONDS`."""
    size = (video.shape[2], video.shape[1])
    options = ["-crf", "18", "-preset", "veryfast", "-movflags", "+faststart"]
    writer = imageio_ffmpeg.write_frames(
        str(path), size, fps=fps, macro_block_size=2, quality=None, output_params=options, ffmpeg_log_level="error"
    )
    writer.send(None)
    for frame in video:
        writer.send(np.ascontiguousarray(frame))
    for _ in range(round(HOLD_SECONDS * fps)):
        writer.send(np.ascontiguousarray(video[-1]))
    writer.close()


def _draw_caption(episode: EpisodeFrames, width: int, ended: bool) -> Frames:
    """Return the strip below the cameras: instruction and task, and the outcome of an episode that has `ended`."""
    large, small = ImageFont.load_default(size=15), ImageFont.load_default(size=12)
    lines = _wrap_text(episode.instruction, large, width - 2 * MARGIN)
    caption_bar = Image.new("RGB", (width, MARGIN + LINE * (len(lines) + 1) + MARGIN), PAPER)
    draw = ImageDraw.Draw(caption_bar)
    for number, line in enumerate(lines):
        draw.text((MARGIN, MARGIN + LINE * number), line, fill=INK, font=large)
    top = MARGIN + LINE * len(lines)
    word, colour = OUTCOME[bool(episode.success)]
    badge = draw.textlength(word, font=small) + 12
    if ended:
        draw.rounded_rectangle((width - MARGIN - badge, top, width - MARGIN, top + LINE - 2), radius=4, fill=colour)
        draw.text((width - MARGIN - badge + 6, top + 2), word, fill=(255, 255, 255), font=small)
    draw.text((MARGIN, top + 2), _wrap_text(episode.task, small, width - 3 * MARGIN - badge)[0], fill=FAINT, font=small)
    return np.asarray(caption_bar)


def _wrap_text(text: str, font: Any, width: float) -> list[str]:
    """Return lines no longer than `width` pixels, broken at spaces where possible."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if font.getlength(longer) <= width:
            lines[-1] = longer
            continue
        lines += [word] if lines[-1] else []
        lines[-1] = lines[-1] or word
        while font.getlength(lines[-1]) > width:
            fits = max(n for n in range(1, len(lines[-1]) + 1) if n == 1 or font.getlength(lines[-1][:n]) <= width)
            lines[-1:] = [lines[-1][:fits], lines[-1][fits:]]
    return lines
