"""Weights of a run: a policy acts with a whole version or with none, and who is to blame when they do not come."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import slow_model
import torch
from scripted_runs import heavy_of, play, scripted_spec, weights_of
from transfer_ends import CPU, layout_of, pass_on, stored

from sharding import skip_where_torch_cannot_shard
from vla_rl.core.errors import PluginError, WorkerDied
from vla_rl.core.manager import hookimpl, wrap
from vla_rl.core.spec.spec import parse_spec
from vla_rl.core.trainers import ImitationStep
from vla_rl.core.types import Chunk
from vla_rl.plugins.engines.torch.engine import TorchEngine
from vla_rl.runtime.comm.backend import CallHung
from vla_rl.runtime.comm.interfaces import LearnerInterface
from vla_rl.runtime.comm.weight_transfer.connect import open_receiver, open_sender
from vla_rl.runtime.messages.requests import PolicyMode
from vla_rl.runtime.messages.weights import verify_checksums
from vla_rl.runtime.start import start
from vla_rl.runtime.workers.policy.policy_worker import PolicyWorker
from vla_rl.testing import synthetic
from vla_rl.testing.linear import LinearModel

INFO = synthetic.env_info()


def pair_of_models(kind=torch.float32):
    """Two that differ in every weight."""
    sender, receiver = (LinearModel(INFO, 2, seed=seed) for seed in (1, 2))
    for model in (sender, receiver):
        model.module.to(kind)
    return sender, receiver


def send(sender, receiver):
    """-> checksums of a version that went from one model to another."""
    transfer = stored(layout_of(sender.weights()))
    transfer.layout.check_layout(receiver.weights())
    pairs, checksums = pass_on(
        open_sender(transfer, CPU, None), open_receiver(transfer, 0, CPU), sender.weights(), check=True
    )
    receiver.load_weights(pairs)
    return checksums


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
def test_bits_arrive_as_they_were(kind):
    sender, receiver = pair_of_models(kind)
    verify_checksums(receiver.weights(), send(sender, receiver), 1)
    for (name, tensor), (other, wanted) in zip(receiver.weights(), sender.weights(), strict=True):
        assert name == other and tensor.dtype == kind and torch.equal(tensor, wanted)


def test_frozen_weights_are_not_sent():
    sender, receiver = pair_of_models()
    for model in (sender, receiver):
        model.module.policy.weight.requires_grad_(False)
    assert list(send(sender, receiver)) == ["policy.bias"]
    assert torch.equal(receiver.module.policy.bias, sender.module.policy.bias)
    assert not torch.equal(receiver.module.policy.weight, sender.module.policy.weight)


def test_a_policy_that_does_not_fit_is_refused_at_the_start():
    policy = PolicyWorker(TorchEngine(LinearModel(INFO, 2)), name="linear", seed=0)
    with pytest.raises(PluginError, match=r"'policy.bias' .* sends \[72\] torch.float32, .* holds \[48\]"):
        policy.connect_learner(stored(layout_of(LinearModel(INFO, 3).weights())))


class LosesTheBias:
    @hookimpl(wraps="model")
    def load_weights(self, pairs):
        done = yield
        self.model.module.policy.bias.data[3] += 1
        return done


def test_checksums_name_the_parameter_that_differs():
    sender, receiver = pair_of_models()
    wrapper = LosesTheBias()
    wrapper.model = receiver
    checksums = send(sender, wrap("model", receiver, "linear", [("loses", wrapper)]))
    with pytest.raises(PluginError, match=r"'policy.bias' of version 4 is not what the learner sent .*check_weights"):
        verify_checksums(receiver.weights(), checksums, 4)


class BreaksOff(LinearModel):
    def load_weights(self, pairs):
        super().load_weights([next(pairs)])
        raise WorkerDied("the connection broke")


def test_a_policy_with_half_a_version_does_not_act():
    """The rollout may continue in another thread until the driver ends it."""
    sender, _ = pair_of_models()
    policy = PolicyWorker(TorchEngine(BreaksOff(INFO, 2)), name="linear", seed=0)
    transfer = stored(layout_of(sender.weights()))
    policy.connect_learner(transfer)
    memory, _ = open_sender(transfer, CPU, None).send_version(sender.weights(), False)
    with pytest.raises(WorkerDied, match="^the connection broke"):
        policy.load(7, memory)
    assert policy.version == 0
    with pytest.raises(WorkerDied, match="version 7 of the weights was loaded in part: the connection broke"):
        policy.act(PolicyMode(purpose="action", greedy=False, keep=True), ())


@pytest.fixture(scope="module")
def stop(tmp_path_factory):
    return tmp_path_factory.mktemp("slow") / "stop"


@pytest.fixture(scope="module", params=["host", "nccl"])
def slow(stop, request):
    """A run with two learners that share the model out, and a policy in a separate process."""
    skip_where_torch_cannot_shard()
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
                placement={"type": "slots", "learner": 2, "weight_transfer": request.param},
                runtime={"backend": "ray", "check_weights": True},
                train={"sharding": "full"},
            )
        )
    )
    yield made
    made.workers.close()


def learn(runtime, method, *arguments):
    """Call all learners. -> their results, by rank."""
    return runtime.fleet.get_all([learner.call(method, *arguments) for learner in runtime.fleet.learners])


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_nothing_acts_with_half_a_version(slow):
    """During a rollout, one version after the other is published, slowly. Every chunk has the log-probs of the
    version that it says it is of."""
    obs = synthetic.observation(slow.info, 8)
    actions = np.ones((8, 2, 2), np.float32)
    learn(slow, LearnerInterface.set_demonstrations, (obs, actions))
    step = ImitationStep(number=1, first=0, indices=np.arange(4), total=8, most=4, lr=0.3)
    weights = {0: weights_of(slow)}
    played = {}
    playing = threading.Thread(target=lambda: played.update(zip("rm", play(slow, 1), strict=True)))
    playing.start()
    while playing.is_alive():
        learn(slow, LearnerInterface.behaviour_cloning_update, [step])
        newest = len(weights)
        weights[newest] = weights_of(slow)
        slow.fleet.get_all(slow.fleet.publish_weights(newest, True))
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
            model.load_weights(weights[version].items())
            with torch.no_grad():
                return float((model.chunk_log_probs(sampled.obs, chunk).log_probs - recorded[at]).abs().max())

        assert difference(version) < 1e-5
        assert min(difference(other) for other in weights if other != version) > 1e-4


@pytest.mark.ray
def test_a_policy_that_does_not_take_weights_in_is_named(slow, stop):
    slow.backend.deadline = 2.0
    stop.touch()
    with pytest.raises(CallHung, match=r"policy worker 1 \(model 'slow'\): load has not returned for .* 2 s"):
        slow.learners.publish(0)
    stop.unlink()
