"""Locates a data set: a folder, or a dataset of the Hugging Face hub that was downloaded. Imports little, since specs
are checked with it."""

from __future__ import annotations

import os
import re
from pathlib import Path

from vla_rl.core.errors import UserError

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
