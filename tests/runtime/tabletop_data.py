"""A data set of tabletop episodes, good and bad, as the hook `lerobot` records them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from vla_rl import EnvContext, build, generator, load, to_numpy
from vla_rl.core.types import EnvInfo
from vla_rl.runtime.messages.requests import EpisodeRequest
from vla_rl.runtime.workers.env.episodes import Episodes
from vla_rl.toolkit.data.lerobot import LeRobotWriter
from vla_rl.toolkit.data.recording import RecordSettings

ENVS = 20
CHUNK = 4


def tabletop_data(
    folder: Path, count: int, tasks: tuple[str, ...], pixels: int = 32, final_frame: bool = True
) -> EnvInfo:
    """Record `count` episodes of the scripted expert, which is disturbed in three of four of them. Return the
    simulator's info.
    """
    plugin = load("env", "tabletop")
    config = plugin.config(image_size=pixels, tasks=tasks)
    env = build("env", "tabletop", config, EnvContext(num_envs=ENVS, chunk=CHUNK))
    record = RecordSettings(what="rollout", final_frame=final_frame)
    episodes = Episodes(env, name="tabletop", seed=0, chunk=CHUNK, record=record)
    states = env.reset_states("train")
    tickets = [EpisodeRequest(state=states[i % len(states)], number=i, recorded=True) for i in range(count)]
    request = episodes.step(None, tickets)
    finished = list(request.finished)
    while request.obs is not None:
        actions = to_numpy(env.expert_chunk())[request.positions]
        noise = [
            1.2 * (number % 4 > 0) * generator(0, "disturbed", int(number), 0, int(chunk)).standard_normal((CHUNK, 3))
            for number, chunk in zip(request.ticket_numbers, request.chunk_numbers, strict=True)
        ]
        request = episodes.step(np.clip(actions + np.stack(noise), -1, 1).astype(np.float32))
        finished += request.finished
    with LeRobotWriter(folder, fps=10, robot="tabletop") as writer:
        for trajectory in sorted(finished, key=lambda trajectory: trajectory.number):
            assert trajectory.recording is not None
            writer.add(trajectory.recording)
    return env.info
