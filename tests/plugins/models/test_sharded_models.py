"""Every model computes the same when its weights are sharded: `train.sharding: full` with one rank.

FSDP gathers the weights of a block around its `forward`. A block of which something else is called computes with
shards, which is refused by torch with one rank, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from model_cases import NAMES, noise, smallest

from fp8 import KINDS
from sharding import skip_where_torch_cannot_shard
from vla_rl.runtime.workers.learner.parallel.fsdp import FullyShardedParallel
from vla_rl.testing import synthetic
from vla_rl.toolkit.models import frozen_weights

ENV, CHUNK, ROWS = synthetic.env_info(), 2, 3


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    skip_where_torch_cannot_shard()
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", NAMES)
def test_a_sharded_model_computes_the_same(name: str, one_rank: None) -> None:
    check_sharded(smallest(name, ENV, CHUNK))


@pytest.mark.parametrize("kind", KINDS)
def test_weights_in_fewer_bits_are_sharded_too(kind: str, one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frozen_weights, "find_fp8_problem", lambda device: None)
    check_sharded(smallest("openvla_oft", ENV, CHUNK, lora={"rank": 2}, frozen_weights=kind))


def check_sharded(model: Any) -> None:
    """Compare loss and gradients with those of the model before it is sharded."""
    obs = synthetic.observation(ENV, ROWS)
    chunk = model.sample_chunk(obs, noise(ROWS), False)

    def loss() -> torch.Tensor:
        scores = model.chunk_log_probs(obs, chunk)
        assert scores.values is not None
        return scores.log_probs.mean() + scores.values.square().mean()

    expected = loss()
    expected.backward()
    gradients = {name: p.grad for name, p in model.module.named_parameters() if p.grad is not None}
    model.module.zero_grad(set_to_none=True)
    strategy = FullyShardedParallel("cpu", 1)
    strategy.prepare_model(model, ENV)
    computed = strategy.run(loss)
    computed.backward()
    assert torch.equal(computed, expected)
    for parameter, p in model.module.named_parameters():
        if parameter in gradients:
            torch.testing.assert_close(strategy.unshard_tensor(p.grad), gradients[parameter])
