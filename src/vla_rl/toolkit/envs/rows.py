"""Simulators that hold one scene each: a plugin writes a `Row`, and `RowsEnv` makes N of them a `SimEnv`.

Every row lives in a process of its own (gymnasium's vector environment of size one, started from a fork server, so
nothing is ever forked after GL was initialised). A row that raises, dies, hangs or returns garbage is replaced by a
fresh one; `faults` says what broke, and core plays the episode again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from vla_rl.core.errors import NotOffered, UserError
from vla_rl.core.hookspecs import SimEnv
from vla_rl.core.types import ChunkResult, Context, EnvInfo, Observation, ResetState, at_last_action, to_numpy
from vla_rl.toolkit.envs.row import MakeRow, Row, View
from vla_rl.toolkit.envs.row_process import Inline, InProcess, RowProcess, start_all
from vla_rl.toolkit.envs.settings import Processes

Array = np.ndarray[Any, Any]
RESET_TRIES = 3
"""Fresh processes that a row gets for one reset."""


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
        home: type[InProcess | Inline] = InProcess if apart else Inline
        self._rows = [
            RowProcess(row=context.first_row + i, make=make_row, home=home, chunk=self._chunk)
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
            if self._rows[row].stale(self._processes):
                self._rows[row].discard()
        missing = wanted
        for _ in range(RESET_TRIES):
            for row, view in self._ask("reset", missing, self._view_flaw).items():
                self._views[row] = view
                self._rows[row].episodes += 1
            missing = {row: wanted[row] for row in missing if not self._rows[row].alive}
            if not missing:
                return self._observation(rows)
        row = next(iter(missing))
        raise UserError(f"row {self._rows[row].row} broke {RESET_TRIES} times in reset:\n{self._faults[row][-1]}")

    def chunk_step(self, actions: Any, active: Any, stop_at_end: bool) -> ChunkResult:
        """A row that breaks executes nothing, keeps its last view, and is named by `faults`."""
        actions = np.asarray(to_numpy(actions), np.float32)
        shape = actions.shape[:2]
        rewards = np.zeros(shape, np.float32)
        flags = np.zeros((4, *shape), bool)
        wanted = {int(row): (actions[row], bool(stop_at_end)) for row in np.flatnonzero(to_numpy(active))}
        for row in [row for row in wanted if not self._rows[row].alive]:
            del wanted[row]
            self._faults.setdefault(row, [f"row {self._rows[row].row} has not been reset since it broke"])
        for row, played in self._ask("play", wanted, self._played_flaw).items():
            rewards[row], flags[:, row], self._views[row] = played
        succeeded, terminated, truncated, executed = flags
        return ChunkResult(
            obs=self._observation(range(self.num_envs)),
            rewards=rewards,
            terminated=terminated,
            truncated=truncated,
            executed=executed,
            success=at_last_action(succeeded, executed),
            succeeded=succeeded,
        )

    def expert_chunk(self) -> Array:
        """Raises NotOffered for a task without an expert. Rows that broke answer with zeros."""
        chunks = np.zeros((self.num_envs, self._chunk, self.info.action_dim), np.float32)
        answers = self._ask("expert_chunk", {row: () for row in range(self.num_envs) if self._rows[row].alive})
        for row, chunk in answers.items():
            chunks[row] = chunk
        return chunks

    def faults(self) -> Mapping[int, Sequence[str]]:
        found, self._faults = self._faults, {}
        return found

    def close(self) -> None:
        for row in self._rows:
            row.discard()

    @property
    def pids(self) -> list[int]:
        """Of each row the process it lives in; 0: none, until it is reset."""
        return [row.pid for row in self._rows]

    def row(self, i: int) -> Row:
        """The i-th row itself, once it was reset, where rows live in this process (`processes: {apart: false}`)."""
        return self._rows[i].here

    # --------------------------------------------------------------------------------------------------- inside

    def _ask(
        self, method: str, arguments: Mapping[int, tuple[Any, ...]], flaw: Callable[[Any], str] = lambda _: ""
    ) -> dict[int, Any]:
        """Ask rows side by side. -> their answers; rows that broke are discarded and noted instead."""
        start_all([self._rows[row] for row in arguments])
        end = time.monotonic() + self._processes.deadline_s
        for row, given in arguments.items():
            self._rows[row].send(method, given)
        answers: dict[int, Any] = {}
        refused: list[Exception] = []
        for row in arguments:
            kind, answer = self._rows[row].receive(max(0.0, end - time.monotonic()), self._processes.deadline_s)
            if kind in ("user error", "not offered"):
                refused.append((UserError if kind == "user error" else NotOffered)(answer))
                continue
            wrong = answer if kind == "broken" else flaw(answer)
            if wrong:
                self._rows[row].discard()
                self._faults.setdefault(row, []).append(f"row {self._rows[row].row}: {wrong}")
            else:
                answers[row] = answer
        if refused:  # raised when every row has answered, so that the next call finds none busy
            raise refused[0]
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
