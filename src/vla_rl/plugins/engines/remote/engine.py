"""Engine that asks a server of openpi's protocol for actions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from socket import gaierror
from time import monotonic, sleep
from typing import Any

import numpy as np
import torch
from websockets.exceptions import InvalidProxy, InvalidProxyStatus, InvalidStatus, WebSocketException
from websockets.sync.client import ClientConnection, connect

from vla_rl.core.contexts import EngineContext
from vla_rl.core.errors import PluginError, UserError
from vla_rl.core.hookspecs import PolicyEngine
from vla_rl.core.paths import read_text
from vla_rl.core.randomness import Noise
from vla_rl.core.types import Array, Chunk, EnvInfo, Observation
from vla_rl.plugins.engines.remote.address import Proxy, proxy_for
from vla_rl.plugins.engines.remote.config import RemoteConfig
from vla_rl.toolkit.models.acting.key_maps import KeyMap, read_key_map, write_request
from vla_rl.toolkit.models.acting.openpi import MAX_FRAME, FrameError, pack_frame, unpack_frame
from vla_rl.toolkit.models.checkpoints.fitting import MismatchError, check_action_dim, check_horizon, check_state_dim
from vla_rl.toolkit.waiting import register_work

PAUSE_S = 0.2
"""Seconds between two attempts to reach a server."""
NAME_S = 3.0
"""Seconds after which a host name that cannot be resolved counts as wrong, if no connection was made before."""
LATER = (408, 425, 429)
"""HTTP statuses from 400 to 499 that mean that the server will answer later, as all from 500 on do."""


class _ProxyTrouble(OSError):
    """Raised when a server was not reached through a proxy. `lasts`: the proxy is at fault; waiting does not help."""

    def __init__(self, proxy: Proxy, error: Exception) -> None:
        super().__init__(
            f"it was asked for through the proxy {proxy}: {_without_password(error, proxy)}; to reach it without, name "
            f"its host in the environment variable no_proxy"
        )
        self.lasts = not (isinstance(error, InvalidProxyStatus) and error.response.status_code in (502, 503, 504))


class RemoteEngine(PolicyEngine):
    """Policy of a server. It sends one observation per connection, so that a server may batch them. The server decides
    whether to act greedily; actions outside of the simulator's bounds are clipped."""

    def __init__(self, config: RemoteConfig, context: EngineContext) -> None:
        """Connect to the server. Raise UserError if no server answers, MismatchError for a policy of another robot."""
        self._config = config
        self._chunk = context.chunk
        self._env = context.env
        self._connections: dict[int, ClientConnection] = {}
        self._headers = {} if config.api_key_file is None else _read_authorisation(Path(config.api_key_file))
        self._metadata: Mapping[str, Any] = {}
        self._connect_to_server()
        self._check_metadata(self._metadata, self._env)
        self._keys = self._key_map()

    def act(self, obs: Observation, noise: Noise, greedy: bool) -> Chunk:
        obs = obs.numpy()
        frames = [pack_frame(write_request(self._keys, self._env, obs, row)) for row in range(len(obs))]
        try:
            with register_work("waiting for the policy", about=self._config.url) as note:
                replies = self._exchange_frames(frames, note)
        except BaseException:
            self.close()  # answers to requests may still arrive
            raise
        actions = np.stack([self._read_actions(reply) for reply in replies])
        low, high = (np.array(bound, np.float32) for bound in (self._env.action_low, self._env.action_high))
        return Chunk(actions=torch.from_numpy(np.clip(actions, low, high)))

    def close(self) -> None:
        for index in list(self._connections):
            self._drop_connection(index, OSError())

    # ----------------------------------------------------------------------------------------------- connections

    def _exchange_frames(self, frames: Sequence[bytes], note: Callable[[int], None]) -> list[bytes]:
        """Return the reply to each request. What a server that went away did not answer is sent when it is back."""
        replies: dict[int, bytes] = {}
        until = monotonic() + self._config.timeout_s
        while left := [row for row in range(len(frames)) if row not in replies]:
            sent, before = [], len(replies)
            trouble: Exception | None = None
            for index, row in enumerate(left[: self._config.connections]):
                try:
                    self._ensure_connection(index, until).send(frames[row])
                    sent.append((index, row))
                except (OSError, WebSocketException) as exc:
                    trouble = self._drop_connection(index, exc)
            for index, row in sent:
                try:
                    reply = self._connections[index].recv(timeout=max(0.0, until - monotonic()))
                except (OSError, WebSocketException) as exc:
                    trouble = self._drop_connection(index, exc)
                    continue
                if isinstance(reply, str):
                    raise PluginError(f"the policy at {self._config.url} refused a request: {reply[-2000:]}")
                replies[row] = reply
            if len(replies) > before:
                until = monotonic() + self._config.timeout_s
            elif trouble is not None:
                self._wait_before_retry(until, trouble, note)
        return [replies[row] for row in range(len(frames))]

    def _connect_to_server(self) -> None:
        """Connect to a server that may still be loading its model."""
        url, began = self._config.url, monotonic()
        with register_work("waiting for the policy", about=url) as note:
            while True:
                try:
                    self._ensure_connection(0, began + self._config.timeout_s)
                    return
                except _ProxyTrouble as exc:
                    if exc.lasts:
                        raise UserError(f"the policy at {url} cannot be reached: {exc}") from exc
                    self._wait_before_retry(began + self._config.timeout_s, exc, note)
                except gaierror as exc:
                    if monotonic() - began > NAME_S:
                        raise UserError(
                            f"the policy at {url} cannot be reached: its host name is not known: {exc.strerror}"
                        ) from exc
                    self._wait_before_retry(began + self._config.timeout_s, exc, note)
                except (OSError, WebSocketException) as exc:
                    self._wait_before_retry(began + self._config.timeout_s, exc, note)

    def _wait_before_retry(self, until: float, trouble: Exception, note: Callable[[int], None]) -> None:
        """Wait before another attempt. Raise UserError when the timeout has passed."""
        if monotonic() >= until:
            url, seconds = self._config.url, self._config.timeout_s
            raise UserError(
                f"the policy at {url} did not answer within {seconds:g} s: {_error_text(trouble)}; is it "
                f"served there, as by `vla-rl serve RUN`? rollout.engine.timeout_s={10 * seconds:g} waits longer"
            ) from trouble
        note(0)
        sleep(PAUSE_S)

    def _ensure_connection(self, index: int, until: float) -> ClientConnection:
        """Return an open connection on which the server has sent its metadata. Raise OSError or WebSocketException
        where another attempt may help, UserError where it does not."""
        if index not in self._connections:
            opened = self._open_connection(until)
            try:
                self._metadata = self._read_message(opened.recv(timeout=max(0.0, until - monotonic())))
            except BaseException:
                opened.close()
                raise
            self._connections[index] = opened
        return self._connections[index]

    def _open_connection(self, until: float) -> ClientConnection:
        url, proxy = self._config.url, proxy_for(self._config.url)
        try:
            return connect(
                url,
                compression=None,
                max_size=MAX_FRAME,
                open_timeout=max(PAUSE_S, until - monotonic()),
                proxy=None if proxy is None else proxy.url,
                additional_headers=self._headers,
            ).__enter__()  # newer versions require it; `_drop_connection` closes it
        except InvalidStatus as exc:
            status = exc.response.status_code
            if status == HTTPStatus.UNAUTHORIZED:
                raise UserError(f"{url} wants another key: set rollout.engine.api_key_file") from exc
            if 400 <= status < 500 and status not in LATER:
                raise UserError(f"{url} refused the connection: {_error_text(exc)}") from exc
            raise
        except (OSError, WebSocketException, ValueError, ImportError) as exc:
            if proxy is None:
                raise
            raise _ProxyTrouble(proxy, exc) from exc

    def _drop_connection(self, index: int, trouble: Exception) -> Exception:
        if index in self._connections:
            with suppress(OSError, WebSocketException):
                self._connections.pop(index).close()
        return trouble

    # --------------------------------------------------------------------------------------------------- replies

    def _read_message(self, frame: str | bytes) -> Mapping[str, Any]:
        try:
            message = unpack_frame(frame) if isinstance(frame, bytes) else None
        except FrameError as exc:
            raise PluginError(f"{self._config.url} does not speak openpi's protocol: {exc}") from exc
        if not isinstance(message, dict):
            raise PluginError(
                f"{self._config.url} does not speak openpi's protocol: it said {str(message or frame)[:200]}"
            )
        return message

    def _read_actions(self, reply: bytes) -> Array:
        """Return actions float32 [C, A]: the first C of those that the policy chose."""
        actions = np.asarray(self._read_message(reply).get("actions"))
        if actions.dtype.kind not in "iuf" or actions.ndim != 2 or actions.shape[1] != self._env.action_dim:
            raise PluginError(
                f"the policy at {self._config.url} gave actions of {actions.dtype} {list(actions.shape)}, where the "
                f"simulator takes [chunk, {self._env.action_dim}]"
            )
        check_horizon(f"the policy at {self._config.url}", len(actions), self._chunk)
        if not np.isfinite(actions).all():
            raise PluginError(f"the policy at {self._config.url} gave actions that are not finite")
        return actions[: self._chunk].astype(np.float32)

    def _check_metadata(self, about: Mapping[str, Any], env: EnvInfo) -> None:
        """Check the metadata of the policy, as vla-rl's own servers send it. Other servers send little; their replies
        are checked instead."""
        numbers = {name: value for name, value in about.items() if type(value) is int}
        cameras = about.get("cameras")
        trained = f"the policy at {self._config.url} was trained"
        check_action_dim(trained, numbers.get("action_dim", env.action_dim), env)
        check_state_dim(trained, numbers.get("state_dim") or env.state_dim, env)
        check_horizon(f"the policy at {self._config.url}", numbers.get("action_chunk", self._chunk), self._chunk)
        for camera, size in cameras.items() if isinstance(cameras, dict) else ():
            if camera not in env.cameras or list(env.cameras[camera]) != size:
                available = ", ".join(f"{name} {list(shape)}" for name, shape in env.cameras.items())
                raise MismatchError(f"{trained} with camera {camera!r} of {size}; the simulator has: {available}")

    def _key_map(self) -> KeyMap:
        if self._config.keys is not None:
            return read_key_map(self._config.keys)
        keys = _key_map_in(self._metadata, self._env)
        if keys is None:
            raise UserError(
                f"{self._config.url} does not say which keys it wants: set rollout.engine.keys to libero, droid, aloha "
                f"or the path of a YAML file"
            )
        return keys


