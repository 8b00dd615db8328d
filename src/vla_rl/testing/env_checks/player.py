"""Calls a simulator as core does, and looks at every answer: values, masks, buffers, envs that should stand still."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

import numpy as np
from attrs import define, field, frozen

from vla_rl.core.hookspecs import SimEnv
from vla_rl.core.randomness import derived_seed, generator
from vla_rl.core.types import ActionSource, Array, ChunkResult, Observation, ResetState, TaskInfo, to_numpy
from vla_rl.testing.common.findings import Findings, LeftOut, Unfit, error_body
from vla_rl.testing.env_checks.traces import EnvTrace, EnvView, Script, Slack, copy_views, describe_gap
from vla_rl.testing.env_checks.values import check_observation, check_result

PIXELS = 0.5
"""Mean difference of images that is tolerated as long as it is not known whether the renderer repeats itself."""
KINDS = ("random", "extreme", "held extreme", "held random", "lowest", "highest", "slowly changing")
"""Kinds of action sequences: random at each step, within or at the bounds; constant in an episode; redrawn at times."""
REGION = 5.0
"""Difference of the mean colours of a region (of 255) that is tolerated: less than a small object that is elsewhere."""
SMALL_SEEDS = 2**31
HOPELESS = 3, 9
"""Calls in a row that fail alike before the check stops: where none has worked yet, and later."""
KEYED = "derive everything random from state id and seed, and draw from no other generator"
REMEDY_COPIES = "return copies, not the buffers that the next step writes"


@frozen
class End:
    """The end of an episode."""

    terminated: bool
    reward: float
    success: bool
    earlier: float
    """Largest reward, in size, before the end."""
    steps: int
    limit: int
    """Step limit of the task."""
    truncated: bool = False
    first_only: bool = False
    """Success came with the last action and not before."""


@define
class Sightings:
    """Counts of the events seen so far."""

    varied: dict[str, bool] = field(factory=dict)
    """Camera, or state: whether it differed between resets."""
    moved: dict[str, bool] = field(factory=dict)
    """Camera, or state: whether a chunk changed it."""
    levels: dict[str, tuple[int, int]] = field(factory=dict)
    """Camera -> smallest and largest value of a pixel."""
    first: dict[str, Any] = field(factory=dict)
    alike: dict[tuple[str, str], bool] = field(factory=dict)
    """Two cameras of one size: whether their images have always been the same."""
    ends: list[End] = field(factory=list)
    rewarded: bool = False
    rewarded_between: bool = False
    """A reward, also for an action that ended nothing."""
    won: bool = False
    lost: bool = False
    """Success, and its absence, after an action."""
    chunks: int = 0
    policy_acted: bool = False
    """An action of the policy was executed."""
    taken_over: int = 0
    """Actions that another source chose."""
    overruled: bool = False
    """One of these differed from the policy's."""
    copied: int = 0
    """Actions of the policy that `executed_actions` holds, too."""
    unlabelled: int = 0
    """Actions that the policy is said to have chosen, and that were others."""
    longest: int = 0
    """Actions of the longest episode, ended or not."""
    stride: Array | None = None
    """Largest change of each number of the state by a single action that ended no episode."""


