"""LIBERO's demonstration files, as they are published and as OpenVLA's script plays them again."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from attrs import field, frozen
from attrs import validators as v

from vla_rl.core.errors import UserError
from vla_rl.core.spec.structure import at
from vla_rl.core.types import Context, Plugin

ENDING = "_demo.hdf5"
DEPTH = 4
"""Folders between `folder` and a file, at most."""


@frozen(kw_only=True)
class LiberoHDF5Config:
    folder: Path
    """Folder with a file `TASK_demo.hdf5` for each task of the simulator, in it or up to four folders further down,
    such as one for each suite."""
    episodes_per_task: int | None = field(default=None, validator=v.optional(v.ge(1)))
    """First demonstrations of each task; none: all."""
    drop_no_ops: bool = True
    """Leave out steps that neither move nor change the gripper, without which a clone learns to stand still."""
    observed: Literal["before", "after"] | None = None
    """Whether observation t of a file was taken before action t, or after it as in the published files (it belongs to
    action t + 1 then). None: after, in files with the attributes of LIBERO's own script; else before."""


def find_files(folder: Path) -> dict[str, list[Path]]:
    """Task -> its files. Raises UserError where there is no folder. Links to folders are followed, which is why the
    depth has a limit."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give the one that holds the files TASK{ENDING}")
    files: dict[str, list[Path]] = {}
    for depth in range(DEPTH + 1):
        for path in sorted(folder.glob(f"{'*/' * depth}*{ENDING}")):
            files.setdefault(path.name.removesuffix(ENDING), []).append(path)
    return files


def build(config: LiberoHDF5Config, context: Context) -> Any:
    from vla_rl.plugins.data.libero_hdf5.files import LiberoFiles

    return LiberoFiles(config, context)


def check(config: LiberoHDF5Config, context: Context) -> None:
    with at("folder"):
        if not find_files(config.folder):
            raise UserError(f"{config.folder} holds no files TASK{ENDING}, nor does a folder in it")


plugin = Plugin(
    config=LiberoHDF5Config, build=build, summary="LIBERO's demonstrations (HDF5)", extra="data", check=check
)
