"""The env's end of the process that holds the robot."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from time import monotonic
from typing import Any

from vla_rl.core.errors import SafetyStop, UserError
from vla_rl.plugins.envs.lerobot_robot.config import LeRobotRobotConfig
from vla_rl.toolkit.processes import delay_signals

START_S = 120.0
"""Seconds in which lerobot has to be imported, and a robot connected."""
ANSWER_S = 5.0
"""Seconds in which a connected robot has to answer."""
CLOSE_S = 12.0
"""Seconds in which the process has to end; a robot that hangs is left after 10 (`devices.LEAVE_S`)."""


def check_robot(config: LeRobotRobotConfig) -> None:
    """Raise UserError where lerobot, or the robot's class, is missing in this interpreter. Nothing is connected."""
    DeviceProcess(config).close()


class RobotLost(Exception):
    """The connection to the robot is lost."""


class DeviceProcess:
    """A process with the robot and the takeover device. It lets the robot hold and disconnects when this one ends."""

    def __init__(self, config: LeRobotRobotConfig) -> None:
        """Start the process and create the devices, without connecting them. Raises UserError for wrong settings."""
        self._robot = str(config.robot["type"])
        self._device = "" if config.teleoperator is None else str(config.teleoperator["type"])
        ours, theirs = socket.socketpair()
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-m", f"{__package__}.devices", str(theirs.fileno())]
        with delay_signals():  # a signal to the whole job stops the env first, and the robot is then let go by itself
            started = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL, start_new_session=True
            )
        theirs.close()
        started.wait()
        self._socket = ours
        self._connection = Connection(os.dup(ours.fileno()))
        try:
            self.description: Mapping[str, Any] = self._call(
                "open", config.robot, config.teleoperator, config.imports, timeout=START_S
            )
        except RobotLost as exc:
            self.close()
            raise UserError(f"env.robot: {exc}") from exc
        except UserError:
            self.close()
            raise

    def connect(self) -> None:
        """Connect the devices, unless they are. Raises RobotLost, SafetyStop, and UserError without calibration."""
        self._call("connect", timeout=START_S)

    def observe(self) -> dict[str, Any]:
        """Return the robot's observation: name -> number or image. Raises RobotLost."""
        observation: dict[str, Any] = self._call("observe")
        return observation

    def send(self, targets: Mapping[str, float]) -> dict[str, float]:
        """Send targets. Return those that the robot took. Raises RobotLost."""
        taken: dict[str, float] = self._call("send", dict(targets))
        return taken

    def teleoperate(self, always: bool) -> tuple[Mapping[str, bool], Mapping[str, float] | None]:
        """Return the device's events, and the action of a person who acts. Raises SafetyStop if the device is gone."""
        events, action = self._call("teleoperate", always)
        return events, action

    def hold(self) -> None:
        """Let the robot stay where it is. Raises RobotLost."""
        self._call("hold")

    def close(self) -> None:
        """Let the robot hold, and wait until it is disconnected. May be called twice."""
        if self._connection.closed:
            return
        with suppress(OSError, EOFError):  # its end has closed already
            self._socket.shutdown(socket.SHUT_WR)
            end = monotonic() + CLOSE_S
            while self._connection.poll(max(0.0, end - monotonic())):
                self._connection.recv()  # an answer that came too late; EOFError once the process has let go
        self._connection.close()
        self._socket.close()

    def _call(self, method: str, *arguments: Any, timeout: float | None = None) -> Any:
        try:
            self._connection.send((method, arguments))
        except OSError as exc:
            raise RobotLost(f"the process that drives robot {self._robot!r} has ended ({method}: {exc})") from exc
        fault, answer = self._receive(method, ANSWER_S if timeout is None else timeout)
        if fault == "robot":
            raise RobotLost(f"the connection to robot {self._robot!r} is lost ({answer})")
        if fault == "teleoperator":
            raise SafetyStop(
                f"env.teleoperator: the takeover device {self._device!r} is not there any more, or was not there at "
                f"the start ({answer}): no one could take over, so the run ends; connect it, and resume the run"
            )
        if fault == "setting":
            raise UserError(answer)
        return answer

    def _receive(self, method: str, timeout: float) -> Any:
        try:
            if self._connection.poll(timeout):
                return self._connection.recv()
        except (EOFError, OSError) as exc:
            raise RobotLost(f"the process that drives robot {self._robot!r} has ended ({method})") from exc
        raise RobotLost(f"robot {self._robot!r} has not answered within {timeout:g} s ({method})")
