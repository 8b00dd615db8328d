"""What strangers may do to a server, and that others are served meanwhile."""

from __future__ import annotations

import io
import re
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest
from PIL import Image

pytest.importorskip("websockets", reason="pip install -e '.[serve]'")
msgpack = pytest.importorskip("msgpack", reason="pip install -e '.[serve]'")

from clients import WAIT, Client, opened, request_of, served  # noqa: E402
from trained import sight, train  # noqa: E402
from typer.testing import CliRunner  # noqa: E402
from websockets.exceptions import ConnectionClosed, InvalidStatus  # noqa: E402

import vla_rl  # noqa: E402
from vla_rl.cli.main import app  # noqa: E402
from vla_rl.core.errors import UserError  # noqa: E402
from vla_rl.core.plan import Batching  # noqa: E402
from vla_rl.serving import clients as bounds  # noqa: E402
from vla_rl.serving.access import Access, own_names, url_of  # noqa: E402
from vla_rl.serving.policy import Policy  # noqa: E402
from vla_rl.serving.server import PolicyServer, Settings  # noqa: E402
from vla_rl.toolkit.models.acting.key_maps import default_key_map  # noqa: E402
from vla_rl.toolkit.models.acting.openpi import EncodedImage, pack_frame, unpack_frame  # noqa: E402


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train(tmp_path_factory.mktemp("served") / "run")


@pytest.fixture(scope="module")
def policy(run):
    return vla_rl.open_policy(run)


@pytest.fixture(scope="module")
def black():
    """4096 x 4096 pixels in a few kilobytes."""
    return png(np.zeros((4096, 4096, 3), np.uint8))


def png(image):
    file = io.BytesIO()
    Image.fromarray(image).save(file, "png")
    return {"__image__": True, "format": "png", "data": file.getvalue()}


def raw(server, *headers, path="/", buffer=None):
    """A socket on which a websocket was asked for with these headers, and the server's reply. `buffer`: bytes that the
    system takes in for it."""
    line = socket.socket()
    line.settimeout(WAIT)
    if buffer is not None:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    line.connect(("127.0.0.1", server.settings.port))
    opening = ["Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13"]
    opening += ["Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==", *headers]
    if not any(header.lower().startswith("host:") for header in headers):
        opening.append(f"Host: 127.0.0.1:{server.settings.port}")
    line.sendall("\r\n".join([f"GET {path} HTTP/1.1", *opening, "", ""]).encode())
    reply = line.recv(65536).decode("utf-8", "replace")
    while "\r\n\r\n" not in reply or (" 403 " in reply and not reply.endswith("\n")):
        reply += line.recv(65536).decode("utf-8", "replace")
    return line, reply


def frame(opcode, content, length=None):
    """A websocket's frame, masked with zeros; its header may promise another length."""
    return (
        struct.pack("!BBQ", 0x80 | opcode, 0x80 | 127, len(content) if length is None else length) + bytes(4) + content
    )


def is_closed(line):
    line.settimeout(WAIT)
    try:
        while line.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return True


def eventually(condition):
    until = time.monotonic() + WAIT
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
    return condition()


# ------------------------------------------------------------------------------------------------------------ frames


