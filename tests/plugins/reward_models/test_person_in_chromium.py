"""The page in a headless Chromium."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from chromium import PATIENCE_S, needs_chromium
from vla_rl.toolkit.people.page import PagePanel

pytestmark = needs_chromium


def wait_for_connections(number: int) -> None:
    """Wait until the page's server serves as many connections, each with a thread."""
    end = time.monotonic() + PATIENCE_S
    while sum("process_request_thread" in thread.name for thread in threading.enumerate()) != number:
        assert time.monotonic() < end, threading.enumerate()
        time.sleep(0.02)


@pytest.fixture
def panel() -> Iterator[PagePanel]:
    panel = PagePanel(0, None, "rewards")
    yield panel
    panel.close()


def test_a_person_sees_the_image_and_presses_the_buttons(panel, tab):
    panel.show_text("reset the scene: ready?", ("ready",))
    image = np.zeros((6, 8, 3), np.uint8)
    image[..., 0] = 255
    panel.show_image(image)
    tab.open(panel.address)
    tab.wait_for("document.querySelectorAll('button').length", 4)
    tab.wait_for("byId('text').textContent", "reset the scene: ready?")
    tab.wait_for("byId('image').naturalWidth", 8)
    tab.wait_for("byId('ready').disabled", False)
    assert tab.value("byId('success').disabled && byId('failure').disabled")
    tab.click("byId('ready')")
    assert panel.take_answer(PATIENCE_S) == "ready"
    for answer in ("failure", "success"):
        panel.show_text("was it a success?", ("success", "failure"))
        tab.wait_for(f"byId('{answer}').disabled", False)
        tab.click(f"byId('{answer}')")
        assert panel.take_answer(PATIENCE_S) == answer
    tab.click("byId('stop')")
    assert panel.take_answer(PATIENCE_S) == "stop"
    tab.wait_for("byId('text').textContent", "stopped: the run saves and ends")
    assert tab.value("[...document.querySelectorAll('button')].every((button) => button.disabled)")
    assert (
        tab.value(
            "(() => { const c = document.createElement('canvas').getContext('2d'); c.drawImage(byId('image'), 0, 0);"
            " return '#' + [...c.getImageData(1, 1, 1, 1).data].slice(0, 3).map((n) => n.toString(16).padStart(2, '0'))"
            ".join(''); })()"
        )
        == "#ff0000"
    )


def test_escape_stops(panel, tab):
    tab.open(panel.address)
    tab.call("Input.dispatchKeyEvent", type="keyDown", key="Escape", code="Escape", windowsVirtualKeyCode=27)
    assert panel.take_answer(PATIENCE_S) == "stop"


def test_a_page_whose_run_has_ended_says_so(panel, tab):
    tab.open(panel.address)
    tab.wait_for("byId('text').textContent", "")
    panel.close()
    tab.wait_for("byId('text').textContent.startsWith('no connection')", True)
    assert tab.value("['ready', 'success', 'failure'].every((id) => byId(id).disabled)")


def test_a_stop_that_does_not_arrive_says_so(panel, tab):
    tab.open(panel.address)
    tab.wait_for("byId('text').textContent", "")
    panel.close()
    tab.click("byId('stop')")
    tab.wait_for("byId('notice').textContent", "THE STOP DID NOT REACH THE RUN: use the robot's emergency stop")


def test_a_stop_over_a_connection_that_was_opened_ahead_says_so(panel, tab):
    """Chromium opens connections ahead of requests. One that the server has accepted outlives its listening socket."""
    tab.open(panel.address)
    tab.wait_for("byId('text').textContent", "")
    tab.value("polls = true; look = () => { polls = false; }")
    tab.wait_for("polls", False)
    wait_for_connections(0)
    tab.value(
        "document.head.append(Object.assign(document.createElement('link'), {rel: 'preconnect', href: location.origin}))"
    )
    wait_for_connections(1)
    panel.close()
    tab.click("byId('stop')")
    tab.wait_for("byId('notice').textContent", "THE STOP DID NOT REACH THE RUN: use the robot's emergency stop")


def test_a_stop_is_sent_again_until_it_arrives(panel, tab):
    tab.open(panel.address)
    tab.wait_for("byId('text').textContent", "")
    tab.value(
        "(() => { const real = window.fetch; let left = 3;"
        "window.fetch = (path, more) => path === '/press' && left-- > 0 ? Promise.reject() : real(path, more); })()"
    )
    tab.click("byId('stop')")
    tab.wait_for("byId('notice').textContent.startsWith('THE STOP DID NOT')", True)
    assert panel.take_answer(PATIENCE_S) == "stop"
    tab.wait_for("byId('text').textContent", "stopped: the run saves and ends")
    assert tab.value("byId('notice').textContent") == ""


def test_a_double_click_on_ready_is_not_a_success(panel, tab):
    panel.show_text("reset the scene: ready?", ("ready",))
    tab.open(panel.address)
    tab.wait_for("byId('ready').disabled", False)
    tab.click("byId('ready')")
    assert panel.take_answer(PATIENCE_S) == "ready"
    panel.show_text("the robot acts", ("success", "failure"))
    tab.click("byId('ready')")
    tab.wait_for("byId('success').disabled", False)
    tab.click("byId('ready')")
    assert panel.take_answer(0.5) is None


def test_a_second_person_sees_whose_answer_counts(panel, tab):
    panel.show_text("was it a success?", ("success", "failure"))
    tab.open(panel.address)
    tab.wait_for("byId('success').disabled", False)
    tab.value("press('success'); panel_question = question")  # both press before either page has been drawn again
    assert panel.take_answer(PATIENCE_S) == "success"
    tab.value("question = panel_question; press('failure')")
    tab.wait_for("byId('notice').textContent", "failure does not count: the answer is already success")
    panel.show_text("reset the scene: ready?", ("ready",))
    tab.wait_for("byId('notice').textContent", "")
    tab.value("question -= 1; press('ready')")
    tab.wait_for("byId('notice').textContent.startsWith('ready came too late')", True)
