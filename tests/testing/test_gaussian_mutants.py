"""Mistakes in the Gaussian policy of docs/how-to/add-a-model.md, one each, all of which `check_model` finds as the policy's
plugin is checked; and changes that are right, which pass."""

from __future__ import annotations

import dataclasses
import random
import re
import types
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch
from torch import nn
from torch.distributions import Distribution, Normal

from vla_rl.core.contexts import ModelContext
from vla_rl.testing import CheckFailed, check_model
from vla_rl.testing.synthetic import env_info

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "add-a-model.md").read_text()
(SOURCE,) = (text for text in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL) if text.startswith("# gauss"))
page = types.ModuleType("gaussian")
exec(SOURCE, page.__dict__)
Gaussian = page.Gaussian
ENV = env_info(pixels=16)
"""The default of `check_model`, with smaller images."""

MUTANTS: dict[type, str] = {}


@pytest.fixture(autouse=True)
def distributions_check_their_arguments(monkeypatch):
    """torch.compile turns the checks off for the whole process, once any test has used it."""
    monkeypatch.setattr(Distribution, "_validate_args", True)


def found_by(text):
    """Register a mutant, and what of a finding names its mistake."""

    def register(mutant):
        MUTANTS[mutant] = text
        return mutant

    return register


def findings(mutant, values="chunk"):
    with pytest.raises(CheckFailed) as failed:
        check_model(dataclasses.replace(page.plugin, build=mutant), page.Config(width=16), env=ENV, values=values)
    return str(failed.value)


class Changed(Gaussian):
    """`sampled` and `scored` may change what is returned."""

    def sampled(self, chunk):
        return chunk

    def scored(self, scores):
        return scores

    @torch.no_grad()
    def sample_chunk(self, obs, noise, greedy):
        return self.sampled(super().sample_chunk(obs, noise, greedy))

    def chunk_log_probs(self, obs, chunk):
        return self.scored(super().chunk_log_probs(obs, chunk))


# ----------------------------------------------------------------------------------------------------------- bounds

RANGES = "the same parts of the ranges where bounds are others"


@found_by("within the environment's bounds")
class Unscaled(Changed):
    def sampled(self, chunk):
        return attrs.evolve(chunk, actions=chunk.extras["raw"])


@found_by("actions that fill the ranges of all their numbers about alike")
class UnscaledButClipped(Changed):
    def sampled(self, chunk):
        return attrs.evolve(chunk, actions=chunk.extras["raw"].clamp(self.low, self.high))


@found_by(RANGES)
class BoundsOfTheFirstNumber(Changed):
    def sampled(self, chunk):
        low, high = self.low[0], self.high[0]
        actions = low + (chunk.extras["raw"] + 1) / 2 * (high - low)
        return attrs.evolve(chunk, actions=actions.clamp(self.low, self.high))


@found_by(RANGES)
class SymmetricBounds(Changed):
    def sampled(self, chunk):
        return attrs.evolve(chunk, actions=(chunk.extras["raw"] * self.high).clamp(self.low, self.high))


@found_by(RANGES)
class ShiftedByTheLowerBoundAlone(Changed):
    def sampled(self, chunk):
        return attrs.evolve(chunk, actions=(chunk.extras["raw"] + 1 + self.low).clamp(self.low, self.high))


@found_by("sample_chunk (greedy): actions: expected within the environment's bounds")
class GreedyUnscaled(Gaussian):
    @torch.no_grad()
    def sample_chunk(self, obs, noise, greedy):
        chunk = super().sample_chunk(obs, noise, greedy)
        return attrs.evolve(chunk, actions=3 * chunk.extras["raw"]) if greedy else chunk


@found_by("about the same loss for the same parts of other ranges")
class ClonesUnscaledActions(Gaussian):
    def imitation_loss(self, obs, actions):
        return -self.forward(obs)[0].log_prob(torch.as_tensor(actions)).mean()


# ------------------------------------------------------------------------------------------------------------ inputs


class Sees(Gaussian):
    """`look` changes what it sees."""

    def forward(self, obs):
        return super().forward(self.look(obs))


@found_by("the same whatever the order in which an observation lists its cameras")
class CamerasInAnyOrder(Sees):
    def look(self, obs):
        self.cameras = tuple(obs.images)
        return obs


