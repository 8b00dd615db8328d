"""`reuse_prefix`: training on what the frozen vision-language model computed while acting."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from model_cases import noise, reloading
from openvla_cases import CHUNK, ENV, observation

from vla_rl.core.contexts import ModelContext
from vla_rl.core.spec.spec import parse_spec
from vla_rl.core.types import Chunk, Scores, to_numpy
from vla_rl.plugins.models import gr00t, pi0, smolvla
from vla_rl.plugins.models.gr00t.config import GrootConfig
from vla_rl.plugins.models.pi0.config import Pi0Config, Pi05Config, Pi05HeadConfig
from vla_rl.plugins.models.smolvla.config import SmolVLAConfig
from vla_rl.runtime.start import run
from vla_rl.testing import check_model
from vla_rl.toolkit.models.adapters import LoRAConfig
from vla_rl.toolkit.models.flow.config import PrefixHeadConfig, SteeringConfig
from vla_rl.toolkit.models.flow.network import RECORDED
from vla_rl.toolkit.trainers.dummy_samples import dummy_sample

MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "pi0": (pi0.plugin, Pi0Config, {}),
    "pi05": (pi0.pi05, Pi05Config, {}),
    "pi05, critic on the prefix": (pi0.pi05, Pi05Config, {"value_head": Pi05HeadConfig(reads="prefix")}),
    "smolvla": (smolvla.plugin, SmolVLAConfig, {}),
    "smolvla, critic on the expert": (
        smolvla.plugin,
        SmolVLAConfig,
        {"value_head": PrefixHeadConfig(reads="expert"), "lora": LoRAConfig(rank=4)},
    ),
    "gr00t": (gr00t.plugin, GrootConfig, {}),
    "gr00t N1.7": (gr00t.plugin, GrootConfig, {"preset": "tiny_n1_7"}),
}


NEAR = {"float32": {"rtol": 1e-4, "atol": 1e-5}, "bfloat16": {"rtol": 0.05, "atol": 0.05}}


def build(name: str, **keys: Any) -> Any:
    plugin, config, given = MODELS[name]
    return plugin.build(config(**{"preset": "tiny"} | given | keys), ModelContext(env=ENV, chunk=CHUNK, values="chunk"))


def store(chunk: Chunk) -> Chunk:
    """Return a chunk as it arrives at a learner: its arrays are NumPy's."""
    return attrs.evolve(chunk, extras={name: to_numpy(tensor) for name, tensor in chunk.extras.items()})


