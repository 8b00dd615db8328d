"""Policies that act with adapters merged into the weights of their layers (`lora.merge_for_acting`)."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext

import pytest
import torch
from openvla_cases import observation, policy

from sharding import skip_where_torch_cannot_shard
from vla_rl.core.contexts import EngineContext
from vla_rl.core.errors import SpecError, UserError
from vla_rl.core.plan import Cluster, Plan, Slot
from vla_rl.core.randomness import Noise
from vla_rl.core.spec.spec import parse_spec
from vla_rl.plugins.engines.torch.engine import make_engine
from vla_rl.plugins.models.openvla.config import OpenVLAOFTConfig
from vla_rl.runtime.checks.plan import check_plan
from vla_rl.runtime.checks.run import check_spec
from vla_rl.runtime.start import run
from vla_rl.testing import check_engine
from vla_rl.testing.synthetic import env_info
from vla_rl.toolkit.models.acting.compilation import CompiledBlocks
from vla_rl.toolkit.models.acting.cuda_graphs import CapturedFunction
from vla_rl.toolkit.models.adapters import (
    LoRAConfig,
    MergedAdapters,
    MergedState,
    adapted_layers,
    before_training,
    has_adapters,
    merge_state,
)
from vla_rl.toolkit.no_settings import NoSettings

ROWS = 16
MOST_KL = 1e-4
"""Nats a token."""


def adapted(dtype="bfloat16", **changes):
    """A tiny OFT whose adapters do something: B starts at 0."""
    model = policy(dtype=dtype, lora=LoRAConfig(rank=4), **changes)
    draws = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.module.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=draws))
    return model


def noise():
    """The same numbers each time."""
    return Noise(0, "test", range(ROWS), [0] * ROWS, [0] * ROWS)


def bits(model):
    return {name: parameter.detach().clone() for name, parameter in model.module.named_parameters()}


def are_equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


class StrictRecorder:
    """Refuses to repeat a decision while adapters are in another state, in which a CUDA graph would compute wrongly."""

    def __init__(self, state):
        self.state = state

    def record_function(self, run):
        recorded = self.state()
        run()

        def replay():
            assert self.state() == recorded
            run()

        return replay


def engine(model, mode, role):
    config = OpenVLAOFTConfig(preset="fast", lora=LoRAConfig(rank=4, merge_for_acting=mode))
    return make_engine(
        NoSettings(),
        EngineContext(env=env_info(), role=role, model_config=config, make_model=lambda: model),
    )


def kl(model, obs, chunk):
    with torch.no_grad():
        log_ratio = model.chunk_log_probs(obs, chunk).log_probs.double() - chunk.log_probs.double()
    return float((torch.expm1(log_ratio) - log_ratio).mean())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("mode", ["in_place", "copy"])
def test_the_bits_of_the_base_are_restored(mode, dtype):
    model = adapted(dtype)
    before = bits(model)
    adapters = MergedAdapters(model.module, mode)
    for _ in range(2):  # the second time from memory that the first one used
        adapters.merge_weights()
        adapters.merge_weights()
        changed = [name for name, weight in bits(model).items() if not torch.equal(weight, before[name])]
        assert changed and all(name.endswith("base_layer.weight") for name in changed)
        adapters.restore_weights()
        adapters.restore_weights()
        assert are_equal(bits(model), before)


@pytest.mark.parametrize("mode", ["in_place", "copy"])
@pytest.mark.parametrize("autocast", [True, False])
def test_recomputed_log_probs_are_near_those_of_acting(mode, autocast):
    model, obs = adapted(autocast=autocast), observation(ROWS)
    acting = engine(model, mode, "both")
    acting.wake_up()
    chunk = acting.act(obs, noise(), False)
    acting.sleep()
    assert 0 < kl(model, obs, chunk) <= MOST_KL
    plain = engine(model, "off", "both").act(obs, noise(), False)
    assert kl(model, obs, plain) == 0


def test_in_place_and_copy_act_alike():
    model, obs = adapted(), observation(ROWS)
    chunks = []
    for mode in ("in_place", "copy"):
        acting = engine(model, mode, "both")
        acting.wake_up()
        chunks.append(acting.act(obs, noise(), False))
        acting.sleep()
    assert torch.equal(chunks[0].log_probs, chunks[1].log_probs)


@pytest.mark.parametrize("mode", ["in_place", "copy"])
def test_a_policy_alone_stays_merged_and_merges_what_it_loads(mode):
    """Two loads, of which the second brings back the first weights: acting is that of the start, to the last bit."""
    model, obs = adapted(), observation(ROWS)
    learner = adapted()
    acting = engine(model, mode, "act")
    first = [(name, weight.clone()) for name, weight in learner.weights()]
    chunk = acting.act(obs, noise(), False)
    assert 0 < kl(learner, obs, chunk) <= MOST_KL, "merged from the start"
    acting.wake_up()
    acting.sleep()
    assert torch.equal(acting.act(obs, noise(), False).log_probs, chunk.log_probs), "and after a rollout"
    learner.load_weights([(name, weight + 0.01) for name, weight in first])
    acting.load(learner.weights())
    moved = acting.act(obs, noise(), False)
    assert not torch.equal(moved.log_probs, chunk.log_probs)
    assert 0 < kl(learner, obs, moved) <= MOST_KL
    acting.load(first)
    assert torch.equal(acting.act(obs, noise(), False).log_probs, chunk.log_probs)


def test_it_is_merged_while_any_rollout_runs():
    model = adapted()
    before = bits(model)
    acting = engine(model, "in_place", "both")
    assert are_equal(bits(model), before)
    acting.wake_up()
    acting.wake_up()  # a rollout in the world model in addition to the real one
    acting.sleep()
    assert not are_equal(bits(model), before)
    acting.sleep()
    assert are_equal(bits(model), before)


def test_weights_loaded_while_awake_are_merged():
    """Tickets that ask for an older version, in the process of a learner."""
    model, obs = adapted(), observation(ROWS)
    before = bits(model)
    acting = engine(model, "in_place", "both")
    first = [(name, weight.clone()) for name, weight in model.weights()]
    acting.wake_up()
    chunk = acting.act(obs, noise(), False)
    acting.load([(name, weight + 0.01) for name, weight in first])
    assert not torch.equal(acting.act(obs, noise(), False).log_probs, chunk.log_probs)
    acting.load(first)
    assert torch.equal(acting.act(obs, noise(), False).log_probs, chunk.log_probs)
    acting.sleep()
    assert are_equal(bits(model), before)


def test_the_engine_keeps_to_its_contract_when_merged():
    from openvla_cases import CHUNK, ENV

    from vla_rl.plugins.engines.torch import plugin

    config = OpenVLAOFTConfig(preset="fast", lora=LoRAConfig(rank=4, merge_for_acting="in_place"))
    check_engine(plugin, model=adapted("float32"), model_config=config, env=ENV, chunk=CHUNK, atol=1e-4)


def test_captured_decisions_belong_to_merged_or_to_separate_adapters():
    """A decision before the first rollout is captured with separate adapters, and must not be repeated while they are
    merged, when it would add them twice."""
    model, obs = adapted(), observation(ROWS)
    plain = engine(model, "off", "both").act(obs, noise(), False)
    acting = engine(model, "in_place", "both")
    acting.wake_up()
    merged = acting.act(obs, noise(), False)
    acting.sleep()
    state = merge_state(model.module)
    model.decide = CapturedFunction(model.decide, StrictRecorder(state), state=state)
    for _ in range(2):
        assert torch.equal(acting.act(obs, noise(), False).log_probs, plain.log_probs)
        acting.wake_up()
        assert torch.equal(acting.act(obs, noise(), False).log_probs, merged.log_probs)
        acting.sleep()
    assert model.decide.capture_count == 2


@pytest.mark.parametrize("mode", ["in_place", "copy"])
def test_compiled_layers_see_whether_adapters_are_merged(mode):
    model, obs = adapted("float32"), observation(ROWS)
    plain = engine(model, "off", "both").act(obs, noise(), False)
    acting = engine(model, mode, "both")
    blocks = CompiledBlocks(model.module, model.blocks, regions=model.regions, policy=model, backend="aot_eager")
    for _ in range(2):
        near = acting.act(obs, noise(), False)
        assert torch.allclose(near.log_probs, plain.log_probs, atol=1e-5)
        graphs = blocks.graphs
        acting.wake_up()
        merged = acting.act(obs, noise(), False)
        acting.sleep()
        assert torch.allclose(merged.log_probs, plain.log_probs, atol=1e-4)
        assert not torch.equal(merged.log_probs, near.log_probs)
    assert 0 < graphs == blocks.graphs and blocks.failure is None, "the second round compiles nothing"


@pytest.mark.parametrize("mode", ["in_place", "copy"])
def test_what_is_saved_is_the_policy_that_acted(mode, tmp_path):
    """In bfloat16 an update that is rounded before the sum would give other weights in one of four cases. A float32
    checkpoint holds the sum itself."""
    model = adapted()
    saved = MergedState(model.module.vla)
    wide = MergedState(model.module.vla, torch.float32)
    of_base = saved.tensors
    model.save(tmp_path / "saved")
    acting = MergedAdapters(model.module, mode)
    acting.merge_weights()
    merged = {n.replace(".base_layer.", "."): p.detach().clone() for n, p in model.module.vla.named_parameters()}
    acting.restore_weights()
    names = [name for name in of_base if not torch.equal(of_base[name], merged[name])]
    assert names and all(merged[name].dtype == torch.bfloat16 for name in names)
    for name in names:
        assert torch.equal(saved.read_tensor(name), merged[name])
        assert torch.equal(wide.read_tensor(name).bfloat16(), merged[name])
        assert not torch.equal(wide.read_tensor(name), merged[name].float()), "the sum, before it is rounded"
    loaded = policy(checkpoint=str(tmp_path / "saved"), dtype="bfloat16").module.vla
    for name in names:
        assert torch.equal(loaded.get_parameter(name.removeprefix("base_model.model.")), merged[name])


def test_the_reference_policy_leaves_adapters_as_they_were():
    """One layer has frozen adapters, in another they are off."""
    model = adapted()
    layers = adapted_layers(model.module)
    layers[0].requires_grad_(False)
    layers[1].enable_adapters(False)
    before = {name: p.requires_grad for name, p in model.module.named_parameters()}
    states = [layer.disable_adapters for layer in layers]
    with before_training(model.module):
        assert all(layer.disable_adapters for layer in layers)
    assert {name: p.requires_grad for name, p in model.module.named_parameters()} == before
    assert [layer.disable_adapters for layer in layers] == states and states[:3] == [False, True, False]


def test_a_network_without_adapters_cannot_merge_them():
    model = policy()
    assert not has_adapters(model.module) and has_adapters(adapted().module)
    with pytest.raises(UserError, match=r"lora.merge_for_acting: no layer of the network has an adapter"):
        MergedAdapters(model.module, "in_place")


def test_the_reference_policy_is_refused_while_merged():
    model = adapted()
    adapters = MergedAdapters(model.module, "in_place")
    adapters.merge_weights()
    with pytest.raises(RuntimeError, match="while adapters are merged"), before_training(model.module):
        pass
    adapters.restore_weights()
    with before_training(model.module):
        pass


# ---------------------------------------------------------------------------------------------------------- whole runs


def spec(merge, **changes):
    return {
        "name": "merged",
        "seed": 3,
        "model": {
            "type": "openvla_oft",
            "preset": "fast",
            "dtype": "bfloat16",
            "lora": {"rank": 4, "merge_for_acting": merge},
        },
        "plugins": ["vla_rl.testing.scripted"],
        "env": {"type": "scripted", "num_envs": 4},
        "rollout": {"chunk": 4, "episodes": 8, "group_size": 4, "max_steps": 8},
        "algorithm": {"type": "ppo"},
        "runtime": {"backend": "local"},
        "train": {"steps": 3, "lr": 1e-2, "micro_batch": 8, "checkpoint_every": 1, "keep_checkpoints": 3, "epochs": 2},
        "eval": {"before": False, "episodes_per_task": 1},
        "hooks": [{"type": "jsonl"}],
        **changes,
    }


def steps(folder):
    """Metrics of the training steps, without times."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    training = [line for line in lines if "loss/policy" in line]
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "throughput/"))} for line in training]


