"""Locates a LeRobot data set (a folder, or one of the Hugging Face hub that was downloaded), and reads its `meta/` into
one form for versions 2 and 3 of the format. Imports little, since specs are checked with it."""

from __future__ import annotations

import math
import os
import re
import string
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from vla_rl.core.errors import UserError, did_you_mean
from vla_rl.toolkit.data.arrow import arrow_name
from vla_rl.toolkit.data.episodes import exclude_remedy
from vla_rl.toolkit.data.images import MAX_PIXELS
from vla_rl.toolkit.json_files import Record, path_inside, read_record, read_records

LIST_BYTES = 1 << 30
"""Most bytes of a JSON lines file that is read: the file of a million episodes has 200 MB."""
WORDS = {
    "v2": ("episode_chunk", "episode_index", "video_key"),
    "v3": ("chunk_index", "file_index", "video_key"),
}
"""Format version -> fields that the path templates `data_path` and `video_path` may use."""
WIDTHS, NO_WIDTH = re.compile("(0?1?[0-9])?d?"), re.compile("")
"""Format specs that a path template may use for numbers (`06d` in `{episode_index:06d}`) and for names (none)."""
MAGIC = b"PAR1"
"""First and last bytes of a Parquet file."""
IMAGE_TYPES = ("image", "video")
CHANNELS = ((1,), (3,), (4,))
VIDEO_INFO = ("info", "video_info")
DEPTH = ("is_depth_map", "video.is_depth_map")
"""Keys of a feature's description that mark depth maps, by versions of lerobot."""


@frozen(kw_only=True)
class Clip:
    """Location of the frames of one episode and camera in a video file."""

    path: Path
    start: float
    """Start of the episode within the file, in seconds."""
    end: float | None = None
    """End of the episode within the file, in seconds; None: the list of episodes does not say."""


@frozen(kw_only=True)
class EpisodeMeta:
    """Location and length of one episode."""

    index: int
    data: Path
    clips: Mapping[str, Clip]
    """Video feature -> its clip. A feature that the episode lacks is left out."""
    length: int | None
    """Number of frames, 0 for an episode without any; None where the list of episodes does not say."""


@frozen(kw_only=True)
class Feature:
    """A column of the data set, as info.json declares it."""

    dtype: str
    shape: tuple[int, ...]
    names: tuple[str, ...] = ()
    """Names of the numbers of a vector, in order; empty: not known."""
    is_depth: bool = False
    """The images are depth maps, not colours."""

    @property
    def is_image(self) -> bool:
        return self.dtype in IMAGE_TYPES


@frozen(kw_only=True)
class Info:
    """Contents of meta/info.json."""

    folder: Path
    version: str
    """Format version: v2 or v3."""
    fps: float
    features: Mapping[str, Feature]
    chunks_size: int
    data_path: str
    video_path: str
    total_episodes: int | None
    """Number of episodes; None: it does not say."""

    @property
    def video_names(self) -> list[str]:
        return [name for name, feature in self.features.items() if feature.dtype == "video"]

    def data_file(self, **words: Any) -> Path:
        return path_inside(self.folder, self.data_path.format(**words), f"{self.folder / INFO}: 'data_path'")

    def video_file(self, name: str, **words: Any) -> Path:
        path = self.video_path.format(video_key=name, **words)
        return path_inside(self.folder, path, f"{self.folder / INFO}: 'video_path'")


@frozen(kw_only=True)
class Meta:
    """Contents of `meta/`: features, tasks by index, episodes, and frames per second."""

    features: Mapping[str, Feature]
    tasks: Mapping[int, str]
    episodes: tuple[EpisodeMeta, ...]
    fps: float

    @property
    def video_names(self) -> list[str]:
        return [name for name, feature in self.features.items() if feature.dtype == "video"]


def read_info(folder: Path) -> Info:
    """Read meta/info.json. Raise UserError for a folder without a data set of a known version, and for invalid
    contents. Imports little: specs are checked with it."""
    info = read_record(folder / INFO)
    version = str(info.data.get("codebase_version", ""))
    if not version:
        raise UserError(
            f"{folder / INFO} has no `codebase_version`, which LeRobot always writes: it is of another tool, or was "
            "cut short; download the data set again, or choose its type in imitation.data"
        )
    if version[:2] not in WORDS:
        raise UserError(
            f"{folder} is of LeRobot's format {version:.40}; versions 2 and 3 are read (lerobot can convert it)"
        )
    features = {
        name: Feature(
            dtype=record.get_text("dtype"),
            shape=record.get_sizes("shape"),
            names=_vector_names(record),
            is_depth=any(record.get_section(part).data.get(key) is True for part in VIDEO_INFO for key in DEPTH),
        )
        for name, record in info.get_records("features").items()
    }
    has_videos = any(feature.dtype == "video" for feature in features.values())
    return Info(
        folder=folder,
        version=version[:2],
        fps=info.get_number("fps", above=0),
        features=features,
        chunks_size=info.get_integer("chunks_size", low=1) if version[:2] == "v2" else 1,
        data_path=_read_template(info, "data_path", version[:2]),
        video_path=_read_template(info, "video_path", version[:2]) if has_videos else "",
        total_episodes=info.get_integer("total_episodes") if info.has_value("total_episodes") else None,
    )


