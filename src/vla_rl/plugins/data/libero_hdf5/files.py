"""Demonstrations in LIBERO's HDF5 files, also for `vla-rl data`. Their images are stored as MuJoCo renders them, upside
down and mirrored, and are turned upright when read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from attrs import frozen

from vla_rl.core.contexts import CheckContext, DataContext
from vla_rl.core.errors import UserError
from vla_rl.core.hookspecs import Demonstrations
from vla_rl.core.spec.structure import at
from vla_rl.core.types import Array, EnvInfo, Observation
from vla_rl.plugins.data.libero_hdf5.config import LiberoHDF5Config
from vla_rl.toolkit.data.episodes import EpisodeFilter, EpisodeLabels
from vla_rl.toolkit.data.idle_steps import find_no_ops
from vla_rl.toolkit.data.images import MAX_PIXELS, stack_images
from vla_rl.toolkit.data.inspection.recorded import DataFinding, InspectedEpisode, RecordedData
from vla_rl.toolkit.data.samples import (
    StepWindows,
    check_finite,
    check_fit,
    compute_relative_statistics,
    compute_statistics,
    match_cameras,
)

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


ACTION_DIM, STATE_DIM = 7, 8
CAMERAS = {"agentview": "agentview_rgb", "wrist": "eye_in_hand_rgb"}
"""Camera of the `libero` simulator -> HDF5 data set with its images."""
MAX_NUMBERS = 10_000_000
"""Most numbers in the actions or states of one demonstration; the published ones have up to 505 steps of 8 numbers."""
READ_ERRORS = (OSError, KeyError, ValueError, TypeError, AttributeError, RuntimeError)
"""What h5py and the checks below raise for files of other contents."""


@frozen(kw_only=True, eq=False)
class Recorded:
    """One demonstration: numbers are in memory, images stay in the file."""

    group: Any
    number: int
    """Number in the file: 3 of `demo_3`."""
    instruction: str
    actions: Array
    """float32 [T, 7]."""
    state: Array
    """float32 [T, 8]."""
    frames: Array
    """int64 [T]: index in the file of the image on which each step was chosen."""


class LiberoFiles(Demonstrations):
    """Demonstrations of LIBERO's HDF5 files."""

    def __init__(self, config: LiberoHDF5Config, context: DataContext) -> None:
        """Raise UserError for a folder that lacks tasks of the simulator, and for files that do not fit it."""
        self._chunk = context.chunk
        self._where = str(config.folder)
        env = check_fit(str(config.folder), context.env, ACTION_DIM, STATE_DIM)
        files = _match_files(config.folder, env)
        chosen = EpisodeFilter(config.episodes)
        numbers: set[int] = set()
        self._episodes: list[Recorded] = []
        for task, path in files.items():
            episodes, numbers_of_file = _read_demonstrations(path, env.task(task).instruction, config, chosen)
            self._episodes += episodes
            numbers |= numbers_of_file
        chosen.check_choice(str(config.folder), sorted(numbers))
        contents = [
            EpisodeLabels(number=episode.number, instructions=frozenset([episode.instruction]))
            for episode in self._episodes
        ]
        self._episodes = [self._episodes[position] for position in chosen.select_labelled(str(config.folder), contents)]
        recorded_cameras = [
            camera for camera, name in CAMERAS.items() if all(name in e.group["obs"] for e in self._episodes)
        ]
        self._cameras = {camera: CAMERAS[camera] for camera in match_cameras(str(config.folder), env, recorded_cameras)}
        self._ends = config.ends
        lengths = [len(e.actions) for e in self._episodes]
        recorded = sum(len(e.group["actions"]) for e in self._episodes)
        dropped = f" (drop_no_ops leaves {sum(lengths)} of {recorded} steps; false keeps all)"
        self._windows = StepWindows(
            lengths,
            context.chunk if config.ends == "drop" else 1,
            self._where,
            dropped if config.drop_no_ops else "",
        )

    def num_samples(self) -> int:
        return len(self._windows)

    def read_samples(self, indices: Any) -> tuple[Observation, Array]:
        frames_at = [
            (self._episodes[e], int(t)) for e, t in zip(*self._windows.locate_samples(np.asarray(indices)), strict=True)
        ]
        observation = Observation(
            images={camera: _read_images(name, frames_at) for camera, name in self._cameras.items()},
            instructions=tuple(e.instruction for e, _ in frames_at),
            state=np.stack([e.state[t] for e, t in frames_at]),
        )
        following = np.arange(self._chunk)
        return observation, np.stack([e.actions[np.minimum(t + following, len(e.actions) - 1)] for e, t in frames_at])

    def recorded_actions(self, indices: Any) -> Array | None:
        return self._windows.count_actions(np.asarray(indices), self._chunk) if self._ends == "mask" else None

    def data_statistics(self) -> Any:
        parts = {"action": [e.actions for e in self._episodes], "state": [e.state for e in self._episodes]}
        return compute_statistics({name: np.concatenate(arrays) for name, arrays in parts.items()})

    def relative_statistics(self, references: Sequence[int | None]) -> Any:
        episodes = {number: (e.actions, e.state) for number, e in enumerate(self._episodes)}
        return compute_relative_statistics(self._where, episodes, references, self._chunk, self._ends)


