"""The base class of policies that denoise an action chunk: the denoising chain is a sequence of Gaussians (pi_RL).

The log-probability of an action is the sum, over the stochastic denoising steps and over the dimensions that the
simulator takes, of the log-density of x_{i+1} given x_i. The initial noise does not count, since its density does not
depend on the weights; nor do actions that are denoised but not executed.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn

from vla_rl.core.errors import NotOffered, UserError
from vla_rl.core.hookspecs import STEERING, VLAModel
from vla_rl.core.randomness import Noise, generator
from vla_rl.core.types import ArrayOrTensor, Chunk, Context, Observation, Scores, UnexecutedActions, to_numpy
from vla_rl.toolkit.models.adapters import before_training, seed_torch
from vla_rl.toolkit.models.fitting import simulator_of
from vla_rl.toolkit.models.flow_config import FlowConfig, FlowNoise, FlowSDE
from vla_rl.toolkit.models.flow_fit import FlowIOAdapter
from vla_rl.toolkit.models.flow_matching import FlowSchedule, gaussian_entropy, log_density, training_times
from vla_rl.toolkit.models.flow_network import FlowModule
from vla_rl.toolkit.models.heads import HorizonValueHead, PrefixValueHead
from vla_rl.toolkit.models.images import ImageProcessor
from vla_rl.toolkit.models.networks import as_tensor
from vla_rl.toolkit.models.real_time import guide_velocity, weights_of
from vla_rl.toolkit.models.scaling import FeatureScaler
from vla_rl.toolkit.models.steering import SteeringHead

NOWHERE = -1
"""Value of `step` in `Chunk.extras` for a greedy chunk, in which no step was stochastic."""


class FlowPolicy(VLAModel):
    """A flow-matching policy except for its prompt: a subclass defines how instructions become the `_build_prefix`, and
    what `save` writes."""

    module: FlowModule
    name: str
    """Name of the model, in messages and in the keys of random numbers."""
    exact_time = False
    """The network receives exact times (lerobot), instead of float32 times by repeated addition (openpi)."""
    delta_actions = 0
    """First numbers of an action that the network predicts relative to those of the state; 0: none."""
    tokens_per_action = 1

    def __init__(
        self,
        config: FlowConfig,
        context: Context,
        fit: FlowIOAdapter,
        module: FlowModule,
        images: ImageProcessor,
        device: torch.device,
    ) -> None:
        env = simulator_of(context, self.name)
        self.module = module
        self.checkpoint = fit.checkpoint
        self.images = images
        self.critic = module.value_head
        self.cameras_read = tuple(fit.cameras)
        how = config.noise
        # with flow_noise the level counts for nothing: the noise head replaces the schedule's deviations
        level = FlowSDE().level if isinstance(how, FlowNoise) else how.level
        self._schedule = FlowSchedule(config.denoise_steps, level, device, self.exact_time, how.type)
        self._every_step = isinstance(how, FlowNoise) or how.steps == "all"
        self._actions = FeatureScaler(fit.checkpoint.statistics.action, device)
        self._state_scaler = None if fit.state is None else FeatureScaler(fit.state, device)
        bounds = (env.action_low, env.action_high)
        low, high = (torch.tensor(bound, dtype=torch.float32, device=device) for bound in bounds)
        self._low = low
        self._high = high
        self._cameras = fit.cameras
        self._chunk = context.chunk
        self._seed = context.seed
        self._device = device
        self._spread = context.temperature**0.5  # temperature: the density to the power 1 / temperature
        self._greedy_start = config.greedy_start
        self._train_prefix = not config.train_expert_only
        self._shape = module.shape
        self._adapted = config.lora is not None
        self._first_noise_head = deepcopy(module.noise_head) if self._adapted else None
        self.steering_shape = None if module.steering is None else module.steering.shape
        self._dropouts = [part for part in module.modules() if isinstance(part, nn.Dropout) and part.p > 0]
        module.eval()  # checkpoints have no dropout; adapters use it in `imitation_loss` only

    @abstractmethod
    def _encode_prompts(self, obs: Observation, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the prompts' token ids and mask (False at padding), [B, L]; `state` as in `_build_prefix`."""

    @abstractmethod
    def _build_prefix(self, pixels: Tensor, ids: Tensor, mask: Tensor, state: Tensor) -> Any:
        """Return the network's prefix of images, prompts and the normalised, padded state [B, S]."""

    @torch.no_grad()
    def sample_chunk(self, obs: Observation, noise: Noise, greedy: bool) -> Chunk:
        rows = len(obs)
        self._set_dropout(False)
        inputs = self._build_inputs(obs)
        if self.steering_shape is not None:
            if not greedy:
                inputs["normals"] = as_tensor(noise.normals(*self.steering_shape), self._device)
        elif greedy:
            inputs["start"] = self._build_start().repeat(rows, 1, 1)
        else:
            inputs["start"] = as_tensor(noise.normals(*self._shape), self._device)
            inputs["step"] = as_tensor(noise.uniforms(), self._device)
            draws = self._schedule.steps if self._every_step else 1
            inputs["draws"] = as_tensor(noise.normals(draws, *self._shape), self._device)
        offset = self._action_offset(obs)
        if offset is not None:
            inputs["offset"] = offset
        decided = self.decide(inputs)
        return Chunk(
            actions=decided["actions"],
            log_probs=decided["log_probs"],
            values=decided.get("values"),
            extras={name: decided[name] for name in (STEERING, "chain", "step") if name in decided},
        )

    def decide(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Denoise chunks. Without "step" and "draws" among the inputs no step is stochastic. A steering head chooses
        the start, and reads "normals" where it shall sample."""
        if self.module.steering is not None:
            return self._decide_steered(self.module.steering, inputs)
        x, steps = inputs["start"], self._schedule.steps
        rows = len(x)
        prefix, state = (
            self._build_prefix(inputs["pixels"], inputs["ids"], inputs["mask"], inputs["state"]),
            inputs["state"],
        )
        draws = inputs.get("draws")
        step, log_probs = self._begin_denoising(x, inputs.get("step"))
        chain = [x]
        for i in range(steps):
            draw = None if draws is None else draws[:, i if self._every_step else 0]
            index = self._schedule.indices[i].expand(rows)
            x, log_probs = self._denoise_step(prefix, state, x, index, step, draw, log_probs)
            chain.append(x)
        actions, states = self._finish_chain(chain, inputs.get("offset"))
        decided = {"actions": actions, "log_probs": log_probs, "chain": states, "step": step}
        values = self.module.estimate_values(prefix, state)
        return decided if values is None else {**decided, "values": values}

    def _decide_steered(self, head: SteeringHead, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Denoise chunks by the ODE from the noise that the head chooses."""
        prefix, state = (
            self._build_prefix(inputs["pixels"], inputs["ids"], inputs["mask"], inputs["state"]),
            inputs["state"],
        )
        distribution = head(self._compute_features(prefix, state), self._spread)
        unsquashed = distribution.sample(inputs.get("normals"))
        x = head.initial_noise(unsquashed)
        step, log_probs = self._begin_denoising(x, None)
        for i in range(self._schedule.steps):
            x, _ = self._denoise_step(prefix, state, x, self._schedule.indices[i].expand(len(x)), step, None, log_probs)
        decided = {
            "actions": self._restore_actions(x, inputs.get("offset")),
            "log_probs": self._by_action(distribution.log_prob(unsquashed)),
            STEERING: unsquashed,
        }
        values = self.module.estimate_values(prefix, state)
        return decided if values is None else {**decided, "values": values}

    def chunk_log_probs(self, obs: Observation, chunk: Chunk) -> Scores:
        """Score recorded chunks. This takes one pass of the expert if one step was stochastic, K passes if all were;
        the vision-language model runs once. With a steering head the score is that of the initial noise."""
        prefix, state = self._encode_observation(obs)
        if self.module.steering is not None:
            distribution = self.module.steering(self._compute_features(prefix, state), self._spread)
            unsquashed = as_tensor(chunk.extras[STEERING], self._device)
            return Scores(
                log_probs=self._by_action(distribution.log_prob(unsquashed)),
                entropy=self._by_action(distribution.entropy()),
                values=self.module.estimate_values(prefix, state),
            )
        chain, step = (as_tensor(chunk.extras[name], self._device) for name in ("chain", "step"))
        rows = torch.arange(len(step), device=self._device)
        indices = [i.expand_as(step) for i in self._schedule.indices] if self._every_step else [step.clamp(min=0)]
        log_probs = torch.zeros(len(step), self._chunk, 1, device=self._device)
        spread = torch.zeros_like(log_probs)
        for index in indices:
            x = chain[rows, index]
            hidden = self.module.run_expert(prefix, state, x, self._schedule.time[index])
            log_probs, spread = self._add_density(hidden, x, chain[rows, index + 1], index, step, log_probs, spread)
        # without a noise head the entropy is a constant, and callers differentiate it
        spread = spread + 0 * log_probs
        return Scores(log_probs=log_probs, entropy=spread, values=self.module.estimate_values(prefix, state))

    @torch.no_grad()
    def continue_chunk(
        self, obs: Observation, noise: Noise, greedy: bool, previous: Sequence[UnexecutedActions]
    ) -> Tensor:
        """Return actions [B, C, A] that continue each sample's last chunk, by the ODE (`real_time`). They begin at the
        observation, so the first `delay` of them are those executed meanwhile."""
        horizon, width = self._shape
        prefix, state = self._encode_observation(obs)
        offset = self._action_offset(obs)
        last, weights = torch.zeros(len(obs), horizon, width), torch.zeros(len(obs), horizon, width)
        for row, unexecuted in enumerate(previous):
            left = len(unexecuted.actions)
            relative = self._subtract_offset(
                as_tensor(unexecuted.actions, self._device), None if offset is None else offset[row : row + 1]
            )
            last[row, :left] = self._actions.normalise_feature(relative, width).cpu()
            weights[row, :, : self._actions.dim] = weights_of(left, unexecuted.delay, horizon)[:, None]
        last, weights = last.to(self._device), weights.to(self._device)
        x = self._unscored_start(prefix, state, noise, greedy)
        for i in range(self._schedule.steps):
            time = self._schedule.time[i].expand(len(obs))

            def predict_velocity(x: Tensor, time: Tensor = time) -> Tensor:
                return self.module.project_velocity(self.module.run_expert(prefix, state, x, time))

            x = x - self._schedule.delta * guide_velocity(predict_velocity, x, time, last, weights)
        return self._restore_actions(x, offset)

    def policy_features(self, obs: Observation) -> Tensor:
        """Return the mean over the horizon of the expert's output for the mean noise (x = 0 at t = 1), and the
        normalised state, float32 [B, D]."""
        return self._compute_features(*self._encode_observation(obs))

    def steering_noise(self, features: Tensor, normals: Tensor) -> tuple[Tensor, Tensor]:
        if self.module.steering is None:
            raise NotOffered(f"this {self.name} has no steering head; `steering` among the model's keys adds one")
        distribution = self.module.steering(features, self._spread)
        unsquashed = distribution.sample(normals)
        return torch.tanh(unsquashed), distribution.log_prob(unsquashed)

    @torch.no_grad()
    def values(self, obs: Observation) -> Tensor:
        values = self.module.estimate_values(*self._encode_observation(obs))
        if values is None:
            raise NotOffered(f"this {self.name} has no value head; it is built for algorithms that need values")
        return values

    @torch.no_grad()
    def reference_log_probs(self, obs: Observation, chunk: Chunk) -> Tensor:
        """Score recorded chunks under the reference policy: adapters off, and the noise head in its initial state.
        Return float32 [B, C, 1]. Needs no second copy of the weights. Raise NotOffered without `lora`."""
        if not self._adapted:
            raise NotOffered(f"a reference for {self.name} needs `lora`; without adapters it is a second copy")
        with before_training(self.module, noise_head=self._first_noise_head, value_head=None):
            return self.chunk_log_probs(obs, chunk).log_probs

    def imitation_loss(self, obs: Observation, actions: ArrayOrTensor) -> Tensor:
        """Return the flow-matching loss (Black et al. 2024): the mean squared error of the velocity at a random time.

        Actions after the C demonstrated ones repeat the last one and do not count. Times and noise are keyed by the
        run's seed, the demonstrated actions and the weights, so that they are new at every optimiser step and the same
        after a resume. Raises UserError with a steering head, whose policy is frozen.
        """
        if self.module.steering is not None:
            raise UserError(
                f"this {self.name} is steered, and its weights are frozen: it cannot clone; clone first, and set "
                f"model.steering for the run with trainer 'dsrl'"
            )
        horizon, width = self._shape
        relative = self._subtract_offset(as_tensor(actions, self._device), self._action_offset(obs, chunked=True))
        wanted = self._actions.normalise_feature(relative, width)
        target = torch.cat([wanted, wanted[:, -1:].expand(-1, horizon - wanted.shape[1], -1)], dim=1)
        trained = [p for p in self.module.network.parameters() if p.requires_grad]
        keys = (crc32(to_numpy(t).tobytes()) for t in (actions, trained[-1]))
        rng = generator(self._seed, f"{self.name}/imitation", *keys)
        time = as_tensor(training_times(rng, len(target)), self._device)
        noise = as_tensor(rng.standard_normal(target.shape, dtype=np.float32), self._device)
        with seed_torch(int(rng.integers(2**63)), self._device):
            prefix, state = self._encode_observation(obs, dropout=True)
            errors = self.module.flow_matching(prefix, state, target, noise, time)
        return errors[:, : wanted.shape[1]].mean()

    # ------------------------------------------------------------------------------------------------ one step

    def _begin_denoising(self, start: Tensor, uniforms: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the number of the stochastic step, int64 [B], and log-probs of 0 for each action. Without uniform
        numbers no step is stochastic."""
        log_probs = start.new_zeros(len(start), self._chunk, 1, dtype=torch.float32)
        if uniforms is None:
            return torch.full((len(start),), NOWHERE, device=self._device), log_probs
        count = self._schedule.noisy_steps
        return (uniforms * count).long().clamp(max=count - 1), log_probs

    def _denoise_step(
        self,
        prefix: Any,
        state: Tensor,
        x: Tensor,
        index: Tensor,
        step: Tensor,
        draw: Tensor | None,
        log_probs: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Take denoising step `index` (int64 [B]) from x. Return the next x, and the sum of all log-probs so far.

        Args:
            step: int64 [B], as in `Chunk.extras`.
            draw: standard normal [B, H, A]; None: the chunk is greedy.
        """
        hidden = self.module.run_expert(prefix, state, x, self._schedule.time[index])
        noisy = step != NOWHERE if self._every_step else step == index
        mean, std = self._compute_transition(hidden, x, index, noisy)
        x = mean if draw is None else mean + std * draw
        return x, log_probs + self._sum_dimensions(log_density(x, mean, std))

    def _add_density(
        self,
        hidden: Tensor,
        x: Tensor,
        following: Tensor,
        index: Tensor,
        step: Tensor,
        log_probs: Tensor,
        spread: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropies so far, with those of step `index` from x to the `following` state added."""
        mean, std = self._compute_transition(hidden, x, index, step != NOWHERE)
        log_probs = log_probs + self._sum_dimensions(log_density(following, mean, std))
        return log_probs, spread + self._sum_dimensions(gaussian_entropy(std).expand_as(mean))

    def _finish_chain(self, chain: Sequence[Tensor], offset: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the actions in the simulator's units, and all states of the chain, [B, K + 1, H, A]."""
        actions = self._restore_actions(chain[-1], offset)
        return actions, torch.stack(list(chain), dim=1)

    def _compute_transition(self, hidden: Tensor, x: Tensor, index: Tensor, noisy: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean [B, H, A] and standard deviation ([B, H, A] or [B, 1, 1]) of step `index` from x, for the
        expert's output; 0 where not noisy."""
        velocity = self.module.project_velocity(hidden)
        if self.module.noise_head is None:
            mean, std = self._schedule.step_mean(x, velocity, index, noisy), self._schedule.std[index][:, None, None]
        else:
            mean, std = self._schedule.step_mean(x, velocity, index, None), self.module.noise_head(hidden)
        return mean, torch.where(noisy[:, None, None], std * self._spread, 0.0)

    def _sum_dimensions(self, elements: Tensor) -> Tensor:
        """Sum [B, H, A] over the dimensions of each executed action, and return [B, C, 1]."""
        return elements[:, : self._chunk, : self._actions.dim].sum(-1, keepdim=True)

    def _build_start(self) -> Tensor:
        if self._greedy_start == "zeros":
            return torch.zeros(1, *self._shape, device=self._device)
        return as_tensor(
            generator(0, f"{self.name}/greedy").standard_normal((1, *self._shape), dtype=np.float32), self._device
        )

    def _unscored_start(self, prefix: Any, state: Tensor, noise: Noise, greedy: bool) -> Tensor:
        """Return the initial noise [B, H, A] of chunks whose log-prob is not needed."""
        head = self.module.steering
        if head is not None:
            normals = None if greedy else as_tensor(noise.normals(*head.shape), self._device)
            return head.initial_noise(head(self._compute_features(prefix, state), self._spread).sample(normals))
        if greedy:
            return self._build_start().expand(len(state), -1, -1)
        return as_tensor(noise.normals(*self._shape), self._device)

    def _compute_features(self, prefix: Any, state: Tensor) -> Tensor:
        """Return the features [B, D] of `policy_features`; without gradient where the policy is frozen."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.module.steering is None):
            hidden = self.module.run_expert(
                prefix, state, state.new_zeros(len(state), *self._shape), state.new_ones(len(state))
            )
            return torch.cat([hidden.mean(1), state], dim=1)

    def _by_action(self, elements: Tensor) -> Tensor:
        """Return the sum of numbers of the noise [B, R, W] in equal parts for each action, [B, C, 1]."""
        parts = elements.sum((1, 2)) / self._chunk
        return parts[:, None, None].expand(-1, self._chunk, 1)

    def _encode_observation(self, obs: Observation, dropout: bool = False) -> tuple[Any, Tensor]:
        """Return the prefix and the normalised, padded state [B, S]. Switches the adapters' dropout."""
        self._set_dropout(dropout)
        inputs = self._build_inputs(obs)
        return self._build_prefix(**inputs), inputs["state"]

    def _build_inputs(self, obs: Observation) -> dict[str, Tensor]:
        """Return the arguments of `_build_prefix`."""
        recorded = None
        if self._state_scaler is not None:
            if obs.state is None:
                raise ValueError(f"{self.name} was built with a state, and the observation has none")
            recorded = as_tensor(obs.state, self._device)
        cameras = [as_tensor(obs.images[name], self._device) for name in self._cameras]
        pixels, state = self._process_inputs(cameras, recorded)
        ids, mask = self._encode_prompts(obs, state)
        return {"pixels": pixels, "ids": ids, "mask": mask, "state": state}

    def _process_inputs(self, cameras: Sequence[Tensor], recorded: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the images and the recorded state as the network takes them; zeros without a state."""
        pixels = self.images.process_images(cameras)
        width = self.checkpoint.shape.state_dim
        if recorded is None or self._state_scaler is None:
            return pixels, torch.zeros(len(pixels), width, device=self._device)
        return pixels, self._state_scaler.normalise_feature(recorded, width)

    def _action_offset(self, obs: Observation, chunked: bool = False) -> Tensor | None:
        """Return the first numbers of the state that the network's actions are relative to, [B, N], or with `chunked`
        [B, 1, N]; None where actions are not relative."""
        if not self.delta_actions:
            return None
        if obs.state is None:
            raise ValueError(f"{self.name} predicts actions relative to the state, and the observation has none")
        offset = as_tensor(obs.state, self._device)[:, : self.delta_actions]
        return offset[:, None] if chunked else offset

    def _restore_actions(self, x: Tensor, offset: Tensor | None) -> Tensor:
        """Return the actions [B, C, A] of denoised chunks in the simulator's units and range. `offset`: as
        `_action_offset` returns it."""
        actions = self._actions.restore_units(x[:, : self._chunk])
        if offset is not None:
            count = self.delta_actions
            actions = torch.cat([actions[..., :count] + offset[:, None], actions[..., count:]], dim=-1)
        return actions.clamp(self._low, self._high)

    def _subtract_offset(self, actions: Tensor, offset: Tensor | None) -> Tensor:
        """Return actions [..., A] in the simulator's units as the network predicts them. `offset`: [..., N] or None."""
        if offset is None:
            return actions
        count = self.delta_actions
        return torch.cat([actions[..., :count] - offset, actions[..., count:]], dim=-1)

    def _set_dropout(self, on: bool) -> None:
        for part in self._dropouts:
            part.train(on)

    def _frozen_prefix(self) -> torch.set_grad_enabled:
        """Return a context that disables gradients if the vision-language model is not trained."""
        return torch.set_grad_enabled(torch.is_grad_enabled() and self._train_prefix)

    regions: tuple[Callable[..., Any], ...] = (
        _process_inputs,
        _begin_denoising,
        _denoise_step,
        _add_density,
        _finish_chain,
        HorizonValueHead.forward,
        PrefixValueHead.forward,
    )
