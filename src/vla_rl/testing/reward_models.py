"""`check_reward_model`: does a reward model keep to the contract of `RewardModel`?"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
from attrs import evolve

from vla_rl.core.contexts import RewardModelContext
from vla_rl.core.declarations import RewardModelPlugin
from vla_rl.core.reward_models import RewardModel
from vla_rl.core.types import Array, EnvInfo, Observation, to_numpy
from vla_rl.testing import synthetic
from vla_rl.testing.common.findings import Findings, Unfit, build_component

ROWS = 4


def check_reward_model(
    model: RewardModel | RewardModelPlugin, config: Any = None, *, env: EnvInfo | None = None, device: str = "cpu"
) -> None:
    """Let a reward model judge observations, black and white images among them: it returns one probability for each,
    the same one whenever it is asked, whatever else is in the batch, was seen before, or ends. For models that judge by
    the observation alone; not for one that asks a person. Raises CheckFailed with all findings.

    Args:
        model: a component, or a `RewardModelPlugin` that is built with `config` for `env` and `device`.
        env: simulator whose observations are judged; None: one with two cameras and a state.
    """
    env = synthetic.env_info() if env is None else env
    component, name = build_component(
        "reward_model", model, config, RewardModelContext(env=env, num_envs=ROWS, device=device)
    )
    f = Findings(f"check_reward_model of {name}")
    obs = synthetic.observation(env, ROWS)
    with f.section("success_probability"):
        _check_probabilities(f, component, obs)
        _check_independence(f, component, obs)
        _check_plain_images(f, component, obs)
    with f.section("failed"):
        _check_failures(f, component, obs)
    with f.section("calls of an episode"):
        _check_episodes(f, component, obs)
    with f.section("close"):
        component.close()
        component.close()
    f.close()


def _check_probabilities(f: Findings, model: RewardModel, obs: Observation) -> None:
    """Check that equal observations get equal answers, and stay as they are."""
    original = copy.deepcopy(obs)
    first = _ask_probability(f, model, obs)
    same = all(np.array_equal(obs.images[name], image) for name, image in original.images.items())
    f.expect(same, "observation", "images that stay as they are", "changed images", "copy what you change")
    obs = original
    if not model.deterministic:
        return
    again = _ask_probability(f, model, obs)
    f.expect(
        bool((first == again).all()),
        "success_probability",
        f"the same answer to the same observations, {first.tolist()}",
        again.tolist(),
        "draw no random numbers, and put dropout and batch norms into evaluation mode; or set `deterministic` to False",
    )


def _check_independence(f: Findings, model: RewardModel, obs: Observation) -> None:
    """Check that an observation's answer depends neither on the others nor on the end of its episode."""
    if not model.deterministic:
        return
    first = _ask_probability(f, model, obs)
    one_by_one = np.concatenate([_ask_probability(f, model, obs.take(np.array([i]))) for i in range(ROWS)])
    f.expect(
        bool(np.allclose(first, one_by_one, atol=1e-5)),
        "success_probability",
        f"the answer of each observation alone, {one_by_one.tolist()}",
        first.tolist(),
        "let no observation of a batch influence another",
    )
    at_ends = _ask_probability(f, model, obs, np.arange(ROWS) % 2 == 0)
    f.expect(
        bool(np.allclose(first, at_ends, atol=1e-5)),
        "success_probability",
        f"the same answer where an episode ends, {first.tolist()}",
        at_ends.tolist(),
        "judge by the observation: an end is not a success",
    )


def _check_plain_images(f: Findings, model: RewardModel, obs: Observation) -> None:
    """Check black and white images, which have no contrast, and that answers depend on the observation at all."""
    answers = [_ask_probability(f, model, obs)]
    for level in (0, 255):
        images = {name: np.full_like(to_numpy(image), level) for name, image in obs.images.items()}
        answers.append(_ask_probability(f, model, evolve(obs, images=images)))
    values = np.unique(np.concatenate(answers))
    undecided = len(values) == 1 and 0.01 < values[0] < 0.99
    where, remedy = "success_probability", "look at the images, or at the state"
    f.expect(not undecided, where, "an answer that depends on the observation", f"always {values[0]:.3g}", remedy)


def _check_failures(f: Findings, model: RewardModel, obs: Observation) -> None:
    """Check the form of `failed`."""
    _ask_probability(f, model, obs)
    failed = model.failed(obs)
    if failed is None:
        return
    array = np.asarray(to_numpy(failed))
    got = f"{array.dtype} {list(array.shape)}"
    f.expect(got == f"bool [{ROWS}]", "failed", f"None, or bool [{ROWS}]", got, "return a flag for each observation")


def _check_episodes(f: Findings, model: RewardModel, obs: Observation) -> None:
    """Make the calls of several episodes, of all envs and of some, after which answers are as before."""
    before = _ask_probability(f, model, obs)
    for env_ids in (range(ROWS), [0], [1, ROWS - 1]):
        model.before_reset(np.array(env_ids, np.int64))
        model.watch(None)
        if model.watches:
            model.watch(obs)
        white = {name: np.full_like(to_numpy(image), 255) for name, image in obs.images.items()}
        _ask_probability(f, model, evolve(obs, images=white))
        model.failed(evolve(obs, images=white))
    model.before_reset(np.arange(ROWS))
    model.watch(None)
    after = _ask_probability(f, model, obs)
    f.expect(
        not model.deterministic or bool(np.allclose(before, after, atol=1e-5)),
        "before_reset",
        f"the same answer in a later episode, {before.tolist()}",
        after.tolist(),
        "forget the last episode there",
    )


def _ask_probability(f: Findings, model: RewardModel, obs: Observation, ends: Array | None = None) -> Array:
    """Return the answers for a batch, [B]. Raises Unfit for another shape."""
    ends = np.zeros(len(obs), bool) if ends is None else ends
    answer = np.asarray(to_numpy(model.success_probability(obs, ends)))
    where = "success_probability"
    if not f.expect(answer.shape == (len(obs),), where, f"shape ({len(obs)},)", answer.shape, "return one number each"):
        raise Unfit
    within = bool(((answer >= 0) & (answer <= 1)).all())
    f.expect(within, where, "probabilities from 0 to 1", answer.tolist(), "apply a sigmoid to logits")
    return answer
