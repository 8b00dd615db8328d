"""What clients of a policy get over a websocket."""

from __future__ import annotations

import io
import json
import logging
import random
import re
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest
from PIL import Image

pytest.importorskip("websockets", reason="pip install -e '.[serve]'")
msgpack = pytest.importorskip("msgpack", reason="pip install -e '.[serve]'")

from clients import WAIT, Client, opened, request_of, served  # noqa: E402
from trained import sight, train  # noqa: E402
from websockets.exceptions import ConnectionClosed, InvalidStatus  # noqa: E402

import vla_rl  # noqa: E402
from vla_rl.cli.serve import Served  # noqa: E402
from vla_rl.core.errors import UserError  # noqa: E402
from vla_rl.core.plan import Batching  # noqa: E402
from vla_rl.serving.policy import Policy  # noqa: E402
from vla_rl.serving.server import (  # noqa: E402
    MAX_CLIENTS,
    PolicyServer,
    Settings,
    check_address,
    read_api_key,
)
from vla_rl.toolkit.models.acting.key_maps import PRESETS, KeyMap  # noqa: E402
from vla_rl.toolkit.models.acting.openpi import MAX_FRAME, pack_frame, unpack_frame  # noqa: E402


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train(tmp_path_factory.mktemp("served") / "run")


@pytest.fixture
def policy(run):
    return vla_rl.open_policy(run)


def page(server, path):
    with urllib.request.urlopen(f"http://127.0.0.1:{server.settings.port}{path}", timeout=WAIT) as found:
        return found.status, found.headers["Content-Type"], found.read()


def test_a_client_gets_what_the_policy_chooses(policy):
    with served(policy) as server, Client(server) as client:
        for seed in range(5):
            seen = sight(policy, seed)
            reply = client.infer(request_of(seen))
            assert np.array_equal(reply["actions"], policy.act(**seen)) and reply["actions"].dtype == np.float32
            assert reply["policy_timing"]["infer_ms"] > 0
            assert ("prev_total_ms" in reply["server_timing"]) == (seed > 0)
        assert server.answered == 5
        about = client.metadata
        assert about["action_chunk"] == 4 and about["action_dim"] == 3 and about["greedy"] is True
        assert about["cameras"] == {"overhead": [16, 16], "wrist": [16, 16]} and about["state_dim"] == 4
        assert about["action_low"] == list(policy.info.action_low) and about["model"] == "linear"
        assert about["checkpoint_sha256"] == policy.sha256 and about["step"] == 1 and about["protocol"] == 1
        assert about["keys"] == {
            "images": {"overhead": "observation/overhead", "wrist": "observation/wrist"},
            "state": ["observation/state"],
            "state_sizes": [],
            "instruction": "prompt",
        }


def test_eight_clients_get_what_each_gets_alone(policy, monkeypatch):
    """While they ask at once, and their requests are inferred together."""
    batches, act_on = [], Policy.act_on

    def noted(self, obs, *given):
        batches.append(len(obs))
        return act_on(self, obs, *given)

    alone = [[policy.act(**sight(policy, 100 * n + i)) for i in range(10)] for n in range(8)]
    monkeypatch.setattr(Policy, "act_on", noted)
    with served(policy, batching=Batching(max_batch=8, max_wait_s=1.0)) as server:
        batches.clear()

        def ask(n):
            with Client(server) as client:
                together.wait()
                return [client.infer(request_of(sight(policy, 100 * n + i)))["actions"] for i in range(10)]

        together = threading.Barrier(8)
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(ask, range(8)))
    assert np.array_equal(found, alone)
    assert sum(batches) == 80 and max(batches) == 8 and len(batches) < 40


def test_what_comes_while_it_infers_is_inferred_together(policy, monkeypatch):
    """Also where nothing waits for others."""
    batches, act_on, going, go = [], Policy.act_on, threading.Event(), threading.Event()

    def held(self, obs, *given):
        batches.append(len(obs))
        going.set()
        assert go.wait(WAIT)
        return act_on(self, obs, *given)

    with served(policy, batching=Batching(max_batch=4, max_wait_s=0.0)) as server:
        monkeypatch.setattr(Policy, "act_on", held)
        clients = [Client(server) for _ in range(7)]
        for number, client in enumerate(clients):
            client.socket.send(pack_frame(request_of(sight(policy, number))))
            assert going.wait(WAIT)
        until = time.monotonic() + WAIT
        while server._batcher._waiting.qsize() < 6 and time.monotonic() < until:
            time.sleep(0.01)
        go.set()
        found = [unpack_frame(client.socket.recv(timeout=WAIT))["actions"] for client in clients]
    assert batches == [1, 4, 2]
    assert np.array_equal(found, [policy.act(**sight(policy, number)) for number in range(7)])


