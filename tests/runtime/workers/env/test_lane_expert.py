"""The scripted expert of a lane: labels of what the policy visits, and actions in its place."""

from __future__ import annotations

import numpy as np
import pytest
from helped_env import HelpedConfig, helped_envs

from vla_rl.core.contexts import EnvContext
from vla_rl.core.types import ActionSource
from vla_rl.runtime.messages.requests import EnvError, EpisodeRequest
from vla_rl.runtime.workers.env.episodes import Episodes
from vla_rl.runtime.workers.env.expert import LABELS, LaneExpert
from vla_rl.testing.scripted import ScriptedEnv

CHUNK = 2
AGAINST = -0.25
EXPERT, POLICY, PERSON = ActionSource.EXPERT, ActionSource.POLICY, ActionSource.PERSON


def episodes_of(env, ask=None, chunk=CHUNK, **keys):
    expert = LaneExpert(
        ask or env.expert_chunk, name="double", info=env.info, num_envs=env.num_envs, chunk=chunk, seed=5
    )
    return Episodes(env, name="double", seed=5, chunk=chunk, expert=expert, **keys)


def play(env, share, count=8, ask=None, chunk=CHUNK, **keys):
    """Play tickets 0 to `count` - 1 with a policy that pushes left. Return the finished ones by number."""
    episodes = episodes_of(env, ask, chunk, **keys)
    states = env.reset_states("train")
    tickets = [EpisodeRequest(state=states[i], number=i, expert_share=share) for i in range(count)]
    request = episodes.step(None, tickets)
    finished = list(request.finished)
    while not request.done:
        request = episodes.step(np.full((len(request.positions), chunk, 2), AGAINST, np.float32))
        finished += request.finished
    return {ticket.number: ticket for ticket in finished}


def scripted(num_envs=4, **keys):
    return ScriptedEnv(num_envs, chunk=CHUNK, length=5, **keys)


def test_every_chunk_step_of_the_policy_has_a_label():
    """The expert pushes by 0.5 towards the sign of the state; here the policy acts."""
    finished = play(scripted(), share=0.0)
    assert len(finished) == 8
    for number, ticket in finished.items():
        sign = 1.0 if number // 2 % 2 == 0 else -1.0
        labels = ticket.record[LABELS]
        assert labels.shape == (3, CHUNK, 2) and labels.dtype == np.float32
        assert (labels[..., 0] == 0.5 * sign).all() and not labels[..., 1].any()
        assert (ticket.record["source"] == POLICY).all()
        assert ticket.episodes[0].success_once == (sign < 0), "the policy pushes left"
        assert ticket.episodes[0].interventions == 0


def test_the_expert_acts_in_the_place_of_the_policy():
    finished = play(scripted(), share=1.0)
    for ticket in finished.values():
        valid = ticket.record["valid"]
        assert (ticket.record["source"][valid] == EXPERT).all()
        assert np.array_equal(ticket.record["executed_actions"][valid], ticket.record[LABELS][valid])
        assert ticket.episodes[0].success_once and ticket.episodes[0].interventions == 5


def test_who_acts_depends_on_the_ticket_alone():
    """However many envs there are, the same chunks of the same tickets are the expert's: about half of them."""
    few, many = play(scripted(1), share=0.5, count=24), play(scripted(7), share=0.5, count=24)
    acts = []
    for number in few:
        assert np.array_equal(few[number].record["source"], many[number].record["source"])
        chunk_sources = few[number].record["source"][:, 0]
        acts += (chunk_sources == EXPERT).tolist()
    assert 0.3 < np.mean(acts) < 0.7


def test_streams_are_replayed_with_what_the_expert_did():
    """An env whose stream was left runs the same actions again, the expert's among them."""
    env = scripted(1)
    keys = {"auto_reset": "immediate", "chunk_steps": 2, "draw": lambda request, episode: request}
    state = env.reset_states("train")[0]
    first = EpisodeRequest(state=state, number=0, env_id=0, expert_share=1.0, actions=np.zeros((0, 0, 0), np.float32))
    episodes = episodes_of(env, **keys)
    request = episodes.step(None, [first])
    while not request.done:
        request = episodes.step(np.full((1, CHUNK, 2), AGAINST, np.float32))
    cursor = request.finished[0].after
    assert np.array_equal(cursor.actions[..., 0], np.full((2, CHUNK), 0.5)), "the expert's actions"


def test_actions_outside_the_bounds_are_clipped_but_labels_are_not():
    env = scripted(1)
    ticket = play(env, share=1.0, count=1, ask=lambda: 3 * env.expert_chunk())[0]
    assert (ticket.record[LABELS][..., 0] == 1.5).all()
    assert (ticket.record["executed_actions"][ticket.record["valid"]][:, 0] == 1.0).all()


def test_a_person_takes_over_from_the_expert_too():
    """A person acts in steps 3 and 4 of state 0, in four of four chunks the expert would."""
    env = helped_envs(HelpedConfig(), EnvContext(num_envs=1, chunk=CHUNK))
    ask = lambda: np.full((1, CHUNK, 2), 0.5, np.float32)  # noqa: E731
    source = play(env, share=1.0, count=1, ask=ask)[0].record["source"].reshape(-1)[:6]
    assert source.tolist() == [EXPERT, EXPERT, EXPERT, PERSON, PERSON, EXPERT]


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (np.zeros((1, CHUNK, 3), np.float32), r"expert_chunk has shape \(1, 2, 3\), expected \(1, 2, 2\)"),
        (np.full((1, CHUNK, 2), np.nan, np.float32), "expert_chunk returned actions that are not finite"),
    ],
)
def test_labels_of_another_action_space_are_refused(answer, text):
    with pytest.raises(EnvError, match=text):
        play(scripted(1), share=0.0, count=1, ask=lambda: answer)
