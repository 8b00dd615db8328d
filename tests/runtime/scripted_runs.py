"""What the tests of the runtime share: a spec of the test doubles, a step of training, and how to read a run."""

from __future__ import annotations

import json
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from vla_rl.core.run.loop import collect_rollout, finish_step, flow_of
from vla_rl.core.run.selection import take_columns
from vla_rl.core.run.state import State
from vla_rl.runtime.comm.backends.own_ray import MODE, TOKEN, read_token_again
from vla_rl.runtime.comm.interfaces import LearnerInterface, PolicyInterface

MEASURED = ("time/", "throughput/")
LOSS_APART, KL_APART = 1e-4, 5e-5
"""How far the losses and divergences of the same updates may be apart where sums are added up in another order: other
ranks, other batch shapes, the kernels of another processor. Adam moves a weight whose gradient is rounding alone as far
as any other, so 1e-8 in a gradient becomes up to 1.1e-5 in what follows (seen with AVX2 and AVX-512). A sample that is
lost or counted twice moves the loss by 8e-3."""


@contextmanager
def one_token() -> Iterator[None]:
    """A Ray that a test starts itself, meanwhile, has the token that this process sends, whatever ran in it before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MODE, "token")
        patch.setenv(TOKEN, secrets.token_hex(32))
        read_token_again()
        yield
    read_token_again()


def scripted_spec(**changes):
    """A spec of the test doubles that learns within seconds; keyword arguments replace or extend its sections."""
    spec = {
        "name": "scripted",
        "seed": 3,
        "plugins": ["vla_rl.testing.scripted", "vla_rl.testing.slot_placement"],
        "model": {"type": "linear"},
        "env": {"type": "scripted", "num_envs": 8},
        "rollout": {"chunk": 2, "episodes": 16, "group_size": 4},
        "algorithm": {"type": "grpo"},
        "runtime": {"backend": "local"},
        "train": {"steps": 4, "lr": 3e-2, "micro_batch": 8, "global_batch": 16, "epochs": 2},
        "hooks": [{"type": "jsonl"}],
    }
    for name, value in changes.items():
        spec[name] = {**spec[name], **value} if isinstance(value, dict) and isinstance(spec.get(name), dict) else value
    return spec


def read_metrics(folder: Path) -> list[dict]:
    """Every line of metrics.jsonl without what a clock measured."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(MEASURED)} for line in lines]


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    """Name -> the weights in the last checkpoint of a run."""
    state = torch.load(folder / "checkpoints" / "last" / "trainer" / "learner.pt", weights_only=True)
    weights: dict[str, torch.Tensor] = state["weights"]
    return weights


def weights_of(runtime) -> dict[str, torch.Tensor]:
    """Name -> the weights that the learners would publish now."""
    fleet = runtime.fleet
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "learner.pt"
        fleet.get_all([learner.call(LearnerInterface.save, None, file, 0) for learner in fleet.learners])
        weights: dict[str, torch.Tensor] = torch.load(file, weights_only=True)["weights"]
    return weights


def play(runtime, step: int):
    """Play the tickets of a step. -> (rollout, metrics)."""
    if not hasattr(runtime, "flow"):
        runtime.flow = flow_of(runtime.spec, State())
    rollout, _, metrics = collect_rollout(runtime, runtime.flow, step)
    return rollout, metrics


def advance(runtime, step: int, keep=None):
    """Play a rollout and train on all of it, or on its columns `keep`. -> (rollout, metrics)."""
    rollout, metrics = play(runtime, step)
    columns = np.arange(rollout.valid.shape[1]) if keep is None else keep
    kept = runtime.samples.prepare(take_columns(rollout, columns), columns)
    metrics |= runtime.learners.train(kept, runtime.algorithm.advantages(kept))
    finish(runtime)
    return rollout, metrics


def finish(runtime, trained: bool = True):
    """The step of the last rollout is over."""
    finish_step(runtime, runtime.fleet.version + 1, trained)
    runtime.flow.finish_step("trained" if trained else "discarded")


def prepared(runtime, rollout):
    """The rollout as it is trained on."""
    return runtime.samples.prepare(rollout, np.arange(rollout.valid.shape[1]))


def heavy_of(runtime, rollout):
    """The heavy part of a rollout's samples in time-major order; one policy has played it, and it is not over."""
    sample_ids = runtime.rollouts.current_batch.sample_ids[rollout.samples.numpy()]
    part = runtime.fleet.get(runtime.fleet.policies[0].call(PolicyInterface.take_samples, np.sort(sample_ids)))
    return part.inputs.take(np.argsort(np.argsort(sample_ids)))


def assert_no_heavy_rows(runtime):
    """Assert that policies hold no samples of finished tickets; one of them has number 0."""
    for policy in runtime.fleet.policies:
        with pytest.raises(KeyError):
            runtime.fleet.get(policy.call(PolicyInterface.take_samples, np.zeros(1, np.int64)))
