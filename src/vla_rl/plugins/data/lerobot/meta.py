"""What `meta/` says, read into one form for versions 2 and 3 of the format."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from attrs import frozen

from vla_rl.core.errors import UserError


@frozen(kw_only=True)
class Clip:
    """Where the frames of one episode and camera are."""

    path: Path
    start: float
    """Seconds into the file."""


@frozen(kw_only=True)
class EpisodeMeta:
    index: int
    data: Path
    clips: Mapping[str, Clip]
    """Of features that are videos."""


@frozen(kw_only=True)
class Meta:
    features: Mapping[str, Mapping[str, Any]]
    tasks: Mapping[int, str]
    episodes: tuple[EpisodeMeta, ...]
    fps: float


def read_meta(folder: Path) -> Meta:
    """Raises UserError for a folder that is no data set of a known version."""
    try:
        info = json.loads((folder / "meta" / "info.json").read_text())
    except (OSError, ValueError) as exc:
        raise UserError(f"{folder} is no LeRobot data set: meta/info.json cannot be read ({exc})") from exc
    version = str(info.get("codebase_version", "none"))
    readers = {"v2": _version_2, "v3": _version_3}
    if version[:2] not in readers:
        raise UserError(
            f"{folder} is of LeRobot's format {version}; versions 2 and 3 are read (lerobot can convert it)"
        )
    try:
        tasks, episodes = readers[version[:2]](folder, info)
        meta = Meta(features=info["features"], tasks=tasks, episodes=episodes, fps=float(info["fps"]))
    except (OSError, KeyError, ValueError) as exc:
        raise UserError(f"{folder}: meta/ is not complete ({type(exc).__name__}: {exc})") from exc
    if not episodes:
        raise UserError(f"{folder}: meta/ lists no episodes; download it again")
    return meta


def check_files(folder: Path, episodes: Sequence[EpisodeMeta], videos: Collection[str]) -> None:
    """Raise UserError when rows, or these videos, of the episodes are not there."""
    files = {e.data for e in episodes} | {e.clips[name].path for e in episodes for name in videos}
    absent = sorted(path.relative_to(folder).as_posix() for path in files if not path.is_file())
    if absent:
        more = f" and {len(absent) - 3} more" if len(absent) > 3 else ""
        raise UserError(f"{folder} is half downloaded: it lacks {', '.join(absent[:3])}{more}")


def _videos(info: Mapping[str, Any]) -> list[str]:
    names = [name for name, feature in info["features"].items() if feature["dtype"] == "video"]
    if names and not info.get("video_path"):
        raise ValueError(f"info.json has videos ({', '.join(names)}) and no video_path")
    return names


def _version_2(folder: Path, info: Mapping[str, Any]) -> tuple[dict[int, str], tuple[EpisodeMeta, ...]]:
    """A file an episode; lists in JSON lines."""

    def episode(index: int) -> EpisodeMeta:
        words = {"episode_chunk": index // info["chunks_size"], "episode_index": index}
        return EpisodeMeta(
            index=index,
            data=folder / info["data_path"].format(**words),
            clips={
                name: Clip(path=folder / info["video_path"].format(video_key=name, **words), start=0.0)
                for name in _videos(info)
            },
        )

    tasks = {line["task_index"]: line["task"] for line in _lines(folder / "meta" / "tasks.jsonl")}
    return tasks, tuple(episode(line["episode_index"]) for line in _lines(folder / "meta" / "episodes.jsonl"))


def _lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def _version_3(folder: Path, info: Mapping[str, Any]) -> tuple[dict[int, str], tuple[EpisodeMeta, ...]]:
    """Many episodes a file; lists in Parquet."""
    table = pq.read_table(folder / "meta" / "tasks.parquet").to_pydict()
    texts = next(table[name] for name in ("task", "__index_level_0__") if name in table)
    tasks = dict(zip(table["task_index"], texts, strict=True))
    episodes = []
    for file in sorted((folder / "meta" / "episodes").rglob("*.parquet")):
        columns = [name for name in pq.read_schema(file).names if not name.startswith("stats/")]
        for row in pq.read_table(file, columns=columns).to_pylist():
            data = {"chunk_index": row["data/chunk_index"], "file_index": row["data/file_index"]}
            clips = {
                name: Clip(
                    path=folder
                    / info["video_path"].format(
                        video_key=name,
                        chunk_index=row[f"videos/{name}/chunk_index"],
                        file_index=row[f"videos/{name}/file_index"],
                    ),
                    start=float(row[f"videos/{name}/from_timestamp"]),
                )
                for name in _videos(info)
            }
            path = folder / info["data_path"].format(**data)
            episodes.append(EpisodeMeta(index=row["episode_index"], data=path, clips=clips))
    return tasks, tuple(sorted(episodes, key=lambda e: e.index))