def read_whole_episode(data: Any, name: str, instruction: str) -> Recorded:
    """Return a demonstration of the group "data" as the file has it, no-ops included. Raise one of `READ_ERRORS`, or
    UserError for numbers that are not finite."""
    number = int(name.rpartition("_")[2])
    return _read_episode(_read_member(data, name), number, instruction, after=False, drop_no_ops=False)


def _read_images(name: str, frames_at: Sequence[tuple[Recorded, int]]) -> Array:
    """Return the images of one camera for pairs of demonstration and step, uint8 [B, H, W, 3], upright."""
    frames = []
    for episode, step in frames_at:
        try:
            frames.append(episode.group["obs"][name][episode.frames[step]][::-1, ::-1])
        except OSError as exc:
            raise UserError(
                f"{episode.group.file.filename}: an image of {episode.group.name} cannot be read ({exc}); "
                "download it again"
            ) from exc
    return stack_images(frames_at[0][0].group.file.filename, name, frames)


def _match_files(folder: Path, env: EnvInfo) -> dict[str, Path]:
    """Return task -> file, for every task of the simulator. Raise UserError for a task with no file or several."""
    files_of_task = find_files(folder)
    absent = [task.name for task in env.tasks if task.name not in files_of_task]
    if absent:
        raise UserError(
            f"{folder} has no demonstrations (TASK{ENDING}) of: {', '.join(absent)}\n"
            f"  it has: {', '.join(files_of_task) or 'none'}; choose tasks in `env`, or another folder"
        )
    for task in env.tasks:
        if len(files_of_task[task.name]) > 1:
            several = ", ".join(str(path) for path in files_of_task[task.name])
            raise UserError(
                f"{folder} has more than one file of {task.name}: {several}; give a folder with one of them"
            )
    return {task.name: files_of_task[task.name][0] for task in env.tasks}


def _read_demonstrations(
    path: Path, instruction: str, config: LiberoHDF5Config, chosen: EpisodeFilter
) -> tuple[list[Recorded], set[int]]:
    """Return the chosen demonstrations of a file, and the numbers of all of them."""
    try:
        data = _read_member(h5py.File(path, "r"), "data")
        after = config.observed == "after" or (config.observed is None and "problem_info" in data.attrs)
        if "macros_image_convention" in data.attrs and data.attrs["macros_image_convention"] != "opengl":
            raise UserError(
                f"{path}: images of convention {data.attrs['macros_image_convention']!r}; only opengl is read"
            )
        names = {int(name.rpartition("_")[2]): name for name in data}
        if not names:
            raise ValueError("it has no demonstrations")
        numbers = [number for place, number in enumerate(sorted(names)) if chosen.includes_episode(number, place)]
        episodes = [
            _read_episode(_read_member(data, names[n]), n, instruction, after, config.drop_no_ops) for n in numbers
        ]
        return episodes, set(names)
    except READ_ERRORS as exc:
        raise UserError(f"{path} is not a file of LIBERO demonstrations: {exc}") from exc


def _read_member(group: Any, name: str) -> Any:
    """Return the member of a group with this name. Raise ValueError where it links to another file."""
    member = group[name]
    if member.file.filename != group.file.filename:
        raise ValueError(f"{group.name}/{name} is in {member.file.filename}, other files are not read")
    return member


def _open_array(group: Any, name: str, shape: tuple[int | None, ...]) -> Any:
    """Return an HDF5 data set of this shape (None: any size), not yet read. Raise ValueError for another shape, and for
    one with numbers in other files: HDF5 can point at any file of the machine."""
    dataset = _read_member(group, name)
    if not isinstance(dataset, h5py.Dataset):
        raise ValueError(f"{group.name}/{name} is a {type(dataset).__name__}, a data set is expected")  # noqa: TRY004
    if dataset.external or dataset.is_virtual:
        raise ValueError(f"{group.name}/{name} has its numbers in other files, which are not read")
    fits = [expected_size in (None, size) for expected_size, size in zip(shape, dataset.shape, strict=False)]
    if len(dataset.shape) != len(shape) or not all(fits) or dataset.dtype.kind not in "iuf":
        expected_shape = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(
            f"{group.name}/{name} is {dataset.dtype} {list(dataset.shape)}, numbers [{expected_shape}] are expected"
        )
    return dataset


