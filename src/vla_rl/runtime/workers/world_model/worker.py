"""The world model of a run, in a worker with simulators: fitting, measuring, and the envs that it imagines."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import attrs
import numpy as np
import torch
from attrs import define

from vla_rl.core.catalogue import build
from vla_rl.core.interrupts import StopRequested
from vla_rl.core.manager import Named, wrap
from vla_rl.core.randomness import Noise
from vla_rl.core.reset_states import draw_state
from vla_rl.core.run.shape import RunShape
from vla_rl.core.spec.sections import ImaginationSpec
from vla_rl.core.spec.spec import Spec
from vla_rl.core.types import Context, EnvInfo, ResetState
from vla_rl.core.world_models import Windows, WorldModel
from vla_rl.runtime.comm.interfaces import WorldModelInterface
from vla_rl.runtime.messages.ids import IMAGINED_EPISODES
from vla_rl.runtime.messages.world_model import FitResult, RecordedEpisode
from vla_rl.runtime.workers.env.episodes import Episodes
from vla_rl.runtime.workers.world_model.comparison_images import write_strips
from vla_rl.runtime.workers.world_model.imagined_env import ImaginedEnv
from vla_rl.runtime.workers.world_model.recorder import EpisodeShape, EpisodeStore
from vla_rl.toolkit.models.checkpoints import read_pickled
from vla_rl.toolkit.world_models.measures import GATES, gates, measure

ROLLOUT = 2
"""Number of consecutive predictions of a fit: the second is made from the first (DIAMOND)."""
OF_ACTIONS = 16
"""Number of held-out episodes by which action following is measured; each of their chunks is imagined 8 times."""
SHOWN = 6
"""Number of episodes in a comparison image."""


@define(eq=False)
class _Counts:
    """Counts that a checkpoint keeps."""

    updates: int = 0
    """Number of updates of the world model: its version."""
    good: bool = False
    """True where all quality thresholds were met at the last measurement."""


class WorldModelWorker(WorldModelInterface):
    """The world model of a run, a role of the first worker with simulators (role "imagination")."""

    def __init__(
        self,
        spec: Spec,
        info: EnvInfo,
        folder: Path,
        device: str,
        wrappers: Named,
        *,
        heartbeat: Callable[[], None],
        stop_requested: Callable[[], bool],
    ) -> None:
        """Build the world model and the store of its episodes.

        Args:
            info: description of the simulator.
            folder: folder of the run.
            heartbeat: called within long calls.
            stop_requested: whether a fit has to end early, with StopRequested.
        Raises UserError where the simulator has no cameras, episodes do not fit on disk or in memory, or they have
        another shape than those in the store.
        """
        assert spec.world_model is not None and spec.imagination is not None
        self.spec, self.section, self.folder = spec, spec.imagination, folder
        self._heartbeat = heartbeat
        self._stop_requested = stop_requested
        self.info = limited(info, spec.rollout.max_steps)
        shape = EpisodeShape.of(self.info, spec.rollout.chunk)
        self.recorder = EpisodeStore(
            folder / "episodes",
            shape,
            capacity=self.section.buffer,
            spare=spare_of(spec),
            held_out=self.section.held_out,
        )
        context = Context(seed=spec.seed, device=device, chunk=spec.rollout.chunk, env=self.info)
        part = spec.world_model
        built: WorldModel = build("world_model", part.type, part.config, context, spec.plugins)
        self.model = wrap("world_model", built, part.type, wrappers)
        self.envs: list[ImaginedEnv] = []
        self.counts = _Counts()
        self._pool: tuple[ResetState, ...] = ()
        self._before: dict[str, Any] | None = None
        """State for checkpoints while a step is running: the state before the step."""

    def episodes(
        self, rows: Mapping[int, int], bootstrap: bool, on_fault: Callable[[str], None]
    ) -> dict[str, dict[int, Episodes]]:
        """Return the imagined episodes of all lanes: purpose of a `PolicyMode` -> lane -> episodes. "imagination" is
        for training, "over_estimation" for measuring the over-estimation of success. `rows`: lane -> number of envs.
        """
        section, rollout = self.section, self.spec.rollout
        assert self.spec.world_model is not None
        found: dict[str, dict[int, Episodes]] = {"imagination": {}, "over_estimation": {}}
        for lane, count in rows.items():
            settings: dict[str, Any] = {"outcome": section.outcome, "recent": section.recent, "seed": self.spec.seed}
            longest, of_model = self.recorder.shape.longest, (self.model, self.recorder, self.info, count)
            practice = ImaginedEnv(*of_model, horizon=section.horizon, start=section.start, **settings)
            probe = ImaginedEnv(*of_model, horizon=longest, start="first", **settings)
            self.envs.append(practice)
            for purpose, env in (("imagination", practice), ("over_estimation", probe)):
                found[purpose][lane] = Episodes(
                    env,
                    name=f"{self.spec.env.type} (imagined by {self.spec.world_model.type})",
                    seed=self.spec.seed,
                    chunk=rollout.chunk,
                    reward=rollout.reward,
                    reward_coef=rollout.reward_coef,
                    bootstrap=bootstrap and purpose == "imagination",
                    on_fault=on_fault,
                )
        return found

    # ----------------------------------------------------------------------------------------------- of a step

    def fit(self, step: int, *ended: list[RecordedEpisode]) -> FitResult:
        section, before = self.section, perf_counter()
        self.recorder.saved()
        self._before = copy.deepcopy(self._state())
        played = sorted((attrs.evolve(e, step=step) for part in ended for e in part), key=lambda e: e.number)
        self.recorder.add(played)
        losses: dict[str, list[float]] = {}
        updates = section.fit_updates if self.counts.good else section.fit_updates_below_threshold
        updates = updates if self.recorder.starts("first") else 0
        for _ in range(updates):
            self._go_on()
            number, rows = self.counts.updates, range(section.fit_batch)
            windows = self.recorder.draw(
                section.fit_batch, history=self.model.history, rollout=ROLLOUT, seed=self.spec.seed, number=number
            )
            noise = Noise(self.spec.seed, "world-model/fit", rows, [0] * len(rows), [number] * len(rows))
            for name, value in self.model.fit(windows, noise).items():
                losses.setdefault(name, []).append(value)
            self.counts.updates += 1
        fitted = perf_counter()
        found = self._measured()
        opened = gates(found, self.counts.good) if found else dict.fromkeys(GATES, False)
        self.counts.good = all(opened.values())
        self._pool = self._starts()
        return FitResult(
            updates=updates,
            version=self.counts.updates,
            metrics={
                **{f"world_model/{name}": float(np.mean(values)) for name, values in losses.items()},
                **{f"world_model/{name}": value for name, value in found.items() if np.isfinite(value)},
                "world_model/updates": float(self.counts.updates),
                "world_model/episodes": float(len(self.recorder)),
                "time/fit": fitted - before,
                "time/measure": perf_counter() - fitted,
            },
            thresholds_met=opened,
            last_episodes=tuple(self.recorder.last(min(len(played), section.evaluated_episodes))),
        )

    def draw_starts(self, groups: Sequence[int]) -> list[ResetState]:
        return (
            [draw_state(self._pool, self.spec.seed, group, IMAGINED_EPISODES) for group in groups] if self._pool else []
        )

    def finish_step(self) -> None:
        if self._before is not None:
            self._before = None
            self.recorder.dropped()

    # --------------------------------------------------------------------------------------------- checkpoints

    def save(self, file: Path) -> None:
        torch.save(self._state() if self._before is None else self._before, file)
        self.recorder.flush()
        windows = self._held_out(SHOWN)
        if windows is not None and self._before is None:
            write_strips(self.model, windows, self.folder / "imagined" / f"update_{self.counts.updates:06d}.png")

    def load(self, file: Path) -> None:
        state = read_pickled(file, ("recorder", "counts", "weights", "training"))
        self.recorder.load_state(state["recorder"])
        self.counts = _Counts(**state["counts"])
        if self.model.module is not None:
            self.model.module.load_state_dict(state["weights"])
        self.model.load_training_state(state["training"])

    # -------------------------------------------------------------------------------------------------- inside

    def _state(self) -> dict[str, Any]:
        module = self.model.module
        weights = {} if module is None else {name: t.detach().cpu() for name, t in module.state_dict().items()}
        return {
            "recorder": self.recorder.state(),
            "counts": attrs.asdict(self.counts),
            "weights": weights,
            "training": dict(self.model.training_state()),
        }

    def _starts(self) -> tuple[ResetState, ...]:
        for env in self.envs:
            env.refresh()
        return self.envs[0].reset_states("train") if self.envs else ()

    def _measured(self) -> dict[str, float]:
        self._go_on()
        windows = self._held_out(self.section.evaluated_episodes)
        return {} if windows is None else measure(self.model, windows, self.spec.seed, of_actions=OF_ACTIONS)

    def _held_out(self, count: int) -> Windows | None:
        """Return windows of complete held-out episodes; None where there are none."""
        ids, longest = self.recorder.held_out(count), self.recorder.shape.longest
        return self.recorder.windows(ids, history=self.model.history, rollout=longest) if len(ids) else None

    def _go_on(self) -> None:
        self._heartbeat()
        if self._stop_requested():
            raise StopRequested


def limited(info: EnvInfo, max_steps: int | None) -> EnvInfo:
    """Return the description with the spec's step limit, if it has one."""
    if max_steps is None:
        return info
    return attrs.evolve(info, tasks=tuple(attrs.evolve(task, max_steps=max_steps) for task in info.tasks))


def spare_of(spec: Spec) -> int:
    """Return how many episodes may be recorded between two checkpoints and in an unfinished step."""
    shape = RunShape.of(spec)
    section: ImaginationSpec | None = spec.imagination
    assert section is not None
    step = (shape.groups_per_step + shape.resampled_groups) * shape.group_size
    return min((spec.train.checkpoint_every or spec.train.steps) * step, section.buffer) + step
