"""`check_trainer`: does a trainer keep to the contract of `Trainer`?"""

from __future__ import annotations

import copy
import math
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import evolve, frozen
from torch import nn

from vla_rl.core.hookspecs import STEERING, Algorithm
from vla_rl.core.randomness import Noise
from vla_rl.core.spec.sections import TrainSpec
from vla_rl.core.trainers import (
    DemonstrationsData,
    ImitationStep,
    ModelInputs,
    OptimizerStep,
    Trainer,
    TrajectoryData,
    Transitions,
    TransitionsData,
    UpdateMetrics,
)
from vla_rl.core.types import (
    ActionSource,
    Advantages,
    Array,
    Batch,
    Context,
    EnvInfo,
    Loss,
    Observation,
    Plugin,
    RecordedRewards,
    Rollout,
    Scores,
    TrainingData,
    to_numpy,
)
from vla_rl.testing import synthetic
from vla_rl.testing.common.findings import Findings, Unfit, built
from vla_rl.testing.linear import LinearModel
from vla_rl.testing.policy_traces import OWN, changed_generators, run_from
from vla_rl.toolkit.data.samples import InMemoryDataset
from vla_rl.toolkit.models.squashed_gaussian import SquashedGaussian
from vla_rl.toolkit.trainers.context import TrainingContext
from vla_rl.toolkit.trainers.master_weights import is_narrow
from vla_rl.toolkit.trainers.parallel import ParallelStrategy
from vla_rl.toolkit.trainers.trained_model import TrainedModel
from vla_rl.toolkit.trainers.trainer_state import POLICY, load_owned_state, owned_state, unreadable

CHUNK = 2
SAMPLES = 8
TOLERANCE = 1e-5
"""Tolerance on gradients, relative to the largest: sums in another order."""
MakeCase = Callable[..., "_Case"]


class _Reinforce(Algorithm):
    """The policy gradient of Williams (1992), as the spec's algorithm."""

    def advantages(self, rollout: Rollout) -> Advantages:
        raise AssertionError("trainers take the advantages that they are given")

    def loss(self, scores: Scores, batch: Batch) -> Loss:
        total = -(scores.log_probs.sum(-1) * (batch.advantages * batch.weights)[:, None]).sum()
        return Loss(total=total, metrics={"loss/policy": total.detach()})


class _Rank(ParallelStrategy):
    """A rank that keeps its gradients instead of adding them up: an optimiser such as Adam hides their scale."""

    world = 2

    def __init__(self) -> None:
        self.gradients: list[torch.Tensor] = []
        """Gradients of the first reduction, before any weight changed; zeros where there is none."""

    def reduce(self, parameters: Sequence[nn.Parameter]) -> None:
        if not self.gradients:
            self.gradients = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters]


