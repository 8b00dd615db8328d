"""A person answers at a page or in the terminal; without an answer, and at a stop, an error says so."""

from __future__ import annotations

import json
import os
import socket
import stat
import struct
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from http.client import HTTPConnection
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from vla_rl import Observation, RewardModelContext, load
from vla_rl.core.errors import NobodyAnswered, SafetyStop, UserError
from vla_rl.core.interrupts import StopRequested
from vla_rl.core.spec.spec import make_component
from vla_rl.core.spec.structure import Problems
from vla_rl.testing.synthetic import env_info
from vla_rl.toolkit.people.page import PagePanel
from vla_rl.toolkit.people.questions import TerminalPanel

ONGOING, OVER = np.array([False]), np.array([True])


class Browser:
    """What the page's script does, without a browser."""

    def __init__(self, address: str) -> None:
        self.root, _, self.token = address.partition("/?token=")

    def __call__(self, path: str, body: str | None = None, **headers: str) -> tuple[int, bytes]:
        request = urllib.request.Request(
            self.root + path, None if body is None else body.encode(), {"X-Token": self.token, **headers}
        )
        try:
            with urllib.request.urlopen(request, timeout=5) as reply:
                return reply.status, reply.read()
        except urllib.error.HTTPError as exc:
            return exc.code, exc.read()

    def state(self) -> dict:
        return json.loads(self("/state")[1])

    def press(self, answer: str, question: int | None = None) -> int:
        """Press a button of the question that is shown, or of an earlier one. Return the status."""
        question = self.state()["question"] if question is None else question
        return self("/press", answer if answer == "stop" else f"{question} {answer}")[0]


@pytest.fixture
def person(tmp_path) -> Iterator:
    """Builder of the reward model; everything that it builds is closed."""
    opened = []

    def build(**keys):
        config = load("reward_model", "person").config(**keys)
        opened.append(load("reward_model", "person").build(config, RewardModelContext(env=env_info(), num_envs=1)))
        return opened[-1]

    yield build
    for model in opened:
        model.close()
        model.close()


@pytest.fixture
def panel() -> Iterator[PagePanel]:
    panel = PagePanel(0, None, "rewards")
    yield panel
    panel.close()


def observation() -> Observation:
    images = {name: np.full((1, *size, 3), 200, np.uint8) for name, size in env_info().cameras.items()}
    return Observation(images=images, instructions=("go",))


# ------------------------------------------------------------------------------------------------------- the page


def test_buttons_are_taken_when_they_are_offered(panel):
    browser = Browser(panel.address)
    panel.show_text("how was it?", ("success", "failure"))
    assert browser.state() == {
        "text": "how was it?",
        "question": 1,
        "answers": ["success", "failure"],
        "answered": None,
        "stopped": False,
        "images": 0,
    }
    assert browser.press("ready") == 409
    assert panel.take_answer(0.0) is None
    assert browser.press("failure") == 200
    assert browser.state()["answered"] == "failure"
    assert panel.take_answer(0.0) == "failure"
    assert panel.take_answer(0.0) is None
    assert browser.state()["answered"] == "failure", "a second person sees that the question is answered"


def test_a_question_has_one_answer(panel):
    """Two people press: the first one counts, before and after the run has taken it."""
    browser = Browser(panel.address)
    panel.show_text("how was it?", ("success", "failure"))
    assert [browser.press("failure"), browser.press("success")] == [200, 409]
    assert panel.take_answer(0.0) == "failure"
    assert browser.press("success") == 409
    assert panel.take_answer(0.0) is None


def test_a_press_answers_the_question_that_was_shown(panel):
    """A press that was made for an earlier question, as by a double click, does not answer the next one."""
    browser = Browser(panel.address)
    panel.show_text("how was it?", ("success", "failure"))
    before = browser.state()["question"]
    panel.show_text("how was it now?", ("success", "failure"))
    assert browser.press("success", before) == 409
    assert panel.take_answer(0.0) is None
    assert browser.press("success") == 200
    for body in ("", "success", "x success", "2", "-1 success", "9" * 500 + " success"):
        assert browser("/press", body)[0] == 409, body