def read_lists(info: Info) -> tuple[dict[int, str], list[EpisodeMeta]]:
    """Read the tasks and the episodes that `meta/` lists. Raise UserError for invalid lists."""
    return {"v2": _version_2, "v3": _version_3}[info.version](info)


def pixels_of(folder: Path, name: str, feature: Feature) -> int:
    """Return the number of pixels of a frame of an image feature. Raise UserError for depth maps, and for a shape that
    is not an image's or too large to be read."""
    if feature.is_depth:
        raise UserError(
            f"{folder / INFO}: {name!r} is a depth map, and policies see colours; choose another feature in `cameras`"
        )
    shape = feature.shape
    sides = shape[:-1] if shape[-1:] in CHANNELS else shape[1:]
    if len(shape) != 3 or not 0 < math.prod(sides) <= MAX_PIXELS:
        raise UserError(
            f"{folder / INFO}: the 'shape' of {name!r} is {list(shape)}, [height, width, channels] of at most "
            f"{MAX_PIXELS:,} pixels is expected"
        )
    return math.prod(sides)


def find_feature_size(meta: Meta, where: str, name: str) -> int:
    """Return the count of numbers in a row of a feature. Raise UserError for a feature that is not there."""
    if name not in meta.features:
        raise UserError(
            f"{where} has no feature {name!r}{did_you_mean(name, meta.features)}\n  it has: {', '.join(meta.features)}"
        )
    return math.prod(meta.features[name].shape)


def check_files(folder: Path, episodes: Sequence[EpisodeMeta], videos: Collection[str]) -> None:
    """Raise UserError when data files, or files of these video features, are missing for any of the episodes, and for
    data files that are cut."""
    files = {e.data for e in episodes} | {e.clips[name].path for e in episodes for name in videos}
    absent = sorted(path.relative_to(folder).as_posix() for path in files if not path.is_file())
    if absent:
        more = f" and {len(absent) - 3} more" if len(absent) > 3 else ""
        raise UserError(f"{folder} is half downloaded: it lacks {', '.join(absent[:3])}{more}")
    cut = {path for path in {e.data for e in episodes} if is_cut(path)}
    if cut:
        lost = exclude_remedy(e.index for e in episodes if e.data in cut)
        raise UserError(
            f"{min(cut)} has no end, as of a download that was cut off, or a program that was killed before "
            f"lerobot's `dataset.finalize()`: its rows are lost; download it again, or leave its episodes out: {lost}"
        )


def is_cut(file: Path) -> bool:
    """Return whether a Parquet file has its beginning and lacks its end."""
    with file.open("rb") as opened:
        begins = opened.read(len(MAGIC)) == MAGIC
        size = opened.seek(0, 2)
        opened.seek(max(0, size - len(MAGIC)))
        return begins and (size < 2 * len(MAGIC) or opened.read() != MAGIC)


def _read_template(info: Record, key: str, version: str) -> str:
    """Return a path template, checked: it may contain only the known fields. Others are refused because `str.format`
    could be made to write gigabytes of padding, and reads attributes."""
    template, known_fields = info.get_text(key), WORDS[version]
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as exc:
        raise UserError(f"{info.source}: {key!r} is {template!r:.200}, which is not a path template ({exc})") from exc
    for _, name, width, conversion in parts:
        if name is None:
            continue
        if name not in known_fields:
            raise UserError(
                f"{info.source}: {key!r} asks for {{{name:.60}}}{did_you_mean(name, known_fields)}; it may ask for "
                f"{', '.join(f'{{{word}}}' for word in known_fields)}"
            )
        if conversion or not (WIDTHS if name != "video_key" else NO_WIDTH).fullmatch(width or ""):
            raise UserError(
                f"{info.source}: {key!r} writes {{{name}}} as {width or conversion!r:.60}; numbers are written with at "
                "most 19 digits, such as 06d, and names as they are"
            )
    return template