def test_a_request_that_fails_fails_alone(policy, monkeypatch, caplog):
    act_on = Policy.act_on

    def broken(self, obs, *given):
        if "break" in obs.instructions:
            raise ZeroDivisionError("/secret/path.py:7")
        return act_on(self, obs, *given)

    seen = sight(policy, 1)
    wanted = policy.act(**seen)
    monkeypatch.setattr(Policy, "act_on", broken)
    with (
        served(policy, batching=Batching(max_batch=2, max_wait_s=WAIT)) as server,
        Client(server) as good,
        Client(server) as bad,
    ):
        with ThreadPoolExecutor(2) as pool:
            failing = pool.submit(bad.infer, request_of({**seen, "instruction": "break"}))
            assert np.array_equal(good.infer(request_of(seen))["actions"], wanted)
            with pytest.raises(RuntimeError, match="^the policy failed; its server's log says why$"):
                failing.result(WAIT)
        with pytest.raises(ConnectionClosed) as closed:
            bad.socket.recv(timeout=WAIT)
        assert closed.value.rcvd.code == 1011
    assert "/secret/path.py:7" in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"observation/overhead": None}, "lacks 'observation/overhead'; it has .*'observation/wrist'.* wanted are"),
        ({"observation/state": None}, "lacks 'observation/state'"),
        ({"observation/state": np.zeros(3)}, r"shape \[3\]; it must be 4"),
        ({"observation/state": [[1, 2], "x"]}, "it must be 4 numbers"),
        ({"observation/state": [1e300, 0, 0, 0]}, "not finite"),
        ({"observation/overhead": np.zeros((8, 8, 3), np.uint8)}, r"is \[8, 8\] .* trained on \[16, 16\].* --resize"),
        ({"observation/overhead": np.zeros((16, 16, 3), np.int64)}, "is of int64; send uint8"),
        ({"observation/overhead": np.full((16, 16, 3), 2.0)}, "not within 0 and 1"),
        ({"observation/overhead": np.full((16, 16, 3), np.nan)}, "not within 0 and 1"),
        ({"observation/overhead": np.zeros((16, 16))}, r"is \[16, 16\]; an image is"),
        ({"observation/overhead": "me"}, "is str; an image is"),
        ({"prompt": None}, "instruction is none"),
        ({"prompt": 7}, "instruction is 7"),
    ],
)
def test_a_wrong_request_gets_what_is_wanted(policy, change, message):
    request = {key: value for key, value in {**request_of(sight(policy, 0)), **change}.items() if value is not None}
    with served(policy) as server, Client(server) as client:
        with pytest.raises(RuntimeError, match=message):
            client.infer(request)
        with pytest.raises(ConnectionClosed):
            client.socket.recv(timeout=WAIT)
        assert server.refused == 1


def test_images_of_clients_are_brought_into_one_form(policy):
    seen = sight(policy, 3)
    wanted = policy.act(**seen)
    request, images = request_of(seen), seen["images"]
    ways = [
        lambda image: image.astype(np.float32) / 255,
        lambda image: image.transpose(2, 0, 1),
        lambda image: (image / 255).transpose(2, 0, 1),
    ]
    with served(policy, prompt=seen["instruction"]) as server, Client(server) as client:
        for way in ways:
            turned = {f"observation/{name}": np.ascontiguousarray(way(image)) for name, image in images.items()}
            assert np.array_equal(client.infer({**request, **turned})["actions"], wanted)
        assert np.array_equal(client.infer({**request, "prompt": seen["instruction"].encode()})["actions"], wanted)
        del request["prompt"]
        assert np.array_equal(client.infer({**request, "more": 1})["actions"], wanted)
    flipped = KeyMap(images=("images/a", "images/b"), state=("x", "y"), instruction="do", rotate_180=True, resize=True)
    large = {
        name: image[::-1, ::-1].repeat(2, 0).repeat(2, 1) for name, image in zip("ab", images.values(), strict=True)
    }
    with served(policy, keys=flipped) as server, Client(server) as client:
        parts = {"x": seen["state"][:3], "y": np.float64(seen["state"][3]), "do": seen["instruction"]}
        assert np.array_equal(client.infer({"images": large, **parts})["actions"], wanted)


