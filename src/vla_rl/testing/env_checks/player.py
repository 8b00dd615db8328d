"""Plays scripts on a simulator as core does, looks at every answer, and records what it saw."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any, TypeVar

import numpy as np
from attrs import define, evolve, field, frozen

from vla_rl.core.hookspecs import SimEnv
from vla_rl.core.randomness import derived_seed, generator
from vla_rl.core.types import Array, ChunkResult, ResetState, TaskInfo, to_numpy
from vla_rl.testing.common.findings import Findings, LeftOut, Unfit, error_body
from vla_rl.testing.env_checks.traces import (
    EnvTrace,
    EnvView,
    Script,
    Slack,
    TraceStep,
    copy_views,
    describe_difference,
    describe_gap,
)
from vla_rl.testing.env_checks.values import check_observation, check_result

T = TypeVar("T")
PIXELS = 0.5
"""Mean difference of images that is tolerated as long as it is not known whether the renderer repeats itself."""
KINDS = ("random", "extreme", "held extreme", "held random", "lowest", "highest", "slowly changing")
"""Kinds of action sequences: random at each step, within or at the bounds; constant in an episode; redrawn at times."""
REGION = 5.0
"""Difference of the mean colours of a region (of 255) that is tolerated: less than a small object that is elsewhere."""
HOPELESS = 3, 9
"""Calls in a row that fail alike before the check stops: where none has worked yet, and later."""
KEYED = "derive everything random from state id and seed, and draw from no other generator"
OF_STEPS = ("rewards", "terminated", "truncated", "succeeded", "source", "executed_actions")
OF_RESULTS = (*OF_STEPS, "executed", "success", "late")


@frozen(kw_only=True)
class CheckSettings:
    """What a caller asked for, as `check_env` takes it."""

    expert: bool
    expert_success: float
    check_range: bool
    seconds: float
    make_env: Callable[[], SimEnv] | None = None
    """Builds the simulator once more; None: it cannot be built again."""


@define(eq=False)
class ViewChanges:
    """What a camera, or the state, has shown so far."""

    first: Array
    low: float = np.inf
    high: float = -np.inf
    varied: bool = False
    """It differed between resets."""
    moved: bool = False
    """A chunk changed it."""


@frozen(eq=False)
class FirstFrames:
    """The first view of a state."""

    state: int
    split: str
    mark: bytes
    numbers: Array | None
    view: EnvView | None
    """The view, kept for the first states that were entered."""


@frozen(eq=False)
class EnvStatus:
    """Where an env is in an episode: its state and its instruction at the reset, and what it showed last."""

    state: int
    instruction: str
    view: EnvView


@define(eq=False)
class CheckRecords:
    """What was seen so far."""

    collected: list[EnvTrace] = field(factory=list)
    """Every episode, without views."""
    shown: dict[str, ViewChanges] = field(factory=dict)
    alike: dict[tuple[str, str], bool] = field(factory=dict)
    """Two cameras of one size: whether their images have always been the same."""
    stride: Array | None = None
    """Largest change of each number of the state by a single action that ended no episode."""
    starts: dict[int, FirstFrames] = field(factory=dict)
    earliest: dict[int, EnvTrace] = field(factory=dict)
    """The first episodes with random actions, by env."""
    ended: list[EnvTrace] = field(factory=list)
    """Episodes to be ended again."""
    repeated: dict[int, EnvTrace] = field(factory=dict)
    """Episodes that came twice alike, by env."""


class Player:
    """Runs episodes on a simulator (`roll_out`) and checks everything that a call returns."""

    def __init__(
        self,
        env: SimEnv,
        findings: Findings,
        chunk: int,
        splits: Mapping[str, Sequence[ResetState]],
        options: CheckSettings,
    ) -> None:
        self.env = env
        self.findings = findings
        self.chunk = chunk
        self.options = options
        self.seconds = options.seconds
        self.info = env.info
        self.env_ids = list(range(env.num_envs))
        bounds = (env.info.action_low, env.info.action_high)
        low, high = (np.nan_to_num(np.array(b, np.float32), posinf=1.0, neginf=-1.0) for b in bounds)
        self.low = low
        self.high = high
        self.splits: dict[str, Sequence[ResetState]] = {"train": (), "eval": (), **splits}
        tasks = {task.name: task for task in env.info.tasks}
        self.tasks: dict[int, TaskInfo] = {s.id: tasks[s.task] for of in splits.values() for s in of if s.task in tasks}
        self.slack = Slack(PIXELS, region=REGION)
        self.loose = Slack(255.0, np.inf)
        """Slack of comparisons between different sequences of calls."""
        self.seed_limit = 2**63 - 1
        self.record = CheckRecords()
        self.statuses: list[EnvStatus | None] = [None] * env.num_envs
        self.chunk_count = 0
        """Chunks whose results could be read."""
        self.started_in = 0.0
        """Seconds that the first reset took."""
        self.broken: list[str] = []
        """Faults of envs in the last call."""
        self.hopeless = ""
        """Reason why the check has stopped calling the simulator."""
        self._spent = {"reset": [0.0, 0], "chunk_step": [0.0, 0]}
        """Call -> seconds, and number, of those that worked."""
        self._failed: dict[str, tuple[str, int, float]] = {}
        """Call -> common part of its last failures, their number in a row, and their seconds."""
        self._reported: set[tuple[str, str]] = set()
        self._returned: deque[list[tuple[str, Any, Array]]] = deque(maxlen=3)

    # -------------------------------------------------------------------------------------------- findings

    def expect(self, holds: bool, where: str, expected: object, got: object, remedy: str) -> bool:
        """Report as `Findings.expect` does, but report a failed expectation once."""
        if not holds and (where, str(expected)) not in self._reported:
            self._reported.add((where, str(expected)))
            self.findings.expect(False, where, expected, got, remedy)
        return holds

    def notice(self, text: str) -> None:
        self.findings.notice(text)

    def expect_same(
        self,
        pairs: Iterable[tuple[EnvTrace, EnvTrace]],
        expected: str,
        remedy: str,
        slack: Slack | None = None,
        *,
        where: str = "chunk_step",
        as_far_as_both: bool = False,
    ) -> bool:
        """Expect that the second of each pair is the first. `as_far_as_both`: one may be longer."""
        equal = True
        for one, two in pairs:
            upto = min(one.end_or_length, len(two)) if as_far_as_both else None
            deviation = describe_difference(one, two, slack or self.slack, upto)
            ending = f", ended by action {one.end_step}" if one.end_step else ""
            at = "reset" if deviation.startswith("after the reset") else where
            equal &= self.expect(not deviation, at, expected, f"{deviation} ({two}{ending})", remedy)
        return equal

    # ---------------------------------------------------------------------------------------------- length

    def derive_seed(self, key: int) -> int:
        """Return a seed in the range of a run's seeds."""
        return derived_seed(0, "check_env", key) % self.seed_limit

    def make_script(self, state: int, kind: str, length: int, key: int = 0) -> Script:
        """An episode with actions of one of `KINDS`; another key gives others of the kind."""
        chance = generator(state, f"check_env: {kind}", key)
        actions = self.low + _draw_actions(chance, kind, length, len(self.low)) * (self.high - self.low)
        bounded = np.clip(actions.astype(np.float32), self.low, self.high)
        return Script(state=state, seed=self.derive_seed(state), actions=bounded, kind=kind)

    def make_scripts(self, length: int) -> dict[int, Script]:
        """Return a script for each env, from different states if enough are available."""
        states, kinds = self.spread_states, ("random", "extreme", "slowly changing")
        return {r: self.make_script(states[r % len(states)], kinds[r % 3], length, key=r) for r in self.env_ids}

    @property
    def shortest_limit(self) -> int:
        """The shortest step limit among the states of `make_scripts`."""
        return min(self.step_limit(state) for state in self.spread_states[: len(self.env_ids)])

    @property
    def spread_states(self) -> list[int]:
        """States of the train split, so that the first ones are well spread."""
        return [state.id for state in spread_out(self.splits["train"])]

    def seconds_per_call(self, call: str) -> float:
        total, count = self._spent[call]
        return float(total / count) if count else 0.0

    @property
    def is_slow(self) -> bool:
        """Return whether resets take so long that only few states are entered."""
        return self.seconds_per_call("reset") > 0.01 * self.seconds

    def affordable_chunks(self, share: float, rollouts: int, max_chunks: int) -> int:
        """Chunks that each of `rollouts` rollouts may have, 2 to `max_chunks`, to stay within a share of the time."""
        room = share * self.seconds / rollouts - self.seconds_per_call("reset")
        count = int(room / max(self.seconds_per_call("chunk_step"), 1e-6))
        return max(min(count, max_chunks), min(2, max_chunks))

    def step_limit(self, state: int) -> int:
        task = self.tasks.get(state)
        return task.max_steps if task else 1

    # ----------------------------------------------------------------------------------------------- calls

    def reset_envs(
        self, env_ids: Sequence[int] | Array, states: Sequence[int] | Array, seeds: Sequence[int]
    ) -> list[EnvView]:
        """Reset the envs. Return the view of each, in that order."""
        if self.hopeless:
            raise LeftOut(self.hopeless)
        passed = {"env_ids": env_ids, "state_ids": states, "seed": seeds}
        obs = self._call("reset", {name: np.array(values, np.int64) for name, values in passed.items()})
        valid = check_observation(self, self.info, obs, len(env_ids), "reset")
        self._check_earlier_results("reset", obs, {})
        if not valid:
            raise Unfit
        env_views = copy_views(obs)
        for env_id, state, view in zip(env_ids, states, env_views, strict=True):
            status = self.statuses[env_id] = EnvStatus(int(state), view.instruction, view)
            self._check_instruction(status, "reset")
            self._note_view(view)
        return env_views

    def step_envs(self, actions: Array, active: Array, stop: bool) -> tuple[ChunkResult, list[EnvView]]:
        """Step the envs. Return the result as NumPy arrays, and the view of each env."""
        passed = {"actions": np.array(actions, np.float32), "active": np.array(active, bool), "stop_at_end": stop}
        result = self._call("chunk_step", passed)
        valid = check_result(self, self.info, result, np.array(active), actions.shape[1], stop)
        arrays = {name: array for name in OF_RESULTS if (array := getattr(result, name)) is not None}
        self._check_earlier_results("chunk_step", result.obs, arrays)
        if not valid:
            raise Unfit
        self.chunk_count += 1
        result = evolve(result, **{name: np.array(to_numpy(array)) for name, array in arrays.items()})
        env_views = copy_views(result.obs)
        for env_id, (status, view) in enumerate(zip(self.statuses, env_views, strict=True)):
            if status is None:
                continue
            now = self.statuses[env_id] = evolve(status, view=view)
            if active[env_id]:
                self._check_instruction(now, "chunk_step")
                self._note_view(view, status.view)
                ended = result.terminated[env_id] | result.truncated[env_id]
                if actions.shape[1] == 1 and not ended[0]:
                    self._note_stride(view, status.view)
            else:
                got = describe_gap(status.view, view, self.loose)
                self.expect(not got, "chunk_step", "envs that are not active unchanged", got, "skip these envs")
        return result, env_views

    # ---------------------------------------------------------------------------------------------- episodes

    def roll_out(
        self,
        scripts: Mapping[int, Script],
        *,
        waiting: Mapping[int, Script] | None = None,
        widths: Sequence[int] = (),
        stop: bool = True,
        keep_images: bool = True,
        between: Callable[[int], Any] = lambda index: None,
        restart: tuple[int, int, Script] | None = None,
    ) -> dict[int, EnvTrace]:
        """Play episodes side by side, until each has ended or its script is over.

        Args:
            scripts: env -> what it runs.
            waiting: envs that are reset and then left alone.
            widths: actions in the first chunks; those that follow have the usual number.
            stop: `stop_at_end`; an env that ended is left alone from the next chunk on. False: envs run on.
            between: called before each chunk with its number, counted from 0.
            restart: (number of a chunk, env, script): before it the env restarts with this script.
        """
        traces = self.begin_episodes({**scripts, **(waiting or {})}, stop)
        active = np.isin(self.env_ids, list(scripts))
        for index in itertools.count():
            if not active.any():
                break
            if restart and restart[0] == index:
                traces |= self.begin_episodes({restart[1]: restart[2]}, stop)
                active[restart[1]] = True
            between(index)
            width = widths[index] if index < len(widths) else self.chunk
            width = min(width, *(len(trace.script) - len(trace) for env_id, trace in traces.items() if active[env_id]))
            self.advance_episodes(traces, active, width, keep_images)
            for env_id, trace in traces.items():
                over = len(trace) >= len(trace.script) or (stop and trace.end_step is not None)
                active[env_id] &= not over
        return {env_id: trace for env_id, trace in traces.items() if env_id in scripts}

    def begin_episodes(self, scripts: Mapping[int, Script], stop: bool = True) -> dict[int, EnvTrace]:
        """Reset envs to where their scripts start."""
        states, seeds = zip(*((script.state, script.seed) for script in scripts.values()), strict=True)
        env_views = self.reset_envs(list(scripts), states, seeds)
        traces = {}
        for (env_id, script), view in zip(scripts.items(), env_views, strict=True):
            traces[env_id] = EnvTrace(script=script, env_id=env_id, views={0: view}, stops=stop)
            self.record.collected.append(evolve(traces[env_id], views={}))
        return traces

    def advance_episodes(
        self, traces: Mapping[int, EnvTrace], active: Array, width: int, keep_images: bool = True
    ) -> None:
        """Play the next `width` actions of the scripts of active envs. Others must not take the large ones they get."""
        actions = np.tile(self.high, (len(self.env_ids), width, 1))
        chosen = [traces[int(env_id)] for env_id in np.flatnonzero(active)]
        for trace in chosen:
            actions[trace.env_id] = trace.script.actions[len(trace) : len(trace) + width]
        result, env_views = self.step_envs(actions, active, all(trace.stops for trace in chosen))
        for trace in chosen:
            _record_chunk(trace, result, env_views[trace.env_id], keep_images)

    @contextmanager
    def other_env(self, env: SimEnv) -> Iterator[None]:
        """Play with another simulator, none of whose envs has been reset. It is closed at the end."""
        original, statuses = self.env, self.statuses
        self.env = env
        self.statuses = [None] * len(statuses)
        try:
            yield
        finally:
            self.env = original
            self.statuses = statuses
            env.close()

    # ----------------------------------------------------------------------------------------------- inside

    def _call(self, name: str, arguments: dict[str, Any]) -> Any:
        """Call a method of the simulator with copies of the arguments. Raises Unfit if an env breaks in a step."""
        originals = {key: np.array(value) for key, value in arguments.items()}
        began = perf_counter()
        try:
            answer = getattr(self.env, name)(*arguments.values())
        except Exception as exc:
            self.env.faults()  # what is raised says them too
            self._note_failure(name, f"{type(exc).__name__}: {exc}", began)
            raise
        self.broken = broken = [text.strip() for of_env in self.env.faults().values() for text in of_env]
        for text in broken:
            self.findings.record_error(f"{name}: expected an env that works", text, "fix what breaks it")
        if broken and name == "chunk_step":
            self._note_failure(name, broken[0], began)
            raise Unfit
        if name == "reset" and not self._spent[name][1]:
            self.started_in = perf_counter() - began
        self._failed.pop(name, None)
        self._spent[name][0] += perf_counter() - began
        self._spent[name][1] += 1
        for key, value in arguments.items():
            same = np.array_equal(value, originals[key])
            self.expect(same, name, f"its {key} unchanged", "others written into them", "copy before you write")
        return answer

    def _note_failure(self, call: str, error: str, began: float) -> None:
        """Give up where a call fails alike again and again, or where its failures have taken all of the time."""
        body, (last_body, count, seconds) = error_body(error), self._failed.get(call, ("", 0, 0.0))
        count, seconds = (count + 1 if body == last_body else 1), seconds + perf_counter() - began
        self._failed[call] = body, count, seconds
        if count >= HOPELESS[self._spent[call][1] > 0] or seconds > self.seconds > 0:
            times = "once" if count == 1 else f"{count} times in a row"
            self.hopeless = f"not done: {call} failed {times} in {seconds:.0f} s; see the findings above"

    def _check_earlier_results(self, where: str, obs: Any, arrays: Mapping[str, Any]) -> None:
        """Check that arrays returned by the last calls are unchanged, and keep a copy of these."""
        for name, raw, copy in itertools.chain(*self._returned):
            same = np.array_equal(to_numpy(raw), copy, equal_nan=copy.dtype.kind == "f")
            got, expected = f"{name} that changed in a later {where}", "observations and results that stay as returned"
            remedy = "return copies, not the buffers that the next step writes"
            self.expect(same, name.partition(":")[0], expected, got, remedy)
        named = {f"image {name!r}": image for name, image in obs.images.items()} | dict(arrays)
        named |= {} if obs.state is None else {"state": obs.state}
        self._returned.append([(f"{where}: {name}", raw, np.array(to_numpy(raw))) for name, raw in named.items()])

    def _check_instruction(self, status: EnvStatus, where: str) -> None:
        task, given = self.tasks.get(status.state), status.view.instruction
        if task is not None:
            expected = status.instruction if task.instruction_varies else task.instruction
            remedy = "one wording for an episode" if task.instruction_varies else "that of the state's task"
            self.expect(given == expected, where, f"instruction {expected!r}", given, remedy)

    def _note_view(self, view: EnvView, before: EnvView | None = None) -> None:
        """Take note of what changes."""
        for name, array in view.arrays.items():
            shown = self.record.shown.setdefault(name, ViewChanges(array))
            shown.low, shown.high = min(shown.low, float(array.min())), max(shown.high, float(array.max()))
            if before is None:
                shown.varied |= not np.array_equal(array, shown.first)
            else:
                shown.moved |= name in before.arrays and not np.array_equal(array, before.arrays[name])
        for pair in itertools.combinations(view.images, 2):
            one, two = (view.images[name] for name in pair)
            if one.shape == two.shape and self.record.alike.get(pair, True):
                self.record.alike[pair] = np.array_equal(one, two)

    def _note_stride(self, view: EnvView, before: EnvView) -> None:
        if view.state is not None and before.state is not None:
            move, largest = np.abs(view.state - before.state), self.record.stride
            self.record.stride = move if largest is None else np.maximum(largest, move)


