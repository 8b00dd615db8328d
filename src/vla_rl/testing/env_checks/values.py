"""Single answers of a simulator against the contract: shapes, types, ranges, masks."""

from __future__ import annotations

import numpy as np

from vla_rl.core.errors import UserError
from vla_rl.core.fields import shape_of
from vla_rl.core.hookspecs import SimEnv
from vla_rl.core.types import (
    BOUND_TOLERANCE,
    ActionSource,
    Array,
    ChunkResult,
    EnvInfo,
    Observation,
    ResetState,
    to_numpy,
)
from vla_rl.testing.common.findings import Expects, check_array

FLAGS = ("terminated", "truncated", "executed")


def check_info(f: Expects, env: SimEnv) -> None:
    info, where = env.info, "info"
    f.expect(env.num_envs >= 1, "num_envs", "at least 1", env.num_envs, "take it from EnvContext.num_envs")
    f.expect(bool(info.cameras), where, "a camera", "none", "policies see images: add one")
    for name, size in info.cameras.items():
        sane = len(size) == 2 and min(size) >= 1
        f.expect(sane, where, f"(height, width) in pixels of camera {name!r}", size, "correct cameras")
    f.expect(info.state_dim >= 0, where, "state_dim >= 0", info.state_dim, "0 means no state")
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


def check_states(f: Expects, env: SimEnv) -> dict[str, tuple[ResetState, ...]]:
    splits = {"train": env.reset_states("train")}
    try:
        splits["eval"] = env.reset_states("eval")
    except UserError as exc:
        f.notice(f"not done: the eval split; {exc}")
    names = [task.name for task in env.info.tasks]
    for split, states in splits.items():
        where = f"reset_states({split!r})"
        f.expect(bool(states), where, "at least one state", "none", "both splits are needed")
        ids = [state.id for state in states]
        f.expect(
            len(set(ids)) == len(ids), where, "ids that differ", f"{len(ids) - len(set(ids))} twice", "number them"
        )
        fits = all(0 <= i < 2**63 for i in ids)
        f.expect(fits, where, "ids from 0 to 2**63 - 1", f"{min(ids, default=0)} to {max(ids, default=0)}", "int64")
        unknown = sorted({state.task for state in states} - set(names))
        f.expect(not unknown, where, f"tasks among {names}", unknown, "a state names a task of info.tasks")
        again = [(state.id, state.task) for state in env.reset_states(split)]
        same = again == [(state.id, state.task) for state in states]
        f.expect(same, where, "the same order in every call", "another one", "build the list once")
    shared = sorted({s.id for s in splits["train"]} & {s.id for s in splits.get("eval", ())})
    remedy = "training must never see an evaluation state"
    f.expect(not shared, "reset_states", "splits without a common id", f"{shared[:5]} in both", remedy)
    return splits


def check_observation(f: Expects, info: EnvInfo, obs: Observation, n: int, where: str) -> bool:
    """Check an observation. Return whether its shapes are right."""
    cameras = list(info.cameras)
    valid = f.expect(list(obs.images) == cameras, f"{where}: images", cameras, list(obs.images), "as in info.cameras")
    for name in set(cameras) & set(obs.images):
        valid &= check_array(f, obs.images[name], (n, *info.cameras[name], 3), "uint8", f"{where}: image {name!r}")
    count = len(obs.instructions)
    valid &= f.expect(count == n, f"{where}: instructions", f"{n}", count, "one for each env, as a tuple")
    if info.state_dim == 0 or obs.state is None:
        expected = "None" if info.state_dim == 0 else f"float32 [{n}, {info.state_dim}]"
        consistent = (info.state_dim == 0) == (obs.state is None)
        got = "None" if obs.state is None else "a state"
        return f.expect(consistent, f"{where}: state", expected, got, "mind info.state_dim") and valid
    if not check_array(f, obs.state, (n, info.state_dim), "float32", f"{where}: state"):
        return False
    not_finite = int((~np.isfinite(to_numpy(obs.state))).any(-1).sum())
    got = f"NaN or inf in {not_finite} of {n} envs"
    return f.expect(not_finite == 0, f"{where}: state", "finite numbers", got, "find the cause") and valid


def check_result(f: Expects, info: EnvInfo, result: ChunkResult, active: Array, width: int, stop: bool) -> bool:
    """Check a result. Return whether its shapes and masks are right."""
    n, where = len(active), f"chunk_step(stop_at_end={stop})"
    valid = check_observation(f, info, result.obs, n, where)
    shape = (n, width)
    valid &= check_array(f, result.rewards, shape, "float32", f"{where}: rewards")
    for name in FLAGS:
        valid &= check_array(f, getattr(result, name), shape, "bool", f"{where}: {name}")
    valid &= check_array(f, result.success, (n,), "bool", f"{where}: success")
    if result.succeeded is not None:
        valid &= check_array(f, result.succeeded, shape, "bool", f"{where}: succeeded")
    valid &= _check_extras(f, info, result, shape, where)
    valid &= _check_takeovers(f, info, result, shape, where)
    if info.control_hz is not None:
        valid &= check_array(f, result.late, shape, "bool", f"{where}: late")
        idle = valid and not (to_numpy(result.late) & ~to_numpy(result.executed)).any()
        remedy = "multiply by executed"
        f.expect(idle or not valid, f"{where}: late", "False where nothing was executed", "True", remedy)
    else:
        remedy = "set EnvInfo.control_hz, the rate at which actions are due"
        f.expect(result.late is None, f"{where}: late", "None, as EnvInfo.control_hz", "an array", remedy)
    return valid and _check_masks(f, result, active, stop, where)


