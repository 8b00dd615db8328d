"""Lists the episodes of a data set: those that `meta/` names and, in a folder whose writer ended without lerobot's
`finalize()`, those that `data/` holds after them. lerobot lists ten episodes at a time."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vla_rl.core.errors import UserError
from vla_rl.plugins.data.lerobot.meta import Clip, EpisodeMeta, Info, Meta, is_cut, read_info, read_lists
from vla_rl.plugins.data.lerobot.video import open_container
from vla_rl.toolkit.data.arrow import arrow_name
from vla_rl.toolkit.data.episodes import format_numbers

logger = logging.getLogger(__name__)


def read_meta(folder: Path) -> Meta:
    """Read all of `meta/`. Raise UserError for what is no data set of a known version, and for invalid lists."""
    info = read_info(folder)
    tasks, episodes = read_lists(info)
    if info.version == "v3" and len(episodes) < (info.total_episodes or 1):
        episodes += find_unlisted(info, episodes)
    if not episodes:
        raise UserError(f"{folder}: meta/ lists no episodes; download it again")
    (often, count), *_ = Counter(e.index for e in episodes).most_common(1)
    if count > 1:
        raise UserError(f"{folder}: meta/ lists episode {often} {count} times; download it again")
    return Meta(features=info.features, tasks=tasks, episodes=tuple(episodes), fps=info.fps)


def find_unlisted(info: Info, listed: Sequence[EpisodeMeta]) -> list[EpisodeMeta]:
    """Return the episodes in `data/` that follow the listed ones, and log them. Raise UserError if no episode can be
    read at all. Videos that do not hold their frames are left out, and refused when such an episode is chosen."""
    files = sorted((info.folder / "data").rglob("*.parquet"))
    cut = [file for file in files if is_cut(file)]
    rows: dict[int, tuple[Path, int]] = {}
    for file in files:
        if file in cut:
            continue
        try:
            column = pq.read_table(arrow_name(file), columns=["episode_index"])["episode_index"].to_numpy()
        except (OSError, ValueError, LookupError, pa.ArrowException) as exc:
            raise UserError(f"{file} cannot be read ({exc}); download it again") from exc
        rows |= {index: (file, int((column == index).sum())) for index in np.unique(column).tolist()}
    last = max((episode.index for episode in listed), default=-1)
    unlisted = {int(index): rows[index] for index in sorted(rows) if index > last}
    lost = ""
    if cut:
        names = ", ".join(file.relative_to(info.folder).as_posix() for file in cut)
        videos = " (its videos are whole)" if info.video_names else ""
        lost = f"; {names} has no end, as of a program that was killed, and its rows are lost{videos}"
    if not unlisted and not listed:
        raise UserError(
            f"{info.folder}: meta/ lists no episodes and data/ holds none{lost}; what lerobot writes is complete once "
            "`dataset.finalize()` was called; record or download it again"
        )
    if unlisted or lost:
        read = f"; episodes {format_numbers(unlisted)} are read from data/" if unlisted else ""
        logger.warning(
            "%s: meta/ lists %d of %s episodes, as lerobot leaves a folder without `dataset.finalize()`%s%s",
            *(info.folder, len(listed), info.total_episodes or "its", read, lost),
        )
    episodes = [EpisodeMeta(index=i, data=file, clips={}, length=n) for i, (file, n) in unlisted.items()]
    clips = {name: _find_clips(info, name, listed, episodes) for name in info.video_names if episodes}
    return [
        EpisodeMeta(
            index=episode.index,
            data=episode.data,
            length=episode.length,
            clips={name: of_feature[place] for name, of_feature in clips.items() if of_feature},
        )
        for place, episode in enumerate(episodes)
    ]


def _find_clips(
    info: Info, name: str, listed: Sequence[EpisodeMeta], episodes: Sequence[EpisodeMeta]
) -> list[Clip] | None:
    """Return the clips of unlisted episodes, which follow each other in the video files after the listed ones; None
    where the files do not hold exactly these frames."""
    files = sorted((info.folder / "videos" / name).rglob("*.mp4"))
    before = [episode.clips[name] for episode in listed if name in episode.clips]
    start = 0.0
    if before:
        latest = max(before, key=lambda clip: (clip.path, clip.start))
        if latest.end is None or latest.path not in files:
            return None
        files, start = files[files.index(latest.path) :], latest.end
    clips: list[Clip] = []
    for episode in episodes:
        seconds = (episode.length or 0) / info.fps
        if files and abs(start - _read_duration(files[0])) < 0.5 / info.fps:
            files, start = files[1:], 0.0
        if not files or start + seconds > _read_duration(files[0]) + 0.5 / info.fps:
            return None
        clips.append(Clip(path=files[0], start=start, end=start + seconds))
        start += seconds
    return clips if len(files) == 1 and abs(start - _read_duration(files[0])) < 0.5 / info.fps else None


def _read_duration(file: Path) -> float:
    with open_container(file) as container:
        return float(container.duration or 0) / av.time_base
