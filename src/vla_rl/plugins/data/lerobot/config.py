"""Settings of `lerobot`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from attrs import field, frozen

from vla_rl.toolkit.data.episodes import Ends, EpisodeChoice, check_numbers


@frozen(kw_only=True)
class LeRobotConfig:
    """Spec keys of the dataset plugin `lerobot`."""

    folder: Path
    """Folder of the data set, with `meta/info.json`; or `OWNER/NAME` or `OWNER/NAME@REVISION` of a data set that
    lerobot or the Hugging Face hub's client already downloaded to this machine. Nothing is downloaded."""
    episodes: EpisodeChoice = field(default=None, validator=check_numbers)
    """Episodes to read: a count, from the first on (100); or numbers and ranges ([0, 2, "10-19"]); or conditions that
    each meets ({exclude: [3, "7-9"], tasks: ["pick up *"], success: true}). Numbers are those of the data set
    (`episode_index`), and success is that of the feature `next.success`. null: all."""
    cameras: Mapping[str, str] = field(factory=dict)
    """Mapping from the simulator's camera to the feature with its images, such as {wrist:
    observation.images.wrist_image}. A camera left out is read from `observation.images.CAMERA`."""
    action: str = "action"
    """Feature with the actions, in the simulator's units."""
    state: str = "observation.state"
    """Feature with the state, in the simulator's units; not read for a simulator without a state."""
    reward: str = "next.reward"
    """Feature with the reward of each row, which trainers of recordings read; others do without."""
    only: Literal["all", "interventions"] = "all"
    """Samples to read: all, or those whose first action a person or an expert chose instead of the policy (feature
    `is_intervention` of recordings with takeovers), for HG-DAgger."""
    drop_no_ops: bool = False
    """Leave out steps in which neither state nor action changes: with many of them behaviour cloning learns to stand
    still. Without a state, those whose action neither moves nor changes its last number, the gripper (OpenVLA)."""
    ends: Ends = "drop"
    """Handling of an episode's last C - 1 steps (C: the chunk length), which have no full chunk after them: `drop`
    leaves them out, as OpenVLA-OFT does; `repeat` pads their chunks with the last action, and the copies are learnt, as
    in openpi and lerobot's pi0; `mask` pads them too, and the loss leaves the copies out, as in lerobot's ACT."""
