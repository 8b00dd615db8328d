"""Models whose frozen weights are stored in fewer bits (`model.frozen_weights`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_cases import noise, smallest

from fp8 import KINDS, MULTIPLIES_FP8
from vla_rl.core.catalogue import load
from vla_rl.core.contexts import ModelContext
from vla_rl.core.errors import CheckpointError, SpecError
from vla_rl.core.plan import Cluster
from vla_rl.core.spec.spec import make_component, parse_spec
from vla_rl.core.spec.structure import Problems
from vla_rl.runtime.checks.run import check_spec
from vla_rl.testing import synthetic
from vla_rl.toolkit.models import frozen_weights
from vla_rl.toolkit.models.adapters import MARK, MergedAdapters
from vla_rl.toolkit.models.frozen_weights import FrozenLinear

ENV, ROWS = synthetic.env_info(), 3
CHUNKS = {"openvla": 1, "openvla_oft": 2, "pi0": 2, "pi05": 2, "smolvla": 2, "gr00t": 2}
DIFFERENCES = {"int8": 0.03, "nf4": 0.4, "fp8": 0.2}
"""Mean absolute difference of log-probs to those of full precision, at most, of small networks with random weights."""


@pytest.fixture(autouse=True)
def fp8_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU multiplies FP8 too slowly for use, and well enough for tests."""
    monkeypatch.setattr(frozen_weights, "find_fp8_problem", lambda device: None)


def make_model(name: str, kind: str, **keys: Any) -> Any:
    """Return the smallest model with adapters that do something."""
    model = smallest(name, ENV, CHUNKS[name], **{"lora": {"rank": 4}, "frozen_weights": kind, **keys})
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter_name, parameter in model.module.named_parameters():
            if f"{MARK}B" in parameter_name:
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


def stored_layers(model: Any) -> dict[str, FrozenLinear]:
    return {name: part for name, part in model.module.named_modules() if isinstance(part, FrozenLinear)}