def test_pages_of_health_are_there_while_it_infers(policy, monkeypatch):
    act_on, going, go = Policy.act_on, threading.Event(), threading.Event()

    def slow(self, obs, *given):
        going.set()
        assert go.wait(WAIT)
        return act_on(self, obs, *given)

    with served(policy, api_key="k") as server:
        monkeypatch.setattr(Policy, "act_on", slow)
        with Client(server, additional_headers={"Authorization": "Api-Key k"}) as client, ThreadPoolExecutor(1) as pool:
            asked = pool.submit(client.infer, request_of(sight(policy, 0)))
            assert going.wait(WAIT)
            assert page(server, "/healthz")[::2] == (200, b"OK\n")
            go.set()
            assert asked.result(WAIT)["actions"].shape == (4, 3)


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Api-Key wrong"}, {"Authorization": "Bearer right"}])
def test_no_client_comes_in_without_the_key(policy, headers):
    with served(policy, api_key="right") as server:
        with pytest.raises(InvalidStatus) as refused:
            opened(server, additional_headers=headers)
        assert refused.value.response.status_code == 401
        with Client(server, additional_headers={"Authorization": "Api-Key right"}) as client:
            assert client.metadata["protocol"] == 1


def test_the_key_is_one_line_of_a_file(tmp_path):
    (tmp_path / "key").write_text("  abc\n")
    assert read_api_key(tmp_path / "key") == "abc"
    for content in (b"", b"\n", b"a\nb", "ä".encode(), b"\xff"):
        (tmp_path / "key").write_bytes(content)
        with pytest.raises(UserError, match="holds no key|cannot be read"):
            read_api_key(tmp_path / "key")
    with pytest.raises(UserError, match="cannot be read"):
        read_api_key(tmp_path / "none")


def test_there_is_a_limit_of_clients(policy, monkeypatch):
    monkeypatch.setattr("vla_rl.serving.server.MAX_CLIENTS", 2)
    with served(policy) as server:
        with Client(server), Client(server), pytest.raises(InvalidStatus) as refused:
            opened(server)
        assert refused.value.response.status_code == 503
        until = time.monotonic() + WAIT
        while server._clients and time.monotonic() < until:
            time.sleep(0.01)
        with Client(server) as client:
            assert client.metadata["protocol"] == 1


def hostile(random_, request):
    """A frame that is cut, disturbed, nested, too long, of another kind, or nonsense."""
    frame = pack_frame(request)
    kind = random_.randrange(9)
    if kind == 0:
        return frame[: random_.randrange(len(frame))]
    if kind == 1:  # in the part with the keys, where each byte means something
        data = bytearray(frame)
        for _ in range(random_.randrange(1, 20)):
            data[random_.choice([random_.randrange(60), random_.randrange(len(data))])] = random_.randrange(256)
        return bytes(data)
    if kind == 2:
        return random_.randbytes(random_.randrange(200))
    if kind == 3:
        return bytes([random_.choice([0x91, 0x81])]) * random_.randrange(1, 3000)
    if kind == 4:
        return random_.choice(["", "infer", "{}", "x" * 10_000])
    if kind == 5:
        return (
            random_.choice([b"\xdd", b"\xdf", b"\xc6", b"\xdb", b"\xc9"]) + b"\xff" * 4 + bytes(random_.randrange(20))
        )
    if kind == 6:
        key = random_.choice([b"__ndarray__", b"__npgeneric__", "__image__", "__ndarray__"])
        dtype = random_.choice(["|O", "<f4", "O", "V8", "<c8", "f4,f4", "<M8[s]", None, 3])
        shape = random_.choice([[2**40, 2**40], [-1], [0], "x", None, [2.5], [1] * 100])
        raw = {key: True, b"data": bytes(random_.randrange(16)), b"dtype": dtype, b"shape": shape, "format": "png"}
        return msgpack.packb({**dict.fromkeys(request, 1), "observation/state": raw})
    if kind == 7:
        return msgpack.packb([[None] * 4000] * random_.randrange(1, 40))
    odd = random_.choice(
        [None, -1, 1e300, "x", [], {}, np.zeros(0), np.zeros((0, 0, 3)), np.zeros((3, 10**5, 1), "u1")]
    )
    return pack_frame({**request, random_.choice(list(request)): odd})


