"""LIBERO's demonstration files, written from real LIBERO as its own script and OpenVLA's leave them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from vla_rl.core.catalogue import load
from vla_rl.core.contexts import DataContext, EnvContext
from vla_rl.core.errors import UserError
from vla_rl.plugins.data.libero_hdf5 import plugin
from vla_rl.plugins.data.libero_hdf5.config import LiberoHDF5Config
from vla_rl.testing import check_data

recordings = pytest.importorskip("recordings", reason="needs the extra: pip install -e '.[data]'")
pytest.importorskip("libero", reason="needs LIBERO: pip install -e '.[libero]'")
pytestmark = pytest.mark.sim

CHUNK, STEPS = 3, 9
STILL = (2, 5)
"""Steps that do nothing."""


@pytest.fixture(scope="module")
def recorded() -> Any:
    """(EnvInfo, two demonstrations of task 0)."""
    libero = load("env", "libero")
    config = libero.config(suite="libero_spatial", tasks=(0,), cameras={"agentview": 64, "wrist": 64})
    env = libero.build(config, EnvContext(num_envs=1, chunk=1))
    actions = np.random.default_rng(0).uniform(-1, 1, (STEPS, 7)).astype(np.float32)
    actions[:, -1] = np.where(np.arange(STEPS) < 7, -1, 1)
    actions[list(STILL), :-1] = 0
    try:
        return env.info, recordings.record(env, [s.id for s in env.reset_states("train")[:2]], STEPS, actions)
    finally:
        env.close()


def written(recorded: Any, folder: Path, after: bool) -> Path:
    info, episodes = recorded
    folder.mkdir()
    recordings.write_libero(folder / f"{info.tasks[0].name}_demo.hdf5", episodes, after)
    return folder


@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize("drop", [True, False])
def test_a_sample_is_what_the_simulator_shows_and_the_actions_that_followed(
    after: bool, drop: bool, recorded: Any, tmp_path: Path
) -> None:
    info, episodes = recorded
    config = LiberoHDF5Config(folder=written(recorded, tmp_path / "files", after), drop_no_ops=drop)
    check_data(plugin, config, env=info, chunk=CHUNK)
    data = plugin.build(config, DataContext(env=info, chunk=CHUNK))
    kept = [t for t in range(after, STEPS) if not (drop and t in STILL)]  # after: nothing shows what step 0 acted on
    windows = len(kept) - CHUNK + 1
    assert data.num_samples() == 2 * windows
    obs, actions = data.read_samples(np.arange(2 * windows))
    for sample in range(2 * windows):
        episode, w = episodes[sample // windows], sample % windows
        assert np.array_equal(actions[sample], episode["actions"][kept[w : w + CHUNK]])
        assert np.array_equal(obs.state[sample], episode["state"][kept[w]])
        assert obs.instructions[sample] == episode["instruction"]
        for camera in info.cameras:
            assert np.array_equal(obs.images[camera][sample], episode["images"][camera][kept[w]]), (camera, sample)
    assert len(data.data_statistics()["state"]["q01"]) == 8
    recordings.check_differences(data, (*[None] * 6, 6))


def test_said_by_the_spec(recorded: Any, tmp_path: Path) -> None:
    info, episodes = recorded
    folder = written(recorded, tmp_path / "files", after=True)
    keys = {"folder": folder, "drop_no_ops": False, "episodes": 1}
    data = plugin.build(LiberoHDF5Config(observed="before", **keys), DataContext(env=info, chunk=CHUNK))
    assert data.num_samples() == STEPS - CHUNK + 1
    assert np.array_equal(data.read_samples(np.array([0]))[1][0], episodes[0]["actions"][:CHUNK])


def test_short_demonstrations_say_what_shortened_them(recorded: Any, tmp_path: Path) -> None:
    info, _ = recorded
    folder = written(recorded, tmp_path / "files", after=True)
    path = next(folder.iterdir())
    with pytest.raises(
        UserError, match=rf"drop_no_ops leaves \d+ of {2 * STEPS} steps; false keeps all.*rollout.chunk to"
    ):
        plugin.build(LiberoHDF5Config(folder=folder), DataContext(env=info, chunk=STEPS - 1))
    with h5py.File(path, "r+") as file:
        for demonstration in file["data"].values():
            demonstration["actions"][:, :] = 0
    with pytest.raises(UserError, match=rf"2 episodes have no steps \(drop_no_ops leaves 0 of {2 * STEPS} steps"):
        plugin.build(LiberoHDF5Config(folder=folder), DataContext(env=info, chunk=CHUNK))


def test_demonstrations_without_observations_are_refused_with_what_renders_them(recorded: Any, tmp_path: Path) -> None:
    info, _ = recorded
    folder = written(recorded, tmp_path / "files", after=True)
    with h5py.File(next(folder.iterdir()), "r+") as file:
        for demonstration in file["data"].values():
            del demonstration["obs"]
    with pytest.raises(UserError, match="no observations, as robosuite records demonstrations; .*create_dataset.py"):
        plugin.build(LiberoHDF5Config(folder=folder), DataContext(env=info, chunk=CHUNK))


def test_folders_that_do_not_fit_are_refused(recorded: Any, tmp_path: Path) -> None:
    info, _ = recorded

    def open_folder(folder: Path) -> Any:
        return plugin.build(LiberoHDF5Config(folder=folder), DataContext(env=info, chunk=CHUNK))

    with pytest.raises(UserError, match="is not a folder; give the one that holds the files"):
        open_folder(tmp_path / "nothing")
    with pytest.raises(UserError, match=r"has no demonstrations \(TASK_demo\.hdf5\) of: pick_up_the_black_bowl"):
        open_folder(tmp_path)
    (tmp_path / f"{info.tasks[0].name}_demo.hdf5").write_bytes(b"half a file")
    with pytest.raises(UserError, match="is not a file of LIBERO demonstrations"):
        open_folder(tmp_path)
