"""Record what LIBERO's official controller and success predicates say, for the tests of `libero_warp`.

    MUJOCO_GL=egl python tools/record_libero_control.py torques FILE.npz --states 2000
    MUJOCO_GL=egl python tools/record_libero_control.py predicates FILE.npz

`torques` plays random actions in tasks of the five suites, and keeps inputs and outputs of robosuite's controller at
random sub-steps. `predicates` puts objects where predicates hold and where they do not.
Runs where the extra `libero-warp` is installed.
"""

# ruff: noqa: SLF001 - LIBERO and robosuite offer no public way

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
import warp as wp
from attrs import asdict

from vla_rl.core.errors import UserError
from vla_rl.core.randomness import generator
from vla_rl.core.types import Array
from vla_rl.plugins.envs.libero.compiled import CompiledModels
from vla_rl.plugins.envs.libero.expert import Expert, ExpertRecipe, find_recipe
from vla_rl.plugins.envs.libero.scene import CACHE_BYTES, LiberoScene
from vla_rl.plugins.envs.libero.suites import Suite
from vla_rl.plugins.envs.libero.warp.goals import Predicate, read_goal
from vla_rl.plugins.envs.libero.warp.success import GoalKernels

SUITES = ("libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90")
TASKS = 2
"""Tasks of each suite whose controller is recorded."""
KEPT = {
    "libero_spatial": (0,),
    "libero_object": (0,),
    "libero_goal": (0, 5, 7),
    "libero_10": (2, 3, 9),
    "libero_90": (18,),
}
"""Tasks of which states are kept for the tests."""
PACKED = 24
"""Most states of a task that are kept."""
PLAYED = 20
"""Actions of an episode."""
MOST_GEOMS = 2000


