"""LIBERO's demonstration files, as they are published and as OpenVLA's script plays them again."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from attrs import field, frozen
from attrs import validators as v

from vla_rl.core.errors import UserError
from vla_rl.core.spec.structure import at
from vla_rl.core.types import Context, Plugin


@frozen(kw_only=True)
class LiberoHDF5Config:
    folder: Path
    """Folder with a file `TASK_demo.hdf5` for each task of the simulator."""
    episodes_per_task: int | None = field(default=None, validator=v.optional(v.ge(1)))
    """First demonstrations of each task; none: all."""
    drop_no_ops: bool = True
    """Leave out steps that neither move nor change the gripper, without which a clone learns to stand still."""
    observed: Literal["before", "after"] | None = None
    """Whether observation t of a file was taken before action t, or after it as in the published files (it belongs to
    action t + 1 then). None: after, in files with the attributes of LIBERO's own script; else before."""


def build(config: LiberoHDF5Config, context: Context) -> Any:
    from vla_rl.plugins.data.libero_hdf5.files import LiberoFiles

    return LiberoFiles(config, context)


def check(config: LiberoHDF5Config, context: Context) -> None:
    with at("folder"):
        if not any(config.folder.glob("*_demo.hdf5")):
            raise UserError(f"{config.folder} holds no files TASK_demo.hdf5")


plugin = Plugin(
    config=LiberoHDF5Config, build=build, summary="LIBERO's demonstrations (HDF5)", extra="data", check=check
)
