"""`check_reward_model`: does a reward model keep to the contract of `RewardModel`?"""

from __future__ import annotations

from typing import Any

import numpy as np

from vla_rl.core.reward_models import RewardModel
from vla_rl.core.types import Array, Context, EnvInfo, Observation, Plugin, to_numpy
from vla_rl.testing import synthetic
from vla_rl.testing.common.findings import Findings, Unfit, built

ROWS = 4


def check_reward_model(
    model: RewardModel | Plugin, config: Any = None, *, env: EnvInfo | None = None, device: str = "cpu"
) -> None:
    """Let a reward model judge observations: it returns one probability for each, the same one whenever it is asked and
    whatever else is in the batch. For models that judge by the observation alone; not for one that asks a person.
    Raises CheckFailed with all findings.

    Args:
        model: a component, or a `Plugin` that is built with `config` for `env` and `device`.
        env: simulator whose observations are judged; None: one with two cameras and a state.
    """
    env = synthetic.env_info() if env is None else env
    component, name = built("reward_model", model, config, Context(env=env, num_envs=ROWS, device=device))
    f = Findings(f"check_reward_model of {name}")
    obs = synthetic.observation(env, ROWS)
    with f.section("success_probability"):
        first = _probability(f, component, obs)
        again = _probability(f, component, obs)
        f.expect(
            bool((first == again).all()),
            "success_probability",
            f"the same answer to the same observations, {first.tolist()}",
            again.tolist(),
            "draw no random numbers, and put dropout and batch norms into evaluation mode",
        )
        one_by_one = np.concatenate([_probability(f, component, obs.take(np.array([i]))) for i in range(ROWS)])
        f.expect(
            bool(np.allclose(first, one_by_one, atol=1e-5)),
            "success_probability",
            f"the answer of each observation alone, {one_by_one.tolist()}",
            first.tolist(),
            "let no observation of a batch influence another",
        )
    f.close()


def _probability(f: Findings, model: RewardModel, obs: Observation) -> Array:
    """Return the answers for a batch, [B]. Raises Unfit for another shape."""
    answer = np.asarray(to_numpy(model.success_probability(obs, np.zeros(len(obs), bool))))
    where = "success_probability"
    if not f.expect(answer.shape == (len(obs),), where, f"shape ({len(obs)},)", answer.shape, "return one number each"):
        raise Unfit
    within = bool(((answer >= 0) & (answer <= 1)).all())
    f.expect(within, where, "probabilities from 0 to 1", answer.tolist(), "apply a sigmoid to logits")
    return answer