@found_by("an answer that depends on the images of camera 'camera1'")
class OneCamera(Sees):
    def look(self, obs):
        return attrs.evolve(obs, images=dict.fromkeys(obs.images, obs.images["camera0"]))


@found_by("an answer that depends on the images of camera 'camera0'")
class BlackImages(Sees):
    def look(self, obs):
        images = {name: torch.zeros(image.shape, dtype=torch.uint8) for name, image in obs.images.items()}
        return attrs.evolve(obs, images=images)


@found_by("an answer that depends on all 4 numbers of the state, got none on number [3]")
class StateCutOff(Sees):
    def look(self, obs):
        state = np.array(obs.state)
        state[:, 3:] = 0
        return attrs.evolve(obs, state=state)


@found_by("whatever other rows there are")
class StateOfTheFirstRow(Sees):
    def look(self, obs):
        return attrs.evolve(obs, state=np.repeat(np.array(obs.state)[:1], len(obs), 0))


@found_by("observation: expected images and a state that stay as they are, got written into")
class NormalisesTheStateInPlace(Sees):
    def look(self, obs):
        obs.state[:] = obs.state / 2
        return obs


@found_by("black and white images: expected no exception")
class DividesByTheBrightest(Sees):
    def look(self, obs):
        images = {name: torch.as_tensor(image).float() for name, image in obs.images.items()}
        return attrs.evolve(obs, images={n: 255 * i / i.amax((1, 2, 3), keepdim=True) for n, i in images.items()})


@found_by("finite numbers for black images and a state of zeros, got NaN or inf")
class WhitensTheImages(Gaussian):
    def forward(self, obs):
        policy, values = super().forward(obs)
        deviation = torch.as_tensor(obs.images["camera0"]).float().std((1, 2, 3))
        return policy, None if values is None else values / deviation


@found_by("whatever other rows there are")
class ValueOfTheFirstRow(Gaussian):
    def forward(self, obs):
        policy, values = super().forward(obs)
        return policy, None if values is None else values[:1].expand_as(values)


@found_by("a separate value for each row")
class ConstantCritic(Gaussian):
    def forward(self, obs):
        policy, values = super().forward(obs)
        return policy, None if values is None else 0 * values + self.module.value_head.bias


@found_by("whatever other rows there are")
class ChunkOfTheFirstRow(Changed):
    def sampled(self, chunk):
        return attrs.evolve(chunk, actions=chunk.actions[:1].expand_as(chunk.actions).clone())


# ----------------------------------------------------------------------------------------------- log-probs and entropies


@found_by("log_probs of a probability density")
class MeanOverNumbers(Changed):
    def sampled(self, chunk):
        return attrs.evolve(chunk, log_probs=chunk.log_probs / 3)

    def scored(self, scores):
        return attrs.evolve(scores, log_probs=scores.log_probs / 3, entropy=scores.entropy / 3)


@found_by("log_probs of a probability density")
class CountedTwice(Changed):
    def sampled(self, chunk):
        return attrs.evolve(chunk, log_probs=chunk.log_probs * 2)

    def scored(self, scores):
        return attrs.evolve(scores, log_probs=scores.log_probs * 2, entropy=scores.entropy * 2)


@found_by("a separate log-prob for each action")
class LogProbOfTheChunk(Changed):
    def sampled(self, chunk):
        return attrs.evolve(chunk, log_probs=chunk.log_probs.mean(1, keepdim=True).expand_as(chunk.log_probs).clone())

    def scored(self, scores):
        return attrs.evolve(scores, log_probs=scores.log_probs.mean(1, keepdim=True).expand_as(scores.log_probs))


@found_by("log_probs of an action that follow from that action")
class LogProbsTurned(Changed):
    def sampled(self, chunk):
        return attrs.evolve(chunk, log_probs=chunk.log_probs.flip(1))

    def scored(self, scores):
        return attrs.evolve(scores, log_probs=scores.log_probs.flip(1))


@found_by("log_probs of an action that follow from that action")
class ActionsTurned(Changed):
    def sampled(self, chunk):
        return attrs.evolve(chunk, actions=chunk.actions.flip(1))


@found_by("the log_probs recorded at sampling")
class ScoresClippedActions(Gaussian):
    def chunk_log_probs(self, obs, chunk):
        raw = torch.as_tensor(chunk.extras["raw"]).clamp(-1, 1)
        return super().chunk_log_probs(obs, attrs.evolve(chunk, extras={"raw": raw}))


