"""A training step of a run, played again in this process from the checkpoint before it. Nothing is written."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Any

import numpy as np
import torch
from attrs import define, evolve, field, frozen
from torch.optim.optimizer import register_optimizer_step_pre_hook

from vla_rl.core.errors import UserError
from vla_rl.core.run.loop import collect_rollout, finish_step, flow_of
from vla_rl.core.run.runtime import Runtime
from vla_rl.core.run.selection import Selection, take_columns
from vla_rl.core.run.state import State
from vla_rl.core.spec.spec import Spec, parse_spec
from vla_rl.core.types import Advantages, Array, Batch, ChunkResult, Loss, Observation, Rollout, Scores, to_numpy
from vla_rl.runtime.run_folder.folder import read_state
from vla_rl.runtime.start import start
from vla_rl.toolkit.algorithms.functional import discounted_returns

GRADIENT_NUMBERS = 4_000_000  # that are kept, evenly spaced over all parameters: enough for a cosine
LossOf = Callable[[Scores, Batch, Loss], Any]  # total to train on, of scores, batch and the run's own loss


@define(eq=False, slots=False)
class ProbeNotes:
    """Notes of the probes, for one repeated step at a time."""

    gradients: list[torch.Tensor] = field(factory=list)
    """Gradient of each optimiser step of an update, every `stride`-th number."""
    idle: int = 0
    """Tensors that are trained, and whose gradient is 0 or missing."""
    tensors: int = 0
    loss_of: LossOf | None = None
    differences: list[float] = field(factory=list)
    """Mean absolute difference of a micro-batch's log-probs to those of acting, in nats a token."""
    acted: Counter[tuple[float, ...]] = field(factory=Counter)
    learned: Counter[tuple[float, ...]] = field(factory=Counter)
    """What the model saw when it acted and when it was scored, as fingerprints of images."""
    inner: tuple[Array, ChunkResult] | None = None
    """Actions that reached the simulator last, and its result."""
    rewards: list[tuple[Array, Array]] = field(factory=list)
    """Rewards of the simulator, and those that the run got, [N, C] of each chunk step."""
    wins: list[tuple[Array, Array]] = field(factory=list)
    """Success in the same order, [N]."""
    states: dict[str, Counter[str]] = field(factory=dict)
    """Reset states of each task, by split."""
    ignored: Array | None = None
    """Numbers of an action that the simulator got otherwise than the run chose them, bool [A]."""

    def note_gradient(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Add up the gradients before an optimiser step, and set its rates to 0."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        stride = max(1, sum(p.numel() for p in parameters) // GRADIENT_NUMBERS)
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad.detach() for p in parameters]
        self.gradients.append(torch.cat([g.flatten()[::stride].float().cpu() for g in gradients]))
        self.idle = sum(not bool(g.any()) for g in gradients)
        self.tensors = len(gradients)
        for group in optimizer.param_groups:
            group["lr"] = 0.0

    def note_chunk(self, chosen: Array, result: ChunkResult) -> None:
        """Compare what the run gave and got with what the simulator got and gave."""
        assert self.inner is not None  # the other probe is within this one
        received, own = self.inner
        differs = (np.abs(chosen - received) > 1e-6).any((0, 1))
        self.ignored = differs if self.ignored is None else self.ignored | differs
        executed = to_numpy(result.executed)
        self.rewards.append((np.where(executed, own.rewards, 0), np.where(executed, to_numpy(result.rewards), 0)))
        active = executed.any(1)
        self.wins.append((to_numpy(own.success) & active, to_numpy(result.success) & active))


NOTES = ProbeNotes()


def fingerprints(obs: Observation) -> list[tuple[float, ...]]:
    """Return numbers that tell images and their mirror images apart, for each sample: means of the quadrants."""
    means = []
    for name in sorted(obs.images):
        image = torch.as_tensor(obs.images[name]).float()
        means += [part.mean((1, 2, 3)) for half in image.tensor_split(2, 1) for part in half.tensor_split(2, 2)]
    return [tuple(row) for row in torch.stack(means, 1).round(decimals=1).tolist()] if means else []


PROBES = ("vla_rl.cli.why.run_probe", "vla_rl.cli.why.env_probe")
AHEAD = 64  # steps beyond the run's last that may be collected


@frozen(eq=False)
class Update:
    """What an update of the repeated step would do."""

    gradient: torch.Tensor
    samples: int
    difference: float
    """Mean absolute difference of the scores' log-probs to those of acting, in nats a token."""
    seconds: float


def repeat_spec(spec: Spec) -> Spec:
    """Return the spec with which a step of the run is repeated: in this process, in one optimiser step."""
    data = spec.to_dict()
    data["train"] |= {"steps": spec.train.steps + AHEAD, "epochs": 1, "critic_warmup_steps": 0}
    data["train"] |= dict.fromkeys(("global_batch", "mini_batches", "max_grad_norm"))
    data["plugins"] = [PROBES[0], *data.get("plugins", ()), PROBES[1]]
    data["runtime"] = {"backend": "local", "max_faults": spec.runtime.max_faults}
    data["placement"] = {"type": "collocated", "workers" if torch.cuda.is_available() else "cpu_workers": 1}
    return parse_spec({**data, "hooks": [], "asynchrony": {}})