def test_a_new_question_forgets_answers_but_no_stop(panel):
    browser = Browser(panel.address)
    panel.show_text("first", ("success",))
    browser.press("success")
    panel.show_text("second", ("success",))
    assert panel.take_answer(0.0) is None
    browser.press("stop")
    panel.show_text("third", ("success",))
    assert browser.press("success") == 200
    assert [panel.take_answer(0.0), panel.take_answer(0.0)] == ["stop", "stop"]
    assert browser.state()["stopped"]


def test_an_answer_ends_the_wait(panel):
    panel.show_text("ready?", ("ready",))
    taken = []
    waiting = Thread(target=lambda: taken.append(panel.take_answer(60.0)))
    waiting.start()
    Browser(panel.address).press("ready")
    waiting.join(30)
    assert taken == ["ready"]


def test_the_image_is_shown(panel):
    from io import BytesIO

    from PIL import Image

    browser = Browser(panel.address)
    assert browser("/image.png")[0] == 404
    image = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    panel.show_image(image)
    image_then = image.copy()
    image[:] = 0  # a simulator may write into what it returned
    assert browser.state()["images"] == 1
    assert (np.asarray(Image.open(BytesIO(browser("/image.png")[1]))) == image_then).all()


@pytest.mark.parametrize(
    ("path", "body", "headers"),
    [
        ("/", None, {}),
        ("/?token=guess", None, {}),
        ("/state", None, {"X-Token": "guess"}),
        ("/image.png", None, {"X-Token": ""}),
        ("/press", "stop", {"X-Token": "guess"}),
        ("/state", None, {"Host": "rebound.example"}),
        ("/press", "stop", {"Host": "rebound.example:80"}),
    ],
)
def test_strangers_are_refused(panel, path, body, headers):
    assert Browser(panel.address)(path, body, **headers)[0] == 403
    assert panel.take_answer(0.0) is None


def test_the_page_has_four_buttons_and_its_token(panel):
    browser = Browser(panel.address)
    status, body = browser(f"/?token={panel.token}")
    text = body.decode()
    assert status == 200
    assert text.count("<button") == 4
    assert panel.token in text
    assert "$" not in text


def test_the_page_listens_on_this_machine_alone(panel):
    connection = HTTPConnection("127.0.0.1", panel.port, timeout=5)
    connection.request("GET", f"/?token={panel.token}")
    reply = connection.getresponse()
    policy = reply.getheader("Content-Security-Policy")
    connection.close()
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    with pytest.raises(OSError), socket.create_connection(("127.0.0.2", panel.port), timeout=5):
        pass


@pytest.mark.parametrize(("path", "body"), [("/press", "x" * 2000), ("/other", "stop")])
def test_requests_of_another_form_are_refused(panel, path, body):
    assert Browser(panel.address)(path, body)[0] == 400


def test_a_port_in_use_is_refused(panel):
    with pytest.raises(UserError, match=f"rewards.port: {panel.port} cannot be used .*give another, or 0"):
        PagePanel(panel.port, None, "rewards")


def test_a_request_that_is_aborted_prints_nothing(panel, capfd):
    """A phone that sleeps in the middle of a request resets the connection."""
    for request in (f"GET /?token={panel.token} HTTP/1.1\r\nHost: 127.0.0.1:{panel.port}\r\n\r\n", "POST /press HT"):
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", panel.port), timeout=5) as connection:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.sendall(request.encode())
    assert Browser(panel.address).state()["question"] == 0
    assert capfd.readouterr() == ("", "")


