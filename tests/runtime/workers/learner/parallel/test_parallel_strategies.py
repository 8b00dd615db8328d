"""However many learners there are, and however they hold the model: one loss trace, one checkpoint format."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
import torch
from learner_group import INFO, DeepModel, Groups
from safetensors.torch import load_file
from scripted_runs import scripted_spec
from torch.distributed.fsdp import FSDPModule

from sharding import skip_where_torch_cannot_shard
from vla_rl.core.errors import SpecError, UserError
from vla_rl.core.manager import wrap
from vla_rl.core.randomness import Noise
from vla_rl.core.spec.spec import parse_spec
from vla_rl.runtime.checks.run import check_spec
from vla_rl.runtime.workers.learner.parallel.fsdp import FullyShardedParallel
from vla_rl.runtime.workers.models import Autocast
from vla_rl.testing import synthetic

CLOSE = {"rtol": 0, "atol": 1e-5}


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "vla_rl.runtime.workers.learner.parallel.fsdp",
            "vla_rl.runtime.workers.learner.learner",
            "vla_rl.testing.linear",
        ]
    )
    pool = ProcessPoolExecutor(4, mp_context=context)
    yield Groups(pool, tmp_path_factory.mktemp("groups"))
    for process in pool._processes.values():  # one that waits for a rank that failed waits for ever
        process.kill()
    pool.shutdown()


def same(got, wanted):
    np.testing.assert_allclose(got["loss"], wanted["loss"], **CLOSE)
    np.testing.assert_allclose(got["norm"], wanted["norm"], **CLOSE)
    for (name, tensor), (other, expected) in zip(got["weights"], wanted["weights"], strict=True):
        assert name == other
        np.testing.assert_allclose(tensor, expected, **CLOSE)


@pytest.mark.parametrize("sharding", ["replicated", "full"])
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_change_no_number(groups, world, sharding):
    alone = groups.run()
    assert np.ptp(alone["loss"]) > 1e-3 and min(alone["norm"]) > 0.3  # it learns, and gradients are clipped
    got = groups.run(world=world, sharding=sharding)
    same(got, alone)
    whole = sum(p.numel() for p in DeepModel().module.parameters())
    if sharding == "full":  # of weights, and both moments
        assert sum(got["held"]) == 3 * whole and max(got["held"]) < 0.7 * 3 * whole
    else:
        assert got["held"] == [3 * whole] * world


@pytest.mark.parametrize("acting", [False, True])
def test_compiled_blocks_of_a_sharded_model_compute_the_same(groups, acting):
    got = groups.run(world=2, sharding="full", compiled=True, acting=acting)
    same(got, groups.run())
    assert got["graphs"], "an error, or nothing was compiled"


def test_a_rank_without_samples_keeps_step_with_the_others(groups):
    same(groups.run(world=2, sharding="full", lopsided=True), groups.run())


@pytest.mark.parametrize(
    ("world", "sharding", "lopsided"),
    [(1, "replicated", False), (2, "replicated", True), (2, "full", False), (2, "full", True)],
)
def test_parts_of_a_step_are_the_whole(groups, world, sharding, lopsided):
    """Losses of policy and critic have separate divisors, known at the end."""
    whole = groups.run(global_batch=None)
    same(groups.run(global_batch=None, parts=3, world=world, sharding=sharding, lopsided=lopsided), whole)


def test_policies_act_with_gathered_weights(groups):
    """Every rank by itself, as often as it likes, between two updates."""
    got = groups.run(world=2, sharding="full", acting=True)
    same(got, groups.run())
    wanted = groups.run(acting=True)["acting"][0]
    for chunk in got["acting"]:
        torch.testing.assert_close(chunk.log_probs, wanted.log_probs, **CLOSE)


@pytest.mark.parametrize("sharding", ["replicated", "full"])
@pytest.mark.parametrize("acting", [False, True])
def test_ranks_score_together(groups, sharding, acting):
    """Values, those of final observations, and log-probs, of unequal shares."""
    alone = groups.run(scoring=True)
    got = groups.run(world=2, sharding=sharding, acting=acting, scoring=True)
    same(got, alone)
    sizes = {name: len(array) for name, array in alone["scored"].items()}
    assert sizes == {"values": 10, "next_values": 5, "log_probs": 10}
    for name, wanted in alone["scored"].items():
        np.testing.assert_allclose(got["scored"][name], wanted, **CLOSE)
        assert np.ptp(wanted) > 1e-3


@pytest.mark.parametrize("sharding", ["replicated", "full"])
def test_imitation_is_the_same_too(groups, sharding):
    same(groups.run(world=4, sharding=sharding, imitation=5, steps=0), groups.run(imitation=5, steps=0))


@pytest.mark.parametrize("sharding", ["replicated", "full"])
def test_a_run_saved_by_two_continues_with_one_or_four(groups, sharding, tmp_path):
    whole = groups.run()
    groups.run(world=2, sharding=sharding, steps=2, save=tmp_path)
    state = torch.load(tmp_path / "learner.pt", weights_only=True)
    assert {name: p.shape for name, p in DeepModel().module.named_parameters()} == {
        name: tensor.shape for name, tensor in state["weights"].items()
    }
    saved = load_file(tmp_path / "model" / "model.safetensors")
    assert saved.keys() == state["weights"].keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in state["weights"].items())
    for world, held in ((1, "full"), (4, "replicated"), (4, "full")):
        resumed = groups.run(world=world, sharding=held, load=tmp_path / "learner.pt")
        same(
            resumed | {"loss": [*whole["loss"][:2], *resumed["loss"]], "norm": [*whole["norm"][:2], *resumed["norm"]]},
            whole,
        )


def test_bf16_computes_coarsely_and_keeps_fine_weights(groups):
    fine, coarse = groups.run(), groups.run(precision="bf16")
    difference = np.abs(coarse["loss"] - fine["loss"]).max()
    assert 1e-6 < difference < 2e-2
    assert coarse["kinds"] == {torch.float32}
    np.testing.assert_allclose(
        groups.run(precision="bf16", world=2, sharding="full")["loss"], coarse["loss"], atol=2e-2
    )


@pytest.mark.parametrize("sharding", ["replicated", "full"])
def test_bfloat16_weights_are_trained_in_float32(groups, sharding):
    """The same masters, moments and published weights, whatever holds them; rounding differs by the order of sums."""
    alone = groups.run(dtype="bfloat16")
    got = groups.run(dtype="bfloat16", world=2, sharding=sharding, acting=True)
    for result in (alone, got):
        assert result["kinds"] == {torch.float32} and result["published"] == {torch.bfloat16}
    np.testing.assert_allclose(got["loss"], alone["loss"], atol=2e-2)
    for (name, tensor), (other, expected) in zip(got["weights"], alone["weights"], strict=True):
        assert name == other
        np.testing.assert_allclose(tensor, expected, rtol=2**-6, atol=2e-3)
    np.testing.assert_allclose(got["changed"], alone["changed"], atol=0.05)
    assert min(alone["changed"]) > 0.5


@pytest.mark.parametrize("sharding", ["replicated", "full"])
def test_bfloat16_masters_are_what_is_saved_and_resumed(groups, sharding, tmp_path):
    """Steps that bfloat16 cannot hold add up: with a rate of 1e-5 hardly a published weight changes, every master
    does, and a resumed run continues with the same numbers."""
    given = {"dtype": "bfloat16", "lr": 1e-5, "world": 2, "sharding": sharding}
    whole = groups.run(**given, save=tmp_path / "whole")
    groups.run(**given, steps=2, save=tmp_path / "half")
    resumed = groups.run(**given, load=tmp_path / "half" / "learner.pt", save=tmp_path / "resumed")
    assert resumed["loss"].tolist() == whole["loss"][2:].tolist()
    half, end, again = (
        torch.load(tmp_path / name / "learner.pt", weights_only=True) for name in ("half", "whole", "resumed")
    )
    trained = [name for name in end["weights"] if not name.startswith("unused")]
    for name in trained:
        assert end["weights"][name].dtype == torch.float32
        assert torch.equal(end["weights"][name], again["weights"][name])
        assert not torch.equal(end["weights"][name], half["weights"][name])
        assert not torch.equal(end["weights"][name], end["weights"][name].bfloat16().float())
    saved = load_file(tmp_path / "whole" / "model" / "model.safetensors")
    for name in end["weights"]:
        assert torch.equal(saved[name], end["weights"][name].bfloat16())
    assert {saved[f"blocks.{i}.shift"].dtype for i in range(3)} == {torch.float32}
    assert 0 < max(whole["changed"]) < 0.05


def test_bf16_scores_what_it_sampled():
    """Acting and learning compute alike, so that the first ratio of PPO is 1."""
    model = wrap("model", DeepModel(), "deep", [("precision", Autocast("cpu"))])
    obs = synthetic.observation(INFO, 4)
    chunk = model.sample_chunk(obs, Noise(0, "test", range(4), [0] * 4, [0] * 4), False)
    scores = model.chunk_log_probs(obs, chunk)
    assert torch.equal(scores.log_probs, chunk.log_probs) and torch.equal(scores.values, chunk.values)
    assert torch.equal(model.values(obs), chunk.values)
    exact = DeepModel().chunk_log_probs(obs, chunk).log_probs
    assert not torch.allclose(scores.log_probs, exact, atol=1e-5)
    assert {t.dtype for t in (scores.log_probs, scores.entropy, scores.values)} == {torch.float32}


def test_a_run_in_bf16(train, tmp_path):
    """With one pass over a rollout every ratio is 1, which only equal numerics in acting and learning give."""
    _, metrics = train(train={"precision": "bf16", "epochs": 1, "global_batch": None, "steps": 2})
    kl = [line["policy/approx_kl"] for line in metrics if "policy/approx_kl" in line]
    assert len(kl) == 2 and max(map(abs, kl)) < 1e-12
    state = torch.load(tmp_path / "run" / "checkpoints" / "last" / "trainer" / "learner.pt", weights_only=True)
    assert {tensor.dtype for tensor in state["weights"].values()} == {torch.float32}


def test_a_bug_in_a_loss_is_not_taken_for_a_loss_that_is_not_offered():
    skip_where_torch_cannot_shard()

    class Buggy(DeepModel):
        def imitation_loss(self, obs, actions):
            return len(None)

    with pytest.raises(TypeError, match="NoneType"):
        FullyShardedParallel("cpu", 2).prepare_model(Buggy(), INFO)


def test_a_torch_that_cannot_shard_is_named(monkeypatch):
    """Torch 2.9 to 2.12 do not reduce gradients that only some ranks have."""
    monkeypatch.delattr(FSDPModule, "set_reduce_scatter_unused_params", raising=False)
    text = r"train.sharding: full needs torch 2.13 or newer.* is installed; use train.sharding: replicated"
    given = scripted_spec(
        placement={"type": "collocated", "workers": 2}, runtime={"backend": "ray"}, train={"sharding": "full"}
    )
    with pytest.raises(SpecError, match=text):
        check_spec(parse_spec(given), training=True)
    check_spec(parse_spec({**given, "train": {**given["train"], "sharding": "replicated"}}), training=True)
    with pytest.raises(UserError, match=text):
        FullyShardedParallel("cpu", 2).shard_module(DeepModel().module, [])


def test_weights_of_several_types_in_a_block_are_refused():
    skip_where_torch_cannot_shard()
    module = DeepModel().module
    module.blocks[1][0].bias.data = module.blocks[1][0].bias.data.bfloat16()
    with pytest.raises(UserError, match=r"has torch.bfloat16, torch.float32 in 'blocks.1'; set train.sharding: repl"):
        FullyShardedParallel("cpu", 2).shard_module(module, module.blocks)
