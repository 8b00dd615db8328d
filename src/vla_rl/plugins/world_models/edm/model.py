"""The EDM world model: frames by diffusion, state and outcome by heads, and the training of both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils._pytree import tree_map

from vla_rl.core.contexts import WorldModelContext
from vla_rl.core.errors import UserError
from vla_rl.core.randomness import Noise, derived_seed
from vla_rl.core.types import Array, Observation, to_numpy
from vla_rl.core.world_models import Windows, WorldModel
from vla_rl.plugins.world_models.edm.config import EDMConfig
from vla_rl.plugins.world_models.edm.heads import Denoiser, Heads
from vla_rl.plugins.world_models.edm.motion import CHANGED, LAYERS, WHERE, Motion, Path
from vla_rl.toolkit.trainers.parallel import on_host
from vla_rl.toolkit.world_models import diffusion as D

MAX_GRADIENT = 1.0
SIGMAS = (2e-3, 5.0, 7)
"""Sampler's smallest and largest noise level, and its exponent rho (EDM, Karras et al. 2022)."""
AVERAGED = 50
"""Updates over which the weights are averaged; the averaged weights are the ones that predict."""
FAVOUR = (3.0, 0.0, 0.0)
"""Initial logits of a prediction's layers (shifted scene, shifted robot, mean image): the scene dominates at first."""
ROWS = 128
"""Most windows that are predicted at once, to bound memory."""


class Networks(nn.Module):
    """Networks that are trained by gradient descent; `Motion` is fitted by least squares."""

    def __init__(self, denoiser: Denoiser, heads: Heads) -> None:
        super().__init__()
        self.denoiser = denoiser
        self.heads = heads


@frozen(eq=False, kw_only=True)
class WindowBatch:
    """Windows of B samples, as tensors."""

    images: Tensor
    """Images [B, T, cameras 3, H, W] in [-1, 1]."""
    state: Tensor
    """States [B, T, S]."""
    chunks: Tensor
    """Action chunks [B, T - 1, C A + 1], one more where the effect of further actions is asked for: actions in [-1, 1],
    and a flag whether the chunk was executed. A chunk that ended the episode keeps all its actions, since its end is
    not known beforehand."""
    executed_counts: Tensor
    """int64 [B, T - 1]: number of actions of each chunk that were executed."""
    outcomes: Tensor
    instructions: tuple[str, ...]