def score_gradients(model: Any, obs: Any, chunk: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    model.module.zero_grad(set_to_none=True)
    scores = model.chunk_log_probs(obs, chunk)
    (scores.log_probs.mean() + scores.values.mean()).backward()
    return scores, {name: p.grad for name, p in model.module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", CHUNKS)
def test_log_probs_and_gradients_are_near_those_of_full_precision(name: str) -> None:
    obs = synthetic.observation(ENV, ROWS)
    full = make_model(name, "bf16")
    chunk = full.sample_chunk(obs, noise(ROWS), False)
    expected, gradients = score_gradients(full, obs, chunk)
    for kind, most in DIFFERENCES.items():
        if kind == "fp8" and not MULTIPLIES_FP8:
            continue
        model = make_model(name, kind)
        assert stored_layers(model), kind
        scores, found = score_gradients(model, obs, chunk)
        difference = (scores.log_probs - expected.log_probs).detach().abs().mean()
        assert 0 < float(difference) < most, kind
        assert found.keys() == gradients.keys(), "the same weights are trained"
        flat = torch.stack([(found[key] * gradients[key]).sum() for key in gradients]).sum()
        lengths = [torch.stack([g.square().sum() for g in part.values()]).sum().sqrt() for part in (found, gradients)]
        assert float(flat / (lengths[0] * lengths[1])) > 0.8, f"{kind}: gradients point elsewhere"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CHUNKS)
def test_acting_and_learning_agree_as_they_do_in_full_precision(name: str, kind: str) -> None:
    obs, model = synthetic.observation(ENV, ROWS), make_model(name, kind)
    chunk = model.sample_chunk(obs, noise(ROWS), False)
    scores = model.chunk_log_probs(obs, chunk)
    torch.testing.assert_close(scores.log_probs, torch.as_tensor(chunk.log_probs), rtol=0, atol=1e-5)
    assert torch.equal(scores.log_probs, model.chunk_log_probs(obs, chunk).log_probs)


def test_what_stays_in_full_precision() -> None:
    model = make_model("pi05", "nf4", train_expert_only=False)
    names = set(stored_layers(model))
    assert not [name for name in names if "norm" in name or "action" in name or MARK in name]
    assert any("vision_tower" in name for name in names) and any(".dit." in name for name in names)
    expert_trained = make_model("pi0", "nf4", lora=None)
    assert stored_layers(expert_trained) and not [name for name in stored_layers(expert_trained) if ".dit." in name]


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("kind", KINDS)
def test_recomputation_gives_the_same_gradients(kind: str, mode: str) -> None:
    obs = synthetic.observation(ENV, ROWS)
    plain = make_model("openvla_oft", kind)
    chunk = plain.sample_chunk(obs, noise(ROWS), False)
    _, expected = score_gradients(plain, obs, chunk)
    _, found = score_gradients(make_model("openvla_oft", kind, recompute=mode), obs, chunk)
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


@pytest.mark.parametrize("kind", ["int8", "nf4"])
@pytest.mark.parametrize("name", ["openvla_oft", "pi0"])
def test_merged_adapters_act_in_full_precision_and_leave_the_stored_weights(name: str, kind: str) -> None:
    obs = synthetic.observation(ENV, ROWS)
    model = make_model(name, kind, lora={"rank": 4, "merge_for_acting": "copy"})
    before = {key: p.clone() for key, p in model.module.named_parameters()}
    separate = model.sample_chunk(obs, noise(ROWS), False)
    adapters = MergedAdapters(model.module, "copy")
    adapters.merge_weights()
    merged = model.sample_chunk(obs, noise(ROWS), False)
    layers = [layer for layer in stored_layers(model).values() if layer.merged is not None]
    assert layers and all(layer.merged.dtype == layer.dtype for layer in layers if layer.merged is not None)
    torch.testing.assert_close(merged.log_probs, separate.log_probs, rtol=1e-4, atol=1e-4)
    adapters.restore_weights()
    assert all(torch.equal(p, before[key]) for key, p in model.module.named_parameters())
    assert torch.equal(torch.as_tensor(model.sample_chunk(obs, noise(ROWS), False).log_probs), separate.log_probs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CHUNKS)
def test_a_saved_folder_is_in_full_precision_and_acts_as_the_policy_did(name: str, kind: str, tmp_path: Path) -> None:
    obs, model = synthetic.observation(ENV, ROWS), make_model(name, kind)
    chunk = model.sample_chunk(obs, noise(ROWS), False)
    model.save(tmp_path / "model")
    plugin = load("model", name)
    config = make_component("model", name, checkpoint=str(tmp_path / "model")).config
    again = plugin.build(config, ModelContext(env=ENV, chunk=CHUNKS[name], values="chunk"))
    assert not stored_layers(again)
    scores, expected = again.chunk_log_probs(obs, chunk), model.chunk_log_probs(obs, chunk)
    limit = {"rtol": 1e-4, "atol": 1e-4} if kind != "fp8" else {"rtol": 0, "atol": 0.5}
    torch.testing.assert_close(scores.log_probs, expected.log_probs, **limit)  # FP8 rounds inputs too


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("openvla_oft", {"lora": None}, "int8 stores weights that are not trained.*set lora: {}, or leave"),
        ("pi0", {"lora": None, "train_expert_only": False}, "set train_expert_only: true or lora: {}"),
        ("openvla", {"lora": {"merge_for_acting": "in_place"}}, "int8 does not go with .*in_place.*use copy, or off"),
        ("pi05", {"lora": {"merge_for_acting": "copy"}, "frozen_weights": "fp8"}, "fp8 does not go with .*use off"),
        ("smolvla", {"lora": {}, "frozen_weights": "int4"}, "bf16.*fp8.*int8.*nf4.*got .int4"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(name: str, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(Problems, match=message):
        make_component("model", name, preset="tiny", **{"frozen_weights": "int8", **keys})


def test_a_run_on_a_cpu_refuses_fp8_before_anything_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    spec: dict[str, Any] = {
        "name": "narrow",
        "model": {"type": "pi0", "preset": "tiny", "frozen_weights": "fp8"},
        "env": {"type": "tabletop", "num_envs": 4},
        "rollout": {"chunk": 2, "episodes": 4},
        "algorithm": {"type": "ppo"},
        "runtime": {"backend": "local"},
        "train": {"steps": 1, "lr": 1e-4, "micro_batch": 4},
    }
    cluster = Cluster(cpus=2, gpus=0, memory=2**35)
    with pytest.raises(SpecError, match=r"model.frozen_weights: fp8 .*'cpu' does not; use int8, nf4 or bf16"):
        check_spec(parse_spec(spec), training=True, cluster=cluster)
    check_spec(
        parse_spec({**spec, "model": {**spec["model"], "frozen_weights": "nf4"}}), training=True, cluster=cluster
    )


def test_the_reference_policy_has_the_stored_weights() -> None:
    obs, model = synthetic.observation(ENV, ROWS), make_model("openvla_oft", "nf4")
    chunk = model.sample_chunk(obs, noise(ROWS), False)
    reference = model.reference_log_probs(obs, chunk)
    with torch.no_grad():
        for key, parameter in model.module.named_parameters():
            if f"{MARK}B" in key:
                parameter.zero_()
        first = model.chunk_log_probs(obs, chunk).log_probs
    torch.testing.assert_close(reference, first)


def test_quantised_checkpoints_are_refused_by_the_name_of_their_library(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = make_model("openvla_oft", "bf16")
    model.save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "language_model.model.layers.0.mlp.down_proj.weight"
    tensors[f"{name}.absmax"] = torch.zeros(4)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = make_component("model", "openvla_oft", checkpoint=str(tmp_path)).config
    with pytest.raises(CheckpointError, match=r"bitsandbytes has quantised \(.*absmax\).*model.frozen_weights: nf4"):
        load("model", "openvla_oft").build(config, ModelContext(env=ENV, chunk=2))
