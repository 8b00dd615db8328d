"""Policies of film_resnet, built from a spec's config and a worker's context; what does not fit is refused. A chunk
takes one forward pass. Its numbers are sampled independently of each other given the observation: from bins, of which
the lowest is the lower end of the range and the last the upper end, or from normal distributions that tanh squashes."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any
from zlib import crc32

import attrs
import torch
from torch import Tensor
from torch.nn import functional as F

from vla_rl.core.capabilities import ActionTokens, HasCritic, HasFeatures, HasReference, Reparameterised
from vla_rl.core.contexts import ModelContext
from vla_rl.core.hookspecs import VLAModel
from vla_rl.core.randomness import Noise, derived_seed, generator
from vla_rl.core.types import ArrayOrTensor, Chunk, EnvInfo, Observation, Scores, to_numpy
from vla_rl.plugins.models.film_resnet.checkpoint import (
    Setup,
    check_setup,
    open_folder,
    read_setup,
    read_statistics,
    write_setup,
)
from vla_rl.plugins.models.film_resnet.config import FilmResnetConfig, Gaussian, NetworkConfig
from vla_rl.plugins.models.film_resnet.network import FilmResnet, FilmValueHead, initialise_weights
from vla_rl.toolkit.models.bag_of_words import BagOfWords
from vla_rl.toolkit.models.checkpoints.files import WEIGHTS, find_weights, save_tensors
from vla_rl.toolkit.models.checkpoints.fitting import (
    MismatchError,
    check_action_dim,
    check_action_range,
    check_camera_count,
    check_state_dim,
    choose_cameras,
    require_state,
)
from vla_rl.toolkit.models.checkpoints.lerobot import FeatureScale, Statistics, bounds_statistics
from vla_rl.toolkit.models.heads import VALUE_HEAD, load_head, on_host, save_head
from vla_rl.toolkit.models.networks import as_tensor, construct_module, fill_network
from vla_rl.toolkit.models.scaling import FeatureScaler
from vla_rl.toolkit.models.squashed_gaussian import SquashedGaussian
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
        """Return pixels of cameras, normalised state, bags of words; `offsets` int64 [cameras, B, 2] shift images."""
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


def to_pixels(images: ArrayOrTensor, size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return images uint8 [B, H, W, 3] as [B, 3, S, S] in [-1, 1], in channels-last memory format, the fastest for
    convolutions on CPUs."""
    x = as_tensor(images, device).permute(0, 3, 1, 2).float()
    if tuple(x.shape[2:]) != (size, size):
        x = F.interpolate(x, (size, size), mode="bilinear", antialias=True)
    return (x / 127.5 - 1).to(dtype, memory_format=torch.channels_last)


def shift_images(images: ArrayOrTensor, offsets: ArrayOrTensor, device: torch.device) -> Tensor:
    """Return images uint8 [B, H, W, 3], each shifted by its offset (int64 [B, 2], down and right), edges repeated."""
    x, move = as_tensor(images, device), as_tensor(offsets, device)
    rows, columns = (
        (torch.arange(size, device=device) - move[:, axis, None]).clamp(0, size - 1)
        for axis, size in enumerate(x.shape[1:3])
    )
    each = torch.arange(len(x), device=device)
    return x[each[:, None, None], rows[:, :, None], columns[:, None, :]]


class BinCodec:
    """Converts between actions and bins."""

    def __init__(self, scale: FeatureScale, bins: int, device: torch.device) -> None:
        """Create the codec.

        Args:
            scale: scaling with a mode that maps the actions' range to [-1, 1].
        """
        self.bins = bins
        self._scaler = FeatureScaler(scale, device)

    def bin_positions(self, actions: Tensor) -> Tensor:
        """Return the positions of actions [..., A] (in the simulator's units) among the bins: float32 [..., A] in 0 ...
        bins - 1, fractions between two bins."""
        x = self._scaler.normalise_feature(actions, self._scaler.dim).clamp(-1, 1)
        return (x + 1) * ((self.bins - 1) / 2)

    def encode_actions(self, actions: Tensor) -> Tensor:
        """Return the nearest bins of actions [..., A], int64 [..., A]."""
        return self.bin_positions(actions).round().long()

    def decode_bins(self, bins: Tensor) -> Tensor:
        """Return the actions of bins int64 [..., A], float32 [..., A]."""
        return self._scaler.restore_units(bins.float() * (2 / (self.bins - 1)) - 1)


