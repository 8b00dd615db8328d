"""Frames of demonstrations: observations, and the chunks of actions that followed them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from attrs import evolve, frozen

from vla_rl.core.catalogue import build, hook_modules, installed_plugins, load
from vla_rl.core.contexts import EnvContext
from vla_rl.core.errors import UserError
from vla_rl.core.hookspecs import SimEnv
from vla_rl.core.randomness import generator
from vla_rl.core.spec.sections import ImitationSpec
from vla_rl.core.spec.spec import Spec, make_component
from vla_rl.core.types import Array, EnvInfo, Observation, to_numpy
from vla_rl.runtime.placement.components import open_data
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


def read_frames(spec: Spec, info: EnvInfo, folder: Path, kind: str | None, count: int) -> Frames:
    """Read frames of a data set, evenly spread over its episodes. Raise UserError for data of another robot."""
    name = kind or _data_plugin(folder)
    data = make_component("data", name, spec.plugins, folder=str(folder))
    own = spec.imitation.data if spec.imitation is not None else None
    if own is not None and own.type == name:  # its cameras, features and choice of episodes
        data = evolve(own, config=evolve(own.config, folder=folder))
    recording = open_data(evolve(spec, imitation=ImitationSpec(data=data)), info, "cpu", hook_modules(spec.plugins))
    check_demonstrated_actions(recording, info, spec.rollout.chunk)
    rows = np.unique(np.linspace(0, recording.num_samples() - 1, count).astype(np.int64))
    obs, actions = recording.read_samples(rows)
    return Frames(obs=obs.numpy(), actions=to_numpy(actions))


def collect_expert_frames(spec: Spec, count: int) -> Frames:
    """Let the simulator's scripted expert play, and return frames of its successful episodes. Raise UserError for a
    simulator without an expert, and where it never succeeds."""
    context = EnvContext(seed=spec.seed, chunk=spec.rollout.chunk, num_envs=ENVS)
    env: SimEnv = build("env", spec.env.type, spec.env.config, context, spec.plugins)
    try:
        episodes: list[tuple[Observation, Array]] = []
        for number in range(ROUNDS):
            episodes += _collect_round(env, spec, number)
            if len(episodes) >= 2 * count:
                break
    finally:
        env.close()
    if not episodes:
        raise UserError(f"the scripted expert of env {spec.env.type!r} did not succeed once; give --data FOLDER")
    obs, actions = Observation.concat([obs for obs, _ in episodes]), np.concatenate([chunks for _, chunks in episodes])
    rows = np.unique(np.linspace(0, len(actions) - 1, count).astype(np.int64))
    return Frames(obs=obs.take(rows), actions=actions[rows])


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
    return [step for i, steps_of in enumerate(collected) if solved[i] for step in steps_of]


def _data_plugin(folder: Path) -> str:
    """Return the data plugin that knows a folder's files."""
    for name in installed_plugins("data"):
        if any(any(folder.glob(files)) for files in load("data", name).files):
            return name
    return "lerobot"  # whose message for other folders says what they are