@found_by("an entropy with gradient, as it moves with the weights")
class EntropyWithoutGradient(Changed):
    def scored(self, scores):
        return attrs.evolve(scores, entropy=scores.entropy.detach())


@found_by("the log_probs recorded at sampling, at twice the temperature")
class TemperatureInSamplingAlone(Gaussian):
    def chunk_log_probs(self, obs, chunk):
        self.temperature, kept = 1.0, self.temperature
        scores = super().chunk_log_probs(obs, chunk)
        self.temperature = kept
        return scores


@found_by("an entropy that is the mean of -log_probs over samples (at twice the temperature)")
class TemperatureInScoringAlone(Gaussian):
    @torch.no_grad()
    def sample_chunk(self, obs, noise, greedy):
        draw, heat = noise.normals, self.temperature
        noise.normals = lambda *shape: draw(*shape) / heat
        return super().sample_chunk(obs, noise, greedy)


@found_by("a higher entropy at twice the temperature")
class NoTemperature(Gaussian):
    def __init__(self, config, context):
        super().__init__(config, attrs.evolve(context, temperature=1.0))


@found_by("the same chunk from the same noise")
class DropoutWhileSampling(Gaussian):
    def forward(self, obs):
        policy, values = super().forward(obs)
        return Normal(nn.functional.dropout(policy.mean, 0.1), policy.stddev), values


@found_by("the log_probs recorded at sampling")
class DropoutWhileScoring(Gaussian):
    def chunk_log_probs(self, obs, chunk):
        policy, values = self.forward(obs)
        mean = nn.functional.dropout(policy.mean, 0.1)
        log_probs = Normal(mean, policy.stddev).log_prob(torch.as_tensor(chunk.extras["raw"])).sum(-1, keepdim=True)
        return page.Scores(log_probs=log_probs, entropy=policy.entropy().sum(-1, keepdim=True), values=values)


@found_by("a greedy chunk without chance")
class GreedyIgnored(Gaussian):
    @torch.no_grad()
    def sample_chunk(self, obs, noise, greedy):
        return super().sample_chunk(obs, noise, False)


@found_by("sample_chunk: actions: expected float32")
class DoublePrecision(Changed):
    def sampled(self, chunk):
        return attrs.evolve(chunk, actions=chunk.actions.double())


@found_by("(greedy): actions: expected float32")
class GreedyDoublePrecision(Gaussian):
    @torch.no_grad()
    def sample_chunk(self, obs, noise, greedy):
        chunk = super().sample_chunk(obs, noise, greedy)
        return attrs.evolve(chunk, actions=chunk.actions.double()) if greedy else chunk


@found_by("a chunk that stays as it is, got one that the next call wrote into")
class ReusedBuffer(Changed):
    buffer = None

    def sampled(self, chunk):
        if self.buffer is None or self.buffer.shape != chunk.actions.shape:
            self.buffer = chunk.actions.clone()
        self.buffer.copy_(chunk.actions)
        return attrs.evolve(chunk, actions=self.buffer)


# --------------------------------------------------------------------------------------------------------- gradients


@found_by("a gradient of every entry of log_probs")
class SecondActionDetached(Changed):
    def scored(self, scores):
        log_probs = torch.cat([scores.log_probs[:, :1], scores.log_probs[:, 1:].detach()], 1)
        return attrs.evolve(scores, log_probs=log_probs)


@found_by("a gradient of every entry of log_probs")
class HalfTheBatchDetached(Changed):
    def scored(self, scores):
        half = len(scores.log_probs) // 2
        log_probs = torch.cat([scores.log_probs[:half].detach(), scores.log_probs[half:]])
        return attrs.evolve(scores, log_probs=log_probs)


@found_by("a gradient of every entry of values")
class ValuesOfHalfDetached(Changed):
    def scored(self, scores):
        half = len(scores.values) // 2
        return attrs.evolve(scores, values=torch.cat([scores.values[:half].detach(), scores.values[half:]]))


@found_by("one in every trained parameter, got none in log_std")
class StdUnused(Gaussian):
    def forward(self, obs):
        policy, values = super().forward(obs)
        return Normal(policy.mean, 0.6 * self.temperature * torch.ones_like(policy.mean)), values


