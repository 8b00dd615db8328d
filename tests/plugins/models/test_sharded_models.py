"""Every model computes the same when its weights are sharded: `train.sharding: full` with one rank.

FSDP gathers the weights of a block around its `forward`. A block of which something else is called computes with
shards, which is refused by torch with one rank, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from attrs import fields_dict
from model_cases import noise

from sharding import skip_where_torch_cannot_shard
from vla_rl.core.catalogue import OWN_DIST, installed, load, missing_requirements
from vla_rl.core.hookspecs import VLAModel
from vla_rl.core.spec.spec import component
from vla_rl.core.types import Context
from vla_rl.runtime.workers.learner.parallel.fsdp import FullyShardedParallel
from vla_rl.testing import synthetic

NAMES = [name for name, offers in installed("model").items() if any(item.dist == OWN_DIST for item in offers)]
PRESETS = {"openvla": "fast", "openvla_oft": "fast"}
ENV, CHUNK, ROWS = synthetic.env_info(), 2, 3


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    skip_where_torch_cannot_shard()
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def build(name: str) -> VLAModel:
    plugin = load("model", name)
    missing = missing_requirements(OWN_DIST, plugin.extra)
    if missing:
        pytest.skip(f"needs {', '.join(missing)}: pip install 'vla-rl[{plugin.extra}]'")
    preset = {"preset": PRESETS.get(name, "tiny")} if "preset" in fields_dict(plugin.config) else {}
    model: VLAModel = plugin.build(
        component("model", name, **preset).config, Context(env=ENV, chunk=CHUNK, values="chunk")
    )
    return model


@pytest.mark.parametrize("name", NAMES)
def test_a_sharded_model_computes_the_same(name: str, one_rank: None) -> None:
    model, obs = build(name), synthetic.observation(ENV, ROWS)
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
    strategy.prepare(model, ENV)
    computed = strategy.run(loss)
    computed.backward()
    assert torch.equal(computed, expected)
    for parameter, p in model.module.named_parameters():
        if parameter in gradients:
            torch.testing.assert_close(strategy.unsharded(p.grad), gradients[parameter])