@pytest.mark.parametrize("dialect", ["openpi", "roboarena", "vla-eval"])
def test_images_that_were_not_asked_for_are_not_decoded(policy, black, monkeypatch, dialect):
    """40 of them would be 2 GB of pixels and a minute."""
    decoded, decode = [], EncodedImage.decode
    monkeypatch.setattr(EncodedImage, "decode", lambda self: decoded.append(self.size) or decode(self))
    seen = sight(policy, 0)
    wanted, process = policy.act(**seen), psutil.Process()
    images = {name: png(image) for name, image in seen["images"].items()}
    keys = default_key_map(policy.info)
    request = {
        **{keys.images[name]: image for name, image in images.items()},
        "observation/state": seen["state"].tolist(),
        "prompt": seen["instruction"],
    }
    with served(policy, dialect=dialect, keys=keys) as server, opened(server) as line:
        request |= {f"more/{number}": black for number in range(40)}
        message = request if dialect != "vla-eval" else {"type": "observation", "payload": request, "seq": 1}
        if dialect != "vla-eval":
            line.recv(timeout=WAIT)
        else:
            message["timestamp"] = 1.0
        before = process.memory_info().rss
        line.send(msgpack.packb(message))
        reply = unpack_frame(line.recv(timeout=WAIT))
        answer = reply["payload"]["actions"] if dialect == "vla-eval" else reply["actions"]
        assert np.array_equal(answer, wanted[0] if dialect == "vla-eval" else wanted)
        assert process.memory_info().rss - before < 100 << 20
    assert decoded == [(16, 16), (16, 16)]


@pytest.mark.parametrize(
    ("resize", "message"), [(False, r"is \[4096, 4096\] .* trained on"), (True, "too large.*4096")]
)
def test_images_that_are_wanted_are_measured_before_they_are_decoded(policy, black, monkeypatch, resize, message):
    monkeypatch.setattr(EncodedImage, "decode", lambda self: pytest.fail("decoded"))
    keys = default_key_map(policy.info)
    keys = type(keys)(images=keys.images, state=keys.state, resize=resize)
    request = {**request_of(sight(policy, 0)), **dict.fromkeys(keys.images.values(), black)}
    with served(policy, keys=keys) as server, Client(server) as client, pytest.raises(RuntimeError, match=message):
        client.infer(request)


def test_others_are_answered_while_a_request_is_decoded(policy, monkeypatch):
    seen = sight(policy, 0)
    reading, go, decode = threading.Event(), threading.Event(), EncodedImage.decode

    def slow(self):
        reading.set()
        assert go.wait(WAIT)
        return decode(self)

    monkeypatch.setattr(EncodedImage, "decode", slow)
    monkeypatch.setattr("vla_rl.serving.server.READERS", 2)
    images = {f"observation/{name}": png(image) for name, image in seen["images"].items()}
    with (
        served(policy) as server,
        Client(server) as slow_one,
        ThreadPoolExecutor(1) as pool,
    ):
        asked = pool.submit(slow_one.infer, {**request_of(seen), **images})
        assert reading.wait(WAIT)
        with Client(server) as client:
            wanted = client.infer(request_of(seen))["actions"]
        go.set()
        assert np.array_equal(asked.result(WAIT)["actions"], wanted)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("observation/state", np.zeros(8_000_000, np.uint8), r"shape \[8000000\]; it must be 4 numbers"),
        ("previous_actions", np.zeros((4_000_000, 3), np.uint8), r"shape \[4000000, 3\]"),
        ("prompt", b"\n" + b"x" * 5_000_000, "of 1 to 1000 characters"),
        ("prompt", "x" * 2_000_000, "cannot be read"),
    ],
)
def test_what_is_too_long_is_not_copied(policy, monkeypatch, key, value, message):
    monkeypatch.setattr(Policy, "continues", True)
    with served(policy) as server, Client(server) as client, pytest.raises(RuntimeError, match=message) as refused:
        client.infer({**request_of(sight(policy, 0)), key: value})
    assert len(str(refused.value)) < 1000


def test_a_text_that_is_not_utf_8_and_frames_of_other_kinds_close_the_connection(policy):
    with served(policy) as server:
        for opcode, code in ((1, 1007), (3, 1002), (0, 1002)):
            line, _ = raw(server)
            line.sendall(frame(opcode, b"\xff\xfe"))
            said, closing = b"", re.compile(rb"\x88." + re.escape(struct.pack("!H", code)), re.DOTALL)
            while not closing.search(said):
                part = line.recv(65536)
                assert part, said
                said += part
            line.close()
        with Client(server) as client:
            assert client.infer(request_of(sight(policy, 0)))["actions"].shape == (4, 3)


