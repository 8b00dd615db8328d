"""Files in LIBERO's layout, without LIBERO: which are read, and what is said of those that are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vla_rl.core.errors import UserError
from vla_rl.core.types import Context, EnvInfo, TaskInfo
from vla_rl.plugins.data.libero_hdf5 import LiberoHDF5Config, plugin

recordings = pytest.importorskip("recordings", reason="needs the extra: pip install 'vla-rl[data]'")
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


def opened(folder: Path, chunk: int = 1) -> Any:
    return plugin.build(LiberoHDF5Config(folder=folder), Context(env=ENV, chunk=chunk))


def test_instructions_are_the_simulators(tmp_path: Path) -> None:
    """The words of a BDDL file differ for every task of libero_object, and for half of libero_goal's."""
    written(tmp_path / "files", 6)
    obs, _ = opened(tmp_path / "files").read_samples(np.arange(2))
    assert obs.instructions == ("pick up the bowl",) * 2


def test_an_episode_of_one_step_gives_no_sample(tmp_path: Path) -> None:
    written(tmp_path / "files", 1, 6)
    assert opened(tmp_path / "files").num_samples() == 5  # nothing shows what the first action of a file acted on


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
            r"actions of episode /data/demo_0, step 0 is not finite: \[nan.*\n?.*\(1 in all\)",
        ),
    ],
)
def test_damaged_files_are_refused(damage: Any, message: str, tmp_path: Path) -> None:
    with h5py.File(written(tmp_path / "files", 6), "a") as file:
        damage(file)
    with pytest.raises(UserError, match=message):
        opened(tmp_path / "files")


def test_two_files_of_a_task_are_refused(tmp_path: Path) -> None:
    written(tmp_path / "published", 6)
    written(tmp_path / "played_again", 6)
    with pytest.raises(UserError, match=r"more than one file of pick: .*played_again.*published"):
        opened(tmp_path)
    assert opened(tmp_path / "published").num_samples() == 5
