"""Processes of simulator envs: one or several envs each, or in the caller's; and error handling there."""

from __future__ import annotations

import inspect
import logging
import multiprocessing
import os
import pickle
import signal
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

import cloudpickle
import numpy as np
import psutil
from attrs import Factory, define

from vla_rl.core.errors import PluginError, UserError
from vla_rl.core.fields import RESULT
from vla_rl.core.types import ActionSource, Array
from vla_rl.toolkit.envs.settings import Processes
from vla_rl.toolkit.envs.single_env import Outcome, SingleEnv, View, execute_chunk
from vla_rl.toolkit.processes import (
    delay_signals,
    find_descendants,
    ignore_signals,
    kill_process,
    leave_with_parent,
    unguarded_call,
)

if TYPE_CHECKING:
    from vla_rl.toolkit.envs.single_env import MakeEnv

logger = logging.getLogger(__name__)

REPORTED = frozenset(field.name for field in RESULT)
"""Fields of a chunk step that are no extras."""
Answer = tuple[str, Any]
"""Reply for one env: ("answer", result) or ("broken" | "user error", text)."""


class ChunkAnswer(NamedTuple):
    """Result of a chunk in one env."""

    records: bytes
    """Records of its actions, as `single_env.empty_records` arranges them."""
    view: View
    """Observation after the chunk."""


class _Served:
    """Envs behind one method that never raises: errors are returned as replies."""

    def __init__(self, make: MakeEnv, first: int, empty: Array, note_running: Callable[[int], object]) -> None:
        """`empty`: records of a chunk [C]; `note_running` gets an env's number before it runs, if there are more."""
        self._note_running = note_running
        self._make = make
        self._first = first
        self._empty = empty
        self.envs: dict[int, SingleEnv] = {}

    def answer(
        self, method: str, requests: Mapping[int, tuple[Any, ...]], to_recreate: Iterable[int]
    ) -> dict[int, Answer]:
        """Call `method` on each env in turn and return the replies. Envs in `to_recreate` are recreated first."""
        for env_id in to_recreate:
            self._drop_env(env_id)
        answers = {}
        for env_id, arguments in requests.items():
            if len(requests) > 1:
                self._note_running(env_id)
            answers[env_id] = self._answer_request(method, env_id, arguments)
        return answers

    def _answer_request(self, method: str, env_id: int, arguments: tuple[Any, ...]) -> Answer:
        try:
            if env_id not in self.envs:
                self.envs[env_id] = _created_env(self._make, self._first + env_id)
            return "answer", getattr(self, f"_{method}")(self.envs[env_id], *arguments)
        except UserError as exc:
            return "user error", str(exc)
        except Exception:
            return "broken", traceback.format_exc()

    def _reset(self, env: SingleEnv, state_id: int, seed: int) -> View:
        env.reset(state_id, seed)
        return _checked_view(env)

    def _step_chunk(self, env: SingleEnv, actions: Array, stop_at_end: bool) -> ChunkAnswer:
        """Execute a chunk. Raise PluginError or UserError for a step whose result is not as `EnvInfo` declares."""
        records: Array = np.zeros(len(actions), self._empty.dtype)
        names = frozenset(records.dtype.names or ())
        declared = {name: records.dtype[name].shape for name in names - REPORTED}

        def step_env(action: Array) -> Outcome:
            outcome = env.step(action)
            if not isinstance(outcome, Outcome):
                raise PluginError(_wrong_type(env, "step", outcome, "Outcome(reward, success, terminated, truncated)"))
            by_policy = outcome.source == ActionSource.POLICY
            if not by_policy and (executed := np.asarray(outcome.executed_action)).shape != action.shape:
                raise PluginError(
                    f"{_method_location(env, 'step')} returned an executed_action of shape {list(executed.shape)}; an "
                    f"action of this simulator has {list(action.shape)}"
                )
            if not by_policy and "source" not in names:
                raise UserError(
                    f"{_method_location(env, 'step')} reports a takeover, and `EnvInfo.takeovers` is false; correct one"
                )
            shapes = {name: np.shape(value) for name, value in outcome.extras.items()}
            if shapes != declared:
                raise UserError(
                    f"{_method_location(env, 'step')} returned extras of the shapes {shapes}; `EnvInfo.extras` "
                    f"declares {declared}; correct one"
                )
            return outcome

        execute_chunk(records, actions, step_env, stop_at_end)
        return ChunkAnswer(records.tobytes(), _checked_view(env))

    def _expert_chunk(self, env: SingleEnv) -> Array:
        return np.asarray(env.expert_chunk(len(self._empty)), np.float32)

    def _drop_env(self, env_id: int) -> None:
        with suppress(Exception):  # it is broken
            self.envs.pop(env_id).close()

    def close(self) -> None:
        """Close all envs, also after one fails, and then raise the first exception."""
        first: Exception | None = None
        while self.envs:
            try:
                self.envs.popitem()[1].close()
            except Exception as exc:
                first = first or exc
        if first is not None:
            raise first


