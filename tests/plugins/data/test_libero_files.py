"""Files in LIBERO's layout, without LIBERO: which are read, and what is said of those that are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vla_rl.core.contexts import CheckContext, DataContext
from vla_rl.core.errors import UserError
from vla_rl.core.spec.structure import Problems
from vla_rl.core.types import EnvInfo, TaskInfo
from vla_rl.plugins.data.libero_hdf5 import plugin
from vla_rl.plugins.data.libero_hdf5.config import LiberoHDF5Config
from vla_rl.toolkit.data.episodes import EpisodeSelection

recordings = pytest.importorskip("recordings", reason="needs the extra: pip install -e '.[data]'")
h5py = pytest.importorskip("h5py")

ENV = EnvInfo(
    cameras={"agentview": (4, 4), "wrist": (4, 4)},
    state_dim=8,
    action_low=(-1.0,) * 7,
    action_high=(1.0,) * 7,
    tasks=(TaskInfo(name="pick", instruction="pick up the bowl", max_steps=9),),
)


def episode(steps: int) -> dict[str, Any]:
    numbers = np.random.default_rng(steps)
    return {
        "actions": numbers.uniform(-1, 1, (steps, 7)).astype(np.float32),
        "state": numbers.random((steps + 1, 8), np.float32),
        "images": {name: numbers.integers(0, 256, (steps + 1, 4, 4, 3), np.uint8) for name in ENV.cameras},
    }


def written(folder: Path, *lengths: int) -> Path:
    folder.mkdir()
    file = folder / "pick_demo.hdf5"
    recordings.write_libero(file, [episode(steps) for steps in lengths], after=True)
    return file


def opened(folder: Path, chunk: int = 1, **keys: Any) -> Any:
    return plugin.build(LiberoHDF5Config(folder=folder, **keys), DataContext(env=ENV, chunk=chunk))


def test_instructions_are_the_simulators(tmp_path: Path) -> None:
    """The words of a BDDL file differ for every task of libero_object, and for half of libero_goal's."""
    written(tmp_path / "files", 6)
    obs, _ = opened(tmp_path / "files").read_samples(np.arange(2))
    assert obs.instructions == ("pick up the bowl",) * 2


def test_an_episode_of_one_step_gives_no_sample(tmp_path: Path) -> None:
    written(tmp_path / "files", 1, 6)
    assert opened(tmp_path / "files").num_samples() == 5  # nothing shows what the first action of a file acted on


def test_demonstrations_are_chosen_by_their_number(tmp_path: Path) -> None:
    file = written(tmp_path / "files", 4, 6, 9)
    with h5py.File(file, "a") as opened_file:
        opened_file["data"].move("demo_2", "demo_10")  # after demo_9 in numbers, before demo_1 in letters
    for choice, samples in (
        (2, 3 + 5),
        ((10,), 8),
        (("0-1",), 3 + 5),
        (EpisodeSelection(exclude=(1,)), 3 + 8),
    ):
        assert opened(tmp_path / "files", episodes=choice).num_samples() == samples, choice
    with pytest.raises(UserError, match=r"has no episode 2, .*; it has 0-1, 10"):
        opened(tmp_path / "files", episodes=(0, 2))
    instruction = opened(tmp_path / "files").read_samples(np.array([0]))[0].instructions[0]
    chosen = EpisodeSelection(tasks=(f"{instruction[:8]}*",), exclude=("0-1",))
    assert opened(tmp_path / "files", episodes=chosen).num_samples() == 8
    with pytest.raises(ValueError, match="success: LIBERO's files hold demonstrations that all succeed"):
        opened(tmp_path / "files", episodes=EpisodeSelection(success=True))


def without(name: str) -> Any:
    def damage(file: Any) -> None:
        del file["data"][name]

    return damage


def replaced(name: str, rows: Any) -> Any:
    def damage(file: Any) -> None:
        del file["data"][name]
        file["data"][name] = rows

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without("demo_0"), r"pick_demo\.hdf5 is not a file of LIBERO demonstrations: it has no demonstrations"),
        (without("demo_0/obs/ee_states"), "is not a file of LIBERO demonstrations: .*ee_states"),
        (
            without("demo_0/obs/eye_in_hand_rgb"),
            "has no images 'wrist' .*\n  it has: agentview; choose cameras in `env`",
        ),
        (replaced("demo_0/actions", np.zeros((6, 6))), "actions of 6 numbers, LIBERO's have 7"),
        (replaced("demo_0/actions", np.zeros((9, 7))), "lists of different lengths: {'actions': 9, 'states': 6"),
        (
            replaced("demo_0/actions", np.full((6, 7), np.nan)),
            r"actions of episode 0, step 0 is not finite: \[nan.*\(1 in all\).*`episodes: {exclude: \[0\]}`",
        ),
    ],
)
def test_damaged_files_are_refused(damage: Any, message: str, tmp_path: Path) -> None:
    with h5py.File(written(tmp_path / "files", 6), "a") as file:
        damage(file)
    with pytest.raises(UserError, match=message):
        opened(tmp_path / "files")