def _check_extras(f: Expects, info: EnvInfo, result: ChunkResult, shape: tuple[int, int], where: str) -> bool:
    unknown = sorted(result.extras.keys() - info.extras.keys())
    remedy = "declare its dimensions in EnvInfo.extras"
    valid = f.expect(not unknown, f"{where}: extras", f"names of {sorted(info.extras)}", unknown, remedy)
    sizes = {"C": shape[1], "A": info.action_dim}
    for name, dims in info.extras.items():
        what = f"{where}: extras[{name!r}]"
        array = result.extras.get(name)
        remedy = "report it in ChunkResult.extras after every chunk, or leave it out of EnvInfo.extras"
        if not f.expect(array is not None, what, "an array, as EnvInfo.extras declares", "none", remedy):
            valid = False
        elif check_array(f, array, (shape[0], *shape_of(dims.split(), sizes)), "float32", what):
            finite = bool(np.isfinite(to_numpy(array)).all())
            valid &= f.expect(finite, what, "finite numbers", "NaN or inf", "find the cause")
        else:
            valid = False
    return valid


def _check_takeovers(f: Expects, info: EnvInfo, result: ChunkResult, shape: tuple[int, int], where: str) -> bool:
    given = result.source is not None and result.executed_actions is not None
    if not info.takeovers:
        nothing = result.source is None and result.executed_actions is None
        remedy = "set EnvInfo.takeovers where an operator may act instead of the policy"
        return f.expect(nothing, f"{where}: source", "None, as executed_actions", "an array", remedy)
    remedy = "say who chose each action, or leave EnvInfo.takeovers out"
    if not f.expect(given, f"{where}: source", "arrays, as executed_actions", "None", remedy):
        return False
    valid = check_array(f, result.source, shape, "int8", f"{where}: source")
    actions_shape = (*shape, info.action_dim)
    valid &= check_array(f, result.executed_actions, actions_shape, "float32", f"{where}: executed_actions")
    if not valid:
        return False
    source = to_numpy(result.source)
    known = bool(np.isin(source, list(ActionSource)).all())
    valid &= f.expect(known, f"{where}: source", "values of ActionSource", np.unique(source).tolist(), "use the enum")
    others = (source != ActionSource.POLICY) & to_numpy(result.executed)
    executed = to_numpy(result.executed_actions)[others]
    finite = bool(np.isfinite(executed).all())
    valid &= f.expect(finite, f"{where}: executed_actions", "finite numbers", "NaN or inf", "find the cause")
    beyond = np.maximum(np.array(info.action_low) - executed, executed - np.array(info.action_high)).max(initial=0.0)
    return valid and f.expect(
        bool(beyond <= BOUND_TOLERANCE),
        f"{where}: executed_actions",
        "actions within the bounds of EnvInfo, as the policy's are",
        f"one that is {beyond:g} beyond",
        "report the action that was executed, in the units of the policy's actions, or widen the bounds",
    )


def _check_masks(f: Expects, result: ChunkResult, active: Array, stop: bool, where: str) -> bool:
    rewards, executed = to_numpy(result.rewards), to_numpy(result.executed)
    ended = to_numpy(result.terminated) | to_numpy(result.truncated)
    valid = f.expect(
        bool(np.isfinite(rewards).all()), f"{where}: rewards", "finite numbers", "NaN or inf", "find the cause"
    )
    masked = bool((rewards[~executed] == 0).all())
    f.expect(masked, f"{where}: rewards", "0 where nothing was executed", "others", "multiply by executed")
    f.expect(not ended[~executed].any(), f"{where}: ends", "only at executed actions", "others", "mask with executed")
    idle = not executed[~active].any()
    valid &= f.expect(idle, f"{where}: executed", "False in envs that are not active", "True", "leave those envs alone")
    valid &= f.expect(
        bool(executed[active, 0].all()),
        f"{where}: executed",
        "True for the first action of active envs",
        "False",
        "every chunk of an active env does something",
    )
    holes = bool((executed[:, 1:] & ~executed[:, :-1]).any())
    valid &= f.expect(
        not holes, f"{where}: executed", "a run of True from the first action", "a gap", "stop for good in a chunk"
    )
    before = np.cumsum(ended, 1) - ended > 0
    if stop:
        late = bool((executed & before).any())
        valid &= f.expect(
            not late, f"{where}: executed", "nothing after the end", "more actions", "stop the env at its end"
        )
        early = bool((~executed & ~before)[active].any())
        valid &= f.expect(
            not early, f"{where}: executed", "all up to the end", "fewer actions", "only an end stops an env"
        )
    else:
        all_of_it = bool(executed[active].all())
        valid &= f.expect(all_of_it, f"{where}: executed", "all actions of active envs", "fewer", "run on after an end")
    if result.succeeded is not None and valid:
        last = np.maximum(executed.sum(1) - 1, 0)
        after = to_numpy(result.succeeded)[np.arange(len(active)), last]
        agree = bool((after == to_numpy(result.success))[active].all())
        remedy = "both tell the same predicate after the last executed action: see at_last_action in vla_rl.core.types"
        f.expect(agree, f"{where}: success", "as succeeded at the last executed action", "the opposite", remedy)
    return valid
