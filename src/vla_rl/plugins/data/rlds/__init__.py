"""`rlds`: reads demonstrations in RLDS, as TensorFlow Datasets writes them (TFRecord files), without TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from attrs import field, frozen

from vla_rl.core.errors import UserError
from vla_rl.core.spec.structure import at
from vla_rl.core.types import Context, Plugin
from vla_rl.toolkit.data.episodes import EpisodeChoice, check_numbers

DEPTH = 3
"""Most folder levels between `folder` and the files: DATA_SET/VERSION."""


@frozen(kw_only=True)
class RLDSConfig:
    """Spec keys of the dataset plugin `rlds`."""

    folder: Path
    """Folder with the files NAME-SPLIT.tfrecord-00000-of-..., directly or up to three levels down, such as
    `modified_libero_rlds/libero_spatial_no_noops`. It has to hold one data set in one version."""
    split: str = "train"
    """Split that is read."""
    episodes: EpisodeChoice = field(default=None, validator=check_numbers)
    """Episodes to read: a count, from the first on (100); or numbers and ranges ([0, 2, "10-19"]); or
    all but some ({exclude: [3, "7-9"]}). They are numbered from 0 on, in the order of the files. null: all."""
    cameras: Mapping[str, str] = field(factory=dict)
    """Mapping from the simulator's camera to the feature with its pictures, such as {agentview: observation/image}. A
    camera left out is read from `observation/CAMERA`. Names of features are those below `steps/`."""
    action: str = "action"
    """ExampleFeature with the actions, in the simulator's units."""
    state: str = "observation/state"
    """ExampleFeature with the state, in the simulator's units; not read for a simulator without a state."""
    instruction: str = "language_instruction"
    """ExampleFeature with the instruction of each step; `episode_metadata/...` for one of the episode."""
    ends: Literal["drop", "repeat"] = "drop"
    """Handling of an episode's last C - 1 steps (C: the chunk length), which have no full chunk after them: `drop`
    leaves them out, as OpenVLA-OFT does; `repeat` pads their chunks with the last action."""


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
        raise UserError(f"{sets[0]}: there are {len(files)} files, their names say {count}; download it again")
    return files


def build(config: RLDSConfig, context: Context) -> Any:
    from vla_rl.plugins.data.rlds.dataset import RLDSData

    return RLDSData(config, context)


def check(config: RLDSConfig, context: Context) -> None:
    with at("folder"):
        find_files(config)


plugin = Plugin(config=RLDSConfig, build=build, summary="a data set in RLDS (TFRecord files)", check=check)
