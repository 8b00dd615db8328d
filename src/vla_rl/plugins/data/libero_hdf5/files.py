"""Reading the files. Images lie in them as MuJoCo renders them, upside down and mirrored for a policy's eyes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
from attrs import frozen

from vla_rl.core.errors import UserError
from vla_rl.core.hookspecs import Demonstrations
from vla_rl.core.types import Context, EnvInfo, Observation
from vla_rl.plugins.data.libero_hdf5 import LiberoHDF5Config
from vla_rl.toolkit.data.samples import Array, Windows, check_finite, check_fit, match_cameras, statistics

ENDING = "_demo.hdf5"
ACTION_DIM, STATE_DIM = 7, 8
CAMERAS = {"agentview": "agentview_rgb", "wrist": "eye_in_hand_rgb"}
"""Of the `libero` simulator -> data set in a file."""
STILL = 1e-4
"""Norm of a motion below which a step is none (OpenVLA)."""


@frozen(kw_only=True, eq=False)
class Recorded:
    """One demonstration: what is small is in memory, images stay in the file."""

    group: Any
    instruction: str
    actions: Array
    """float32 [T, 7]."""
    state: Array
    """float32 [T, 8]."""
    frames: Array
    """int64 [T]: of the images, those that the steps were chosen on."""


class LiberoFiles(Demonstrations):
    def __init__(self, config: LiberoHDF5Config, context: Context) -> None:
        """Raises UserError for a folder without the simulator's tasks, and for files that do not fit it."""
        self._chunk = context.chunk
        env = check_fit(str(config.folder), context.env, ACTION_DIM, STATE_DIM)
        files = _files(config.folder, env)
        self._episodes: list[Recorded] = []
        for task, path in files.items():
            self._episodes += _read(path, env.task(task).instruction, config)
        known = [camera for camera, name in CAMERAS.items() if all(name in e.group["obs"] for e in self._episodes)]
        self._cameras = {camera: CAMERAS[camera] for camera in match_cameras(str(config.folder), env, known)}
        self._windows = Windows([len(e.actions) for e in self._episodes], context.chunk)

    def num_samples(self) -> int:
        return len(self._windows)

    def read_samples(self, indices: Any) -> tuple[Observation, Array]:
        places = [(self._episodes[e], int(t)) for e, t in zip(*self._windows.find(np.asarray(indices)), strict=True)]
        observation = Observation(
            images={
                camera: np.stack([e.group["obs"][name][e.frames[t]][::-1, ::-1] for e, t in places])
                for camera, name in self._cameras.items()
            },
            instructions=tuple(e.instruction for e, _ in places),
            state=np.stack([e.state[t] for e, t in places]),
        )
        return observation, np.stack([e.actions[t : t + self._chunk] for e, t in places])

    def data_statistics(self) -> Any:
        parts = {"action": [e.actions for e in self._episodes], "state": [e.state for e in self._episodes]}
        return statistics({name: np.concatenate(arrays) for name, arrays in parts.items()})


def _files(folder: Path, env: EnvInfo) -> dict[str, Path]:
    """Task -> file, for every task of the simulator."""
    if not folder.is_dir():
        raise UserError(f"data.folder: {folder} is not a folder; give the one that holds the files *{ENDING}")
    there: dict[str, list[Path]] = {}
    for path in sorted(folder.rglob(f"*{ENDING}")):
        there.setdefault(path.name.removesuffix(ENDING), []).append(path)
    absent = [task.name for task in env.tasks if task.name not in there]
    if absent:
        raise UserError(
            f"{folder} has no demonstrations (TASK{ENDING}) of: {', '.join(absent)}\n"
            f"  it has: {', '.join(there) or 'none'}; choose tasks in `env`, or another folder"
        )
    for task in env.tasks:
        if len(there[task.name]) > 1:
            several = ", ".join(str(path) for path in there[task.name])
            raise UserError(
                f"{folder} has more than one file of {task.name}: {several}; give a folder with one of them"
            )
    return {task.name: there[task.name][0] for task in env.tasks}


def _read(path: Path, instruction: str, config: LiberoHDF5Config) -> list[Recorded]:
    try:
        data = h5py.File(path, "r")["data"]
        after = config.observed == "after" or (config.observed is None and "problem_info" in data.attrs)
        if "macros_image_convention" in data.attrs and data.attrs["macros_image_convention"] != "opengl":
            raise UserError(
                f"{path}: images of convention {data.attrs['macros_image_convention']!r}; only opengl is read"
            )
        names = sorted(data, key=lambda name: int(name.rpartition("_")[2]))[: config.episodes_per_task]
        if not names:
            raise ValueError("it has no demonstrations")
        return [_episode(data[name], instruction, after, config.drop_no_ops) for name in names]
    except (OSError, KeyError, ValueError) as exc:
        raise UserError(f"{path} is not a file of LIBERO demonstrations: {exc}") from exc


def _episode(group: Any, instruction: str, after: bool, drop_no_ops: bool) -> Recorded:
    actions = group["actions"][()].astype(np.float32)
    obs = group["obs"]
    state = np.concatenate([obs["ee_states"][()], obs["gripper_states"][()]], axis=1).astype(np.float32)
    pictures = {name: len(obs[name]) for name in CAMERAS.values() if name in obs}
    lengths = {"actions": len(actions), "states": len(state), **pictures}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"{group.name} has lists of different lengths: {lengths}")
    for what, values, size in (("actions", actions, ACTION_DIM), ("states", state, STATE_DIM)):
        if values.shape[1] != size:
            raise ValueError(f"{group.name} has {what} of {values.shape[1]} numbers, LIBERO's have {size}")
        steps = np.arange(len(values))
        check_finite(group.file.filename, what, values, np.full(len(values), group.name), steps)
    frames = np.arange(len(actions))
    if after:
        actions, frames = actions[1:], frames[:-1]
    if drop_no_ops:
        moves = np.linalg.norm(actions[:, :-1], axis=1) >= STILL
        grips = np.diff(actions[:, -1], prepend=actions[:1, -1]) != 0
        actions, frames = actions[moves | grips], frames[moves | grips]
    return Recorded(group=group, instruction=instruction, actions=actions, state=state[frames], frames=frames)