IMAGES = "demo_0/obs/agentview_rgb"


def claims(name: str, shape: tuple[int, ...], kind: str = "u1") -> Any:
    """A data set that claims this shape and stores nothing of it."""

    def damage(file: Any) -> None:
        del file["data"][name]
        file["data"].create_dataset(
            name, shape, kind, chunks=tuple(min(size, 64) for size in shape), compression="gzip"
        )

    return damage


def elsewhere(how: str) -> Any:
    """The actions are in other files."""

    def damage(file: Any) -> None:
        other = Path(file.filename).with_name("other.hdf5")
        with h5py.File(other, "w") as stranger:
            stranger["x"] = np.zeros((6, 7))
        group = file["data/demo_0"]
        del group["actions"]
        if how == "link":
            group["actions"] = h5py.ExternalLink(str(other), "x")
        elif how == "two links":
            file["hidden"] = h5py.ExternalLink(str(other), "x")
            group["actions"] = h5py.SoftLink("/hidden")
        elif how == "raw":
            group.create_dataset("actions", (6, 7), "f4", external=[("/etc/hostname", 0, h5py.h5f.UNLIMITED)])
        else:
            layout = h5py.VirtualLayout((6, 7), "f8")
            layout[:] = h5py.VirtualSource(str(other), "x", (6, 7))
            group.create_virtual_dataset("actions", layout)

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            claims(IMAGES, (6, 100_000, 100_000, 3)),
            r"agentview_rgb is uint8 \[6, 100000, .*at most 16,777,216 pixels",
        ),
        (claims(IMAGES, (6, 4, 4, 3), "f4"), r"agentview_rgb is float32 \[6, 4, 4, 3\], uint8"),
        (claims(IMAGES, (6, 4, 4)), r"agentview_rgb is uint8 \[6, 4, 4\], numbers \[any, any, any, 3\] are expected"),
        (claims("demo_0/actions", (10**9, 7), "f4"), "more than 10,000,000 numbers are not read"),
        (claims("demo_0/actions", (7,), "f4"), r"actions is float32 \[7\], numbers \[any, any\] are expected"),
        (replaced("demo_0/actions", b"words"), "actions is .*numbers .* are expected"),
        (elsewhere("link"), r"actions is in .*other\.hdf5, other files are not read"),
        (elsewhere("two links"), r"actions is in .*other\.hdf5, other files are not read"),
        (elsewhere("raw"), "actions has its numbers in other files"),
        (elsewhere("virtual"), "actions has its numbers in other files"),
    ],
)
def test_files_made_to_do_harm_are_refused(damage: Any, message: str, tmp_path: Path) -> None:
    with h5py.File(written(tmp_path / "files", 6), "a") as file:
        damage(file)
    with pytest.raises(UserError, match=message):
        opened(tmp_path / "files")


def test_an_image_that_is_cut_is_named(tmp_path: Path) -> None:
    file = written(tmp_path / "files", 6)
    with h5py.File(file, "a") as opened_file:
        images = opened_file["data/demo_0/obs/agentview_rgb"][()]
        del opened_file["data/demo_0/obs/agentview_rgb"]
        packed = opened_file["data"].create_dataset(IMAGES, data=images, compression="gzip", chunks=(1, 4, 4, 3))
        place, size = packed.id.get_chunk_info(0)[2:]
    content = bytearray(file.read_bytes())
    content[place : place + size] = bytes(size)
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"pick_demo\.hdf5: an image of /data/demo_0 cannot be read"):
        opened(tmp_path / "files").read_samples(np.array([0]))


def test_a_folder_for_each_suite_is_read_as_it_is_checked(tmp_path: Path) -> None:
    """Also where the suite's folder is a link, as on shared disks."""
    written(tmp_path / "elsewhere", 6)
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets" / "libero_goal").symlink_to(tmp_path / "elsewhere")
    for folder in (tmp_path / "datasets", tmp_path / "elsewhere"):
        plugin.check(LiberoHDF5Config(folder=folder), CheckContext(chunk=1))
        assert opened(folder).num_samples() == 5
    (tmp_path / "empty").mkdir()
    for folder, message in (("empty", r"holds no files TASK_demo\.hdf5"), ("nowhere", "is not a folder")):
        with pytest.raises(Problems, match=message):
            plugin.check(LiberoHDF5Config(folder=tmp_path / folder), CheckContext(chunk=1))


def test_two_files_of_a_task_are_refused(tmp_path: Path) -> None:
    written(tmp_path / "published", 6)
    written(tmp_path / "played_again", 6)
    with pytest.raises(UserError, match=r"more than one file of pick: .*played_again.*published"):
        opened(tmp_path)
    assert opened(tmp_path / "published").num_samples() == 5