def trained(merge, folder, **changes):
    run(parse_spec(spec(merge, **changes)), folder)
    return steps(folder)


@pytest.fixture(scope="module")
def in_place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("merged") / "run"
    trained("in_place", folder)
    return folder


def test_a_run_reports_how_far_acting_and_learning_are_apart(in_place, tmp_path):
    """Adapters start at 0, so that the first step's merged weights are those of the base."""
    first, *later = [line["policy/recompute_kl"] for line in steps(in_place)]
    assert first == 0 and len(later) == 2 and all(0 < kl <= MOST_KL for kl in later)
    assert trained("copy", tmp_path / "copy") == steps(in_place)
    plain = trained("off", tmp_path / "off")
    assert all("policy/recompute_kl" not in line for line in plain)
    assert plain[0] == {k: v for k, v in steps(in_place)[0].items() if k != "policy/recompute_kl"}


def test_adapters_are_merged_with_weights_in_fewer_bits(tmp_path):
    """The merged set is in full precision, so it differs from learning by rounding, as it does without nf4."""
    stored = {**spec("copy")["model"], "frozen_weights": "nf4"}
    first, *later = [line["policy/recompute_kl"] for line in trained("copy", tmp_path / "copy", model=stored)]
    assert first == 0 and len(later) == 2 and all(0 < kl <= MOST_KL for kl in later)
    separate = {**spec("off")["model"], "frozen_weights": "nf4"}
    plain = trained("off", tmp_path / "off", model=separate)
    assert (
        "policy/recompute_kl" not in plain[0] and plain[0]["loss/policy"] != steps(tmp_path / "copy")[1]["loss/policy"]
    )