class EDM(WorldModel):
    """Diffusion world model for simulators whose cameras all have one size; images are stacked as channels."""

    def __init__(self, config: EDMConfig, context: WorldModelContext) -> None:
        info = context.env
        sizes = set(info.cameras.values())
        if len(sizes) != 1 or any(side % config.fold for side in next(iter(sizes))):
            camera_sizes = ", ".join(f"{name} {h} x {w}" for name, (h, w) in info.cameras.items()) or "none"
            raise UserError(
                f"world model 'edm' needs cameras of one size, a multiple of `fold` {config.fold}; "
                f"there are: {camera_sizes}"
            )
        self.config = config
        self.history = config.history
        self.cameras = tuple(info.cameras)
        self.device = torch.device(context.device)
        self._low = torch.tensor(info.action_low, device=self.device)
        self._span = torch.tensor(info.action_high, device=self.device) - self._low
        frame, chunk = 3 * len(info.cameras) * config.fold**2, context.chunk * info.action_dim + 1
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derived_seed(context.seed, "world-model/edm"))
            size, history = config.condition, config.history
            input_channels, shares = history * frame, 0
            if config.residual:
                input_channels, shares = (history - 1 + LAYERS) * frame + WHERE * len(info.cameras), LAYERS * frame // 3
            unet = config.channels, config.depths, size
            denoiser = Denoiser(frame, input_channels, history, chunk, info.state_dim, *unet, more=shares)
            heads = Heads(len(info.cameras), info.action_dim, info.state_dim, config.heads, size)
        motion = Motion(len(info.cameras), info.action_dim, info.state_dim, next(iter(sizes)))
        networks = Networks(denoiser, heads)
        average = AveragedModel(networks, avg_fn=_running_mean).requires_grad_(False)
        self.module = nn.ModuleDict({"networks": networks, "average": average, "motion": motion})
        self.module.to(self.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._networks = networks
        self._average = average
        self._motion = motion
        self._averaged: Networks = average.module  # type: ignore[assignment]
        self._optimizers = {
            "denoiser": torch.optim.AdamW(_parameter_groups(denoiser, config.lr, config.weight_decay), eps=1e-8),
            "heads": torch.optim.AdamW(_parameter_groups(heads, config.heads_lr, config.heads_weight_decay), eps=1e-5),
        }
        self._updates = 0
        self._favour = torch.tensor(FAVOUR, device=self.device).reshape(LAYERS, 1, 1, 1, 1, 1)

    def fit(self, windows: Windows, noise: Noise) -> Mapping[str, float]:
        losses = self._compute_losses(windows, noise, learn=True)
        norm = self._step_optimizer("denoiser", losses["denoising"])
        self._average.update_parameters(self._networks)
        self._updates += 1
        metrics = {name: loss.detach() for name, loss in losses.items()} | {"grad_norm": norm}
        return {name: float(value) for name, value in metrics.items()}

    @torch.no_grad()
    def measure(self, windows: Windows, noise: Noise) -> Mapping[str, float]:
        return {name: float(loss) for name, loss in self._compute_losses(windows, noise).items()}

    @torch.no_grad()
    def imagine(self, windows: Windows, actions: Array, noise: Noise) -> Observation:
        count, fold = len(windows.instructions), self.config.fold
        height, width = windows.images[self.cameras[0]].shape[2:4]
        shape = (3 * len(self.cameras) * fold**2, height // fold, width // fold)
        start = torch.from_numpy(noise.normals(*shape))
        frames, states = [], []
        for first in range(0, count, ROWS):
            rows = slice(first, first + ROWS)
            batch, path, features = self._compute_features(windows, rows, actions)
            given = self._denoiser_input(batch.images, path)
            after = self._sample_frames(start[rows].to(self.device), given, batch.chunks, batch.state[:, -1])
            frames.append(after)
            full_chunks = torch.full((len(after),), actions.shape[1], device=self.device)
            states.append(self._averaged.heads.next_state(features, path, full_chunks))
        images, state_values = self._unfold_images(torch.cat(frames), windows), torch.cat(states).cpu().numpy()
        return Observation(
            images=images, instructions=windows.instructions, state=state_values if state_values.shape[1] else None
        )

    @torch.no_grad()
    def outcome(self, windows: Windows, actions: Array, after: Observation) -> Array:
        probabilities = []
        for first in range(0, len(windows.instructions), ROWS):
            _, _, features = self._compute_features(windows, slice(first, first + ROWS), actions)
            probabilities.append(self._averaged.heads.outcome_logits(features).softmax(-1))
        chances: Array = torch.cat(probabilities).cpu().numpy()
        return chances

    def training_state(self) -> Mapping[str, Any]:
        optimizers = {name: tree_map(on_host, optimizer.state_dict()) for name, optimizer in self._optimizers.items()}
        return {"optimizers": optimizers, "updates": self._updates}

    def load_training_state(self, state: Mapping[str, Any]) -> None:
        for name, optimizer in self._optimizers.items():
            optimizer.load_state_dict(state["optimizers"][name])
        self._updates = state["updates"]

    # ------------------------------------------------------------------------------------------------ inside

    def _step_optimizer(self, network: str, loss: Tensor) -> Tensor:
        """Take one optimiser step of a network and return the norm of its gradient."""
        optimizer = self._optimizers[network]
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self._networks.get_submodule(network).parameters(), MAX_GRADIENT)
        for group in optimizer.param_groups:
            group["lr"] = group["full_lr"] * min(1.0, (self._updates + 1) / max(self.config.warm_up, 1))
        optimizer.step()
        return norm.detach()

    def _compute_features(self, windows: Windows, rows: slice, actions: Array) -> tuple[WindowBatch, Path, Tensor]:
        """Return the batch of these windows, the predicted path of the chunk, and the heads' features for it."""
        batch = self._build_batch(windows, rows, actions)
        path = self._motion.predict_path(batch.chunks[:, -1, :-1], batch.state[:, -1])
        return batch, path, self._averaged.heads(batch.images[:, -1], path, batch.instructions)

    def _compute_losses(self, windows: Windows, noise: Noise, learn: bool = False) -> dict[str, Tensor]:
        """Return the losses of a batch of windows. With `learn` the heads also take their optimiser steps, which are
        cheap compared with the denoiser's, and then the motion model is updated."""
        batch = self._build_batch(windows)
        networks = self._networks if learn else self._averaged
        denoising, predicted = self._denoising_loss(networks.denoiser, batch, noise)
        head_losses = self._head_losses(networks.heads, batch, predicted, noise if learn else None)
        for t in range(self.history - 1, batch.chunks.shape[1]) if learn else ():
            states, pair = ((x[:, t], x[:, t + 1]) for x in (batch.state, batch.images))
            self._motion.add_chunks(batch.chunks[:, t, :-1], *states, batch.executed_counts[:, t], pair)
        return {"denoising": denoising} | head_losses

    def _denoising_loss(self, denoiser: Denoiser, batch: WindowBatch, noise: Noise) -> tuple[Tensor, list[Tensor]]:
        """Return DIAMOND's loss, and the images: the first prediction is from recorded ones, later ones are from the
        model's own predictions, through which no gradient flows."""
        K, images, predicted = self.history, batch.images, list(batch.images.unbind(1))
        rollout, loss = images.shape[1] - K, torch.zeros((), device=self.device)
        for t in range(K - 1, K - 1 + rollout):
            so_far, state = batch.chunks[:, t + 1 - K : t + 1], batch.state[:, t]
            target = self._fold_images(images[:, t + 1])
            draws = [torch.from_numpy(noise.normals(*shape)) for shape in ((), (target.shape[1], 1, 1))]
            draws.append(torch.from_numpy(noise.normals(*target.shape[1:])))
            level, offset, normals = (draw.to(self.device) for draw in draws)
            past = torch.stack(predicted[t + 1 - K : t + 1], dim=1)
            given = self._denoiser_input(past, self._motion.predict_path(so_far[:, -1, :-1], state))
            sigma = D.training_sigmas(level, self.config.sigma_loc, self.config.sigma_scale)
            noisy = D.apply_noise(target, sigma, offset, normals, D.SIGMA_OFFSET_NOISE)
            c = D.compute_conditioners(sigma)
            output = self._run_denoiser(denoiser, noisy, c, given, so_far, state)
            error = (output - D.network_target(target, noisy, c)).square()
            if self.config.changed_weight:
                changed = self._fold_images(((images[:, t + 1] - images[:, t]).abs() > CHANGED).float())
                error = error * (1 + self.config.changed_weight * changed)
            # An episode ends in the middle of its chunk.
            complete = (batch.executed_counts[:, t] > 0) & (batch.outcomes[:, t] == 0)
            loss = loss + _masked_mean(error, complete) / rollout
            predicted[t + 1] = F.pixel_shuffle(D.wrap_model_output(noisy, output, c), self.config.fold)
        return loss, predicted

    def _head_losses(
        self, heads: Heads, batch: WindowBatch, predicted: list[Tensor], learning: Noise | None
    ) -> dict[str, Tensor]:
        """Return the heads' losses, on recorded and on predicted images alike. With `learning` (noise for dropout)
        the heads take an optimiser step on each."""
        losses_of: dict[str, list[Tensor]] = {"state": [], "outcome": []}
        for t in range(self.history - 1, batch.chunks.shape[1]):
            state, then, count = batch.state[:, t], batch.state[:, t + 1], batch.executed_counts[:, t]
            path = self._motion.predict_path(batch.chunks[:, t, :-1], state)
            for images in (batch.images[:, t], predicted[t])[: 1 if t < self.history else 2]:
                features = heads(images, path, batch.instructions, learning)
                missed = (heads.next_state(features, path, count.clamp(min=1)) - then).square()
                ended = F.cross_entropy(heads.outcome_logits(features), batch.outcomes[:, t], reduction="none")
                losses = {"outcome": _masked_mean(ended, count > 0)}
                if missed.shape[1]:
                    losses["state"] = _masked_mean(missed, count > 0)
                if learning is not None:
                    self._step_optimizer("heads", torch.stack(list(losses.values())).sum())
                for name, loss in losses.items():
                    losses_of[name].append(loss.detach())
        return {name: torch.stack(each).mean() for name, each in losses_of.items() if each}

    def _sample_frames(self, x: Tensor, given: Tensor, chunks: Tensor, state: Tensor) -> Tensor:
        low, high, rho = SIGMAS
        sigmas = D.build_sigmas(self.config.evaluations, low, high, rho).to(self.device)

        def denoise_frames(noisy: Tensor, sigma: Tensor) -> Tensor:
            c = D.compute_conditioners(sigma)
            output = self._run_denoiser(self._averaged.denoiser, noisy, c, given, chunks, state)
            return D.wrap_model_output(noisy, output, c)

        # Rounding may leave a level slightly too low.
        return D.quantise_frames(D.sample_frames(denoise_frames, x, sigmas) + 1e-4)

    def _run_denoiser(
        self, denoiser: Denoiser, noisy: Tensor, c: D.Conditioners, given: Tensor, chunks: Tensor, state: Tensor
    ) -> Tensor:
        """Return the denoiser's output. With `residual` it consists of mixing weights of the layers for each pixel, and
        a residual; where the input is pure noise, an untrained network predicts the scene as its camera will see it."""
        low = getattr(torch, self.config.precision)
        with torch.autocast(self.device.type, low, enabled=low is not torch.float32):
            output: Tensor = denoiser(noisy, c, given, chunks, state).float()
        if not self.config.residual:
            return output
        frame, cameras = noisy.shape[1], len(self.cameras)
        shares = (output[:, frame:].unflatten(1, (LAYERS, cameras, 1, -1)) + self._favour).softmax(1)
        layers = given[:, -LAYERS * frame :].unflatten(1, (LAYERS, cameras, 3, -1))
        result: Tensor = output[:, :frame] + (1 - c.c_skip) / c.c_out * (shares * layers).sum(1).flatten(1, 3)
        return result

    def _build_batch(self, windows: Windows, rows: slice = slice(None), actions: Array | None = None) -> WindowBatch:
        """Return these rows of the windows as tensors; with actions float32 [all rows, C, A], then that chunk."""
        all_actions, executed_counts = windows.actions[rows], windows.executed[rows].sum(-1)
        if actions is not None:
            all_actions = np.concatenate([all_actions, to_numpy(actions)[rows, None]], axis=1)
            executed_counts = np.concatenate(
                [executed_counts, np.full((len(executed_counts), 1), all_actions.shape[2])], axis=1
            )
        steps = torch.from_numpy(executed_counts).to(self.device)
        flags = (steps > 0).float()[..., None]
        scaled = (self._to_tensor(all_actions) - self._low) / self._span * 2 - 1
        return WindowBatch(
            images=self._stack_images([to_numpy(windows.images[name])[rows] for name in self.cameras]),
            state=self._to_tensor(windows.state[rows]),
            chunks=torch.cat((scaled.flatten(2) * flags, flags), dim=2),
            executed_counts=steps,
            outcomes=torch.from_numpy(windows.outcomes[rows]).to(self.device),
            instructions=windows.instructions[rows],
        )

    def _to_tensor(self, array: Array) -> Tensor:
        return torch.as_tensor(to_numpy(array), dtype=torch.float32).to(self.device)

    def _stack_images(self, cameras: list[Any]) -> Tensor:
        """Return the images uint8 [B, T, H, W, 3] of each camera as one tensor [B, T, cameras 3, H, W] in [-1, 1]."""
        pixels = torch.from_numpy(np.stack([camera.transpose(0, 1, 4, 2, 3) for camera in cameras], axis=2))
        return pixels.to(self.device).flatten(2, 3).float().div_(255).mul_(2).sub_(1)

    def _fold_images(self, images: Tensor) -> Tensor:
        """Return images [.., cameras 3, H, W] as frames [.., channels, H / fold, W / fold] (pixel unshuffle)."""
        return F.pixel_unshuffle(images, self.config.fold)

    def _denoiser_input(self, images: Tensor, path: Path) -> Tensor:
        """Return the denoiser's conditioning channels from images [B, K, cameras 3, H, W]. With `residual` the newest
        image is replaced by the layers of the next one, and maps of where the robot goes come first."""
        if not self.config.residual:
            return self._fold_images(images).flatten(1, 2)
        layers = self._motion.build_layers(images[:, -1], path)
        frames = self._fold_images(torch.cat((images[:, :-1], layers), dim=1)).flatten(1, 2)
        return torch.cat((self._motion.locate_robot(path, frames), frames), dim=1)

    def _unfold_images(self, frames: Tensor, windows: Windows) -> dict[str, Any]:
        pixels = F.pixel_shuffle(frames, self.config.fold).add(1).div(2).mul(255).round().byte().cpu()
        parts = pixels.reshape(len(pixels), len(self.cameras), 3, *pixels.shape[2:]).permute(0, 1, 3, 4, 2).numpy()
        return {name: np.ascontiguousarray(parts[:, i]) for i, name in enumerate(self.cameras)}


def _parameter_groups(module: nn.Module, lr: float, decay: float) -> list[dict[str, Any]]:
    """Return optimiser parameter groups: weights of convolutions and linear layers decay, as in DIAMOND, no others."""
    chosen = {id(layer.weight) for layer in module.modules() if isinstance(layer, nn.Conv2d | nn.Linear)}
    parameters = list(module.parameters())
    return [
        {"params": [p for p in parameters if id(p) in chosen], "full_lr": lr, "weight_decay": decay},
        {"params": [p for p in parameters if id(p) not in chosen], "full_lr": lr, "weight_decay": 0.0},
    ]


def _running_mean(mean: Tensor, new: Tensor, count: int | Tensor) -> Tensor:
    return mean + (new - mean) / (count + 1).clamp(max=AVERAGED)  # type: ignore[union-attr]


def _masked_mean(errors: Tensor, rows: Tensor) -> Tensor:
    """Return the mean of the errors over the rows selected by bool [B]; 0 without such rows."""
    weights = rows.float().reshape(-1, *(1,) * (errors.ndim - 1)).expand_as(errors)
    return (errors * weights).sum() / weights.sum().clamp(min=1)
