"""Simulators that hold one scene each: a plugin writes a `Row`, and `RowsEnv` makes N of them a `SimEnv`.

Every row lives in a process of its own (gymnasium's vector environment of size one, started from a fork server, so
nothing is ever forked after GL was initialised). A row that raises, dies, hangs or returns garbage is replaced by a
fresh one; `faults` says what broke, and core plays the episode again.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, NamedTuple, Protocol

import gymnasium
import numpy as np
import psutil
from attrs import define, frozen
from gymnasium.vector import AsyncVectorEnv

from vla_rl.core.errors import UserError
from vla_rl.core.hookspecs import SimEnv
from vla_rl.core.processes import Processes
from vla_rl.core.types import ChunkResult, Context, EnvInfo, Observation, ResetState, to_numpy

Array = np.ndarray[Any, Any]
RESET_TRIES = 3
"""Fresh processes that a row gets for one reset."""


class Outcome(NamedTuple):
    """What one action led to."""

    reward: float
    success: bool
    terminated: bool
    truncated: bool = False


class View(NamedTuple):
    """What a policy sees of a row."""

    images: Mapping[str, Array]
    """Camera -> uint8 [H, W, 3], upright."""
    state: Array | None = None
    """float32 [S]."""
    instruction: str | None = None
    """None: that of the task."""


class Row(ABC):
    """One simulator. It is made where it will live, and may put off building its scene to the first reset."""

    @abstractmethod
    def reset(self, state_id: int, seed: int) -> None:
        """Start an episode from this state; `seed` keys whatever else is random in it."""

    @abstractmethod
    def step(self, action: Array) -> Outcome:
        """Apply one action, float32 [A]."""

    @abstractmethod
    def look(self) -> View:
        """Render; asked for after a reset and at the end of a chunk only."""

    def expert_chunk(self, length: int) -> Array:
        """Optional: a scripted demonstrator's next actions, float32 [length, A], without effect on the simulator."""
        raise TypeError(f"{type(self).__name__} has no scripted expert")

    def close(self) -> None:
        """Free GL contexts and the like."""


MakeRow = Callable[[int], Row]
"""Row number within the run -> its simulator. Must be picklable: a module-level function or an attrs instance."""