def _created_env(make: MakeEnv, number: int) -> SingleEnv:
    """Create the env of this number. Raise PluginError if it is no `SingleEnv`, or its methods take other arguments."""
    env = make(number)
    if not isinstance(env, SingleEnv):
        raise PluginError(
            f"the envs of this simulator are made as {type(env).__name__} objects; "
            "make objects of a subclass of vla_rl.toolkit.envs.single_env.SingleEnv"
        )
    for method, arguments in (("reset", ("state_id", "seed")), ("step", ("action",)), ("render", ())):
        try:
            inspect.signature(getattr(env, method)).bind(*arguments)
        except TypeError as exc:
            raise PluginError(
                f"{_method_location(env, method)} cannot be called as {method}({', '.join(arguments)}): {exc}"
            ) from None
    return env


def _checked_view(env: SingleEnv) -> View:
    view = env.render()
    if not isinstance(view, View):
        raise PluginError(_wrong_type(env, "render", view, "View(images, state)"))
    if not isinstance(view.images, Mapping):
        raise PluginError(
            f"{_method_location(env, 'render')} returned a View whose images are {_format_value(view.images)}; "
            "name them by camera: View({'main': image}, state)"
        )
    images = {name: np.asarray(image) for name, image in view.images.items()}
    return View(images, None if view.state is None else np.asarray(view.state), view.instruction)


def _wrong_type(env: SingleEnv, method: str, got: object, expected: str) -> str:
    gym = ", as gymnasium's does" if isinstance(got, tuple) else ""
    return (
        f"{_method_location(env, method)} returned {_format_value(got)}{gym}; "
        f"return {expected}, from vla_rl.toolkit.envs.single_env import {expected.partition('(')[0]}"
    )


def _format_value(value: object) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return "None" if value is None else f"an object of type {type(value).__name__}"


def _method_location(env: SingleEnv, method: str) -> str:
    """Format a method of the plugin's class with file and line."""
    code = getattr(inspect.unwrap(getattr(type(env), method)), "__code__", None)
    where = "" if code is None else f" ({code.co_filename}:{code.co_firstlineno})"
    return f"{type(env).__name__}.{method}{where}"


class Inline:
    """Envs in this process."""

    def __init__(self, make: MakeEnv, first: int, empty: Array) -> None:
        self.pid = os.getpid()
        self.running_env: int | None = None
        self._served = _Served(make, first, empty, lambda env_id: None)

    @property
    def envs(self) -> Mapping[int, SingleEnv]:
        """Envs that have been called at least once."""
        return self._served.envs

    def send_requests(self, method: str, requests: Mapping[int, tuple[Any, ...]], to_recreate: Iterable[int]) -> None:
        self._call = method, requests, to_recreate

    def receive_answers(self, timeout: float) -> dict[int, Answer]:
        return self._served.answer(*self._call)

    def close(self) -> None:
        self._served.close()


class SeparateProcess:
    """Envs in a separate process, which ends with its owner, however that ends. A pipe is all that they share, since
    locks and queues of processes need /dev/shm, which a container may lack."""

    def __init__(self, make: MakeEnv, first: int, empty: Array) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        ours, theirs = context.Pipe()
        self._pipe = ours
        self.running_env: int | None = None
        """Env that answers, or failed to; None: unknown."""
        arguments = cloudpickle.dumps(make), first, empty, theirs
        self._process = context.Process(target=_serve_requests, args=arguments, daemon=True)
        try:
            with delay_signals():  # a signal to the whole job reaches neither the fork server nor the envs
                self._process.start()
                theirs.close()
                self._pipe.recv()
        except (EOFError, OSError, RuntimeError):
            call = unguarded_call()
            if not call:
                raise
            raise UserError(
                f"the processes of envs import the script that starts them, and would start the run again: put the "
                f'call at {call} below `if __name__ == "__main__":`'
            ) from None
        Finalize(self, self._process.kill, exitpriority=0)  # multiprocessing would ask it to end in vain, and wait
        self.pid = self._process.pid or 0

    def send_requests(self, method: str, requests: Mapping[int, tuple[Any, ...]], to_recreate: Iterable[int]) -> None:
        self.running_env = next(iter(requests)) if len(requests) == 1 else None
        self._pipe.send((method, requests, to_recreate))

    def receive_answers(self, timeout: float) -> dict[int, Answer]:
        """Return the replies. Raise TimeoutError, or ConnectionError if the process has ended."""
        end = monotonic() + timeout
        try:
            while self._pipe.poll(max(0.0, end - monotonic())):
                received: int | dict[int, Answer] = self._pipe.recv()
                if isinstance(received, dict):
                    return received
                self.running_env = received
        except (EOFError, ConnectionError) as exc:
            self._process.join(5)
            code = self._process.exitcode
            hint = "; -9 is what a lack of memory gives" if code == -signal.SIGKILL else ""
            raise ConnectionError(f"its process ended with exit code {code}{hint}") from exc
        raise TimeoutError

    def close(self) -> None:
        begun = find_descendants(self.pid)
        self._process.kill()  # envs need no cleanup, and a hanging one would not answer
        self._process.join()
        for process in begun:  # started by envs, such as a game engine's server: nothing else ends them
            kill_process(process)
        self._pipe.close()