def target_distributions(bin_positions: Tensor, bins: int, deviation: float) -> Tensor:
    """Return target distributions [..., bins]: Gaussians around the positions `places` [...] among the bins, whose mean
    is that position except near the ends."""
    distance = torch.arange(bins, device=bin_positions.device) - bin_positions.unsqueeze(-1)
    return torch.softmax(-0.5 * (distance / deviation) ** 2, dim=-1)


NAME = "film_resnet"


def build_policy(config: FilmResnetConfig, context: ModelContext) -> FilmPolicy:
    """Build the policy. Raise CheckpointError or MismatchError when checkpoint, spec and simulator do not fit."""
    env = context.env
    folder = None if config.checkpoint is None else open_folder(config.checkpoint)
    setup = _make_setup(config, context, env) if folder is None else _match_setup(folder, config, context, env)
    measured = _data_statistics(context, setup)
    statistics = measured or (
        bounds_statistics(env, setup.state_dim > 0) if folder is None else read_statistics(folder, setup)
    )
    source = f"statistics of {folder if measured is None else 'the demonstrations'}"
    check_action_range(source, statistics.action.usual_ranges(), env)
    device, dtype = torch.device(context.device), getattr(torch, config.dtype)
    module = construct_module(lambda: _build_module(config, context, setup, folder, device, dtype), device)
    shared: dict[str, Any] = {
        "module": module,
        "setup": setup,
        "statistics": statistics,
        "instructions": [task.instruction for task in env.tasks],
        "temperature": context.temperature,
        "shift": config.shift,
        "seed": context.seed,
        "device": device,
        "dtype": dtype,
    }
    head = setup.network.head
    if isinstance(head, Gaussian):
        return GaussianFilmResnetPolicy(**shared)
    return FilmResnetPolicy(bins=head.count, greedy=config.greedy, smoothing=config.smoothing, **shared)


def _make_setup(config: FilmResnetConfig, context: ModelContext, env: EnvInfo) -> Setup:
    if config.use_state:
        require_state(env, "use_state")
    return Setup(
        network=config.network or NetworkConfig(),
        cameras=choose_cameras(NAME, env, config.cameras, (), tuple(env.cameras)),
        chunk=context.chunk,
        action_dim=env.action_dim,
        state_dim=0 if config.use_state is False else env.state_dim,
    )


def _match_setup(folder: Path, config: FilmResnetConfig, context: ModelContext, env: EnvInfo) -> Setup:
    setup = read_setup(folder)
    check_setup(folder, setup, config, context.chunk)
    trained = f"{folder} was trained"
    check_action_dim(trained, setup.action_dim, env)
    if config.use_state is not None and config.use_state != (setup.state_dim > 0):
        raise MismatchError(f"{trained} {'with' if setup.state_dim else 'without'} a state; leave model.use_state out")
    if setup.state_dim:
        check_state_dim(trained, setup.state_dim, env)
    cameras = choose_cameras(NAME, env, config.cameras, setup.cameras, tuple(env.cameras))
    check_camera_count(setup.cameras, cameras)
    return attrs.evolve(setup, cameras=cameras)


def _data_statistics(context: ModelContext, setup: Setup) -> Statistics | None:
    """Return the statistics of the demonstrations, if the run scales by them: quantiles of the actions, z-scores of the
    state; else None."""
    scaling = context.scaling
    if scaling is None:
        return None

    def make_scale(part: str, mode: str, first: str, second: str) -> FeatureScale:
        values = (tuple(map(float, scaling[part][first])), tuple(map(float, scaling[part][second])))
        return FeatureScale(mode=mode, values=values, dim=len(values[0]))

    return Statistics(
        action=make_scale("action", "QUANTILES", "q01", "q99"),
        state=make_scale("state", "MEAN_STD", "mean", "std") if setup.state_dim else None,
    )


