"""Vector envs of simulators with one scene: a plugin writes a `SingleEnv`, `SubprocEnvs` makes N of them a `SimEnv`.

Each process has one env, or several that take turns; it comes from a fork server, so nothing is forked after GL was
initialised. An env that raises or returns garbage is replaced, and so are all envs of a process that dies or hangs.
`faults` says what broke, and core runs the episodes again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from vla_rl.core.contexts import EnvContext
from vla_rl.core.errors import UserError
from vla_rl.core.hookspecs import SimEnv
from vla_rl.core.types import (
    Array,
    ChunkResult,
    EnvInfo,
    Observation,
    ResetState,
    to_numpy,
)
from vla_rl.toolkit.envs.env_process import ChunkAnswer, EnvProcess, Inline, SeparateProcess, start_all
from vla_rl.toolkit.envs.settings import Processes
from vla_rl.toolkit.envs.single_env import MakeEnv, SingleEnv, View, empty_records, make_result
from vla_rl.toolkit.waiting import register_work

RESET_TRIES = 3
"""Attempts to create and reset an env, for one reset."""


class SubprocEnvs(SimEnv):
    """N single-scene envs as one batch. A plugin's `build` makes one from a `MakeEnv`; subclassing is not needed."""

    def __init__(
        self,
        info: EnvInfo,
        states: Mapping[str, Sequence[ResetState]],
        make_env: MakeEnv,
        context: EnvContext,
        processes: Processes,
    ) -> None:
        """
        Args:
            states: split -> its reset states."""
        self.num_envs = context.num_envs
        self.info = info
        self._states = {split: tuple(of_split) for split, of_split in states.items()}
        self._chunk = context.chunk
        self._processes = processes
        self._make_env = make_env
        self._context = context
        instructions = {task.name: task.instruction for task in info.tasks}
        self._instruction_of_state = {
            state.id: instructions[state.task] for split in self._states.values() for state in split
        }
        apart = context.num_envs > 1 if processes.apart is None else processes.apart
        if info.control_hz is not None and context.num_envs > 1 and not (apart and processes.envs_per_process == 1):
            raise UserError(
                "control_hz is real time, which envs that take turns in a process cannot keep; give every env a "
                "separate process (processes.envs_per_process: 1, and no processes.apart: false), or num_envs: 1"
            )
        process_type: type[SeparateProcess | Inline] = SeparateProcess if apart else Inline
        shares = processes.split_envs(self.num_envs) if apart else [range(i, i + 1) for i in range(self.num_envs)]
        first = context.first_env
        self._empty = empty_records(info, context.num_envs, context.chunk)
        names = self._empty.dtype.names or ()
        self._real_fields = [name for name in names if self._empty[name].dtype.kind == "f"]
        self._env_processes = [
            EnvProcess(env_ids=env_ids, first=first, make=make_env, process_type=process_type, empty=self._empty[0])
            for env_ids in shares
        ]
        self._process_of = [process for process in self._env_processes for _ in process.env_ids]
        self._instructions = [info.tasks[0].instruction] * self.num_envs
        dummy_images = {name: np.zeros((h, w, 3), np.uint8) for name, (h, w) in info.cameras.items()}
        # What an env shows that breaks in its first reset.
        self._views = [View(dummy_images, np.zeros(info.state_dim, np.float32))] * self.num_envs
        self._faults: dict[int, list[str]] = {}
        self._has_worked = False
        """An env has been reset without breaking."""

    def reset_states(self, split: str) -> tuple[ResetState, ...]:
        return self._states[split]

    def reset(self, env_ids: Any, state_ids: Any, seed: Any) -> Observation:
        """Reset all these envs concurrently. An env that breaks is recreated and tried again, up to `RESET_TRIES`
        times; then it keeps its last observation, and the next chunk reports it as broken. Raise UserError if no env
        has ever been reset."""
        env_ids = [int(env_id) for env_id in to_numpy(env_ids)]
        requests = {
            env_id: (int(state), int(key))
            for env_id, state, key in zip(env_ids, to_numpy(state_ids), to_numpy(seed), strict=True)
        }
        for env_id, (state, _) in requests.items():
            self._instructions[env_id] = self._instruction_of_state[state]
            if self._process_of[env_id].is_stale(self._processes):
                self._process_of[env_id].discard()
        missing = requests
        for _ in range(RESET_TRIES):
            answers = self._call_envs("reset", missing, self._view_flaw)
            for env_id, view in answers.items():
                self._views[env_id] = view
                self._process_of[env_id].was_reset(env_id)
                self._has_worked = True
            missing = {env_id: requests[env_id] for env_id in missing.keys() - answers.keys()}
            if not missing:
                break
        if not self._has_worked:
            env_id = next(env_id for env_id in missing if self._faults[env_id])  # others broke with it
            raise UserError(
                f"env {self._env_number(env_id)} broke {RESET_TRIES} times in reset, from state "
                f"{requests[env_id][0]}:\n{self._faults[env_id][-1]}"
            )
        return self._build_observation(env_ids)

    def chunk_step(self, actions: Any, active: Any, stop_at_end: bool) -> ChunkResult:
        """Execute a chunk. Envs that break, or their process, execute nothing and keep observations (`faults`)."""
        actions = np.asarray(to_numpy(actions), np.float32)
        records = np.zeros(actions.shape[:2], self._empty.dtype)
        requests = {int(env_id): (actions[env_id], bool(stop_at_end)) for env_id in np.flatnonzero(to_numpy(active))}
        for env_id in [env_id for env_id in requests if env_id not in self._process_of[env_id].ready]:
            del requests[env_id]
            self._faults.setdefault(env_id, [])  # the fault was reported when it happened
        for env_id, result in self._call_envs("step_chunk", requests, self._result_flaw).items():
            records[env_id], self._views[env_id] = self._read_records(result), result.view
        return make_result(self._build_observation(range(self.num_envs)), records)

    def expert_chunk(self) -> Array:
        """Return the scripted expert's chunk. Raise UserError for a task without an expert. Broken envs get zeros."""
        chunks = np.zeros((self.num_envs, self._chunk, self.info.action_dim), np.float32)
        answers = self._call_envs(
            "expert_chunk", {env_id: () for process in self._env_processes for env_id in process.ready}
        )
        for env_id, chunk in answers.items():
            chunks[env_id] = chunk
        return chunks

    def faults(self) -> Mapping[int, Sequence[str]]:
        faults = self._faults
        self._faults = {}
        return faults

    def close(self) -> None:
        for process in self._env_processes:
            process.discard()

    @property
    def has_own_processes(self) -> bool:
        """Whether each env has its own process."""
        return all(
            process.process_type is SeparateProcess and len(process.env_ids) == 1 for process in self._env_processes
        )

    def in_one_process(self) -> SubprocEnvs:
        """Return another simulator with the same envs, which take turns in one process."""
        processes = Processes(apart=True, envs_per_process=self.num_envs, deadline_s=self._processes.deadline_s)
        return SubprocEnvs(self.info, self._states, self._make_env, self._context, processes)

    @property
    def pids(self) -> list[int]:
        """Process id of each env; 0: none before its first reset."""
        return [process.pid for process in self._process_of]

    def inline_env(self, i: int) -> SingleEnv:
        """Return the i-th env object after its reset, if envs live in this process (`processes: {apart: false}`)."""
        return self._process_of[i].local_env(i)

    # --------------------------------------------------------------------------------------------------- inside

    def _call_envs(
        self, method: str, arguments: Mapping[int, tuple[Any, ...]], flaw: Callable[[Any], str] = lambda _: ""
    ) -> dict[int, Any]:
        """Call `method` on envs, in all processes concurrently. Return their replies; faults are noted instead."""
        requests_of_process: dict[int, dict[int, tuple[Any, ...]]] = {}
        for env_id, given in arguments.items():
            requests_of_process.setdefault(self._process_of[env_id].env_ids.start, {})[env_id] = given
        processes = [(self._process_of[start], requests) for start, requests in requests_of_process.items()]
        new_processes = {id(process) for process, _ in processes if not process.is_running}
        env_ids = [env_id for process, requests in processes if id(process) in new_processes for env_id in requests]
        with register_work("starting envs", len(env_ids), self._describe_tasks(env_ids)) as note:
            return self._call_processes(method, processes, flaw, new_processes, note)

    def _call_processes(
        self,
        method: str,
        processes: Sequence[tuple[EnvProcess, Mapping[int, tuple[Any, ...]]]],
        flaw: Callable[[Any], str],
        new_processes: Collection[int],
        note: Callable[[int], None],
    ) -> dict[int, Any]:
        """Call `method` on the envs of these processes, starting those that do not run.

        Args:
            flaw: describes what is wrong with a reply; empty if nothing is.
            new_processes: `id` of the processes that this call starts.
            note: called with the number of envs in new processes that have answered.
        """
        start_all([process for process, _ in processes])
        begun = time.monotonic()
        for process, requests in processes:
            process.send_requests(method, requests)
        answers: dict[int, Any] = {}
        refused: list[Exception] = []
        started = 0
        for process, requests in processes:
            deadline = self._processes.deadline_s * len(requests)
            got = process.receive_answers(max(0.0, begun + deadline - time.monotonic()), deadline)
            if id(process) in new_processes:
                started += len(requests)
                note(started)
            if isinstance(got, str):
                env_id = process.running_env
                if env_id is None:
                    self._note_fault(min(requests), f"{process}: {got}")
                else:
                    self._note_fault(env_id, f"env {self._env_number(env_id)}: {got}")
                self._end_process(process, requests)
                continue
            valid: dict[int, Any] = {}
            mended = True
            for env_id, (kind, answer) in got.items():
                if kind == "user error":
                    refused.append(UserError(answer))
                elif (
                    kind == "answer" and method in ("reset", "step_chunk") and (mismatch := self._find_mismatch(answer))
                ):
                    place = f"env {self._env_number(env_id)}"
                    refused.append(UserError(f"{place}: {mismatch}; correct `render` of the env, or `EnvInfo`"))
                elif fault := answer if kind == "broken" else flaw(answer):
                    self._note_fault(env_id, f"env {self._env_number(env_id)}: {fault}")
                    mended &= process.schedule_recreation(env_id)
                else:
                    valid[env_id] = answer
            if mended:
                answers |= valid
            else:
                self._end_process(process, requests)
        if refused:  # raised after every env has answered, so that the next call finds none busy
            raise refused[0]
        return answers

    def _describe_tasks(self, env_ids: Iterable[int]) -> str:
        """Describe the tasks of these envs briefly."""
        first, *others = dict.fromkeys(self._instructions[env_id] for env_id in env_ids) or ("",)
        return f"{first:.60}{f' and {len(others)} other tasks' if others else ''}"

    def _end_process(self, process: EnvProcess, env_ids: Iterable[int]) -> None:
        """End a process. All envs that break with it are listed in `faults`, where the cause is given once."""
        for env_id in process.ready.union(env_ids):
            self._faults.setdefault(env_id, [])
        process.discard()

    def _note_fault(self, env_id: int, text: str) -> None:
        self._faults.setdefault(env_id, []).append(text)

    def _env_number(self, env_id: int) -> int:
        """Return the run-wide number of an env."""
        return self._process_of[env_id].first + env_id

    def _build_observation(self, env_ids: Iterable[int]) -> Observation:
        views = [self._views[env_id] for env_id in env_ids]
        instructions_of_envs = [self._instructions[env_id] for env_id in env_ids]
        return Observation(
            images={name: np.stack([view.images[name] for view in views]) for name in self.info.cameras},
            instructions=tuple(
                view.instruction or text for view, text in zip(views, instructions_of_envs, strict=True)
            ),
            state=np.stack([view.state for view in views if view.state is not None]) if self.info.state_dim else None,
        )

    def _find_mismatch(self, answer: Any) -> str:
        """Describe an observation's type or shape that differs from `EnvInfo`, if any; a new env would not help."""
        view = answer if isinstance(answer, View) else answer.view
        for name, (height, width) in self.info.cameras.items():
            image = view.images.get(name)
            actual = "nothing" if image is None else f"{image.dtype} {list(image.shape)}"
            if actual != f"uint8 {[height, width, 3]}":
                return f"its image {name!r} is {actual}, expected uint8 {[height, width, 3]}"
        if not self.info.state_dim:
            return ""
        actual = "nothing" if view.state is None else f"{view.state.dtype} {list(view.state.shape)}"
        expected = f"float32 [{self.info.state_dim}]"
        return "" if actual == expected else f"its state is {actual}, expected {expected}"

    def _view_flaw(self, view: View) -> str:
        """Describe what is wrong with an observation; empty if nothing is."""
        if view.state is None or not self.info.state_dim or np.isfinite(view.state).all():
            return ""
        return f"its state is not finite: {view.state.tolist()}"

    def _result_flaw(self, result: ChunkAnswer) -> str:
        records = self._read_records(result)
        for name in self._real_fields:
            if not np.isfinite(records[name]).all():
                return f"its {name.replace('_', ' ')} are not finite: {records[name].tolist()}"
        return self._view_flaw(result.view)

    def _read_records(self, result: ChunkAnswer) -> Array:
        return np.frombuffer(result.records, self._empty.dtype)
