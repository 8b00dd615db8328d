"""`check_env`: does a simulator keep to the contract of `SimEnv`?"""

from __future__ import annotations

from typing import Any

import numpy as np
from attrs import frozen

from vla_rl.core.hookspecs import SimEnv
from vla_rl.core.randomness import generator
from vla_rl.core.testing.findings import Findings, NotOffered, built
from vla_rl.core.types import ChunkResult, Context, Observation, Plugin, ResetState, to_numpy

FLAGS = ("terminated", "truncated", "executed")
PIXELS, NUMBERS = 0.5, 1e-4
"""Tolerated mean difference of images (renderers are not always exact) and absolute difference of numbers."""


@frozen(eq=False)
class _Case:
    env: SimEnv
    f: Findings
    chunk: int
    train: tuple[ResetState, ...]

    @property
    def rows(self) -> np.ndarray[Any, Any]:
        return np.arange(self.env.num_envs)

    def states(self, first: int = 0) -> np.ndarray[Any, Any]:
        return np.array([self.train[(first + i) % len(self.train)].id for i in self.rows])

    def actions(self, seed: int) -> np.ndarray[Any, Any]:
        low, high = np.array(self.env.info.action_low), np.array(self.env.info.action_high)
        draws = generator(seed, "check_env actions").random((self.env.num_envs, self.chunk, len(low)))
        actions: np.ndarray[Any, Any] = (low + draws * (high - low)).astype(np.float32)
        return actions

    def reset(self, rows: Any, states: Any) -> Observation:
        rows, states = np.asarray(rows), np.asarray(states)
        obs = self.env.reset(rows, states, states + 1000)
        self.unbroken("reset")
        _check_observation(self, obs, len(rows), "reset")
        tasks = {state.id: self.env.info.task(state.task) for state in self.train}
        known = {state: task.instruction for state, task in tasks.items() if not task.instruction_varies}
        told, want = tuple(obs.instructions), tuple(known[int(i)] for i in states if int(i) in known)
        self.f.expect(
            len(want) < len(states) or told == want, "reset", f"instructions {want}", told, "that of the state's task"
        )
        return obs

    def step(self, actions: Any, active: Any, stop_at_end: bool) -> ChunkResult:
        given = actions.copy()
        result = self.env.chunk_step(actions, np.asarray(active), stop_at_end)
        self.unbroken("chunk_step")
        same = np.array_equal(given, actions)
        self.f.expect(same, "chunk_step", "its actions unchanged", "others written into them", "copy before you write")
        _check_result(self, result, np.asarray(active), stop_at_end)
        return result

    def unbroken(self, where: str) -> None:
        for texts in self.env.faults().values():
            for text in texts:
                self.f.expect(False, where, "a row that works", text, "mend what breaks it")


def check_env(
    env: SimEnv | Plugin,
    config: Any = None,
    *,
    num_envs: int = 3,
    chunk: int = 4,
    device: str = "cpu",
    expert: bool = True,
    expert_success: float = 0.5,
) -> None:
    """Reset, step and close a simulator, and compare with what `SimEnv` promises. Raises CheckFailed with all findings.

    `vla-rl check-env TYPE key=value` prints the same as a table.

    Args:
        env: a component, which is closed at the end, or a `Plugin` that is built with `config`, `num_envs` rows,
            `chunk` and `device`. A component is told its own chunk when it was built: pass the same.
        expert: where `expert_chunk` is offered, play one episode in every row with it; at least `expert_success` of
            them must succeed. Costs a whole episode of simulation.
    Few steps are taken otherwise (about 12 chunks), so that slow simulators can be checked too.
    """
    context = Context(num_envs=num_envs, chunk=chunk, device=device)
    examine_env(env, config, context, expert=expert, expert_success=expert_success).close()