def _version_2(info: Info) -> tuple[dict[int, str], list[EpisodeMeta]]:
    """Read format version 2: one data file per episode, lists as JSON lines."""

    def read_episode(line: Record) -> EpisodeMeta:
        index = line.get_integer("episode_index")
        words = {"episode_chunk": index // info.chunks_size, "episode_index": index}
        clips = {name: Clip(path=info.video_file(name, **words), start=0.0) for name in info.video_names}
        return EpisodeMeta(index=index, data=info.data_file(**words), clips=clips, length=_read_length(line))

    meta = info.folder / "meta"
    tasks = {
        r.get_integer("task_index"): r.get_text("task") for r in read_records(meta / "tasks.jsonl", limit=LIST_BYTES)
    }
    lines = read_records(meta / "episodes.jsonl", limit=LIST_BYTES)
    return tasks, [read_episode(line) for line in lines]


def _version_3(info: Info) -> tuple[dict[int, str], list[EpisodeMeta]]:
    """Read format version 3: many episodes per data file, lists as Parquet."""
    meta = info.folder / "meta"
    rows = list(_read_rows(meta / "tasks.parquet"))
    text = next((name for name in ("task", "__index_level_0__") if rows and name in rows[0].data), "task")
    tasks = {row.get_integer("task_index"): row.get_text(text) for row in rows}
    episodes = []
    for file in sorted((meta / "episodes").rglob("*.parquet")):
        for row in () if is_cut(file) else _read_rows(file):
            data = info.data_file(
                chunk_index=row.get_integer("data/chunk_index"), file_index=row.get_integer("data/file_index")
            )
            clips = {
                name: _read_clip(info, row, name)
                for name in info.video_names
                if row.has_value(f"videos/{name}/file_index")
            }
            index = row.get_integer("episode_index")
            episodes.append(EpisodeMeta(index=index, data=data, clips=clips, length=_read_length(row)))
    return tasks, sorted(episodes, key=lambda e: e.index)


def _read_clip(info: Info, row: Record, name: str) -> Clip:
    """Return the clip of a video feature by a row of the list of episodes."""
    at = {key: row.get_integer(f"videos/{name}/{key}") for key in ("chunk_index", "file_index")}
    start, end = (f"videos/{name}/{key}_timestamp" for key in ("from", "to"))
    return Clip(
        path=info.video_file(name, **at),
        start=row.get_number(start, low=0),
        end=row.get_number(end, low=0) if row.has_value(end) else None,
    )


def _read_length(line: Record) -> int | None:
    return line.get_integer("length") if line.has_value("length") else None


def _vector_names(feature: Record) -> tuple[str, ...]:
    """Return the names of a vector's numbers, in order: from a list, a mapping of name to place, or a mapping of parts
    to lists. Empty unless each number has a text."""
    names, shape = feature.data.get("names"), feature.get_sizes("shape")
    if isinstance(names, Mapping) and all(type(place) is int for place in names.values()):
        names = [name for name, _ in sorted(names.items(), key=lambda item: item[1])]
    elif isinstance(names, Mapping) and all(isinstance(part, list) for part in names.values()):
        names = [name for part in names.values() for name in part]
    if not isinstance(names, list) or len(shape) != 1 or len(names) != shape[0]:
        return ()
    return tuple(names) if all(isinstance(name, str) for name in names) else ()


def _read_rows(file: Path) -> Iterator[Record]:
    """Yield the rows of a Parquet table in `meta/`, without the columns of per-episode statistics."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not file.is_file():
        raise UserError(f"{file} does not exist; download the data set again")
    try:
        columns = [name for name in pq.read_schema(arrow_name(file)).names if not name.startswith("stats/")]
        rows = pq.read_table(arrow_name(file), columns=columns).to_pylist()
    except (OSError, ValueError, pa.ArrowException) as exc:
        raise UserError(f"{file} cannot be read ({exc}); download it again") from exc
    for number, row in enumerate(rows):
        yield Record(source=f"{file}, row {number}", data={key: _clean_cell(value) for key, value in row.items()})


def _clean_cell(value: Any) -> Any:
    """Return a value of a table as its writer meant it: pandas turns whole numbers into floats, and what is missing
    into NaN, in a column that lacks a value somewhere."""
    if isinstance(value, float):
        return None if math.isnan(value) else int(value) if value.is_integer() else value
    return value


INFO = Path("meta", "info.json")
HUB_NAME = re.compile(r"(?:(?:hf|https?):/.*?datasets/)?(\w[\w.-]*)/(\w[\w.-]*)(?:@([\w./-]+))?", re.ASCII)
"""Pattern of `OWNER/NAME[@REVISION]`, also as a URL, whose double slash `Path` has made a single one."""
LISTED = 5
"""Most data sets that an error message lists."""


def find_folder(folder: Path) -> Path:
    """Return the folder with `meta/info.json` that a spec's `folder` means: the folder itself, the newest snapshot in
    it if it is a data set of the hub's cache, or where lerobot or the hub's client stored `OWNER/NAME`. Nothing is
    downloaded. Raise UserError, which says what to do."""
    if folder.is_dir():
        dataset_folder = _with_info(folder)
        if dataset_folder is None:
            raise UserError(_describe_problem(folder))
        return dataset_folder
    name = HUB_NAME.fullmatch(folder.as_posix())
    if folder.exists() or name is None:
        problem = "is a file" if folder.exists() else "does not exist"
        raise UserError(f"{folder} {problem}; give the folder of a LeRobot data set, which has {INFO.as_posix()}")
    owner, title, revision = name.groups()
    for place in _list_candidates(owner, title):
        if (place / "snapshots").is_dir() or revision is None:
            dataset_folder = _with_info(place, revision)
            if dataset_folder is not None:
                return dataset_folder
    at = f" --revision {revision}" if revision else ""
    raise UserError(
        f"{folder} is not a folder ({folder.absolute()}), and as a name of the hub it is not on this machine: "
        f"looked in {' and '.join(str(place) for place in _list_candidates(owner, title))}\n"
        f"  data sets are not fetched while a run starts, for their size: "
        f"hf download {owner}/{title} --repo-type dataset{at} --local-dir FOLDER, then set folder: FOLDER"
    )


def _list_candidates(owner: str, title: str) -> list[Path]:
    """Return the folders that may contain a data set of the hub: lerobot's own, and the hub client's cache as lerobot
    and as the client itself place it."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~", ".cache"))
    hub_cache = Path(os.environ.get("HF_HOME") or cache / "huggingface")
    lerobot = Path(os.environ.get("HF_LEROBOT_HOME") or hub_cache / "lerobot")
    hub = Path(os.environ.get("HF_HUB_CACHE") or hub_cache / "hub")
    repository = f"datasets--{owner}--{title}"
    candidates = (lerobot / owner / title, lerobot / "hub" / repository, hub / repository)
    return [place.expanduser() for place in candidates]