# ------------------------------------------------------------------------------------------------ pages and hosts


def test_web_pages_and_foreign_hosts_are_refused(policy, caplog):
    """Also for the pages of health; robots send no `Origin`, and ask for the machine."""
    with served(policy) as server:
        port = server.settings.port
        for header in (
            "Origin: http://evil.example",
            "Origin: null",
            f"Origin: http://localhost:{port}",
            "origin: file://",
            "Host: evil.example",
            f"Host: evil.example:{port}",
            f"Host: localhost.evil.example:{port}",
            f"Host: 192.0.2.7:{port}",
            "Host: localhost:x",
            "Host: 127.0.0.1@evil.example",
            "Host: ",
            f"Host: localhost\r\nHost: 127.0.0.1:{port}",
        ):
            for path in ("/", "/healthz"):
                assert raw(server, header, path=path)[1].startswith("HTTP/1.1 403 "), header
        for host in ("localhost", "LOCALHOST", "127.0.0.1", "127.0.0.2", "[::1]", "localhost."):
            for at in (host, f"{host}:{port}", f"{host}:9999"):  # another port: behind a tunnel
                assert raw(server, f"Host: {at}")[1].startswith("HTTP/1.1 101 "), at
        assert raw(server, f"Host: localhost:{port}", path="/healthz")[1].endswith("OK\n")
        said = raw(server, "Origin: http://evil.example")[1]
        assert "--allow-origin http://evil.example" in said
        assert "--allow-host evil.example" in raw(server, "Host: evil.example:1")[1]
    assert "was refused: this server does not answer web pages" in caplog.text
    with served(policy, allow_origins=["http://localhost:3000"], allow_hosts=["robot.lan"]) as server:
        for header in ("Origin: http://localhost:3000", "Host: robot.lan:8000", "Host: ROBOT.lan"):
            assert raw(server, header)[1].startswith("HTTP/1.1 101 "), header
        for header in ("Origin: http://localhost:3001", "Origin: https://localhost:3000", "Host: other.lan"):
            assert raw(server, header)[1].startswith("HTTP/1.1 403 "), header


def test_a_server_for_the_network_answers_to_addresses_and_its_own_names():
    everywhere = Access.for_server("0.0.0.0", ["policy.example.org"], [])
    for host in ("192.168.1.5:8000", "[fe80::1]:8000", "0.0.0.0:8000", "localhost", "policy.example.org:443"):
        assert everywhere.find_refusal([host], []) is None, host
    for name in own_names():
        assert everywhere.find_refusal([f"{name.upper()}:8000"], []) is None, name
    assert socket.gethostname().lower() in own_names()
    for host in ("evil.example:8000", f"{socket.gethostname()}.evil.example", "10.0.0.1.evil.example"):
        assert "does not answer to the host" in everywhere.find_refusal([host], []), host
    assert Access.for_server("robot", [], []).find_refusal(["robot:8000"], []) is None
    assert url_of("::1", 8000) == "ws://[::1]:8000" and url_of("robot", 1) == "ws://robot:1"


@pytest.mark.parametrize(
    ("hosts", "origins", "message"),
    [
        (["http://robot"], [], "'http://robot' is not a host name"),
        (["robot:8000"], [], "without a scheme, port"),
        (["*"], [], "not a host name"),
        ([""], [], "not a host name"),
        ([], ["*"], "'\\*' is not an origin"),
        ([], ["localhost:3000"], "not an origin; it is what browsers send, such as"),
        ([], ["http://localhost:3000/"], "no slash at the end"),
        ([], ["null"], "not an origin"),
    ],
)
def test_what_is_allowed_is_named_as_requests_name_it(policy, hosts, origins, message):
    with pytest.raises(UserError, match=message):
        PolicyServer(policy, Settings(allow_hosts=hosts, allow_origins=origins))


