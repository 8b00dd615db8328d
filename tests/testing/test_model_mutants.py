"""Models with one mistake each, all of which `check_model` finds; and others that pass."""

from __future__ import annotations

import copy
import dataclasses
import json
import sys
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch
from test_check_model import INFO, findings
from tokenizers import normalizers

from vla_rl.cli.new_plugin import new_plugin
from vla_rl.core.capabilities import HasReference
from vla_rl.core.catalogue import import_module
from vla_rl.testing import CheckFailed, LinearModel, check_model
from vla_rl.testing.scripted import LinearConfig, vla_rl_plugins
from vla_rl.toolkit.models.adapters import LoRAConfig, before_training, insert_adapters
from vla_rl.toolkit.models.prompts import train_tokenizer

MUTANTS: dict[type[LinearModel], str] = {}


def found_by(text):
    """Register a mutant, and what of a finding names its mistake."""

    def register(mutant):
        MUTANTS[mutant] = text
        return mutant

    return register


APART = "whatever other rows there are"
ENTROPY = "an entropy that is the mean of -log_probs over samples"


# ------------------------------------------------------------------------------------------------- rows of a batch


@found_by(APART)
class CentredByTheBatch(LinearModel):
    def _compute_features(self, obs):
        features = super()._compute_features(obs)
        return features - features.mean(0)


@found_by(APART)
class LooksAtTheLastRow(LinearModel):
    def _log_softmax(self, features):
        return super()._log_softmax(features + 0.1 * features[-1:])


@found_by("a row's entropy whatever other rows there are")
class EntropyOfTheBatch(LinearModel):
    def chunk_log_probs(self, obs, chunk):
        scores = super().chunk_log_probs(obs, chunk)
        return attrs.evolve(scores, entropy=scores.entropy.mean(0).expand_as(scores.entropy))


@found_by("a row's values whatever other rows there are")
class ValuesOfTheBatch(LinearModel):
    def _compute_values(self, features):
        return super()._compute_values(features - features.mean(0))


@found_by("a row's actions whatever other rows there are")
class NoiseOfTheFirstRow(LinearModel):
    def sample_chunk(self, obs, noise, greedy):
        draw = noise.uniforms
        noise.uniforms = lambda *shape: np.repeat(draw(*shape)[:1], len(obs), 0)
        return super().sample_chunk(obs, noise, greedy)


@found_by("a row's value whatever other rows there are")
class CriticOfTheBatch(LinearModel):
    def values(self, obs):
        values = super().values(obs)
        return values if len(values) == 1 else values + 1e-3 * values.mean()


# ----------------------------------------------------------------------------------------- entropies and log-probs


class Entropy(LinearModel):
    """Policy whose entropy is changed."""

    def chunk_log_probs(self, obs, chunk):
        scores = super().chunk_log_probs(obs, chunk)
        return attrs.evolve(scores, entropy=self.change(scores.entropy, scores))


@found_by(ENTROPY)
class NegativeEntropy(Entropy):
    def change(self, entropy, scores):
        return -entropy


@found_by(ENTROPY)
class EntropyInBits(Entropy):
    def change(self, entropy, scores):
        return entropy / np.log(2)


@found_by(ENTROPY)
class EntropyOfUniform(Entropy):
    def change(self, entropy, scores):
        return entropy - entropy.detach() + np.log(8)


@found_by(ENTROPY)
class EntropySpreadOverTokens(Entropy):
    def change(self, entropy, scores):
        return entropy / entropy.shape[-1]


@found_by(ENTROPY)
class SampledColder(LinearModel):
    def sample_chunk(self, obs, noise, greedy):
        self._temperature /= 3
        chunk = super().sample_chunk(obs, noise, greedy)
        self._temperature *= 3
        log_probs = self.chunk_log_probs(obs, chunk).log_probs.detach()
        return attrs.evolve(chunk, log_probs=log_probs)


@found_by(ENTROPY)
class NextToken(LinearModel):
    """Samples one bin, plays and scores another."""

    def sample_chunk(self, obs, noise, greedy):
        chunk = super().sample_chunk(obs, noise, greedy)
        tokens = (chunk.extras["tokens"] + 3) % self._bins
        moved = attrs.evolve(chunk, actions=self.decode_actions(tokens), extras={"tokens": tokens})
        return attrs.evolve(moved, log_probs=self.chunk_log_probs(obs, moved).log_probs.detach())


@found_by("at most 0, as of tokens")
class AllSignsTurned(LinearModel):
    def sample_chunk(self, obs, noise, greedy):
        chunk = super().sample_chunk(obs, noise, greedy)
        return attrs.evolve(chunk, log_probs=-chunk.log_probs)

    def chunk_log_probs(self, obs, chunk):
        scores = super().chunk_log_probs(obs, chunk)
        return attrs.evolve(scores, log_probs=-scores.log_probs, entropy=-scores.entropy)


