"""Frames of demonstrations: observations, and the chunks of actions that followed them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
from attrs import evolve, frozen

from vla_rl.core.catalogue import hook_modules
from vla_rl.core.errors import UserError
from vla_rl.core.hookspecs import SimEnv
from vla_rl.core.randomness import generator
from vla_rl.core.spec.sections import ImitationSpec
from vla_rl.core.spec.spec import Spec, make_component
from vla_rl.core.types import Array, EnvInfo, Observation, to_numpy
from vla_rl.runtime.placement.components import build_plain_env, find_data_plugin, open_data
from vla_rl.toolkit.trainers.demonstrated_actions import check_demonstrated_actions

BLOCKS = 16
"""Parts of the frames, each of neighbouring episodes, that the bootstrap draws."""
ROUNDS = 16
"""Most episodes that the expert plays in each env."""
ENVS = 16
"""Simulator envs in which the expert acts at once."""


@frozen(kw_only=True, eq=False)
class Frames:
    """F frames in the order of their episodes."""

    obs: Observation
    actions: Array
    """Demonstrated chunks, float32 [F, C, A]."""

    def __len__(self) -> int:
        return len(self.actions)

    @property
    def blocks(self) -> Array:
        """Block of each frame, int64 [F]."""
        return np.arange(len(self)) * min(BLOCKS, len(self)) // len(self)


def read_frames(spec: Spec, info: EnvInfo, folder: Path, count: int) -> Frames:
    """Read frames of a data set, evenly spread over its episodes. Raise UserError for data of another robot."""
    name = find_data_plugin(folder, spec.plugins)
    data = make_component("data", name, spec.plugins, folder=str(folder))
    own = spec.imitation.data if spec.imitation is not None else None
    if own is not None and own.type == name:  # its cameras, features and choice of episodes
        data = evolve(own, config=evolve(own.config, folder=folder))
    recording = open_data(evolve(spec, imitation=ImitationSpec(data=data)), info, "cpu", hook_modules(spec.plugins))
    check_demonstrated_actions(recording, info, spec.rollout.chunk)
    obs, actions = recording.read_samples(_spread_rows(recording.num_samples(), count))
    return Frames(obs=obs.numpy(), actions=to_numpy(actions))


def collect_expert_frames(spec: Spec, count: int) -> Frames:
    """Let the simulator's scripted expert play, and return frames of its successful episodes. Raise UserError for a
    simulator without an expert, and where it never succeeds."""
    episodes: list[tuple[Observation, Array]] = []
    with closing(build_plain_env(spec, ENVS)) as env:
        for number in range(ROUNDS):
            episodes += _collect_round(env, spec, number)
            if len(episodes) >= 2 * count:
                break
    if not episodes:
        raise UserError(f"the scripted expert of env {spec.env.type!r} did not succeed once; give --data FOLDER")
    rows = _spread_rows(len(episodes), count).tolist()
    obs, actions = zip(*(episodes[row] for row in rows), strict=True)
    return Frames(obs=Observation.concat(obs), actions=np.concatenate(actions))


def _collect_round(env: SimEnv, spec: Spec, number: int) -> Sequence[tuple[Observation, Array]]:
    """Play an episode in each env. Return observations and chunks of those that succeeded."""
    states = env.reset_states("train")
    chosen = [states[(number * ENVS + i) * 37 % len(states)] for i in range(ENVS)]
    limits = {task.name: task.max_steps for task in env.info.tasks}
    steps = max(limits[state.task] for state in chosen)
    noise = spec.imitation.expert.noise if spec.imitation is not None and spec.imitation.expert is not None else 0.0
    rng = generator(spec.seed, "identify", number)
    obs = env.reset(np.arange(ENVS), np.array([state.id for state in chosen]), np.arange(ENVS)).numpy()
    active, solved = np.ones(ENVS, bool), np.zeros(ENVS, bool)
    collected: list[list[tuple[Observation, Array]]] = [[] for _ in chosen]
    for _ in range(-(-steps // spec.rollout.chunk)):
        labels = to_numpy(env.expert_chunk()).astype(np.float32)
        for i in np.flatnonzero(active):
            collected[i].append((obs.take([i]), labels[[i]]))
        moved = labels + noise * rng.standard_normal(labels.shape)
        moved = np.clip(moved, env.info.action_low, env.info.action_high).astype(np.float32)
        result = env.chunk_step(moved, active, True).numpy()
        solved |= result.success & active
        active = active & ~(result.terminated | result.truncated).any(1)
        obs = result.obs
        if not active.any():
            break
    return [step for i in np.flatnonzero(solved) for step in collected[i]]


def _spread_rows(rows: int, count: int) -> Array:
    return np.unique(np.linspace(0, rows - 1, count).astype(np.int64))
