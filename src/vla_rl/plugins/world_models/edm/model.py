"""The world model: frames by diffusion, state and outcome by heads, and how all of it is fitted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vla_rl.core.errors import UserError
from vla_rl.core.randomness import Noise, derived_seed
from vla_rl.core.types import Context, Observation, to_numpy
from vla_rl.core.world_models import Windows, WorldModel
from vla_rl.plugins.world_models.edm.networks import Denoiser, Heads
from vla_rl.toolkit.world_models import diffusion as D

if TYPE_CHECKING:
    from vla_rl.core.randomness import Array
    from vla_rl.plugins.world_models.edm import EDMConfig

MAX_GRADIENT = 1.0
SIGMAS = (2e-3, 5.0, 7)
"""Of the sampler: smallest and largest noise level, rho."""
BATCH = 128
"""Rows that are imagined at once."""
CHANGED = 2 * 8 / 255


class EDM(WorldModel):
    """Cameras of one size, one above the other as channels."""

    def __init__(self, config: EDMConfig, context: Context) -> None:
        info = context.env
        if info is None:
            raise UserError("world model 'edm' is built for a simulator: give `Context.env`")
        sizes = set(info.cameras.values())
        if len(sizes) != 1 or any(side % config.fold for side in next(iter(sizes))):
            shown = ", ".join(f"{name} {h} x {w}" for name, (h, w) in info.cameras.items()) or "none"
            raise UserError(
                f"world model 'edm' needs cameras of one size, a multiple of `fold` {config.fold}; there are: {shown}"
            )
        self.config, self.history, self.cameras = config, config.history, tuple(info.cameras)
        self.device = torch.device(context.device)
        self._low = torch.tensor(info.action_low, device=self.device)
        self._span = torch.tensor(info.action_high, device=self.device) - self._low
        grid, frame = max(next(iter(sizes))) // config.fold, 3 * len(info.cameras) * config.fold**2
        chunk, self._classes = context.chunk * info.action_dim + 1, 1 + 2 * context.chunk
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derived_seed(context.seed, "world-model/edm"))
            size, history = config.condition, config.history
            denoiser = Denoiser(frame, history, chunk, info.state_dim, config.channels, config.depths, size)
            heads = Heads(frame, history * chunk, history, info.state_dim, self._classes, config.heads, size // 2, grid)
        self.module = nn.ModuleDict({"denoiser": denoiser, "heads": heads}).to(self.device)
        self._denoiser, self._heads = denoiser, heads
        groups = [
            group
            for network, lr in ((denoiser, config.lr), (heads, config.heads_lr))
            for group in _groups(network, lr, config.weight_decay)
        ]
        self._optimizer = torch.optim.AdamW(groups, eps=1e-8)
        self._updates = 0

    def fit(self, windows: Windows, noise: Noise) -> Mapping[str, float]:
        losses = self._losses(windows, noise)
        self._optimizer.zero_grad()
        sum(losses.values(), torch.zeros((), device=self.device)).backward()
        norm = nn.utils.clip_grad_norm_(self._denoiser.parameters(), MAX_GRADIENT)
        nn.utils.clip_grad_norm_(self._heads.parameters(), MAX_GRADIENT)
        for group in self._optimizer.param_groups:
            group["lr"] = group["full_lr"] * min(1.0, (self._updates + 1) / max(self.config.warm_up, 1))
        self._optimizer.step()
        self._updates += 1
        metrics = {name: loss.detach() for name, loss in losses.items()} | {"grad_norm": norm.detach()}
        return {name: float(value) for name, value in metrics.items()}

    @torch.no_grad()
    def measure(self, windows: Windows, noise: Noise) -> Mapping[str, float]:
        return {name: float(loss) for name, loss in self._losses(windows, noise).items()}

    @torch.no_grad()
    def imagine(self, windows: Windows, actions: Array, noise: Noise) -> Observation:
        count = len(windows.instructions)
        start = torch.from_numpy(noise.normals(*self._shape(windows)))
        frames, states = [], []
        for first in range(0, count, BATCH):
            rows = slice(first, first + BATCH)
            past, state = self._frames(windows, rows), self._tensor(windows.state[rows, -1])
            chunks = self._chunks(windows, rows, actions)
            after = self._sample(start[rows].to(self.device), past, chunks, state)
            features = self._heads.look(past[:, -1], after, chunks, state, windows.instructions[rows])
            frames.append(after)
            states.append(self._heads.next_state(features, chunks[:, -1], state))
        images, told = self._images(torch.cat(frames), windows), torch.cat(states).cpu().numpy()
        return Observation(images=images, instructions=windows.instructions, state=told if told.shape[1] else None)

    @torch.no_grad()
    def outcome(self, windows: Windows, actions: Array, after: Observation) -> Array:
        found = []
        for first in range(0, len(windows.instructions), BATCH):
            rows = slice(first, first + BATCH)
            before, state = self._frames(windows, rows)[:, -1], self._tensor(windows.state[rows, -1])
            following = self._folded([to_numpy(after.images[name])[rows, None] for name in self.cameras])[:, 0]
            chunks = self._chunks(windows, rows, actions)
            features = self._heads.look(before, following, chunks, state, windows.instructions[rows])
            then = state if after.state is None else self._tensor(to_numpy(after.state)[rows])
            found.append(self._heads.logits(features, then).softmax(-1))
        chances: Array = torch.cat(found).cpu().numpy()
        return chances

    def training_state(self) -> Mapping[str, Any]:
        return {"optimizer": _on_host(self._optimizer.state_dict()), "updates": self._updates}

    def load_training_state(self, state: Mapping[str, Any]) -> None:
        self._optimizer.load_state_dict(state["optimizer"])
        self._updates = state["updates"]

    # ------------------------------------------------------------------------------------------------ inside

    def _losses(self, windows: Windows, noise: Noise) -> dict[str, Tensor]:
        """DIAMOND's: the first frame from recorded ones, those that follow from the model's own prediction of it, in
        which there is no gradient. The heads learn on recorded and predicted frames alike."""
        K, every = self.history, slice(None)
        frames, state = self._frames(windows, every), self._tensor(windows.state)
        chunks = self._chunks(windows, every)
        played = torch.from_numpy(windows.executed.any(-1)).to(self.device)
        outcomes = torch.from_numpy(windows.outcomes).to(self.device)
        rollout = frames.shape[1] - K
        losses = dict.fromkeys(("denoising", "state", "outcome"), torch.zeros((), device=self.device))
        recorded = frames.clone()
        for i in range(rollout):
            draws = [torch.from_numpy(noise.normals(*shape)) for shape in ((), (frames.shape[2], 1, 1))]
            draws.append(torch.from_numpy(noise.normals(*frames.shape[2:])))
            level, offset, normals = (draw.to(self.device) for draw in draws)
            real = played[:, K - 1 + i]
            past, target, so_far = frames[:, i : K + i], recorded[:, K + i], chunks[:, i : K + i]
            before, then = state[:, K - 1 + i], state[:, K + i]
            sigma = D.training_sigmas(level, self.config.sigma_loc, self.config.sigma_scale)
            noisy = D.apply_noise(target, sigma, offset, normals, D.SIGMA_OFFSET_NOISE)
            c = D.compute_conditioners(sigma)
            output = self._denoiser(noisy, c, past, so_far, before) + self._anchor(past, c)
            error = (output - D.network_target(target, noisy, c)).square()
            if self.config.changed_weight:
                changed = (target - recorded[:, K + i - 1]).abs() > CHANGED
                error = error * (1 + self.config.changed_weight * changed)
            losses["denoising"] = losses["denoising"] + _mean(error, real) / rollout
            predicted = D.wrap_model_output(noisy, output, c)
            for earlier, later in ((recorded[:, K + i - 1], target), (past[:, -1], predicted)):
                features = self._heads.look(earlier, later, so_far, before, windows.instructions)
                error = (self._heads.next_state(features, so_far[:, -1], before) - then).square()
                if error.shape[1]:
                    losses["state"] = losses["state"] + _mean(error, real) / rollout
                error = F.cross_entropy(self._heads.logits(features, then), outcomes[:, K - 1 + i], reduction="none")
                losses["outcome"] = losses["outcome"] + _mean(error, real) / (2 * rollout)
            frames = torch.cat((frames[:, : K + i], predicted[:, None], frames[:, K + i + 1 :]), dim=1)
        return losses

    def _sample(self, x: Tensor, past: Tensor, chunks: Tensor, state: Tensor) -> Tensor:
        low, high, rho = SIGMAS
        sigmas = D.build_sigmas(self.config.evaluations, low, high, rho).to(self.device)

        def denoise(noisy: Tensor, sigma: Tensor) -> Tensor:
            c = D.compute_conditioners(sigma)
            return D.wrap_model_output(noisy, self._denoiser(noisy, c, past, chunks, state) + self._anchor(past, c), c)

        return D.quantised(D.sample(denoise, x, sigmas) + 1e-4)  # by rounding a level may have come out too low

    def _anchor(self, past: Tensor, c: D.Conditioners) -> Tensor | float:
        """With `residual`, what makes a network that says nothing predict the frame before where noise hides all."""
        return (1 - c.c_skip) / c.c_out * past[:, -1] if self.config.residual else 0.0

    def _tensor(self, array: Array) -> Tensor:
        return torch.as_tensor(to_numpy(array), dtype=torch.float32).to(self.device)

    def _shape(self, windows: Windows) -> tuple[int, int, int]:
        height, width = windows.images[self.cameras[0]].shape[2:4]
        fold = self.config.fold
        return 3 * len(self.cameras) * fold**2, height // fold, width // fold

    def _frames(self, windows: Windows, rows: slice) -> Tensor:
        """[B, T, channels, H, W] in [-1, 1]."""
        return self._folded([to_numpy(windows.images[name])[rows] for name in self.cameras])

    def _folded(self, cameras: list[Any]) -> Tensor:
        """uint8 [B, T, H, W, 3] of each camera -> [B, T, channels, H / fold, W / fold] in [-1, 1]."""
        pixels = torch.from_numpy(np.stack(cameras, axis=2)).to(self.device).float().div(255).mul(2).sub(1)
        frames = pixels.permute(0, 1, 2, 5, 3, 4).flatten(2, 3)
        flat = F.pixel_unshuffle(frames.flatten(0, 1), self.config.fold)
        return flat.reshape(*frames.shape[:2], *flat.shape[1:])

    def _images(self, frames: Tensor, windows: Windows) -> dict[str, Any]:
        pixels = F.pixel_shuffle(frames, self.config.fold).add(1).div(2).mul(255).round().byte().cpu()
        parts = pixels.reshape(len(pixels), len(self.cameras), 3, *pixels.shape[2:]).permute(0, 1, 3, 4, 2).numpy()
        return {name: np.ascontiguousarray(parts[:, i]) for i, name in enumerate(self.cameras)}

    def _chunks(self, windows: Windows, rows: slice, actions: Array | None = None) -> Tensor:
        """[B, T - 1, C A + 1], and of one more chunk where it is given: actions in [-1, 1], and whether it was
        played. Of a chunk that ended the episode all actions count, since nobody knows beforehand where it ends."""
        played = np.asarray(windows.executed[rows].any(-1))
        asked = windows.actions[rows]
        if actions is not None:
            asked = np.concatenate([asked, to_numpy(actions)[rows, None]], axis=1)
            played = np.concatenate([played, np.ones((len(played), 1), bool)], axis=1)
        flags = torch.from_numpy(played).to(self.device).float()[..., None]
        scaled = (self._tensor(asked) - self._low) / self._span * 2 - 1
        return torch.cat((scaled.flatten(2) * flags, flags), dim=2)


def _groups(module: nn.Module, lr: float, decay: float) -> list[dict[str, Any]]:
    """Weights of convolutions and linear layers decay, as in DIAMOND; the rest does not."""
    chosen = {id(layer.weight) for layer in module.modules() if isinstance(layer, nn.Conv2d | nn.Linear)}
    parameters = list(module.parameters())
    return [
        {"params": [p for p in parameters if id(p) in chosen], "full_lr": lr, "weight_decay": decay},
        {"params": [p for p in parameters if id(p) not in chosen], "full_lr": lr, "weight_decay": 0.0},
    ]


def _on_host(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _on_host(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_on_host(part) for part in value]
    return value.cpu() if isinstance(value, Tensor) else value


def _mean(errors: Tensor, rows: Tensor) -> Tensor:
    """Over rows (bool [B]); 0 where there are none."""
    weights = rows.float().reshape(-1, *(1,) * (errors.ndim - 1)).expand_as(errors)
    return (errors * weights).sum() / weights.sum().clamp(min=1)