@found_by("log_probs that differ with what was sampled")
class LogProbsOfTheMode(LinearModel):
    def sample_chunk(self, obs, noise, greedy):
        chunk = super().sample_chunk(obs, noise, greedy)
        return attrs.evolve(chunk, log_probs=self.chunk_log_probs(obs, chunk).log_probs.detach())

    def chunk_log_probs(self, obs, chunk):
        scores = super().chunk_log_probs(obs, chunk)
        return attrs.evolve(scores, log_probs=self._log_softmax(self._compute_features(obs)).amax(-1))


@found_by("independent draws for all numbers of a chunk")
class OneDrawAChunk(LinearModel):
    def sample_chunk(self, obs, noise, greedy):
        draw = noise.uniforms
        noise.uniforms = lambda *shape: np.broadcast_to(draw(1, 1), (len(obs), *shape)).copy()
        return super().sample_chunk(obs, noise, greedy)


@found_by("a greedy chunk that is likelier than samples are")
class GreedyIsTheLeastLikely(LinearModel):
    def sample_chunk(self, obs, noise, greedy):
        chunk = super().sample_chunk(obs, noise, greedy)
        if not greedy:
            return chunk
        log_probs = self._log_softmax(self._compute_features(obs))
        tokens = log_probs.argmin(-1)
        return attrs.evolve(
            chunk, actions=self.decode_actions(tokens), extras={"tokens": tokens}, log_probs=log_probs.amin(-1)
        )


# -------------------------------------------------------------------------------------------------------- gradients


def turned(tensor):
    """The same numbers, with the opposite gradient."""
    return 2 * tensor.detach() - tensor


@found_by("higher log_probs after a small step up their gradient")
class GradientTurned(LinearModel):
    def chunk_log_probs(self, obs, chunk):
        scores = super().chunk_log_probs(obs, chunk)
        return attrs.evolve(scores, log_probs=turned(scores.log_probs))


@found_by("higher entropy after a small step up their gradient")
class EntropyGradientTurned(Entropy):
    def change(self, entropy, scores):
        return turned(entropy)


@found_by("higher values after a small step up their gradient")
class ValueGradientTurned(LinearModel):
    def chunk_log_probs(self, obs, chunk):
        scores = super().chunk_log_probs(obs, chunk)
        return attrs.evolve(scores, values=turned(scores.values))


@found_by("one of values in the critic")
class ValuesOfThePolicy(LinearModel):
    def _compute_values(self, features):
        return self.module.policy(features).mean(-1) + 0 * super()._compute_values(features).detach()


@found_by("critic: expected the part of `module` that values come from, got None")
class NoCritic(LinearModel):
    critic = property(lambda self: None, lambda self, critic: None)


@found_by("critic: expected the part of `module` that values come from, got one without parameters of `module`")
class CriticElsewhere(LinearModel):
    critic = property(lambda self: copy.deepcopy(self.module.value_head), lambda self, critic: None)


@found_by("expected no exception, got TypeError: object of type 'NoneType' has no len()")
class TokensWithABug(LinearModel):
    def encode_actions(self, actions):
        return len(None)


@found_by("a step that makes demonstrated actions likelier")
class Uncloning(LinearModel):
    def imitation_loss(self, obs, actions):
        return -super().imitation_loss(obs, actions)


@found_by("another gradient for other actions")
class ClonesTheMiddle(LinearModel):
    def imitation_loss(self, obs, actions):
        return super().imitation_loss(obs, torch.zeros_like(torch.as_tensor(actions)))


@found_by("a mean over the batch")
class SumOfTheBatch(LinearModel):
    def imitation_loss(self, obs, actions):
        return super().imitation_loss(obs, actions) * len(obs)


@found_by("imitation_losses: expected float32 [4]")
class OneLoss(LinearModel):
    def imitation_losses(self, obs, actions):
        return super().imitation_losses(obs, actions).mean()


@found_by("imitation_losses: expected float32 with gradient")
class DetachedLosses(LinearModel):
    def imitation_losses(self, obs, actions):
        return super().imitation_losses(obs, actions).detach()


@found_by("about the loss of a sample alone")
class SumOfLosses(LinearModel):
    def imitation_losses(self, obs, actions):
        losses = super().imitation_losses(obs, actions)
        return losses.sum().expand_as(losses)


@found_by("policy_features: expected float32")
class FeaturesOfAll(LinearModel):
    def policy_features(self, obs):
        return super().policy_features(obs).mean(0)


@found_by("the same features of a row")
class CentredFeatures(LinearModel):
    def policy_features(self, obs):
        features = super().policy_features(obs)
        return features - features.mean(0)