def _build_module(
    config: FilmResnetConfig,
    context: ModelContext,
    setup: Setup,
    folder: Path | None,
    device: torch.device,
    dtype: torch.dtype,
) -> FilmResnet:
    """Weights from the folder, or random ones that depend on the seed alone. The critic stays in float32."""
    with torch.device("cpu" if folder is None else "meta"):
        module = FilmResnet(setup.network, len(setup.cameras), setup.state_dim, setup.chunk, setup.action_dim)
    if folder is None:
        initialise_weights(module, derived_seed(context.seed, "film_resnet/network"))
        module.to(device, dtype)
    else:
        fill_network(module, find_weights(folder), device, dtype)
    if context.values != "none":
        outputs = context.chunk if context.values == "action" else None
        seed, options = derived_seed(context.seed, "film_resnet/value_head"), config.value_head
        module.value_head = FilmValueHead(module.features, options.hidden, outputs, options.detach, seed)
        load_head(module.value_head, folder, VALUE_HEAD)
    return module


CLONED_RANGE = 0.99
"""Part of the actions' range to whose ends demonstrated actions are clipped, since tanh reaches the ends nowhere."""


class GaussianFilmResnetPolicy(FilmPolicy, Reparameterised):
    """film_resnet's policy with squashed Gaussians; `builder.build_policy` creates it."""

    def __init__(self, **shared: Any) -> None:
        """Create the policy; `shared` are the arguments of `FilmPolicy`."""
        super().__init__(**shared)
        self._scaler = FeatureScaler(self.statistics.action, self._device)

    @torch.no_grad()
    def sample_chunk(self, obs: Observation, noise: Noise, greedy: bool) -> Chunk:
        distribution, values = self._predict_distribution(self.module, obs)
        normals = None if greedy else as_tensor(noise.normals(*distribution.mean.shape[1:]), self._device)
        unsquashed = distribution.sample(normals)
        return Chunk(
            actions=self._scaler.restore_units(torch.tanh(unsquashed)),
            log_probs=distribution.log_prob(unsquashed),
            values=values,
            extras={"unsquashed": unsquashed},
        )

    def chunk_log_probs(self, obs: Observation, chunk: Chunk) -> Scores:
        distribution, values = self._predict_distribution(self.module, obs)
        unsquashed = as_tensor(chunk.extras["unsquashed"], self._device)
        return Scores(log_probs=distribution.log_prob(unsquashed), entropy=distribution.entropy(), values=values)

    @torch.no_grad()
    def reference_log_probs(self, obs: Observation, chunk: Chunk) -> Tensor:
        """Return log-probs under the initial weights, of which the policy keeps a copy."""
        unsquashed = as_tensor(chunk.extras["unsquashed"], self._device)
        return self._predict_distribution(self._reference, obs)[0].log_prob(unsquashed)

    def imitation_loss(self, obs: Observation, actions: ArrayOrTensor) -> Tensor:
        """Return the negative log-likelihood of actions (temperature 1), averaged over batch and chunk. Images are
        shifted at random, keyed by the batch's demonstrated actions."""
        return self.imitation_losses(obs, actions).mean()

    def imitation_terms(self, obs: Observation, actions: ArrayOrTensor) -> Tensor:
        """Return the terms of `imitation_loss`, averaged over the numbers of each action."""
        outputs, _ = self.module(*self._prepare_inputs(obs, self._draw_offsets(actions)))
        scaled = self._scaler.normalise_feature(as_tensor(actions, self._device), self._scaler.dim)
        unsquashed = torch.atanh(scaled.clamp(-CLONED_RANGE, CLONED_RANGE))
        return -SquashedGaussian.of_outputs(outputs).log_prob(unsquashed).mean(2)

    def reparameterised_actions(self, features: Tensor, normals: Tensor) -> tuple[Tensor, Tensor]:
        outputs = self.module.decode_features(features.to(self._dtype))
        distribution = SquashedGaussian.of_outputs(outputs, self._temperature)
        unsquashed = distribution.sample(normals)
        return self._scaler.restore_units(torch.tanh(unsquashed)), distribution.log_prob(unsquashed)

    def _predict_distribution(self, module: FilmResnet, obs: Observation) -> tuple[SquashedGaussian, Tensor | None]:
        """Return the distributions [B, C, A] at the policy's temperature, and values."""
        outputs, values = module(*self._prepare_inputs(obs))
        return SquashedGaussian.of_outputs(outputs, self._temperature), values