def compute_gradients(model: Any, scores: Scores) -> dict[str, torch.Tensor]:
    model.module.zero_grad(set_to_none=True)
    (scores.log_probs.sum() + scores.values.sum()).backward()
    return {name: p.grad for name, p in model.module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_recorded_prefixes_score_as_computed_ones(name: str, dtype: str) -> None:
    model, plain = (build(name, dtype=dtype, reuse_prefix=reuse) for reuse in (True, False))
    obs = observation(3)
    chunk, plain_chunk = (policy.sample_chunk(obs, noise(3), False) for policy in (model, plain))
    assert torch.equal(chunk.actions, plain_chunk.actions)
    assert torch.equal(chunk.log_probs, plain_chunk.log_probs)
    wanted_chunk = attrs.evolve(chunk, extras={key: chunk.extras[key] for key in plain_chunk.extras})
    assert chunk.extras.keys() > wanted_chunk.extras.keys()
    runs: list[Any] = []
    entry = model.module.run_backbone
    model.module.run_backbone = lambda *args: runs.append(args) or entry(*args)
    results = []
    for images, recorded, wanted_runs in ((obs.images, wanted_chunk, 1), ({}, chunk, 0)):
        runs.clear()
        scores = model.chunk_log_probs(attrs.evolve(obs, images=images), store(recorded))
        assert len(runs) == wanted_runs
        results.append((scores, compute_gradients(model, scores)))
    (wanted, wanted_gradients), (found, gradients) = results
    # pi0.5's prompt has the state in it, so recorded tokens are padded to one length, and longer sums round differently.
    near = {"rtol": 0, "atol": 0} if not name.startswith("pi05") else NEAR[dtype]
    for field in ("log_probs", "entropy", "values"):
        torch.testing.assert_close(getattr(found, field), getattr(wanted, field), **near)
    assert gradients.keys() == wanted_gradients.keys()
    for key, gradient in gradients.items():
        torch.testing.assert_close(gradient, wanted_gradients[key], **near)


@pytest.mark.parametrize("name", MODELS)
def test_rows_of_different_batches_have_one_width(name: str) -> None:
    """Samples of several inferences are trained on together, whatever their states and instructions."""
    model = build(name, reuse_prefix=True)
    one, two = observation(2), attrs.evolve(observation(3), state=np.full((3, ENV.state_dim), 0.123, np.float32))
    first, second = (model.sample_chunk(obs, noise(len(obs)), False).extras for obs in (one, two))
    assert {key: first[key].shape[1:] for key in first} == {key: second[key].shape[1:] for key in second}


@pytest.mark.parametrize("name", ["pi0", "gr00t"])
def test_greedy_chunks_record_nothing(name: str) -> None:
    model, obs = build(name, reuse_prefix=True), observation(2)
    greedy = model.sample_chunk(obs, noise(2), True)
    assert not greedy.extras.keys() & set(RECORDED)
    assert model.chunk_log_probs(obs, greedy).log_probs.shape == (2, CHUNK, 1)


@pytest.mark.parametrize("name", ["pi05", "smolvla", "gr00t"])
def test_contract(name: str) -> None:
    plugin, config, _ = MODELS[name]
    given = config(preset="tiny", reuse_prefix=True)
    check_model(plugin, given, env=ENV, chunk=CHUNK, values="chunk", atol=2e-5, reload=reloading(given))


@pytest.mark.parametrize("config", [Pi0Config, Pi05Config, SmolVLAConfig, GrootConfig])
def test_what_cannot_be_kept_is_refused(config: Any) -> None:
    with pytest.raises(ValueError, match="reuse_prefix needs train_expert_only: true"):
        config(preset="tiny", reuse_prefix=True, train_expert_only=False)
    with pytest.raises(ValueError, match="leave `reuse_prefix` out"):
        config(preset="tiny", reuse_prefix=True, steering=SteeringConfig())


def play(folder: Path, reuse: bool, **sections: Any) -> list[dict[str, float]]:
    """Train two steps, two epochs of each, and return the metrics of all lines but times."""
    data = {
        "name": "reuse",
        "model": {"type": "pi0", "preset": "tiny", "denoise_steps": 2, "reuse_prefix": reuse},
        "env": {"type": "tabletop", "num_envs": 4, "image_size": 32, "tasks": ["pick_red"]},
        "rollout": {"chunk": 4, "episodes": 4, "group_size": 2, "max_steps": 8},
        "algorithm": {"type": "ppo"},
        "train": {"steps": 2, "lr": 1e-3, "micro_batch": 2, "global_batch": 4, "epochs": 2},
        "eval": {"before": False, "episodes_per_task": 1},
        "hooks": [{"type": "jsonl"}],
    }
    data["train"] |= sections.pop("train", {})
    run(parse_spec(data | sections), folder, resume=False)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = ("policy/", "value/", "rollout/", "update/")
    return [{key: value for key, value in line.items() if key.startswith(kept)} for line in lines]


def test_a_run_is_the_same_run(tmp_path: Path) -> None:
    """Samples travel through the policy's store to the learner, and are freed."""
    found, wanted = (play(tmp_path / str(reuse), reuse, runtime={"backend": "local"}) for reuse in (True, False))
    assert found == wanted
    assert any(line["policy/grad_norm"] > 0 for line in found if "policy/grad_norm" in line)


def test_dummy_samples_carry_it() -> None:
    """A rank that scores a dummy gathers the same blocks as the others, and samples are counted with what they keep."""
    model = build("pi0", reuse_prefix=True)
    _, dummy = dummy_sample(model, ENV)
    chunk = model.sample_chunk(observation(1), noise(1), False)
    assert {key: extra.nbytes for key, extra in dummy.extras.items()} == {
        key: extra.nbytes for key, extra in chunk.extras.items()
    }


@pytest.mark.ray
def test_sharded_learners_keep_step(tmp_path: Path) -> None:
    sections = {"placement": {"type": "collocated", "cpu_workers": 2}, "train": {"sharding": "full"}}
    found, wanted = (play(tmp_path / str(reuse), reuse, **sections) for reuse in (True, False))
    assert found == wanted
