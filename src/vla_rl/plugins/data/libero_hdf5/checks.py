"""Finds the files of a data set of `libero_hdf5`, and checks that at least one exists."""

from __future__ import annotations

from pathlib import Path

from vla_rl.core.contexts import CheckContext
from vla_rl.core.errors import UserError
from vla_rl.core.spec.structure import at
from vla_rl.plugins.data.libero_hdf5.config import LiberoHDF5Config

ENDING = "_demo.hdf5"
DEPTH = 4
"""Most folder levels between `folder` and a file."""


def find_files(folder: Path) -> dict[str, list[Path]]:
    """Return task -> its files. Raise UserError where the folder does not exist. Symbolic links to folders are
    followed, which is why the depth is limited."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give the one that holds the files TASK{ENDING}")
    files: dict[str, list[Path]] = {}
    for depth in range(DEPTH + 1):
        for path in sorted(folder.glob(f"{'*/' * depth}*{ENDING}")):
            files.setdefault(path.name.removesuffix(ENDING), []).append(path)
    return files


def check_folder(config: LiberoHDF5Config, context: CheckContext) -> None:
    """Raise UserError for a folder without files."""
    with at("folder"):
        if not find_files(config.folder):
            raise UserError(f"{config.folder} holds no files TASK{ENDING}, nor does a folder in it")