@found_by("the same log_probs as before an imitation_loss")
class StaysInTraining(LinearModel):
    def imitation_loss(self, obs, actions):
        self._temperature = 3.0
        return super().imitation_loss(obs, actions)


# -------------------------------------------------------------------------------------- arguments, weights, storage


@found_by("log_probs of the observation")
class Blind(LinearModel):
    def _compute_features(self, obs):
        return torch.ones_like(super()._compute_features(obs))


@found_by("observation: expected images and a state that stay as they are, got written into")
class ScalesInPlace(LinearModel):
    def chunk_log_probs(self, obs, chunk):
        scores = super().chunk_log_probs(obs, chunk)
        for image in obs.images.values():
            np.floor_divide(image, 2, out=image)
        return scores


@found_by("a recorded chunk that stays as it is")
class ClipsTheChunk(LinearModel):
    def chunk_log_probs(self, obs, chunk):
        scores = super().chunk_log_probs(obs, chunk)
        chunk.actions.clamp_(-0.1, 0.1)
        return scores


@found_by("the weights that were loaded in weights()")
class LoadsHalf(LinearModel):
    def load_weights(self, pairs):
        pairs = list(pairs)
        return super().load_weights(pairs[: len(pairs) // 2] + [pair for pair in pairs if "no such" in pair[0]])


@found_by("the same log_probs whatever the trained weights are")
class MovingReference(LinearModel, HasReference):
    def reference_log_probs(self, obs, chunk):
        return self.chunk_log_probs(obs, chunk).log_probs.detach()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_mistake_is_found(mutant) -> None:
    assert MUTANTS[mutant] in findings(mutant)


def plugin_of(cls):
    def build(config, context):
        told = {name: getattr(context, name) for name in ("values", "device", "temperature")}
        return cls(context.env, context.chunk, bins=config.bins, seed=7, checkpoint=config.checkpoint, **told)

    return dataclasses.replace(vla_rl_plugins["model"]["linear"], build=build)


class SavesTheShape(LinearModel):
    """Policy whose weights after loading are the initial ones."""

    def save(self, folder):
        (folder / "config.json").write_text(json.dumps(self._shape))

    def _load_checkpoint(self, folder):
        pass


class SavesThePolicyAlone(LinearModel):
    def _load_checkpoint(self, folder):
        super()._load_checkpoint(folder)
        self.module.value_head.weight.data.zero_()


class NoTemperature(LinearModel):
    def __init__(self, *args, temperature, **options):
        super().__init__(*args, **options)


@pytest.mark.parametrize(
    ("mutant", "text"),
    [
        (SavesTheShape, "the same log_probs once loaded"),
        (SavesThePolicyAlone, "the same values once loaded"),
        (NoTemperature, "a higher entropy at twice the temperature"),
    ],
)
def test_a_mistake_of_a_plugin_is_found(mutant, text) -> None:
    with pytest.raises(CheckFailed) as failed:
        check_model(plugin_of(mutant), LinearConfig(), values="chunk")
    assert text in str(failed.value)


# ------------------------------------------------------------------------------------------ adapters and tokenizers


class AdaptedModel(LinearModel, HasReference):
    """Policy with adapters on its policy layer, and the one without them as its reference."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        insert_adapters(self.module, LoRAConfig(rank=2), seed=0)

    def reference_log_probs(self, obs, chunk):
        with torch.no_grad(), before_training(self.module):
            return self.chunk_log_probs(obs, chunk).log_probs


class AdapterWithoutGradient(LinearModel):
    """peft 0.21.2, `all-linear`: an adapter on a layer that the forward pass goes around, as SigLIP's pooling does."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.module.pooling = torch.nn.Linear(4, 4)
        insert_adapters(self.module, LoRAConfig(rank=2), seed=0)

    def _compute_features(self, obs):
        weight = self.module.pooling.base_layer.weight
        return torch.nn.functional.linear(super()._compute_features(obs), weight)


class AdapterInAFusedLayer(LinearModel):
    """torch 2.13, eval mode: this layer's fused path reads the weights of linear layers and never calls them."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.module.encoder = torch.nn.TransformerEncoderLayer(4, 1, 8, dropout=0.0, batch_first=True).eval()
        insert_adapters(self.module, LoRAConfig(rank=2), seed=0)

    def _compute_features(self, obs):
        return self.module.encoder(super()._compute_features(obs)[:, None])[:, 0]


class ReferenceThatUnfreezes(AdaptedModel):
    """peft 0.21.2: turning adapters on again makes all of them trainable."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.module.policy.lora_A.requires_grad_(False)

    def reference_log_probs(self, obs, chunk):
        self.module.policy.enable_adapters(False)
        with torch.no_grad():
            log_probs = self.chunk_log_probs(obs, chunk).log_probs
        self.module.policy.enable_adapters(True)
        return log_probs


def test_adapters_pass() -> None:
    check_model(AdaptedModel(INFO, 2), env=INFO)


@pytest.mark.parametrize(
    ("mutant", "text"),
    [
        (AdapterWithoutGradient, "one in every trained parameter, got none in pooling.lora_A.default.weight"),
        (AdapterWithoutGradient, "leave layers without adapters whose adapters the network goes around"),
        (AdapterInAFusedLayer, "one in every trained parameter, got none in encoder."),
        (ReferenceThatUnfreezes, "reference_log_probs: expected `requires_grad` that stays as it is, got a change"),
    ],
)
def test_a_mistake_about_adapters_is_found(mutant, text) -> None:
    assert text in findings(mutant, values="none")


class SavesATokenizer(LinearModel):
    """Policy whose folder names a class for its tokenizer, and whose file has another rule for capital letters."""

    named = "GemmaTokenizer"

    def save(self, folder):
        super().save(folder)
        tokenizer = train_tokenizer(INFO.tasks[0].instruction.split(), lambda text: text, 300)
        tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), tokenizer.normalizer])
        tokenizer.save(str(folder / "tokenizer.json"))
        settings = {"tokenizer_class": self.named, "unk_token": "<unk>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))


class SavesATokenizerThatFollows(SavesATokenizer):
    """Policy whose class follows its file."""

    named = "PreTrainedTokenizerFast"


def test_a_tokenizer_whose_class_and_file_disagree_is_found(tmp_path: Path) -> None:
    expected = "expected the tokens of tokenizer.json also from its tokenizer_class 'GemmaTokenizer' in transformers"
    with pytest.raises(CheckFailed) as failed:
        check_model(SavesATokenizer(INFO, 2), env=INFO)
    (text,) = failed.value.findings
    assert expected in text
    check_model(SavesATokenizerThatFollows(INFO, 2), env=INFO)
    SavesATokenizer(INFO, 2, values="chunk", seed=7).save(tmp_path)
    with pytest.raises(CheckFailed, match=expected):
        check_model(plugin_of(LinearModel), LinearConfig(checkpoint=str(tmp_path)), values="chunk")


@pytest.mark.parametrize("seed", range(5))
def test_chance_raises_no_alarm(seed) -> None:
    check_model(LinearModel(INFO, 2, values="chunk", seed=seed, bins=3 + 50 * seed), env=INFO, values="chunk")


# ------------------------------------------------------------------------------------------------ a continuous policy


@pytest.fixture(scope="module")
def gaussian(tmp_path_factory) -> type:
    """The class of the generated model project."""
    project = new_plugin("model", "bell", tmp_path_factory.mktemp("bell") / "project")
    sys.path.insert(0, str(project / "src"))
    yield import_module("bell")
    sys.path.remove(str(project / "src"))


def test_a_gaussian_policy_passes_and_its_mutants_do_not(gaussian) -> None:
    from bell.impl import Bell

    config = gaussian.BellConfig(width=16)
    check_model(gaussian.plugin, config, values="chunk", temperature=1.5)

    class Doubled(Bell):
        def chunk_log_probs(self, obs, chunk):
            scores = super().chunk_log_probs(obs, chunk)
            return attrs.evolve(scores, entropy=2 * scores.entropy)

    class Negative(Bell):
        def chunk_log_probs(self, obs, chunk):
            scores = super().chunk_log_probs(obs, chunk)
            return attrs.evolve(scores, entropy=-scores.entropy)

    class Narrow(Bell):
        """Samples from half the width that it scores with."""

        def sample_chunk(self, obs, noise, greedy):
            draw = noise.normals
            noise.normals = lambda *shape: draw(*shape) / 2
            return super().sample_chunk(obs, noise, greedy)

    class Normed(Bell):
        def forward(self, obs):
            policy, values = super().forward(obs)
            return type(policy)(policy.mean - policy.mean.mean(0), policy.stddev), values

    for mutant, text in {Doubled: ENTROPY, Negative: ENTROPY, Narrow: ENTROPY, Normed: APART}.items():
        plugin = dataclasses.replace(gaussian.plugin, build=mutant)
        with pytest.raises(CheckFailed) as failed:
            check_model(plugin, config)
        assert text in str(failed.value), mutant


def test_nothing_is_left_of_a_check(tmp_path: Path) -> None:
    """The check leaves the caller's observation (`env`), the gradients and the weights as they were."""
    model = LinearModel(INFO, 2, values="chunk")
    before = {name: p.clone() for name, p in model.module.named_parameters()}
    check_model(model, env=INFO, values="chunk")
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in model.module.named_parameters())
