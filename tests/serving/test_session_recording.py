"""What `vla-rl serve --record` keeps: sessions as they were served."""

from __future__ import annotations

import signal
import subprocess

import numpy as np
import pytest

pytest.importorskip("websockets", reason="pip install -e '.[serve]'")
pytest.importorskip("msgpack", reason="pip install -e '.[serve]'")
pytest.importorskip("datasets", reason="pip install -e '.[data]'")

from clients import WAIT, Client, opened, request_of, served
from trained import sight, train

import vla_rl
from vla_rl.core.contexts import DataContext
from vla_rl.core.errors import UserError
from vla_rl.plugins.data.lerobot import plugin as reader
from vla_rl.plugins.data.lerobot.config import LeRobotConfig
from vla_rl.serving import recording
from vla_rl.toolkit.data.lerobot import LeRobotWriter
from vla_rl.toolkit.models.acting.openpi import pack_frame, unpack_frame


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train(tmp_path_factory.mktemp("served") / "run")


@pytest.fixture(scope="module")
def policy(run):
    return vla_rl.open_policy(run)


def read(folder, policy):
    return reader.build(LeRobotConfig(folder=folder), DataContext(env=policy.info, chunk=policy.chunk))


def episodes(folder):
    import pyarrow.parquet as pq

    return [len(pq.read_table(file)) for file in sorted(folder.glob("data/*/*.parquet"))]


def test_sessions_are_episodes(policy, tmp_path):
    """Equal to the bit, of two clients whose requests alternate; one that asks nothing leaves nothing."""
    asked = [request_of({**sight(policy, seed), "instruction": "pick up the red block"}) for seed in range(4)]
    with (
        served(policy, record=tmp_path) as server,
        Client(server) as first,
        Client(server) as second,
        Client(server),
    ):
        answers = [c.infer(r)["actions"] for c, r in zip((first, second, first, first), asked, strict=True)]
    assert sorted(episodes(tmp_path)) == [1, 3] and server.recorder.episodes == 2
    data = read(tmp_path, policy)
    obs, actions = data.read_samples(np.arange(data.num_samples()))
    order = [0, 2, 3, 1] if episodes(tmp_path) == [3, 1] else [1, 0, 2, 3]
    for row, seed in enumerate(order):
        seen = sight(policy, seed)
        assert np.array_equal(actions[row], answers[seed])
        assert np.array_equal(obs.state[row], np.float32(seen["state"]))
        assert all(np.array_equal(obs.images[camera][row], image) for camera, image in seen["images"].items())
    assert set(obs.instructions) == {"pick up the red block"}


def test_a_reset_and_another_instruction_begin_an_episode(policy, tmp_path):
    with served(policy, record=tmp_path, dialect="roboarena") as server:
        socket = opened(server)
        unpack_frame(socket.recv(timeout=WAIT))
        frame = {**request_of(sight(policy, 0)), "endpoint": "infer"}
        keys = {f"observation/{camera}": key for camera, key in server._keys.camera_keys(policy.info).items()}
        request = {keys.get(name, name): value for name, value in frame.items()}
        request |= {"observation/joint_position": np.zeros(3), "observation/gripper_position": np.zeros(1)}
        request.pop("observation/state", None)
        for what in (request, request, {"endpoint": "reset"}, request, {**request, "prompt": "another"}):
            socket.send(pack_frame(what))
            socket.recv(timeout=WAIT)
        socket.close()
    assert episodes(tmp_path) == [2, 1, 1]


def test_memory_is_bounded(policy, tmp_path, monkeypatch):
    """The longest session is written when all together are too large, and continues as another episode."""
    monkeypatch.setattr(recording, "MAX_BYTES", 5_000)
    with served(policy, record=tmp_path) as server, Client(server) as client:
        seen = sight(policy, 0)
        for _ in range(7):
            client.infer(request_of(seen))
    assert sum(episodes(tmp_path)) == 7 and max(episodes(tmp_path)) <= 3


def test_what_cannot_be_written_ends_the_recording_only(policy, tmp_path, monkeypatch, caplog):
    def full(self, recorded):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LeRobotWriter, "add", full)
    with served(policy, record=tmp_path) as server:
        for seed in range(2):
            with Client(server) as client:
                assert client.infer(request_of(sight(policy, seed)))["actions"].shape == (4, 3)
    assert "nothing more is recorded: [Errno 28] No space left on device" in caplog.text


def test_a_folder_of_something_else_is_refused_before_anybody_comes(policy, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="is neither a LeRobot data set nor empty"), served(policy, record=tmp_path):
        pass


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_sigterm_writes_what_was_recorded(run, policy, tmp_path, fork_server, number):
    """The episode of a client that is still connected is written."""
    command = ("-m", "vla_rl.cli.main", "serve", run, "--port", "0", "--record", tmp_path / "set")
    server = fork_server.start_python(*command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    line = next(line for line in server.stdout if "ws://" in line)

    class Address:
        class settings:
            port = int(line.split("ws://127.0.0.1:")[1].split()[0])

    with Client(Address) as client:
        client.infer(request_of(sight(policy, 0)))
        client.infer(request_of({**sight(policy, 1), "instruction": sight(policy, 0)["instruction"]}))
        server.send_signal(number)
        said = server.communicate(timeout=WAIT)[0]
    assert server.returncode == 0, said
    assert f"recorded 1 episodes in {tmp_path / 'set'}" in said
    assert episodes(tmp_path / "set") == [2]
