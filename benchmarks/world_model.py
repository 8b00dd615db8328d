"""Fits the world model `edm`, preset `tiny`, from zero to recorded tabletop episodes, and prints what it is worth.

    nice -n 19 python benchmarks/world_model.py --minutes 10

The episodes are those of the small policy that comes with vla-rl, which solves about half of the train states;
they are played first and take seconds. 20 % of them are never fitted to: all that is printed is of these.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np
from PIL import Image

from vla_rl import EnvContext, Noise, Observation, SimEnv, Windows, WorldModel, WorldModelContext, build, load, to_numpy
from vla_rl.core.contexts import ModelContext
from vla_rl.runtime.imagination.interfaces import RecordedEpisode
from vla_rl.runtime.imagination.worker.episode_files import EpisodeShape
from vla_rl.runtime.imagination.worker.episode_store import EpisodeStore
from vla_rl.toolkit.world_models.measures import imagine_episodes, measure_quality, thresholds_met
from vla_rl.toolkit.world_models.windows import frames_of

CHUNK = 4
ROWS = 64


def record(recorder: EpisodeStore, env: SimEnv, policy: Any, rounds: int) -> tuple[int, int]:
    """Play the policy from train states. -> (episodes, successes)."""
    states, successes = env.reset_states("train"), 0
    rows = np.arange(env.num_envs)
    for number in range(rounds):
        chosen = [states[(number * len(rows) + row) % len(states)] for row in rows]
        obs = env.reset(rows, np.array([s.id for s in chosen]), np.zeros(len(rows), np.int64)).numpy()
        played = [[frame] for frame in (obs.take(np.array([row])) for row in rows)]
        parts: list[list[tuple[Any, Any, int]]] = [[] for _ in rows]
        active = np.ones(len(rows), bool)
        for chunk in range(recorder.shape.longest):
            keys = [(number * len(rows) + rows).tolist(), [0] * len(rows), [chunk] * len(rows)]
            actions = to_numpy(policy.sample_chunk(obs, Noise(0, "policy", *keys), False).actions)
            result = env.chunk_step(actions, active, True)
            obs, executed = result.obs.numpy(), to_numpy(result.executed)
            ended, success = to_numpy(result.terminated), to_numpy(result.success)
            for row in np.flatnonzero(active):
                last = int(executed[row].sum()) - 1
                outcome = 0 if not ended[row].any() else 1 + last if success[row] else 1 + CHUNK + last
                parts[row].append((actions[row], executed[row], outcome))
                played[row].append(obs.take(np.array([row])))
            active &= ~ended.any(1)
            if not active.any():
                break
        for row, state in enumerate(chosen):
            recorder.add([_recording(played[row], parts[row], state, number * len(rows) + row)])
            successes += 1 <= parts[row][-1][2] <= CHUNK
    return rounds * len(rows), successes


def _recording(
    frames: list[Observation], parts: list[tuple[Any, Any, int]], state: Any, number: int
) -> RecordedEpisode:
    seen = Observation.concat(frames)
    actions, executed, outcomes = (np.stack(column) for column in zip(*parts, strict=True))
    return RecordedEpisode(
        images=dict(seen.images),
        state=seen.state,
        actions=actions.astype(np.float32),
        executed=executed,
        outcomes=outcomes,
        instruction=seen.instructions[0],
        task=state.task,
        reset_state=state.id,
        number=number,
    )


def draw(world: WorldModel, windows: Windows, file: Path, episodes: int = 6) -> None:
    """Rows of frames, cameras next to each other: recorded, and below it imagined from the first frame on."""
    replay = imagine_episodes(world, windows.take(np.arange(episodes)))
    first = frames_of(windows, world.history - 1)
    lines = []
    for row in range(episodes):
        for seen in (replay.real, replay.imagined):
            images = [np.concatenate([i[row] for i in o.images.values()], axis=1) for o in (first, *seen)]
            lines.append(np.concatenate(images, axis=1))
    Image.fromarray(np.concatenate(lines)).save(file)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=10, help="of fitting, in seconds of one core / 60")
    parser.add_argument("--every", type=float, default=2, help="minutes of fitting between two measurements")
    parser.add_argument("--episodes", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--set", nargs="*", default=[], help="other keys, as lr=1e-3")
    parser.add_argument("--image", type=Path, help="PNG: held-out episodes, each above what is imagined of it")
    options = parser.parse_args()
    env = build("env", "tabletop", load("env", "tabletop").config(), EnvContext(num_envs=ROWS, chunk=CHUNK))
    model_plugin, world_plugin = load("model", "openvla_oft"), load("world_model", "edm")
    context = WorldModelContext(env=env.info, chunk=CHUNK)
    place = ModelContext(env=env.info, chunk=CHUNK)
    policy = build("model", "openvla_oft", model_plugin.config(checkpoint="builtin:tabletop"), place)
    keys = dict(world_plugin.presets[options.preset]) | {
        k: json.loads(v) for k, v in (s.split("=") for s in options.set)
    }
    world = build("world_model", "edm", world_plugin.config(**keys), context)
    with tempfile.TemporaryDirectory() as folder:
        shape = EpisodeShape.of(env.info, CHUNK)
        recorder = EpisodeStore(Path(folder), shape, capacity=options.episodes, spare=0)
        began = perf_counter()
        episodes, successes = record(recorder, env, policy, options.episodes // ROWS)
        held = recorder.start_windows("first", held_out=True)
        print(f"{episodes} episodes, {successes} successes, {len(held)} held out, {perf_counter() - began:.0f} s")
        ids = np.array([state.id for state in held])
        windows = recorder.read_windows(ids, history=world.history, rollout=shape.longest)
        fitted, updates, shown = 0.0, 0, 0.0
        while fitted < 60 * options.minutes:
            began = process_time()
            batch = recorder.draw(options.batch, history=world.history, rollout=2, seed=0, number=updates)
            rows = range(options.batch)
            losses = world.fit(batch, Noise(0, "fit", rows, [0] * options.batch, [updates] * options.batch))
            updates, fitted = updates + 1, fitted + process_time() - began
            if fitted - shown >= 60 * options.every or fitted >= 60 * options.minutes:
                shown = fitted
                found = measure_quality(world, windows)
                line = {"minutes": fitted / 60, "updates": updates, **losses, **found}
                print(json.dumps({name: round(value, 4) for name, value in line.items()}))
                print(f"  gates: {thresholds_met(found)}", flush=True)
                if options.image:
                    draw(world, windows, options.image)


if __name__ == "__main__":
    main()