def examine_env(
    env: SimEnv | Plugin, config: Any, context: Context, *, expert: bool = True, expert_success: float = 0.5
) -> Findings:
    """`check_env` that returns what it found, section by section."""
    sim: SimEnv
    sim, name = built("env", env, config, context)
    f, chunk = Findings(f"check_env of {name}"), context.chunk
    try:
        with f.section("info"):
            _check_info(f, sim)
        train: tuple[ResetState, ...] = ()
        with f.section("reset_states"):
            train = _check_states(f, sim)
        if train:
            case = _Case(sim, f, chunk, train)
            for check in (_determinism, _rows_apart, _order_of_rows, _inactive_rows, _run_on, _offload):
                with f.section(check.__name__.strip("_").replace("_", " ")):
                    check(case)
            if expert:
                with f.section("expert"):
                    _expert(case, expert_success)
    finally:
        with f.section("close, twice"):
            sim.close()
            sim.close()
    return f


def _check_info(f: Findings, env: SimEnv) -> None:
    info, where = env.info, "info"
    f.expect(env.num_envs >= 1, "num_envs", "at least 1", env.num_envs, "take it from Context.num_envs")
    f.expect(bool(info.cameras), where, "a camera", "none", "policies see images: add one")
    for name, size in info.cameras.items():
        sane = len(size) == 2 and min(size) >= 1
        f.expect(sane, where, f"(height, width) in pixels of camera {name!r}", size, "correct cameras")
    f.expect(info.state_dim >= 0, where, "state_dim >= 0", info.state_dim, "0 means that there is no state")
    same = len(info.action_low) == len(info.action_high) > 0
    if f.expect(same, where, "as many lower as upper bounds", (info.action_low, info.action_high), "A numbers each"):
        low, high = np.array(info.action_low), np.array(info.action_high)
        sane = bool((np.isfinite(low) & np.isfinite(high) & (low < high)).all())
        f.expect(sane, where, "finite action_low < action_high", (info.action_low, info.action_high), "correct them")
    names = [task.name for task in info.tasks]
    f.expect(bool(names), where, "a task", "none", "list TaskInfo(name, instruction, max_steps)")
    f.expect(len(set(names)) == len(names), where, "task names that differ", names, "rename one")
    for task in info.tasks:
        f.expect(bool(task.instruction.strip()), where, f"an instruction of {task.name!r}", "nothing", "write one")
        f.expect(task.max_steps >= 1, where, f"max_steps >= 1 of {task.name!r}", task.max_steps, "in single actions")


def _check_states(f: Findings, env: SimEnv) -> tuple[ResetState, ...]:
    splits = {split: env.reset_states(split) for split in ("train", "eval")}
    names = [task.name for task in env.info.tasks]
    for split, states in splits.items():
        where = f"reset_states({split!r})"
        f.expect(bool(states), where, "at least one state", "none", "both splits are needed")
        ids = [state.id for state in states]
        f.expect(
            len(set(ids)) == len(ids), where, "ids that differ", f"{len(ids) - len(set(ids))} twice", "number them"
        )
        unknown = sorted({state.task for state in states} - set(names))
        f.expect(not unknown, where, f"tasks among {names}", unknown, "a state names a task of info.tasks")
        again = [state.id for state in env.reset_states(split)]
        f.expect(again == ids, where, "the same order in every call", "another one", "build the list once")
    shared = sorted({s.id for s in splits["train"]} & {s.id for s in splits["eval"]})
    remedy = "training must never see an evaluation state"
    f.expect(not shared, "reset_states", "splits without a common id", f"{shared[:5]} in both", remedy)
    return splits["train"]


def _check_array(f: Findings, array: Any, shape: tuple[int, ...], dtype: str, what: str) -> bool:
    found = f"{np.asarray(to_numpy(array)).dtype} {list(np.shape(to_numpy(array)))}"
    return f.expect(found == f"{dtype} {list(shape)}", what, f"{dtype} {list(shape)}", found, "convert or reshape it")


