"""Weights between processes: bits, whole or not at all, and who is to blame when they do not come."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import slow_model
import torch
from scripted_runs import heavy_of, play, scripted_spec

from vla_rl.core.errors import PluginError
from vla_rl.core.manager import hookimpl, wrap
from vla_rl.core.spec.spec import parse_spec
from vla_rl.core.types import Chunk
from vla_rl.runtime.comm.backend import CallHung
from vla_rl.runtime.comm.interfaces import LearnerInterface
from vla_rl.runtime.comm.weight_sync import ALIGNED, WeightPublisher, receive, swap_in
from vla_rl.runtime.messages.learning import ImitationStep
from vla_rl.runtime.start import start
from vla_rl.testing import synthetic
from vla_rl.testing.linear import LinearModel

INFO = synthetic.env_info()


def pair_of_models(kind=torch.float32):
    """Two that differ in every weight."""
    sender, receiver = (LinearModel(INFO, 2, seed=seed) for seed in (1, 2))
    for model in (sender, receiver):
        model.module.to(kind)
    return sender, receiver


def load(model, published):
    swap_in(model, receive(model, published), published)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
def test_bits_arrive_as_they_were(kind):
    sender, receiver = pair_of_models(kind)
    published = WeightPublisher().publish(sender, 1, True)
    size = sum(p.numel() for p in sender.module.parameters()) * kind.itemsize
    assert size <= len(published.memory) < size + 2 * ALIGNED
    load(receiver, published)
    for (name, tensor), (other, wanted) in zip(receiver.weights(), sender.weights(), strict=True):
        assert name == other and tensor.dtype == kind and torch.equal(tensor, wanted)


def test_frozen_weights_are_not_sent():
    sender, receiver = pair_of_models()
    for model in (sender, receiver):
        model.module.policy.weight.requires_grad_(False)
    published = WeightPublisher().publish(sender, 1, True)
    assert [tensor.name for tensor in published.tensors] == ["policy.bias"]
    load(receiver, published)
    assert torch.equal(receiver.module.policy.bias, sender.module.policy.bias)
    assert not torch.equal(receiver.module.policy.weight, sender.module.policy.weight)


def test_a_version_that_does_not_fit_changes_nothing():
    sender, receiver = pair_of_models()
    wide = LinearModel(INFO, 3)
    before = [tensor.clone() for _, tensor in receiver.weights()]
    with pytest.raises(PluginError, match=r"'policy.bias' of version 7 .* sent \[72\] torch.float32, .* holds \[48\]"):
        load(receiver, WeightPublisher().publish(wide, 7, False))
    sender.module.policy.bias.requires_grad_(False)
    with pytest.raises(PluginError, match=r"'policy.bias' of version 8 does not fit: the learner sent nothing"):
        load(receiver, WeightPublisher().publish(sender, 8, False))
    assert all(torch.equal(a, b) for a, (_, b) in zip(before, receiver.weights(), strict=True))


class LosesTheBias:
    @hookimpl(wraps="model")
    def load_weights(self, pairs):
        done = yield
        next(tensor for name, tensor in pairs if name == "policy.bias")
        self.model.module.policy.bias.data[3] += 1
        return done


def test_checksums_name_the_parameter_that_differs():
    sender, receiver = pair_of_models()
    wrapper = LosesTheBias()
    wrapper.model = receiver
    seated = wrap("model", receiver, "linear", [("loses", wrapper)])
    load(seated, WeightPublisher().publish(sender, 4, False))
    with pytest.raises(PluginError, match=r"'policy.bias' of version 4 .* 1 of its 48 numbers differ .*check_weights"):
        load(seated, WeightPublisher().publish(sender, 4, True))


@pytest.fixture(scope="module")
def stop(tmp_path_factory):
    return tmp_path_factory.mktemp("slow") / "stop"


@pytest.fixture(scope="module")
def slow(stop):
    """A run with two learners that share the model out, and a policy in a process of its own."""
    made = start(
        parse_spec(
            scripted_spec(
                plugins=[
                    "vla_rl.testing.scripted",
                    "vla_rl.testing.slot_placement",
                    str(Path(slow_model.__file__)),
                ],
                model={"type": "slow", "stop": str(stop)},
                env={"length": 10**6, "max_steps": 160, "latency_s": 0.03},
                rollout={"episodes": 8},
                placement={"type": "slots", "learner": 2},
                runtime={"backend": "ray", "check_weights": True},
                train={"sharding": "full"},
            )
        )
    )
    yield made
    made.close()


def learn(runtime, method, *arguments):
    """Call all learners. -> their results, by rank."""
    return runtime.fleet.get_all([learner.call(method, *arguments) for learner in runtime.fleet.learners])


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_nothing_acts_with_half_a_version(slow):
    """While a rollout goes on, one version after the other is published, slowly. Every chunk has the log-probs of the
    version that it says it is of."""
    obs = synthetic.observation(slow.info, 8)
    actions = np.ones((8, 2, 2), np.float32)
    learn(slow, LearnerInterface.set_demonstrations, (obs, actions))
    step = ImitationStep(indices=np.arange(4), total=8, most=4, lr=0.3)
    weights = {0: learn(slow, LearnerInterface.weights, False)[0]}
    played = {}
    playing = threading.Thread(target=lambda: played.update(zip("rm", play(slow, 1), strict=True)))
    playing.start()
    while playing.is_alive():
        learn(slow, LearnerInterface.behaviour_cloning_update, [step])
        weights[slow.version + 1] = learn(slow, LearnerInterface.weights, False)[0]
        slow.version += 1
        slow.fleet.get_all(slow.fleet.publish(slow.version, True))
    rollout = played["r"]
    versions = rollout.versions[rollout.samples]
    assert len(versions.unique()) > 3
    heavy = heavy_of(slow, rollout)
    recorded = rollout.log_probs[rollout.samples]
    model = LinearModel(slow.info, 2, seed=3)
    for version in versions.unique().tolist():
        at = np.flatnonzero((versions == version).numpy())
        sampled = heavy.take(at)
        chunk = Chunk(actions=sampled.actions, log_probs=None, extras=sampled.extras)

        def difference(version: int, sampled=sampled, chunk=chunk, at=at) -> float:
            load(model, weights[version])
            with torch.no_grad():
                return float((model.chunk_log_probs(sampled.obs, chunk).log_probs - recorded[at]).abs().max())

        assert difference(version) < 1e-5
        assert min(difference(other) for other in weights if other != version) > 1e-3


@pytest.mark.ray
def test_a_policy_that_does_not_take_weights_in_is_named(slow, stop):
    slow.backend.deadline = 2.0
    stop.touch()
    with pytest.raises(CallHung, match=r"policy worker 1 \(model 'slow'\): load has not returned for .* 2 s"):
        slow.publish()
    stop.unlink()
