"""Engines with one mistake each, which `check_engine` finds."""

from __future__ import annotations

import copy

import attrs
import numpy as np
import pytest
import torch

from vla_rl.core.randomness import Noise
from vla_rl.core.types import to_numpy
from vla_rl.plugins.engines.torch.engine import TorchEngine
from vla_rl.testing import CheckFailed, LinearModel, check_engine
from vla_rl.testing.synthetic import env_info

INFO = env_info()
MUTANTS: dict[type[TorchEngine], str] = {}


def found_by(text):
    """Register a mutant, and what of a finding names its mistake."""

    def register(mutant):
        MUTANTS[mutant] = text
        return mutant

    return register


def check(mutant):
    model = LinearModel(INFO, 2, values="chunk")
    check_engine(mutant(model), model=model, env=INFO)


class Apart(TorchEngine):
    """An engine with its own weights, as one in another process has; it keeps to the contract."""

    def __init__(self, model):
        super().__init__(copy.deepcopy(model))

    def load(self, pairs):
        self.model.load_weights(pairs)


@found_by("greedy chunks as likely as the model's")
class NeverGreedy(Apart):
    def act(self, obs, noise, greedy):
        return super().act(obs, noise, False)


@found_by("sampled actions that differ from greedy ones")
class AlwaysGreedy(Apart):
    def act(self, obs, noise, greedy):
        return super().act(obs, noise, True)


@found_by("a row's chunk wherever it stands")
class NoiseOfItsOwn(Apart):
    def act(self, obs, noise, greedy):
        rows = list(range(len(obs)))
        return super().act(obs, Noise(7, "own", rows, [0] * len(rows), [0] * len(rows)), greedy)


@found_by("load: expected log_probs equal to those of the model")
class KeepsReferences(Apart):
    def load(self, pairs):
        parameters = dict(self.model.module.named_parameters())
        for name, tensor in pairs:
            parameters[name].data = torch.as_tensor(tensor)


@found_by("load: expected other log_probs with other weights")
class LoadsNothing(Apart):
    def load(self, pairs):
        for _ in pairs:
            pass


@found_by("load: expected other log_probs with other weights")
class ReadsPairsTwice(Apart):
    def load(self, pairs):
        known = {name for name, _ in self.model.weights()}
        if {name for name, _ in pairs} <= known:
            super().load(pairs)


@found_by("values (load): expected the model's values")
class SkipsTheLastTensor(Apart):
    def load(self, pairs):
        super().load(list(pairs)[:-1])


@found_by("the same chunk as before `sleep`")
class SleepsForEver(Apart):
    def sleep(self):
        with torch.no_grad():
            for p in self.model.module.parameters():
                p.zero_()


@found_by("wake_up after load: expected log_probs")
class WakesUpAsItWas(Apart):
    def __init__(self, model):
        super().__init__(model)
        self.first = copy.deepcopy(self.model.module.state_dict())

    def wake_up(self):
        self.model.module.load_state_dict(self.first)


@found_by("act: expected log_probs equal")
class CachesByInstruction(Apart):
    def __init__(self, model):
        super().__init__(model)
        self.cache = {}

    def act(self, obs, noise, greedy):
        states = np.array(to_numpy(obs.state))
        for row, text in enumerate(obs.instructions):
            states[row] = self.cache.setdefault((row, text), states[row].copy())
        return super().act(attrs.evolve(obs, state=states), noise, greedy)


@found_by("act: expected log_probs equal")
class CertainWhenGreedy(Apart):
    def act(self, obs, noise, greedy):
        chunk = super().act(obs, noise, greedy)
        return attrs.evolve(chunk, log_probs=torch.zeros_like(chunk.log_probs)) if greedy else chunk


@found_by("KeyError: 'tokens'")
class WithoutExtras(Apart):
    def act(self, obs, noise, greedy):
        return attrs.evolve(super().act(obs, noise, greedy), extras={})


@found_by("values (act): expected the model's values")
class ValuesOfTheFirstCall(Apart):
    kept = None

    def values(self, obs):
        if self.kept is None or len(self.kept) != len(obs):
            self.kept = super().values(obs)
        return self.kept


@found_by("close: expected no exception")
class ClosesOnce(Apart):
    def close(self):
        del self.model


@found_by("values (act): expected the model's values")
class WarmsUpByTraining(Apart):
    def warm_up(self, batch_sizes):
        with torch.no_grad():
            for p in self.model.module.parameters():
                p.add_(0.1)


@found_by("warm_up: expected weights and buffers that stay as they are")
class WarmsUpByTrainingTheModel(TorchEngine):
    def warm_up(self, batch_sizes):
        with torch.no_grad():
            for p in self.model.module.parameters():
                p.add_(0.1)


@found_by("observation: expected images and a state that stay as they are")
class NormalisesInPlace(Apart):
    def act(self, obs, noise, greedy):
        chunk = super().act(obs, noise, greedy)
        np.asarray(obs.state)[:] /= 2
        return chunk


@found_by("observation: expected images and a state that stay as they are")
class CropsInPlace(Apart):
    def act(self, obs, noise, greedy):
        for image in obs.images.values():
            image[:, :2] = 0
        return super().act(obs, noise, greedy)


@found_by("act: values: expected the model's values")
class ValuesOfZeros(Apart):
    def act(self, obs, noise, greedy):
        chunk = super().act(obs, noise, greedy)
        return attrs.evolve(chunk, values=torch.zeros_like(chunk.values))


@found_by("act: values: expected an array, as the model has a critic")
class NoValues(Apart):
    def act(self, obs, noise, greedy):
        return attrs.evolve(super().act(obs, noise, greedy), values=None)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_mistake_is_found(mutant):
    with pytest.raises(CheckFailed) as failed:
        check(mutant)
    assert any(MUTANTS[mutant] in finding for finding in failed.value.findings), failed.value


def test_an_engine_with_its_own_weights_passes():
    check(Apart)