class Player:
    """Runs episodes on a simulator (`roll_out`) and checks everything that a call returns."""

    def __init__(
        self, env: SimEnv, findings: Findings, chunk: int, splits: Mapping[str, Sequence[ResetState]], seconds: float
    ) -> None:
        self.env = env
        self.findings = findings
        self.chunk = chunk
        self.seconds = seconds
        self.info = env.info
        self.env_ids = np.arange(env.num_envs)
        bounds = (env.info.action_low, env.info.action_high)
        low, high = (np.nan_to_num(np.array(b, np.float32), posinf=1.0, neginf=-1.0) for b in bounds)
        self.low = low
        self.high = high
        self.splits: dict[str, Sequence[ResetState]] = {"train": (), "eval": (), **splits}
        tasks = {task.name: task for task in env.info.tasks}
        self.tasks: dict[int, TaskInfo] = {s.id: tasks[s.task] for of in splits.values() for s in of if s.task in tasks}
        self.slack = Slack(PIXELS, region=REGION)
        self.loose = Slack(255.0, np.inf)
        self.seed_limit = 2**63 - 1
        self.seen = Sightings()
        self.seconds_of = {"reset": [0.0, 0], "chunk_step": [0.0, 0]}
        self.started_in = 0.0
        """Seconds that the first reset took."""
        self.hopeless = ""
        """Reason why the check has stopped calling the simulator."""
        self._failed: dict[str, tuple[str, int, float]] = {}
        """Call -> common part of its last failures, their number in a row, and their seconds."""
        self._worked: set[str] = set()
        self._reported: set[tuple[str, str]] = set()
        self._views: list[EnvView | None] = [None] * env.num_envs
        self._instructions: dict[int, str] = {}
        self._state: dict[int, int] = {}
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

    def seconds_per_call(self, call: str) -> float:
        total, count = self.seconds_of[call]
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
        passed = [np.array(values, np.int64) for values in (env_ids, states, seeds)]
        originals = [values.copy() for values in passed]
        began = perf_counter()
        try:
            obs = self.env.reset(*passed)
        except Exception as exc:
            self.env.faults()  # what is raised says them too
            self._note_failure("reset", f"{type(exc).__name__}: {exc}", began)
            raise
        if "reset" not in self._worked:
            self.started_in = perf_counter() - began
        self._note_success("reset", began)
        self._report_faults("reset")
        self._check_arguments_unchanged("reset", zip(("env_ids", "state_ids", "seed"), passed, originals, strict=True))
        valid = check_observation(self, self.info, obs, len(env_ids), "reset")
        self._check_earlier_results("reset", _observation_arrays(obs))
        if not valid:
            raise Unfit
        env_views = copy_views(obs)
        for env_id, state, view in zip(originals[0], originals[1], env_views, strict=True):
            self._views[env_id], self._instructions[int(env_id)], self._state[int(env_id)] = (
                view,
                view.instruction,
                int(state),
            )
            self._check_instruction(int(env_id), view, "reset")
            self._note_changes(view)
        return env_views

    def step_envs(self, actions: Array, active: Array, stop: bool) -> tuple[ChunkResult, list[EnvView]]:
        """Step the envs. Return the result as NumPy arrays, and the view of each env."""
        passed = [np.array(actions, np.float32), np.array(active, bool)]
        originals = [values.copy() for values in passed]
        began = perf_counter()
        try:
            result = self.env.chunk_step(passed[0], passed[1], stop)
        except Exception as exc:
            self._note_failure("chunk_step", f"{type(exc).__name__}: {exc}", began)
            raise
        if broken := self._report_faults("chunk_step"):
            self._note_failure("chunk_step", broken[0], began)
            raise Unfit
        self._note_success("chunk_step", began)
        self._check_arguments_unchanged("chunk_step", zip(("actions", "active"), passed, originals, strict=True))
        valid = check_result(self, self.info, result, originals[1], actions.shape[1], stop)
        flags = {name: getattr(result, name) for name in ("rewards", "terminated", "truncated", "executed", "success")}
        of_takeovers = {name: getattr(result, name) for name in ("source", "executed_actions", "late")}
        flags |= {name: array for name, array in of_takeovers.items() if array is not None}
        self._check_earlier_results("chunk_step", _observation_arrays(result.obs) + list(flags.items()))
        if not valid:
            raise Unfit
        env_views = copy_views(result.obs)
        for env_id, view in enumerate(env_views):
            before = self._views[env_id]
            if before is None:
                continue
            if originals[1][env_id]:
                self._check_instruction(env_id, view, "chunk_step")
                self._note_changes(view, before)
                ended = to_numpy(result.terminated)[env_id] | to_numpy(result.truncated)[env_id]
                if actions.shape[1] == 1 and not ended[0]:
                    self._note_stride(view, before)
            else:
                got = describe_gap(before, view, self.loose)
                self.expect(not got, "chunk_step", "envs that are not active unchanged", got, "skip these envs")
            self._views[env_id] = view
        self.seen.chunks += 1
        self._note_takeovers(result, originals[0])
        copied: dict[str, Any] = {name: np.array(to_numpy(array)) for name, array in flags.items()}
        succeeded = None if result.succeeded is None else np.array(to_numpy(result.succeeded))
        return ChunkResult(obs=result.obs, succeeded=succeeded, **copied), env_views

    # ---------------------------------------------------------------------------------------------- episodes

    def roll_out(
        self,
        scripts: Mapping[int, Script],
        *,
        waiting: Mapping[int, Script] | None = None,
        widths: Sequence[int] = (),
        stop: bool = True,
        keep: Callable[[int], bool] = lambda t: True,
        between: Callable[[int], None] = lambda index: None,
        restart: tuple[int, int, Script] | None = None,
    ) -> dict[int, EnvTrace]:
        """Play episodes side by side, until each has ended or its script is over.

        Args:
            scripts: env -> what it runs.
            waiting: envs that are reset and then left alone.
            widths: actions in the first chunks; those that follow have the usual number.
            stop: `stop_at_end`; an env that ended is left alone from the next chunk on. False: envs run on.
            keep: whether to keep the images after this many actions.
            between: called before each chunk with its number, counted from 0.
            restart: (number of a chunk, env, script): before it the env restarts with this script.
        """
        all_scripts = {**scripts, **(waiting or {})}
        traces = self.begin_episodes(all_scripts)
        active = np.zeros(len(self.env_ids), bool)
        active[list(scripts)] = True
        index = 0
        while active.any():
            if restart and restart[0] == index:
                traces |= self.begin_episodes({restart[1]: restart[2]})
                active[restart[1]] = True
            between(index)
            width = widths[index] if index < len(widths) else self.chunk
            width = min(width, *(len(trace.script) - len(trace) for env_id, trace in traces.items() if active[env_id]))
            self.advance_episodes(traces, active, width, stop, keep)
            for env_id in (int(env_id) for env_id in np.flatnonzero(active)):
                trace = traces[env_id]
                ended = stop and trace.end_step is not None
                active[env_id] = not ended and len(trace) < len(trace.script)
            index += 1
        return {env_id: trace for env_id, trace in traces.items() if env_id in scripts}

    def begin_episodes(self, scripts: Mapping[int, Script]) -> dict[int, EnvTrace]:
        """Reset envs to where their scripts start."""
        env_ids = list(scripts)
        env_views = self.reset_envs(env_ids, [s.state for s in scripts.values()], [s.seed for s in scripts.values()])
        return {
            r: EnvTrace(script=scripts[r], env_id=r, views={0: view})
            for r, view in zip(env_ids, env_views, strict=True)
        }

    def advance_episodes(
        self,
        traces: Mapping[int, EnvTrace],
        active: Array,
        width: int,
        stop: bool = True,
        keep: Callable[[int], bool] = lambda t: True,
    ) -> None:
        """Play the next `width` actions of the scripts of active envs."""
        result, env_views = self.step_envs(self._next_actions(traces, active, width), active, stop)
        for env_id in (int(env_id) for env_id in np.flatnonzero(active)):
            _record_chunk(traces[env_id], result, env_id, env_views[env_id], keep)
            self._note_chunk(traces[env_id], result, env_id, stop)

    def save_records(self) -> tuple[Any, ...]:
        """Return the records of the envs, for `restore_records` once the simulator is restored to this moment."""
        return list(self._views), dict(self._instructions), dict(self._state)

    def forget_envs(self) -> None:
        """Forget the envs: another simulator has replaced this one, and its envs have not been reset."""
        self._views = [None] * len(self.env_ids)
        self._instructions = {}
        self._state = {}

    def restore_records(self, remembered: tuple[Any, ...]) -> None:
        self._views = list(remembered[0])
        self._instructions = dict(remembered[1])
        self._state = dict(remembered[2])

    # ----------------------------------------------------------------------------------------------- inside

    def _next_actions(self, traces: Mapping[int, EnvTrace], active: Array, width: int) -> Array:
        """The next actions; envs that are not active get large ones, which they must not take."""
        actions = np.tile(self.high, (len(self.env_ids), width, 1))
        for env_id in np.flatnonzero(active):
            trace = traces[int(env_id)]
            actions[env_id] = trace.script.actions[len(trace) : len(trace) + width]
        return actions

    def _note_failure(self, call: str, error: str, began: float) -> None:
        """Give up where a call fails alike again and again, or where its failures have taken all of the time."""
        body, (last_body, count, seconds) = error_body(error), self._failed.get(call, ("", 0, 0.0))
        count, seconds = (count + 1 if body == last_body else 1), seconds + perf_counter() - began
        self._failed[call] = body, count, seconds
        if count >= HOPELESS[call in self._worked] or seconds > self.seconds > 0:
            times = "once" if count == 1 else f"{count} times in a row"
            self.hopeless = f"not done: {call} failed {times} in {seconds:.0f} s; see the findings above"

    def _note_success(self, call: str, began: float) -> None:
        self._worked.add(call)
        self._failed.pop(call, None)
        self.seconds_of[call][0] += perf_counter() - began
        self.seconds_of[call][1] += 1

    def _report_faults(self, where: str) -> list[str]:
        texts = [text for of_env in self.env.faults().values() for text in of_env]
        for text in texts:
            self.findings.record_error(f"{where}: expected an env that works", text.strip(), "fix what breaks it")
        return texts

    def _check_arguments_unchanged(self, where: str, arguments: Any) -> None:
        for name, passed, copy in arguments:
            same = np.array_equal(passed, copy)
            self.expect(same, where, f"its {name} unchanged", "others written into them", "copy before you write")

    def _check_earlier_results(self, where: str, arrays: list[tuple[str, Any]]) -> None:
        """Check that arrays returned by the last calls are unchanged, and keep a copy of these."""
        for returned in self._returned:
            for name, raw, copy in returned:
                same = np.array_equal(to_numpy(raw), copy, equal_nan=copy.dtype.kind == "f")
                got = f"{name} that changed in a later {where}"
                expectation = "observations and results that stay as returned"
                self.expect(same, name.partition(":")[0], expectation, got, REMEDY_COPIES)
        self._returned.append([(f"{where}: {name}", raw, np.array(to_numpy(raw))) for name, raw in arrays])

    def _check_instruction(self, env_id: int, view: EnvView, where: str) -> None:
        task = self.tasks.get(self._state[env_id])
        if task is None:
            return
        expected = self._instructions[env_id] if task.instruction_varies else task.instruction
        remedy = "one wording for an episode" if task.instruction_varies else "that of the state's task"
        self.expect(view.instruction == expected, where, f"instruction {expected!r}", view.instruction, remedy)

    def _note_changes(self, view: EnvView, before: EnvView | None = None) -> None:
        """Take note of what changes."""
        sightings = self.seen
        shown = dict(view.images) | ({} if view.state is None else {"state": view.state})
        for name, array in shown.items():
            if name not in sightings.first:
                sightings.first[name], sightings.varied[name], sightings.moved[name] = array, False, False
            if before is None:
                sightings.varied[name] |= not np.array_equal(array, sightings.first[name])
            else:
                old = before.state if name == "state" else before.images[name]
                sightings.moved[name] |= old is not None and not np.array_equal(array, old)
        for pair in itertools.combinations(view.images, 2):
            one, two = (view.images[name] for name in pair)
            if one.shape == two.shape and sightings.alike.get(pair, True):
                sightings.alike[pair] = np.array_equal(one, two)
        for name, image in view.images.items():
            low, high = sightings.levels.get(name, (255, 0))
            sightings.levels[name] = min(low, int(image.min())), max(high, int(image.max()))

    def _note_stride(self, view: EnvView, before: EnvView) -> None:
        if view.state is not None and before.state is not None:
            move, largest = np.abs(view.state - before.state), self.seen.stride
            self.seen.stride = move if largest is None else np.maximum(largest, move)

    def _note_takeovers(self, result: ChunkResult, actions: Array) -> None:
        """Take note of who acted. `actions`: those of the policy, [N, C, A]."""
        executed = to_numpy(result.executed)
        if result.source is None or result.executed_actions is None:
            self.seen.policy_acted |= bool(executed.any())
            return
        others = executed & (to_numpy(result.source) != ActionSource.POLICY)
        self.seen.policy_acted |= bool((executed & ~others).any())
        self.seen.taken_over += int(others.sum())
        gap = (np.abs(to_numpy(result.executed_actions) - actions) / (self.high - self.low)).max(-1)
        differs, own = gap > 1e-4, executed & ~others
        self.seen.overruled |= bool((others & differs).any())
        self.seen.copied += int((own & ~differs).sum())
        self.seen.unlabelled += int((own & differs).sum())

    def _note_chunk(self, trace: EnvTrace, result: ChunkResult, env_id: int, stop: bool) -> None:
        """Take note of rewards, successes and ends of the chunk that was just recorded."""
        sightings, count = self.seen, int(result.executed[env_id].sum())
        success = trace.success[len(trace)]
        rewarded = result.rewards[env_id] != 0
        sightings.rewarded |= bool(rewarded.any())
        sightings.rewarded_between |= bool((rewarded & ~result.terminated[env_id] & ~result.truncated[env_id]).any())
        if stop:
            sightings.longest = max(sightings.longest, len(trace))
        sightings.won |= success
        sightings.lost |= not success
        end = trace.end_step
        if end is not None and stop and len(trace) - count < end:
            earlier = max((abs(r) for r in trace.rewards[: end - 1]), default=0.0)
            reward, terminated = trace.rewards[end - 1], trace.terminated[end - 1]
            limit = self.step_limit(trace.script.state)
            succeeded = trace.succeeded[:end]
            first_only = succeeded[-1] is True and not any(succeeded[:-1])
            truncated = trace.truncated[end - 1]
            sightings.ends.append(End(terminated, reward, success, earlier, end, limit, truncated, first_only))


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


def _observation_arrays(obs: Observation) -> list[tuple[str, Any]]:
    images = [(f"image {name!r}", image) for name, image in obs.images.items()]
    return images + ([] if obs.state is None else [("state", obs.state)])


def _record_chunk(
    trace: EnvTrace, result: ChunkResult, env_id: int, view: EnvView, keep: Callable[[int], bool]
) -> None:
    count = int(result.executed[env_id].sum())
    trace.rewards += result.rewards[env_id, :count].tolist()
    trace.terminated += result.terminated[env_id, :count].tolist()
    trace.truncated += result.truncated[env_id, :count].tolist()
    succeeded = result.succeeded
    trace.succeeded += [None] * count if succeeded is None else succeeded[env_id, :count].tolist()
    source = [None] * count if result.source is None else to_numpy(result.source)[env_id, :count].tolist()
    trace.source += source
    trace.executed_actions += [
        None if by in (None, ActionSource.POLICY) else np.array(to_numpy(result.executed_actions)[env_id, i])
        for i, by in enumerate(source)
    ]
    trace.success[len(trace)] = bool(result.success[env_id])
    trace.views[len(trace)] = view if keep(len(trace)) else EnvView({}, view.state, view.instruction)
