"""The world model of a run, in a worker with simulators: fitting, measuring, and checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import attrs
import numpy as np
import torch
from attrs import define
from PIL import Image

from vla_rl.core.catalogue import build, load
from vla_rl.core.contexts import WorldModelContext, WorldModelTrainerContext
from vla_rl.core.interrupts import StopRequested
from vla_rl.core.manager import wrap
from vla_rl.core.randomness import Noise
from vla_rl.core.reset_states import draw_state
from vla_rl.core.run.shape import RunShape
from vla_rl.core.spec.spec import Spec
from vla_rl.core.trainers import Trainer, WindowData
from vla_rl.core.types import Array, EnvInfo, Observation, ResetState
from vla_rl.core.world_models import Windows, WorldModel
from vla_rl.runtime.imagination.interfaces import FitResult, RecordedEpisode, WorldModelInterface
from vla_rl.runtime.imagination.worker.episode_files import EpisodeShape
from vla_rl.runtime.imagination.worker.episode_store import EpisodeStore
from vla_rl.runtime.imagination.worker.imagined_env import ImaginedEnv
from vla_rl.runtime.messages.ids import IMAGINED_EPISODES
from vla_rl.runtime.workers.added_roles import RoleContext
from vla_rl.toolkit.models.checkpoints.files import read_pickled
from vla_rl.toolkit.trainers.result_checks import guard_trainer
from vla_rl.toolkit.world_models.measures import THRESHOLDS, imagine_episodes, measure_quality, thresholds_met
from vla_rl.toolkit.world_models.windows import frames_of

TRAINER = "world_model"
"""Trainer that fits world models."""
ROLLOUT = 2
"""Number of consecutive predictions of a fit: the second is made from the first (DIAMOND)."""
ACTION_EPISODES = 16
"""Number of held-out episodes that action following is measured on; each of their chunks is imagined 8 times."""
COMPARED_EPISODES = 6
"""Number of episodes in a comparison image."""


@define(eq=False)
class _Counts:
    """Counts that a checkpoint keeps."""

    updates: int = 0
    """Number of updates of the world model: its version."""
    good: bool = False
    """True where all quality thresholds were met at the last measurement."""


class WorldModelWorker(WorldModelInterface):
    """The world model of a run, a role of the first worker with simulators (role `WORLD_MODEL`)."""

    def __init__(self, context: RoleContext, folder: Path) -> None:
        """Build the world model and the store of its episodes.

        Args:
            context: the spec, the simulator's description, and what a role is built with.
            folder: folder of the run.
        Raises UserError without cameras, and where episodes do not fit, or have another shape than the store's.
        """
        spec = context.spec
        assert spec.world_model is not None and spec.imagination is not None
        self.spec = spec
        self.section = spec.imagination
        self.info = limit_steps(context.info, spec.rollout.max_steps)
        self.store = EpisodeStore(
            folder / "episodes",
            EpisodeShape.of(self.info, spec.rollout.chunk),
            capacity=self.section.buffer,
            spare=spare_of(spec),
            held_out=self.section.held_out,
        )
        making = WorldModelContext(seed=spec.seed, device=context.device, chunk=spec.rollout.chunk, env=self.info)
        plugin = spec.world_model
        model: WorldModel = build("world_model", plugin.type, plugin.config, making, spec.plugins)
        self.model = wrap("world_model", model, plugin.type, context.wrappers)
        fitting = WorldModelTrainerContext(seed=spec.seed, device=context.device, world_model=self.model)
        trainer: Trainer[WindowData] = build("trainer", TRAINER, load("trainer", TRAINER).config(), fitting)
        checks = guard_trainer(f"world model {plugin.type!r}", own_table=True)
        self.trainer = wrap("trainer", trainer, TRAINER, [checks, *context.wrappers])
        self.training_envs: list[ImaginedEnv] = []
        """Envs for training in imagination; they start from new episodes after each fit."""
        self.counts = _Counts()
        self._images = folder / "imagined"
        self._heartbeat = context.heartbeat
        self._stop_requested = context.stop_requested
        self._starts: tuple[ResetState, ...] = ()
        """Windows from which imagined trajectories start."""
        self._state_before: dict[str, Any] | None = None
        """State for checkpoints while a step is running: the state before the step."""

    # ----------------------------------------------------------------------------------------------- of a step

    def fit(self, step: int, *ended: list[RecordedEpisode]) -> FitResult:
        before = perf_counter()
        self.store.index.saved()
        self._state_before = copy.deepcopy(self._current_state())
        episodes = [attrs.evolve(episode, step=step) for of_worker in ended for episode in of_worker]
        episodes.sort(key=lambda episode: episode.number)
        self.store.add(episodes)
        updates, losses = self._fit_model()
        fitted = perf_counter()
        measures = self._measure_model()
        thresholds = thresholds_met(measures, self.counts.good) if measures else dict.fromkeys(THRESHOLDS, False)
        self.counts.good = all(thresholds.values())
        for env in self.training_envs:
            env.refresh_starts()
        self._starts = self.training_envs[0].reset_states("train") if self.training_envs else ()
        last = min(len(episodes), self.section.evaluated_episodes)
        return FitResult(
            updates=updates,
            version=self.counts.updates,
            metrics={
                **{f"world_model/{name}": float(np.mean(values)) for name, values in losses.items()},
                **{f"world_model/{name}": value for name, value in measures.items() if np.isfinite(value)},
                "world_model/updates": float(self.counts.updates),
                "world_model/episodes": float(len(self.store)),
                "time/fit": fitted - before,
                "time/measure": perf_counter() - fitted,
            },
            thresholds_met=thresholds,
            last_episodes=tuple(self.store.last_windows(last)),
        )

    def _fit_model(self) -> tuple[int, dict[str, list[float]]]:
        """Fit the model to what is recorded. Return the number of updates, and the metrics of each update."""
        section = self.section
        losses: dict[str, list[float]] = {}
        if not self.store.start_windows("first"):
            return 0, losses
        updates = section.fit_updates if self.counts.good else section.fit_updates_below_threshold
        for _ in range(updates):
            self._check_stop()
            number = self.counts.updates
            windows = self.store.draw(
                section.fit_batch, history=self.model.history, rollout=ROLLOUT, seed=self.spec.seed, number=number
            )
            samples = range(section.fit_batch)
            noise = Noise(self.spec.seed, "world-model/fit", samples, [0] * len(samples), [number] * len(samples))
            for name, value in self.trainer.update(WindowData(windows=windows, noise=noise)).sums.items():
                losses.setdefault(name, []).append(value)
            self.counts.updates += 1
        return updates, losses

    def _measure_model(self) -> dict[str, float]:
        """Measure the model on held-out episodes; {} without them."""
        self._check_stop()
        windows = self._held_out(self.section.evaluated_episodes)
        if windows is None:
            return {}
        return measure_quality(self.model, windows, self.spec.seed, action_episodes=ACTION_EPISODES)

    def draw_starts(self, groups: Sequence[int]) -> list[ResetState]:
        if not self._starts:
            return []
        return [draw_state(self._starts, self.spec.seed, group, IMAGINED_EPISODES) for group in groups]

    def finish_step(self) -> None:
        if self._state_before is not None:
            self._state_before = None
            self.store.index.dropped()

    # --------------------------------------------------------------------------------------------- checkpoints

    def save(self, file: Path) -> None:
        torch.save(self._current_state() if self._state_before is None else self._state_before, file)
        self.store.flush()
        windows = self._held_out(COMPARED_EPISODES)
        if windows is not None and self._state_before is None:
            write_comparison_image(self.model, windows, self._images / f"update_{self.counts.updates:06d}.png")

    def load(self, file: Path) -> None:
        state = read_pickled(file, ("recorder", "counts", "weights", "training"))
        self.store.index.load_state(state["recorder"])
        self.counts = _Counts(**state["counts"])
        for module in self.trainer.modules().values():
            module.load_state_dict(state["weights"])
        self.trainer.load(state["training"])

    def _current_state(self) -> dict[str, Any]:
        weights = {
            name: tensor.detach().cpu()
            for module in self.trainer.modules().values()
            for name, tensor in module.state_dict().items()
        }
        return {
            "recorder": self.store.index.state(),
            "counts": attrs.asdict(self.counts),
            "weights": weights,
            "training": dict(self.trainer.state()),
        }

    # -------------------------------------------------------------------------------------------------- inside

    def _held_out(self, count: int) -> Windows | None:
        """Return windows of complete held-out episodes; None without them."""
        ids = self.store.held_out(count)
        if not len(ids):
            return None
        return self.store.read_windows(ids, history=self.model.history, rollout=self.store.shape.longest)

    def _check_stop(self) -> None:
        self._heartbeat()
        if self._stop_requested():
            raise StopRequested


def limit_steps(info: EnvInfo, max_steps: int | None) -> EnvInfo:
    """Return the description with the spec's step limit, if it has one."""
    if max_steps is None:
        return info
    return attrs.evolve(info, tasks=tuple(attrs.evolve(task, max_steps=max_steps) for task in info.tasks))