def _serve_requests(make: bytes, first: int, empty: Array, pipe: Connection[Any, Any]) -> None:
    """Send None when ready, then answer the owner's requests until it closes the pipe. For one to several envs, each
    env's number is sent before it runs, then all replies. `make`: the pickled maker; `empty`: a chunk's empty
    records."""
    ignore_signals()  # they are the owner's to handle
    leave_with_parent()
    served = _Served(pickle.loads(make), first, empty, pipe.send)  # noqa: S301 - from our owner
    pipe.send(None)
    with suppress(EOFError):
        while True:
            pipe.send(served.answer(*pipe.recv()))


@define
class EnvProcess:
    """Envs and the process they live in. The process is started when needed, and restarted after it broke."""

    env_ids: range
    """Numbers of the envs within the batch."""
    first: int
    """Run-wide number of the batch's first env."""
    make: MakeEnv
    process_type: type[SeparateProcess | Inline]
    empty: Array
    """Records of a chunk's actions [C], of which none is executed yet."""
    episodes: int = 0
    ready: set[int] = Factory(set)
    """Envs that were reset and have not broken since."""
    _to_recreate: set[int] = Factory(set)
    """Envs to recreate at their next reset, since they are broken."""
    _process: SeparateProcess | Inline | None = None
    _unsent: str = ""

    @property
    def is_running(self) -> bool:
        return self._process is not None

    @property
    def running_env(self) -> int | None:
        """Env whose call the process answers, or failed to answer; None: unknown."""
        return None if self._process is None else self._process.running_env

    @property
    def pid(self) -> int:
        """Process id; 0: no process is running."""
        return 0 if self._process is None else self._process.pid

    def local_env(self, env_id: int) -> SingleEnv:
        """Return the env object. It must live in this process and have been reset."""
        assert isinstance(self._process, Inline)
        return self._process.envs[env_id]

    def start_process(self) -> None:
        self._process = self.process_type(self.make, self.first, self.empty)
        self.episodes = 0

    def send_requests(self, method: str, requests: Mapping[int, tuple[Any, ...]]) -> None:
        assert self._process is not None
        try:
            self._unsent = ""
            self._process.send_requests(method, requests, self._to_recreate & requests.keys())
        except OSError as exc:
            self._unsent = f"its process ended before {method}: {exc}"

    def receive_answers(self, timeout: float, deadline: float) -> dict[int, Answer] | str:
        """Return the replies, or a text that says what is wrong with the process."""
        assert self._process is not None
        if self._unsent:
            return self._unsent
        try:
            return self._process.receive_answers(timeout)
        except TimeoutError:
            return f"no answer for {deadline:g} s (processes.deadline_s)"
        except ConnectionError as exc:
            return str(exc)

    def was_reset(self, env_id: int) -> None:
        self.episodes += 1
        self.ready.add(env_id)
        self._to_recreate.discard(env_id)

    def schedule_recreation(self, env_id: int) -> bool:
        """Recreate a broken env at its next reset. Return False if it is alone in its process, or was already."""
        if len(self.env_ids) == 1 or env_id in self._to_recreate:
            return False
        self.ready.discard(env_id)
        self._to_recreate.add(env_id)
        return True

    def is_stale(self, limits: Processes) -> bool:
        """Return whether the process has reached its limit of episodes or memory."""
        if self._process is None or self._process.pid == os.getpid():
            return False
        if limits.recycle_episodes is not None and self.episodes >= limits.recycle_episodes:
            return True
        if limits.recycle_mib is None:
            return False
        try:
            resident: int = psutil.Process(self._process.pid).memory_info().rss
            return resident > limits.recycle_mib * 2**20
        except psutil.Error:
            return True

    def discard(self) -> None:
        self.ready.clear()
        self._to_recreate.clear()
        process = self._process
        self._process = None
        try:
            if process is not None:
                process.close()
        except Exception as exc:  # the process frees what it held; the collected data count
            where = traceback.extract_tb(exc.__traceback__)[-1]
            logger.warning("%s: close failed (%s:%d): %s", self, where.filename, where.lineno, exc)

    def __str__(self) -> str:
        numbers = [self.first + env_id for env_id in self.env_ids]
        return f"env {numbers[0]}" if len(numbers) == 1 else f"envs {numbers[0]} to {numbers[-1]}"


def start_all(processes: Sequence[EnvProcess]) -> None:
    """Start the processes that are not running, in parallel."""
    missing = [process for process in processes if not process.is_running]
    if len(missing) > 1 and missing[0].process_type is SeparateProcess:
        with ThreadPoolExecutor(len(missing)) as pool:
            list(pool.map(EnvProcess.start_process, missing))
    else:
        for process in missing:
            process.start_process()
