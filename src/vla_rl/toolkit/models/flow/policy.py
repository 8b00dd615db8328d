"""The base class of policies that denoise an action chunk by a learnt velocity: sampling, scoring and cloning (pi_RL).

One denoising step is a Gaussian: x_{i+1} ~ N(mean, std), with t_i = 1 - i / K, from noise (t = 1) to actions. With v
the velocity at (x, t) and d = 1 / K:

    ODE         mean = x - d v                                          std = 0
    Flow-SDE    mean = x - d v - s^2 d / (2 t) (x + (1 - t) v)          std = s sqrt(d),  s = a sqrt(t / (1 - t))
    Flow-CPS    mean = x - d v - (t - d)(1 - cos(pi a / 2)) (x + (1 - t) v)    std = (t - d) sin(pi a / 2)
    Flow-Noise  mean = x - d v                                          std from a network

Flow-CPS replaces part of the remaining noise by new noise of the same size, so its last step is the ODE's. At t = 1 the
denominator of s takes 1 - t_1 instead of 0 (RLinf). The network receives the time as the original counts it: openpi in
float32 by repeated addition, lerobot exactly. With K = 10 the other way moves samples by 1e-4.

The log-probability of an action is the sum, over the stochastic denoising steps and over the dimensions that the
simulator takes, of the log-density of x_{i+1} given x_i. The initial noise does not count, since its density does not
depend on the weights; nor do actions that are denoised but not executed.

Sources: pi_RL (arXiv 2510.25889), Flow-GRPO (arXiv 2505.05470), Flow-CPS (arXiv 2509.05952).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from vla_rl.core.capabilities import Capturable, ContinuesChunks, HasCritic, HasFeatures
from vla_rl.core.randomness import Noise, generator
from vla_rl.core.types import ArrayOrTensor, Chunk, Observation, Scores, UnexecutedActions, to_numpy
from vla_rl.toolkit.models.adapters import seed_torch
from vla_rl.toolkit.models.checkpoints.lerobot import model_config, write_processors
from vla_rl.toolkit.models.flow.checkpoint import FlowCheckpoint, save_folder
from vla_rl.toolkit.models.flow.config import FlowNoise, FlowSDE
from vla_rl.toolkit.models.flow.inputs import FlowInputs, FlowParts
from vla_rl.toolkit.models.flow.network import RECORDED, BackboneFeatures
from vla_rl.toolkit.models.flow.real_time import guidance_weights, guide_velocity
from vla_rl.toolkit.models.heads import HorizonValueHead, PrefixValueHead
from vla_rl.toolkit.models.networks import as_tensor, same_name

NOWHERE = -1
"""Value of `step` in `Chunk.extras` for a greedy chunk, in which no step was stochastic."""


class FlowPolicy(FlowInputs, HasCritic, HasFeatures, ContinuesChunks, Capturable):
    """A flow-matching policy; subclasses define `save` and `blocks`, `flow_variants` has what settings add."""

    exact_time = False
    """The network receives exact times (lerobot), instead of float32 times by repeated addition (openpi)."""
    tokens_per_action = 1
    trained_heads = ("noise_head",)
    extra_names: tuple[str, ...] = ("chain", "step")
    """What of the results of `decide` becomes `Chunk.extras`."""

    def __init__(self, parts: FlowParts) -> None:
        super().__init__(parts)
        config, context, module = parts.config, parts.context, parts.module
        self.critic = module.value_head
        how = config.noise
        # with flow_noise the level counts for nothing: the noise head replaces the schedule's deviations
        level = FlowSDE().level if isinstance(how, FlowNoise) else how.level
        self._schedule = FlowSchedule(config.denoise_steps, level, parts.device, self.exact_time, how.type)
        self._every_step = isinstance(how, FlowNoise) or how.steps == "all"
        self._seed = context.seed
        self._spread = context.temperature**0.5  # temperature: the density to the power 1 / temperature
        self._greedy_start = config.greedy_start
        self._shape = module.shape

    @torch.no_grad()
    def sample_chunk(self, obs: Observation, noise: Noise, greedy: bool) -> Chunk:
        self._set_dropout(False)
        inputs = self._build_inputs(obs) | self._draw_noise(len(obs), noise, greedy)
        offset = self._read_offsets(obs)
        if offset is not None:
            inputs["offset"] = offset
        decided = self.decide(inputs)
        return Chunk(
            actions=decided["actions"],
            log_probs=decided["log_probs"],
            values=decided.get("values"),
            extras={name: decided[name] for name in (*self.extra_names, *RECORDED) if name in decided},
        )

    def _draw_noise(self, rows: int, noise: Noise, greedy: bool) -> dict[str, Tensor]:
        """Return the random numbers among the inputs of `decide`."""
        if greedy:
            return {"start": self._build_start().repeat(rows, 1, 1)}
        draws = self._schedule.steps if self._every_step else 1
        return {
            "start": as_tensor(noise.normals(*self._shape), self._device),
            "step": as_tensor(noise.uniforms(), self._device),
            "draws": as_tensor(noise.normals(draws, *self._shape), self._device),
        }

    def decide(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Denoise chunks. Without "step" and "draws" among the inputs no step is stochastic."""
        x, state = inputs["start"], inputs["state"]
        seen = self._encode_inputs(inputs)
        prefix = self.module.build_prefix(seen, state)
        draws = inputs.get("draws")
        step, log_probs = self._begin_denoising(x, inputs.get("step"))
        chain = [x]
        for i, timed in enumerate(self.module.prepare_steps(prefix, self._schedule.time)):
            draw = None if draws is None else draws[:, i if self._every_step else 0]
            index = self._schedule.indices[i].expand(len(x))
            x, log_probs = self._denoise_step(timed, state, x, index, step, draw, log_probs)
            chain.append(x)
        actions, states = self._finish_chain(chain, inputs.get("offset"))
        decided = {"actions": actions, "log_probs": log_probs, "chain": states, "step": step}
        if self._reuse and draws is not None:  # greedy chunks are not trained on
            decided |= seen.pack(self._count_missing_tokens(inputs["ids"]))
        values = self.module.estimate_values(prefix, state)
        return decided if values is None else {**decided, "values": values}

    def save_lerobot(
        self,
        folder: Path,
        checkpoint: FlowCheckpoint,
        kind: str,
        public: Mapping[str, Any],
        *,
        prompt: Sequence[str],
        tokenizer: str,
        normalise_first: bool = False,
        public_name: Callable[[str], str] = same_name,
        **settings: Any,
    ) -> None:
        """Write a folder in lerobot's layout, with adapters merged into the weights.

        Args:
            checkpoint: the policy's, or one to write in its place.
            kind: lerobot's type of the model.
            public: keys of config.json that give the network's sizes; empty where it has no keys for them.
            prompt, tokenizer, normalise_first: as in `lerobot.write_processors`.
            public_name: as in `save_folder`.
            settings: further keys of config.json.
        """
        scales, shape, pixels = checkpoint.statistics, checkpoint.shape, checkpoint.sizes.image_size
        keys = {"type": kind, **public, **shape.to_lerobot(), **settings}
        save_folder(
            self.module,
            checkpoint,
            folder,
            raw=model_config(scales, self._cameras, pixels, shape.horizon, **keys),
            processors=partial(
                write_processors,
                statistics=scales,
                prompt=prompt,
                tokenizer=tokenizer,
                normalise_first=normalise_first,
            ),
            public_name=public_name,
            public_sizes=bool(public),
            executed=self._chunk,
        )

    def _count_missing_tokens(self, ids: Tensor) -> int:
        """Return how many tokens prompts int64 [B, L] are shorter than those of other batches can be."""
        return 0

    def chunk_log_probs(self, obs: Observation, chunk: Chunk) -> Scores:
        """Score recorded chunks. This takes one pass of the expert if one step was stochastic, K passes if all were,
        and those of the critic; the vision-language model runs once, or not at all (`reuse_prefix`)."""
        prefix, state = self._encode_observation(obs, seen=BackboneFeatures.unpack(chunk.extras, self._device))
        chain, step = (as_tensor(chunk.extras[name], self._device) for name in ("chain", "step"))
        rows = torch.arange(len(step), device=self._device)
        indices = [i.expand_as(step) for i in self._schedule.indices] if self._every_step else [step.clamp(min=0)]
        log_probs = torch.zeros(len(step), self._chunk, 1, device=self._device)
        spread, values = torch.zeros_like(log_probs), None
        for i, index in enumerate(indices):
            inputs = prefix, state, chain[rows, index], self._schedule.time[index]
            if i:
                hidden = self.module.run_expert(*inputs)
            else:
                hidden, values = self.module.run_expert_and_critic(*inputs)
            following = chain[rows, index + 1]
            log_probs, spread = self._add_density(hidden, inputs[2], following, index, step, log_probs, spread)
        # without a noise head the entropy is a constant, and callers differentiate it
        spread = spread + 0 * log_probs
        return Scores(log_probs=log_probs, entropy=spread, values=values)

    @torch.no_grad()
    def continue_chunk(
        self, obs: Observation, noise: Noise, greedy: bool, previous: Sequence[UnexecutedActions]
    ) -> Tensor:
        """Return actions [B, C, A] that continue each sample's last chunk, by the ODE (`real_time`). They begin at the
        observation, so the first `delay` of them are those executed meanwhile."""
        horizon, width = self._shape
        prefix, state = self._encode_observation(obs)
        offset = self._read_offsets(obs)
        last, weights = torch.zeros(len(obs), horizon, width), torch.zeros(len(obs), horizon, width)
        for row, unexecuted in enumerate(previous):
            left = len(unexecuted.actions)
            actions = as_tensor(unexecuted.actions, self._device)  # absolute: the last chunk had another state
            last[row, :left] = self._normalise_actions(actions, None if offset is None else offset[row]).cpu()
            weights[row, :, : self._actions.dim] = guidance_weights(left, unexecuted.delay, horizon)[:, None]
        last, weights = last.to(self._device), weights.to(self._device)
        x = self._unscored_start(prefix, state, noise, greedy)
        for i in range(self._schedule.steps):
            time = self._schedule.time[i].expand(len(obs))

            def predict_velocity(x: Tensor, time: Tensor = time) -> Tensor:
                return self.module.project_velocity(self.module.run_expert(prefix, state, x, time))

            x = x - self._schedule.delta * guide_velocity(predict_velocity, x, time, last, weights)
        return self._restore_actions(x, offset)

    def policy_features(self, obs: Observation) -> Tensor:
        """Return the expert's mean output over the horizon for x = 0 at t = 1, and the state, float32 [B, D]."""
        return self._compute_features(*self._encode_observation(obs))

    @torch.no_grad()
    def values(self, obs: Observation) -> Tensor:
        values = self.module.estimate_values(*self._encode_observation(obs))
        assert values is not None
        return values

    def imitation_loss(self, obs: Observation, actions: ArrayOrTensor) -> Tensor:
        """Return the flow-matching loss (Black et al. 2024): the mean squared error of the velocity at a random time.
        Actions after the C demonstrated ones repeat the last one and do not count. Times and noise are keyed by seed,
        demonstrated actions and weights: new at every optimiser step, and the same after a resume."""
        return self._imitation_errors(obs, actions).mean()

    def imitation_terms(self, obs: Observation, actions: ArrayOrTensor) -> Tensor:
        return self._imitation_errors(obs, actions).mean(2)

    def _imitation_errors(self, obs: Observation, actions: ArrayOrTensor) -> Tensor:
        """Return the squared errors of the velocities, [B, C, width]."""
        horizon = self._shape[0]
        wanted = self._normalise_actions(as_tensor(actions, self._device), self._read_offsets(obs))
        target = torch.cat([wanted, wanted[:, -1:].expand(-1, horizon - wanted.shape[1], -1)], dim=1)
        trained = [p for p in self.module.network.parameters() if p.requires_grad]
        keys = (crc32(to_numpy(t).tobytes()) for t in (actions, trained[-1]))
        rng = generator(self._seed, f"{self.name}/imitation", *keys)
        time = as_tensor(training_times(rng, len(target)), self._device)
        noise = as_tensor(rng.standard_normal(target.shape, dtype=np.float32), self._device)
        with seed_torch(int(rng.integers(2**63)), self._device):
            prefix, state = self._encode_observation(obs, dropout=True)
            errors = self.module.flow_matching(prefix, state, target, noise, time)
        return errors[:, : wanted.shape[1]]

    # ------------------------------------------------------------------------------------------------ one step

    def _begin_denoising(self, start: Tensor, uniforms: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the stochastic step's number, int64 [B], and log-probs of 0 an action. Without uniforms: none."""
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
        """Return mean [B, H, A] and std ([B, H, A] or [B, 1, 1]; 0: not noisy) of a step from x and expert's output."""
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
        if greedy:
            return self._build_start().expand(len(state), -1, -1)
        return as_tensor(noise.normals(*self._shape), self._device)

    def _compute_features(self, prefix: Any, state: Tensor) -> Tensor:
        """Return the features [B, D] of `policy_features`."""
        hidden = self.module.run_expert(
            prefix, state, state.new_zeros(len(state), *self._shape), state.new_ones(len(state))
        )
        return torch.cat([hidden.mean(1), state], dim=1)

    regions = (
        *FlowInputs.regions,
        _begin_denoising,
        _denoise_step,
        _add_density,
        _finish_chain,
        HorizonValueHead.forward,
        PrefixValueHead.forward,
    )


class FlowSchedule:
    """Times of K denoising steps, and the noise and drift that Flow-SDE or Flow-CPS adds to each."""

    def __init__(
        self, steps: int, level: float, device: torch.device, exact: bool = False, method: str = "flow_sde"
    ) -> None:
        grid = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
        time = grid[:-1]
        self.steps = steps
        self.indices = torch.arange(steps, device=device)
        """Number of each step, int64 [K]."""
        self.delta = 1.0 / steps
        self.noisy_steps = steps - (method == "flow_cps")
        """Number of steps, counted from the first, that may be stochastic."""
        std, drift = (_compute_cps if method == "flow_cps" else _compute_sde)(grid, level)
        times = [torch.tensor(1.0)]
        while len(times) < steps:
            times.append(times[-1] - torch.tensor(self.delta))
        self.time = (time.float() if exact else torch.stack(times)).to(device)
        self.std = std.float().to(device)
        self.drift = drift.float().to(device)

    def step_mean(self, x: Tensor, velocity: Tensor, index: Tensor, noisy: Tensor | None) -> Tensor:
        """Return the mean of step `index` (int64 [B]) from x [B, H, D]; `noisy` (bool [B]) ones get the drift."""
        mean = x - self.delta * velocity
        if noisy is None:
            return mean
        drift = torch.where(noisy, self.drift[index], 0.0)[:, None, None]
        return mean - drift * (x + (1 - self.time[index])[:, None, None] * velocity)


def _compute_sde(grid: Tensor, level: float) -> tuple[Tensor, Tensor]:
    """Return Flow-SDE's standard deviation and the factor of its drift [K] between the times `grid` [K + 1], evenly
    spaced. `level`: the factor of sigma."""
    time, delta = grid[:-1], 1.0 / (len(grid) - 1)
    # The first step, from pure noise, would divide by 0: it takes the next time, as RLinf's does.
    remaining = torch.where(time == 1, 1 - grid[1], 1 - time)
    sigma = level * (time / remaining).sqrt()
    return sigma * math.sqrt(delta), sigma**2 * delta / (2 * time)


def _compute_cps(grid: Tensor, level: float) -> tuple[Tensor, Tensor]:
    """Return Flow-CPS's standard deviation and drift of each step between the times of the grid."""
    angle = math.pi / 2 * level
    return grid[1:] * math.sin(angle), grid[1:] * (1 - math.cos(angle))


def training_times(rng: np.random.Generator, count: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Draw times for flow-matching training, float32 [count], denser near the noise (Black et al. 2024)."""
    # As in openpi, no time is 0, where nothing is left to denoise.
    return (rng.beta(1.5, 1.0, count) * 0.999 + 0.001).astype(np.float32)


def log_density(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Return the log-density of each element of x under N(mean, std); 0 where std is 0, a deterministic step."""
    safe = torch.where(std > 0, std, 1.0)
    density = -0.5 * ((x - mean) / safe) ** 2 - safe.log() - 0.5 * math.log(2 * math.pi)
    return torch.where(std > 0, density, 0.0)


def gaussian_entropy(std: Tensor) -> Tensor:
    """Return the entropy of each element in nats; 0 where std is 0."""
    safe = torch.where(std > 0, std, 1.0)
    return torch.where(std > 0, safe.log() + 0.5 * math.log(2 * math.pi * math.e), 0.0)