def _check_observation(case: _Case, obs: Observation, n: int, where: str) -> None:
    f, info = case.f, case.env.info
    cameras = list(info.cameras)
    f.expect(list(obs.images) == cameras, f"{where}: images", cameras, list(obs.images), "as in info.cameras")
    for name in set(cameras) & set(obs.images):
        _check_array(f, obs.images[name], (n, *info.cameras[name], 3), "uint8", f"{where}: image {name!r}")
    count = len(obs.instructions)
    f.expect(count == n, f"{where}: instructions", f"{n}", count, "one for each row, as a tuple")
    if info.state_dim == 0 or obs.state is None:
        want = "None" if info.state_dim == 0 else f"float32 [{n}, {info.state_dim}]"
        consistent = (info.state_dim == 0) == (obs.state is None)
        f.expect(consistent, f"{where}: state", want, "None" if obs.state is None else "a state", "mind info.state_dim")
        return
    if _check_array(f, obs.state, (n, info.state_dim), "float32", f"{where}: state"):
        bad = int((~np.isfinite(to_numpy(obs.state))).any(-1).sum())
        f.expect(bad == 0, f"{where}: state", "finite numbers", f"NaN or inf in {bad} of {n} rows", "find the cause")


def _check_result(case: _Case, result: ChunkResult, active: np.ndarray[Any, Any], stop: bool) -> None:
    f, n, where = case.f, case.env.num_envs, f"chunk_step(stop_at_end={stop})"
    _check_observation(case, result.obs, n, where)
    shape = (n, case.chunk)
    fine = _check_array(f, result.rewards, shape, "float32", f"{where}: rewards")
    for name in FLAGS:
        fine &= _check_array(f, getattr(result, name), shape, "bool", f"{where}: {name}")
    fine &= _check_array(f, result.success, (n,), "bool", f"{where}: success")
    if result.succeeded is not None:
        fine &= _check_array(f, result.succeeded, shape, "bool", f"{where}: succeeded")
    if not fine:
        return
    rewards, executed = to_numpy(result.rewards), to_numpy(result.executed)
    ended = to_numpy(result.terminated) | to_numpy(result.truncated)
    f.expect(bool(np.isfinite(rewards).all()), f"{where}: rewards", "finite numbers", "NaN or inf", "find the cause")
    gone = bool((rewards[~executed] == 0).all())
    f.expect(gone, f"{where}: rewards", "0 where nothing was executed", "others", "multiply by executed")
    f.expect(not ended[~executed].any(), f"{where}: ends", "only at executed actions", "others", "mask with executed")
    idle = not executed[~active].any()
    f.expect(idle, f"{where}: executed", "False in rows that are not active", "True", "leave those rows alone")
    f.expect(bool(executed[active, 0].all()), f"{where}: executed", "True for the first action of active rows", "False",
             "every chunk of an active row does something")  # fmt: skip
    holes = bool((executed[:, 1:] & ~executed[:, :-1]).any())
    f.expect(
        not holes, f"{where}: executed", "a run of True from the first action", "a gap", "stop for good in a chunk"
    )
    before = np.cumsum(ended, 1) - ended > 0
    if stop:
        late = bool((executed & before).any())
        f.expect(not late, f"{where}: executed", "nothing after the end", "more actions", "stop the row at its end")
        early = bool((~executed & ~before)[active].any())
        f.expect(not early, f"{where}: executed", "all up to the end", "fewer actions", "only an end stops a row")
    else:
        all_of_it = bool(executed[active].all())
        f.expect(all_of_it, f"{where}: executed", "all actions of active rows", "fewer", "run on after an end")


def _difference(a: Observation, rows_a: Any, b: Observation, rows_b: Any) -> str:
    """What differs between rows of two observations, in words; empty when nothing does."""
    for name in a.images:
        one, two = to_numpy(a.images[name])[rows_a], to_numpy(b.images[name])[rows_b]
        gap = np.abs(one.astype(np.float32) - two).mean((1, 2, 3)).max() if one.shape == two.shape else np.inf
        if gap > PIXELS:
            return f"image {name!r} that differs by {gap:.1f} of 255"
    if a.state is not None and b.state is not None:
        with np.errstate(invalid="ignore"):
            gap = float(np.abs(to_numpy(a.state)[rows_a] - to_numpy(b.state)[rows_b]).max())
        if not gap <= NUMBERS:
            return f"state that differs by {gap:.2g}"
    told = [[o.instructions[int(i)] for i in rows] for o, rows in ((a, rows_a), (b, rows_b))]
    return f"instructions {told[0]} and {told[1]}" if told[0] != told[1] else ""