@found_by("got none in trunk.0.weight")
class TrunkDetached(Gaussian):
    def __init__(self, config, context):
        super().__init__(config, context)
        self.module.trunk.register_forward_hook(lambda module, inputs, output: output.detach())


@found_by("another loss for another number anywhere in the demonstrated actions")
class ClonesTheFirstAction(Gaussian):
    def imitation_loss(self, obs, actions):
        raw = (torch.as_tensor(actions) - self.low) / (self.high - self.low) * 2 - 1
        return -self.forward(obs)[0].log_prob(raw)[:, 0].mean()


@found_by("another loss for another number anywhere in the demonstrated actions")
class NeverClonesTheGripper(Gaussian):
    def imitation_loss(self, obs, actions):
        raw = (torch.as_tensor(actions) - self.low) / (self.high - self.low) * 2 - 1
        return -self.forward(obs)[0].log_prob(raw)[..., :-1].mean()


@found_by("another loss for another number anywhere in the demonstrated actions")
class ClonesTheFirstRow(Gaussian):
    def imitation_loss(self, obs, actions):
        raw = (torch.as_tensor(actions) - self.low) / (self.high - self.low) * 2 - 1
        return -self.forward(obs)[0].log_prob(raw)[0].mean()


@found_by("actions of a chunk in the order in which they are sampled")
class ClonesBackwards(Gaussian):
    def imitation_loss(self, obs, actions):
        return super().imitation_loss(obs, torch.as_tensor(actions).flip(1))


# ------------------------------------------------------------------------------------------------- traces and weights


@found_by("the same log_probs of a chunk after another one was sampled")
class RemembersWhatItSampled(Changed):
    def sampled(self, chunk):
        self.raw = chunk.extras["raw"]
        return chunk

    def chunk_log_probs(self, obs, chunk):
        return super().chunk_log_probs(obs, attrs.evolve(chunk, extras={"raw": self.raw[: len(obs)]}))


@found_by("build: expected the global random generators left alone, got a seed that stays set in torch")
class SeedsInBuild(Gaussian):
    def __init__(self, config, context):
        torch.manual_seed(context.seed)
        super().__init__(config, context)


@found_by("build: expected the same weights in every process")
class WeightsByChance(Gaussian):
    def __init__(self, config, context):
        super().__init__(config, context)
        nn.init.normal_(self.module.mean.weight, std=0.02)


@found_by("sample_chunk: expected the global random generators left alone, got a change of torch's")
class SeedsTorch(Gaussian):
    def sample_chunk(self, obs, noise, greedy):
        torch.manual_seed(0)
        return super().sample_chunk(obs, noise, greedy)


@found_by("chunk_log_probs: expected the global random generators left alone, got a change of NumPy's")
class SeedsNumpy(Changed):
    def scored(self, scores):
        np.random.seed(0)  # noqa: NPY002
        return scores


@found_by("imitation_loss: expected the global random generators left alone, got a change of Python's")
class SeedsPython(Gaussian):
    def imitation_loss(self, obs, actions):
        random.seed(7)
        return super().imitation_loss(obs, actions)


@found_by("weights and buffers that stay as they are, got a change of seen")
class CountsWhatItScores(Gaussian):
    def __init__(self, config, context):
        super().__init__(config, context)
        self.module.register_buffer("seen", torch.zeros(()))

    def chunk_log_probs(self, obs, chunk):
        self.module.seen += len(obs)
        return super().chunk_log_probs(obs, chunk)


@found_by("`requires_grad` that stays as it is")
class FreezesWhileSampling(Gaussian):
    def sample_chunk(self, obs, noise, greedy):
        self.module.log_std.requires_grad_(False)
        return super().sample_chunk(obs, noise, greedy)

    def chunk_log_probs(self, obs, chunk):
        self.module.log_std.requires_grad_(True)
        return super().chunk_log_probs(obs, chunk)


@found_by("the same parameters, with other numbers, got new ones for")
class NewParameters(Gaussian):
    def load_weights(self, pairs):
        own = dict(self.module.named_parameters())
        for name, tensor in pairs:
            _ = own[name]
            part, _, last = name.rpartition(".")
            setattr(self.module.get_submodule(part), last, nn.Parameter(torch.as_tensor(tensor).clone()))


@found_by("unchanged numbers after the sender wrote into the loaded tensors")
class SharesMemory(Gaussian):
    def load_weights(self, pairs):
        own = dict(self.module.named_parameters())
        for name, tensor in pairs:
            own[name].data = torch.as_tensor(tensor)


