"""Settings of `rlds`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from attrs import field, frozen

from vla_rl.toolkit.data.episodes import Ends, EpisodeChoice, check_numbers


@frozen(kw_only=True)
class RLDSConfig:
    """Spec keys of the dataset plugin `rlds`."""

    folder: Path
    """Folder with the files NAME-SPLIT.tfrecord-00000-of-..., directly or up to three levels down, such as
    `modified_libero_rlds/libero_spatial_no_noops`. It has to hold one data set in one version."""
    split: str = "train"
    """Split that is read."""
    episodes: EpisodeChoice = field(default=None, validator=check_numbers)
    """Episodes to read: a count, from the first on (100); or numbers and ranges ([0, 2, "10-19"]); or conditions that
    each meets ({exclude: [3, "7-9"], tasks: ["pick up *"], success: true}). They are numbered from 0 on, in the order
    of the files, and success is a `reward` above 0 in some step. null: all."""
    cameras: Mapping[str, str] = field(factory=dict)
    """Mapping from the simulator's camera to the feature with its images, such as {agentview: observation/image}. A
    camera left out is read from `observation/CAMERA`. Names of features are those below `steps/`."""
    action: str = "action"
    """Feature with the actions, in the simulator's units."""
    state: str = "observation/state"
    """Feature with the state, in the simulator's units; not read for a simulator without a state."""
    instruction: str = "language_instruction"
    """Feature with the instruction of each step; `episode_metadata/...` for one of the episode."""
    drop_no_ops: bool = False
    """Leave out steps in which neither state nor action changes: with many of them behaviour cloning learns to stand
    still. Without a state, those whose action neither moves nor changes its last number, the gripper (OpenVLA)."""
    ends: Ends = "drop"
    """Handling of an episode's last C - 1 steps (C: the chunk length), which have no full chunk after them: `drop`
    leaves them out, as OpenVLA-OFT does; `repeat` pads their chunks with the last action, and the copies are learnt, as
    in openpi and lerobot's pi0; `mask` pads them too, and the loss leaves the copies out, as in lerobot's ACT."""
    last_action: Literal["auto", "keep", "drop"] = "auto"
    """Handling of the step `is_last`, whose action means nothing in RLDS. Some writers store an action that
    was executed (`keep`), others zeros (`drop` leaves the step out). auto: drop where it is zeros or not finite in
    every episode."""