def _same(case: _Case, where: str, what: str, pair: tuple[Any, Any, Any, Any], remedy: str) -> None:
    differs = _difference(*pair)
    case.f.expect(not differs, where, what, differs, remedy)


def _determinism(case: _Case) -> None:
    """The same state, seed and actions give the same observations and results, however often."""
    rows, everyone, actions = case.rows, np.ones(case.env.num_envs, bool), case.actions(0)
    first = case.reset(rows, case.states())
    kept = Observation.concat([first]).take(rows.copy())
    one = case.step(actions, everyone, True)
    _same(case, "reset", "observations that stay as returned", (kept, rows, first, rows),
          "return copies, not the buffers that the next step writes")  # fmt: skip
    kept_result, kept_obs = to_numpy(one.rewards).copy(), one.obs.take(rows.copy())
    second = case.reset(rows, case.states())
    remedy = "derive everything random from state id and seed"
    _same(case, "reset", "equal observations for equal state ids", (kept, rows, second, rows), remedy)
    two = case.step(actions, everyone, True)
    _same(case, "chunk_step", "equal observations after equal actions", (kept_obs, rows, two.obs, rows), remedy)
    equal = np.allclose(kept_result, to_numpy(two.rewards), atol=NUMBERS)
    case.f.expect(equal, "chunk_step", "equal rewards after equal actions", "different ones", remedy)
    if len(case.train) > 1:
        other = case.reset([0], [case.train[1].id])
        differs = bool(_difference(kept, [0], other, [0])) or not all(
            np.array_equal(to_numpy(kept.images[n])[0], to_numpy(other.images[n])[0]) for n in kept.images
        )
        case.f.expect(differs, "reset", "another observation for another state id", "the same", "use state_ids")


def _rows_apart(case: _Case) -> None:
    """What a row does depends neither on its number nor on the other rows."""
    if case.env.num_envs < 2:
        return
    last, actions = case.env.num_envs - 1, case.actions(1)
    active = np.zeros(case.env.num_envs, bool)
    active[0] = True
    case.reset(case.rows, case.states())
    together = case.step(actions, np.ones_like(active), True).obs.take(case.rows)
    before = case.reset(case.rows, case.states())
    alone = case.step(actions, active, True)
    remedy = "let rows share nothing, random generators included"
    _same(case, "chunk_step", "row 0 alone as with others", (together, [0], alone.obs, [0]), remedy)
    rest = case.rows[1:]
    _same(case, "chunk_step", "rows that are not active unchanged", (before, rest, alone.obs, rest), "skip these rows")
    twin = case.reset([last], case.states()[:1])
    _same(case, "reset", f"state {case.train[0].id} in row {last} as in row 0", (before, [0], twin, [0]), remedy)


def _order_of_rows(case: _Case) -> None:
    """Partial resets answer in the order of `rows` and leave the others alone."""
    rows, last = case.rows, case.env.num_envs - 1
    if last < 1:
        return
    first = case.reset(rows, case.states())
    ids = case.states()
    swapped = case.reset([last, 0], [ids[0], ids[last]])
    _same(case, "reset", "observations in the order of `rows`", (first, [0, last], swapped, [0, 1]), "keep the order")
    acted = case.step(case.actions(2), np.ones(len(rows), bool), True).obs.take(rows)
    case.reset([0], ids[:1])
    still = case.step(case.actions(3), np.zeros(len(rows), bool), True).obs
    rest = rows[1:]
    _same(
        case, "reset", "the other rows untouched", (acted, rest, still, rest), "reset only the rows that are asked for"
    )


def _inactive_rows(case: _Case) -> None:
    before = case.reset(case.rows, case.states())
    result = case.step(case.actions(4), np.zeros(case.env.num_envs, bool), False)
    _same(case, "chunk_step", "no change without active rows", (before, case.rows, result.obs, case.rows), "skip them")


