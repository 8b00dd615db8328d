"""A recorder full of tabletop episodes, for tests of what looks into it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from vla_rl import EnvContext, Observation, build, generator, load, to_numpy
from vla_rl.runtime.imagination.interfaces import RecordedEpisode
from vla_rl.runtime.imagination.worker.episode_files import EpisodeShape
from vla_rl.runtime.imagination.worker.episode_store import EpisodeStore

CHUNK = 4
STEPS = 16


def tabletop(num_envs: int, size: int = 16, chunk: int = CHUNK) -> Any:
    plugin = load("env", "tabletop")
    return build("env", "tabletop", plugin.config(image_size=size), EnvContext(num_envs=num_envs, chunk=chunk))


def recordings(count: int, env: Any, longest: int) -> list[RecordedEpisode]:
    """Episodes of the expert, in two of three of which it is disturbed, so that some fail."""
    states, env_ids = env.reset_states("train")[:count], np.arange(env.num_envs)
    found = []
    for first in range(0, count, len(env_ids)):
        chosen = [states[(first + env_id) % count] for env_id in env_ids]
        obs = env.reset(env_ids, np.array([s.id for s in chosen]), np.zeros(len(env_ids), np.int64)).numpy()
        seen: list[list[Observation]] = [[obs.take(np.array([env_id]))] for env_id in env_ids]
        parts: list[list[Any]] = [[] for _ in env_ids]
        active = np.ones(len(env_ids), bool)
        for chunk in range(longest):
            noise = generator(0, "disturbed", first, chunk).standard_normal((len(env_ids), CHUNK, 3))
            actions = to_numpy(env.expert_chunk()) + 1.2 * noise * (env_ids % 3 > 0)[:, None, None]
            actions = np.clip(actions, -1, 1).astype(np.float32)
            result = env.chunk_step(actions, active, True)
            obs, executed, ended = result.obs.numpy(), to_numpy(result.executed), to_numpy(result.terminated)
            for env_id in np.flatnonzero(active):
                last = int(executed[env_id].sum()) - 1
                won = bool(result.success[env_id])
                outcome = (1 + last if won else 1 + CHUNK + last) if ended[env_id].any() else 0
                parts[env_id].append((actions[env_id], executed[env_id], np.int64(outcome)))
                seen[env_id].append(obs.take(np.array([env_id])))
            active &= ~ended.any(1)
        for env_id, state in enumerate(chosen[: count - first]):
            frames = Observation.concat(seen[env_id])
            actions, executed, outcomes = (np.stack(column) for column in zip(*parts[env_id], strict=True))
            about = {"task": state.task, "reset_state": state.id, "number": first + env_id}
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
