"""A recorder full of tabletop episodes, for tests of what looks into it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from vla_rl import Context, Observation, build, generator, load, to_numpy
from vla_rl.runtime.messages.world_model import RecordedEpisode
from vla_rl.runtime.workers.world_model.episode_files import EpisodeShape
from vla_rl.runtime.workers.world_model.episode_store import EpisodeStore

CHUNK = 4
STEPS = 16


def tabletop(rows: int, size: int = 16, chunk: int = CHUNK) -> Any:
    plugin = load("env", "tabletop")
    return build("env", "tabletop", plugin.config(image_size=size), Context(num_envs=rows, chunk=chunk))


def recordings(count: int, env: Any, longest: int) -> list[RecordedEpisode]:
    """Episodes of the expert, in two of three of which it is disturbed, so that some fail."""
    states, rows = env.reset_states("train")[:count], np.arange(env.num_envs)
    found = []
    for first in range(0, count, len(rows)):
        chosen = [states[(first + row) % count] for row in rows]
        obs = env.reset(rows, np.array([s.id for s in chosen]), np.zeros(len(rows), np.int64)).numpy()
        seen: list[list[Observation]] = [[obs.take(np.array([row]))] for row in rows]
        parts: list[list[Any]] = [[] for _ in rows]
        active = np.ones(len(rows), bool)
        for chunk in range(longest):
            noise = generator(0, "disturbed", first, chunk).standard_normal((len(rows), CHUNK, 3))
            actions = to_numpy(env.expert_chunk()) + 1.2 * noise * (rows % 3 > 0)[:, None, None]
            actions = np.clip(actions, -1, 1).astype(np.float32)
            result = env.chunk_step(actions, active, True)
            obs, executed, ended = result.obs.numpy(), to_numpy(result.executed), to_numpy(result.terminated)
            for row in np.flatnonzero(active):
                last = int(executed[row].sum()) - 1
                won = bool(result.success[row])
                outcome = (1 + last if won else 1 + CHUNK + last) if ended[row].any() else 0
                parts[row].append((actions[row], executed[row], np.int64(outcome)))
                seen[row].append(obs.take(np.array([row])))
            active &= ~ended.any(1)
        for row, state in enumerate(chosen[: count - first]):
            frames = Observation.concat(seen[row])
            actions, executed, outcomes = (np.stack(column) for column in zip(*parts[row], strict=True))
            about = {"task": state.task, "reset_state": state.id, "number": first + row}
            found.append(
                RecordedEpisode(
                    images=dict(frames.images),
                    state=to_numpy(frames.state),
                    actions=actions,
                    executed=executed,
                    outcomes=outcomes,
                    instruction=frames.instructions[0],
                    **about,
                )
            )
    return found


def recorder(folder: Path, count: int, size: int = 16, **settings: Any) -> EpisodeStore:
    """With that many episodes in it."""
    env = tabletop(min(count, 16), size)
    shape = EpisodeShape.of(env.info, CHUNK)
    made = EpisodeStore(folder, shape, **{"capacity": count, "spare": 0, **settings})
    made.add(recordings(count, env, shape.longest))
    return made
