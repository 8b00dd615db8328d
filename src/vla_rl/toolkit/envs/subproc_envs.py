"""A vector env for simulators with one scene: a plugin writes a `SingleEnv` (one env), and `SubprocEnvs` makes N of them a
`SimEnv`.

Envs live in processes: one env in each, or several that take turns. A process is gymnasium's vector environment of size
one, started from a fork server, so nothing is ever forked after GL was initialised. An env that raises or returns
garbage is replaced by a fresh one; if a process dies or hangs, all its envs are. `faults` says what broke, and core
runs the episodes again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from vla_rl.core.errors import NotOffered, UserError
from vla_rl.core.hookspecs import SimEnv
from vla_rl.core.types import Array, ChunkResult, Context, EnvInfo, Observation, ResetState, at_last_action, to_numpy
from vla_rl.toolkit.envs.env_process import Apart, EnvProcess, Inline, start_all
from vla_rl.toolkit.envs.settings import Processes
from vla_rl.toolkit.envs.single_env import MakeEnv, SingleEnv, View
from vla_rl.toolkit.waiting import waiting

RESET_TRIES = 3
"""Attempts to create and reset an env, for one reset."""


class SubprocEnvs(SimEnv):
    """N single-scene envs as one batch. A plugin's `build` makes one from a `MakeEnv`; subclassing is not needed."""

    def __init__(
        self,
        info: EnvInfo,
        states: Mapping[str, Sequence[ResetState]],
        make_env: MakeEnv,
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
        self._make_env, self._context = make_env, context
        instructions = {task.name: task.instruction for task in info.tasks}
        self._told = {state.id: instructions[state.task] for split in self._states.values() for state in split}
        apart = context.num_envs > 1 if processes.apart is None else processes.apart
        home: type[Apart | Inline] = Apart if apart else Inline
        shares = processes.shares(self.num_envs) if apart else [range(i, i + 1) for i in range(self.num_envs)]
        first = context.first_env
        self._homes = [
            EnvProcess(rows=rows, first=first, make=make_env, home=home, chunk=self._chunk) for rows in shares
        ]
        self._rows = [process for process in self._homes for _ in process.rows]
        self._instructions = [info.tasks[0].instruction] * self.num_envs
        blank = {name: np.zeros((h, w, 3), np.uint8) for name, (h, w) in info.cameras.items()}
        self._views = [View(blank, np.zeros(info.state_dim, np.float32))] * self.num_envs
        self._faults: dict[int, list[str]] = {}

    def reset_states(self, split: str) -> tuple[ResetState, ...]:
        return self._states[split]

    def reset(self, rows: Any, state_ids: Any, seed: Any) -> Observation:
        """Reset all these envs concurrently. An env that breaks is recreated and tried again, up to `RESET_TRIES`
        times."""
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
            answers = self._ask("reset", missing, self._view_flaw)
            for row, view in answers.items():
                self._views[row] = view
                self._rows[row].was_reset(row)
            missing = {row: wanted[row] for row in missing.keys() - answers.keys()}
            if not missing:
                return self._observation(rows)
        row = min(missing)
        texts = [text for row in missing for text in self._faults.get(row, ())]
        raise UserError(f"row {self._number(row)} broke {RESET_TRIES} times in reset:\n{texts[-1]}")

    def chunk_step(self, actions: Any, active: Any, stop_at_end: bool) -> ChunkResult:
        """Execute a chunk. An env that breaks, or whose process does, executes nothing, keeps its last observation, and
        is reported by `faults`."""
        actions = np.asarray(to_numpy(actions), np.float32)
        shape = actions.shape[:2]
        rewards = np.zeros(shape, np.float32)
        flags = np.zeros((4, *shape), bool)
        wanted = {int(row): (actions[row], bool(stop_at_end)) for row in np.flatnonzero(to_numpy(active))}
        for row in [row for row in wanted if row not in self._rows[row].ready]:
            del wanted[row]
            self._faults.setdefault(row, [])  # the fault was reported when it happened
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
        """Return the scripted expert's chunk. Raise NotOffered for a task without an expert. Broken envs get zeros."""
        chunks = np.zeros((self.num_envs, self._chunk, self.info.action_dim), np.float32)
        answers = self._ask("expert_chunk", {row: () for process in self._homes for row in process.ready})
        for row, chunk in answers.items():
            chunks[row] = chunk
        return chunks

    def faults(self) -> Mapping[int, Sequence[str]]:
        found, self._faults = self._faults, {}
        return found

    def close(self) -> None:
        for process in self._homes:
            process.discard()

    @property
    def apart(self) -> bool:
        """Whether each env has its own process."""
        return all(process.home is Apart and len(process.rows) == 1 for process in self._homes)

    def in_one_process(self) -> SubprocEnvs:
        """Return another simulator with the same envs, which take turns in one process."""
        processes = Processes(apart=True, envs_per_process=self.num_envs, deadline_s=self._processes.deadline_s)
        return SubprocEnvs(self.info, self._states, self._make_env, self._context, processes)

    @property
    def pids(self) -> list[int]:
        """Process id of each env; 0: none before its first reset."""
        return [process.pid for process in self._rows]

    def row(self, i: int) -> SingleEnv:
        """Return the i-th env object after its reset, if envs live in this process (`processes: {apart: false}`)."""
        return self._rows[i].here(i)

    # --------------------------------------------------------------------------------------------------- inside

    def _ask(
        self, method: str, arguments: Mapping[int, tuple[Any, ...]], flaw: Callable[[Any], str] = lambda _: ""
    ) -> dict[int, Any]:
        """Call `method` on envs, in all processes concurrently. Return their replies; faults are noted instead."""
        asked: dict[int, dict[int, tuple[Any, ...]]] = {}
        for row, given in arguments.items():
            asked.setdefault(self._rows[row].rows.start, {})[row] = given
        processes = [(self._rows[start], of_rows) for start, of_rows in asked.items()]
        fresh = {id(process) for process, _ in processes if not process.runs}
        rows = [row for process, of_rows in processes if id(process) in fresh for row in of_rows]
        with waiting("starting rows", len(rows), self._tasks(rows)) as note:
            return self._asked(method, processes, flaw, fresh, note)

    def _asked(
        self,
        method: str,
        processes: Sequence[tuple[EnvProcess, Mapping[int, tuple[Any, ...]]]],
        flaw: Callable[[Any], str],
        fresh: Collection[int],
        note: Callable[[int], None],
    ) -> dict[int, Any]:
        """Do the work of `_ask`; `note` is called with the number of envs in `fresh` processes that have answered."""
        start_all([process for process, _ in processes])
        begun = time.monotonic()
        for process, of_rows in processes:
            process.send(method, of_rows)
        answers: dict[int, Any] = {}
        refused: list[Exception] = []
        started = 0
        for process, of_rows in processes:
            deadline = self._processes.deadline_s * len(of_rows)
            got = process.receive(max(0.0, begun + deadline - time.monotonic()), deadline)
            if id(process) in fresh:
                started += len(of_rows)
                note(started)
            if isinstance(got, str):
                self._note(min(of_rows), f"{process}: {got}")
                self._end(process, of_rows)
                continue
            fine: dict[int, Any] = {}
            mended = True
            for row, (kind, answer) in got.items():
                if kind in ("user error", "not offered"):
                    refused.append((UserError if kind == "user error" else NotOffered)(answer))
                elif kind == "answer" and method in ("reset", "play") and (odd := self._odd(answer)):
                    place = f"row {self._number(row)}"
                    refused.append(UserError(f"{place}: {odd}; correct `render` of the row, or `EnvInfo`"))
                elif wrong := answer if kind == "broken" else flaw(answer):
                    self._note(row, f"row {self._number(row)}: {wrong}")
                    mended &= process.mend(row)
                else:
                    fine[row] = answer
            if mended:
                answers |= fine
            else:
                self._end(process, of_rows)
        if refused:  # raised after every env has answered, so that the next call finds none busy
            raise refused[0]
        return answers

    def _tasks(self, rows: Iterable[int]) -> str:
        """Describe the tasks of these envs briefly."""
        first, *others = dict.fromkeys(self._instructions[row] for row in rows) or ("",)
        return f"{first:.60}{f' and {len(others)} other tasks' if others else ''}"

    def _end(self, process: EnvProcess, asked: Iterable[int]) -> None:
        """End a process. All envs that break with it are listed in `faults`, where the cause is given once."""
        for row in process.ready.union(asked):
            self._faults.setdefault(row, [])
        process.discard()

    def _note(self, row: int, text: str) -> None:
        self._faults.setdefault(row, []).append(text)

    def _number(self, row: int) -> int:
        """Return the run-wide number of an env."""
        return self._rows[row].first + row

    def _observation(self, rows: Iterable[int]) -> Observation:
        views = [self._views[row] for row in rows]
        told = [self._instructions[row] for row in rows]
        return Observation(
            images={name: np.stack([view.images[name] for view in views]) for name in self.info.cameras},
            instructions=tuple(view.instruction or text for view, text in zip(views, told, strict=True)),
            state=np.stack([view.state for view in views if view.state is not None]) if self.info.state_dim else None,
        )

    def _odd(self, answer: Any) -> str:
        """Describe an observation's type or shape that differs from the simulator's `EnvInfo`; empty if there is none.
        Recreating the env would not help."""
        view = answer if isinstance(answer, View) else answer[2]
        for name, (height, width) in self.info.cameras.items():
            image = view.images.get(name)
            found = "nothing" if image is None else f"{image.dtype} {list(image.shape)}"
            if found != f"uint8 {[height, width, 3]}":
                return f"its image {name!r} is {found}, expected uint8 {[height, width, 3]}"
        if not self.info.state_dim:
            return ""
        found = "nothing" if view.state is None else f"{view.state.dtype} {list(view.state.shape)}"
        wanted = f"float32 [{self.info.state_dim}]"
        return "" if found == wanted else f"its state is {found}, expected {wanted}"

    def _view_flaw(self, view: View) -> str:
        """Describe what is wrong with an observation; empty if nothing is."""
        if view.state is None or not self.info.state_dim or np.isfinite(view.state).all():
            return ""
        return f"its state is not finite: {view.state.tolist()}"

    def _played_flaw(self, played: tuple[Array, Array, View]) -> str:
        rewards, _, view = played
        if not np.isfinite(rewards).all():
            return f"its rewards are not finite: {rewards.tolist()}"
        return self._view_flaw(view)
