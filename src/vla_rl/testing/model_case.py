"""Shared parts of `check_model` and `check_engine`: what acts, its observation, findings, and checks of actions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from attrs import frozen

from vla_rl.core.capabilities import ContinuesChunks, HasCritic
from vla_rl.core.hookspecs import PolicyEngine, VLAModel
from vla_rl.core.randomness import Noise
from vla_rl.core.types import Chunk, EnvInfo, Observation, UnexecutedActions, ValueGranularity, to_numpy
from vla_rl.testing.common.comparison import same_data
from vla_rl.testing.common.findings import Findings, check_array
from vla_rl.testing.common.generators import expect_untouched, run_from


def check_unchanged(f: Findings, obs: Observation, original: Observation) -> None:
    """Record a finding if an observation has other numbers than its copy."""
    same = same_data(obs, original)
    f.expect(same, "observation", "images and a state that stay as they are", "written into", "copy what you change")


@frozen(eq=False)
class ActingCase(ABC):
    """A model or an engine, and the observation for which it acts."""

    f: Findings
    env: EnvInfo
    chunk: int
    obs: Observation
    atol: float

    @property
    def row_count(self) -> int:
        return len(self.obs)

    def make_noise(self, rows: Sequence[int] | None = None, seed: int = 0) -> Noise:
        rows = list(range(self.row_count)) if rows is None else rows
        return Noise(seed, "check_model", rows, [0] * len(rows), [0] * len(rows))

    @abstractmethod
    def choose_chunks(self, obs: Observation, noise: Noise, greedy: bool) -> Chunk:
        """Choose chunks."""

    def draw_chunks(self, greedy: bool = False, seed: int = 0) -> Chunk:
        return self.choose_chunks(self.obs, self.make_noise(seed=seed), greedy)

    def expect_near(self, a: Any, b: Any, where: str, what: str, remedy: str, slack: float = 0.0) -> bool:
        """A finding unless equal within `atol`, or `slack` times that of 1 + |b|, where other kernels may have run.
        Return whether they are."""
        a, b = to_numpy(a).astype(np.float64), to_numpy(b).astype(np.float64)
        bound = self.atol * slack * (1 + np.abs(b)) if slack else np.full(b.shape, self.atol)
        gap = np.abs(a - b)
        holds = bool((gap <= bound).all())
        got = f"a difference of {gap.max():.2g}"
        return self.f.expect(holds, where, f"{what} (within {self.atol:g})", got, remedy)

    def is_array(self, array: Any, shape: tuple[int, ...], where: str) -> bool:
        """Record a finding unless this is a finite float32 array of that shape. Return whether it is."""
        if not check_array(self.f, array, shape, "float32", where):
            return False
        finite = bool(np.isfinite(to_numpy(array)).all())
        return self.f.expect(finite, where, "finite numbers", "NaN or inf", "find the cause")

    def within_bounds(self, actions: Any, where: str) -> None:
        """Record a finding if an action is outside of the environment's bounds."""
        low, high = np.array(self.env.action_low), np.array(self.env.action_high)
        actions = to_numpy(actions)
        outside = np.maximum(low - actions, actions - high) / (high - low)
        worst = float(outside.max())
        at = [i for i in range(self.env.action_dim) if float(outside[..., i].max()) > 1e-4]
        got = f"{worst:.1%} of the range outside (number {', '.join(map(str, at))} of an action)"
        remedy = "scale each number by its own ModelContext.env.action_low and action_high, or clip"
        self.f.expect(worst <= 1e-4, f"{where}: actions", "within the environment's bounds", got, remedy)


@frozen(eq=False)
class EngineCase(ActingCase):
    """An engine."""

    engine: PolicyEngine

    def choose_chunks(self, obs: Observation, noise: Noise, greedy: bool) -> Chunk:
        return self.engine.act(obs, noise, greedy)