def test_a_closed_page_answers_nothing(panel):
    """Browsers open connections ahead of requests; the server's thread of such a connection waits for one."""
    panel.show_text("how was it?", ("success", "failure"))
    stop = f"POST /press HTTP/1.1\r\nHost: 127.0.0.1:{panel.port}\r\nX-Token: {panel.token}\r\nContent-Length: 4\r\n\r\nstop"
    with ExitStack() as opened:
        address = ("127.0.0.1", panel.port)
        ahead = [opened.enter_context(socket.create_connection(address, timeout=30)) for _ in range(3)]
        assert Browser(panel.address).state()["question"] == 1, "so the server has accepted the earlier ones"
        ahead[1].sendall(stop[:40].encode())
        panel.close()
        for connection, request in zip(ahead, (stop, stop[40:], ""), strict=True):
            reply = b""
            with suppress(ConnectionError):
                connection.sendall(request.encode())
                reply = connection.recv(1000)
            assert reply == b""
    assert not panel.request_stop()
    assert not panel.press_button(1, "success")
    assert panel.take_answer(0.0) is None


def test_the_address_is_written_for_this_user_alone(tmp_path):
    file = tmp_path / "address"
    panel = PagePanel(0, file, "rewards")
    assert file.read_text() == f"{panel.address}\n"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with pytest.raises(UserError, match="address_file: .* has the address of a page that is still open; name another"):
        PagePanel(0, file, "rewards")
    panel.close()
    panel.close()
    assert not file.exists()
    with pytest.raises(UserError, match="address_file: .* cannot be written"):
        PagePanel(0, tmp_path / "none" / "address", "rewards")


def test_an_address_file_replaces_nothing_but_the_address_of_an_ended_run(tmp_path):
    file = tmp_path / "address"
    for content in ("thesis", "http://127.0.0.1:8000/?token=x and more", "", "x" * 5000):
        file.write_text(content)
        with pytest.raises(
            UserError, match="rewards.address_file: .* is there and holds no page's address; name a new"
        ):
            PagePanel(0, file, "rewards")
        assert file.read_text() == content
    with pytest.raises(UserError, match="holds no page's address"):
        PagePanel(0, Path(os.devnull), "rewards")
    panel = PagePanel(0, None, "rewards")
    panel.close()
    file.write_text(f"{panel.address}\n")  # as after a kill
    again = PagePanel(0, file, "rewards")
    assert file.read_text() == f"{again.address}\n"
    again.close()


# --------------------------------------------------------------------------------------------------- the terminal


@pytest.fixture
def terminal() -> Iterator[tuple[int, TerminalPanel]]:
    """The end that a person types into, and the panel at the other one."""
    typed, device = os.openpty()
    panel = TerminalPanel(Path(os.ttyname(device)), "rewards")
    os.close(device)
    yield typed, panel
    panel.close()
    panel.close()
    os.close(typed)


def test_letters_are_answers(terminal):
    typed, panel = terminal
    panel.show_text("how was it?", ("success", "failure"))
    assert b"how was it? [s = success, f = failure, x = stop, then Enter]" in os.read(typed, 1000)
    os.write(typed, b"r\nwhat\n F \ns\n")
    assert panel.take_answer(5.0) == "failure"
    assert panel.take_answer(0.5) is None, "a question has one answer"


def test_what_was_typed_before_a_question_is_not_an_answer(terminal):
    typed, panel = terminal
    panel.show_text("ready?", ("ready",))
    os.write(typed, b"r\n")
    assert panel.take_answer(5.0) == "ready"
    os.write(typed, b"r\n")
    panel.show_text("ready?", ("ready",))
    assert panel.take_answer(0.0) is None


def test_a_stop_in_the_terminal_stays(terminal):
    typed, panel = terminal
    panel.show_text("ready?", ("ready",))
    os.write(typed, b"x\nr\n")
    assert [panel.take_answer(5.0), panel.take_answer(0.0)] == ["stop", "stop"]


def test_a_terminal_that_is_closed_stops_the_robot():
    typed, device = os.openpty()
    panel = TerminalPanel(Path(os.ttyname(device)), "rewards")
    os.close(device)
    os.close(typed)
    with pytest.raises(SafetyStop, match="is closed, and no one could stop the robot"):
        panel.take_answer(5.0)
    panel.close()