def _with_info(folder: Path, revision: str | None = None) -> Path | None:
    """Return the folder itself if it is a data set, else the snapshot in it of `revision` (branch, tag or commit);
    without a revision that of the main branch, or the newest."""
    if (folder / INFO).is_file():
        return folder
    snapshots = folder if folder.name == "snapshots" else folder / "snapshots"
    reference = snapshots.parent / "refs" / (revision or "main")
    commits = [reference.read_text(encoding="ascii", errors="replace").strip()] if reference.is_file() else []
    commits += [revision] if revision else _newest_first(snapshots)
    return next((snapshots / commit for commit in commits if (snapshots / commit / INFO).is_file()), None)


def _newest_first(snapshots: Path) -> list[str]:
    entries = [entry for entry in snapshots.iterdir() if entry.is_dir()] if snapshots.is_dir() else []
    return [entry.name for entry in sorted(entries, key=lambda entry: entry.stat().st_mtime, reverse=True)]


def _describe_problem(folder: Path) -> str:
    """Return what is wrong with a folder, and which folder was probably meant."""
    message = f"{folder} is not a LeRobot data set: it has no {INFO.as_posix()}"
    above = next((parent for parent in folder.absolute().parents if (parent / INFO).is_file()), None)
    if above is not None:
        return f"{message}; give {above}, the data set that it is part of"
    datasets = [
        file.parents[1] for pattern in ("*", "*/*") for file in sorted(folder.glob(f"{pattern}/{INFO.as_posix()}"))
    ]
    cached = [entry for entry in sorted(folder.glob("datasets--*--*")) if _with_info(entry) is not None]
    if datasets or cached:
        names = [entry.relative_to(folder).as_posix() for entry in (*datasets, *cached)]
        more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
        return f"{message}; it holds data sets, give one of them: {', '.join(names[:LISTED])}{more}"
    if (folder / "meta").is_dir() or (folder / "snapshots").is_dir():
        return f"{message}; it is half downloaded, fetch it again"
    return f"{message}; give the folder that `hf download OWNER/NAME --repo-type dataset --local-dir FOLDER` filled"
