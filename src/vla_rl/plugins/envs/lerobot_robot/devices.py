"""The process that holds a robot and a takeover device. It alone imports lerobot.

It answers requests of the env, one at a time, and outlives its env for a moment: when the env's end of the connection
closes, however the env's process ended, it lets the robot hold its position, disconnects and ends.

Interface of lerobot 0.6.2 (Apache-2.0): `Robot`, `Teleoperator`, `make_robot_from_config`, `draccus.decode`.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import pkgutil
import queue
import re
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib import metadata
from multiprocessing.connection import Connection
from typing import Any, Literal

import numpy as np

from vla_rl.toolkit.processes import ignore_signals

logger = logging.getLogger(__name__)

LEAVE_S = 10.0
"""Seconds after the end of the env in which a robot that hangs can still be disconnected."""
PLUGINS = ("lerobot_robot_", "lerobot_teleoperator_", "lerobot_camera_")
"""Prefixes of the modules of distributions that register devices with lerobot."""
EVENTS = ("is_intervention", "terminate_episode", "success", "failure", "rerecord_episode")
"""Values of lerobot's `TeleopEvents`."""

Fault = Literal["robot", "teleoperator", "setting"]
Reply = tuple[Literal["answer"], Any] | tuple[Fault, str]
"""A result, or whose fault it is and what went wrong."""


class DeviceError(Exception):
    """A device failed, or a setting is wrong."""

    def __init__(self, fault: Fault, text: str) -> None:
        super().__init__(text)
        self.fault = fault


class Devices:
    """The robot and the takeover device. Each public method is a request."""

    def __init__(self) -> None:
        self.robot: Any = None
        self.teleoperator: Any = None

    def open(
        self, robot: Mapping[str, Any], teleoperator: Mapping[str, Any] | None, imports: Sequence[str]
    ) -> dict[str, Any]:
        """Create the devices without connecting them, and describe them."""
        try:
            robots, teleoperators, cameras = (
                importlib.import_module(f"lerobot.{name}") for name in ("robots", "teleoperators", "cameras")
            )
        except ImportError as exc:
            raise DeviceError(
                "setting",
                f"env.python: {sys.executable} cannot import lerobot ({exc}); name an interpreter that has it",
            ) from exc
        for package in (robots, teleoperators, cameras):
            _import_parts(package)
        failed = _import_plugins()
        for module in imports:
            try:
                importlib.import_module(module)
            except ImportError as exc:
                raise DeviceError("setting", f"env.imports: {module} cannot be imported ({exc})") from exc
        self.robot = _create_device(robots.RobotConfig, robots.make_robot_from_config, robot, "robot", failed)
        if teleoperator is not None:
            self.teleoperator = _create_device(
                teleoperators.TeleoperatorConfig,
                teleoperators.make_teleoperator_from_config,
                teleoperator,
                "teleoperator",
                failed,
            )
        return {
            "observation": dict(self.robot.observation_features),
            "action": [name for name, kind in self.robot.action_features.items() if kind is float],
            "events": hasattr(self.teleoperator, "get_teleop_events"),
        }

    def connect(self) -> None:
        """Connect both devices, unless they are."""
        for fault, device in (("teleoperator", self.teleoperator), ("robot", self.robot)):
            if device is None or _ask_device(fault, device, "is_connected"):
                continue
            takes = inspect.signature(device.connect).parameters
            _ask_device(fault, device, "connect", **({"calibrate": False} if "calibrate" in takes else {}))
            if not _ask_device(fault, device, "is_calibrated"):
                kind = "robot" if fault == "robot" else "teleop"
                raise DeviceError(
                    "setting",
                    f"env.{fault}: {device.name} is not calibrated; run lerobot-calibrate --{kind}.type={device.name} "
                    f"with the same port and id",
                )

    def observe(self) -> dict[str, Any]:
        """Return the robot's observation: name -> number or image."""
        return _to_plain_numbers(_ask_device("robot", self.robot, "get_observation"))

    def send(self, targets: dict[str, float]) -> dict[str, Any]:
        """Send targets. Return those that the robot took, which it may have changed."""
        return _to_plain_numbers(_ask_device("robot", self.robot, "send_action", targets))

    def teleoperate(self, always: bool) -> tuple[dict[str, bool], dict[str, Any] | None]:
        """Return the device's events, and the person's action where the person acts."""
        device = self.teleoperator
        if not _ask_device("teleoperator", device, "is_connected"):
            raise DeviceError("teleoperator", "it is not connected any more")
        events = {}
        if hasattr(device, "get_teleop_events"):
            reported = _ask_device("teleoperator", device, "get_teleop_events")
            events = {getattr(key, "value", key): bool(value) for key, value in reported.items()}
        if not (always or events.get("is_intervention", False)):
            return events, None
        return events, _to_plain_numbers(_ask_device("teleoperator", device, "get_action"))

    def hold(self) -> None:
        """Let the robot stay where it is: its present positions become its targets, and velocities are 0."""
        observation = self.observe()
        targets = {}
        for name in self.robot.action_features:
            if name.endswith(".vel"):
                targets[name] = 0.0
            elif name in observation:
                targets[name] = observation[name]
        self.send(targets)

    def disconnect(self) -> None:
        """Hold and disconnect both devices, as far as they answer."""
        for device in (self.robot, self.teleoperator):
            try:
                if device is not None and device.is_connected:
                    if device is self.robot:
                        self._try_to_hold()
                    device.disconnect()
            except Exception as exc:
                logger.warning("%s could not be disconnected: %s: %s", device.name, type(exc).__name__, exc)

    def _try_to_hold(self) -> None:
        try:
            self.hold()
        except DeviceError as exc:
            logger.warning("%s could not be commanded to hold its position: %s", self.robot.name, exc)


