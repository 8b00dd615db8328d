"""The model of one learner rank, with its optimiser and its parallel strategy.

Adapters are cast to bfloat16 once for all passes of an optimiser step, which needs no peft. Autocast casts a float32
weight wherever it is used, and again where activations are recomputed. For the hundreds of small adapters of a large
network these casts are most of the launches that are not arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from attrs import asdict
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from vla_rl.core.capabilities import HasCritic, HasFeatures, Reparameterised, Steerable, require_capability
from vla_rl.core.errors import UserError
from vla_rl.core.hookspecs import VLAModel
from vla_rl.core.run.weight_changes import WEIGHTS_CHANGED
from vla_rl.core.spec.sections import TrainSpec
from vla_rl.core.trainers import ModelInputs
from vla_rl.core.types import Array, Batch, EnvInfo, Observation, Scores, Statistic
from vla_rl.toolkit.algorithms.statistics import Mean
from vla_rl.toolkit.models.adapters import TRAINED
from vla_rl.toolkit.trainers import optimizer
from vla_rl.toolkit.trainers.master_weights import MasterWeights
from vla_rl.toolkit.trainers.parallel import ParallelStrategy, SingleRank

SAMPLED = 2**20
"""Weights of a rank that are compared at most."""
# Prime factors of the usual widths of layers.
WIDTH_FACTORS = 2 * 3 * 5 * 7 * 11 * 13


class ChangedWeights:
    """Share of the trained weights that a training step changes, in the type that the policy acts with. Weights are
    compared as they act, since a step that rounding hides changes no rollout, however large it is in the optimiser. Of
    a rank with more than 2^20 trained weights every n-th is compared (at most 12 MiB)."""

    def __init__(self, types: Mapping[str, torch.dtype]) -> None:
        """Create the metric. `types`: name of a trained weight -> its type where the policy acts."""
        self._types = types
        self._before: dict[str, torch.Tensor] = {}
        """Sampled weights before the first optimiser step of the training step; {}: there was none."""
        self._stride = 1

    def keep_weights(
        self, parameters: Mapping[str, torch.Tensor], names: Collection[str], strategy: ParallelStrategy
    ) -> None:
        """Keep the weights of these names that the next optimiser step may change, unless one of this step did."""
        if self._before:
            return
        own = {name: strategy.own_part(parameters[name]) for name in names}
        self._stride = coprime_stride(sum(part.numel() for part in own.values()))
        self._before = self._sample_weights(own)

    def compare_weights(
        self, parameters: Mapping[str, torch.Tensor], strategy: ParallelStrategy
    ) -> dict[str, Statistic]:
        """Return the metric of the training step that ends, in host memory; {} where no optimiser stepped."""
        if not self._before:
            return {}
        before = self._before
        self._before = {}
        after = self._sample_weights({name: strategy.own_part(parameters[name]) for name in before})
        changed = torch.stack([(after[name] != before[name]).sum() for name in before]).sum()
        compared = sum(tensor.numel() for tensor in before.values())
        return {WEIGHTS_CHANGED: Mean(torch.tensor([float(changed), float(compared)], dtype=torch.float64))}

    def _sample_weights(self, own: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return every n-th weight of each tensor in its acting type, as a copy."""
        return {
            name: part.detach().flatten()[index % self._stride :: self._stride].to(self._types[name], copy=True)
            for index, (name, part) in enumerate(own.items())
        }