def test_a_thousand_hostile_frames(policy, caplog):
    """Each is answered by an error in words and a close, or is harmless; the server continues, and does not grow."""
    caplog.set_level(logging.CRITICAL)
    seen, random_ = sight(policy, 0), random.Random(0)
    request, wanted = request_of(seen), policy.act(**seen)
    process, texts = psutil.Process(), []
    with served(policy) as server:
        for n in range(1000):
            if n == 200:
                before = process.memory_info().rss
            with opened(server) as socket:
                socket.recv(timeout=WAIT)
                socket.send(hostile(random_, request))
                reply = socket.recv(timeout=WAIT)
                if isinstance(reply, str):
                    texts.append(reply)
                    with pytest.raises(ConnectionClosed) as closed:
                        socket.recv(timeout=WAIT)
                    assert closed.value.rcvd.code == 1011
                else:
                    assert unpack_frame(reply)["actions"].shape == (4, 3)
        assert process.memory_info().rss - before < 64 << 20
        assert len(texts) > 800 and all(len(text) < 2000 and "Traceback" not in text for text in texts)
        with Client(server) as client:
            assert np.array_equal(client.infer(request)["actions"], wanted)
        with opened(server) as socket:
            socket.recv(timeout=WAIT)
            with pytest.raises(ConnectionClosed) as closed:
                socket.send(bytes(MAX_FRAME + 1))
                socket.recv(timeout=WAIT)
            assert closed.value.rcvd.code == 1009
        with Client(server) as client:
            assert np.array_equal(client.infer(request)["actions"], wanted)


def test_clients_that_vanish_leave_nothing(policy):
    with served(policy) as server:
        for _ in range(20):
            client = Client(server)
            client.socket.send(pack_frame(request_of(sight(policy, 0))))
            client.socket.socket.close()
        with Client(server) as client:
            assert client.infer(request_of(sight(policy, 0)))["actions"].shape == (4, 3)
        until = time.monotonic() + WAIT
        while server._clients and time.monotonic() < until:
            time.sleep(0.01)
        assert not server._clients and MAX_CLIENTS > 20


def test_a_client_that_is_killed_leaves_nothing(policy, tmp_path, bare_fork_server):
    """Another process, while it asks one thing after another."""
    asks = """
import sys
from websockets.sync.client import connect
with connect(sys.argv[1], compression=None) as socket:
    socket.recv()
    request = open(sys.argv[2], "rb").read()
    while True:
        socket.send(request)
        socket.recv()
"""
    request = request_of(sight(policy, 0))
    with served(policy) as server:
        (tmp_path / "request").write_bytes(pack_frame(request))
        address = f"ws://127.0.0.1:{server.settings.port}"
        with bare_fork_server.start_python("-c", asks, address, str(tmp_path / "request")) as client:
            until = time.monotonic() + WAIT
            while server.answered < 20 and time.monotonic() < until:
                time.sleep(0.01)
            client.kill()
        while server._clients and time.monotonic() < until:
            time.sleep(0.01)
        assert server.answered >= 20 and not server._clients
        with Client(server) as other:
            assert np.array_equal(other.infer(request)["actions"], policy.act(**sight(policy, 0)))


def test_a_port_that_is_taken(policy):
    said = r"cannot listen on 127.0.0.1:\d+: another program does, .*choose another --port"
    with served(policy) as server:
        with pytest.raises(UserError, match=said):
            Served(PolicyServer(policy, Settings(port=server.settings.port)))
        with pytest.raises(UserError, match=said):
            check_address("127.0.0.1", server.settings.port)
    check_address("127.0.0.1", 0)


def test_roboarena(policy):
    seen = sight(policy, 2)
    wanted = policy.act(**seen)
    request = {
        "observation/exterior_image_0_left": seen["images"]["overhead"],
        "observation/wrist_image_left": seen["images"]["wrist"],
        "observation/joint_position": seen["state"][:3],
        "observation/gripper_position": seen["state"][3:],
        "prompt": seen["instruction"],
        "session_id": "s",
    }
    with served(policy, dialect="roboarena") as server, Client(server) as client:
        assert client.metadata == {
            "image_resolution": [16, 16],
            "needs_wrist_camera": True,
            "n_external_cameras": 1,
            "needs_stereo_camera": False,
            "needs_session_id": False,
            "action_space": "joint_position",
        }
        for _ in range(2):
            reply = client.infer({**request, "endpoint": "infer"})
            assert list(reply) == ["actions"] and np.array_equal(reply["actions"], wanted)
            client.socket.send(pack_frame({"endpoint": "reset"}))
            assert client.socket.recv(timeout=WAIT) == "reset successful"
    for endpoint, message in (("kill", "no endpoint 'kill'"), (np.zeros(3), "the endpoint is a text")):
        with served(policy, dialect="roboarena") as server, pytest.raises(RuntimeError, match=message):
            Client(server).infer({"endpoint": endpoint})