def _create_device(base: Any, make: Any, settings: Mapping[str, Any], fault: Fault, failed: Mapping[str, str]) -> Any:
    """Create a device by its settings. Raises DeviceError for a type that lerobot does not know, or wrong settings.

    Args:
        failed: plugins that could not be imported, and so might know the type -> the reason.
    """
    kind = settings["type"]
    known = base.get_known_choices()
    if kind not in known:
        lines = "".join(f"\n  the plugin {module} cannot be imported: {reason}" for module, reason in failed.items())
        raise DeviceError(
            "setting", f"env.{fault}.type: lerobot knows no {kind!r}; it knows: {', '.join(sorted(known))}{lines}"
        )
    try:
        draccus: Any = importlib.import_module("draccus")
        return make(draccus.decode(base, dict(settings)))
    except Exception as exc:
        raise DeviceError(
            "setting", f"env.{fault}: lerobot cannot make {kind!r} of these settings: {type(exc).__name__}: {exc}"
        ) from exc


def _import_parts(package: Any) -> None:
    """Import the parts of a package of lerobot, which register their types. Those that lack a package stay unknown."""
    for part in pkgutil.iter_modules(package.__path__):
        if part.ispkg:
            try:
                importlib.import_module(f"{package.__name__}.{part.name}")
            except Exception as exc:
                logger.info("%s.%s cannot be imported: %s", package.__name__, part.name, exc)


def _import_plugins() -> dict[str, str]:
    """Import the installed distributions that register devices. Return those that failed: module -> reason. lerobot
    0.6.1 imports a distribution by its name as it is written, so it misses names with dashes."""
    importlib.import_module("lerobot.utils.import_utils").register_third_party_plugins()
    failed = {}
    for dist in metadata.distributions():
        module = re.sub(r"[-_.]+", "_", dist.metadata["Name"] or "").lower()
        if module.startswith(PLUGINS) and module not in sys.modules:
            try:
                importlib.import_module(module)
            except Exception as exc:
                failed[module] = f"{type(exc).__name__}: {exc}"
                logger.warning("the plugin %s cannot be imported: %s", module, failed[module])
    return failed


def _ask_device(fault: Any, device: Any, name: str, *arguments: Any, **keywords: Any) -> Any:
    """Return a property of a device, or call its method. Raises DeviceError that names the device and the method."""
    try:
        value = getattr(device, name)
        return value(*arguments, **keywords) if callable(value) else value
    except Exception as exc:
        raise DeviceError(fault, f"{name}: {type(exc).__name__}: {exc}") from exc


def _to_plain_numbers(answer: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return numbers as float, and images as arrays, by name. A device may answer nothing, against its interface."""
    arrays = {name: np.asarray(value) for name, value in (answer or {}).items()}
    return {name: float(array) if array.ndim == 0 else array for name, array in arrays.items()}


def serve_requests(connection: Connection) -> None:
    """Answer requests until the other end closes; then disconnect."""
    requests: queue.Queue[tuple[str, tuple[Any, ...]] | None] = queue.Queue()

    def read_requests() -> None:
        try:
            while True:
                requests.put(connection.recv())
        except (EOFError, OSError):
            requests.put(None)
            timer = threading.Timer(LEAVE_S, os._exit, (1,))
            timer.daemon = True
            timer.start()

    threading.Thread(target=read_requests, name="requests", daemon=True).start()
    devices = Devices()
    while (request := requests.get()) is not None:
        method, arguments = request
        reply: Reply
        try:
            reply = "answer", getattr(devices, method)(*arguments)
        except DeviceError as exc:
            reply = exc.fault, str(exc)
        try:
            connection.send(reply)
        except OSError:
            break
    devices.disconnect()
    connection.close()


def main() -> None:
    """Leave the process that started this one, so that its end, in whatever way, does not end this one too."""
    if os.fork():
        os._exit(0)
    ignore_signals()
    connection = Connection(int(sys.argv[1]))
    serve_requests(connection)


if __name__ == "__main__":
    main()