def test_the_command_line_and_python_hand_on_what_is_allowed(run, policy, monkeypatch):
    given = []

    def stop(policy, settings):
        given.append(settings)
        raise UserError("enough")

    monkeypatch.setattr("vla_rl.serving.server.PolicyServer", stop)
    options = ["--allow-host", "a", "--allow-host", "b", "--allow-origin", "http://c:1", "--idle-minutes", "0.5"]
    done = CliRunner().invoke(app, ["serve", str(run), "--port", "0", *options])
    assert done.exit_code == 2 and "enough" in done.output
    (settings,) = given
    assert list(settings.allow_hosts) == ["a", "b"] and list(settings.allow_origins) == ["http://c:1"]
    assert settings.idle_s == 30.0
    monkeypatch.undo()
    with vla_rl.serve(policy, port=0, allow_hosts=["robot.lan"], allow_origins=["http://c:1"]) as there:
        there.settings = Settings(port=there.port)
        assert raw(there, "Host: robot.lan", "Origin: http://c:1")[1].startswith("HTTP/1.1 101 ")


# --------------------------------------------------------------------------------------------------------- places


def test_idle_clients_give_way_when_places_are_scarce(policy, monkeypatch, caplog):
    """To others; whoever asks keeps the place."""
    monkeypatch.setattr("vla_rl.serving.server.MAX_CLIENTS", 3)
    monkeypatch.setattr(bounds, "NEW_S", 1000.0)
    request = request_of(sight(policy, 0))
    with served(policy) as server, Client(server) as working, Client(server) as first, Client(server) as second:
        working.infer(request)
        with pytest.raises(InvalidStatus) as refused:
            opened(server)
        assert b"3 clients of 127.0.0.1 are connected" in refused.value.response.body
        assert b"try again later" in refused.value.response.body
        monkeypatch.setattr(bounds, "NEW_S", 0.0)
        with Client(server) as third:
            assert third.infer(request)["actions"].shape == (4, 3)
            with pytest.raises(ConnectionClosed, match="another client needs the place") as closed:
                first.socket.recv(timeout=WAIT)
            assert closed.value.rcvd.code == 1013
            assert working.infer(request)["actions"].shape == (4, 3)
            assert second.infer(request)["actions"].shape == (4, 3)
    assert "is sent away: another client needs the place, and this one was idle for 0 s" in caplog.text


def test_one_machine_does_not_take_all_places(policy, monkeypatch):
    monkeypatch.setattr("vla_rl.serving.server.MAX_CLIENTS", 3)
    monkeypatch.setattr("vla_rl.serving.server.MAX_OF_ADDRESS", 2)
    with served(policy) as server, Client(server), Client(server):
        with pytest.raises(InvalidStatus, match="503"):
            opened(server)
        with Client(server, source_address=("127.0.0.2", 0)) as other:
            assert other.infer(request_of(sight(policy, 0)))["actions"].shape == (4, 3)


def test_a_client_that_asks_for_nothing_is_sent_away(policy, monkeypatch, caplog):
    monkeypatch.setattr(bounds, "GONE_S", 0.3)
    with served(policy, idle_s=0.7) as server, Client(server) as client:
        client.infer(request_of(sight(policy, 0)))
        with pytest.raises(ConnectionClosed, match=r"it asked for nothing within 0.7 s") as closed:
            client.socket.recv(timeout=WAIT)
        assert closed.value.rcvd.code == 1001
        line, _ = raw(server)
        line.sendall(frame(2, bytes(1000), 50_000_000))  # half a frame, and silence
        assert is_closed(line)
    assert "is sent away: it asked for nothing within 0.7 s" in caplog.text


