"""Where a row lives: in a process of its own, or in the caller's; and what happens to it there."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any, Protocol

import gymnasium
import numpy as np
import psutil
from attrs import define, frozen
from gymnasium.vector import AsyncVectorEnv

from vla_rl.core.errors import NotOffered, UserError
from vla_rl.core.interrupts import held, ignore_signals
from vla_rl.toolkit.envs.settings import Processes

if TYPE_CHECKING:
    from vla_rl.toolkit.envs.row import MakeRow, Row, View

Array = np.ndarray[Any, Any]


class _Served(gymnasium.Env[Any, Any]):
    """A row behind one method that never raises: what goes wrong is an answer too."""

    def __init__(self, make: MakeRow, number: int, chunk: int) -> None:
        self.observation_space = self.action_space = gymnasium.spaces.Discrete(1)  # of no use, but asked for
        self._make, self._number, self._chunk = make, number, chunk
        self.row: Row | None = None

    def answer(self, method: str, given: tuple[Any, ...]) -> tuple[str, Any]:
        """-> ("answer", result) or ("broken" | "user error" | "not offered", text)."""
        try:
            if self.row is None:
                self.row = self._make(self._number)
            return "answer", getattr(self, f"_{method}")(self.row, *given)
        except NotOffered as exc:
            return "not offered", str(exc)
        except UserError as exc:
            return "user error", str(exc)
        except Exception:
            return "broken", traceback.format_exc()

    def _reset(self, row: Row, state_id: int, seed: int) -> View:
        row.reset(state_id, seed)
        return row.render()

    def _play(self, row: Row, actions: Array, stop_at_end: bool) -> tuple[Array, Array, View]:
        """-> rewards float32 [C]; success, terminated, truncated, executed bool [4, C]; the view after them."""
        rewards, flags = np.zeros(len(actions), np.float32), np.zeros((4, len(actions)), bool)
        for i, action in enumerate(actions):
            outcome = row.step(action)
            rewards[i], flags[:3, i], flags[3, i] = outcome.reward, outcome[1:], True
            if stop_at_end and (outcome.terminated or outcome.truncated):
                break
        return rewards, flags, row.render()

    def _expert_chunk(self, row: Row) -> Array:
        return np.asarray(row.expert_chunk(self._chunk), np.float32)

    def close(self) -> None:
        if self.row is not None:
            self.row.close()
            self.row = None


class _Home(Protocol):
    """Where a row lives."""

    pid: int

    def __init__(self, make: MakeRow, number: int, chunk: int) -> None: ...

    def send(self, method: str, given: tuple[Any, ...]) -> None: ...

    def receive(self, timeout: float) -> tuple[str, Any]:
        """Raises TimeoutError, EOFError or ConnectionError."""

    def close(self) -> None: ...


class Inline:
    """In this process."""

    def __init__(self, make: MakeRow, number: int, chunk: int) -> None:
        self.pid = os.getpid()
        self._served = _Served(make, number, chunk)

    def send(self, method: str, given: tuple[Any, ...]) -> None:
        self._asked = method, given

    @property
    def row(self) -> Row | None:
        """None: it was asked for nothing yet."""
        return self._served.row

    def receive(self, timeout: float) -> tuple[str, Any]:
        return self._served.answer(*self._asked)

    def close(self) -> None:
        self._served.close()


class InProcess:
    """In a process of its own, which ends with its owner, however that ends."""

    def __init__(self, make: MakeRow, number: int, chunk: int) -> None:
        multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])
        make_served = _MakeServed(make, number, chunk, os.getpid())
        with held():  # neither the fork server nor the row is reached by a signal to the whole job
            self._vector: AsyncVectorEnv[Any, Any] = AsyncVectorEnv(
                [make_served], shared_memory=False, context="forkserver"
            )
        self._process = self._vector.processes[0]
        Finalize(self, self._process.kill, exitpriority=0)  # multiprocessing would ask it to end, in vain, and wait
        self.pid = self._process.pid or 0

    def send(self, method: str, given: tuple[Any, ...]) -> None:
        self._vector.call_async("answer", method, given)

    def receive(self, timeout: float) -> tuple[str, Any]:
        try:
            answer: tuple[str, Any] = self._vector.call_wait(timeout)[0]
        except (EOFError, ConnectionError) as exc:
            self._process.join(5)
            code = self._process.exitcode
            hint = "; -9 is what a lack of memory gives" if code == -signal.SIGKILL else ""
            raise ConnectionError(f"its process ended with exit code {code}{hint}") from exc
        return answer

    def close(self) -> None:
        self._process.kill()  # rows need no cleanup, and one that hangs would not answer
        self._process.join()
        self._vector.closed = True
        for pipe in self._vector.parent_pipes:
            pipe.close()


@frozen
class _MakeServed:
    make: MakeRow
    number: int
    chunk: int
    owner: int
    """Process id of the batch's owner."""

    def __call__(self) -> _Served:
        if os.getpid() != self.owner:
            ignore_signals()  # they are the owner's to handle
            threading.Thread(target=_leave_with_owner, daemon=True).start()
        return _Served(self.make, self.number, self.chunk)


@define
class RowProcess:
    """A row and the process it lives in, which is started when it is needed, and anew after it broke."""

    row: int
    make: MakeRow
    home: type[InProcess | Inline]
    chunk: int
    episodes: int = 0
    _there: _Home | None = None
    _unsent: str = ""

    @property
    def alive(self) -> bool:
        return self._there is not None

    @property
    def pid(self) -> int:
        """0: it lives nowhere."""
        return 0 if self._there is None else self._there.pid

    @property
    def here(self) -> Row:
        """The row, which lives in this process and was reset."""
        assert isinstance(self._there, Inline) and self._there.row is not None
        return self._there.row

    def start(self) -> None:
        self._there = self.home(self.make, self.row, self.chunk)
        self.episodes = 0

    def send(self, method: str, given: tuple[Any, ...]) -> None:
        assert self._there is not None
        try:
            self._unsent = ""
            self._there.send(method, given)
        except OSError as exc:
            self._unsent = f"its process ended before {method}: {exc}"

    def receive(self, timeout: float, deadline: float) -> tuple[str, Any]:
        assert self._there is not None
        if self._unsent:
            return "broken", self._unsent
        try:
            return self._there.receive(timeout)
        except multiprocessing.TimeoutError:
            return "broken", f"no answer for {deadline:g} s (processes.deadline_s)"
        except ConnectionError as exc:
            return "broken", str(exc)

    def stale(self, limits: Processes) -> bool:
        """Whether the process has played as many episodes, or takes as much memory, as it may."""
        if self._there is None or self._there.pid == os.getpid():
            return False
        if limits.recycle_episodes is not None and self.episodes >= limits.recycle_episodes:
            return True
        if limits.recycle_mib is None:
            return False
        try:
            resident: int = psutil.Process(self._there.pid).memory_info().rss
            return resident > limits.recycle_mib * 2**20
        except psutil.Error:
            return True

    def discard(self) -> None:
        if self._there is not None:
            self._there.close()
            self._there = None


def start_all(rows: Sequence[RowProcess]) -> None:
    """Start the processes that are missing, side by side."""
    missing = [row for row in rows if not row.alive]
    if len(missing) > 1 and missing[0].home is InProcess:
        with ThreadPoolExecutor(len(missing)) as pool:
            list(pool.map(RowProcess.start, missing))
    else:
        for row in missing:
            row.start()


def _leave_with_owner() -> None:
    """End this process when its owner has ended in any way, whatever this process is doing."""
    owner = multiprocessing.parent_process()
    if owner is not None:
        owner.join()
        os._exit(1)