def _count_images(group: Any, name: str) -> int:
    """Return the number of images in a data set. Raise ValueError unless they are uint8 RGB of a readable size."""
    dataset = _open_array(group, name, (None, None, None, 3))
    if dataset.dtype != np.uint8 or not 0 < dataset.shape[1] * dataset.shape[2] <= MAX_PIXELS:
        raise ValueError(
            f"{group.name}/{name} is {dataset.dtype} {list(dataset.shape)}, uint8 [steps, height, width, 3] of at most "
            f"{MAX_PIXELS:,} pixels is expected"
        )
    return int(dataset.shape[0])


def _read_numbers(group: Any, name: str) -> Array:
    dataset = _open_array(group, name, (None, None))
    if dataset.size > MAX_NUMBERS:
        raise ValueError(
            f"{group.name}/{name} is {list(dataset.shape)}, more than {MAX_NUMBERS:,} numbers are not read"
        )
    return np.asarray(dataset[()]).astype(np.float32)


def _read_episode(group: Any, number: int, instruction: str, after: bool, drop_no_ops: bool) -> Recorded:
    actions = _read_numbers(group, "actions")
    if "obs" not in group:
        raise ValueError(
            f"{group.name} has no observations, as robosuite records demonstrations; LIBERO's "
            "scripts/create_dataset.py renders them from its states"
        )
    state = np.concatenate([_read_numbers(group, f"obs/{name}") for name in ("ee_states", "gripper_states")], axis=1)
    image_counts = {name: _count_images(group, f"obs/{name}") for name in CAMERAS.values() if name in group["obs"]}
    lengths = {"actions": len(actions), "states": len(state), **image_counts}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"{group.name} has lists of different lengths: {lengths}")
    for what, values, size in (("actions", actions, ACTION_DIM), ("states", state, STATE_DIM)):
        if values.shape[1] != size:
            raise ValueError(f"{group.name} has {what} of {values.shape[1]} numbers, LIBERO's have {size}")
        steps = np.arange(len(values))
        check_finite(group.file.filename, what, values, np.full(len(values), number), steps)
    frames = np.arange(len(actions))
    if after:
        actions, frames = actions[1:], frames[:-1]
    if drop_no_ops:
        moving = ~find_no_ops(actions)
        actions, frames = actions[moving], frames[moving]
    return Recorded(
        group=group, number=number, instruction=instruction, actions=actions, state=state[frames], frames=frames
    )


POSE = ("x", "y", "z", "rx", "ry", "rz")
NAMES = {"actions": (*POSE, "gripper"), "states": (*POSE, "gripper_left", "gripper_right")}


def open_recordings(folder: Path) -> RecordedData:
    """Open all files of a folder; their episodes are numbered in the order of the files. Raise UserError for a folder
    without files."""
    files = [file for _, several in sorted(find_files(folder).items()) for file in several]
    if not files:
        raise UserError(f"{folder} holds no files TASK{ENDING}, nor does a folder in it")
    episodes: list[InspectedEpisode] = []
    findings: list[DataFinding] = []
    groups: dict[int, Any] = {}
    number = 0
    for file in files:
        try:
            data = h5py.File(file, "r")["data"]
            names = sorted(data, key=lambda name: int(name.rpartition("_")[2]))
        except READ_ERRORS as exc:
            findings.append(DataFinding(subject=file.name, message=f"cannot be read ({exc})"))
            continue
        for name in names:
            try:
                recorded = read_whole_episode(data, name, file.name.removesuffix(ENDING).replace("_", " "))
            except (*READ_ERRORS, UserError) as exc:
                findings.append(
                    DataFinding(subject=file.name, message=f"{name} cannot be read ({exc})", episodes=(number,))
                )
            else:
                groups[number] = recorded.group
                episodes.append(
                    InspectedEpisode(
                        number=number,
                        task=recorded.instruction,
                        times=np.arange(len(recorded.actions), dtype=np.float64),
                        vectors={"actions": recorded.actions, "states": recorded.state},
                    )
                )
            number += 1
    if not episodes:
        raise UserError(f"{folder}: none of its demonstrations can be read: {findings[0].message}")

    def read_image(episode: InspectedEpisode, camera: str, frame: int) -> Array:
        try:
            image: Array = groups[episode.number]["obs"][camera][frame][::-1, ::-1]
        except READ_ERRORS as exc:
            raise UserError(f"an image cannot be read ({exc})") from exc
        return image

    return RecordedData(
        folder=folder,
        layout="LIBERO HDF5",
        fps=None,
        episodes=episodes,
        action="actions",
        state="states",
        cameras=[name for name in CAMERAS.values() if all(name in group["obs"] for group in groups.values())],
        read_image=read_image,
        names=NAMES,
        findings=findings,
    )