class RepeatedStep:
    """The rollout of a step, and updates with it that leave the weights as they are."""

    def __init__(self, spec: Spec, state: State, runtime: Runtime) -> None:
        """Collect the rollout of the step after `state`."""
        self.spec = spec
        self.step = state.step + 1
        self.runtime = runtime
        self._flow = flow_of(spec, state)
        self._selection = Selection(spec)
        self._batches = 0
        self.first_difference: float | None = None  # `Update.difference` at the run's first weights, if measured
        self.collect()

    def collect(self) -> None:
        """Collect the rollout of the step, or after it those of later steps' tickets, with the same weights."""
        if self._batches:
            finish_step(self.runtime, self.step + self._batches - 1, trained=False)
            self._flow.finish_step("discarded")
        before = perf_counter()
        rollout, keep, metrics = collect_rollout(self.runtime, self._flow, self.step + self._batches)
        self.rollout = rollout
        self.metrics = metrics
        self.columns = self._selection.choose_columns(self.rollout, keep, self.metrics)
        self.seconds = perf_counter() - before
        self._batches += 1

    def prepare(self) -> Rollout:
        """Return the trajectories to train on, ready for one `update`."""
        return self.runtime.samples.prepare(take_columns(self.rollout, self.columns), self.columns)

    def update(self, prepared: Rollout, advantages: Advantages, loss_of: LossOf | None = None) -> Update:
        """Make the update of the prepared trajectories, in which no weight changes, with another loss if one is
        given. Raises UserError where the trainer makes no optimiser step."""
        before = perf_counter()
        NOTES.gradients.clear()
        NOTES.differences.clear()
        NOTES.loss_of = loss_of
        try:
            metrics: Mapping[str, float] = self.runtime.learners.train(prepared, advantages)
        finally:
            NOTES.loss_of = None
        if len({len(gradient) for gradient in NOTES.gradients}) != 1:
            raise UserError(
                f"trainer {self.spec.trainer.type!r} made no optimiser step, or one with several optimisers"
            )
        gradient, difference = torch.stack(NOTES.gradients).sum(0), fmean(NOTES.differences or [0.0])
        return Update(gradient, int(metrics["update/samples"]), difference, perf_counter() - before)

    def own_update(self) -> Update:
        """Make the update as the run computes it."""
        self.prepared = self.prepare()
        self.advantages = self.runtime.algorithm.advantages(self.prepared)
        return self.update(self.prepared, self.advantages)


@contextmanager
def repeat_step(spec: Spec, checkpoint: Path | None) -> Iterator[RepeatedStep]:
    """Play the step after a checkpoint again, with a spec of `repeat_spec`; None: the first. Raises UserError."""
    state = State() if checkpoint is None else read_state(checkpoint)
    handle, level = register_optimizer_step_pre_hook(NOTES.note_gradient), logging.root.manager.disable
    logging.disable(logging.WARNING)
    notes_before = dict(vars(NOTES))  # of a step that is open around this one
    vars(NOTES).update(vars(ProbeNotes()))
    try:
        runtime = start(spec, scaling=state.scaling)
        with closing(runtime.workers):
            if not runtime.info.fixed_states:
                raise UserError("a person arranges the scenes, and no episode is played again")
            if checkpoint is not None:
                runtime.learners.load(checkpoint / "trainer")
            yield RepeatedStep(spec, state, runtime)
    finally:
        vars(NOTES).update(notes_before)
        logging.disable(level)
        handle.remove()


def true_returns(rollout: Rollout) -> torch.Tensor:
    """Return how each chunk step turned out, float32 [T, N], less the mean of its group, or of its task without groups:
    the success of its episode, or in env streams the rewards that follow within the episode."""
    samples, ends = rollout.samples, (rollout.terminated | rollout.truncated).any(-1)
    returns = rollout.success.float().expand(samples.shape).clone()
    if len(rollout.episodes) != samples.shape[1] and len(rollout.groups.unique()) == samples.shape[1]:
        rewards = torch.where(rollout.valid, rollout.rewards, torch.zeros(())).sum(-1)
        returns = discounted_returns(rewards, torch.zeros_like(rewards), ends, torch.zeros_like(ends), gamma=1.0)
    names = list(rollout.tasks or [""] * samples.shape[1])
    grouped = len(rollout.groups.unique()) < len(rollout.groups)
    groups = rollout.groups if grouped else torch.tensor([names.index(name) for name in names])
    for group in groups.unique():
        mine = samples & (groups == group)
        returns[mine] -= returns[mine].mean()
    return torch.where(samples, returns, torch.zeros(()))


def true_advantages(own: Advantages, rollout: Rollout) -> Advantages:
    """Return advantages of the true returns in the shape of the algorithm's own, each valid action weighed alike."""
    returns = true_returns(rollout)
    weights = (rollout.samples if own.weights.dim() == 2 else rollout.valid).float()
    values = returns if own.advantages.dim() == 2 else returns[..., None] * rollout.valid
    return evolve(own, advantages=values, weights=weights, counts=weights)


def plain_loss(scores: Scores, batch: Batch, _: Loss) -> torch.Tensor:
    """Return the plain policy gradient's loss: log-probs times advantages, without ratio, clip or penalty."""
    log_probs = torch.where(batch.valid[..., None], scores.log_probs, torch.zeros_like(scores.log_probs)).sum(-1)
    advantages, weights = (one if one.dim() == 2 else one[:, None] for one in (batch.advantages, batch.weights))
    return -(log_probs * advantages * weights).sum()


def cosine(first: torch.Tensor, second: torch.Tensor) -> float:
    """Return the cosine of two gradients over the parameters that both train."""
    both = (first != 0) & (second != 0)
    return float(torch.nn.functional.cosine_similarity(first[both], second[both], dim=0)) if bool(both.any()) else 0.0