class RowsEnv(SimEnv):
    """N rows as one batch. A plugin's `build` makes one of these from a `MakeRow`; subclassing is not needed."""

    def __init__(
        self,
        info: EnvInfo,
        states: Mapping[str, Sequence[ResetState]],
        make_row: MakeRow,
        context: Context,
        processes: Processes,
    ) -> None:
        """
        Args:
            states: split -> its reset states.
        """
        self.num_envs, self.info = context.num_envs, info
        self._states = {split: tuple(of_split) for split, of_split in states.items()}
        self._chunk, self._processes = context.chunk, processes
        instructions = {task.name: task.instruction for task in info.tasks}
        self._told = {state.id: instructions[state.task] for split in self._states.values() for state in split}
        apart = context.num_envs > 1 if processes.apart is None else processes.apart
        place: type[_InProcess | _Inline] = _InProcess if apart else _Inline
        self._slots = [
            _Slot(row=context.first_row + i, make=make_row, place=place, chunk=self._chunk)
            for i in range(self.num_envs)
        ]
        self._instructions = [info.tasks[0].instruction] * self.num_envs
        blank = {name: np.zeros((h, w, 3), np.uint8) for name, (h, w) in info.cameras.items()}
        self._views = [View(blank, np.zeros(info.state_dim, np.float32))] * self.num_envs
        self._faults: dict[int, list[str]] = {}

    def reset_states(self, split: str) -> tuple[ResetState, ...]:
        return self._states[split]

    def reset(self, rows: Any, state_ids: Any, seed: Any) -> Observation:
        """All rows at once. A row that breaks gets a fresh process and tries again, up to `RESET_TRIES` times."""
        rows = [int(row) for row in to_numpy(rows)]
        wanted = {
            row: (int(state), int(key))
            for row, state, key in zip(rows, to_numpy(state_ids), to_numpy(seed), strict=True)
        }
        for row, (state, _) in wanted.items():
            self._instructions[row] = self._told[state]
            if self._slots[row].worn(self._processes):
                self._slots[row].discard()
        missing = wanted
        for _ in range(RESET_TRIES):
            for row, view in self._ask("reset", missing, self._view_flaw).items():
                self._views[row] = view
                self._slots[row].episodes += 1
            missing = {row: wanted[row] for row in missing if not self._slots[row].alive}
            if not missing:
                return self._observation(rows)
        row = next(iter(missing))
        raise UserError(f"row {self._slots[row].row} broke {RESET_TRIES} times in reset:\n{self._faults[row][-1]}")

    def chunk_step(self, actions: Any, active: Any, stop_at_end: bool) -> ChunkResult:
        """A row that breaks executes nothing, keeps its last view, and is named by `faults`."""
        actions = np.asarray(to_numpy(actions), np.float32)
        shape = actions.shape[:2]
        rewards = np.zeros(shape, np.float32)
        flags = np.zeros((4, *shape), bool)
        wanted = {int(row): (actions[row], bool(stop_at_end)) for row in np.flatnonzero(to_numpy(active))}
        for row, played in self._ask("play", wanted, self._played_flaw).items():
            rewards[row], flags[:, row], self._views[row] = played
        succeeded, terminated, truncated, executed = flags
        last = np.maximum(executed.sum(1) - 1, 0)
        return ChunkResult(
            obs=self._observation(range(self.num_envs)),
            rewards=rewards,
            terminated=terminated,
            truncated=truncated,
            executed=executed,
            success=succeeded[np.arange(self.num_envs), last],
            succeeded=succeeded,
        )

    def expert_chunk(self) -> Array:
        """Raises TypeError for a task without an expert. Rows that broke answer with zeros."""
        chunks = np.zeros((self.num_envs, self._chunk, self.info.action_dim), np.float32)
        answers = self._ask("expert_chunk", {row: () for row in range(self.num_envs) if self._slots[row].alive})
        for row, chunk in answers.items():
            chunks[row] = chunk
        return chunks

    def faults(self) -> Mapping[int, Sequence[str]]:
        found, self._faults = self._faults, {}
        return found

    def close(self) -> bool:
        for slot in self._slots:
            slot.discard()
        return True

    # --------------------------------------------------------------------------------------------------- inside

    def _ask(
        self, method: str, arguments: Mapping[int, tuple[Any, ...]], flaw: Callable[[Any], str] = lambda _: ""
    ) -> dict[int, Any]:
        """Ask rows side by side. -> their answers; rows that broke are discarded and noted instead."""
        _start([self._slots[row] for row in arguments])
        end = time.monotonic() + self._processes.deadline_s
        for row, given in arguments.items():
            self._slots[row].send(method, given)
        answers: dict[int, Any] = {}
        for row in arguments:
            kind, answer = self._slots[row].receive(max(0.0, end - time.monotonic()), self._processes.deadline_s)
            if kind == "user error":
                raise UserError(answer)
            if kind == "not offered":
                raise TypeError(answer)
            wrong = answer if kind == "broken" else flaw(answer)
            if wrong:
                self._slots[row].discard()
                self._faults.setdefault(row, []).append(f"row {self._slots[row].row}: {wrong}")
            else:
                answers[row] = answer
        return answers

    def _observation(self, rows: Iterable[int]) -> Observation:
        views = [self._views[row] for row in rows]
        told = [self._instructions[row] for row in rows]
        return Observation(
            images={name: np.stack([view.images[name] for view in views]) for name in self.info.cameras},
            instructions=tuple(view.instruction or text for view, text in zip(views, told, strict=True)),
            state=np.stack([view.state for view in views if view.state is not None]) if self.info.state_dim else None,
        )

    def _view_flaw(self, view: View) -> str:
        """What is wrong with a view, in words; empty when nothing is."""
        for name, (height, width) in self.info.cameras.items():
            image = view.images.get(name)
            found = "nothing" if image is None else f"{image.dtype} {list(image.shape)}"
            if found != f"uint8 {[height, width, 3]}":
                return f"its image {name!r} is {found}, expected uint8 {[height, width, 3]}"
        if not self.info.state_dim:
            return ""
        if view.state is None or view.state.shape != (self.info.state_dim,):
            return f"its state is {None if view.state is None else view.state.shape}, expected ({self.info.state_dim},)"
        return "" if np.isfinite(view.state).all() else f"its state is not finite: {view.state.tolist()}"

    def _played_flaw(self, played: tuple[Array, Array, View]) -> str:
        rewards, _, view = played
        if not np.isfinite(rewards).all():
            return f"its rewards are not finite: {rewards.tolist()}"
        return self._view_flaw(view)


# ------------------------------------------------------------------------------------------- where a row lives


