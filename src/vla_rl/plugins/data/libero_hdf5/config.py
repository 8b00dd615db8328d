"""Settings of `libero_hdf5`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from attrs import field, frozen

from vla_rl.core.spec.structure import make_problem
from vla_rl.toolkit.data.episodes import Ends, EpisodeChoice, EpisodeSelection, check_numbers


@frozen(kw_only=True)
class LiberoHDF5Config:
    """Spec keys of the dataset plugin `libero_hdf5`."""

    folder: Path
    """Folder with a file `TASK_demo.hdf5` for each task of the simulator, directly or up to four levels down (such as
    one folder per suite)."""
    episodes: EpisodeChoice = field(default=None, validator=check_numbers)
    """Episodes to read of each task: a count, from the first on (100); or numbers and ranges ([0, 2, "10-19"]); or
    conditions that each meets ({exclude: [3, "7-9"], tasks: ["pick up *"]}). Numbers are those of the files (`demo_3`).
    null: all."""
    drop_no_ops: bool = True
    """Leave out no-op steps, which neither move nor change the gripper: with them behaviour cloning learns to stand
    still (OpenVLA)."""
    ends: Ends = "drop"
    """Handling of an episode's last C - 1 steps (C: the chunk length), which have no full chunk after them: `drop`
    leaves them out, as OpenVLA-OFT does; `repeat` pads their chunks with the last action, and the copies are learnt, as
    in openpi and lerobot's pi0; `mask` pads them too, and the loss leaves the copies out, as in lerobot's ACT."""
    observed: Literal["before", "after"] | None = None
    """Whether observation t of a file was taken `before` action t, or `after` it as in the published files (it then
    belongs to action t + 1). Null: `after` for files with the attributes of LIBERO's own script, else `before`."""

    @episodes.validator
    def _refuse_success(self, attribute: object, value: EpisodeChoice) -> None:
        if isinstance(value, EpisodeSelection) and value.success is not None:
            raise make_problem("LIBERO's files hold demonstrations that all succeed; leave it out", "success")