@found_by("the weights that were loaded in weights()")
class ReadsPairsTwice(Gaussian):
    def load_weights(self, pairs):
        if missing := [name for name, _ in pairs if name not in dict(self.module.named_parameters())]:
            raise KeyError(missing[0])
        super().load_weights(pairs)


@found_by("`requires_grad` that stays as it is")
class LoadsFrozen(Gaussian):
    def load_weights(self, pairs):
        super().load_weights(pairs)
        self.module.requires_grad_(False)


@found_by("the same greedy actions once loaded")
class SavesTrainedPartsAlone(Gaussian):
    """The trunk is random and frozen, and is not saved."""

    def __init__(self, config, context):
        super().__init__(config, context)
        self.module.trunk.requires_grad_(False)

    def save(self, folder):
        state = {name: p for name, p in self.module.state_dict().items() if not name.startswith("trunk")}
        torch.save(state, folder / "model.pt")


@found_by("the same greedy actions once loaded")
class LosesABuffer(Gaussian):
    """A random projection that no checkpoint holds."""

    def __init__(self, config, context):
        super().__init__(config, context)
        draws = torch.Generator().manual_seed(context.seed)
        shift = 0.3 * torch.randn(self.shape, generator=draws)
        self.module.register_buffer("shift", shift, persistent=False)

    def forward(self, obs):
        policy, values = super().forward(obs)
        return Normal(policy.mean + self.module.shift, policy.stddev), values


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_mistake_is_found(mutant) -> None:
    assert MUTANTS[mutant] in findings(mutant)


def test_clipped_actions_of_a_component_are_found_without_its_plugin() -> None:
    """Nothing can be rebuilt for other bounds."""
    model = UnscaledButClipped(page.Config(width=16), ModelContext(env=ENV, chunk=2))
    with pytest.raises(CheckFailed, match="fill the ranges of all their numbers about alike"):
        check_model(model, env=ENV)


# ------------------------------------------------------------------------------------------------ unusual, and right


class FixedDeviation(Gaussian):
    """Policy whose entropy is a constant, without gradient."""

    def __init__(self, config, context):
        super().__init__(config, context)
        std = self.module.log_std.detach().clone()
        del self.module.log_std
        self.module.register_buffer("log_std", std)


class StateAlone(Gaussian):
    """A linear policy on the state, which says that it reads no camera."""

    cameras_read = ()

    def look(self, obs):
        images = {name: np.zeros_like(image) for name, image in obs.images.items()}
        return attrs.evolve(obs, images=images)

    def forward(self, obs):
        return super().forward(self.look(obs))


class FrontCamera(Sees):
    cameras_read = ("camera0",)

    def look(self, obs):
        return attrs.evolve(obs, images=dict.fromkeys(obs.images, obs.images["camera0"]))


class Regression(Gaussian):
    """Clones by the squared error of the mean, in the simulator's units."""

    def imitation_loss(self, obs, actions):
        mean = self.low + (self.forward(obs)[0].mean + 1) / 2 * (self.high - self.low)
        return (mean - torch.as_tensor(actions)).square().mean() + 0 * self.module.log_std.sum()


class ZeroHead(Gaussian):
    """Begins with the same mean and the same value for everything."""

    def __init__(self, config, context):
        super().__init__(config, context)
        for layer in (self.module.mean, self.module.value_head):
            if layer is not None and config.checkpoint is None:
                nn.init.zeros_(layer.weight)
                nn.init.zeros_(layer.bias)


class DropoutWhileCloning(Gaussian):
    def imitation_loss(self, obs, actions):
        raw = (torch.as_tensor(actions) - self.low) / (self.high - self.low) * 2 - 1
        policy, _ = self.forward(obs)
        return -Normal(nn.functional.dropout(policy.mean, 0.1), policy.stddev).log_prob(raw).mean()


@pytest.mark.parametrize(
    "model",
    [Gaussian, FixedDeviation, StateAlone, FrontCamera, Regression, ZeroHead, DropoutWhileCloning],
    ids=lambda model: model.__name__,
)
@pytest.mark.parametrize("values", ["none", "chunk"])
def test_unusual_models_pass(model, values) -> None:
    plugin = dataclasses.replace(page.plugin, build=model)
    check_model(plugin, page.Config(width=16), env=ENV, values=values)