def record_torques(count: int) -> dict[str, Array]:
    """Return name -> [states, ...] of what the controller reads and returns, over all suites alike."""
    records: list[dict[str, Array]] = []
    compiled = CompiledModels(CACHE_BYTES)
    for name in SUITES:
        suite = Suite(name)
        for task in suite.tasks[:: len(suite.tasks) // TASKS]:
            scene = LiberoScene(task, {}, compiled=compiled)
            records += islice(_play_actions(scene, suite), count // len(SUITES) // TASKS)
            scene.close()
    return {name: np.stack([record[name] for record in records]) for name in records[0]}


def _play_actions(scene: LiberoScene, suite: Suite) -> Iterator[dict[str, Array]]:
    """Yield records of random actions without end. Every third action turns nothing, every third exceeds the bounds."""
    rng = generator(0, f"record/{suite.name}/{scene.task.index}")
    official = suite.initial_states(scene.task.index)
    while True:
        # One settling step: until then robosuite's controller keeps to what it read before the placement.
        scene.place(0, official[rng.integers(len(official))], 1)
        controller = scene._robot.controller
        for step in range(PLAYED):
            action = rng.uniform(-1.5, 1.5, 7) if step % 3 == 2 else rng.uniform(-1.0, 1.0, 7)
            if step % 3 == 1:
                action[3:6] = 0.0
            before = np.array(controller.goal_ori)
            seen: list[dict[str, Array]] = []
            control = scene._loop._robot_control
            control.write_controls = partial(_write_recorded, control, controller, seen)
            scene.step(action)
            del control.write_controls
            start = {"action": action, "goal_before": before}
            start |= {f"first_{name}": seen[0][name] for name in ("hand", "rotation")}
            yield seen[int(rng.integers(len(seen)))] | start


def _write_recorded(control: Any, controller: Any, seen: list[dict[str, Array]]) -> None:
    """Note what robosuite's own controller reads and returns in a sub-step, before our loop writes the controls."""
    controller.update(force=True)
    before = {
        "jacobian": controller.J_full,
        "masses": controller.mass_matrix,
        "bias": controller.torque_compensation,
        "positions": controller.joint_pos,
        "velocities": controller.joint_vel,
        "hand": controller.ee_pos,
        "rotation": controller.ee_ori_mat,
        "goal_hand": controller.goal_pos,
        "goal_rotation": controller.goal_ori,
        "posture": controller.initial_joint,
    }
    copies = {name: np.array(value) for name, value in before.items()}
    seen.append(copies | {"torques": np.array(controller.run_controller())})
    type(control).write_controls(control)


def record_predicates(per_task: int, every: int) -> dict[str, Array]:
    """Compare the predicates with LIBERO's own in states that are drawn near their thresholds, print how many differ,
    and return a few states of each suite for the tests, by name."""
    compiled, kept, total = CompiledModels(CACHE_BYTES), dict[str, Array](), Counter[str]()
    for name in SUITES:
        suite = Suite(name)
        for task in suite.tasks if len(suite.tasks) == 10 else suite.tasks[::every]:
            scene = LiberoScene(task, {}, compiled=compiled)
            env = scene._env
            goal = read_goal(env, task.name)
            rng = generator(0, f"predicates/{name}/{task.index}")
            official = suite.initial_states(task.index)
            states, expected = [], []
            for number in range(per_task):
                scene.place(0, official[number % len(official)], 0)
                for predicate in sorted(goal, key=_is_placement):
                    _bring_near(env, predicate, rng)
                states.append(_read_view(scene))
                judged = [env._eval_predicate(words) for words in env.parsed_problem["goal_state"]]
                expected.append([*judged, env._check_success()])
            if recipe := _find_expert(name, task):
                _follow_expert(scene, recipe, official[:2], states, expected)
            truth, found = np.array(expected, bool), _judge_states(goal, states)
            wrong = int((found != truth).sum())
            total.update({name: len(truth), f"{name} true": int(truth.sum()), "judgements": truth.size, "wrong": wrong})
            print(f"{name} {task.index}: {len(truth)} states, true {truth.sum(0).tolist()}, wrong {wrong}", flush=True)
            if task.index in KEPT[name]:
                # States in which the goal holds come first.
                order = np.argsort(rng.permutation(len(truth)) - len(truth) * truth[:, -1])
                chosen = [*order[: PACKED // 2], *order[-PACKED // 2 :]]
                kept |= _pack_case(f"{name}/{task.index}", goal, [states[i] for i in chosen], truth[chosen])
            scene.close()
    print(dict(total))
    return kept


def _is_placement(predicate: Predicate) -> bool:
    """Return whether it is about the place of an object, which is moved after drawers and doors."""
    return not predicate.joints


def _bring_near(env: Any, predicate: Predicate, rng: np.random.Generator) -> None:
    """Move joints or an object to where the predicate may hold."""
    model, data = env.sim.model._model, env.sim.data._data
    if predicate.joints:
        spread = 0.02 if rng.random() < 0.7 else 0.5
        data.qpos[list(predicate.joints)] = predicate.threshold + rng.normal(0, spread, len(predicate.joints))
    else:
        joint = model.body_jntadr[predicate.thing]
        adr = model.jnt_qposadr[joint]
        if predicate.kind == "on object":
            place = data.xpos[predicate.target] + [*rng.normal(0, 0.02, 2), rng.uniform(-0.01, 0.05)]
        else:
            rotation = data.site_xmat[predicate.target].reshape(3, 3)
            way = rng.uniform(-1.2, 1.2, 3) * predicate.size
            if predicate.kind == "on site":
                way[2] = predicate.size[2] + rng.uniform(-0.01, 0.11)
            place = data.site_xpos[predicate.target] + rotation.T @ way
        data.qpos[adr : adr + 3] = place
    mujoco.mj_forward(model, data)


def _find_expert(suite: str, task: Any) -> ExpertRecipe | None:
    try:
        return find_recipe(suite, task.index, task.instruction) if task.index == 0 else None
    except UserError:
        return None


def _follow_expert(
    scene: LiberoScene, recipe: ExpertRecipe, starts: Array, states: list[Any], expected: list[Any]
) -> None:
    """Add the states and judgements of an expert's episodes, the success included."""
    for start in starts:
        scene.place(0, start, 10)
        expert, success = Expert(recipe), False
        for _ in range(200):
            _, success = scene.step(expert.choose_action(scene.observation))
            env = scene._env
            judged = [env._eval_predicate(words) for words in env.parsed_problem["goal_state"]]
            states.append(_read_view(scene))
            expected.append([*judged, success])
            if success:
                break


def _read_view(scene: LiberoScene) -> dict[str, Array]:
    data = scene._data
    return {
        "bodies": data.xpos.copy(),
        "sites": data.site_xpos.copy(),
        "site_rotations": data.site_xmat.reshape(-1, 3, 3).copy(),
        "joints": data.qpos.copy(),
        "pairs": data.contact.geom.copy().astype(np.int64),
    }


def _stack_views(states: list[dict[str, Array]]) -> dict[str, Array]:
    """Return what predicates read, in 32 bits."""
    worlds = np.concatenate([np.full(len(state["pairs"]), i, np.int32) for i, state in enumerate(states)])
    names = ("bodies", "sites", "site_rotations", "joints")
    stacked = {name: np.stack([state[name] for state in states]).astype(np.float32) for name in names}
    pairs = np.concatenate([state["pairs"] for state in states]).astype(np.int32)
    return stacked | {"pairs": pairs, "worlds": worlds}


def _judge_states(goal: tuple[Predicate, ...], states: list[dict[str, Array]]) -> Array:
    """Return whether each predicate holds, and all of them, bool [states, predicates + 1]."""
    view = _stack_views(states)
    types = (wp.vec3, wp.vec3, wp.mat33, float, wp.vec2i, int)
    with wp.ScopedDevice("cpu"):
        arrays = [wp.array(array, dtype=dtype) for array, dtype in zip(view.values(), types, strict=True)]
        kernels = GoalKernels(goal, len(states), num_geoms=MOST_GEOMS)
        kernels.evaluate(arrays[:4], *arrays[4:], wp.array([len(view["worlds"])], dtype=int))
        held: Array = kernels.held.numpy()
    return np.concatenate([held, held.all(1, keepdims=True)], axis=1)


def _pack_case(name: str, goal: Sequence[Predicate], states: list[dict[str, Array]], truth: Array) -> dict[str, Array]:
    """Return the arrays of a case of the tests: a view in 32 bits, the predicates as text, and LIBERO's judgements."""
    arrays = {f"{name}/{part}": array for part, array in _stack_views(states).items()}
    small = {key: array.astype(np.int16) if array.dtype == np.int32 else array for key, array in arrays.items()}
    text = json.dumps([asdict(each) for each in goal])
    return small | {f"{name}/goal": np.array(text), f"{name}/truth": truth}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("torques", "predicates"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--states", type=int, default=2000, help="all in all, or for each task's predicates")
    parser.add_argument("--every", type=int, default=6, help="of the tasks of libero_90, for predicates")
    args = parser.parse_args()
    torques = args.what == "torques"
    recorded = record_torques(args.states) if torques else record_predicates(args.states, args.every)
    np.savez_compressed(args.file, **recorded)  # type: ignore[arg-type]
    print(f"{args.file}: {args.file.stat().st_size:,} bytes, {len(recorded)} arrays")


if __name__ == "__main__":
    main()