def spread_out(items: Sequence[T]) -> list[T]:
    """The first, the last, and then always where the gaps are widest."""
    order: dict[int, None] = {0: None, len(items) - 1: None} if items else {}
    step = max(len(items) - 1, 1)
    while len(order) < len(items):
        step = max(step // 2, 1)
        order |= dict.fromkeys(range(0, len(items), step))
    return [items[i] for i in order]


def _draw_actions(chance: np.random.Generator, kind: str, length: int, size: int) -> Array:
    """Numbers from 0, the lower bound, to 1, the upper one: [length, size]."""
    draws: Array = chance.random((length, size))
    if kind in ("held extreme", "held random"):
        draws[:] = draws[:1]
    if kind == "slowly changing":
        draws = np.repeat(draws, 5, axis=0)[:length]
    if kind in ("extreme", "held extreme", "slowly changing"):
        draws = draws.round()
    return np.full_like(draws, kind == "highest") if kind in ("lowest", "highest") else draws


def _record_chunk(trace: EnvTrace, result: ChunkResult, view: EnvView, keep_images: bool) -> None:
    env_id = trace.env_id
    count = int(result.executed[env_id].sum())
    arrays = [getattr(result, name) for name in OF_STEPS]
    columns = [[None] * count if array is None else array[env_id, :count].tolist() for array in arrays]
    trace.steps += [TraceStep(*values) for values in zip(*columns, strict=True)]
    trace.success[len(trace)] = bool(result.success[env_id])
    trace.views[len(trace)] = view if keep_images else evolve(view, images={})
