"""A headless Chromium, where one is installed (`VLA_RL_CHROMIUM`, or `chromium` on the PATH): the fixture `tab`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = os.environ.get("VLA_RL_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None or find_spec("websockets") is None,
    reason="needs pip install -e '.[serve]', and Chromium on the PATH, or VLA_RL_CHROMIUM",
)
PATIENCE_S = 30.0


class Tab:
    """A page in Chromium, over its DevTools protocol."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.calls = 0

    def call(self, method: str, **parameters: Any) -> Any:
        self.calls += 1
        self.connection.send(json.dumps({"id": self.calls, "method": method, "params": parameters}))
        while True:
            message = json.loads(self.connection.recv(timeout=PATIENCE_S))
            if message.get("id") == self.calls:
                return message["result"]

    def open(self, address: str) -> None:
        self.call("Page.navigate", url=address)
        self.wait_for("document.readyState + ' ' + location.href", f"complete {address}")

    def value(self, expression: str) -> Any:
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_for(self, expression: str, expected: Any) -> None:
        end = time.monotonic() + PATIENCE_S
        while (value := self.value(expression)) != expected:
            assert time.monotonic() < end, f"{expression} is {value!r}, expected {expected!r}"
            time.sleep(0.02)

    def set_width(self, pixels: int) -> None:
        """Make the page as wide as this in CSS pixels, as on a phone or a desktop."""
        self.call("Emulation.setDeviceMetricsOverride", width=pixels, height=900, deviceScaleFactor=1, mobile=False)

    def click(self, name: str) -> None:
        """Click with the mouse in the middle of a button."""
        box = self.value(
            f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])({name}.getBoundingClientRect())"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)


@pytest.fixture
def tab(tmp_path: Path) -> Iterator[Tab]:
    from websockets.sync.client import connect

    assert CHROMIUM is not None
    options = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--remote-debugging-port=0",
    ]
    command = [CHROMIUM, *options, f"--user-data-dir={tmp_path}", "about:blank"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        port_file = tmp_path / "DevToolsActivePort"
        end = time.monotonic() + PATIENCE_S
        while not (port_file.exists() and port_file.read_text().count("\n")):
            assert process.poll() is None and time.monotonic() < end, "Chromium has not started"
            time.sleep(0.02)
        port, path = port_file.read_text().split("\n")[:2]
        with connect(f"ws://127.0.0.1:{port}{path}", max_size=None) as browser:
            target = Tab(browser).call("Target.createTarget", url="about:blank")["targetId"]
            with connect(f"ws://127.0.0.1:{port}/devtools/page/{target}", max_size=None) as page:
                yield Tab(page)
    finally:
        process.terminate()
        process.wait()