def coprime_stride(count: int) -> int:
    """Return the stride that samples at most `SAMPLED` of this many weights. It has no factor in common with
    the usual widths of layers, so that the sample is of all columns of a matrix."""
    stride = max(1, -(-count // SAMPLED))
    while math.gcd(stride, WIDTH_FACTORS) > 1:
        stride += 1
    return stride


class TrainedModel:
    """A model that one rank trains, together with the other ranks. Whatever is trained has float32 weights and moments
    in the optimiser. Weights that act in a narrower type (`model.dtype: bfloat16`) are the rounded values of float32
    masters, or of float32 shards."""

    def __init__(
        self, model: VLAModel, train: TrainSpec, *, name: str, device: str, info: EnvInfo, acting: bool, world: int = 1
    ) -> None:
        """Create the optimiser for a model. Raises UserError for a model without trainable parameters.

        Args:
            info: description of the env that the model was built for.
            acting: a policy acts with this model between calls.
            world: number of ranks; each of several has to `join_ranks`.
        """
        self.model = model
        self.train = train
        self.name = name
        self.device = device
        self.info = info
        self.strategy: ParallelStrategy = SingleRank()
        self._acting = acting
        self._dummy: ModelInputs | None = None
        self._guard = optimizer.FiniteGuard(name)
        weights = dict(model.module.named_parameters()) | dict(model.weights())
        self.acting_types = {name: weight.dtype for name, weight in weights.items()}
        """Name -> type in which the policy acts, and which is published and saved."""
        self._changed = ChangedWeights(self.acting_types)
        self._start_optimizer(masters=world == 1 or train.sharding != "full")

    def _start_optimizer(self, *, masters: bool) -> None:
        """Create the optimiser of the weights that are trained. `masters`: give narrow ones their masters; False where
        all of them are, or will be, float32 shards."""
        weights = {name: p for name, p in self.model.module.named_parameters() if p.requires_grad}
        if not weights:
            raise UserError(f"model {self.name!r} has no trainable parameters")
        self.master_weights = MasterWeights(weights if masters else {})
        self.parameters: dict[str, nn.Parameter] = weights | self.master_weights.masters
        """What the optimiser steps on, by name: the trained parameters, or their masters. Gradients are theirs."""
        critic = self.model.critic if isinstance(self.model, HasCritic) else None
        critic_ids = set() if critic is None else {id(p) for p in critic.parameters()}
        self.critic_names = frozenset(name for name, p in weights.items() if id(p) in critic_ids)
        actor = [p for name, p in self.parameters.items() if name not in self.critic_names]
        of_critic = [p for name, p in self.parameters.items() if name in self.critic_names]
        self.optimizer = optimizer.build_optimizer(actor, of_critic, self.train)
        self.master_weights.follow_optimizer(self.optimizer)

    def join_ranks(self, strategy: ParallelStrategy) -> None:
        """Train with ranks of equal weights; all together. Where parameters are replaced, the optimiser starts anew."""
        self.strategy = strategy
        self._dummy = strategy.prepare_model(self.model, self.info)
        if strategy.lockstep:
            self._start_optimizer(masters=False)
            self._let_act()

    # ------------------------------------------------------------------------------------------ what holds weights

    def _let_act(self) -> None:
        if self._acting:
            self.strategy.gather_weights()

    @contextmanager
    def released(self) -> Iterator[None]:
        """Context in which the rank holds its own share of the weights only. After it, the policy can act again."""
        self.strategy.release_weights()
        yield
        self._let_act()

    def published_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the published weights as the rank holds them, in the types in which the policy acts."""
        for name, tensor in self.model.weights():
            yield name, tensor.to(self.acting_types[name])

    def gathered_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the published weights as full tensors, one at a time; all ranks together."""
        for name, tensor in self.published_weights():
            yield name, self.strategy.unshard_tensor(tensor)

    @contextmanager
    def full_weights(self) -> Iterator[None]:
        """Context in which the module holds full weights, to be saved or sent; all ranks together."""
        with self.released(), self.strategy.full_weights():
            yield

    # ---------------------------------------------------------------------------------------------------- passes

    @property
    def dummy_inputs(self) -> ModelInputs:
        """One sample for dummy batches, which let a rank keep step with others; only where ranks run in lockstep."""
        assert self._dummy is not None
        return self._dummy

    def dummy_passes(self, passes: int, own: int) -> int:
        """Return the number of dummy batches that the rank runs, with weight 0, while others have samples left.

        Args:
            passes: number of micro-batches of the rank that has the most.
            own: number of micro-batches of this rank.
        """
        return passes - own if self.strategy.lockstep else 0

    def adapters_cast_once(self) -> AbstractContextManager[None]:
        """Return a context for an optimiser step's passes: adapters are cast once; shards, where they are gathered."""
        return nullcontext() if self.strategy.lockstep else adapters_cast_once(self.model.module)

    def scores(self, batch: Batch) -> Scores:
        scores = self.strategy.run(lambda: asdict(self.model.chunk_log_probs(batch.obs, batch.chunk), recurse=False))
        return Scores(**scores)

    def imitation_loss(self, obs: Observation, actions: Any, recorded: Array | None = None) -> torch.Tensor:
        """Return the loss. `recorded`: as `Demonstrations.recorded_actions`. The other actions have the loss 0 and
        count in the mean, so that each recorded action weighs the same in micro-batches of any size."""
        if recorded is None:
            return self.strategy.run(lambda: self.model.imitation_loss(obs, actions))
        terms = self.strategy.run(lambda: self.model.imitation_terms(obs, actions))
        counts = torch.arange(terms.shape[1]) < torch.as_tensor(recorded)[:, None]
        return (terms * counts.to(terms.device)).mean()

    def imitation_losses(self, obs: Observation, actions: Any) -> torch.Tensor:
        """Return the loss of each sample, [B]."""
        return self.strategy.run(lambda: self.model.imitation_losses(obs, actions))

    def policy_features(self, obs: Observation) -> torch.Tensor:
        """Return the features [B, D]. Raises UserError for a model without (`HasFeatures`)."""
        model = require_capability(self.model, HasFeatures, "the trainer")
        return self.strategy.run(lambda: model.policy_features(obs))

    def reparameterised_actions(
        self, features: torch.Tensor, normals: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return actions [B, C, A] and log-probs [B, C, M], as `Reparameterised.reparameterised_actions`."""
        model = require_capability(self.model, Reparameterised, "the trainer")
        return self.strategy.run(lambda: model.reparameterised_actions(features, normals))

    def steering_noise(self, features: torch.Tensor, normals: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return noise and log-probs [B, R, W], as `Steerable.steering_noise`."""
        model = require_capability(self.model, Steerable, "the trainer")
        return self.strategy.run(lambda: model.steering_noise(features, normals))

    def optimizer_step(self, where: str, loss: torch.Tensor, critic_only: bool = False) -> torch.Tensor:
        """Make an optimiser step with the gradients of all ranks. Return their norm before clipping, on the device.
        After a loss or a gradient that is not finite the weights stay as they are, and `check_finite` raises."""
        stepped = []
        for name, parameter in self.parameters.items():
            if critic_only and name not in self.critic_names:
                parameter.grad = None
            else:
                stepped.append(parameter)
        self._changed.keep_weights(
            self.parameters, self.critic_names if critic_only else self.parameters, self.strategy
        )
        limit = self.train.max_grad_norm
        return optimizer.clip_and_step(self.optimizer, stepped, self.strategy, limit, loss, self._guard, where)

    def weights_changed(self) -> dict[str, Statistic]:
        """Return the metric `update/weights_changed` of the optimiser steps since the last call; {}: none."""
        return self._changed.compare_weights(self.parameters, self.strategy)

    def check_finite(self) -> None:
        """Raises UserError if a loss or a gradient was not finite since the last call."""
        self._guard.check_finite()


DTYPE = torch.bfloat16
"""Type to which autocast casts."""


class _CastAll(torch.autograd.Function):
    """Casts many tensors at once, and their gradients back. It saves nothing: a cast serves several backward passes."""

    @staticmethod
    def forward(ctx: Any, *masters: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # a weight without gradient stays without one
        return tuple(_cast_tensors(masters, DTYPE))

    @staticmethod
    @once_differentiable
    def backward(_: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        wide = iter(_cast_tensors([gradient for gradient in gradients if gradient is not None], torch.float32))
        return tuple(None if gradient is None else next(wide) for gradient in gradients)


def _cast_tensors(tensors: Any, dtype: torch.dtype) -> list[Tensor]:
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    if copies:
        torch._foreach_copy_(copies, list(tensors))
    return copies


@contextmanager
def adapters_cast_once(module: nn.Module) -> Iterator[None]:
    """Context in which adapters that autocast would cast are used as one bfloat16 copy, with equal results and
    gradients. The float32 weights stay the module's parameters and get the gradients; they may not change inside, and
    backward passes belong inside too.

    That holds for compiled layers too: the compiler makes a kernel of each weight's cast.
    """
    parts = list(_cast_parts(module))
    copies = _CastAll.apply(*[part.weight for part in parts]) if parts else ()  # type: ignore[no-untyped-call]
    try:
        for part, copy in zip(parts, copies, strict=True):
            part.__dict__["weight"] = copy  # found before the parameter of this name, which stays registered
        yield
    finally:
        for part in parts:
            part.__dict__.pop("weight", None)


def _cast_parts(module: nn.Module) -> Iterator[Any]:
    """Yield the linear layers of adapters whose float32 weights autocast casts: those that peft leaves to it."""
    for module_part in module.modules():
        layer: Any = module_part
        if getattr(layer, "cast_input_dtype_enabled", True):
            continue
        for part in (layer.lora_A[TRAINED], layer.lora_B[TRAINED]):
            if type(part.weight) is nn.Parameter and part.weight.dtype == torch.float32:  # no shard
                yield part