class _Recording(InMemoryDataset):
    """Two episodes of half of the samples each; the first one earns a reward at its end."""

    def read_rewards(self, indices: Any, discount: float) -> RecordedRewards:
        index = np.asarray(indices)
        last = index % (SAMPLES // 2) == SAMPLES // 2 - 1
        rewards = (last & (index < SAMPLES // 2)).astype(np.float32)
        return RecordedRewards(rewards=rewards, following=np.where(last, -1, index + 1))


class _GaussianModel(LinearModel):
    """The small policy with squashed Gaussians in place of two bins, for trainers of transitions."""

    def __init__(self, info: EnvInfo, chunk: int) -> None:
        super().__init__(info, chunk, bins=2)
        self._layout = (chunk, info.action_dim, 2)
        self.steering_shape = (chunk, info.action_dim)

    def reparameterised_actions(
        self, features: torch.Tensor, normals: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        squashed, log_probs = self.steering_noise(features, normals)
        return self._low + (squashed + 1) / 2 * (self._high - self._low), log_probs

    def steering_noise(self, features: torch.Tensor, normals: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        distribution = SquashedGaussian.of_outputs(self.module.policy(features).unflatten(1, self._layout))
        unsquashed = distribution.sample(normals)
        return torch.tanh(unsquashed), distribution.log_prob(unsquashed)


@frozen(eq=False)
class _Case:
    """A trainer with its policy."""

    trainer: Trainer
    trained: TrainedModel
    kind: TrainingData
    folder: Path
    """Folder that the trainer may write to."""

    @property
    def clones(self) -> bool:
        """Whether the trainer learns from demonstrations, or from recordings with rewards."""
        return self.kind in (TrainingData.DEMONSTRATIONS, TrainingData.RECORDINGS)

    def weights(self) -> dict[str, torch.Tensor]:
        """Return copies of all weights, targets included."""
        named: dict[str, torch.Tensor] = {}
        for kind, modules in (("modules", self.trainer.modules()), ("targets", self.trainer.targets())):
            for name, module in modules.items():
                state = module.state_dict()
                named |= {f"{kind}/{name}/{key}": tensor.detach().clone() for key, tensor in state.items()}
        policy = self.trained.model.module.state_dict()
        return named | {f"modules/{POLICY}/{key}": tensor.detach().clone() for key, tensor in policy.items()}


def check_trainer(plugin: Plugin, config: Any = None) -> None:
    """Let a trainer make some updates of a small policy; raises CheckFailed with all findings.

    An update trains something and leaves its data alone; its result does not depend on global random generators;
    gradients depend neither on the size of micro-batches nor on the number of ranks; checkpoints hold all that an
    update depends on; no optimiser trains targets.

    Args:
        plugin: trainer of trajectories, transitions, demonstrations or recordings; it is built with `config`.
        config: settings of the plugin; None: its defaults. With these a trainer of transitions makes an update once it
            has 8 of them.
    Raises ValueError for a trainer of windows.
    """
    if plugin.trains_on is TrainingData.WINDOWS:
        raise ValueError("a trainer of windows is checked with its world model: check_world_model")
    f = Findings(f"check_trainer of {plugin.summary!r}")
    kinds = ", ".join(f"TrainingData.{kind.name}" for kind in TrainingData)
    if not f.expect(plugin.trains_on is not None, "Plugin.trains_on", f"one of {kinds}", "None", "declare it"):
        f.close()

    with tempfile.TemporaryDirectory() as root:

        def make(
            micro_batch: int = SAMPLES, strategy: ParallelStrategy | None = None, files: Path | None = None
        ) -> _Case:
            folder = Path(tempfile.mkdtemp(dir=root)) / "files"
            if files is not None and files.exists():
                shutil.copytree(files, folder)
            assert plugin.trains_on is not None
            trained = _trained(micro_batch, strategy, plugin.trains_on)
            training = TrainingContext(trained=trained, algorithm=_Reinforce(), heartbeat=lambda: None, folder=folder)
            context = Context(chunk=CHUNK, env=trained.info, training=training)
            trainer, _ = built("trainer", plugin, config, context)
            return _Case(trainer, trained, plugin.trains_on, folder)

        _check_all(f, make)
    f.close()


def _check_all(f: Findings, make: MakeCase) -> None:
    with f.section("parts"):
        _check_parts(f, make())
    updates = False
    with f.section("update"):
        _check_update(f, make)
        updates = True
    if updates:
        with f.section("gradients"):
            _check_gradients(f, make)
        with f.section("resume"):
            _check_resume(f, make)


def _trained(micro_batch: int, strategy: ParallelStrategy | None, kind: TrainingData) -> TrainedModel:
    """Return the small policy. `strategy`: None for a single rank."""
    info = evolve(synthetic.env_info(cameras=1), takeovers=kind is TrainingData.TRANSITIONS)
    train = TrainSpec(steps=4, lr=1e-2, micro_batch=micro_batch, max_grad_norm=None)
    model = _GaussianModel(info, CHUNK) if kind is TrainingData.TRANSITIONS else LinearModel(info, CHUNK)
    trained = TrainedModel(model, train, name="linear", device="cpu", info=info, acting=True)
    if strategy is not None:
        trained.strategy = strategy
    return trained


# ------------------------------------------------------------------------------------------------------ data


def _samples(trained: TrainedModel, number: int) -> tuple[Observation, ModelInputs, dict[str, Array | None]]:
    """Return the observations, model inputs and fields of made-up samples. `number`: number of the update."""
    obs = synthetic.observation(trained.info, SAMPLES, seed=number)
    zeros = [0] * SAMPLES
    noise = Noise(0, "check_trainer", list(range(SAMPLES)), zeros, [number] * SAMPLES)
    chunk = LinearModel(trained.info, CHUNK).sample_chunk(obs, noise, False)
    draws = np.random.default_rng(number)
    fields: dict[str, Array | None] = {
        "valid": np.ones((SAMPLES, CHUNK), bool),
        "log_probs": to_numpy(chunk.log_probs),
        "values": None,
        "versions": np.zeros(SAMPLES, np.int64),
        "advantages": draws.standard_normal(SAMPLES, np.float32),
        "weights": np.ones(SAMPLES, np.float32),
        "counts": np.ones(SAMPLES, np.float32),
        "returns": None,
        "value_weights": None,
        "value_counts": None,
    }
    inputs = ModelInputs(obs=obs, actions=chunk.actions, extras=chunk.extras).numpy()
    return obs, inputs, fields


def _data(case: _Case, number: int, samples: Array | None = None) -> Any:
    """Return the data of an update (from 1). `samples`: those of this rank; None: all."""
    if case.kind is TrainingData.TRANSITIONS:
        return _transitions(case, number)
    obs, inputs, fields = _samples(case.trained, number)
    own = np.arange(SAMPLES) if samples is None else samples
    size = case.trained.train.micro_batch
    if case.clones:
        step = ImitationStep(number=1, first=0, indices=own, total=SAMPLES, most=len(own), lr=1e-2)
        return DemonstrationsData(demonstrations=_Recording([(obs, inputs.actions)]), steps=[step])
    parts = tuple(np.arange(start, min(start + size, len(own))) for start in range(0, len(own), size))
    return TrajectoryData(
        step=number,
        version=number - 1,
        inputs=inputs.take(own),
        fields={name: None if array is None else array[own] for name, array in fields.items()},
        steps=[OptimizerStep(micro_batches=parts, passes=len(parts), divisor=SAMPLES, value_divisor=SAMPLES)],
    )


def _transitions(case: _Case, number: int) -> TransitionsData:
    """Return an episode of as many transitions as there are samples, and one more, as the data of an update. A person
    acts in the odd ones.
    """
    count = SAMPLES + 1
    draws = np.random.default_rng(number)
    info = case.trained.info
    low, high = (np.array(bound, np.float32) for bound in (info.action_low, info.action_high))
    actions = low + (high - low) * draws.random((count, CHUNK, info.action_dim), np.float32)
    taken_over = np.arange(count) % 2 == 1
    source = np.where(taken_over, ActionSource.PERSON, ActionSource.POLICY).astype(np.int8)
    transitions = Transitions(
        frames=synthetic.observation(info, count + 1, seed=number),
        first=np.arange(count),
        following=np.arange(1, count + 1),
        actions=actions,
        rewards=draws.random((count, CHUNK), np.float32),
        valid=np.ones((count, CHUNK), bool),
        terminated=np.arange(count) == count - 1,
        source=np.repeat(source[:, None], CHUNK, axis=1),
        expert_actions=np.flip(actions, 0).copy(),
        extras={STEERING: draws.standard_normal((count, CHUNK, info.action_dim), np.float32)},
    )
    return TransitionsData(step=number, version=number - 1, transitions=transitions)


# ---------------------------------------------------------------------------------------------------- checks


def _check_parts(f: Findings, case: _Case) -> None:
    modules = case.trainer.modules()
    optimizers = case.trainer.optimizers()
    policy = modules.get(POLICY)
    f.expect(
        policy is None or policy is case.trained.model.module,
        "modules",
        f"{POLICY!r} for the policy's own module",
        type(policy).__name__,
        "return {'policy': training.trained.model.module, ...}, and other networks by other names",
    )
    owned = {id(p) for module in modules.values() for p in module.parameters()}
    targets = {id(p) for module in case.trainer.targets().values() for p in module.parameters()}
    trained = {id(p) for part in optimizers.values() for group in part.param_groups for p in group["params"]}
    f.expect(
        trained <= owned,
        "optimizers",
        "parameters of `modules`, whose weights checkpoints hold",
        f"{len(trained - owned)} other parameters",
        "return the network they are in from `modules`",
    )
    f.expect(
        not trained & targets,
        "targets",
        "networks that no optimiser trains",
        f"{len(trained & targets)} of their parameters in an optimiser",
        "copy the trained network (copy.deepcopy) for its target",
    )
    followers = [p for module in case.trainer.targets().values() for p in module.parameters()]
    stepped = [p for part in optimizers.values() for group in part.param_groups for p in group["params"]]
    narrow = {str(p.dtype) for p in (*stepped, *followers) if is_narrow(p.dtype)}
    f.expect(
        not narrow,
        "optimizers",
        "float32 weights in optimisers and targets, where small steps add up",
        ", ".join(sorted(narrow)),
        "call .float() on networks of your own and on their targets",
    )


def _check_update(f: Findings, make: MakeCase) -> None:
    one = make()
    before = one.weights()
    data = _data(one, 1)
    original = copy.deepcopy(data)
    ran = run_from(11, lambda: one.trainer.update(data))
    metrics = ran.result
    if not f.expect(
        isinstance(metrics, UpdateMetrics),
        "update",
        "UpdateMetrics",
        type(metrics).__name__,
        "return UpdateMetrics(sums={'loss/total': ...})",
    ):
        raise Unfit
    numbers = {**metrics.sums, **metrics.maxima}
    wrong = [name for name, value in numbers.items() if not math.isfinite(value)]
    f.expect(not wrong, "update", "finite metrics", ", ".join(wrong), "look for a division by a count of 0")
    if one.clones:
        f.expect(
            "loss/imitation" in metrics.sums,
            "update",
            "the metric 'loss/imitation', the sum of the losses of this rank's samples",
            sorted(metrics.sums),
            "return it in `sums`",
        )
    after = one.weights()
    f.expect(
        any(not torch.equal(before[name], after[name]) for name in before),
        "update",
        "other weights than before",
        "the same in all modules",
        "make an optimiser step",
    )
    f.expect(_equal(data, original), "update", "data that stay as they are", "changed data", "copy what you change")
    other = make()
    again = run_from(12, lambda: other.trainer.update(_data(other, 1)))
    moved = changed_generators(ran.start, ran.end)
    f.expect(not moved, "update", "the global random generators left alone", " and ".join(moved), OWN)
    differ = _differences(after, other.weights())
    f.expect(
        not differ and again.result.sums == metrics.sums,
        "update",
        "the same weights and metrics for the same data, whatever the global generators did before",
        f"others in {differ[:3] or 'the metrics'}",
        "key random numbers by the seed and the number of the update (vla_rl.generator)",
    )


def _check_gradients(f: Findings, make: MakeCase) -> None:
    """Check that the sum of gradients does not depend on the division into micro-batches and ranks."""
    everything = np.arange(SAMPLES)
    expected = _gradients(make, SAMPLES, everything)
    text = "gradients that are added up over the ranks before each optimiser step"
    if not f.expect(bool(expected), "update", text, "no reduction", "call TrainedModel.optimizer_step"):
        return
    parts = _gradients(make, 3, everything)
    f.expect(
        _close(expected, parts),
        "update",
        "the same gradients however the samples are split into micro-batches",
        "others",
        "divide each micro-batch's sum by the count of the whole optimiser step, not by its own",
    )
    if make().kind is TrainingData.TRANSITIONS:
        return  # each rank draws from transitions of its own
    ranks = [_gradients(make, SAMPLES, samples) for samples in (everything[:2], everything[2:])]
    f.expect(
        all(ranks) and _close(expected, [one + other for one, other in zip(*ranks, strict=True)]),
        "update",
        "gradients of two ranks that add up to those of one rank with all samples",
        "others",
        "divide by the count of all ranks, which the data tell",
    )


def _gradients(make: MakeCase, micro_batch: int, samples: Array) -> list[torch.Tensor]:
    """Return a rank's gradients of the first optimiser step on these of all samples."""
    rank = _Rank()
    case = make(micro_batch, rank)
    if case.kind is TrainingData.TRANSITIONS:
        rank.world = 1
    case.trainer.update(_data(case, 1, samples))
    return rank.gradients


def _close(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    """Return whether gradients are equal but for the order of sums."""
    scale = max(float(tensor.abs().max()) for tensor in one)
    return all(
        torch.allclose(a, b, rtol=0, atol=TOLERANCE * max(scale, 1e-30)) for a, b in zip(one, other, strict=True)
    )


def _check_resume(f: Findings, make: MakeCase) -> None:
    through = make()
    for number in (1, 2):
        through.trainer.update(_data(through, number))
    owned = owned_state(through.trainer)
    unread = unreadable(owned)
    if not f.expect(
        unread is None,
        "state",
        "tensors, numbers, texts, lists and dicts of Python, which a checkpoint is read with (weights_only)",
        "" if unread is None else f"a {unread[1]} at {unread[0]}",
        "convert it: torch.from_numpy(array), int(count)",
    ):
        return
    file = through.folder.parent / "state.pt"
    torch.save(owned, file)
    saved = torch.load(file, weights_only=True)
    policy = copy.deepcopy(through.trained.model.module.state_dict())
    optimizer = copy.deepcopy(through.trained.optimizer.state_dict())
    resumed = make(files=through.folder)
    resumed.trained.model.module.load_state_dict(policy)
    resumed.trained.optimizer.load_state_dict(optimizer)
    load_owned_state(resumed.trainer, saved, "the state of this trainer")
    results = [case.trainer.update(_data(case, 3)) for case in (through, resumed)]
    differ = _differences(through.weights(), resumed.weights())
    f.expect(
        not differ and results[0].sums == results[1].sums,
        "resume",
        "the same third update after a checkpoint as without one",
        f"other weights in {differ[:3]}" if differ else "other metrics",
        "return networks from `modules` or `targets`, optimisers from `optimizers`, and counters and the like from "
        "`state`",
    )


def _differences(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of tensors that differ."""
    return [name for name in one if name not in other or not torch.equal(one[name], other[name])]


def _equal(one: Any, other: Any) -> bool:
    """Return whether two updates' data hold the same numbers."""
    return all(np.array_equal(a, b) for a, b in zip(_arrays(one), _arrays(other), strict=True))


def _arrays(data: Any) -> list[Array]:
    if isinstance(data, DemonstrationsData):
        assert data.demonstrations is not None
        obs, actions = data.demonstrations.read_samples(np.arange(SAMPLES))
        return [*(np.asarray(x) for x in obs.images.values()), np.asarray(obs.state), np.asarray(actions)]
    if isinstance(data, TransitionsData):
        transitions = data.transitions
        assert transitions is not None
        frames = transitions.frames
        of_chunks = (transitions.actions, transitions.rewards, transitions.valid, transitions.expert_actions)
        parts = (transitions.first, transitions.source, frames.state, *of_chunks, *transitions.extras.values())
        return [*(np.asarray(x) for x in frames.images.values()), *map(np.asarray, parts)]
    inputs = data.inputs
    fields = [array for array in data.fields.values() if array is not None]
    return [*(np.asarray(x) for x in inputs.obs.images.values()), np.asarray(inputs.actions), *fields]