def test_connections_that_ask_for_nothing_are_few(policy, monkeypatch):
    """Headers that trickle in: the oldest makes room."""
    monkeypatch.setattr(bounds, "MAX_OPENING", 4)
    with served(policy) as server:
        slow = [socket.create_connection(("127.0.0.1", server.settings.port), WAIT) for _ in range(4)]
        for line in slow:
            line.sendall(b"GET / HTTP/1.1\r\nHost: ")
        assert eventually(lambda: len(server._traffic.opening) == 4)
        with Client(server) as client:
            assert client.infer(request_of(sight(policy, 0)))["actions"].shape == (4, 3)
        assert is_closed(slow[0])
        assert len(server._traffic.opening) <= 4


def test_memory_of_unfinished_frames_is_bounded(policy, monkeypatch, caplog):
    monkeypatch.setattr(bounds, "MAX_HELD", 4 << 20)
    request = request_of(sight(policy, 0))
    with served(policy) as server, Client(server) as client:
        line, _ = raw(server)
        with pytest.raises(ConnectionError):
            for _ in range(100):
                line.sendall(frame(2, bytes(1 << 20), 60_000_000) if _ == 0 else bytes(1 << 20))
        for _ in range(20):  # what was answered is not counted
            client.infer({**request, "more": np.zeros(1 << 20, np.uint8)})
        assert server._traffic.total < 1 << 20
    assert "is sent away: it sent most of 4 MB that wait here" in caplog.text


def test_who_does_not_read_is_sent_away(policy, monkeypatch, caplog):
    """Each ping is answered by as many bytes."""
    monkeypatch.setattr(bounds, "MAX_UNREAD", 1 << 18)
    with served(policy) as server:
        line, _ = raw(server, buffer=1 << 15)
        ping = b"\x89\xfd" + bytes(4) + bytes(125)
        with pytest.raises(ConnectionError):
            for _ in range(2000):
                line.sendall(ping * 500)
        assert eventually(lambda: not server._clients)
    assert "does not read what it is answered" in caplog.text


def test_what_a_client_asked_that_has_gone_is_not_inferred(policy, monkeypatch):
    rows, act_on, going, go = [], Policy.act_on, threading.Event(), threading.Event()

    def held(self, obs, *given):
        rows.append(len(obs))
        going.set()
        assert go.wait(WAIT)
        return act_on(self, obs, *given)

    request = pack_frame(request_of(sight(policy, 0)))
    with served(policy, batching=Batching(max_batch=4, max_wait_s=0.0)) as server:
        monkeypatch.setattr(Policy, "act_on", held)
        clients = [Client(server) for _ in range(3)]
        clients[0].socket.send(request)
        assert going.wait(WAIT)
        for client in clients[1:]:
            client.socket.send(request)
        assert eventually(lambda: server._batcher._waiting.qsize() == 2)
        clients[1].socket.socket.shutdown(socket.SHUT_RDWR)
        assert eventually(lambda: len([c for c in server._clients if c.state.name == "OPEN"]) == 2)
        go.set()
        for client in (clients[0], clients[2]):
            assert unpack_frame(client.socket.recv(timeout=WAIT))["actions"].shape == (4, 3)
        assert eventually(lambda: len(server._clients) == 2)
    assert rows == [1, 1]


def test_what_a_client_got_is_said_when_it_leaves(policy, caplog):
    """Not what all got together."""
    caplog.set_level("INFO")
    request = request_of(sight(policy, 0))
    with served(policy) as server:
        for count in (3, 1, 0):
            with Client(server) as client:
                for _ in range(count):
                    client.infer(request)
                if count == 1:
                    with pytest.raises(RuntimeError):
                        client.infer({})
        assert eventually(lambda: caplog.text.count(" left ") == 3)
    left = [record.getMessage() for record in caplog.records if " left " in record.getMessage()]
    number = r"[\d.]+"
    for line, said in zip(
        left,
        (
            f"answered 3 requests in {number} ms on average, {number} at most; 0 clipped$",
            f"answered 1 request in {number} ms on average, {number} at most; 0 clipped, refused 1$",
            "answered no request$",
        ),
        strict=True,
    ):
        assert re.search(rf"^127.0.0.1:\d+ left after {number} s: {said}", line), line