def _key_map_in(about: Mapping[str, Any], env: EnvInfo) -> KeyMap | None:
    """Return the key map in the metadata of a vla-rl server; None if it has none."""
    try:
        keys = KeyMap(**about["keys"])
        names = [*keys.camera_keys(env).values(), *keys.state, keys.instruction]
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    return keys if all(isinstance(name, str) for name in names) else None


def _without_password(error: Exception, proxy: Proxy) -> str:
    """Return an error's text without the proxy's password, which the message for a malformed address would repeat."""
    if isinstance(error, InvalidProxy):
        return f"that is not the address of a proxy: {error.msg}"
    if isinstance(error, ValueError):
        return "that is not an address"
    return _error_text(error).replace(proxy.url, str(proxy))


def _error_text(error: Exception) -> str:
    """Return an error's text, followed by the server's reply if that is one line."""
    text = str(error) or type(error).__name__
    response = getattr(error, "response", None)
    body = bytes(getattr(response, "body", None) or b"")[:500].decode("utf-8", "replace").strip()
    return f"{text}: {body}" if body.isprintable() and body else text


def _read_authorisation(file: Path) -> dict[str, str]:
    try:
        return {"Authorization": f"Api-Key {read_text(file).strip()}"}
    except (OSError, UnicodeDecodeError) as exc:
        raise UserError(f"the key in {file} cannot be read: {exc}; see rollout.engine.api_key_file") from exc
