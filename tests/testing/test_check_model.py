from __future__ import annotations

import attrs
import pytest
import torch

from vla_rl.testing import CheckFailed, LinearModel, check_model
from vla_rl.testing.scripted import LinearConfig, vla_rl_plugins
from vla_rl.testing.synthetic import env_info

INFO = env_info()


def findings(cls: type[LinearModel], values: str = "chunk") -> str:
    with pytest.raises(CheckFailed) as failed:
        check_model(cls(INFO, 2, values=values), env=INFO, values=values)
    return str(failed.value)


@pytest.mark.parametrize("values", ["none", "chunk", "action"])
@pytest.mark.parametrize("state_dim", [0, 4])
def test_the_linear_model_passes(values: str, state_dim: int) -> None:
    info = env_info(state_dim=state_dim)
    check_model(vla_rl_plugins["model"]["linear"], LinearConfig(bins=16), env=info, values=values, chunk=3)


def test_weights_are_left_as_they_were() -> None:
    model = LinearModel(INFO, 2)
    before = {name: p.clone() for name, p in model.module.named_parameters()}
    check_model(model, env=INFO)
    assert all(torch.equal(p, before[name]) for name, p in model.module.named_parameters())


def test_log_probs_that_do_not_match_are_found() -> None:
    class Model(LinearModel):
        def chunk_log_probs(self, obs, chunk):
            scores = super().chunk_log_probs(obs, chunk)
            return attrs.evolve(scores, log_probs=scores.log_probs * 1.01, values=scores.values.detach() + 1)

    text = findings(Model)
    assert "expected the log_probs recorded at sampling (within 1e-05), got a difference of 0.02" in text
    assert "expected the values recorded at sampling (within 1e-05), got a difference of 1" in text
    assert "got none in value_head.weight, value_head.bias" in text


def test_chance_that_is_not_keyed_is_found() -> None:
    class Model(LinearModel):
        def sample_chunk(self, obs, noise, greedy):
            noise.uniforms = lambda *shape: torch.rand(len(obs), *shape)
            return super().sample_chunk(obs, noise, greedy)

    assert "expected the same chunk from the same noise" in findings(Model)


def test_noise_that_is_ignored_is_found() -> None:
    class Model(LinearModel):
        def sample_chunk(self, obs, noise, greedy):
            return super().sample_chunk(obs, noise, True)

    assert "expected another chunk from other noise" in findings(Model)


def test_statistics_of_the_batch_are_found() -> None:
    class Model(LinearModel):
        def _compute_features(self, obs):
            features = super()._compute_features(obs)
            return features + features[:1] * 100

    assert "a row's chunk wherever it stands in the batch" in findings(Model)


def test_frozen_and_forgotten_parameters_are_found() -> None:
    class Model(LinearModel):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.module.register_parameter("forgotten", torch.nn.Parameter(torch.zeros(3)))

    assert "expected one in every trained parameter, got none in forgotten" in findings(Model)


def test_actions_out_of_bounds_wrong_shapes_and_a_graph_are_found() -> None:
    class Model(LinearModel):
        def sample_chunk(self, obs, noise, greedy):
            chunk = super().sample_chunk(obs, noise, greedy)
            return attrs.evolve(chunk, actions=chunk.actions * 2)

    class Squeezed(LinearModel):
        def sample_chunk(self, obs, noise, greedy):
            chunk = super().sample_chunk(obs, noise, greedy)
            return attrs.evolve(chunk, log_probs=chunk.log_probs.sum(-1).requires_grad_(), values=None)

    assert "expected within the environment's bounds, got 50.0% of the range outside" in findings(Model)
    text = findings(Squeezed)
    assert "log_probs: expected float32 [4, 2, 3], got float32 [4, 2]" in text
    assert "expected no gradient, got tensors with a graph" in text
    assert "values: expected (4,), got None; add a value head" in text


def test_a_model_that_does_not_publish_or_save_is_found() -> None:
    class Model(LinearModel):
        def load_weights(self, pairs):
            pass

        def save(self, folder):
            pass

    text = findings(Model)
    assert "expected other log_probs from other weights" in text
    assert "expected KeyError for a name that is not there" in text
    assert "save: expected files in the folder, got none" in text


def test_tokens_that_do_not_come_back_are_found() -> None:
    class Model(LinearModel):
        def encode_actions(self, actions):
            return (super().encode_actions(actions) + 1).clamp(max=7)

    assert "expected sampled actions back from their tokens" in findings(Model)


def test_what_is_saved_must_come_back(tmp_path) -> None:
    check = vla_rl_plugins["model"]["linear"]
    with pytest.raises(CheckFailed, match="expected the same greedy actions once loaded"):
        check_model(check, reload=lambda folder: LinearConfig(bins=5))
    check_model(check, reload=lambda folder: LinearConfig(checkpoint=str(folder)))
