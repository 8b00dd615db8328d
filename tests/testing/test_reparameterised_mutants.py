"""Mistakes in `reparameterised_actions`, one each, all of which `check_model` finds."""

from __future__ import annotations

import pytest
import torch

from vla_rl.core.contexts import ModelContext
from vla_rl.plugins.models.film_resnet import plugin
from vla_rl.plugins.models.film_resnet.builder import GaussianFilmResnetPolicy
from vla_rl.plugins.models.film_resnet.config import FilmResnetConfig, Gaussian, NetworkConfig
from vla_rl.testing import CheckFailed, synthetic
from vla_rl.testing.common.findings import Findings
from vla_rl.testing.model_case import ModelCase
from vla_rl.testing.models import _check_weighable

CHUNK = 2
ENV = synthetic.env_info(cameras=1, pixels=32)
CONFIG = FilmResnetConfig(
    network=NetworkConfig(
        image_size=32, channels=(8,), keypoints=2, words=16, instruction=4, hidden=(8,), head=Gaussian()
    )
)


class Unscaled(GaussianFilmResnetPolicy):
    def reparameterised_actions(self, features, normals):
        actions, log_probs = super().reparameterised_actions(features, normals)
        return 2 * actions, log_probs


class WithoutTheSlopeOfTanh(GaussianFilmResnetPolicy):
    def reparameterised_actions(self, features, normals):
        actions, log_probs = super().reparameterised_actions(features, normals)
        return actions, log_probs + 0.5


class Detached(GaussianFilmResnetPolicy):
    def reparameterised_actions(self, features, normals):
        actions, log_probs = super().reparameterised_actions(features.detach(), normals)
        return actions, log_probs


class SummedOverTheChunk(GaussianFilmResnetPolicy):
    def reparameterised_actions(self, features, normals):
        actions, log_probs = super().reparameterised_actions(features, normals)
        return actions, log_probs.sum(1)


def findings(cls):
    context = ModelContext(env=ENV, chunk=CHUNK)
    model = plugin.build(CONFIG, context)
    model.__class__ = cls
    f = Findings("check_model")
    obs = synthetic.observation(ENV, 3)
    case = ModelCase(model=model, f=f, env=ENV, chunk=CHUNK, values="none", obs=obs, atol=1e-5)
    _check_weighable(case, case.draw_chunks())
    f.close()


@pytest.mark.parametrize(
    ("mutant", "text"),
    [
        (Unscaled, "the greedy chunk from noise that is 0"),
        (WithoutTheSlopeOfTanh, "the log_probs of chunk_log_probs"),
        (Detached, "a gradient of actions in the features of every row"),
        (SummedOverTheChunk, "reparameterised_actions: log_probs"),
    ],
)
def test_a_mistake_is_found(mutant, text):
    with pytest.raises(CheckFailed) as failed:
        findings(mutant)
    assert text in str(failed.value)


def test_the_policy_itself_passes():
    findings(GaussianFilmResnetPolicy)


def test_noise_that_is_ignored_is_found():
    class Greedy(GaussianFilmResnetPolicy):
        def reparameterised_actions(self, features, normals):
            return super().reparameterised_actions(features, torch.zeros_like(normals))

    with pytest.raises(CheckFailed, match="other actions from other noise"):
        findings(Greedy)
