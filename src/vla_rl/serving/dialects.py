"""Protocols of a connection: openpi's, and two that differ in a few frames."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from time import time
from typing import Any, ClassVar

from attrs import define, field, frozen

from vla_rl.core.types import Array, EnvInfo
from vla_rl.toolkit.models.acting.key_maps import PRESETS, KeyMap, default_key_map
from vla_rl.toolkit.models.acting.openpi import FrameError, pack_frame, unpack_frame
from vla_rl.version import __version__

Frame = str | bytes


@frozen(kw_only=True)
class ClientRequest:
    """A request decoded from a client's frame."""

    request: Mapping[Any, Any] | None = None
    """Observation for the policy; None: `reply`, if any, is the answer."""
    reply: Frame | None = None
    begins: bool = False
    """An episode."""


@define
class Dialect(ABC):
    """The server's side of one connection, on which one frame after another is read and answered. `read_frame` raises
    FrameError; large frames are read in a thread."""

    about: Mapping[str, Any]
    """`Policy.about`, and the keys."""
    keys: KeyMap
    info: EnvInfo

    pages: ClassVar[Mapping[str, str]] = {}
    """Path -> response to a GET of it, besides /healthz."""
    keeps_alive: ClassVar[bool] = True
    """The server asks from time to time whether the client is there; else compiling clients may be silent for long."""

    @staticmethod
    def default_keys(info: EnvInfo) -> KeyMap:
        return default_key_map(info)

    def make_greeting(self) -> Frame | None:
        """Return the server's first frame."""
        return pack_frame(self.about)

    @abstractmethod
    def read_frame(self, frame: Frame) -> ClientRequest: ...

    @abstractmethod
    def encode_answer(self, actions: Array, timing: Mapping[str, float]) -> Frame: ...

    def encode_refusal(self, error: str) -> tuple[Frame, bool]:
        """Return the frame of an error, and whether the connection is then closed."""
        return error, True


class OpenPi(Dialect):
    """openpi's own: a map in, a map out."""

    def read_frame(self, frame: Frame) -> ClientRequest:
        return ClientRequest(request=_read_map(frame))

    def encode_answer(self, actions: Array, timing: Mapping[str, float]) -> Frame:
        policy_timing = {"infer_ms": timing["infer_ms"]}
        return pack_frame({"actions": actions, "policy_timing": policy_timing, "server_timing": dict(timing)})


class RoboArena(Dialect):
    """openpi's frames with an endpoint; the first frame says which cameras a robot has to send."""

    @staticmethod
    def default_keys(info: EnvInfo) -> KeyMap:
        outside = [camera for camera in info.cameras if "wrist" not in camera]
        return KeyMap(
            images={
                camera: f"observation/exterior_image_{outside.index(camera)}_left"
                if camera in outside
                else "observation/wrist_image_left"
                for camera in info.cameras
            },
            state=PRESETS["droid"].state,
            state_sizes=PRESETS["droid"].state_sizes,
        )

    def make_greeting(self) -> Frame:
        keys, sizes = self.keys.camera_keys(self.info).values(), set(self.info.cameras.values())
        return pack_frame(
            {
                "image_resolution": list(sizes.pop()) if len(sizes) == 1 else None,
                "needs_wrist_camera": any("wrist" in key for key in keys),
                "n_external_cameras": len({key.rpartition("_")[0] for key in keys if "exterior" in key}),
                "needs_stereo_camera": any(key.endswith("_right") for key in keys),
                "needs_session_id": False,
                "action_space": self.keys.action_space,
            }
        )

    def read_frame(self, frame: Frame) -> ClientRequest:
        request = _read_map(frame)
        endpoint = request.pop("endpoint", "infer")
        if not isinstance(endpoint, str):
            raise FrameError("the endpoint is a text: infer or reset")
        if endpoint == "reset":
            return ClientRequest(reply="reset successful", begins=True)
        if endpoint != "infer":
            raise FrameError(f"there is no endpoint {endpoint!r:.80}; there are infer and reset")
        return ClientRequest(request=request)

    def encode_answer(self, actions: Array, timing: Mapping[str, float]) -> Frame:
        return pack_frame({"actions": actions})


@define
class VlaEval(Dialect):
    """vla-evaluation-harness: envelopes with a number, the client speaks first, an action an observation."""

    left: list[Array] = field(factory=list, init=False)
    """Actions of the last chunk that the client has not asked for; an episode begins without."""
    number: int = field(default=0, init=False)
    """Number of the message that is being answered."""

    pages: ClassVar[Mapping[str, str]] = {"/health": json.dumps({"status": "ok"}), "/config": json.dumps({})}
    keeps_alive: ClassVar[bool] = False

    @staticmethod
    def default_keys(info: EnvInfo) -> KeyMap:
        return KeyMap(
            images={camera: f"images/{camera}" for camera in info.cameras},
            state=("states",) if info.state_dim else (),
            instruction="task_description",
        )

    def make_greeting(self) -> None:
        return None

    def read_frame(self, frame: Frame) -> ClientRequest:
        message = _read_map(frame)
        if missing := [key for key in ("type", "payload", "seq", "timestamp") if key not in message]:
            raise FrameError(f"the message lacks {', '.join(missing)}")
        kind, payload, number = message["type"], message["payload"], message["seq"]
        if not isinstance(kind, str) or not isinstance(payload, dict) or type(number) is not int:
            raise FrameError("the type of a message is a text, its payload a map, and its seq a whole number")
        self.number = number
        if kind == "observation" and self.left:
            return ClientRequest(reply=self._pack_envelope("action", actions=self.left.pop(0)))
        if kind == "observation":
            return ClientRequest(request=payload)
        if kind in ("episode_start", "episode_end"):
            self.left = []
            return ClientRequest(begins=kind == "episode_start")
        if kind == "hello":
            return ClientRequest(reply=self._pack_envelope("hello", **self._hello_payload()))
        if kind == "error":
            return ClientRequest()
        raise FrameError(f"there is no message of type {kind!r:.80}")

    def encode_answer(self, actions: Array, timing: Mapping[str, float]) -> Frame:
        first, *self.left = actions
        return self._pack_envelope("action", actions=first)

    def encode_refusal(self, error: str) -> tuple[Frame, bool]:
        return self._pack_envelope("error", error=error), False

    def _pack_envelope(self, kind: str, **payload: Any) -> bytes:
        return pack_frame({"type": kind, "payload": payload, "seq": self.number, "timestamp": time()}, text_keys=True)

    def _hello_payload(self) -> dict[str, Any]:
        return {
            "harness_version": f"vla-rl {__version__}",
            "protocol_version": 1,
            "model_server": self.about["model"],
            "capabilities": {},
            "observation_params": {
                "send_wrist_image": any("wrist" in key for key in self.keys.camera_keys(self.info).values()),
                "send_state": bool(self.keys.state),
                # As robosuite and our LIBERO do; else the harness negates quaternions with w < 0, and the rotation
                # vector is another one than in training. Benchmarks without the parameter ignore it.
                **({"quat_no_antipodal": True} if self.keys.state else {}),
            },
        }


DIALECTS: Mapping[str, type[Dialect]] = {"openpi": OpenPi, "roboarena": RoboArena, "vla-eval": VlaEval}


def _read_map(frame: Frame) -> dict[Any, Any]:
    if isinstance(frame, str):
        raise FrameError("a request is a binary frame of msgpack, not text")
    data = unpack_frame(frame, decode=False)
    if not isinstance(data, dict):
        raise FrameError(f"a request is a map, not {type(data).__name__}")
    return data
