"""Recordings of episodes, made where their frames are made."""

from __future__ import annotations

import numpy as np
from recorded_episodes import CHUNK, tabletop

from vla_rl.core.randomness import generator
from vla_rl.core.types import to_numpy
from vla_rl.runtime.imagination.interfaces import RecordedEpisode
from vla_rl.runtime.imagination.worker.episode_files import EpisodeShape
from vla_rl.runtime.imagination.worker.episode_store import EpisodeStore
from vla_rl.runtime.imagination.worker.imagined_envs import WorldModelObserver, WorldModelRecordings
from vla_rl.runtime.messages.requests import EnvTrajectory, EpisodeRequest
from vla_rl.runtime.workers.env.episodes import Episodes

TICKETS = 9


class Stumbling:
    """A simulator one of whose envs breaks in its third chunk step."""

    def __init__(self, env) -> None:
        self.env, self.steps, self.told = env, 0, False

    def __getattr__(self, name):
        return getattr(self.env, name)

    def chunk_step(self, actions, active, stop_at_end):
        self.steps += 1
        return self.env.chunk_step(actions, active, stop_at_end)

    def faults(self):
        if self.steps == 3 and not self.told:
            self.told = True
            return {1: ["it broke"]}
        return {}


def played(env) -> tuple[dict[int, RecordedEpisode], dict[int, EnvTrajectory], dict[tuple[int, int], np.ndarray]]:
    """Tickets that are played by the disturbed expert: recordings, what came of them, and what was seen."""
    recordings: dict[int, RecordedEpisode] = {}
    episodes = Episodes(env, name="tabletop", seed=0, chunk=CHUNK, observers=[WorldModelObserver(recordings)])
    states = env.reset_states("train")
    request = episodes.step(None, [EpisodeRequest(state=states[n], number=n) for n in range(TICKETS)])
    finished, seen = {}, {}
    while not request.done:
        images = request.obs.numpy().images["overhead"]
        for env_id, (number, chunk) in enumerate(zip(request.ticket_numbers, request.chunk_numbers, strict=True)):
            seen[int(number), int(chunk)] = np.array(images[env_id])
        noise = [
            generator(0, "disturbed", int(n), 0, int(c)).standard_normal((CHUNK, 3))
            for n, c in zip(request.ticket_numbers, request.chunk_numbers, strict=True)
        ]
        actions = (
            to_numpy(env.expert_chunk())[request.positions]
            + np.stack(noise) * (request.ticket_numbers % 2)[:, None, None]
        )
        request = episodes.step(np.clip(actions, -1, 1).astype(np.float32))
        finished |= {ticket.number: ticket for ticket in request.finished}
    return recordings, finished, seen


def test_every_ticket_is_recorded_as_it_was_played(tmp_path) -> None:
    env = tabletop(4)
    recordings, finished, seen = played(env)
    assert sorted(recordings) == sorted(finished) == list(range(TICKETS))
    ends = set()
    for number, recording in recordings.items():
        ticket, length = finished[number], len(recording.actions)
        assert np.array_equal(recording.executed, ticket.record["valid"])
        assert recording.reset_state == ticket.episodes[0].state and recording.task == ticket.episodes[0].task
        for chunk in range(length):
            assert np.array_equal(recording.images["overhead"][chunk], seen[number, chunk])
        assert not recording.outcomes[:-1].any()
        last = int(recording.executed[-1].sum()) - 1
        ended = ticket.record["terminated"][-1].any()
        won = ticket.episodes[0].success_at_end
        assert recording.outcomes[-1] == (0 if not ended else 1 + last if won else 1 + CHUNK + last)
        ends.add((bool(ended), won))
    assert {(True, True), (True, False)} <= ends or {(True, True), (False, False)} <= ends
    EpisodeStore(tmp_path, EpisodeShape.of(env.info, CHUNK), capacity=TICKETS, spare=0).add(recordings.values())


def test_of_an_env_that_broke_only_the_episode_that_counts_is_recorded() -> None:
    whole, _, _ = played(tabletop(4))
    stumbling = Stumbling(tabletop(4))
    broken, _, _ = played(stumbling)
    assert stumbling.told and sorted(broken) == sorted(whole)
    for number, recording in whole.items():
        for name in ("state", "actions", "executed", "outcomes", "seed"):
            assert np.array_equal(getattr(recording, name), getattr(broken[number], name))


def test_episodes_of_later_steps_wait_for_theirs() -> None:
    recordings, made = WorldModelRecordings(), played(tabletop(4))[0]
    recordings.ended.update({number: made[number] for number in sorted(made, reverse=True)})
    assert [episode.number for episode in recordings.take_episodes(5)] == [0, 1, 2, 3, 4, 5]
    assert [episode.number for episode in recordings.take_episodes(TICKETS)] == [6, 7, 8]
    assert not recordings.take_episodes(TICKETS)
