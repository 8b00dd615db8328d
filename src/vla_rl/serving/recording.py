"""Recorder of clients' requests and their answers, as a data set in LeRobot's format: a session is an episode."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
from attrs import define, field

from vla_rl.core.errors import UserError
from vla_rl.core.types import Array, Observation
from vla_rl.serving.policy import Policy
from vla_rl.toolkit.data.lerobot import LeRobotWriter
from vla_rl.toolkit.data.recording import Recording, encode_png

logger = logging.getLogger(__name__)
FPS = 10
"""Rows a second, as the data set says: clients ask when they like."""
MAX_BYTES = 256 << 20
"""Limit of the images of all open sessions; beyond it the longest is written, and continues as another episode."""


@define
class _Session:
    instruction: str
    images: dict[str, list[bytes]]
    states: list[Array] = field(factory=list)
    actions: list[Array] = field(factory=list)
    bytes: int = 0


class SessionRecorder:
    """Works in a separate thread. What goes wrong there is logged, and ends the recording, not the serving."""

    def __init__(self, folder: Path, policy: Policy) -> None:
        """Raises UserError as `LeRobotWriter`."""
        self._writer = LeRobotWriter(folder, fps=FPS, robot=policy.spec.env.type)
        self._sizes = dict(policy.info.cameras)
        self._state_names = policy.info.state_names
        self._name = f"served {uuid4().hex[:12]}"
        self._sessions: dict[int, _Session] = {}
        self._thread = ThreadPoolExecutor(1, "recording")
        self._failed = False
        self.episodes = 0
        """Number of episodes written."""

    async def add_request(self, session: int, obs: Observation, actions: Array) -> None:
        """A request of one row and its answer, float32 [C, A]."""
        await self._run_in_thread(self._append_request, session, obs, actions)

    async def end_episode(self, session: int) -> None:
        """The episode of a session is over; there may be none."""
        await self._run_in_thread(self._write_episode, session)

    def close(self) -> None:
        """Write the rest, and end the open sessions."""
        self._thread.shutdown()
        for session in list(self._sessions):
            self._run_guarded(self._write_episode, session)
        self._writer.close()

    async def _run_in_thread(self, method: Callable[..., None], *arguments: Any) -> None:
        if not self._failed:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._run_guarded, method, *arguments)

    def _run_guarded(self, method: Callable[..., None], *arguments: Any) -> None:
        try:
            if not self._failed:
                method(*arguments)
        except (OSError, UserError) as exc:
            self._failed = True
            self._sessions.clear()
            logger.error("nothing more is recorded: %s", exc)  # noqa: TRY400 - the message is all there is to know

    def _append_request(self, session: int, obs: Observation, actions: Array) -> None:
        (instruction,) = obs.instructions
        going = self._sessions.get(session)
        if going is None or going.instruction != instruction:
            self._write_episode(session)
            going = self._sessions[session] = _Session(instruction, {camera: [] for camera in self._sizes})
        for camera, images in going.images.items():
            images.append(encode_png(np.asarray(obs.images[camera][0])))
            going.bytes += len(images[-1])
        going.states.append(np.zeros(0, np.float32) if obs.state is None else np.asarray(obs.state[0]))
        going.actions.append(actions)
        if sum(other.bytes for other in self._sessions.values()) > MAX_BYTES:
            self._write_episode(max(self._sessions, key=lambda number: self._sessions[number].bytes))

    def _write_episode(self, session: int) -> None:
        done = self._sessions.pop(session, None)
        if done is None:
            return
        self._writer.add(
            Recording(
                images=done.images,
                sizes=self._sizes,
                state=np.stack(done.states),
                state_names=self._state_names,
                actions=np.stack(done.actions),
                instruction=done.instruction,
                identity=f"{self._name}, session {session}, episode {self.episodes}",
            )
        )
        self.episodes += 1