@frozen(eq=False)
class ModelCase(ActingCase):
    """A policy that is trained."""

    model: VLAModel
    values: ValueGranularity

    def choose_chunks(self, obs: Observation, noise: Noise, greedy: bool) -> Chunk:
        return self.model.sample_chunk(obs, noise, greedy)

    @property
    def trained_parameters(self) -> dict[str, torch.nn.Parameter]:
        return {name: p for name, p in self.model.module.named_parameters() if p.requires_grad}

    @property
    def of_critic(self) -> frozenset[str]:
        """Names of the critic's parameters."""
        critic = self.model.critic if isinstance(self.model, HasCritic) else None
        parts = [] if critic is None else [id(p) for p in critic.parameters()]
        return frozenset(name for name, p in self.model.module.named_parameters() if id(p) in parts)

    def sample_copies(self, copies: int, seed: int = 0) -> tuple[Observation, Chunk]:
        """Return every row this many times, each copy with separate noise."""
        obs = self.obs.take(np.repeat(np.arange(self.row_count), copies))
        return obs, self.model.sample_chunk(obs, self.make_noise(list(range(len(obs))), seed), False)

    @contextmanager
    def moved_weights(self, scale: float) -> Iterator[None]:
        """Trained weights are moved by chance meanwhile: a LoRA pair at its start (B = 0) is nothing to look at."""
        saved = {name: p.detach().clone() for name, p in self.trained_parameters.items()}
        draws = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in self.trained_parameters.values():
                p.add_((scale * torch.randn(p.shape, generator=draws)).to(p))
        try:
            yield
        finally:
            self.model.module.zero_grad(set_to_none=True)
            with torch.no_grad():
                for name, p in self.trained_parameters.items():
                    p.copy_(saved[name])

    def compute_gradient(self, total: torch.Tensor) -> list[torch.Tensor]:
        """Return the gradient of each trained parameter; zeros for a parameter without one."""
        parameters = list(self.trained_parameters.values())
        gradients = torch.autograd.grad(total, parameters, allow_unused=True)
        return [torch.zeros_like(p) if g is None else g for g, p in zip(gradients, parameters, strict=True)]


def check_acting(case: ActingCase) -> None:
    """Record findings on the actions of an engine: types, shapes, bounds, repeatability, and rows that know nothing of
    each other. It may ignore `noise`."""
    for where, greedy in (("act", False), ("act (greedy)", True)):
        ran = run_from(11, partial(case.draw_chunks, greedy))
        chunk = ran.result
        if not case.is_array(chunk.actions, (case.row_count, case.chunk, case.env.action_dim), f"{where}: actions"):
            return
        case.within_bounds(chunk.actions, where)
        expect_untouched(case.f, where, ran.changed_generators)
        what, remedy = "the same chunk from the same noise", "draw from `noise` only"
        case.expect_near(case.draw_chunks(greedy).actions, chunk.actions, where, what, remedy)
        order = list(range(case.row_count))[::-1]
        turned = case.choose_chunks(case.obs.take(np.array(order)), case.make_noise(order), greedy)
        what, remedy = "a row's chunk wherever it stands in the batch", "use no statistics of the batch"
        case.expect_near(to_numpy(turned.actions)[order], chunk.actions, where, what, remedy)


def check_continuing(case: ActingCase, component: object) -> None:
    """Record findings on the `continue_chunk` of a model or an engine that has it."""
    if not isinstance(component, ContinuesChunks):
        return
    where, shape = "continue_chunk", (case.row_count, case.chunk, case.env.action_dim)
    with case.f.section(where):
        actions = to_numpy(case.draw_chunks().actions)
        # a rest of another length, and another delay, for each row
        starts = [row % case.chunk for row in range(case.row_count)]
        previous = [
            UnexecutedActions(actions=actions[row, start:].copy(), delay=row % (case.chunk - start + 1))
            for row, start in enumerate(starts)
        ]
        for greedy in (False, True):
            continued = component.continue_chunk(case.obs, case.make_noise(), greedy, previous)
            if not case.is_array(continued, shape, where):
                return
            case.within_bounds(continued, where)
            graph = isinstance(continued, torch.Tensor) and continued.requires_grad
            case.f.expect(not graph, where, "no gradient", "a graph", "decorate it with torch.no_grad()")
            again = component.continue_chunk(case.obs, case.make_noise(), greedy, previous)
            case.expect_near(again, continued, where, "the same actions from the same noise", "draw from `noise` only")
        order = list(range(case.row_count))[::-1]
        turned = component.continue_chunk(
            case.obs.take(np.array(order)), case.make_noise(order), True, [previous[row] for row in order]
        )
        what, remedy = "a row's actions wherever it stands in the batch", "use each row's own previous actions"
        case.expect_near(to_numpy(turned)[order], continued, where, what, remedy, KERNELS)


KERNELS = 10.0
"""Times `atol`: batches in another order may run other kernels."""
