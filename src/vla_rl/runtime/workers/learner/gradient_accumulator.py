"""One optimiser step whose samples come in parts, and whose divisors are known at its end alone.

A loss is linear in its weights: what those of the policy contribute to gradients and metrics, and what those of the
critic do, are sums that may be divided after they were added up. Each has its own divisor, so that with a critic there
are two sums, and two backward passes over one forward pass.
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
from vla_rl.core.types import Array, Batch, Loss, Scores, Statistic
from vla_rl.runtime.messages.learning import OptimizerStep
from vla_rl.runtime.messages.model_inputs import ModelInputs

Light = Mapping[str, "Array | None"]
LINEAR = 1e-3
"""By how much of its terms a loss may differ from a linear one: rounding of sums."""


@define(eq=False)
class MetricAccumulator:
    """What losses say beside their gradients."""

    sums: dict[str, torch.Tensor] = field(factory=dict)
    maxima: dict[str, torch.Tensor] = field(factory=dict)
    statistics: dict[str, Statistic] = field(factory=dict)

    def add_sums(self, metrics: Mapping[str, torch.Tensor], divisor: float = 1.0) -> None:
        for name, value in metrics.items():
            self.sums[name] = self.sums.get(name, torch.zeros((), device=value.device)) + value / divisor

    def add(self, maxima: Mapping[str, torch.Tensor], statistics: Mapping[str, Statistic]) -> None:
        for name, value in maxima.items():
            self.maxima[name] = torch.maximum(self.maxima[name], value) if name in self.maxima else value
        for name, statistic in statistics.items():
            found = self.statistics.get(name)
            self.statistics[name] = statistic if found is None else found + statistic


@define(eq=False)
class GradientAccumulator:
    parameters: Mapping[str, nn.Parameter]
    """Their `grad` holds the policy's sum; in the end, the gradient."""
    loss: Callable[[Scores, Batch], Loss]
    keep: bool
    """There are further epochs, which need the parts again."""
    seconds: float = field(default=0.0, init=False)
    """That the parts took."""
    _sums: MetricAccumulator = field(factory=MetricAccumulator, init=False)
    """The policy's, and all that is no sum."""
    _value_sums: MetricAccumulator = field(factory=MetricAccumulator, init=False)
    _value_gradients: dict[str, torch.Tensor | None] = field(factory=dict, init=False)
    _parts: list[tuple[ModelInputs | None, Light, Sequence[Array], int]] = field(factory=list, init=False)
    _checked: bool = field(default=False, init=False)
    _broken: bool = field(default=False, init=False)

    @contextmanager
    def part(
        self, heavy: ModelInputs | None, light: Light, micro_batches: Sequence[Array], passes: int
    ) -> Iterator[None]:
        """Whose micro-batches are added meanwhile. Nothing goes on from one that failed."""
        before = perf_counter()
        self._check_whole()
        self._broken = True
        yield
        self._broken = False
        if self.keep:
            self._parts.append((heavy, light, micro_batches, passes))
        self.seconds += perf_counter() - before

    def _check_whole(self) -> None:
        if self._broken:
            raise RuntimeError("an earlier part of this training step failed")

    def add(self, scores: Scores, batch: Batch, counts: bool = True) -> None:
        """The backward passes of a micro-batch, whose weights are not divided.

        Args:
            counts: False: only for its gradient of 0, of a rank that keeps step with others.
        """
        whole, value = self.loss(scores, batch), None
        if batch.value_weights is not None:
            value = self.loss(scores, evolve(batch, weights=torch.zeros_like(batch.weights)))
        if counts and not self._checked:
            self._check_linear(scores, batch, whole, value)
            self._checked = True
        if value is None:
            whole.total.backward()
        else:
            (whole.total - value.total).backward(retain_graph=True)
            self._swap()
            value.total.backward()
            self._swap()
        if counts:
            of_values = {} if value is None else _numbers(value)
            policy = {name: number - of_values.get(name, 0.0) for name, number in _numbers(whole).items()}
            self._sums.add_sums(policy)
            self._sums.add(whole.maxima, whole.statistics)  # each entry once
            self._value_sums.add_sums(of_values)

    def divide(self, step: OptimizerStep, tally: MetricAccumulator, steps: int) -> torch.Tensor:
        """Make the sums of gradients one gradient, and add the rest to the tally of so many optimiser steps.
        -> the loss."""
        self._check_whole()
        for name, parameter in self.parameters.items():
            value = self._value_gradients.get(name)
            if parameter.grad is not None:
                parameter.grad.div_(step.divisor)
            if value is not None:
                value.div_(step.value_divisor)
                parameter.grad = value if parameter.grad is None else parameter.grad.add_(value)
        found = MetricAccumulator({"loss/total": torch.zeros(())})
        found.add_sums(self._sums.sums, step.divisor)
        found.add_sums(self._value_sums.sums, step.value_divisor)
        tally.add_sums(found.sums, steps)
        tally.add(self._sums.maxima, self._sums.statistics)
        return found.sums["loss/total"]

    def again(self, steps: Sequence[OptimizerStep]) -> tuple[ModelInputs | None, Light, list[OptimizerStep]]:
        """The parts that were kept, as one, and the same optimiser steps: those after the first go over its
        micro-batches."""
        self._check_whole()
        if not self._parts:
            return None, {}, list(steps)
        micro_batches, start = list[Array](), 0
        for heavy, _, indices, _ in self._parts:
            micro_batches += [start + of_batch for of_batch in indices]
            start += 0 if heavy is None else len(heavy)
        passes = sum(passes for _, _, _, passes in self._parts)
        light = {name: _joined([part[1][name] for part in self._parts]) for name in self._parts[0][1]}
        there = [heavy for heavy, _, _, _ in self._parts if heavy is not None]
        further = [evolve(step, micro_batches=tuple(micro_batches), passes=passes) for step in steps[1:]]
        return (ModelInputs.concat(there) if there else None), light, [steps[0], *further]

    def _swap(self) -> None:
        """Exchange the sums of the policy's and the critic's gradients."""
        for name, parameter in self.parameters.items():
            parameter.grad, self._value_gradients[name] = self._value_gradients.get(name), parameter.grad

    @torch.no_grad()
    def _check_linear(self, scores: Scores, batch: Batch, whole: Loss, value: Loss | None) -> None:
        """With half the weights of the policy, and with half those of the critic, there is half as much of each part.
        Raises PluginError where there is not."""
        of_all, of_values = _numbers(whole), {} if value is None else _numbers(value)
        half = self.loss(scores, evolve(batch, weights=batch.weights / 2))
        wanted = {name: (number + of_values.get(name, 0.0)) / 2 for name, number in of_all.items()}
        pairs = [(_numbers(half), wanted, of_all)]
        if value is not None and batch.value_weights is not None:
            nothing = torch.zeros_like(batch.weights)
            half = self.loss(scores, evolve(batch, weights=nothing, value_weights=batch.value_weights / 2))
            pairs.append((_numbers(half), {name: number / 2 for name, number in of_values.items()}, of_values))
        for found, wanted, size in pairs:
            for name, number in wanted.items():
                most = LINEAR * float(abs(size[name]) + abs(number)) + 1e-6
                if name not in found or float(abs(found[name] - number)) > most:
                    raise PluginError(
                        f"the algorithm says scope 'group', and its {name} is not linear in the batch's weights and "
                        f"value weights, so that asynchrony.stream cannot divide it at the end; return sums of entries "
                        f"times weights, or leave out scope"
                    )


def _numbers(loss: Loss) -> dict[str, torch.Tensor]:
    return {"loss/total": loss.total.detach(), **loss.metrics}


def _joined(arrays: Sequence[Array | None]) -> Array | None:
    there = [array for array in arrays if array is not None]
    return np.concatenate(there) if there else None
