"""Beacons: drive a puck to the beacon that the instruction names, against a draught that changes with the episode."""

from __future__ import annotations

import numpy as np
from attrs import field, frozen
from attrs.validators import ge

from vla_rl import ChunkResult, EnvContext, EnvInfo, EnvPlugin, Observation, ResetState, SimEnv, TaskInfo, generator

COLOURS = {"red": (220, 40, 40), "blue": (40, 80, 220)}
STATES, SPEED, REACH = 128, 0.15, 0.2


@frozen(kw_only=True)
class BeaconsConfig:
    pixels: int = field(default=64, validator=ge(16))
    """Side of the image."""
    draught: float = field(default=0.03, validator=ge(0))
    """Greatest sideways push of a step; the table is 2 wide."""


class Beacons(SimEnv):
    def __init__(self, config: BeaconsConfig, context: EnvContext) -> None:
        self.num_envs, self.chunk, self.config = context.num_envs, context.chunk, config
        tasks = tuple(TaskInfo(name=c, instruction=f"drive to the {c} beacon", max_steps=24) for c in COLOURS)
        cameras = {"top": (config.pixels, config.pixels)}
        bounds = {"action_low": (-1.0, -1.0), "action_high": (1.0, 1.0)}
        self.info = EnvInfo(cameras=cameras, state_dim=6, tasks=tasks, extras={"distance": "C"}, **bounds)
        self.spots = np.zeros((self.num_envs, 3, 2), np.float32)  # puck, red beacon, blue beacon
        self.task = np.zeros(self.num_envs, np.int64)
        self.draught = np.zeros(self.num_envs, np.float32)

    def reset_states(self, split: str) -> tuple[ResetState, ...]:
        first = {"train": 0, "eval": STATES}[split]
        return tuple(ResetState(id=i, task=list(COLOURS)[i % 2]) for i in range(first, first + STATES))

    def reset(self, env_ids, state_ids, seed) -> Observation:
        for env_id, state, key in zip(env_ids, state_ids, seed, strict=True):
            self.spots[env_id] = generator(int(state), "beacons: scene").uniform(-0.9, 0.9, (3, 2))
            self.task[env_id] = state % 2
            self.draught[env_id] = generator(int(key), "beacons: draught").uniform(-1, 1) * self.config.draught
        return self.observe(env_ids)

    def chunk_step(self, actions, active, stop_at_end) -> ChunkResult:
        running, shape = np.array(active), actions.shape[:2]
        executed, won, distance = np.zeros(shape, bool), np.zeros(shape, bool), np.zeros(shape, np.float32)
        for c in range(shape[1]):
            executed[:, c] = running
            move = SPEED * np.clip(actions[:, c], -1, 1) + self.draught[:, None] * (1, 0)
            self.spots[:, 0] = np.where(running[:, None], np.clip(self.spots[:, 0] + move, -1, 1), self.spots[:, 0])
            distance[:, c] = np.linalg.norm(self.way(), axis=-1)
            won[:, c] = running & (distance[:, c] < REACH)
            running = running & ~(won[:, c] & stop_at_end)
        success = won[np.arange(len(won)), np.maximum(executed.sum(1) - 1, 0)]
        return ChunkResult(
            obs=self.observe(np.arange(self.num_envs)),
            rewards=won.astype(np.float32),
            terminated=won,
            truncated=np.zeros(shape, bool),
            executed=executed,
            success=success,
            extras={"distance": distance},
        )

    def expert_chunk(self) -> np.ndarray:
        steps = np.arange(1, self.chunk + 1)[:, None, None]  # the way that is left after each step at full speed
        left = self.way() - np.sign(self.way()) * np.minimum(np.abs(self.way()), SPEED * (steps - 1))
        return np.clip(left / SPEED, -1, 1).transpose(1, 0, 2).astype(np.float32)

    def way(self) -> np.ndarray:
        return self.spots[np.arange(self.num_envs), 1 + self.task] - self.spots[:, 0]

    def observe(self, env_ids) -> Observation:
        side = self.config.pixels
        image = np.full((len(env_ids), side, side, 3), 118, np.uint8)
        grid = np.linspace(-1, 1, side)
        for spot, colour, radius in ((1, COLOURS["red"], 0.2), (2, COLOURS["blue"], 0.2), (0, (245, 245, 245), 0.12)):
            x, y = self.spots[env_ids, spot].T
            image[np.hypot(grid - x[:, None, None], grid[:, None] - y[:, None, None]) < radius] = colour
        told = tuple(self.info.tasks[i].instruction for i in self.task[env_ids])
        return Observation(images={"top": image}, instructions=told, state=self.spots[env_ids].reshape(-1, 6))


plugin = EnvPlugin(config=BeaconsConfig, build=Beacons, summary="drive a puck to the named beacon (acme)", expert=True)