def test_a_run_resumes_to_the_same_figures(in_place, tmp_path):
    copy = shutil.copytree(in_place, tmp_path / "copy", symlinks=True)
    (copy / "results.json").unlink()
    (copy / "checkpoints" / "last").unlink()
    for step in (2, 3):
        shutil.rmtree(copy / "checkpoints" / f"step_{step:06d}")
    run(parse_spec(spec("in_place")), copy, resume=True)
    assert steps(copy) == steps(in_place)


def test_older_weights_act_merged_too(tmp_path):
    """The log-probs of older weights are not recomputed ones, so only the first step, whose weights are new, counts."""
    changed = {**spec("in_place")["rollout"], "lag": 1}
    lines = trained("in_place", tmp_path / "run", rollout=changed)
    assert [line.get("policy/recompute_kl") for line in lines] == [0, None, None]


def test_learners_shards_cannot_be_merged():
    skip_where_torch_cannot_shard()
    given = spec("in_place", train={"steps": 1, "lr": 1e-3, "micro_batch": 8, "sharding": "full"})
    with pytest.raises(SpecError, match=r"model.lora.merge_for_acting: policies act with the learners' shards"):
        check_spec(parse_spec(given), training=True)
    check_spec(parse_spec({**given, "model": spec("off")["model"]}), training=True)


@pytest.mark.parametrize(
    ("merge", "frozen", "advice"),
    [("copy", "bf16", "use in_place"), ("copy", "int8", "use off"), ("in_place", "bf16", "")],
)
def test_a_second_set_of_weights_does_not_leave_the_device(merge, frozen, advice):
    slots = (Slot(roles=("sim", "policy")), Slot(roles=("learner",)))
    plan = Plan(slots=slots, offload=frozenset({"policy"}))
    message = f"model.lora.merge_for_acting: the second set of weights would stay on the device .*; {advice}, or"
    given = spec(merge)
    given["model"]["frozen_weights"] = frozen
    with pytest.raises(SpecError, match=message) if advice else nullcontext():
        check_plan(parse_spec(given), plan, Cluster(cpus=8, gpus=2, memory=2**36))


def test_there_is_nothing_to_merge_without_adapters():
    with pytest.raises(SpecError, match="lora: unknown key; it is a key of gr00t, openvla, openvla_oft"):
        parse_spec(spec("off", model={"type": "film_resnet", "lora": {"merge_for_acting": "copy"}}))