def spare_of(spec: Spec) -> int:
    """Return how many episodes may be recorded between two checkpoints and in an unfinished step."""
    assert spec.imagination is not None
    shape = RunShape.from_spec(spec)
    step = (shape.groups_per_step + shape.resampled_groups) * shape.group_size
    return min((spec.train.checkpoint_every or spec.train.steps) * step, spec.imagination.buffer) + step


GAP = 2
"""Pixels between two frames, and between two episodes."""
WHITE = 255


def write_comparison_image(model: WorldModel, windows: Windows, file: Path) -> None:
    """Write a PNG with each episode of `windows` as recorded (from its first frame on, as `measure`), imagined below.
    Frames run from left to right chunk by chunk, cameras next to each other. White marks chunks that were not
    executed."""
    imagined = imagine_episodes(model, windows)
    first = frames_of(windows, model.history - 1)
    lines = []
    for episode in range(len(windows.instructions)):
        for observations in (imagined.real, imagined.imagined):
            frames = [_join_cameras(first, episode)]
            for executed, obs in zip(imagined.executed, observations, strict=True):
                frame = _join_cameras(obs, episode)
                frames.append(frame if executed[episode] else np.full_like(frame, WHITE))
            lines.append(np.concatenate(frames, axis=1))
        lines.append(np.full_like(lines[-1][: 3 * GAP], WHITE))
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.concatenate(lines)).save(file)


def _join_cameras(obs: Observation, episode: int) -> Array:
    """Return the cameras of an env side by side, with a gap to the right and below."""
    frame = np.concatenate([np.asarray(images[episode]) for images in obs.images.values()], axis=1)
    return np.pad(frame, ((0, GAP), (0, 2 * GAP), (0, 0)), constant_values=WHITE)
