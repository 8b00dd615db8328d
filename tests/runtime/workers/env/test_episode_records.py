"""Records of running tickets: rows are moved when attempts are dropped and when room is made."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from vla_rl.core.types import ResetState
from vla_rl.runtime.messages.requests import EpisodeRequest
from vla_rl.runtime.workers.env.episode_records import ACTIONS, RunningTrajectories

ENVS = 3
REQUEST = EpisodeRequest(state=ResetState(id=0, task="a"), number=0)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.integers(0, ENVS - 1), st.sampled_from(("end", "episode", "drop", "none"))), max_size=80))
def test_each_env_has_the_steps_of_its_ticket(events):
    """The reference appends each env's steps to a separate list."""
    trajectories = RunningTrajectories(ENVS)
    steps: list[list[float]] = [[] for _ in range(ENVS)]
    episode_start = [0] * ENVS
    trajectories.begin_tickets(np.arange(ENVS))
    for number, (env_id, event) in enumerate(events):
        values = 10.0 * number + np.arange(ENVS)
        trajectories.add_chunk({"rewards": values[:, None], ACTIONS: np.stack([values, -values], 1)[:, None]})
        for env, of_env in enumerate(steps):
            of_env.append(values[env])
        if event == "drop":
            assert trajectories.drop_attempt(env_id) == episode_start[env_id]
            del steps[env_id][episode_start[env_id] :]
        if event == "episode":
            trajectories.begin_episodes(env_id)
            episode_start[env_id] = len(steps[env_id])
        assert trajectories.ticket_lengths(np.arange(ENVS)).tolist() == [len(of_env) for of_env in steps]
        actions = trajectories.episode_actions(env_id)
        assert actions[:, 0, 0].tolist() == steps[env_id][episode_start[env_id] :]
        if event == "end":
            trajectory = trajectories.end_ticket(env_id, REQUEST, frames=None, recording=None, cursor=None)
            assert list(trajectory.record) == ["rewards"]
            assert trajectory.record["rewards"][:, 0].tolist() == steps[env_id]
            trajectories.begin_tickets(np.array([env_id]))
            steps[env_id] = []
            episode_start[env_id] = 0
