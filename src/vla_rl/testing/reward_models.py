"""`check_reward_model`: does a reward model keep to the contract of `RewardModel`?"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from attrs import evolve

from vla_rl.core.contexts import RewardModelContext
from vla_rl.core.declarations import RewardModelPlugin
from vla_rl.core.reward_models import RewardModel
from vla_rl.core.types import Array, EnvInfo, Observation, to_numpy
from vla_rl.testing import synthetic
from vla_rl.testing.common.findings import Findings, Unfit, build_component
from vla_rl.testing.common.generators import expect_untouched, run_from
from vla_rl.testing.model_case import check_unchanged

ROWS = 4
SEEDS = itertools.count(11)
"""Seeds of the global generators, another one in each call."""
LEVELS = (-100.0, -1.0, -0.1, 0.0, 0.1, 1.0, 100.0)
"""Numbers that a state has, all of them alike, where use of it is looked for."""


def check_reward_model(
    model: RewardModel | RewardModelPlugin,
    config: Any = None,
    *,
    env: EnvInfo | None = None,
    device: str = "cpu",
    examples: Observation | None = None,
) -> None:
    """Let a reward model judge observations, images of one colour among them: it returns one probability for each, not
    the same for all, and the same one whenever it is asked, whatever else is in the batch, was seen before, or ends;
    likewise for failures. For models that judge by the observation alone; not for one that asks a person. Raises
    CheckFailed with all findings.

    Args:
        model: a component, or a `RewardModelPlugin` that is built with `config` for `env` and `device`.
        env: simulator whose observations are judged; None: one with two cameras and a state.
        examples: observations of `env` with a success among them, for a model that finds none in made-up ones.
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
        _check_use(f, component, obs, examples)
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
    check_unchanged(f, obs, original)
    obs = original
    if not model.deterministic:
        return
    again = _ask_probability(f, model, obs)
    same, expected = bool((first == again).all()), f"the same answer to the same observations, {first.tolist()}"
    remedy = (
        "draw no random numbers, and put dropout and batch norms into evaluation mode; or set `deterministic` to False"
    )
    f.expect(same, "success_probability", expected, again.tolist(), remedy)


def _check_independence(f: Findings, model: RewardModel, obs: Observation) -> None:
    """Check that an observation's answer depends neither on the others nor on the end of its episode."""
    if not model.deterministic:
        return
    first = _ask_probability(f, model, obs)
    one_by_one = np.concatenate([_ask_probability(f, model, obs.take(np.array([i]))) for i in range(ROWS)])
    same = np.allclose(first, one_by_one, atol=1e-5)
    expected = f"the answer of each observation alone, {one_by_one.tolist()}"
    remedy = "let no observation of a batch influence another"
    f.expect(same, "success_probability", expected, first.tolist(), remedy)
    at_ends = _ask_probability(f, model, obs, np.arange(ROWS) % 2 == 0)
    same, expected = np.allclose(first, at_ends, atol=1e-5), f"the same answer where an episode ends, {first.tolist()}"
    remedy = "judge by the observation: an end is not a success"
    f.expect(same, "success_probability", expected, at_ends.tolist(), remedy)


def _check_use(f: Findings, model: RewardModel, obs: Observation, examples: Observation | None) -> None:
    """Check images of one colour, which have no contrast, and that answers depend on the observation at all."""
    batches = [obs] if examples is None else [obs, examples]
    for colour in itertools.product((0, 255), repeat=3):
        images = {name: np.full_like(to_numpy(image), colour) for name, image in obs.images.items()}
        batches.append(evolve(obs, images=images))
    if obs.state is not None:
        batches += [evolve(obs, state=np.full_like(to_numpy(obs.state), number)) for number in LEVELS]
    values = np.unique(np.concatenate([_ask_probability(f, model, batch) for batch in batches]))
    remedy = "look at the images, or at the state; if it does, give `examples`, with a success among them"
    expected = "an answer that depends on the observation"
    f.expect(len(values) > 1, "success_probability", expected, f"always {values[0]:.3g}", remedy)


def _check_failures(f: Findings, model: RewardModel, obs: Observation) -> None:
    """Check the form of `failed`, and that equal observations get equal answers."""
    failed = _ask_failures(f, model, obs)
    if failed is None or not model.deterministic:
        return
    again = _ask_failures(f, model, obs)
    same = again is not None and np.array_equal(failed, again)
    expected, remedy = f"the same answer to the same observations, {failed.tolist()}", "draw no random numbers"
    f.expect(same, "failed", expected, None if again is None else again.tolist(), remedy)


def _ask_failures(f: Findings, model: RewardModel, obs: Observation) -> Array | None:
    """Return the failures of a batch, bool [B]; None: no episode. Raises Unfit for another shape."""
    _ask_probability(f, model, obs)
    failed = _call_alone(f, "failed", lambda: model.failed(obs))
    if failed is None:
        return None
    array = np.asarray(to_numpy(failed))
    got = f"{array.dtype} {list(array.shape)}"
    form = f"bool [{len(obs)}]"
    if not f.expect(got == form, "failed", f"None, or {form}", got, "return a flag for each observation"):
        raise Unfit
    return array


def _call_alone(f: Findings, where: str, call: Callable[[], Any]) -> Any:
    """Return what a call returns. Record a finding where it moves a global random generator."""
    ran = run_from(next(SEEDS), call)
    remedy = "draw from vla_rl.generator, or work inside torch.random.fork_rng()"
    expect_untouched(f, where, ran.changed_generators, remedy=remedy)
    return ran.result


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
    same, expected = np.allclose(before, after, atol=1e-5), f"the same answer in a later episode, {before.tolist()}"
    holds = same or not model.deterministic
    f.expect(holds, "before_reset", expected, after.tolist(), "forget the last episode there")


def _ask_probability(f: Findings, model: RewardModel, obs: Observation, ends: Array | None = None) -> Array:
    """Return the answers for a batch, [B]. Raises Unfit for another shape."""
    ends = np.zeros(len(obs), bool) if ends is None else ends
    where = "success_probability"
    answer = np.asarray(to_numpy(_call_alone(f, where, lambda: model.success_probability(obs, ends))))
    if not f.expect(answer.shape == (len(obs),), where, f"shape ({len(obs)},)", answer.shape, "return one number each"):
        raise Unfit
    within = bool(((answer >= 0) & (answer <= 1)).all())
    f.expect(within, where, "probabilities from 0 to 1", answer.tolist(), "apply a sigmoid to logits")
    return answer
