"""Policy of film_resnet: a chunk in one forward pass, its numbers sampled from bins independently of each other given
the observation."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.nn import functional as F

from vla_rl.core.capabilities import ActionTokens, HasCritic, HasFeatures, HasReference
from vla_rl.core.hookspecs import VLAModel
from vla_rl.core.randomness import Noise, generator
from vla_rl.core.types import ArrayOrTensor, Chunk, Observation, Scores, to_numpy
from vla_rl.plugins.models.film_resnet.checkpoint import Setup, write_setup
from vla_rl.plugins.models.film_resnet.inputs import BinCodec, shift_images, target_distributions, to_pixels
from vla_rl.plugins.models.film_resnet.network import FilmResnet
from vla_rl.toolkit.models.bag_of_words import BagOfWords
from vla_rl.toolkit.models.checkpoints.files import WEIGHTS, save_tensors
from vla_rl.toolkit.models.checkpoints.lerobot import Statistics
from vla_rl.toolkit.models.heads import VALUE_HEAD, on_host, save_head
from vla_rl.toolkit.models.networks import as_tensor
from vla_rl.toolkit.models.scaling import FeatureScaler
from vla_rl.toolkit.models.tokens import categorical_entropy, choose_bins, median_bins, take_bins

CRITIC = "value_head."


class FilmPolicy(VLAModel, HasCritic, HasFeatures, HasReference):
    """Parts of film_resnet's policies that do not depend on the distribution of actions."""

    module: FilmResnet

    def __init__(
        self,
        *,
        module: FilmResnet,
        setup: Setup,
        statistics: Statistics,
        instructions: Sequence[str],
        temperature: float,
        shift: int,
        seed: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.module = module
        self.setup = setup
        self.statistics = statistics
        self.critic = module.value_head
        self.cameras_read = tuple(setup.cameras)
        self.tokens_per_action = setup.action_dim
        self._state = None if statistics.state is None else FeatureScaler(statistics.state, device)
        self._words = BagOfWords(setup.network.words, device, instructions)
        self._temperature = temperature
        self._shift = shift
        self._seed = seed
        self._device = device
        self._dtype = dtype
        self._reference = deepcopy(module).requires_grad_(False)
        self._reference.value_head = None

    @torch.no_grad()
    def values(self, obs: Observation) -> Tensor:
        values: Tensor = self.module(*self._prepare_inputs(obs), act=False)[1]
        return values

    def policy_features(self, obs: Observation) -> Tensor:
        """Return the features of cameras, state and instruction, float32 [B, D]."""
        return self.module.encode_inputs(*self._prepare_inputs(obs)).float()

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        write_setup(folder, self.setup, self.statistics)
        state = {name: tensor for name, tensor in self.module.state_dict().items() if not name.startswith(CRITIC)}
        save_tensors(on_host(state), folder / WEIGHTS)
        save_head(self.module.value_head, folder, VALUE_HEAD)

    def _prepare_inputs(
        self, obs: Observation, offsets: ArrayOrTensor | None = None
    ) -> tuple[list[Tensor], Tensor | None, Tensor]:
        """Return pixels of each camera, normalised state and bags of words; images are shifted by `offsets` int64
        [cameras, B, 2]."""
        images = [obs.images[name] for name in self.setup.cameras]
        if offsets is not None:
            images = [shift_images(image, move, self._device) for image, move in zip(images, offsets, strict=True)]
        image_tensors = [to_pixels(image, self.setup.network.image_size, self._device, self._dtype) for image in images]
        state = None
        if self._state is not None:
            if obs.state is None:
                raise ValueError("film_resnet was built to see the state, but the observation has none")
            state = self._state.normalise_feature(as_tensor(obs.state, self._device), self._state.dim).to(self._dtype)
        return image_tensors, state, self._words(obs.instructions).to(self._dtype)

    def imitation_losses(self, obs: Observation, actions: ArrayOrTensor) -> Tensor:
        """Return the terms of `imitation_loss`, averaged over the chunk of each sample."""
        return self.imitation_terms(obs, actions).mean(1)

    def _draw_offsets(self, actions: ArrayOrTensor) -> ArrayOrTensor | None:
        if not self._shift:
            return None
        batch = to_numpy(actions)
        draws = generator(self._seed, "film_resnet/shift", crc32(batch.tobytes()))
        return draws.integers(-self._shift, self._shift + 1, (len(self.setup.cameras), len(batch), 2))


class FilmResnetPolicy(FilmPolicy, ActionTokens):
    """film_resnet's policy over bins; `builder.build_policy` creates it."""

    def __init__(self, *, bins: int, greedy: str, smoothing: float, **shared: Any) -> None:
        """Create the policy; `shared` are the arguments of `FilmPolicy`."""
        super().__init__(**shared)
        self.codec = BinCodec(self.statistics.action, bins, self._device)
        self._greedy = greedy
        self._smoothing = smoothing

    def encode_actions(self, actions: ArrayOrTensor) -> Tensor:
        return self.codec.encode_actions(as_tensor(actions, self._device))

    def decode_actions(self, tokens: ArrayOrTensor) -> Tensor:
        return self.codec.decode_bins(as_tensor(tokens, self._device))

    @torch.no_grad()
    def sample_chunk(self, obs: Observation, noise: Noise, greedy: bool) -> Chunk:
        log_probs, values = self._predict_distribution(self.module, obs)
        if greedy and self._greedy == "median":
            bins = median_bins(log_probs)
        else:
            uniforms = None if greedy else as_tensor(noise.uniforms(*log_probs.shape[1:3]), self._device)
            bins = choose_bins(log_probs, uniforms)
        return Chunk(
            actions=self.codec.decode_bins(bins),
            log_probs=take_bins(log_probs, bins),
            values=values,
            extras={"tokens": bins},
        )

    def chunk_log_probs(self, obs: Observation, chunk: Chunk) -> Scores:
        log_probs, values = self._predict_distribution(self.module, obs)
        chosen = take_bins(log_probs, as_tensor(chunk.extras["tokens"], self._device))
        return Scores(log_probs=chosen, entropy=categorical_entropy(log_probs), values=values)

    @torch.no_grad()
    def reference_log_probs(self, obs: Observation, chunk: Chunk) -> Tensor:
        """Return log-probs under the initial weights, of which the policy keeps a copy."""
        return take_bins(
            self._predict_distribution(self._reference, obs)[0], as_tensor(chunk.extras["tokens"], self._device)
        )

    def imitation_loss(self, obs: Observation, actions: ArrayOrTensor) -> Tensor:
        """Return the cross-entropy over the bins (temperature 1), averaged over batch and chunk. Images are shifted at
        random, keyed by the batch's demonstrated actions: other batches, and so other epochs, get other shifts."""
        logits, _ = self.module(*self._prepare_inputs(obs, self._draw_offsets(actions)))
        if not self._smoothing:
            return F.cross_entropy(logits.flatten(0, 2), self.encode_actions(actions).flatten())
        bin_positions = self.codec.bin_positions(as_tensor(actions, self._device))
        aim = target_distributions(bin_positions, self.codec.bins, self._smoothing)
        return -(aim * torch.log_softmax(logits, dim=-1)).sum(-1).mean()

    def imitation_terms(self, obs: Observation, actions: ArrayOrTensor) -> Tensor:
        """Return the terms of `imitation_loss`, averaged over the numbers of each action."""
        logits, _ = self.module(*self._prepare_inputs(obs, self._draw_offsets(actions)))
        log_probs = torch.log_softmax(logits, dim=-1)
        if not self._smoothing:
            return -take_bins(log_probs, self.encode_actions(actions)).mean(2)
        bin_positions = self.codec.bin_positions(as_tensor(actions, self._device))
        return -(target_distributions(bin_positions, self.codec.bins, self._smoothing) * log_probs).sum(-1).mean(2)

    def _predict_distribution(self, module: FilmResnet, obs: Observation) -> tuple[Tensor, Tensor | None]:
        """Return float32 log-probs [B, C, A, bins] at the policy's temperature, and values."""
        logits, values = module(*self._prepare_inputs(obs))
        return torch.log_softmax(logits / self._temperature, dim=-1), values
