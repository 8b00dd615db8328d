"""A learner's passes and optimiser steps read nothing on the host; metrics are read once, at the end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from host_reads import host_reads

from vla_rl.core.contexts import AlgorithmContext, ModelContext
from vla_rl.core.randomness import Noise
from vla_rl.core.spec.sections import TrainSpec
from vla_rl.core.trainers import ModelInputs, OptimizerStep, TrajectoryData, TrajectoryPart
from vla_rl.core.types import Chunk
from vla_rl.plugins.algorithms.gipo import plugin as gipo
from vla_rl.plugins.algorithms.grpo import plugin as grpo
from vla_rl.plugins.algorithms.ppo import plugin as ppo
from vla_rl.plugins.algorithms.srpo import plugin as srpo
from vla_rl.plugins.models.film_resnet import plugin as film_resnet
from vla_rl.plugins.models.film_resnet.config import FilmResnetConfig
from vla_rl.plugins.models.openvla import openvla_oft
from vla_rl.plugins.models.openvla.config import OpenVLAOFTConfig
from vla_rl.plugins.models.pi0 import pi05
from vla_rl.plugins.models.pi0 import plugin as pi0
from vla_rl.plugins.models.pi0.config import Pi0Config, Pi05Config
from vla_rl.plugins.trainers.policy_gradient.impl import PolicyGradient
from vla_rl.testing import synthetic
from vla_rl.toolkit.algorithms.policy_gradient import Decoupled, KLSettings, VTrace
from vla_rl.toolkit.algorithms.statistics import MetricAccumulator
from vla_rl.toolkit.models.adapters import LoRAConfig
from vla_rl.toolkit.no_settings import NoSettings
from vla_rl.toolkit.trainers.context import TrainerContext
from vla_rl.toolkit.trainers.trained_model import TrainedModel

CHUNK, SAMPLES, MICRO_BATCH = 2, 4, 2
ENV = synthetic.env_info(cameras=1)
ALGORITHMS: dict[str, tuple[Any, dict[str, Any]]] = {
    "ppo": (ppo, {}),
    "v-trace": (ppo, {"correction": VTrace()}),
    "grpo": (grpo, {"kl": KLSettings(coef=0.1), "correction": Decoupled()}),
    "gipo": (gipo, {"entropy_coef": 0.01}),
    "srpo": (srpo, {"encoder": "not loaded"}),
}
MODELS: dict[str, tuple[Any, Any]] = {
    "openvla_oft": (openvla_oft, OpenVLAOFTConfig(preset="tiny", lora=LoRAConfig(rank=4))),
    "recompute": (openvla_oft, OpenVLAOFTConfig(preset="tiny", lora=LoRAConfig(rank=4), recompute="selective")),
    "pi0": (pi0, Pi0Config(preset="tiny", lora=LoRAConfig(rank=4))),
    "pi05": (pi05, Pi05Config(preset="tiny", lora=LoRAConfig(rank=4))),
    "film_resnet": (film_resnet, FilmResnetConfig()),
}


def test_operations_that_wait_for_the_device_are_found() -> None:
    x = torch.arange(4.0)
    with host_reads() as reads:
        assert float(x.sum()) == 6
        assert x[x > 1].tolist() == [2, 3]
        x.to("cpu").numpy()
        x[torch.tensor([0, 1])].sum().add_(1)
    assert [read.partition(" ")[0] for read in reads] == [
        "aten._local_scalar_dense.default",
        "aten.index.Tensor",
        "tolist",
        "to",
        "numpy",
    ]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("model", MODELS)
def test_a_learner_step_reads_nothing_on_the_host(model: str, algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    update, inputs, fields = _update(model, algorithm)
    parts = tuple(np.arange(start, start + MICRO_BATCH) for start in range(0, SAMPLES, MICRO_BATCH))
    steps = [
        OptimizerStep(micro_batches=parts, passes=len(parts), divisor=float(SAMPLES), value_divisor=float(SAMPLES))
        for _ in range(2)
    ]
    update.update(
        TrajectoryData(step=1, version=1, inputs=inputs, fields=fields, steps=steps)
    )  # the first step allocates what is kept
    ends: list[str] = []
    monkeypatch.setattr(TrainedModel, "check_finite", lambda self: ends.append("check"))
    monkeypatch.setattr(MetricAccumulator, "read_metrics", lambda self, seconds: ends.append("metrics"))
    with host_reads() as reads:
        update.update(TrajectoryData(step=2, version=2, inputs=inputs, fields=fields, steps=steps))
    assert reads == []
    assert ends == ["check", "metrics"]


@pytest.mark.parametrize("algorithm", ["ppo", "gipo"])
def test_a_part_of_a_streaming_update_reads_nothing_on_the_host(algorithm: str) -> None:
    update, inputs, fields = _update("film_resnet", algorithm)
    parts = [np.arange(start, start + MICRO_BATCH) for start in range(0, SAMPLES, MICRO_BATCH)]
    with host_reads() as reads:
        for index in range(2):
            part = TrajectoryPart(
                version=1, inputs=inputs, fields=fields, micro_batches=parts, passes=len(parts), first=index == 0
            )
            update.accumulate(part)
    assert reads == []


def _update(model: str, algorithm: str) -> tuple[PolicyGradient, ModelInputs, dict[str, Any]]:
    """Return the update of a tiny model, its samples, and their fields."""
    kind, keys = ALGORITHMS[algorithm]
    plugin, config = MODELS[model]
    trains = kind.build(kind.config(**keys), AlgorithmContext())
    values = trains.value_granularity if trains.needs.values else "none"
    context = ModelContext(env=ENV, chunk=CHUNK, values=values)
    policy = plugin.build(config, context)
    obs = synthetic.observation(ENV, SAMPLES)
    chunk: Chunk = policy.sample_chunk(obs, Noise(0, "test", range(SAMPLES), [0] * SAMPLES, [0] * SAMPLES), False)
    inputs = ModelInputs(obs=obs, actions=chunk.actions, extras=chunk.extras).numpy()
    log_probs = chunk.log_probs.numpy()
    numbers = np.random.default_rng(0).standard_normal((2, SAMPLES)).astype(np.float32)
    critic = values != "none"
    fields = {
        "valid": np.ones((SAMPLES, CHUNK), bool),
        "log_probs": log_probs,
        "values": chunk.values.numpy() if critic else None,
        "versions": np.zeros(SAMPLES, np.int64),
        "proximal_log_probs": log_probs + 0.1,
        "advantages": numbers[0],
        "weights": np.ones(SAMPLES, np.float32),
        "counts": np.ones(SAMPLES, np.float32),
        "returns": numbers[1] if critic else None,
        "value_weights": np.ones(SAMPLES, np.float32) if critic else None,
        "value_counts": np.ones(SAMPLES, np.float32) if critic else None,
    }
    train = TrainSpec(steps=4, lr=1e-4, micro_batch=MICRO_BATCH, value_lr=1e-3)
    trained = TrainedModel(policy, train, name=model, device="cpu", info=ENV, acting=True)
    training = TrainerContext(chunk=CHUNK, trained=trained, algorithm=trains, heartbeat=lambda: None)
    return PolicyGradient(NoSettings(), training), inputs, fields