def png(image):
    file = io.BytesIO()
    Image.fromarray(image).save(file, "png")
    return {"__image__": True, "format": "png", "data": file.getvalue(), "shape": list(image.shape)}


def test_vla_evaluation_harness(policy):
    """Envelopes with numbers, PNG images, an action an observation out of a chunk that an episode's start clears."""
    seen, number = sight(policy, 2), iter(range(7, 99))
    wanted = policy.act(**seen)
    payload = {
        "images": {name: png(image) for name, image in seen["images"].items()},
        "states": {"__ndarray__": True, "data": seen["state"].tobytes(), "dtype": "<f8", "shape": [4]},
        "task_description": seen["instruction"],
    }
    with served(policy, dialect="vla-eval") as server, opened(server) as socket:

        def say(kind, payload, hears=True):
            seq = next(number)
            socket.send(msgpack.packb({"type": kind, "payload": payload, "seq": seq, "timestamp": 1.0}))
            if not hears:
                return None
            reply = unpack_frame(socket.recv(timeout=WAIT))
            assert reply["seq"] == seq and isinstance(reply["timestamp"], float)
            return reply["type"], reply["payload"]

        kind, hello = say("hello", {"harness_version": "0.4", "protocol_version": 1})
        assert kind == "hello" and hello["protocol_version"] == 1 and hello["model_server"] == "linear"
        params = {"send_wrist_image": True, "send_state": True, "quat_no_antipodal": True}
        assert hello["observation_params"] == params
        for played in (6, 2, 4):
            say("episode_start", {}, hears=False)
            for i in range(played):
                kind, answer = say("observation", payload)
                assert kind == "action" and np.array_equal(answer["actions"], wanted[i % 4])
            say("episode_end", {"success": False}, hears=False)
        assert server.answered == 4
        assert say("observation", {})[0] == "error"
        socket.send(b"\x80")
        assert "lacks type, payload, seq, timestamp" in unpack_frame(socket.recv(timeout=WAIT))["payload"]["error"]
        assert say("dance", {})[1] == {"error": "there is no message of type 'dance'"}
        socket.send(pack_frame({"type": np.zeros(2), "payload": {}, "seq": 1, "timestamp": 1.0}))
        assert "the type of a message is a text" in unpack_frame(socket.recv(timeout=WAIT))["payload"]["error"]
        assert say("observation", payload)[0] == "action"
        status, kind, body = page(server, "/health")
        assert (status, kind, json.loads(body)) == (200, "application/json", {"status": "ok"})
        with pytest.raises(urllib.error.HTTPError, match="426"):
            page(server, "/anything")


def test_presets_are_openpis_robots(policy):
    seen = sight(policy, 4)
    wanted = policy.act(**seen)
    top, wrist = seen["images"].values()
    state, text = seen["state"], seen["instruction"]
    requests = {
        "libero": {
            "observation/image": top,
            "observation/wrist_image": wrist,
            "observation/state": state,
            "prompt": text,
        },
        "droid": {
            "observation/exterior_image_1_left": top,
            "observation/wrist_image_left": wrist,
            "observation/joint_position": state[:3],
            "observation/gripper_position": state[3],
            "prompt": text,
        },
        "aloha": {
            "state": state,
            "images": {"cam_high": top.transpose(2, 0, 1), "cam_left_wrist": wrist.transpose(2, 0, 1)},
            "prompt": text,
        },
    }
    assert requests.keys() == PRESETS.keys()
    for name, request in requests.items():
        with served(policy, keys=PRESETS[name]) as server, Client(server) as client:
            assert np.array_equal(client.infer(request)["actions"], wanted), name
    with pytest.raises(UserError, match=re.escape("no key for camera 'wrist' of the policy")):
        PolicyServer(policy, Settings(keys=KeyMap(images={"overhead": "a"})))
