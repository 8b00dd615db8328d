"""A world model of one linear layer, for tests of what checks its kind."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from vla_rl import Observation, WorldModel
from vla_rl.testing.synthetic import env_info

INFO = env_info(cameras=2, pixels=8)


class Linear(WorldModel):
    """From the last frames, the state and the chunk to the change of both, and to the outcome."""

    history = 2

    def __init__(self, config=None, context=None):
        seed, chunk = (0, 2) if context is None else (context.seed, context.chunk)
        self.cameras = tuple(INFO.cameras)
        self.sizes = [8 * 8 * 3 * len(self.cameras), INFO.state_dim, 1 + 2 * chunk]
        inputs = self.sizes[0] + INFO.state_dim + chunk * INFO.action_dim
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.module = nn.Linear(inputs, sum(self.sizes))
        self.optimizer = torch.optim.Adam(self.module.parameters(), lr=3e-3)

    def seen(self, windows, at):
        """Pixels and state of one frame."""
        pixels = [torch.as_tensor(windows.images[name][:, at]).flatten(1) / 255 for name in self.cameras]
        return torch.cat(pixels, 1), torch.as_tensor(windows.state[:, at])

    def predict(self, pixels, state, actions):
        inputs = torch.cat([pixels, state, torch.as_tensor(actions).flatten(1)], 1)
        moved, change, logits = self.module(inputs).split(self.sizes, 1)
        return pixels + moved, state + change, logits

    def losses(self, windows):
        losses = {"pixel_loss": 0.0, "state_loss": 0.0, "outcome_loss": 0.0}
        for t in range(windows.actions.shape[1]):
            played = torch.as_tensor(windows.executed[:, t].any(-1))
            pixels, state, logits = self.predict(*self.seen(windows, t), windows.actions[:, t])
            next_pixels, next_state = self.seen(windows, t + 1)
            losses["pixel_loss"] += F.mse_loss(pixels[played], next_pixels[played])
            losses["state_loss"] += F.mse_loss(state[played], next_state[played])
            outcomes = torch.as_tensor(windows.outcomes[:, t])
            losses["outcome_loss"] += F.cross_entropy(logits[played], outcomes[played])
        return losses

    def total(self, losses):
        return sum(losses.values())

    def fit(self, windows, noise):
        losses = self.losses(windows)
        self.optimizer.zero_grad()
        self.total(losses).backward()
        self.optimizer.step()
        return {name: float(loss.detach()) for name, loss in losses.items()}

    @torch.no_grad()
    def imagine(self, windows, actions, noise):
        pixels, state, _ = self.predict(*self.seen(windows, -1), actions)
        frames = (255 * pixels.clamp(0, 1)).round().byte().view(len(pixels), len(self.cameras), 8, 8, 3).numpy()
        images = {name: np.array(frames[:, i]) for i, name in enumerate(self.cameras)}
        return Observation(images=images, instructions=windows.instructions, state=state.numpy())

    @torch.no_grad()
    def outcome(self, windows, actions, after):
        return self.predict(*self.seen(windows, -1), actions)[2].softmax(-1).numpy()

    def training_state(self):
        return {"optimizer": self.optimizer.state_dict()}

    def load_training_state(self, state):
        self.optimizer.load_state_dict(state["optimizer"])