def _run_on(case: _Case) -> None:
    """Chunks one after the other, running on after ends and stopping at them."""
    everyone = np.ones(case.env.num_envs, bool)
    for stop in (True, False):
        case.reset(case.rows, case.states(first=1))
        for i in range(3):
            case.step(case.actions(5 + i), everyone, stop)


def _offload(case: _Case) -> None:
    """Where snapshots are offered, a restored simulator goes on as the first time."""
    everyone, rows = np.ones(case.env.num_envs, bool), case.rows
    case.reset(rows, case.states())
    case.step(case.actions(8), everyone, True)
    try:
        saved = case.env.snapshot()
    except TypeError as exc:
        raise NotOffered(str(exc)) from exc
    first = case.step(case.actions(9), everyone, True).obs.take(rows)
    case.env.restore(saved)
    again = case.step(case.actions(9), everyone, True).obs
    _same(case, "restore", "the same step after a restore", (first, rows, again, rows), "save all that a step changes")


def _expert(case: _Case, wanted: float) -> None:
    """Where a demonstrator is offered, it solves most of the train states; and a chunk that runs on after an end is up
    to it the same as one that stops there."""
    env, f = case.env, case.f
    spread = np.linspace(0, len(case.train) - 1, env.num_envs).round().astype(int)
    states = np.array([case.train[i].id for i in spread])
    case.reset(case.rows, states)
    try:
        chunk = env.expert_chunk()
    except TypeError as exc:
        raise NotOffered(str(exc)) from exc
    low, high = np.array(env.info.action_low), np.array(env.info.action_high)
    limits = np.array([env.info.task(case.train[i].task).max_steps for i in spread])
    active, won, steps = np.ones(env.num_envs, bool), np.zeros(env.num_envs, bool), np.zeros(env.num_envs, int)
    played: list[np.ndarray[Any, Any]] = []
    ended = np.zeros((env.num_envs, case.chunk), bool)
    first_end: ChunkResult | None = None
    while active.any():
        if not _check_array(f, chunk, (env.num_envs, case.chunk, len(low)), "float32", "expert_chunk"):
            return
        actions = to_numpy(chunk)
        inside = bool(((actions >= low - NUMBERS) & (actions <= high + NUMBERS))[active].all())
        f.expect(inside, "expert_chunk", "actions within info.action_low..action_high", "others", "clip them")
        result = case.step(actions.copy(), active, True)
        ended = to_numpy(result.terminated) | to_numpy(result.truncated)
        if first_end is None:
            played.append(actions.copy())
            first_end = result if ended.any() else None
        won |= active & to_numpy(result.success)
        steps += to_numpy(result.executed).sum(1)
        active = active & ~ended.any(1) & ~won & (steps < limits)
        chunk = env.expert_chunk()
    share = float(won.mean())
    got = f"{share:.0%} of {env.num_envs} (not solved: {states[~won].tolist()})"
    f.expect(share >= wanted, "expert_chunk", f"success in {wanted:.0%} of train states", got, "mend the expert")
    if first_end is not None:
        _run_on_after_end(case, states, played, first_end)


def _run_on_after_end(case: _Case, states: Any, played: list[np.ndarray[Any, Any]], stopped: ChunkResult) -> None:
    everyone = np.ones(case.env.num_envs, bool)
    case.reset(case.rows, states)
    for actions in played[:-1]:
        case.step(actions, everyone, True)
    ran_on = case.step(played[-1], everyone, False)
    executed = to_numpy(stopped.executed)
    for name in ("rewards", "terminated", "truncated"):
        one, two = (np.where(executed, to_numpy(getattr(result, name)), 0) for result in (stopped, ran_on))
        where = f"chunk_step(stop_at_end=False): {name}"
        remedy = "stop_at_end changes nothing before the end"
        case.f.expect(np.allclose(one, two, atol=NUMBERS), where, "up to an end as when it stops there", two, remedy)
