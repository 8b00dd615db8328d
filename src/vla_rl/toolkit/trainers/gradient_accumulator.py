"""Gradient accumulation for an optimiser step whose samples come in parts, and whose divisors are known at its end.

A loss is linear in its weights. So the contributions of the policy's weights to gradients and metrics are sums that can
be divided after they were added up, and so are those of the critic's weights. Each has its own divisor. With a critic
there are therefore two sums, and two backward passes for one forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter

import numpy as np
import torch
from attrs import define, evolve, field
from torch import nn

from vla_rl.core.errors import PluginError
from vla_rl.core.trainers import ModelInputs, OptimizerStep, SampleFields, TrajectoryPart
from vla_rl.core.types import Array, Batch, Loss, Scores
from vla_rl.toolkit.algorithms.statistics import MetricAccumulator

LINEAR = 1e-3
"""Tolerance of the linearity check, relative to the size of the terms: rounding of sums."""


@define(eq=False)
class GradientAccumulator:
    """Gradients and metrics of one optimiser step, normalised at its end."""

    parameters: Mapping[str, nn.Parameter]
    """Trainable parameters. Their `grad` holds the policy's sum, and the gradient after `normalise_gradients`."""
    loss: Callable[[Scores, Batch], Loss]
    keep_samples: bool
    """True if further epochs follow, which need the samples of all parts again."""
    seconds: float = field(default=0.0, init=False)
    """Seconds that the parts took."""
    _sums: MetricAccumulator = field(factory=MetricAccumulator, init=False)
    """Sums of the policy's terms, and all metrics that are not sums."""
    _value_sums: MetricAccumulator = field(factory=MetricAccumulator, init=False)
    _value_gradients: dict[str, torch.Tensor | None] = field(factory=dict, init=False)
    _parts: list[TrajectoryPart] = field(factory=list, init=False)
    """Samples that are kept for further epochs."""
    _checked: bool = field(default=False, init=False)
    """True once the loss was compared with those of halved weights."""
    _not_linear: dict[str, torch.Tensor] = field(factory=dict, init=False)
    """Metric -> whether it differed, on the device. The host reads it in `check_linear`, where it waits anyway."""
    _failed: bool = field(default=False, init=False)

    @contextmanager
    def accumulate_part(self, part: TrajectoryPart) -> Iterator[None]:
        """Context in which the micro-batches of one part are added. If it fails, further use is refused."""
        before = perf_counter()
        self._check_usable()
        self._failed = True
        yield
        self._failed = False
        if self.keep_samples:
            self._parts.append(part)
        self.seconds += perf_counter() - before

    def _check_usable(self) -> None:
        if self._failed:
            raise RuntimeError("an earlier part of this training step failed")

    def add_batch(self, scores: Scores, batch: Batch, counts: bool = True) -> None:
        """Run the backward passes of a micro-batch, whose weights are not divided yet.

        Args:
            counts: False for a dummy batch with weight 0, which lets a rank keep step with the others.
        """
        loss = self.loss(scores, batch)
        value_loss = None
        if batch.value_weights is not None:
            value_loss = self.loss(scores, evolve(batch, weights=torch.zeros_like(batch.weights)))
        if counts and not self._checked:
            self._compare_halved(scores, batch, loss, value_loss)
            self._checked = True
        if value_loss is None:
            loss.total.backward()
        else:  # two backward passes over one graph: the policy's terms into `grad`, then the critic's into theirs
            (loss.total - value_loss.total).backward(retain_graph=True)
            self._swap_gradients()
            value_loss.total.backward()
            self._swap_gradients()
        if counts:
            value_metrics = {} if value_loss is None else _loss_metrics(value_loss)
            policy_metrics = {name: value - value_metrics.get(name, 0.0) for name, value in _loss_metrics(loss).items()}
            self._sums.add_sums(policy_metrics)
            self._sums.add(loss.maxima, loss.statistics)  # they are of both losses, so they are added once
            self._value_sums.add_sums(value_metrics)

    def normalise_gradients(self, step: OptimizerStep, metrics: MetricAccumulator, steps: int) -> torch.Tensor:
        """Turn sums of gradients into one gradient; add to `metrics` of `steps` optimiser steps. Return the loss."""
        self._check_usable()
        for name, parameter in self.parameters.items():
            value = self._value_gradients.get(name)
            if parameter.grad is not None:
                parameter.grad.div_(step.divisor)
            if value is not None:
                value.div_(step.value_divisor)
                parameter.grad = value if parameter.grad is None else parameter.grad.add_(value)
        normalised = MetricAccumulator({"loss/total": torch.zeros(())})
        normalised.add_sums(self._sums.sums, step.divisor)
        normalised.add_sums(self._value_sums.sums, step.value_divisor)
        metrics.add_sums(normalised.sums, steps)
        metrics.add(self._sums.maxima, self._sums.statistics)
        return normalised.sums["loss/total"]

    def plan_epochs(
        self, steps: Sequence[OptimizerStep]
    ) -> tuple[ModelInputs | None, SampleFields, list[OptimizerStep]]:
        """Return all parts' samples, joined, and the optimiser steps; later ones use the micro-batches of all."""
        self._check_usable()
        if not self._parts:
            return None, {}, list(steps)
        micro_batches: list[Array] = []
        start = 0
        for part in self._parts:
            micro_batches += [start + indices for indices in part.micro_batches]
            start += 0 if part.inputs is None else len(part.inputs)
        passes = sum(part.passes for part in self._parts)
        fields = {name: _join_arrays([part.fields[name] for part in self._parts]) for name in self._parts[0].fields}
        inputs = [part.inputs for part in self._parts if part.inputs is not None]
        further = [evolve(step, micro_batches=tuple(micro_batches), passes=passes) for step in steps[1:]]
        return (ModelInputs.concat(inputs) if inputs else None), fields, [steps[0], *further]

    def _swap_gradients(self) -> None:
        """Exchange the policy's and the critic's sums of gradients."""
        for name, parameter in self.parameters.items():
            policy_gradient = parameter.grad
            parameter.grad = self._value_gradients.get(name)
            self._value_gradients[name] = policy_gradient

    @torch.no_grad()
    def _compare_halved(self, scores: Scores, batch: Batch, loss: Loss, value_loss: Loss | None) -> None:
        """Compare the loss with those of half the policy's or critic's weights, which must halve its terms."""
        metrics = _loss_metrics(loss)
        value_metrics = {} if value_loss is None else _loss_metrics(value_loss)
        half = self.loss(scores, evolve(batch, weights=batch.weights / 2))
        expected = {name: (value + value_metrics.get(name, 0.0)) / 2 for name, value in metrics.items()}
        self._compare_metrics(_loss_metrics(half), expected, metrics)
        if value_loss is not None and batch.value_weights is not None:
            zeros = torch.zeros_like(batch.weights)
            half = self.loss(scores, evolve(batch, weights=zeros, value_weights=batch.value_weights / 2))
            self._compare_metrics(
                _loss_metrics(half), {name: value / 2 for name, value in value_metrics.items()}, value_metrics
            )

    def _compare_metrics(
        self,
        metrics: Mapping[str, torch.Tensor],
        expected: Mapping[str, torch.Tensor],
        sizes: Mapping[str, torch.Tensor],
    ) -> None:
        """Note where a metric differs from the expected one by more than rounding of terms of these sizes."""
        for name, tensor in expected.items():
            value = tensor.double()
            half = metrics[name].double() if name in metrics else torch.full_like(value, torch.inf)
            # 1e-6, as terms that cancel leave rounding errors where the sum is 0.
            tolerance = LINEAR * (sizes[name].double().abs() + value.abs()) + 1e-6
            differs = (half - value).abs() > tolerance
            self._not_linear[name] = differs | self._not_linear.get(name, torch.zeros_like(differs))

    def check_linear(self) -> None:
        """Raises PluginError if a term of the loss was not linear in its weights. The host waits for the device."""
        if not self._not_linear:
            return
        for name, differs in zip(self._not_linear, torch.stack(list(self._not_linear.values())).tolist(), strict=True):
            if differs:
                raise PluginError(
                    f"the algorithm says advantage_scope GROUP, and its {name} is not linear in the batch's "
                    f"weights and value weights, so that asynchrony.streaming_update cannot normalise it at the "
                    f"end; return sums of loss terms times weights, or leave out advantage_scope"
                )


def _loss_metrics(loss: Loss) -> dict[str, torch.Tensor]:
    return {"loss/total": loss.total.detach(), **loss.metrics}


def _join_arrays(arrays: Sequence[Array | None]) -> Array | None:
    present = [array for array in arrays if array is not None]
    return np.concatenate(present) if present else None
