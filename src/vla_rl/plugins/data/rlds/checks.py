"""Finds the files of a data set of `rlds`, and checks that they are complete."""

from __future__ import annotations

from pathlib import Path

from vla_rl.core.contexts import CheckContext
from vla_rl.core.errors import UserError, there_are
from vla_rl.core.spec.structure import at
from vla_rl.plugins.data.rlds.config import RLDSConfig

DEPTH = 3
"""Most folder levels between `folder` and the files: DATA_SET/VERSION."""


def find_files(config: RLDSConfig) -> list[Path]:
    """Return the files of the split, in order. Raise UserError for none, for several data sets, and where one of the
    numbered files is missing."""
    folder = config.folder
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give the one with the files NAME-{config.split}.tfrecord-...")
    for depth in range(DEPTH + 1):
        files = sorted(folder.glob(f"{'*/' * depth}*-{config.split}.tfrecord-*-of-*"))
        if files:
            break
    else:
        splits = sorted({file.name.split(".tfrecord")[0].rpartition("-")[2] for file in folder.rglob("*.tfrecord-*")})
        listed = f"; it has the splits {', '.join(splits)}" if splits else ""
        raise UserError(f"{folder} holds no files NAME-{config.split}.tfrecord-00000-of-...{listed}")
    sets = sorted({str(file.parent / file.name.partition(".tfrecord")[0]) for file in files})
    if len(sets) > 1:
        raise UserError(f"{folder} holds {len(sets)} data sets: {', '.join(sets[:5])}; give the folder of one")
    count = files[0].name.rpartition("-of-")[2]
    if not count.isdigit() or int(count) != len(files):
        raise UserError(f"{sets[0]}: {there_are(len(files), 'file')}, their names say {count}; download it again")
    return files


def check_folder(config: RLDSConfig, context: CheckContext) -> None:
    """Raise UserError for a folder that is not one complete data set."""
    with at("folder"):
        find_files(config)