def test_no_terminal_is_refused(tmp_path):
    with pytest.raises(UserError, match="rewards.ask: there is no terminal .*ask: {type: page}"):
        TerminalPanel(tmp_path / "tty", "rewards")


# ----------------------------------------------------------------------------------------------- the reward model


def test_success_and_failure_end_the_episode(person):
    model = person(reset=False)
    browser = Browser(model.panel.address)
    model.before_reset(np.array([0]))
    assert model.success_probability(observation(), ONGOING).tolist() == [0.0]
    assert model.failed(observation()).tolist() == [False]
    browser.press("success")
    assert model.success_probability(observation(), ONGOING).tolist() == [1.0]
    model.before_reset(np.array([0]))
    browser.press("failure")
    model.watch(observation())
    assert model.success_probability(observation(), ONGOING).tolist() == [0.0]
    assert model.failed(observation()).tolist() == [True]
    model.before_reset(np.array([0]))
    assert model.failed(observation()).tolist() == [False]


def test_the_outcome_is_asked_for_at_the_end(person):
    model = person(reset=False)
    model.before_reset(np.array([0]))
    answered = Thread(target=press_when_asked, args=(Browser(model.panel.address), "was it a success?", "success"))
    answered.start()
    assert model.success_probability(observation(), OVER).tolist() == [1.0]
    answered.join(30)


def press_when_asked(browser: Browser, text: str, answer: str) -> None:
    while text not in (state := browser.state())["text"]:
        pass
    browser.press(answer, state["question"])


def test_without_questions_an_end_is_a_failure(person):
    model = person(reset=False, outcome=False)
    model.before_reset(np.array([0]))
    assert model.success_probability(observation(), OVER).tolist() == [0.0]


def test_a_missing_answer_is_named_with_the_deadline(person):
    model = person(deadline_s=0.05)
    expected = r"no one answered 'reset the scene: ready\?' at the page http://127.0.0.1:\d+/ within 0.05 s \(rewards.deadline_s\)"
    with pytest.raises(NobodyAnswered, match=expected):
        model.before_reset(np.array([0]))


def test_ctrl_c_ends_the_wait(person):
    model = person(deadline_s=3600.0)
    model.stop_requested = lambda: True
    with pytest.raises(StopRequested):
        model.before_reset(np.array([0]))


def test_a_stop_ends_every_call(person):
    model = person()
    Browser(model.panel.address).press("stop")
    for call in (
        lambda: model.watch(None),
        lambda: model.before_reset(np.array([0])),
        lambda: model.success_probability(observation(), ONGOING),
    ):
        with pytest.raises(SafetyStop, match="a person stopped the robot at the page"):
            call()


def test_several_robots_and_unknown_cameras_are_refused():
    plugin = load("reward_model", "person")
    with pytest.raises(UserError, match=r"one robot at a time, and there are 4 envs; give env.num_envs: 1"):
        plugin.build(plugin.config(), RewardModelContext(env=env_info(), num_envs=4))
    with pytest.raises(UserError, match="rewards.camera: the simulator has no camera 'rear'"):
        plugin.build(plugin.config(camera="rear"), RewardModelContext(env=env_info()))


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"ask": {"type": "terminal", "port": 8000}}, "ask.port: unknown key"),
        ({"ask": {"type": "page", "device": "/dev/pts/0"}}, "ask.device: unknown key"),
        ({"port": 8000}, "port: unknown key; now ask: {type: page, port: ...}"),
        ({"ask": "terminal"}, "ask: expected {type: page} or {type: terminal}, got str 'terminal'"),
        ({"deadline_s": 0}, "deadline_s"),
    ],
)
def test_keys_without_effect_are_refused(keys, text):
    with pytest.raises(Problems, match=text):
        make_component("reward_model", "person", **keys)