class _Served(gymnasium.Env[Any, Any]):
    """A row behind one method that never raises: what goes wrong is an answer too."""

    observation_space: ClassVar[Any] = gymnasium.spaces.Discrete(1)
    action_space: ClassVar[Any] = gymnasium.spaces.Discrete(1)

    def __init__(self, make: MakeRow, number: int, chunk: int) -> None:
        self._make, self._number, self._chunk = make, number, chunk
        self._row: Row | None = None

    def answer(self, method: str, given: tuple[Any, ...]) -> tuple[str, Any]:
        """-> ("answer", result) or ("broken" | "user error" | "not offered", text)."""
        try:
            if self._row is None:
                self._row = self._make(self._number)
            return "answer", getattr(self, f"_{method}")(self._row, *given)
        except UserError as exc:
            return "user error", str(exc)
        except TypeError as exc:
            return ("not offered", str(exc)) if method == "expert_chunk" else ("broken", traceback.format_exc())
        except Exception:
            return "broken", traceback.format_exc()

    def _reset(self, row: Row, state_id: int, seed: int) -> View:
        row.reset(state_id, seed)
        return row.look()

    def _play(self, row: Row, actions: Array, stop_at_end: bool) -> tuple[Array, Array, View]:
        """-> rewards float32 [C]; success, terminated, truncated, executed bool [4, C]; the view after them."""
        rewards, flags = np.zeros(len(actions), np.float32), np.zeros((4, len(actions)), bool)
        for i, action in enumerate(actions):
            outcome = row.step(action)
            rewards[i], flags[:3, i], flags[3, i] = outcome.reward, outcome[1:], True
            if stop_at_end and (outcome.terminated or outcome.truncated):
                break
        return rewards, flags, row.look()

    def _expert_chunk(self, row: Row) -> Array:
        return np.asarray(row.expert_chunk(self._chunk), np.float32)

    def close(self) -> None:
        if self._row is not None:
            self._row.close()
            self._row = None


class _Place(Protocol):
    """Where a row lives."""

    pid: int

    def __init__(self, make: MakeRow, number: int, chunk: int) -> None: ...

    def send(self, method: str, given: tuple[Any, ...]) -> None: ...

    def receive(self, timeout: float) -> tuple[str, Any]:
        """Raises TimeoutError, EOFError or ConnectionError."""

    def close(self) -> None: ...


class _Inline:
    """In this process."""

    def __init__(self, make: MakeRow, number: int, chunk: int) -> None:
        self.pid = os.getpid()
        self._served = _Served(make, number, chunk)

    def send(self, method: str, given: tuple[Any, ...]) -> None:
        self._asked = method, given

    def receive(self, timeout: float) -> tuple[str, Any]:
        return self._served.answer(*self._asked)

    def close(self) -> None:
        self._served.close()


class _InProcess:
    """In a process of its own, which ends with its owner, however that ends."""

    def __init__(self, make: MakeRow, number: int, chunk: int) -> None:
        multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])
        make_served = _MakeServed(make, number, chunk, os.getpid())
        self._vector: AsyncVectorEnv[Any, Any] = AsyncVectorEnv(
            [make_served], shared_memory=False, context="forkserver"
        )
        self._process = self._vector.processes[0]
        self.pid: int = self._process.pid

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
        self._process.kill()  # a row holds nothing worth a farewell, and one that hangs would not answer
        self._process.join()
        self._vector.closed = True
        for pipe in self._vector.parent_pipes:
            pipe.close()


@frozen
class _MakeServed:
    make: MakeRow
    number: int
    chunk: int
    home: int
    """Process id of the batch's owner."""

    def __call__(self) -> _Served:
        if os.getpid() != self.home:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the owner's to handle
            threading.Thread(target=_leave_with_owner, daemon=True).start()
        return _Served(self.make, self.number, self.chunk)


@define
class _Slot:
    """A row's place, empty until it is needed and after it broke."""

    row: int
    make: MakeRow
    place: type[_InProcess | _Inline]
    chunk: int
    episodes: int = 0
    _there: _Place | None = None
    _unsent: str = ""

    @property
    def alive(self) -> bool:
        return self._there is not None

    def start(self) -> None:
        self._there = self.place(self.make, self.row, self.chunk)
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

    def worn(self, limits: Processes) -> bool:
        """Whether the process has had its time."""
        if self._there is None or self._there.pid == os.getpid():
            return False
        if limits.recycle_episodes is not None and self.episodes >= limits.recycle_episodes:
            return True
        if limits.recycle_mib is None:
            return False
        try:
            return psutil.Process(self._there.pid).memory_info().rss > limits.recycle_mib * 2**20
        except psutil.Error:
            return True

    def discard(self) -> None:
        if self._there is not None:
            self._there.close()
            self._there = None


def _start(slots: Sequence[_Slot]) -> None:
    """Start the processes that are missing, side by side."""
    missing = [slot for slot in slots if not slot.alive]
    if len(missing) > 1 and missing[0].place is _InProcess:
        with ThreadPoolExecutor(len(missing)) as pool:
            list(pool.map(_Slot.start, missing))
    else:
        for slot in missing:
            slot.start()


def _leave_with_owner() -> None:
    """End this process when its owner has ended in any way, whatever this process is doing."""
    owner = multiprocessing.parent_process()
    if owner is not None:
        owner.join()
        os._exit(1)
